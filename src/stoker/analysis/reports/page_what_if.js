// What if: sliders, the prediction for where they stand, and speed as a curve over each quantity.
"use strict";

const PLACE_NAMES = {
  batch: "whole batches",
  "after-augmentation": "examples, after augmentation",
  "before-augmentation": "examples, before augmentation",
};

const whatIf = {
  change: { ...NOTHING },

  start() {
    this.change = { ...NOTHING, echo_at: measured.after_s[0][0] };
    this.asked = quantities();
    this.positions = {};
    fill(
      "controls",
      ...Object.entries(this.asked).map(([name, asked]) => this.control(name, asked)),
      el(
        "button",
        { type: "button", id: "reset", onclick: () => this.reset() },
        "Back to the job as it is",
      ),
    );
    const drawn = Object.entries(this.asked).filter(([, asked]) => asked.points && !asked.missing);
    fill(
      "curves",
      ...drawn.map(([name, asked]) =>
        el(
          "div",
          { className: "curve" },
          el(
            "h3",
            {},
            `Speed over ${asked.label[0].toLowerCase()}${asked.label.slice(1).split(",")[0]}`,
          ),
          el("div", { className: "chart", id: `curve-${name}`, role: "img" }),
          el(
            "details",
            {},
            el("summary", {}, "As a table"),
            el("div", { className: "scroll" }, el("table", { id: `table-${name}` })),
          ),
        ),
      ),
    );
    const key = (kind, style, text) => el("span", {}, el("i", { className: kind, style }), text);
    fill(
      "key",
      key("dot", "border-color: var(--text)", "the job as it is"),
      key("", "border-color: var(--muted)", "all else as it is"),
      key("", "border-color: var(--accent); border-top-width: 3px", "all else as set above"),
      ...(this.asked.cache.missing
        ? []
        : [
            key(
              "",
              "border-color: var(--accent); border-top-style: dotted",
              "a page cache of that size (LRU)",
            ),
          ]),
    );
    this.reset();
  },

  control(name, asked) {
    const id = `slider-${name}`;
    const slider = el("input", {
      type: "range",
      id,
      min: asked.min,
      max: asked.max,
      step: asked.step,
      disabled: Boolean(asked.missing),
      oninput: () => this.set(name, Number(slider.value)),
    });
    const also = [];
    if (asked.missing) also.push(el("small", {}, asked.missing));
    if (name === "jobs") {
      const box = el("input", {
        type: "checkbox",
        id: "sharing",
        onchange: () => {
          this.change.sharing = box.checked;
          this.update();
        },
      });
      also.push(
        el("label", { className: "also", htmlFor: "sharing" }, box, "they share one preparation"),
      );
    }
    if (name === "storage" && measured.packed.length > 0) {
      const orders = measured.packed.map(([order]) =>
        el("option", { value: order }, `packed into shards, read ${order}`),
      );
      const select = el(
        "select",
        {
          id: "records",
          "aria-label": "How the files lie",
          onchange: () => {
            this.change.records = select.value;
            this.update();
          },
        },
        el("option", { value: "" }, "single files, as they are"),
        ...orders,
      );
      also.push(el("div", { className: "also" }, select));
    }
    if (name === "echo") {
      const places = measured.after_s.map(([place]) =>
        el("option", { value: place }, PLACE_NAMES[place] || place),
      );
      const select = el(
        "select",
        {
          id: "echo-at",
          "aria-label": "What is echoed",
          onchange: () => {
            this.change.echo_at = select.value;
            this.update();
          },
        },
        ...places,
      );
      also.push(el("div", { className: "also" }, "of", select));
    }
    return el(
      "div",
      { className: "control" },
      el("label", { htmlFor: id }, asked.label),
      el("output", { id: `${id}-value`, htmlFor: id }, asked.missing ? "not known" : ""),
      slider,
      ...also,
    );
  },

  reset() {
    for (const [name, asked] of Object.entries(this.asked)) {
      this.positions[name] = asked.position;
      Object.assign(this.change, asked.none);
      byId(`slider-${name}`).value = asked.position;
    }
    this.change.sharing = byId("sharing").checked = false;
    this.change.records = "";
    if (byId("records")) byId("records").value = "";
    this.update();
  },

  set(name, position) {
    this.positions[name] = position;
    Object.assign(this.change, this.at(name, position));
    this.update();
  },

  at(name, position) {
    const asked = this.asked[name];
    return position === asked.position ? asked.none : asked.change(position);
  },

  unit() {
    return this.change.echo > 1 ? "uses/s" : perSecond();
  },

  update() {
    const [before, after] = [predict(measured, NOTHING), predict(measured, this.change)];
    const { jobs } = this.change;
    for (const [name, asked] of Object.entries(this.asked)) {
      if (asked.missing) continue;
      const text = asked.format(this.positions[name]);
      byId(`slider-${name}-value`).textContent = text;
      byId(`slider-${name}`).setAttribute("aria-valuetext", text);
    }
    const unit = this.unit();
    byId("rate").textContent = rate(after.rate);
    byId("rate").dataset.value = after.rate;
    byId("rate-unit").textContent = jobs > 1 ? `${unit} for each of ${jobs} jobs` : unit;
    byId("compared").textContent =
      `${(after.rate / before.rate).toFixed(2)}× the speed as it is. What limits: ${after.bound}.`;
    fill("predicted-split", splitBar(after, true));
    fill("predicted-legend", splitLegend(after));
    this.compare(before, after, unit);
    fill("remarks", ...this.remarks(after).map((remark) => el("p", {}, remark)));
    window.cancelAnimationFrame(this.waiting);
    this.waiting = window.requestAnimationFrame(() => this.draw());
  },

  remarks(after) {
    const { cache_bytes, jobs, sharing, echo, hosts } = this.change;
    const held = cachedFraction(measured, this.change);
    const remarks = [];
    if (cache_bytes !== null) {
      const x = cachedFraction(measured, { ...this.change, hosts: 1 });
      const other = predictWithPageCache(measured, this.change);
      remarks.push(
        `This cache misses ${percent(1 - held)} of the reads, for it never evicts; a page cache ` +
          `of that size misses ${percent(pageCacheMisses(x))} and gives ${rate(other.rate)}/s.`,
      );
    }
    if (hosts > 1) {
      const other = predict(measured, { ...this.change, hosts: 1 });
      remarks.push(
        `${hosts} hosts with a partitioned cache hold ${percent(held)} of the dataset; a host finds ` +
          `${percent(held / hosts)} of its reads in its own memory and ` +
          `${percent(held - held / hosts)} in others', over ${rate(NOTHING.network_mbps)} MB/s ` +
          "(assumed). Speeds are of one host, with storage as fast as here. With a cache each, " +
          `hosts would run at ${rate(other.rate)}/s.`,
      );
    }
    if (jobs > 1) {
      const other = predict(measured, { ...this.change, sharing: !sharing });
      remarks.push(
        "Each job has an accelerator of its own. " +
          (sharing ? "Each on its own" : "Sharing one preparation") +
          `, they would run at ${rate(other.rate)}/s each.`,
      );
    }
    if (echo > 1) {
      remarks.push(
        `${rate(after.fresh_rate)} fresh ${perSecond()} of these. A repeat may be worth less than ` +
          "a fresh example: uses/s are not progress by themselves.",
      );
    }
    return remarks;
  },

  compare(before, after, unit) {
    const needs = (change, found) => findCacheNeeded(measured, change, found);
    const share = (x) => (x === null ? "not known" : percent(x));
    const size = datasetBytes(measured);
    const cores = (change, found) => findCoresNeeded(measured, change, found) || "beyond reach";
    const fetch = (found) => (found.fetch === Infinity ? "not known" : rate(found.fetch));
    const row = (name, of) => [name, of(before, NOTHING), of(after, this.change)];
    table(
      byId("predicted"),
      "The prediction beside the job as it is",
      ["", "as it is", "as set"],
      [
        row(unit, (found) => rate(found.rate)),
        ...(this.change.echo > 1
          ? [row(`fresh ${perSecond()}`, (found) => rate(found.fresh_rate))]
          : []),
        row("steps/s", (found) => String(Number(found.steps_per_s.toPrecision(3)))),
        row("what limits", (found) => found.bound),
        row("F, fetch", fetch),
        row("P, preparation", (found) => rate(found.prep)),
        row("G, training", (found) => rate(found.ingestion)),
        row("H, host's processors", (found) => rate(found.processors)),
        row("x*, enough cache", (found, change) => share(needs(change, found))),
        ...(size && needs(NOTHING, before) !== null
          ? [row("x* in bytes", (found, change) => bytes(needs(change, found) * size))]
          : []),
        row("enough cores for P", (found, change) => cores(change, found)),
      ],
    );
  },

  draw() {
    const unit = this.unit();
    for (const [name, asked] of Object.entries(this.asked)) {
      if (!asked.points || asked.missing) continue;
      const x = asked.at || ((value) => value);
      const here = this.positions[name];
      const positions = [...new Set([...asked.points, asked.position, here])].sort((a, b) => a - b);
      const along = (change, of) =>
        positions.map((value) => [x(value), of({ ...change, ...this.at(name, value) })]);
      const speed = (change) => predict(measured, change).rate;
      const live = along(this.change, speed);
      drawCurve({
        id: `curve-${name}`,
        log: asked.log,
        title: asked.title,
        ticks: asked.ticks,
        format: asked.tick,
        unit,
        names: new Map(positions.map((value) => [x(value), asked.format(value)])),
        baseline: along(NOTHING, speed),
        live,
        beside:
          asked.page && along(this.change, (change) => predictWithPageCache(measured, change).rate),
        measured: [x(asked.position), speed(NOTHING)],
        now: [x(here), speed(this.change)],
      });
      // Whole octaves, tenths, or some ten counts.
      const every = asked.log ? 8 : Math.ceil(asked.points.length / 11);
      const shown = asked.points.filter((_, i) => i % every === 0);
      const rows = [...new Set([...shown, asked.position, here])].sort((a, b) => a - b);
      table(
        byId(`table-${name}`),
        asked.title,
        [asked.title, unit, "what limits"],
        rows.map((value) => {
          const found = predict(measured, { ...this.change, ...this.at(name, value) });
          const mark = value === asked.position ? " (as it is)" : value === here ? " (as set)" : "";
          return [asked.format(value) + mark, rate(found.rate), found.bound];
        }),
      );
      byId(`curve-${name}`).setAttribute(
        "aria-label",
        `${asked.title}: from ${rate(live[0][1])}/s at ${asked.format(positions[0])} to ` +
          `${rate(live.at(-1)[1])}/s at ${asked.format(positions.at(-1))}; ` +
          `as set ${rate(speed(this.change))}/s. The table below has the values.`,
      );
    }
  },
};
