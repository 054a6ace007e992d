// The page: what the report says, part by part.
"use strict";

let report, measured;

// JSON has no infinity: where storage is known, and the page cache is not, that is no limit.
function fromJson(measured) {
  const limitless = measured.storage !== null && measured.cache === null;
  return limitless ? { ...measured, cache: Infinity } : measured;
}

// What is counted: examples, or items where the dataset yields ready-made batches.
const perSecond = () => `${report.loader.unit}/s`;

function showHead() {
  const loader = report.loader;
  byId("job").textContent = `stoker analysis of ${report.command.join(" ")} · ${loader.name}`;
  const [headline, ...rest] = report.verdict.split(/(?<=\.) /);
  byId("verdict").textContent = headline;
  byId("findings").textContent = rest.join(" ");
  byId("about").textContent =
    `${loader.describes}; ${report.cores} cores, ` +
    `${bytes(report.memory_bytes)} of memory` +
    (report.ranks.length > 1 ? `; speeds are those of one of ${report.ranks.length} ranks.` : ".");
  const figures = [];
  const figure = (name, value, also) =>
    figures.push(el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, also))));
  const now = measured && predict(measured, NOTHING);
  const seen = report.as_it_is;
  if (seen)
    figure(
      "Speed as it is",
      `${rate(seen.rate.value)}/s`,
      `${loader.unit}, from ${rate(seen.rate.low)} to ${rate(seen.rate.high)}`,
    );
  else if (now) figure("Speed, predicted", `${rate(now.rate)}/s`, loader.unit);
  figure("Time in compute", percent(report.split.compute), "of an epoch");
  figure(
    "What limits",
    report.bound,
    report.bound === "compute" ? "data arrive in time" : "see the rates below",
  );
  if (report.rates.G)
    figure("Never waiting", `${rate(report.rates.G.value)}/s`, "what training could take in");
  if (seen) figure("Start", seconds(seen.startup_s), "to the first batch, apart from the above");
  fill("figures", ...figures);
  const host = el("p", { className: "muted" });
  if (report.bound === "processors")
    host.textContent = "What the host's processors cannot give counts as prep stall.";
  fill("split", splitBar(report.split), splitLegend(report.split, report.split_intervals), host);
}

function showRanks() {
  if (report.ranks.length < 2) return fill("ranks");
  const shown = el("table");
  const value = (found) => (found ? rate(found.value) : "—");
  table(
    shown,
    "Ranks",
    ["Rank", "G", "P", "S", "C", "F", "Compute", "Prep", "Fetch", "Own wait", "For others"],
    report.ranks.map(({ rank, rates, split, wait_fraction, others_fraction }) => [
      rank,
      ...["G", "P", "S", "C", "F"].map((letter) => value(rates[letter])),
      ...SPLIT.map(([key]) => percent(split[key])),
      percent(wait_fraction),
      percent(others_fraction),
    ]),
  );
  const box = el("div", { className: "scroll" }, shown);
  box.style.marginTop = "20px";
  fill("ranks", box);
}

function showActions() {
  byId("no-actions").hidden = report.actions.length > 0;
  fill(
    "actions",
    ...report.actions.map(({ title, code, gain, why, condition }) =>
      el(
        "li",
        {},
        el(
          "div",
          { className: "gain" },
          `${gain.value.toFixed(2)}×`,
          el("small", {}, `${gain.low.toFixed(2)} to ${gain.high.toFixed(2)}`),
        ),
        el("h3", {}, condition ? `${condition}: ${title}` : title),
        el("pre", {}, el("code", {}, code)),
        el("p", { className: "muted" }, why),
      ),
    ),
  );
}

const RATES = [
  ["S", "storage", "storage gives"],
  ["C", "page cache", "page cache gives"],
  ["F", "fetch", "fetch as it is"],
  ["P", "prep", "preparation gives"],
  ["G", "training", "training takes"],
];

function rateRows() {
  const rows = RATES.map(([letter, name, what]) => {
    const found = report.rates[letter];
    return {
      letter,
      name,
      what,
      label: `${name} ${letter}`,
      ...(found || { value: null, low: null, high: null }),
    };
  });
  if (report.bound === "processors" && measured) {
    const value = predict(measured, NOTHING).processors;
    rows.push({
      letter: "H",
      name: "host",
      what: "the host's processors allow",
      label: "host H",
      value,
      low: value,
      high: value,
    });
  }
  return rows;
}

function showRates() {
  const rows = rateRows();
  const limiting = BOUND_RATES[report.bound];
  table(
    byId("rates-table"),
    "The rates with their intervals",
    ["Rate", perSecond(), "Interval"],
    rows.map(({ letter, name, what, value, low, high }) =>
      value === null
        ? [`${letter}, ${name}: ${report.reasons[letter] || "not measured"}`, "not known", ""]
        : [
            `${letter}, ${what}${letter === limiting ? ": limits" : ""}`,
            rate(value),
            `${rate(low)}–${rate(high)}`,
          ],
    ),
    ([what]) => what.startsWith(`${limiting},`),
  );
  const told = rows
    .filter((row) => row.value !== null)
    .map((row) => `${row.letter} ${rate(row.value)}`);
  byId("rates-chart").setAttribute(
    "aria-label",
    `Rates in ${perSecond()}: ${told.join(", ")}; ${limiting} limits.`,
  );
  let text = "";
  if (measured && report.as_it_is && report.predicted) {
    const now = predict(measured, NOTHING);
    const seen = rate(report.as_it_is.rate.value);
    text = `From these rates the job as it is should run at ${rate(report.predicted)}/s; it ran at ${seen}/s.`;
    if (rate(report.predicted) !== seen)
      text +=
        " What is predicted below is calibrated to that: " +
        `F is taken as ${rate(now.fetch)}, P as ${rate(now.prep)}.`;
  }
  byId("rates-summary").textContent = text;
}

function showPreparing() {
  const found = report.preparing;
  byId("preparing-section").hidden = !found;
  if (!found) return;
  const samples = `${found.samples} samples of the workers' stacks in ${found.batches} batches`;
  byId("preparing-text").textContent = `${found.text}; by ${samples}, with the data in memory.`;
  table(
    byId("preparing-table"),
    "Pieces of the work of preparing",
    found.work.length ? ["Work", "Share", "95 % interval"] : [],
    found.work.map(({ name, share, interval }) => [name, percent(share), within(interval)]),
  );
  showFlame(found.frames);
}

function showWaits() {
  const waits = report.as_it_is ? report.as_it_is.waits : [];
  byId("waits-section").hidden = waits.length === 0;
  if (!waits.length) return;
  const workers = [...new Set(waits.map((wait) => wait.worker))].sort((a, b) => a - b);
  const sum = (found) => found.reduce((total, wait) => total + wait.wait_s, 0);
  const longest = waits.reduce((most, wait) => (wait.wait_s > most.wait_s ? wait : most));
  const whose = longest.worker < 0 ? "preparing by itself" : `for ${workerName(longest.worker)}`;
  const text =
    `In the first ${waits.length} batches training waited ${seconds(sum(waits))} in all; ` +
    `longest ${seconds(longest.wait_s)}, ${whose}.`;
  byId("waits-summary").textContent = `${text} Each bar is one wait.`;
  byId("waits-chart").setAttribute("aria-label", text);
  table(
    byId("waits-table"),
    "Waits by worker",
    ["Worker", "Batches", "Waited for", "Longest"],
    workers.map((worker) => {
      const own = waits.filter((wait) => wait.worker === worker);
      return [
        workerName(worker),
        own.length,
        seconds(sum(own)),
        seconds(Math.max(...own.map((wait) => wait.wait_s))),
      ];
    }),
  );
}

// The trial of packing: reading the files, and reading them from shards.
function packingFacts() {
  const found = report.packing;
  if (!found) return [];
  const sample = `${found.sample_files} files, ${bytes(found.sample_bytes)}, nothing in memory`;
  const ways = [
    ["Files read one by one", found.one_by_one, found.epoch_files],
    ["The same from a shard, by offset", found.by_offset, found.epoch_files],
    ["The same from a shard, in runs of a MiB", found.in_runs, found.epoch_runs],
  ];
  return ways
    .filter(([, gives]) => gives)
    .map(([name, gives, reads]) => [
      `${name} (${sample})`,
      `${rate(gives.value)}/s` +
        (reads === null ? "" : `; ${reads.toLocaleString("en-US")} reads an epoch`),
    ]);
}

function showNotes() {
  const missing = Object.entries(report.reasons).map(
    ([letter, why]) => `${letter} is not known: ${why}`,
  );
  const notes = [...report.notes, ...missing];
  fill(
    "notes",
    ...(notes.length ? notes : ["Nothing was left out."]).map((note) => el("li", {}, note)),
  );
  const known = (value, shown) =>
    value === null || value === undefined ? "not known" : shown(value);
  table(
    byId("facts"),
    "Facts",
    [],
    [
      ["Examples an epoch", known(report.examples, (n) => n.toLocaleString("en-US"))],
      ["Bytes an example", known(report.example_bytes, bytes)],
      ["Found in the page cache", known(report.cached_fraction, percent)],
      ...packingFacts(),
      ["Cold drain", known(report.cold, (found) => `${rate(found.value)}/s`)],
      ["A worker's wait for an example that is not in memory", seconds(report.miss_s)],
      ["Copy of a batch to the device, a part of G", known(report.copy_s, seconds)],
      ["Processor time of training, an example", seconds(report.step_cpu_s)],
      ...report.prep.map((point) => [
        `Processor time of preparing an example, ${point.workers} workers`,
        seconds(point.cpu_s),
      ]),
      ...report.loaders.map((loader) => [
        `Loader ${loader.name}`,
        `${loader.describes}; ${loader.batches} batches`,
      ]),
    ],
  );
  const interval = (found) => [rate(found.value), `${rate(found.low)}–${rate(found.high)}`];
  table(
    byId("prep-table"),
    "Preparation by workers",
    ["Workers", `P, ${perSecond()}`, "Interval"],
    report.prep.map((point) => [point.workers, ...interval(point.rate)]),
  );
  const stages = Object.entries(report.stages);
  table(
    byId("stages-table"),
    "Stages",
    stages.length ? ["Stage on one worker", perSecond(), "Interval"] : [],
    stages.map(([name, found]) => [name, ...interval(found)]),
  );
  byId("phases").textContent = report.phases.length ? JSON.stringify(report.phases, null, 1) : "";
  byId("made").textContent =
    `Made by stoker ${report.stoker} on ${report.made}: ` +
    `${seconds(report.seconds)}, ${report.starts} starts of the script. ` +
    "This page is one file and loads nothing.";
}

function drawAll() {
  drawRates(rateRows(), report.bound, perSecond());
  if (measured) whatIf.draw();
  const waits = report.as_it_is ? report.as_it_is.waits : [];
  if (waits.length) {
    const workers = [...new Set(waits.map((wait) => wait.worker))].sort((a, b) => a - b);
    drawWaits(waits, workers.map(workerName));
  }
}

function show(data) {
  report = data.report;
  measured = data.measured && fromJson(data.measured);
  showHead();
  showRanks();
  showActions();
  showRates();
  showPreparing();
  showWaits();
  showNotes();
  byId("model").hidden = !measured;
  byId("no-model").hidden = Boolean(measured);
  byId("no-model").textContent = data.refused || "";
  if (measured) whatIf.start();
  drawAll();
}

show(JSON.parse(byId("data").textContent));

const onPaper = (now) => {
  printing = now;
  document.documentElement.toggleAttribute("data-paper", now);
  drawAll();
};
window.addEventListener("beforeprint", () => onPaper(true));
window.addEventListener("afterprint", () => onPaper(false));
let drawnPx = document.body.clientWidth;
new ResizeObserver(() => {
  if (document.body.clientWidth === drawnPx || printing) return;
  drawnPx = document.body.clientWidth;
  drawAll();
}).observe(document.body);
