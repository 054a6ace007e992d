"""What repeats cost: orders are as registered, the scale is that of fresh data, runs go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.repeats import damage, language, linear
from experiments.repeats.orders import FRESH, SUBSET, Arm, order_of

STEPS, BATCH = 256, 8


def gaps_of(order: np.ndarray) -> list[int]:
    """Return the steps between two uses of an example."""
    last: dict[int, int] = {}
    found = []
    for step, items in enumerate(order.tolist()):
        for item in items:
            if item in last:
                found.append(step - last[item])
            last[item] = step
    return found


@pytest.mark.parametrize(
    ("distance", "apart"),
    [("next step", 1), ("8 steps", 8), ("pool of 16", 16), ("pool of 64", 64), ("an epoch", 64)],
)
def test_all_examples_are_used_k_times_at_the_distance(distance: str, apart: int) -> None:
    order = order_of(Arm(distance, 4, STEPS), BATCH, seed=3)
    assert order.shape == (STEPS, BATCH)
    _, uses = np.unique(order, return_counts=True)
    assert uses.tolist() == [4] * (STEPS * BATCH // 4)
    assert np.mean(gaps_of(order)) == pytest.approx(apart, rel=0.3)


@pytest.mark.parametrize(("distance", "each"), [(SUBSET, 4), ("evenly", 2), (FRESH, 1)])
def test_a_tenth_of_the_uses_are_copies_of_few_or_of_every_ninth(distance: str, each: int) -> None:
    order = order_of(Arm(distance, each, STEPS), BATCH, seed=3)
    assert order.shape == (STEPS, BATCH)
    _, uses = np.unique(order, return_counts=True)
    assert set(uses.tolist()) == {1, each}
    copies = {SUBSET: 0.1 * (1 - 1 / each), "evenly": 0.1, FRESH: 0.0}[distance]
    assert 1 - len(uses) / order.size == pytest.approx(copies, abs=0.005)


def test_the_linear_model_learns_its_truth_and_a_loss_is_that_of_its_weights() -> None:
    world = linear.world_of(0, 4_096, features=16)
    order = order_of(Arm(FRESH, 1, 512), BATCH, seed=0)
    losses = linear.train(world, order, [0.0, 0.25])
    assert losses[:, 0] == pytest.approx([linear.variances(16).sum()] * 2)
    assert (losses[:, 1] < 0.1 * losses[:, 0]).all()
    assert (linear.train(world, order, [0.0, 0.25]) == losses).all()


def test_damage_is_the_share_of_the_steps_that_fresh_data_would_not_need() -> None:
    def row(distance: str, uses: int, steps: int, loss: float) -> damage.Row:
        losses = [loss * (1 + seed / 10) for seed in range(5)]
        arm = Arm(distance, uses, steps)
        return {"model": "m", **arm._asdict(), "rate": 1, "is_at_edge": False, "losses": losses}

    rows = [row(FRESH, 1, n, n**-0.5) for n in (64, 128, 256)]
    rows.append(row("an epoch", 4, 256, 96**-0.5))
    (cost,) = damage.costs(rows)
    assert cost.damage == pytest.approx([1 - 96 / 256] * 3, abs=0.01)
    assert cost.worth == pytest.approx([1.5] * 3, abs=0.04)


@pytest.mark.full
def test_a_language_model_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = [Arm(FRESH, 1, 2), Arm("next step", 2, 4)]
    monkeypatch.setattr(language, "arms", lambda steps: arms)
    folder, words = tmp_path / "wikitext-2", " ".join(f"word{n % 97}" for n in range(16_000))
    folder.mkdir()
    for name in ("train.block-shuffled.txt", "test.txt"):
        (folder / name).write_text(words)

    def stop(text: str) -> None:
        raise KeyboardInterrupt

    files = [tmp_path / name for name in ("whole.jsonl", "parts.jsonl")]
    language.run(files[0], tmp_path, lambda text: None)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            language.run(files[1], tmp_path, stop)
    language.run(files[1], tmp_path, lambda text: None)
    assert files[1].read_text() == files[0].read_text()
    assert len(language.read(files[0])) == len(arms) * (len(language.RATES) + 5)
