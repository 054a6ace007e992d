// Pieces of the page: elements whose text is text, tables, and the bar that splits the time.
"use strict";

const byId = (id) => document.getElementById(id);

// Names and paths come from the report: they are set as text, never parsed.
function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

function fill(id, ...children) {
  byId(id).replaceChildren(...children);
}

// A table; the first cell of a row is its name, the others are numbers.
function table(target, caption, head, rows, limits = () => false) {
  const cell = (tag, text, column, more = {}) =>
    el(tag, { className: column === 0 ? "" : "number", ...more }, text);
  const lines = rows.map((row) =>
    el(
      "tr",
      { className: limits(row) ? "limits" : "" },
      ...row.map((text, column) =>
        column === 0 ? cell("th", text, column, { scope: "row" }) : cell("td", text, column),
      ),
    ),
  );
  const top = head.map((text, column) => cell("th", text, column, { scope: "col" }));
  target.replaceChildren(
    ...(head.length ? [el("thead", {}, el("tr", {}, ...top))] : []),
    el("tbody", {}, ...lines),
  );
  target.setAttribute("aria-label", caption);
}

const SPLIT = [
  ["compute", "compute", "Compute"],
  ["prep_stall", "prep", "Prep stall"],
  ["fetch_stall", "fetch", "Fetch stall"],
];

function splitBar(split, small) {
  const told = SPLIT.map(([key, , name]) => `${name} ${percent(split[key])}`).join(", ");
  const bar = el("div", {
    className: small ? "bar small" : "bar",
    role: "img",
    "aria-label": told,
  });
  for (const [key, kind] of SPLIT) {
    const share = split[key];
    if (share <= 0) continue;
    const part = el(
      "span",
      { className: kind },
      share >= 0.09 ? `${(100 * share).toFixed(0)} %` : "",
    );
    part.style.flex = `${share} 0 0`;
    bar.append(part);
  }
  return bar;
}

// A share with its interval, if it has one.
function within(interval) {
  if (!interval) return "";
  return ` ${(100 * interval.low).toFixed(0)} to ${(100 * interval.high).toFixed(0)} %`;
}

function splitLegend(split, intervals) {
  return el(
    "ul",
    { className: "legend" },
    ...SPLIT.map(([key, kind, name]) =>
      el(
        "li",
        {},
        el("i", { className: kind }),
        name,
        el("b", {}, percent(split[key])),
        el("small", {}, within(intervals && intervals[key])),
      ),
    ),
  );
}
