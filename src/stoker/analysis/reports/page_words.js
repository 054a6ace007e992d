// Words for numbers.
"use strict";

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
