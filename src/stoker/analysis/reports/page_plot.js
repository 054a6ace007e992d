// A plot: scales, axes and what is said under the pointer; drawn as SVG, coloured by page.css.
"use strict";

// Widths on paper, which are not known before it is printed.
const PAPER_PX = { full: 660, half: 320 };
const CHARACTER_PX = 7.2;
let printing = false;

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A scale takes values from `low` to `high` to pixels; `ticks(count)` are about as many round values.
function scale(low, high, log) {
  const bend = log ? Math.log10 : (value) => value;
  const [from, to] = [bend(low), bend(high)];
  const made = (value) => {
    const [first, last] = made.pixels;
    return first + ((bend(value) - from) / (to - from || 1)) * (last - first);
  };
  made.pixels = [0, 1];
  made.ticks = (count) => (log ? logTicks(low, high, count) : linearTicks(low, high, count));
  return made;
}

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((by) => by * power).find((by) => by >= rough * 0.999);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++)
    ticks.push(n * step);
  return ticks;
}

function logTicks(low, high, count) {
  const decades = [];
  for (let n = Math.floor(Math.log10(low)); n <= Math.ceil(Math.log10(high)); n++) decades.push(n);
  for (const parts of [[1, 2, 5], [1, 3], [1]]) {
    const ticks = decades.flatMap((n) => parts.map((part) => part * 10 ** n));
    const seen = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    if (seen.length <= count) return seen;
    if (parts.length === 1) {
      const every = Math.ceil(seen.length / count);
      return seen.filter((_, i) => i % every === 0);
    }
  }
  return [];
}

// 1500 is 1.5k.
function short(value) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (value >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
  return String(Number(value.toPrecision(3)));
}

// Draw axes into an element, and return where to draw: {plot, width, left, right, top, bottom}.
// An axis: {scale, title, ticks: [values], format}; `rows` are the names on a y axis without scale.
function axes(id, { height, x, y, rows, size = "half" }) {
  const target = byId(id);
  const width = printing ? PAPER_PX[size] : Math.max(200, target.clientWidth);
  const yTicks = rows ? rows.map((name, i) => [i, name]) : y.ticks.map((at) => [at, y.format(at)]);
  const longest = Math.max(...yTicks.map(([, text]) => text.length));
  const left = Math.min(width / 3, 14 + CHARACTER_PX * longest);
  const [right, top, bottom] = [width - 22, rows ? 10 : 30, height - 46];
  x.scale.pixels = [left, right];
  const place = rows
    ? (i) => top + ((i + 0.5) * (bottom - top)) / rows.length
    : ((y.scale.pixels = [bottom, top]), y.scale);
  const text = (words, attributes) => {
    const made = svg("text", attributes);
    made.textContent = words;
    return made;
  };
  const plot = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  for (const [at, words] of yTicks) {
    const py = place(at);
    plot.append(
      svg("line", { class: "grid", x1: left, x2: right, y1: py, y2: py }),
      text(words, { class: "ytick", x: left - 8, y: py, dy: "0.35em", "text-anchor": "end" }),
    );
  }
  let free = -Infinity;
  for (const at of x.ticks) {
    const px = x.scale(at);
    const words = x.format(at);
    const half = (CHARACTER_PX * words.length) / 2;
    plot.append(svg("line", { class: "grid", x1: px, x2: px, y1: top, y2: bottom }));
    if (px - half < free) continue; // words that would touch the ones before
    free = px + half + 6;
    const tick = svg("g", { class: "xtick" });
    tick.append(text(words, { x: px, y: bottom + 17, "text-anchor": "middle" }));
    plot.append(tick);
  }
  plot.append(
    svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    text(x.title, { class: "title", x: (left + right) / 2, y: height - 8, "text-anchor": "middle" }),
  );
  if (y && y.title) plot.append(text(y.title, { class: "title", x: 0, y: 14 }));
  target.replaceChildren(plot);
  return { target, plot, text, place, width, left, right, top, bottom };
}

// Have `found(x, y)` say what is under the pointer: {x, y, marks: [[class, x, y]], head, lines},
// or null. Lines are [class of a swatch, text].
function hover({ target, plot, width, top, bottom }, found) {
  const rule = svg("line", { class: "rule", y1: top, y2: bottom });
  const marks = svg("g");
  const tip = el("div", { className: "tip" });
  tip.hidden = true;
  rule.style.display = "none";
  plot.append(rule, marks);
  target.append(tip);
  const leave = () => {
    tip.hidden = true;
    rule.style.display = "none";
    marks.replaceChildren();
  };
  plot.addEventListener("pointerleave", leave);
  const move = (event) => {
    const box = plot.getBoundingClientRect();
    const seen = found(event.clientX - box.left, event.clientY - box.top);
    if (!seen) return leave();
    rule.style.display = seen.marks ? "" : "none";
    rule.setAttribute("x1", seen.x);
    rule.setAttribute("x2", seen.x);
    marks.replaceChildren(
      ...(seen.marks || []).map(([kind, cx, cy]) => svg("circle", { class: kind, cx, cy, r: 4 })),
    );
    tip.replaceChildren(
      el("b", {}, seen.head),
      ...seen.lines.map(([kind, words]) =>
        el("span", {}, ...(kind ? [el("i", { className: kind })] : []), words),
      ),
    );
    tip.hidden = false;
    const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
    const beside = seen.x + 14 + wide <= width ? seen.x + 14 : seen.x - 14 - wide;
    tip.style.left = `${Math.max(0, beside)}px`;
    tip.style.top = `${Math.max(0, seen.y - high - 10)}px`;
  };
  plot.addEventListener("pointermove", move);
  plot.addEventListener("pointerdown", move);
}

function nearest(values, at, place) {
  const distance = (value) => Math.abs(place(value) - at);
  return values.reduce((best, value) => (distance(value) < distance(best) ? value : best));
}
