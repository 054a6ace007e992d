// The formulas of model.py, name by name; tests/analysis/test_page.py holds the two together.
"use strict";

const FED = 0.05;

// JSON has no infinity: where storage is known, and the page cache is not, that is no limit.
function fromJson(measured) {
  const limitless = measured.storage !== null && measured.cache === null;
  return limitless ? { ...measured, cache: Infinity } : measured;
}

const inverse = (value) => (value <= 0 ? Infinity : value === Infinity ? 0 : 1 / value);

function fetchRate(cachedFraction, storage, cache) {
  return inverse(cachedFraction / cache + (1 - cachedFraction) / storage);
}

function loaderRate(fetch, prep, waitingS) {
  return inverse(Math.max(inverse(fetch), inverse(prep) + waitingS));
}

function smallestCache(storage, cache, prep, ingestion, missS) {
  const target = Math.min(ingestion, loaderRate(cache, prep, 0)) * (1 - 1e-9);
  const enough = (x) => loaderRate(fetchRate(x, storage, cache), prep, (1 - x) * missS) >= target;
  if (enough(0)) return 0;
  let [low, high] = [0, 1];
  for (let round = 0; round < 50; round++) {
    const middle = (low + high) / 2;
    if (enough(middle)) high = middle;
    else low = middle;
  }
  return high;
}

function pageCacheMisses(cachedFraction) {
  const t = 1 - Math.min(1, Math.max(0, cachedFraction));
  return t > 0 ? t - t * Math.log(t) : 0;
}

function prepRate(curve, workers) {
  if (workers === 0 && curve[0][0] === 0) return curve[0][1];
  let points = curve.filter(([count]) => count > 0);
  if (points.length === 0) points = [[1, curve[0][1]]];
  workers = Math.max(1, workers);
  const [first, last] = [points[0], points[points.length - 1]];
  if (workers <= first[0]) return (first[1] * workers) / first[0];
  for (let i = 1; i < points.length; i++) {
    const [[fewer, low], [more, high]] = [points[i - 1], points[i]];
    if (workers <= more) return low + ((high - low) * (workers - fewer)) / (more - fewer);
  }
  return (last[1] * workers) / last[0];
}

// What `Change()` is in Python.
const NOTHING = Object.freeze({
  cores: null,
  cache_bytes: null,
  storage_mbps: null,
  accelerator: 1,
  jobs: 1,
  sharing: false,
  echo: 1,
  echo_at: "batch",
});

function cachedFraction(measured, change) {
  if (change.cache_bytes === null || !measured.example_bytes || !measured.examples)
    return measured.cached_fraction;
  return Math.min(1, change.cache_bytes / (measured.example_bytes * measured.examples));
}

function storageRate(measured, change) {
  if (change.storage_mbps !== null && measured.example_bytes)
    return (change.storage_mbps * 1e6) / measured.example_bytes;
  if ((change.cores || 0) > Math.max(1, measured.workers))
    return measured.storage_most || measured.storage;
  return measured.storage;
}

function cacheRate(measured, change) {
  if (measured.cache === null || (change.cores || 0) <= Math.max(1, measured.workers))
    return measured.cache;
  return Math.max(measured.cache, measured.storage_most || 0);
}

function missSeconds(measured, change) {
  if (change.storage_mbps === null || !measured.example_bytes || !measured.storage)
    return measured.miss_s;
  const workers = Math.max(1, measured.workers);
  const share = Math.min(1, (measured.miss_s * measured.storage) / workers);
  const faster = (change.storage_mbps * 1e6) / measured.example_bytes / measured.storage;
  return measured.miss_s * (1 - share + share / faster);
}

function prepCpuSeconds(curve, workers) {
  return curve.length > 0 ? between(curve, workers) : 0;
}

function between(points, at) {
  if (at <= points[0][0]) return points[0][1];
  for (let i = 1; i < points.length; i++) {
    const [[fewer, low], [more, high]] = [points[i - 1], points[i]];
    if (at <= more) return low + ((high - low) * (at - fewer)) / (more - fewer);
  }
  return points[points.length - 1][1];
}

function behindS(measured, place) {
  const found = measured.after_s.find(([name]) => name === place);
  return found ? found[1] : 0;
}

function predict(measured, change) {
  const echo = change.echo;
  const many = change.sharing ? 1 : change.jobs;
  const ingestion = measured.ingestion * change.accelerator;

  const workers = change.cores !== null ? change.cores : measured.workers;
  const alone = workers === 0;
  const freshPrepS = inverse(prepRate(measured.prep, workers));
  const behind = Math.min(behindS(measured, change.echo_at) / Math.max(1, workers), freshPrepS);
  const share = (freshPrepS - behind) / echo + behind;
  const divided = alone ? 1 : many;
  const prepS = divided * share;

  const x = cachedFraction(measured, change);
  let [fetchS, waitingS] = [0, 0];
  if (measured.storage !== null && measured.cache !== null) {
    const storage = storageRate(measured, change);
    fetchS = (many * inverse(fetchRate(x, storage, cacheRate(measured, change)))) / echo;
    waitingS = missSeconds(measured, change) / Math.max(1, workers);
    waitingS *= (divided * (1 - x)) / echo;
  }
  const loader = loaderRate(inverse(fetchS), inverse(prepS), waitingS);

  const cores = Math.max(measured.cores, change.cores || 0);
  const stepCpuS = measured.step_cpu_s / (measured.trains_on_cpu ? change.accelerator : 1);
  const prepCpuS =
    prepCpuSeconds(measured.prep_cpu, workers) * (freshPrepS > 0 ? share / freshPrepS : 1);
  const processors = inverse((change.jobs * stepCpuS + many * prepCpuS) / cores);

  const reached = measured.efficiency.length > 0 ? between(measured.efficiency, workers) : 1;
  const trained = (fetch, waiting) => {
    if (alone) {
      const given = loaderRate(fetch, inverse(prepS), waiting);
      return reached * Math.min(processors, inverse(inverse(ingestion) + inverse(given)));
    }
    const unfetched = loaderRate(Infinity, inverse(prepS), waiting);
    return Math.min(fetch, reached * Math.min(ingestion, processors, unfetched));
  };
  const warm = trained(Infinity, 0);
  const rate = trained(inverse(fetchS), waitingS);
  const compute = rate / ingestion;
  let fetchStall = 1 - rate / warm;
  let prepStall = Math.max(0, 1 - compute - fetchStall);

  let bound;
  if (compute > 1 - FED) bound = "compute";
  else if (alone) bound = fetchStall > prepStall ? "fetch" : "prep";
  else if (fetchStall > 1e-9 && (fetchS >= prepS || prepStall <= 1e-9)) bound = "fetch";
  else bound = processors < Math.min(ingestion, inverse(prepS)) ? "processors" : "prep";
  if (measured.prep_fetches) {
    [fetchStall, prepStall] = [fetchStall + prepStall, 0];
    if (bound === "prep") bound = "fetch";
  }
  return {
    rate,
    fresh_rate: rate / echo,
    steps_per_s: rate / measured.batch_size,
    bound,
    fetch: inverse(fetchS),
    prep: inverse(prepS),
    ingestion,
    processors,
    loader,
    compute,
    prep_stall: prepStall,
    fetch_stall: fetchStall,
  };
}

function predictWithPageCache(measured, change) {
  const x = 1 - pageCacheMisses(cachedFraction(measured, change));
  return predict({ ...measured, cached_fraction: x }, { ...change, cache_bytes: null });
}

// From questions.py.

const MOST_CORES = 1024;

function datasetBytes(measured) {
  if (!measured.example_bytes || !measured.examples) return null;
  return measured.example_bytes * measured.examples;
}

function cacheNeeded(measured, change, prediction) {
  const storage = storageRate(measured, change);
  const cache = cacheRate(measured, change);
  if (storage === null || cache === null) return null;
  const uses = change.echo / (change.sharing ? 1 : change.jobs);
  const overlaps = measured.workers > 0 || change.cores !== null;
  const takes = overlaps ? Math.min(prediction.ingestion, prediction.processors) : Infinity;
  const workers = Math.max(1, change.cores !== null ? change.cores : measured.workers);
  return smallestCache(
    storage * uses,
    cache * uses,
    prediction.prep,
    takes,
    (missSeconds(measured, change) / workers) / uses,
  );
}

function coresNeeded(measured, change, prediction) {
  const wanted = Math.min(prediction.fetch, prediction.ingestion) * (1 - 1e-9);
  for (let cores = 1; cores <= MOST_CORES; cores++)
    if (predict(measured, { ...change, cores }).prep >= wanted) return cores;
  return null;
}
