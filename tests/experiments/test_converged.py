"""To convergence: what is trained next follows from what was trained, and what rows say is so."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from experiments.converged.sentences import against, cells, curves, said, times_as_soon
from experiments.converged.trainings import (
    ARMS,
    LEAST_FALL,
    QUICK,
    START,
    WHOLE,
    Row,
    Trainings,
    read,
    run,
)
from experiments.equal_time.plan import Settings


def ended(price: float) -> list[Row]:
    """Train in a world that is least at 16 passes' uses, and where an echo costs a price."""
    trainings, rows = Trainings([]), []
    for wanted in trainings.missing():
        (arm,) = (arm for arm in ARMS if arm.name == wanted["arm"])
        uses = wanted["passes"] * max(1.0, arm.ratio)
        off = abs(wanted["learning_rate"] - 0.04) + abs(wanted["warm_up"] - 0.1)
        loss = 2 + abs(uses - 16) / 16 + off + (price if arm.ratio else 0) + wanted["seed"] / 1e4
        rows.append(wanted | {"validation": loss, "test": loss})
        trainings.add(rows[-1])
    return rows


def test_passes_double_until_the_loss_no_longer_falls_with_settings_inside_what_was_tried() -> None:
    rows = ended(0.0)
    trainings = Trainings(rows)
    assert [trainings.lengths(arm) for arm in ARMS] == [
        [1, 2, 4, 8, 16, 32],
        [1, 2, 4, 8, 16],
        [1, 2, 4, 8],
    ]
    for arm in ARMS:
        for passes in trainings.lengths(arm):
            best, _ = trainings.best(arm, passes)
            assert best == Settings(0.04, 0.1)
            tried = {
                (row["learning_rate"], row["warm_up"])
                for row in rows
                if (row["arm"], row["passes"]) == (arm.name, passes)
            }
            assert {(0.02, 0.1), (0.08, 0.1), (0.04, 0.05), (0.04, 0.2)} <= tried
            assert len(trainings.losses(arm, passes)) == len(WHOLE.seeds)


def test_settings_are_chosen_by_seeds_that_do_not_count() -> None:
    assert not set(WHOLE.seeds) & set(WHOLE.tuning_seeds)
    chosen = {row["seed"] for row in ended(0.0) if row["learning_rate"] == START.learning_rate}
    assert chosen == set(WHOLE.tuning_seeds)


def test_copies_that_are_as_good_as_passes_end_as_well_as_many_times_as_soon_as_r() -> None:
    rows = ended(0.0)
    without, *echoed = curves(rows)
    assert without.converged == 16
    for curve in echoed:
        assert curve.converged * curve.ratio == without.converged
        assert times_as_soon(without, curve) == pytest.approx([curve.ratio] * 5)
    text = " ".join(said(rows))
    assert "4.00 [4.00, 4.00] times as soon at R = 4" in text
    assert "+0.000 [+0.000, +0.000] at R = 4" in text.split("an epoch later")[1]
    assert "nowhere so: verbatim copies end higher" in " ".join(against(rows))


def test_copies_that_have_a_price_count_against_echoing() -> None:
    text = " ".join(against(ended(0.5)))
    assert "end higher**: R = 2, +0.500 [+0.500, +0.500]; R = 4, +0.500" in text
    assert "**They are higher at equal time" in text


def test_a_table_has_a_line_for_each_number_of_passes_and_bold_where_an_arm_has_converged() -> None:
    head, lines = cells(ended(0.0))
    assert head == ["passes", "no echo", "R = 2", "R = 4"]
    assert [line[0] for line in lines] == ["1", "2", "4", "8", "16", "32"]
    bold = [[line[0] for line in lines if line[n].startswith("**")] for n in (1, 2, 3)]
    assert bold == [["16"], ["8"], ["4"]]


def test_what_falls_by_less_than_is_told_apart_is_convergence() -> None:
    trainings = Trainings([])
    for wanted in trainings.missing():
        off = abs(wanted["learning_rate"] - 0.01) + abs(wanted["warm_up"] - 0.2)
        loss = 2 + off - wanted["passes"] * LEAST_FALL / 10
        trainings.add(wanted | {"validation": loss, "test": loss})
    assert all(trainings.lengths(arm) == [1, 2] for arm in ARMS)


@pytest.mark.full
def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    rng = random.Random(0)
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for name in ("train.block-shuffled.txt", "test.txt"):
        words = " ".join(f"word{rng.randrange(97)}" for _ in range(4_000))
        (folder / name).write_text(words)
    whole, parts = (tmp_path / name for name in ("whole.jsonl", "parts.jsonl"))
    run(whole, tmp_path, lambda text: None, QUICK)
    lines = whole.read_text().splitlines(keepends=True)
    parts.write_text("".join(lines[:-3]))
    run(parts, tmp_path, lambda text: None, QUICK)
    assert parts.read_text() == whole.read_text()
    assert all(curve.losses for curve in curves(read(whole), QUICK))
