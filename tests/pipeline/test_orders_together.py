"""What chooses, orders, numbers, deals and plans examples, each together with all other things."""

from __future__ import annotations

import collections
import itertools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import stoker
from order_chains import NEW, OLD, SIZES, Thing, built, seen
from scripts import REAL_WORLDS, told_by
from stoker.testing import check_resume
from strategies import one_in

# What an old thing makes of what a chain without it hands out in an epoch.
EFFECTS: dict[str, Callable[[int], int]] = {
    **dict.fromkeys(("workers", "processes", "cache", "map", "device", "scan"), lambda x: 1),
    "echo": lambda x: 2,
    "late echo": lambda x: 2,
    "filter": lambda x: x % 5 > 0,
    "skips": lambda x: x % 17 != 3,
}
ORDERS = {"weights", "changing weights", "order"}
PLANS = {"tokens", "keys"}
REFUSED = {
    **{(a, b): r"cannot follow .*: put it behind the source" for a in ORDERS for b in ORDERS - {a}},
    **{
        (a, b): r"plans before anything is read"
        for a in PLANS
        for b in ("echo", "fraction", "filter", "skips", "scan")
    },
    **{("balance", b): r"equally many steps" for b in ("filter", "skips", "scan")},
    **{("balance", b): r"leave .balance\(\) out" for b in ("tokens", "keys")},
    **{(a, b): r"batch once" for a in PLANS for b in PLANS - {a}},
    ("balance", "rank"): r"cannot follow shard",
}


def comes(batches: Iterable[Any]) -> collections.Counter[int]:
    """Count how often each example comes; its number is told rightly."""
    found: collections.Counter[int] = collections.Counter()
    for batch in seen(batches):
        assert batch["x"] == batch["id"]
        found.update(batch["x"])
    return found


def pairs() -> list[Any]:
    found = []
    for new in NEW:
        found += [(new, old) for old in OLD]
    found += list(itertools.combinations(NEW, 2))
    kept = []
    for new, old in found:
        if (new, old) not in REFUSED and (old, new) not in REFUSED:
            kept.append((new, old))
    return kept


def thing_of(name: str) -> Thing:
    return NEW.get(name) or OLD[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("new", "old"), one_in(5, pairs()))
def test_each_goes_with_every_other(new: str, old: str) -> None:
    def build() -> Any:
        return built(NEW[new], thing_of(old))

    train, inline = build(), build().workers(0)
    epochs = [seen(train) for _ in range(2)]
    assert epochs == [seen(inline) for _ in range(2)]
    assert check_resume(build, every=8 if old == "processes" else 3) > 0
    if old in EFFECTS:
        alone, effect = comes(built(NEW[new])), EFFECTS[old]
        wanted = collections.Counter({x: effect(x) * count for x, count in alone.items()})
        assert comes(build()) == +wanted
    shown = build()
    assert seen([shown.peek()]) == epochs[0][:1]
    assert seen(shown) == epochs[0]


@pytest.mark.parametrize(("new", "old"), sorted(REFUSED))
def test_what_does_not_go_together_says_so(new: str, old: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[new, old]):
        list(built(NEW[new], thing_of(old)))


def rows(batches: Iterable[Any]) -> collections.Counter[tuple[int, int]]:
    return collections.Counter(
        row for batch in seen(batches) for row in zip(batch["x"], batch["drawn"], strict=True)
    )


@pytest.mark.parametrize("old", ["cache", "first ones", "cut", "echo", "steps"])
@pytest.mark.parametrize("new", [new for new in NEW if new not in PLANS])
def test_other_ranks_go_on(new: str, old: str) -> None:
    balance = (lambda p: p.balance(SIZES)) if new == "balance" else (lambda p: p)
    own = {place: build for place, build in NEW[new].items() if place != "deal"}

    def rank(number: int, world: int, batch: int) -> Any:
        deal = {
            "deal": lambda p: balance(p.shard(rank=number, world_size=world)),
            "batch": lambda p: p.batch(batch),
        }
        return built(own, OLD[old], deal)

    three = [rank(number, 3, 4) for number in range(3)]
    missed: collections.Counter[tuple[int, int]] = collections.Counter()
    for each in three:
        with iter(each) as batches:
            next(batches), next(batches)
            state = json.loads(json.dumps(each.state_dict()))
            missed += rows(batches)
    two = [rank(number, 2, 6) for number in range(2)]
    found: collections.Counter[tuple[int, int]] = collections.Counter()
    for each in two:
        each.load_state_dict(state)
        found += rows(each)
    left_out, more = missed - found, found - missed
    assert more.total() < 3  # what an end could not deal to three
    assert left_out.total() < (3 if old != "echo" else 5)


def test_between_epochs_a_small_pool_of_batches_takes_other_ranks_and_batches() -> None:
    def rank(world: int, batch: int) -> Any:
        deal = {"deal": lambda p: p.shard(rank=0, world_size=world)}
        return built(deal, OLD["late echo"], {"batch": lambda p: p.batch(batch)})

    first = rank(3, 8)
    list(first)
    for world, batch in ((2, 8), (3, 4)):
        other = rank(world, batch)
        other.load_state_dict(first.state_dict())
        assert (other.epoch, len(list(other))) == (1, len(other))
    with iter(first) as batches:
        next(batches)
        state = first.state_dict()
    with pytest.raises(stoker.StateError, match=r"the batches in the pool .* are the rank's own"):
        rank(2, 8).load_state_dict(state)


TARGET = """
import sys

sys.path[:0] = {path!r}
from order_chains import NEW, built


def make():
    return built(NEW[{new!r}], {{"work": lambda p: p.workers(1)}})
"""


@pytest.mark.parametrize("new", ["select", "order", "tokens"])  # feeds know of batches alone
def test_feeds_hand_out_the_same(tmp_path: Path, new: str) -> None:
    here = str(Path(__file__).parents[1])
    (tmp_path / "prep.py").write_text(TARGET.format(path=[here], new=new))
    name = f"together-{os.getpid()}-{new.replace(' ', '-')}"
    fed = stoker.feed(f"{tmp_path}/prep.py:make", name=name, timeout_s=60.0)
    alone = built(NEW[new])
    first, second = seen(alone), seen(alone)
    with iter(fed) as batches:
        begun = seen(itertools.islice(batches, 3))
        state = json.loads(json.dumps(fed.state_dict()))
        assert begun + seen(batches) == first
    assert seen(fed) == second
    fed.load_state_dict(state)
    assert seen(fed) == first[3:]


ON_RANKS = """
    import logging
    logging.getLogger("stoker").setLevel(logging.ERROR)
    sys.path[:0] = {path!r}
    from order_chains import NEW, SIZES, built, seen
    told = {{}}
    for new in {names!r}:
        deal = {{"deal": lambda p: p.shard().balance(SIZES) if new == "balance" else p.shard()}}
        more = {{}} if "batch" in NEW[new] else {{"batch": lambda p: p.batch(4)}}
        own = {{place: build for place, build in NEW[new].items() if place != "deal"}}
        train, again = (built(own, deal, more) for _ in range(2))
        epochs = [seen(train)]
        with iter(train) as batches:
            begun = seen([next(batches), next(batches)])
            state = json.loads(json.dumps(train.state_dict()))
            epochs.append(begun + seen(batches))
        again.load_state_dict(state)
        echoed = 0 if "batch" in NEW[new] else len(seen(built(
            own, deal, more, {{"echo": lambda p: p.echo("auto", pool=24)}})))
        told[new] = [epochs, seen(again) == epochs[1][2:], echoed]
"""


@pytest.mark.full
@pytest.mark.parametrize("world", REAL_WORLDS)
def test_real_ranks_take_equal_steps_and_resume(tmp_path: Path, world: int) -> None:
    here = str(Path(__file__).parents[1])
    told = told_by(tmp_path, world, ON_RANKS.format(path=[here], names=list(NEW)))
    for new in NEW:
        own = {place: build for place, build in NEW[new].items() if place != "deal"}
        alone = built(own)
        for epoch in range(2):
            each = [rank[new][0][epoch] for rank in told]
            assert len({len(batches) for batches in each}) == 1
            found, wanted = sum((rows(batches) for batches in each), rows([])), rows(alone)
            assert found <= wanted
            assert (wanted - found).total() < world
        assert all(rank[new][1] for rank in told)
        assert len({rank[new][2] for rank in told}) == 1
