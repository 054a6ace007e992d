// Pictures: what is drawn by Plotly, in the page's colours, for reading rather than for zooming.
"use strict";

// Widths on paper, which are not known before it is printed.
const PAPER_PX = { full: 660, half: 320 };
let printing = false;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function draw(id, traces, layout, width = "half") {
  const axis = {
    gridcolor: colour("grid"),
    linecolor: colour("line"),
    zeroline: false,
    fixedrange: true,
    automargin: true,
    tickfont: { size: 12 },
  };
  const font = {
    family: getComputedStyle(document.body).fontFamily,
    size: 13,
    color: colour("muted"),
  };
  const whole = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font,
    showlegend: false,
    dragmode: false,
    hovermode: "closest",
    margin: { l: 48, r: 14, t: 8, b: 40 },
    ...layout,
    hoverlabel: {
      bgcolor: colour("raised"),
      bordercolor: colour("line"),
      font: { color: colour("text") },
    },
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
  };
  for (const { title } of [whole.xaxis, whole.yaxis]) if (title) title.font = { size: 12 };
  const target = document.getElementById(id);
  whole.width = printing ? PAPER_PX[width] : target.clientWidth;
  Plotly.react(target, traces, whole, { displayModeBar: false });
}

// Plotly reads some HTML in its words; what comes from the report has none.
function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

const BOUND_RATES = { compute: "G", prep: "P", fetch: "F", processors: "H" };
const BOUND_COLOURS = { compute: "compute", prep: "prep", fetch: "fetch", processors: "accent" };

// `rows`: {letter, label, value, low, high}, value null where it is not known.
function drawRates(rows, bound, unit) {
  const known = rows.filter((row) => row.value !== null);
  const limits = (row) => row.letter === BOUND_RATES[bound];
  const points = known.map((row) => {
    const shown = colour(limits(row) ? BOUND_COLOURS[bound] : "muted");
    return {
      type: "scatter",
      mode: "markers",
      x: [row.value],
      y: [row.label],
      marker: { color: shown, size: limits(row) ? 13 : 8 },
      error_x: {
        symmetric: false,
        array: [row.high - row.value],
        arrayminus: [row.value - row.low],
        color: shown,
        thickness: 2,
        width: 6,
      },
      hovertemplate: `${rate(row.value)} (${rate(row.low)} to ${rate(row.high)})<extra></extra>`,
    };
  });
  const annotations = known.map((row) => ({
    x: Math.log10(row.value),
    y: row.label,
    yshift: 17,
    showarrow: false,
    text: limits(row) ? `<b>${rate(row.value)}: limits</b>` : rate(row.value),
    font: { size: 12, color: colour(limits(row) ? "text" : "muted") },
  }));
  const ends = known.flatMap((row) => [row.low, row.high]).filter((value) => value > 0);
  const span = ends.length
    ? [Math.log10(Math.min(...ends)) - 0.35, Math.log10(Math.max(...ends)) + 0.35]
    : [0, 3];
  draw(
    "rates-chart",
    points,
    {
      height: 70 + 58 * rows.length,
      annotations,
      xaxis: {
        type: "log",
        range: span,
        title: { text: `${plain(unit)} (logarithmic)` },
        dtick: "D2",
        tickformat: "~s",
      },
      yaxis: {
        type: "category",
        categoryorder: "array",
        categoryarray: rows.map((row) => row.label),
        range: [rows.length - 0.5, -0.7],
        showgrid: true,
      },
    },
    "full",
  );
}

// `curve`: {id, log, title, unit, ticks, names, baseline, live, beside, measured, now}; points are
// [x, rate], `names` tells what an x is called.
function drawCurve(curve) {
  const line = (points, style, name) => ({
    type: "scatter",
    mode: "lines",
    x: points.map(([x]) => x),
    y: points.map(([, y]) => y),
    line: style,
    customdata: points.map(([x]) => curve.names.get(x)),
    name,
    hovertemplate: "%{customdata}: %{y:,.0f}/s<extra>" + name + "</extra>",
  });
  const dot = (point, marker, name) => ({
    type: "scatter",
    mode: "markers",
    x: [point[0]],
    y: [point[1]],
    marker,
    name,
    customdata: [curve.names.get(point[0])],
    hovertemplate: "%{customdata}: %{y:,.0f}/s<extra>" + name + "</extra>",
  });
  const ground = colour("ground");
  const traces = [line(curve.baseline, { color: colour("muted"), width: 1.5 }, "as it is")];
  if (curve.beside)
    traces.push(
      line(curve.beside, { color: colour("accent"), width: 1.5, dash: "dot" }, "page cache"),
    );
  traces.push(line(curve.live, { color: colour("accent"), width: 2.5 }, "as set"));
  traces.push(dot(curve.now, { color: colour("accent"), size: 10 }, "as set"));
  const measured = { color: ground, size: 11, line: { color: colour("text"), width: 2.5 } };
  traces.push(dot(curve.measured, measured, "measured"));
  const most = Math.max(...traces.flatMap((trace) => trace.y));
  draw(curve.id, traces, {
    height: 270,
    xaxis: {
      type: curve.log ? "log" : "linear",
      title: { text: curve.title + (curve.log ? " (logarithmic)" : ""), standoff: 8 },
      ...curve.ticks,
    },
    yaxis: {
      range: [0, 1.1 * most],
      title: { text: plain(curve.unit), standoff: 6 },
      tickformat: "~s",
      nticks: 6,
    },
  });
}

function drawWaits(waits, names) {
  const rows = Math.max(14, Math.min(30, 900 / names.length));
  draw(
    "waits-chart",
    [
      {
        type: "bar",
        orientation: "h",
        base: waits.map((wait) => wait.at_s),
        x: waits.map((wait) => wait.wait_s),
        y: waits.map((wait) => workerName(wait.worker)),
        width: 0.62,
        marker: { color: colour("accent"), line: { color: colour("accent"), width: 1 } },
        customdata: waits.map((wait) => seconds(wait.wait_s)),
        hovertemplate: "at %{base:.2f} s: waited %{customdata}<extra></extra>",
      },
    ],
    {
      height: 80 + rows * names.length,
      bargap: 0.2,
      xaxis: { title: { text: "seconds since the first request" }, rangemode: "tozero" },
      yaxis: {
        type: "category",
        categoryorder: "array",
        categoryarray: [...names].reverse(),
        range: [-0.6, names.length - 0.4],
      },
    },
    "full",
  );
}

function workerName(worker) {
  return worker < 0 ? "training" : `worker ${worker}`;
}

// Words for numbers.

function rate(value) {
  if (value === null || value === Infinity) return "no limit";
  return value >= 100
    ? value.toLocaleString("en-US", { maximumFractionDigits: 0 })
    : String(Number(value.toPrecision(3)));
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function seconds(value) {
  if (value >= 10) return `${value.toFixed(1)} s`;
  return value >= 0.1 ? `${value.toFixed(2)} s` : `${(1000 * value).toPrecision(2)} ms`;
}

function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (count < 1024 || unit === "TiB")
      return `${unit === "B" ? Math.round(count) : count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
  return "";
}
