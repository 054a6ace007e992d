// What can be asked about: how the position of a slider becomes a change, and how it is drawn.
"use strict";

const range = (from, to, count) =>
  Array.from({ length: count + 1 }, (_, i) => from + ((to - from) * i) / count);

// One entry a quantity: how a slider's position becomes a change, and what its curve looks like.
// `position` is where the job as it was measured stands; there, the change is none at all.
function quantities() {
  const now = predict(measured, NOTHING);
  const known = measured.storage !== null && measured.cache !== null;
  const size = datasetBytes(measured);
  const found =
    known && measured.example_bytes ? (measured.storage * measured.example_bytes) / 1e6 : null;
  const workers = measured.workers;
  const most = Math.min(
    256,
    Math.max(8, 2 * workers, 2 * (findCoresNeeded(measured, NOTHING, now) || 0)),
  );
  const unknown = "Fetching could not be told apart from preparation: see the notes.";
  const power = (value) => 2 ** value;
  return {
    cores: {
      label: "Cores, a worker on each",
      position: workers,
      min: workers ? 1 : 0,
      max: most,
      step: 1,
      change: (value) => ({ cores: value === 0 ? null : value }),
      none: { cores: null },
      format: (value) =>
        value === 0 ? "none: training prepares" : `${value} core${value === 1 ? "" : "s"}`,
      title: "cores",
      points: range(workers ? 1 : 0, most, most - (workers ? 1 : 0)),
    },
    cache: {
      label: "Cache that never evicts",
      position: measured.cached_fraction,
      min: 0,
      max: 1,
      step: 0.001,
      missing: !known
        ? unknown
        : size
          ? ""
          : "The report does not know how many bytes the dataset takes.",
      change: (x) => ({ cache_bytes: Math.round(x * size) }),
      none: { cache_bytes: null },
      format: (x) => `${(100 * x).toFixed(x > 0 && x < 0.1 ? 1 : 0)} % = ${bytes(x * size)}`,
      title: "cached share of the dataset",
      points: range(0, 1, 100),
      tick: (x) => `${Math.round(100 * x)} %`,
      page: true,
    },
    storage: {
      label: "Storage bandwidth",
      position: 0,
      min: -2,
      max: 6,
      step: 0.05,
      log: true,
      missing: !known
        ? unknown
        : found
          ? ""
          : "The report does not know how many bytes an example takes.",
      change: (value) => ({ storage_mbps: found * power(value) }),
      none: { storage_mbps: null },
      format: (value) => `${rate(found * power(value))} MB/s`,
      at: (value) => found * power(value),
      title: "MB/s",
      points: range(-2, 6, 64),
    },
    accelerator: {
      label: "Accelerator",
      position: 0,
      min: -2,
      max: 4,
      step: 0.05,
      log: true,
      change: (value) => ({ accelerator: power(value) }),
      none: { accelerator: 1 },
      format: (value) => `${rate(power(value))}× as fast`,
      at: power,
      title: "times as fast",
      points: range(-2, 4, 48),
      ticks: [0.25, 0.5, 1, 2, 4, 8, 16],
      tick: (value) => `${{ 0.25: "¼", 0.5: "½" }[value] || value}×`,
    },
    jobs: {
      label: "Jobs at a time on this host",
      position: 1,
      min: 1,
      max: 16,
      step: 1,
      change: (value) => ({ jobs: value }),
      none: { jobs: 1 },
      format: String,
    },
    hosts: {
      label: "Hosts whose caches are one",
      position: 1,
      min: 1,
      max: 16,
      step: 1,
      missing: !known
        ? unknown
        : measured.example_bytes
          ? ""
          : "The report does not know how many bytes an example takes.",
      change: (value) => ({ hosts: value }),
      none: { hosts: 1 },
      format: String,
    },
    echo: {
      label: "Echoing factor",
      position: 1,
      min: 1,
      max: 8,
      step: 0.25,
      change: (value) => ({ echo: value }),
      none: { echo: 1 },
      format: (value) => (value === 1 ? "no echo" : `${value} uses of each`),
    },
  };
}
