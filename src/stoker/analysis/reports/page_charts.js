// Pictures: the rates with their intervals, speed over a quantity, and when training waited.
"use strict";

const BOUND_RATES = { compute: "G", prep: "P", fetch: "F", processors: "H" };

// `rows`: {letter, label, value, low, high}, value null where it is not known.
function drawRates(rows, bound, unit) {
  const known = rows.filter((row) => row.value !== null);
  const ends = known.flatMap((row) => [row.low, row.value, row.high]).filter((value) => value > 0);
  const [low, high] = ends.length ? [Math.min(...ends) / 2, Math.max(...ends) * 2] : [1, 1000];
  const x = scale(low, high, true);
  const drawn = axes("rates-chart", {
    height: 66 + 58 * rows.length,
    x: { scale: x, title: `${unit} (logarithmic)`, ticks: x.ticks(8), format: short },
    rows: rows.map((row) => row.label),
    size: "full",
  });
  rows.forEach((row, i) => {
    if (row.value === null) return;
    const limits = row.letter === BOUND_RATES[bound];
    const [at, y] = [x(row.value), drawn.place(i)];
    const [from, to] = [x(Math.max(row.low, low)), x(row.high)];
    const words = limits ? `${rate(row.value)}: limits` : rate(row.value);
    const half = (CHARACTER_PX * words.length) / 2;
    const middle = Math.min(Math.max(at, drawn.left + half), drawn.right - half);
    drawn.plot.append(
      svg(
        "g",
        { class: `interval ${limits ? `limits ${bound}` : ""}` },
        svg("path", { d: `M${from} ${y - 6}v12m0-6H${to}m0-6v12` }),
        svg("circle", { cx: at, cy: y, r: limits ? 6.5 : 4.5 }),
        drawn.text(words, { x: middle, y: y - 13, "text-anchor": "middle" }),
      ),
    );
  });
  if (!known.length) return;
  hover(drawn, (_, y) => {
    const i = nearest([...rows.keys()], y, drawn.place);
    const row = rows[i];
    if (row.value === null) return null;
    const interval = `95 %: ${rate(row.low)} to ${rate(row.high)}`;
    return {
      x: x(row.value),
      y: drawn.place(i),
      head: `${row.letter}, ${row.what}`,
      lines: [["", `${rate(row.value)} ${unit}`], ["", interval]],
    };
  });
}

// `curve`: {id, log, title, unit, ticks, format, names, baseline, live, beside, measured, now};
// points are [x, rate], `names` tells what an x is called.
function drawCurve(curve) {
  const lines = [
    ["as-it-is", "all else as it is", curve.baseline],
    ...(curve.beside ? [["page-cache", "a page cache", curve.beside]] : []),
    ["as-set", "all else as set", curve.live],
  ];
  const values = curve.live.map(([value]) => value);
  const most = Math.max(...lines.flatMap(([, , points]) => points.map(([, speed]) => speed)));
  const x = scale(values[0], values.at(-1), curve.log);
  const y = scale(0, 1.08 * most, false);
  const drawn = axes(curve.id, {
    height: 280,
    x: {
      scale: x,
      title: curve.title + (curve.log ? " (logarithmic)" : ""),
      ticks: curve.ticks || x.ticks(7),
      format: curve.format || short,
    },
    y: { scale: y, title: curve.unit, ticks: y.ticks(5), format: short },
  });
  const path = (points) => "M" + points.map(([value, speed]) => `${x(value)} ${y(speed)}`).join("L");
  const dot = (kind, [value, speed]) =>
    svg("circle", { class: `series ${kind}`, cx: x(value), cy: y(speed), r: 5 });
  drawn.plot.append(
    ...lines.map(([kind, , points]) => svg("path", { class: `series ${kind}`, d: path(points) })),
    dot("as-set", curve.now),
    dot("measured", curve.measured),
  );
  hover(drawn, (px) => {
    const value = nearest(values, px, x);
    const seen = lines.map(([kind, name, points]) => {
      const [, speed] = points.find(([other]) => other === value);
      return [kind, name, speed];
    });
    const ys = seen.map(([, , speed]) => y(speed));
    return {
      x: x(value),
      y: Math.min(...ys),
      marks: seen.map(([kind], i) => [kind, x(value), ys[i]]),
      head: curve.names.get(value),
      lines: seen.map(([kind, name, speed]) => [kind, `${rate(speed)} ${curve.unit}, ${name}`]),
    };
  });
}

// `names` are those of the workers, from the top.
function drawWaits(waits, names) {
  const x = scale(0, Math.max(...waits.map((wait) => wait.at_s + wait.wait_s)) || 1, false);
  const high = names.length > 24 ? 14 : 26;
  const drawn = axes("waits-chart", {
    height: 66 + high * names.length,
    x: {
      scale: x,
      title: "seconds since the first request",
      ticks: x.ticks(8),
      format: short,
    },
    rows: names,
    size: "full",
  });
  const row = (wait) => drawn.place(names.indexOf(workerName(wait.worker)));
  for (const wait of waits) {
    const from = x(wait.at_s);
    const width = Math.max(1, x(wait.at_s + wait.wait_s) - from);
    const top = row(wait) - 0.31 * high;
    drawn.plot.append(svg("rect", { class: "wait", x: from, y: top, width, height: 0.62 * high }));
  }
  hover(drawn, (px, py) => {
    const here = waits.filter((wait) => Math.abs(row(wait) - py) <= high / 2);
    if (!here.length) return null;
    const wait = nearest(here, px, ({ at_s, wait_s }) => x(at_s + wait_s / 2));
    return {
      x: x(wait.at_s + wait.wait_s),
      y: row(wait),
      head: `waited ${seconds(wait.wait_s)}`,
      lines: [["", `${workerName(wait.worker)}, at ${seconds(wait.at_s)}`]],
    };
  });
}

function workerName(worker) {
  return worker < 0 ? "training" : `worker ${worker}`;
}
