"""The experiments suite: rows, plans, what is made of rows, and a quick run of a workload."""

from __future__ import annotations

import io
import json
import re
import tarfile
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from experiments.arms import Arm, epoch_after_epoch
from experiments.suite import evidence, prices, sentences
from experiments.suite.__main__ import app
from experiments.suite.average_precision import average_precision, overlaps, suppressed
from experiments.suite.data import Files, MissingData, data_folder, find
from experiments.suite.exact_clock import ExactClock, exact_run
from experiments.suite.feeds import Counts, feed
from experiments.suite.figures import write_figure
from experiments.suite.plan import (
    BASELINE,
    TUNING_SEED,
    WARM_UPS,
    Plan,
    Settings,
    chosen_settings,
    name_of,
    timing_of,
    widened,
)
from experiments.suite.rows import CLOCK, Rows, Run, read_rows
from experiments.suite.summary import Comparison, compared
from experiments.suite.tables import VOID, cells_of, markdown, sentence
from experiments.suite.threads import CalibrationError, closest
from experiments.suite.training import schedule, trained_run
from experiments.suite.workload import Recipe, Variant, Workload
from experiments.suite.workloads import NAMES, class_of
from strategies import few, shortened

RECIPE = Recipe(batch_size=10, budget_fresh=100, learning_rates=(0.1, 0.2), evaluations=5)
FASHION = class_of("fashion")


def plan(*patterns: str, seeds: int = 2) -> Plan:
    return Plan.of(FASHION, RECIPE, patterns=patterns or ("*",), seeds=seeds)


def rows(path: Path, recipe: Recipe = RECIPE, variant: str = "") -> Rows:
    return Rows(path / "fashion.json", "fashion", variant, recipe)


def test_a_row_is_found_again_and_only_by_its_own_run(tmp_path: Path) -> None:
    run = Run("training", Arm("before", 4, 0.0), 3, 0.1)
    kept = rows(tmp_path)
    assert kept.find(run) is None
    kept.add(run, {"points": [[1, 10, 10, 0.5, 0.9]]})
    again = rows(tmp_path)
    found = again.find(run)
    assert found is not None
    assert found["points"] == [[1, 10, 10, 0.5, 0.9]]
    for other in (
        Run("tuning", run.arm, 3, 0.1),
        Run("training", Arm("before", 2, 0.0), 3, 0.1),
        Run("training", Arm("before", 4, 2.0), 3, 0.1),
        Run("training", run.arm, 4, 0.1),
        Run("training", run.arm, 3, 0.2),
    ):
        assert again.find(other) is None
    assert rows(tmp_path, variant="small data").find(run) is None


def test_rows_of_another_recipe_are_not_there_and_other_variants_stay(tmp_path: Path) -> None:
    run, other = Run("training", BASELINE, 0, 0.1), Run("training", BASELINE, 1, 0.1)
    rows(tmp_path).add(run, {"points": []})
    rows(tmp_path, variant="small data").add(run, {"points": []})
    newer = rows(tmp_path, Recipe(batch_size=20, budget_fresh=100, learning_rates=(0.1,)))
    assert newer.find(run) is None
    newer.add(other, {"points": []})
    assert [(r["variant"], r["seed"]) for r in read_rows(newer.path)] == [
        ("", 1),
        ("small data", 0),
    ]


def test_what_is_dropped_is_what_was_asked_for(tmp_path: Path) -> None:
    kept = rows(tmp_path)
    runs = [Run("training", BASELINE, 0, 0.1), Run("training", Arm("before", 4, 0.0), 0, 0.1)]
    for run in runs:
        kept.add(run, {"points": []})
    kept.drop([BASELINE])
    assert [kept.find(run) is None for run in runs] == [True, False]


def test_arms_are_tuned_alike_and_on_other_seeds() -> None:
    found = plan()
    tuned: dict[Arm, list[tuple[int, float | None, float]]] = {}
    for run in found.tuning():
        tuned.setdefault(run.arm, []).append((run.seed, run.learning_rate, run.warm_up))
    assert set(tuned) == set(found.arms)
    assert len({tuple(each) for each in tuned.values()}) == 1
    trained = found.training(dict.fromkeys(found.arms, Settings(0.1, 0.05)))
    assert not {run.seed for run in trained} & {run.seed for run in found.tuning()}
    assert {run.seed for run in found.tuning()} == {TUNING_SEED, TUNING_SEED + 1}


def test_what_trains_has_its_timing_planned() -> None:
    found = plan()
    timed = set(found.timing())
    for run in found.training(dict.fromkeys(found.arms, Settings(0.1, 0.05))):
        for ratio in found.ratios:
            assert timing_of(run, ratio) in timed
    for run in found.tuning():
        assert not run.arm.follows or timing_of(run, 4.0) in timed


def test_arms_are_chosen_by_name_and_the_baseline_is_always_there() -> None:
    assert [name_of(arm) for arm in plan("before-*").arms] == [
        "none", "before-2", "before-4", "before-auto", "before-auto",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"no arm is named befor; there are none, before-2"):
        plan("befor")
    named = Plan.of(FASHION, RECIPE, patterns=["loader*"], transforms=["mixup"], ratios=[4.0])
    assert [name_of(arm) for arm in named.arms] == ["none", "loader-auto", "loader+mixup-auto"]


def test_a_rate_is_the_best_of_its_arm(tmp_path: Path) -> None:
    found, kept = plan("before-2"), rows(tmp_path)
    for run in found.tuning():
        best = (0.2, 0.2) if run.arm == BASELINE else (0.1, 0.05)
        loss = 0.5 if (run.learning_rate, run.warm_up) == best else 0.6
        with pytest.raises(LookupError, match="not over"):
            chosen_settings(found, kept)
        kept.add(run, {"points": [[10, 90, 90, loss + 0.02, 0.9], [10, 100, 100, loss, 0.9]]})
    assert chosen_settings(found, kept) == {
        BASELINE: Settings(0.2, 0.2),
        Arm("before", 2, 0.0): Settings(0.1, 0.05),
    }


def test_a_grid_is_widened_until_the_best_is_inside() -> None:
    grid = [Settings(rate, warm_up) for rate in (0.1, 0.2, 0.4) for warm_up in WARM_UPS]
    assert widened(grid, Settings(0.2, 0.05)) == grid
    above = widened(grid, Settings(0.4, 0.05))
    assert above == [*grid, *(Settings(0.8, warm_up) for warm_up in WARM_UPS)]
    assert widened(above, Settings(0.4, 0.2)) == above
    assert widened(grid, Settings(0.1, 0.2))[-1].learning_rate == 0.05


def test_an_arm_that_is_tuned_anew_leaves_no_older_training(tmp_path: Path) -> None:
    kept = rows(tmp_path)
    for settings in ((0.1, 0.05), (0.1, 0.2)):
        kept.add(Run("training", BASELINE, 0, *settings), {"points": []})
    kept.add(Run("training", BASELINE, 1, 0.1), {"points": []})
    again = rows(tmp_path).of_kind("training")
    assert sorted((row["seed"], row["warm_up"]) for row in again) == [(0, 0.2), (1, 0.05)]


def written(path: Path, recipe: Recipe = RECIPE, slowed: float = 1.0) -> Rows:
    """Rows of training without echoing, of an arm that needs half as much, and one that misses.

    And of one that follows the stall, as good as the second. Without echoing storage is slower than
    planned, by a factor.
    """
    kept = rows(path, recipe)
    arms = {BASELINE: 1.0, Arm("before", 2, 0.0): 0.5, Arm("batch", 2, 0.0): 8.0}
    if slowed != 1.0:
        arms |= {Arm("before", "auto", ratio): 0.5 for ratio in (2.0, 4.0)}
    for arm, needs in arms.items():
        uses = 1 if arm == BASELINE else 2
        for seed in range(5):
            points = [
                [k * uses, 5 * k, 5 * uses * k, 10 - k / 4 / needs + seed / 100, 0.05 * k]
                for k in range(1, 21)
            ]
            kept.add(Run("training", arm, seed, 0.1), {"points": points, "digest": ""})
            for ratio in [arm.slowness] if arm.follows else [2.0, 4.0]:
                # A fresh batch every R steps of a second; steps are never the slower side.
                takes = ratio * (slowed if arm == BASELINE else 1.0)
                timing = [[*p[:3], p[1] / 10 * takes] for p in points]
                run = Run("timing", Arm(arm.place, arm.factor, ratio), seed)
                found = {"points": timing, "digest": "", "copy_distance": 9.0}
                kept.add(run, found)
    return kept


def test_rows_are_compared_seed_by_seed(tmp_path: Path) -> None:
    found = compared(written(tmp_path))
    assert found is not None
    assert found.ratios == (2.0, 4.0)
    assert found.target == pytest.approx(7.27), "the mean of the last tests at 60 fresh"
    base, before, batch = found.arms
    assert base.fresh_ratios.values == (1.0,) * 5
    # Twice as fast; but a mean that looks back lags by a test, whatever the arm.
    assert before.fresh_ratios.median == pytest.approx(12 / (11 / 2 + 1), rel=0.02)
    for ratio in (2.0, 4.0):
        assert before.speedups[ratio].median == before.fresh_ratios.median
    assert before.losses.median == pytest.approx(-4.75)
    assert (before.misses, batch.misses) == (0, 5)
    assert (batch.fresh_ratios.median, batch.steps) == (None, None)
    assert before.factor == 2.0


def test_tables_and_figures_are_of_the_rows_alone(tmp_path: Path) -> None:
    found = compared(written(tmp_path))
    assert found is not None
    text = markdown(cells_of(found, "accuracy"))
    lines = text.splitlines()
    assert len(lines) == 2 + 3
    assert "speed-up, R = 2" in lines[0]
    assert "missed" in lines[4]
    assert lines[4].endswith("| 5 of 5 |")
    assert "94% confidence" in sentence(found, 100)
    for name in ("a", "b"):
        write_figure(tmp_path / f"{name}.svg", found, "a title")
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert "before augmentation, e = 2" in drawn


@pytest.mark.full
def test_the_page_has_the_tables_of_its_rows() -> None:
    text = evidence.PAGE.read_text(encoding="utf-8")
    assert evidence.with_tables(text) == text, "experiments/run evidence writes them"
    assert prices.PATH.read_text(encoding="utf-8") == prices.prices_text()
    shown = re.findall(r"\]\((evidence/[^)]+)\)", text)
    assert all((evidence.PAGE.parent / name).exists() for name in shown)


def test_a_speed_up_that_cannot_be_enters_no_headline_and_no_price(tmp_path: Path) -> None:
    """Storage that is slower without echoing than with it makes any arm look fast."""
    recipe = class_of("fashion").recipe_of(Variant(), quick=False)
    for slowed, is_void in (
        (0.9, False),
        (1.5, True),
    ):  # 1.7 and 2.8 times as soon, at a rho of 1.8
        folder = tmp_path / f"{slowed}"
        found = compared(written(folder, recipe, slowed))
        assert found is not None
        for each in found.arms:
            for ratio in each.speedups:
                assert found.is_void(each, ratio) == (is_void and each.arm.place == "before")
        _, lines = cells_of(found, "accuracy")
        flagged = [cell for line in lines for cell in line if cell.endswith(VOID)]
        assert len(flagged) == (4 if is_void else 0)
        assert (VOID in sentence(found, 100)) == is_void
        page = "<!-- summary: 4 -->\n<!-- end -->\n"
        text = evidence.with_tables(page, folder)
        assert text.count(VOID) == text.count("at most 1.8") == (1 if is_void else 0)
        assert ("2.77" in text, "1.66" in text) == (False, not is_void)
        told = json.loads(prices.prices_text(folder))
        assert [price["speedup"] for price in told] == [None if is_void else 1.66] * 2
        assert [price["at_most"] for price in told] == [pytest.approx(1.85, rel=0.02)] * 2


@pytest.mark.full
def test_all_that_is_told_can_be() -> None:
    """No speed-up of any table is above rho; those above R are flagged, and in no price."""
    shown = re.findall(r"<!-- rows: ([^\n]*?) -->", evidence.PAGE.read_text(encoding="utf-8"))
    void = set()
    for what in shown:
        found = compared_of(what)
        for each in found.arms[1:]:
            for ratio, ratios in each.speedups.items():
                for value, rho in zip(ratios.values, each.fresh_ratios.values, strict=True):
                    assert value <= max(1.0, rho) + 1e-5, (what, each.arm, ratio)
                if (ratios.median or 0.0) > ratio:
                    assert found.is_void(each, ratio)
                    void.add((what, each.arm.place, each.arm.factor, ratio))
    assert {(what, ratio) for what, _, _, ratio in void} <= ABOVE_R
    for price in json.loads(prices.PATH.read_text(encoding="utf-8")):
        key = (price["workload"], price["kind"].split()[0], "auto", price["ratio"])
        assert (price["speedup"] is None) == (key in void)


ABOVE_R = {("words", 2.0)}
"""Where training without echoing was not at its best settings: to be run again."""


@pytest.mark.full
def test_words_follow_tables() -> None:
    for page in sentences.PAGES:
        text = page.read_text(encoding="utf-8")
        assert "<!-- said: " in text
        assert sentences.with_sentences(text) == text, "experiments/run evidence writes them"


def compared_of(what: str) -> Comparison:
    name, _, variant = what.partition(", ")
    return sentences.found_of(name, variant=evidence.variant_of(variant))


def test_a_block_of_the_page_is_made_of_its_rows(tmp_path: Path) -> None:
    page = "before\n<!-- rows: {} -->\nold\n<!-- end -->\nafter\n"
    empty = evidence.with_tables(page.format("fashion"), tmp_path)
    assert empty == page.format("fashion").replace("old", evidence.NOT_RUN)
    with pytest.raises(ValueError, match="no variant"):
        evidence.with_tables(page.format("fashion, with sugar"), tmp_path)


@pytest.mark.parametrize(
    "variant",
    [
        Variant(),
        Variant(batch_norm=False, momentum=False),
        Variant(augmentation=False, small=True, batch_size=128),
        Variant(pool_batches=4, fresh_batches=150, by_steps=True),
    ],
)
def test_a_variant_is_known_by_its_name(variant: Variant) -> None:
    assert evidence.variant_of(variant.name) == variant


def test_the_schedule_warms_up_and_ends_at_nothing() -> None:
    assert schedule(0.0) == 0.0
    assert schedule(0.05) == pytest.approx(1.0, abs=0.01)
    values = [schedule(p / 100) for p in range(6, 101)]
    assert values == sorted(values, reverse=True)
    assert schedule(1.0) == pytest.approx(0.0)


@cache
def fashion_once() -> Workload:
    return FASHION(Variant(), None)


@pytest.fixture
def fashion() -> Workload:
    return fashion_once()


ARMS = [
    Arm("before", "auto"),
    Arm("loader", "auto", transform="random_flip"),
    Arm("none"),
    *(Arm(point, 2) for point in ("before", "after", "batch")),
    Arm("loader", "auto"),
]


@pytest.mark.parametrize("arm", shortened(ARMS, 1), ids=lambda arm: arm.key)
def test_a_training_goes_through_the_steps_of_its_timing(fashion: Workload, arm: Arm) -> None:
    timed = exact_run(fashion, replace(arm, slowness=2.0), 3)
    trained = trained_run(fashion, arm, 3, 0.05, replay=timed["record"])
    assert trained["digest"] == timed["digest"]
    assert [p[:3] for p in trained["points"]] == [p[:3] for p in timed["points"]]
    assert timed["points"][-1][1] >= fashion.recipe.budget_fresh
    seconds = [p[3] for p in timed["points"]]
    assert seconds == sorted(seconds)
    assert 0 <= timed["waited_fraction"] < 1
    assert (timed["record"] is not None) == arm.follows


@pytest.mark.parametrize("place", shortened(["before", "loader"], 1))
def test_a_pool_that_goes_on_in_the_next_epoch_is_in_the_exact_clock(place: str) -> None:
    """An example of the epoch before leaves the pool where it comes anew."""
    made = FASHION(Variant(), None)
    made.train = [made.train[index] for index in range(205)]
    made.recipe = replace(made.recipe, budget_fresh=3 * 205)
    timed = exact_run(made, Arm(place, "auto", 3.0), 1)
    counts = Counts(made.recipe)
    fed = feed(made, Arm(place, "auto"), 1).replay(timed["record"])
    with closing(epoch_after_epoch(fed)) as batches:
        while not counts.is_over:
            next(batches)
            counts.add_of(fed)
    assert counts.digest == timed["digest"]


@given(
    arm=st.sampled_from(ARMS),
    ratio=st.sampled_from([0.5, 1.0, 1.7, 2.0, 4.0, 9.0]),
    seed=st.integers(0, 99),
)
@few(20)
def test_no_example_is_used_before_the_exact_clock_has_it(
    arm: Arm, ratio: float, seed: int
) -> None:
    workload = fashion_once()
    clock = ExactClock(workload, replace(arm, slowness=ratio), seed)
    step_s, size = workload.recipe.step_s, workload.recipe.batch_size
    fresh, ended_s = 0, 0.0
    for step in islice(clock.steps(), 60):
        fresh += step.fresh
        assert clock.supply.now == pytest.approx(ended_s + step.waited_s + step_s)
        ended_s = clock.supply.now
        assert ended_s >= fresh / size * ratio * step_s + step_s - 1e-9
        if not arm.echoes and ratio >= 1:
            assert ended_s == pytest.approx(fresh / size * ratio * step_s + step_s)


def test_decisions_of_another_run_are_repeated_by_the_exact_clock(fashion: Workload) -> None:
    arm = Arm("before", "auto", 3.0)
    decided = exact_run(fashion, arm, 2)
    again = exact_run(fashion, replace(arm, slowness=4.0), 2, decided["record"])
    assert again["digest"] == decided["digest"]
    assert again["record"] == decided["record"]
    assert again["points"][-1][3] > decided["points"][-1][3]


def test_real_threads_kept_the_exact_clock() -> None:
    """What `experiments/run clock` found: seconds and factors of a run, both ways."""
    kept = json.loads(CLOCK.read_text(encoding="utf-8"))["rows"]
    assert len(kept) == 10
    for row in kept:
        exact, threads = row["exact"], row["threads"]
        assert threads["seconds"] == pytest.approx(exact["seconds"], rel=0.15), row["arm"]
        assert threads["factor"] == pytest.approx(exact["factor"], rel=0.15), row["arm"]


def test_storage_that_does_not_come_to_its_speed_is_refused() -> None:
    assert closest({0.2: 0.01, 0.04: 0.02}, 0.02) == 0.02
    with pytest.raises(
        CalibrationError, match=r"a batch every 20.0 ms, and came no closer than 7%"
    ):
        closest({0.2: 0.01, 0.07: 0.02}, 0.02)


def test_a_training_is_the_same_every_time(fashion: Workload) -> None:
    arm = Arm("before", 2)
    runs = [trained_run(fashion, arm, 1, 0.05) for _ in range(2)]
    assert runs[0] == runs[1]
    assert trained_run(fashion, arm, 2, 0.05) != runs[0]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n != "fashion")) for n in NAMES]
)
def test_a_workload_learns_what_was_made_up(name: str) -> None:
    made = class_of(name)(Variant(), None)
    few = made.recipe.learning_rates[0]
    points = trained_run(made, Arm("before", 2), 0, few)["points"]
    assert points[-1][3] < points[0][3], "the test loss goes down"
    assert all(0 <= p[4] <= 1 for p in points)
    raw = made.prepare(made.train[0])
    kept = json.dumps(raw, default=lambda x: x.tolist())
    one = made.augment(raw, np.random.default_rng(0))
    assert json.dumps(raw, default=lambda x: x.tolist()) == kept, "the example is left as it was"
    two = made.augment(raw, np.random.default_rng(0))
    said = [json.dumps(x, default=lambda x: x.tolist()) for x in (one, two)]
    assert said[0] == said[1], "it depends on its generator alone"


@pytest.mark.parametrize("name", NAMES)
def test_what_transforms_make_of_a_batch_can_be_trained_on(name: str) -> None:
    made = class_of(name)(Variant(), None)
    network = made.network()
    for transform in made.transforms:
        arm = Arm("loader", 2, transform=transform)
        with closing(iter(feed(made, arm, 0))) as batches:
            loss = made.loss(network, next(batches))
        assert np.isfinite(loss.item()), transform
    with pytest.raises(ValueError, match=f"{name} has no transform sugar"):
        Plan.of(type(made), made.recipe, transforms=["sugar"])


def run_command(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


@pytest.mark.full
def test_a_quick_run_ends_with_a_table_and_goes_on_where_it_was(tmp_path: Path) -> None:
    words = ("fashion", "--quick", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path))
    code, output = run_command(*words, "--arms", "before-auto")
    assert code == 0, output
    assert "0 of 2" not in output
    assert "no echoing" in output
    assert "before augmentation, auto, R = " in output
    assert "no figures" in output
    kept = read_rows(tmp_path / "fashion.json")
    assert {row["kind"] for row in kept} == {"timing", "tuning", "training"}
    code, output = run_command(*words, "--arms", "before-auto")
    assert code == 0, output
    assert ": 0 of 13 runs to be carried out" in output
    assert read_rows(tmp_path / "fashion.json") == kept


SHOWN = {
    "before-4": "before augmentation, e = 4",
    "after-2": "after augmentation, e = 2",
    "batch-2": "batch echoing, e = 2",
    "before-auto": "before augmentation, auto",
    "loader-auto": "echo(loader), auto",
}


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_has_the_arms_that_it_is_asked_for(name: str) -> None:
    """All of them on one workload; on the others those that ask most of a workload."""
    asked = list(SHOWN) if name == "fashion" else ["before-auto", "loader-auto"]
    code, output = run_command(name, "--quick", "--seeds", "1", "--arms", ",".join(asked))
    assert code == 0, output
    assert {arm for arm in SHOWN if SHOWN[arm] in output} == {*asked}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "there is no workload nothing"),
        (["fashion", "--without", "sugar"], "--without takes batchnorm"),
        (["fashion", "--quick", "--arms", "sugar"], "no arm is named sugar"),
        (["characters", "--without", "batchnorm"], "has no BatchNorm"),
        (["fashion", "--data", "/nowhere"], "/nowhere does not exist"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(words: list[str], said: str) -> None:
    code, output = run_command(*words)
    assert code == 1
    assert said in output
    assert output.startswith("experiments/run: ")
    assert output.count("\n") == 1


def test_the_workloads_are_listed() -> None:
    code, output = run_command("list")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == list(NAMES)


def test_missing_data_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingData, match=r"fashion-mnist is missing; it is a folder with"):
        FASHION(Variant(), tmp_path)
    monkeypatch.setenv("STOKER_DATA", str(tmp_path))
    assert data_folder(None) == tmp_path
    assert data_folder(tmp_path / "..") == tmp_path / ".."
    with pytest.raises(MissingData, match="nowhere does not exist"):
        data_folder(tmp_path / "nowhere")
    (tmp_path / "there").touch()
    assert find(tmp_path, "there", "a file") == tmp_path / "there"


def test_an_archive_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("tempfile.tempdir", str(cache))
    cache.mkdir()
    archive = tmp_path / "some.tar"
    with tarfile.open(archive, "w") as tar:
        for name, content in (("./b/file", b"abc"), ("./a/empty", b""), ("./c", b"defg")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    for _ in range(2):
        files = Files(archive)
        assert files.names == ["a/empty", "b/file", "c"]
        assert [files[i] for i in range(len(files))] == [b"", b"abc", b"defg"]
    (root,) = cache.iterdir()
    assert len(list(root.iterdir())) == 1

    (tmp_path / "damaged.tar").write_bytes(archive.read_bytes()[:700])
    with pytest.raises(tarfile.ReadError):
        Files(tmp_path / "damaged.tar")
    assert len(list(root.iterdir())) == 1, "what failed left nothing"


def test_average_precision_is_of_the_best_boxes_and_counts_what_was_not_found() -> None:
    truth = np.asarray([[0, 0, 1, 1], [2, 2, 3, 3]], float)
    near, far = [0.0, 0.0, 1.0, 0.9], [5.0, 5.0, 6.0, 6.0]

    def precision(boxes: list[list[float]], scores: list[float]) -> float:
        found = np.asarray(boxes, float).reshape(-1, 4), np.asarray(scores, float)
        return average_precision([found], [truth])

    assert precision(truth.tolist(), [0.9, 0.8]) == 1.0
    assert precision([], []) == 0.0
    assert precision([near], [0.9]) == 0.5, "the other box was not found"
    assert precision([far, near], [0.9, 0.8]) == 0.25
    assert precision([near, far], [0.9, 0.8]) == 0.5
    assert precision([near, near, truth[1].tolist()], [0.9, 0.8, 0.7]) == pytest.approx(
        0.5 + 0.5 * 2 / 3
    ), "a box is found once"
    assert average_precision([(truth, np.ones(2))], [np.zeros((0, 4))]) == 0.0


def test_of_boxes_that_overlap_the_best_stays() -> None:
    boxes = np.asarray([[0, 0, 1, 1], [0, 0, 1, 0.9], [2, 2, 3, 3]], float)
    assert suppressed(boxes, np.asarray([0.5, 0.9, 0.1])) == [1, 2]
    assert suppressed(boxes[:0], np.zeros(0)) == []
    shared = overlaps(boxes, boxes)
    assert np.allclose(shared, shared.T)
    assert np.allclose(np.diag(shared), 1)
    assert shared[0, 1] == pytest.approx(0.9)
