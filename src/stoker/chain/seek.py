"""Where an epoch is, by arithmetic: behind its first outputs, and where other ranks take it over.

A state is of so many ranks with batches of one size. Others that load it begin a new leg of the
epoch (``schedule.leg``): a row of what is left of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stoker.chain.chain import Chain
from stoker.chain.state import Loaded
from stoker.engine.checkpoint import Position
from stoker.engine.echo.pool_inputs import PoolStart
from stoker.errors import StateError
from stoker.schedule import rng
from stoker.schedule.fixed import Pool
from stoker.schedule.leg import Leg, Remainder
from stoker.schedule.selection import Cut
from stoker.schedule.sizing.cuts import EvenCuts
from stoker.stages.skip import RAISE
from stoker.stages.stage import PoolSize, Traits
from stoker.stats import Clock

_log = logging.getLogger("stoker")


def can_jump(chain: Chain) -> bool:
    """Return whether arithmetic alone tells what stands behind the first outputs of an epoch.

    Not over streams and loaders, not where examples may be left out, and not behind a pool.
    """
    if chain.plans_batches and chain.selection.calls_user:
        return False
    return chain.source.is_indexed and not chain.may_leave_out and not chain.echoes


def nearest(chain: Chain, epoch: int, number: int) -> tuple[Position | None, int]:
    """Return a position in an epoch at an output, or as near before it as it can be told.

    Also how many outputs come before it from there: those of which only what came before can tell.
    """
    if not number or not can_jump(chain):
        return None, number
    number = min(number, chain.count_of_data_epoch(epoch))
    cuts = chain.cuts(epoch) or EvenCuts(chain.batch_size)
    examples = min(cuts.start(number), chain.examples(epoch))
    return Position(number, examples, examples), 0


def passed(chain: Chain, epoch: int, outputs: int) -> tuple[int, int, Clock]:
    """Return how many whole epochs so many outputs are, and how many are left behind these.

    From the beginning of an epoch on, where outputs can be jumped over. Also what all ranks have
    handed out in those epochs.
    """
    epochs, before = 0, Clock()
    while outputs >= (count := chain.count_of_data_epoch(epoch + epochs)):
        whole, _ = nearest(chain, epoch + epochs, count)
        assert whole is not None
        # Epochs whose batches are not planned are all alike.
        alike = 1 if chain.plans_batches else outputs // count
        one = chain.clock(epoch + epochs, whole.fresh, whole.uses, whole.yielded)
        before += Clock(alike * one.fresh_examples, alike * one.uses, alike * one.steps)
        epochs, outputs = epochs + alike, outputs - alike * count
    return epochs, outputs, before


def behind_pool(
    chain: Chain, epoch: int, number: int, sizes: Mapping[int, PoolSize]
) -> Position | None:
    """Return the position at an output behind one pool of a fixed factor, its draws repeated.

    None where there is another pool, where it is not the pool alone that decides, and where its
    size is not known yet.
    """
    if not chain.source.is_indexed or chain.may_leave_out or len(chain.echoes) != 1:
        return None
    if chain.plans_batches:
        return None
    (point,) = chain.plan.echoes
    echo = point.echo
    known = sizes.get(echo.position)
    if known is None and echo.pool is not None and not point.on_device:
        known = PoolSize(echo.pool)
    if echo.counts is None or known is None:
        return None
    items = chain.examples()
    for stage in chain.stages[: chain.stages.index(echo)]:
        items = items if stage.traits.selects else stage.count(items)
    each = chain.batch_size if point.holds_batches else 1
    lacking = max(0, items * each - chain.examples())  # in the last item
    key = rng.key(chain.seed, epoch, rng.ECHO + echo.position)
    pool = Pool(echo.counts, known.size, point.group, key, items)
    number, uses = min(number, chain.count_of_data_epoch(epoch)), 0
    for _ in range(number):
        ordinals = pool.advance().ordinals
        uses += each * len(ordinals) - lacking * int(np.count_nonzero(ordinals == items - 1))
        pool.forget_before(pool.step)
    return Position(
        number,
        uses,
        min(each * pool.seen, chain.examples()),
        [PoolStart(pool.snapshot(pool.step), pool.admitted if pool.ended else None)],
    )


def take_over(states: Sequence[Loaded], chain: Chain) -> Loaded:
    """Return the state with which a chain goes on: of its own rank, or a new leg of the epoch.

    Args:
        states: those of all ranks, or one of them.
        chain: of the rank that loads them.

    Raises StateError where that one does not tell enough, or other ranks cannot go on.
    """
    first, mine = states[0], (chain.rank_world[1], chain.batch_size)
    is_anew = (first.by.rank_world[1], first.by.batch_size) != mine
    if len(states) > 1:
        first = _own_state(states, chain)
    position = first.position
    if not is_anew:
        if position is not None and first.rank not in (None, chain.rank_world[0]):
            raise StateError(
                f"the state is rank {first.rank}'s, and this is rank {chain.rank_world[0]}: ranks' "
                "states differ here, so load the rank's own, or the list of all"
            )
        return first
    if position is None or (not position.yielded and position.leg is None):
        return replace(first, position=None, sizes={})
    _check_leg(first.by, chain)
    leg = _leg_behind(first.by, position)
    if not chain.rank_world[0]:
        _log.warning("%s", _describe(first, leg, chain))
    return replace(first, position=Position(order=position.order, leg=leg), sizes={})


def _own_state(states: Sequence[Loaded], chain: Chain) -> Loaded:
    """Return of the states of all ranks that of this rank, or any if that is none of them."""
    first = states[0]
    world = first.by.rank_world[1]
    ranks = [at if each.rank is None else each.rank for at, each in enumerate(states)]
    if sorted(ranks) != list(range(world)):
        raise StateError(
            f"the list has states of ranks {', '.join(map(str, sorted(ranks)))}, and {world} saved "
            "them: give the state of each rank, once"
        )
    for each in states:
        if _place_of(each) != _place_of(first):
            raise StateError(
                f"the states in the list are of different places: {_place_of(first)} and "
                f"{_place_of(each)} (seed, epoch, batches): give those that ranks saved together"
            )
    rank = chain.rank_world[0]
    return states[ranks.index(rank)] if rank < world else first


def _place_of(loaded: Loaded) -> tuple[int, int, int]:
    return loaded.seed, loaded.epoch, 0 if loaded.position is None else loaded.position.yielded


def _check_leg(by: Chain, chain: Chain) -> None:
    """Refuse what other ranks, or other batches, cannot go on with in the middle of an epoch."""
    share, selection = by.selection.share, by.selection
    try:
        by.source.check_leg(selection)
        if by.plans_batches:
            raise StateError("its batches were planned for so many ranks")
        if share is not None:
            is_cut = selection.last != Cut() or (not share.anew and selection.between != Cut())
            if is_cut:
                raise StateError(
                    ".take() and .skip() behind .shard() count each rank's examples: put them "
                    "before it"
                )
            if share.uneven:
                raise StateError("uneven=True gives ranks parts that do not end together")
            if selection.is_shuffled and not share.anew:
                raise StateError(
                    "each rank shuffles a fixed part of its own: put .shuffle() before .shard()"
                )
        stage = next((s for s in by.stages if _keeps(s.traits)), None)
        if stage is not None or by.budget != RAISE:
            name = "a skip budget" if stage is None else f".{stage.name}"
            raise StateError(f"what {name} has left out, or holds, is the rank's own")
    except StateError as why:
        raise StateError(
            "the state is in the middle of an epoch, which cannot go on with "
            f"{_describe_change(by, chain)}: {why}. Load it with what it was saved with, or change "
            "that between epochs"
        ) from None


def _keeps(traits: Traits) -> bool:
    return traits.filters or traits.skips or traits.joins or traits.scans or traits.repeats


def _leg_behind(by: Chain, position: Position) -> Leg:
    """Return what is left of an epoch, of which each rank has had equally many rows."""
    indexed, selection, (_, world) = by.plan.indexed, by.selection, by.rank_world
    assert indexed is not None
    was, rows = position.leg, position.fresh
    rest = Remainder([(0, indexed.places(selection))]) if was is None else was.rest
    size = len(rest)
    if selection.has_runs:
        assert selection.share is not None
        bounds = [replace(selection.share, rank=r).run(size, whole=False) for r in range(world)]
        left = [rest.cut(a + rows, b) for a, b in zip(bounds, [*bounds[1:], size], strict=True)]
        ranges = [each for cut in left for each in cut]
    else:
        ranges = rest.cut(world * rows, size)
    before = Clock(world * position.fresh, world * position.uses, position.yielded)
    return Leg(
        world if was is None else was.begun_by,
        Remainder(ranges),
        before if was is None else was.before + before,
        world * position.yielded + (0 if was is None else was.batches),
    )


def _describe(loaded: Loaded, leg: Leg, chain: Chain) -> str:
    """Say where other ranks go on."""
    indexed, by = loaded.by.plan.indexed, loaded.by
    assert indexed is not None
    places = indexed.places(by.on_leg(leg).selection)
    return (
        f"goes on in epoch {loaded.epoch} at example {places - len(leg.rest):,} of {places:,} with "
        f"{_describe_change(by, chain)}"
    )


def _describe_change(by: Chain, chain: Chain) -> str:
    """Say what is other than it was."""
    (_, was), (_, now) = by.rank_world, chain.rank_world
    said = [] if now == was else [f"{now} rank{'s' * (now > 1)} instead of {was}"]
    if chain.batch_size != by.batch_size:
        said.append(f"batches of {chain.batch_size} instead of {by.batch_size}")
    return " and ".join(said)
