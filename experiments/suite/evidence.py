"""docs/evidence.md: its tables are made of the stored rows.

They stand between `<!-- rows: ... -->` and `<!-- end -->`. What the first says is workload, and
which variant of it: `rows: fashion`, or `rows: fashion, without BatchNorm`. Between `<!-- bench:
... -->` and `<!-- end -->` stands the first table of a benchmark's docstring, which is made of its
rows; behind `<!-- summary: 4 -->` the speed-ups of all workloads at R = 4; and behind
`<!-- clock -->` the exact clock against real threads. Behind `<!-- equal time: NAME -->` stands a
table of trainings for equal time (`experiments.equal_time.tables`).
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from experiments.arms import Arm
from experiments.equal_time import tables as equal_time
from experiments.suite.prices import PATH as PRICES
from experiments.suite.prices import prices_text
from experiments.suite.rows import RESULTS, Rows
from experiments.suite.sentences import PAGES, with_sentences
from experiments.suite.summary import ArmSummary, Comparison, compared
from experiments.suite.tables import VOID, cells_of, clock_cells, markdown, ratio_text, sentence
from experiments.suite.workload import Recipe, Variant
from experiments.suite.workloads import NAMES, class_of

PAGE = RESULTS.parents[1] / "docs" / "evidence.md"
NOT_RUN = "*Not run yet.*"

_BENCH = RESULTS.parents[1] / "bench"
_SUMMARY_BLOCK = re.compile(r"(<!-- summary: (?P<ratio>\d+) -->\n).*?(<!-- end -->)", re.DOTALL)
_BENCH_BLOCK = re.compile(r"(<!-- bench: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_CLOCK_BLOCK = re.compile(r"(<!-- clock -->\n).*?(<!-- end -->)", re.DOTALL)
_EQUAL_TIME_BLOCK = re.compile(
    r"(<!-- equal time: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL
)
_BLOCK = re.compile(r"(<!-- rows: (?P<what>[^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str, results: Path = RESULTS) -> str:
    """Return a page with the tables of the rows there are.

    Raises ValueError for a block of an unknown workload or variant.
    """
    text = _BLOCK.sub(lambda m: m[1] + _block(m["what"], results) + m[3], text)
    text = _SUMMARY_BLOCK.sub(
        lambda m: m[1] + _summary_table(float(m["ratio"]), results) + m[3], text
    )
    text = _CLOCK_BLOCK.sub(lambda m: f"{m[1]}{markdown(clock_cells())}\n{m[2]}", text)
    text = _EQUAL_TIME_BLOCK.sub(
        lambda m: f"{m[1]}{markdown(equal_time.cells(m['name']))}\n{m[3]}", text
    )
    return _BENCH_BLOCK.sub(lambda m: m[1] + _bench_table(m["name"]) + m[3], text)


def write() -> list[Path]:
    """Write tables and sentences into the pages, figures beside them, and the analyzer's prices.

    Returns what was written.
    """
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(text), encoding="utf-8")
    for page in PAGES:
        page.write_text(with_sentences(page.read_text(encoding="utf-8")), encoding="utf-8")
    PRICES.write_text(prices_text(), encoding="utf-8")
    written = [*PAGES, PRICES]
    for match in _BLOCK.finditer(text):
        found, _ = _found(match["what"], RESULTS)
        if found is not None:
            # Here, so that tables need no matplotlib.
            from experiments.suite.figures import write_figure

            written.append(_figure(match["what"]))
            write_figure(written[-1], found, match["what"])
    return written


def _block(what: str, results: Path) -> str:
    found, recipe = _found(what, results)
    if found is None:
        return f"{NOT_RUN}\n"
    name = what.split(", ")[0]
    figure = _figure(what).relative_to(PAGE.parent).as_posix()
    return (
        f"{markdown(cells_of(found, class_of(name).metric))}\n\n"
        f"{sentence(found, recipe.budget_fresh)} Rows: `experiments/results/{name}.json`.\n\n"
        f"![{what}: test loss, rho and speed-ups]({figure})\n"
    )


def _summary_table(ratio: float, results: Path) -> str:
    """Return the speed-ups of some arms, a line for each workload that was run."""
    lines = []
    for name in NAMES:
        found, _ = _found(name, results)
        if found is None:
            continue
        transform = class_of(name).transforms[:1]
        chosen = [
            Arm("before", "auto", ratio),
            Arm("before", 4, 0.0),
            Arm("batch", 4, 0.0),
            Arm("loader", "auto", ratio),
            *(Arm("loader", "auto", ratio, each) for each in transform),
        ]
        by_arm = {each.arm: each for each in found.arms if ratio in each.speedups}
        cells = [_told(found, by_arm.get(arm), ratio) for arm in chosen]
        cells += [""] * (5 - len(cells))
        if transform:
            cells[-1] += f" ({transform[0]})"
        lines.append([name, f"{ratio:g}", *cells])
    head = [
        "workload",
        "R",
        "`.echo()` before augmentation",
        "the same, e = 4",
        "of batches, e = 4",
        "`stoker.echo(loader)`",
        "with `transform=`",
    ]
    return markdown((head, lines)) + "\n"


def _told(found: Comparison, each: ArmSummary | None, ratio: float) -> str:
    if each is None:
        return ""
    if found.is_void(each, ratio):
        return f"{VOID} (at most {found.bound(each, ratio):.2f})"
    return ratio_text(each.speedups[ratio])


def _bench_table(name: str) -> str:
    source = (_BENCH / f"{name}.py").read_text(encoding="utf-8")
    table = re.search(
        rf"^    \[results/{name}\.json\]\n(.*?)\n(?:\n|    \[end\])", source, re.M | re.S
    )
    if table is None:
        raise ValueError(f"bench/{name}.py has no table of rows")
    return f"```text\n{textwrap.dedent(table[1])}\n```\n"


def _found(what: str, results: Path) -> tuple[Comparison | None, Recipe]:
    name, _, variant_name = what.partition(", ")
    variant = variant_of(variant_name)
    recipe = class_of(name).recipe_of(variant, quick=False)
    return compared(Rows(results / f"{name}.json", name, variant.name, recipe)), recipe


def variant_of(name: str) -> Variant:
    """Return the variant of a name. Raises ValueError if there is none."""
    batch_size = re.search(r"B = (\d+)", name)
    pool_batches = re.search(r"pool of (\d+) batches", name)
    fresh_batches = re.search(r"(\d+) fresh batches", name)
    variant = Variant(
        batch_norm="without BatchNorm" not in name,
        momentum="without momentum" not in name,
        augmentation="without augmentation" not in name,
        small="small data" in name,
        batch_size=int(batch_size[1]) if batch_size else None,
        pool_batches=int(pool_batches[1]) if pool_batches else None,
        fresh_batches=int(fresh_batches[1]) if fresh_batches else None,
        by_steps="scheduled by steps" in name,
    )
    if variant.name != name:
        raise ValueError(f"there is no variant {name!r}; did you mean {variant.name!r}?")
    return variant


def _figure(what: str) -> Path:
    return PAGE.parent / "evidence" / (re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-") + ".svg")
