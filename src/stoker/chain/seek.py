"""Positions in an epoch by arithmetic: after a number of outputs, and where other ranks take over.

A state belongs to a number of ranks and a batch size. If another number of ranks loads it, or the
batch size differs, a new leg begins (``schedule.epoch_rest``): a row of the unread examples.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.chain.chain import Chain
from stoker.chain.state import Loaded
from stoker.echoing.stage import DEFAULT_POOL_BATCHES, pool_key
from stoker.echoing.stream import PoolStart
from stoker.engine.checkpoint import PoolSize, Position
from stoker.engine.survivors import FilterRecord
from stoker.errors import StateError
from stoker.schedule.batch_bounds import FixedBatches
from stoker.schedule.batch_plan import PlannedSharding
from stoker.schedule.epoch_rest import EpochRest, UnreadRanges, deal_held
from stoker.schedule.orders.order import as_array
from stoker.schedule.packing import PackedSharding
from stoker.schedule.pools.fixed import Pool, Snapshot, snapshot_steps
from stoker.stats import Counts

# Epochs whose batches are planned one after another, some milliseconds each. Chosen, not measured.
_MOST_EPOCHS = 1000

_log = logging.getLogger("stoker")


def can_jump(chain: Chain) -> bool:
    """True if arithmetic alone finds the position after a number of outputs."""
    if chain.packs or (chain.plans_batches and chain.selection.calls_user):
        return False
    return chain.source.is_indexed and not chain.may_leave_out and chain.echo is None


def seek(chain: Chain, epoch: int, number: int) -> tuple[Position | None, int]:
    """Return the position at an output, and 0; or the nearest computable position before it, and
    the number of outputs from there to the output.
    """
    if not number or not can_jump(chain):
        return None, number
    number = min(number, chain.count_of_data_epoch(epoch))
    cuts = chain.cuts(epoch) or FixedBatches(chain.batch_size)
    examples = min(cuts.start(number), chain.examples(epoch))
    return Position(number, examples, examples), 0


def skip_epochs(chain: Chain, epoch: int, outputs: int) -> tuple[int, int, Counts]:
    """Return how many whole epochs ``outputs`` span, how many outputs are left, and the counts.

    The counts are those of the whole epochs, over all ranks. Needs ``can_jump``.
    """
    epochs, before, was_empty = 0, Counts(), False
    while outputs >= (count := chain.count_of_data_epoch(epoch + epochs)):
        if not count:  # as when all are made: one empty epoch is passed over, and no second one
            if was_empty:
                break
            epochs, was_empty = epochs + 1, True
            continue
        if chain.plans_batches and epochs == _MOST_EPOCHS:
            raise ValueError(
                "under .repeat(), batches of planned sizes are skipped by planning each epoch, "
                f"and more than {epochs:,} take too long: load a state"
            )
        was_empty = False
        whole, _ = seek(chain, epoch + epochs, count)
        assert whole is not None
        # Epochs whose batches are not planned are all alike.
        alike = 1 if chain.plans_batches else outputs // count
        one = chain.counts(epoch + epochs, whole.fresh, whole.uses, whole.yielded)
        before += Counts(alike * one.fresh_examples, alike * one.uses, alike * one.steps)
        epochs, outputs = epochs + alike, outputs - alike * count
    return epochs, outputs, before


def seek_behind_pool(chain: Chain, epoch: int, number: int, pool_size: PoolSize) -> Position | None:
    """Return the position at an output behind a pool of a fixed factor, by its draws; else None."""
    layer = chain.flow.echo
    if not chain.source.is_indexed or chain.may_leave_out or layer is None:
        return None
    echo, size = layer.stage, pool_size.size
    if not size and echo.pool is not None and not layer.on_device:
        size = echo.pool
    if chain.plans_batches or echo.counts is None or not size:
        return None
    items = chain.examples()
    for stage in chain.stages[: chain.stages.index(echo)]:
        items = items if stage.traits.selects else stage.count(items)
    each = chain.batch_size if layer.holds_batches else 1
    lacking = max(0, items * each - chain.examples())  # in the last item
    pool = Pool(echo.counts, size, layer.group, pool_key(chain.seed, epoch, None), items)
    number = min(number, chain.count_of_data_epoch(epoch))
    while pool.step < number:
        pool.skip(min(number - pool.step, snapshot_steps(pool.size, pool.group)))
        pool.forget_before(pool.step)
    uses = each * pool.uses - lacking * pool.uses_of(items - 1)
    return Position(
        number,
        uses,
        min(each * pool.seen, chain.examples()),
        [PoolStart(pool.snapshot(pool.step), pool.admitted if pool.ended else None)],
    )


def take_over(states: Sequence[Loaded], chain: Chain) -> Loaded:
    """Return the state that a chain goes on with: its own rank's, or the start of a new leg.

    ``states`` are those of all ranks, or one of them. Raises StateError if one is not enough, or if
    other ranks cannot go on with the epoch.
    """
    ranks = _by_rank(states) if len(states) > 1 else None
    first, (rank, world) = states[0], chain.rank_world
    by = first.by
    if (by.rank_world[1], by.size_of_batches) == (world, chain.size_of_batches):
        own = first if ranks is None else ranks[rank]
        if own.position is not None and own.rank not in (None, rank):
            raise StateError(
                f"the state is rank {own.rank}'s, and this is rank {rank}: ranks' states differ "
                "here, so load the rank's own, or the list of all"
            )
        return own
    if first.skip:
        raise StateError(
            f"the state says to begin behind {first.skip} batches (resume_at), which are others "
            f"with {_describe_change(by, chain)}: save when a batch was handed out"
        )
    if first.position is None or not (first.position.yielded or first.position.leg):
        is_stream = not by.source.is_indexed and not by.source.yields_batches
        at = first.position if is_stream else None
        return replace(first, position=at, pool_size=PoolSize())
    try:
        by.source.check_leg(by.selection)
        for stage in by.stages:
            stage.check_leg(by)
        if first.rank is not None and ranks is None:
            raise StateError(
                "what ranks have read differs here, so the states of all are needed, in a list: "
                "load_state_dict([state of rank 0, ...])"
            )
        position, size, lost_uses = _begin_leg(ranks or [first] * by.rank_world[1], chain)
    except StateError as why:
        raise StateError(
            "the state is in the middle of an epoch, which cannot go on with "
            f"{_describe_change(by, chain)}: {why}. Load it with what it was saved with, or change "
            "that between epochs"
        ) from None
    if not rank:
        _log.warning("%s", _describe(first, position, chain, lost_uses))
    return replace(first, position=position, pool_size=size)


def _by_rank(states: Sequence[Loaded]) -> list[Loaded]:
    """Return the states by rank. Raises StateError unless there is one of each rank."""
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
    return [states[ranks.index(rank)] for rank in range(world)]


def _place_of(loaded: Loaded) -> tuple[int, int, int]:
    return loaded.seed, loaded.epoch, 0 if loaded.position is None else loaded.position.yielded


class _RankProgress(NamedTuple):
    """The rows that a rank had read, the items of them that its pool holds, or that wait to be
    packed, and the full sequences that it packed; ``offsets`` tokens of unread rows are there."""

    rows: int
    ordinals: NDArray[np.int64] = np.empty(0, np.int64)
    remaining: NDArray[np.int64] = np.empty(0, np.int64)
    spent: NDArray[np.int64] = np.empty(0, np.int64)
    sequences: int = 0
    offsets: Mapping[int, int] = MappingProxyType({})


def _begin_leg(ranks: Sequence[Loaded], chain: Chain) -> tuple[Position, PoolSize, int]:
    """Return the first position of a new leg, the pool's size, and the number of lost uses.

    ``ranks``: the states of all ranks that leave the epoch; equal ranks share one.
    """
    first, world = ranks[0], len(ranks)
    at, by = first.position, first.by
    assert at is not None
    if by.indexed is None:
        return _begin_stream_leg(first), PoolSize(), 0
    if by.plans_batches:
        return _begin_planned_leg(first, chain), PoolSize(), 0
    was, positions = at.leg, [each.position or Position() for each in ranks]
    are_alike = first.rank is None
    each = _progress_of_alike(first) if are_alike else [_progress_of(loaded) for loaded in ranks]
    rest = _whole(by) if was is None else was.rest
    ranges, behind, places, begun = _unread(ranks, each, rest)
    remaining = np.concatenate([left.remaining for left in each])
    spent = np.concatenate([left.spent for left in each])
    is_used = spent > 0  # other items come as what was not read does
    new_world = chain.rank_world[1]
    unused = np.sort(np.concatenate([behind, places[~is_used], _over(was)]))
    rest, over = UnreadRanges(sorted(ranges)), unused[:0]
    if by.source.has_own_order:
        rest, unused, over = _in_turns(first, rest, unused, new_world)
    else:
        ranges += [(place, place + 1) for place in unused.tolist()]
        rest, unused = UnreadRanges(sorted(ranges)), unused[:0]
    held, lost_uses = deal_held(places[is_used], remaining[is_used], spent[is_used], new_world)
    before = Counts(
        sum(position.fresh for position in positions) - new_world * held.each - len(begun),
        sum(position.uses for position in positions),
        at.yielded,
    )
    sequences, offsets = world * max(left.sequences for left in each), begun
    if was is not None:
        sequences += was.sequences
        still = rest if not by.source.has_own_order else {*unused.tolist(), *over.tolist()}
        kept = {place: was.offsets[place] for place in was.offsets if place in still}
        offsets = {**kept, **{place: n + kept.get(place, 0) for place, n in begun.items()}}
    leg = replace(
        _leg_behind(at, world, rest, before),
        held=held if by.has_fixed_echo else None, returned=unused, world=new_world, over=over,
        sequences=sequences, offsets=offsets,
    )  # fmt: skip
    if by.echo is None or by.echo.is_adaptive:
        return Position(order=at.order, leg=leg), PoolSize(), lost_uses
    each_of, remaining_of = np.arange(held.each), held.of_rank(0).remaining
    begins = Snapshot(0, held.each, each_of, remaining_of, np.zeros(held.each, bool))
    size = _pool_size(by.echo, first, chain.batch_size)
    start = Position(fresh=held.each, parts=[PoolStart(begins)], order=at.order, leg=leg)
    return start, size, lost_uses


def _begin_stream_leg(loaded: Loaded) -> Position:
    """Return the first position of a new leg over a stream, which goes on where all have read to.

    Every rank reads the whole stream, and all have handed out equally many, so its state is theirs.
    """
    at, by = loaded.position, loaded.by
    assert at is not None
    before = by.counts(loaded.epoch, at.fresh, at.uses, at.yielded)
    leg = _leg_behind(at, by.rank_world[1], UnreadRanges([]), before)
    return Position(loader_state=at.loader_state, leg=leg)


def _begin_planned_leg(loaded: Loaded, chain: Chain) -> Position:
    """Return the first position of a new leg whose batches are planned from sizes or keys.

    The plan of the ranks that leave the epoch tells what they have read: whole steps of windows. So
    the row of the leg is what was left of a window, and all that follows it.
    """
    at, world = loaded.position, loaded.by.rank_world[1]
    assert at is not None
    was, by = at.leg, loaded.by.on_leg(at.leg)
    deal = by.orders.planned_deal(loaded.seed, loaded.epoch)
    if isinstance(deal, PackedSharding):  # it deals by the number of sequences
        before = by.counts(loaded.epoch, at.fresh, at.uses, at.yielded)
        read = before.fresh_examples + (0 if was is None else was.before.fresh_examples)
        left = UnreadRanges(_whole(by).cut(read, len(_whole(by))))  # to tell how much
        leg = _leg_behind(at, world, left, before)
        done = world * at.uses + (0 if was is None else was.sequences)
        return Position(order=at.order, leg=replace(leg, world=chain.rank_world[1], sequences=done))
    assert isinstance(deal, PlannedSharding)
    rest, head = (_whole(by), 0) if was is None else (was.rest, len(was.returned))
    rows, following = deal.unread(at.yielded)
    rows = np.concatenate([rows, np.arange(following, head)])
    unread = np.sort(np.concatenate([as_array(deal.whole.places(rows)), _over(was)]))
    ranges, new_world = rest.cut(max(0, following - head), len(rest)), chain.rank_world[1]
    over = unread[:0]
    if by.source.has_own_order:
        rest, unread, over = _in_turns(loaded, UnreadRanges(ranges), unread, new_world)
    else:
        rest = UnreadRanges([*((place, place + 1) for place in unread.tolist()), *ranges])
        unread = unread[:0]
    read = deal.cuts.of_all(deal.cuts.start(at.yielded))
    before = Counts(read, read, at.yielded)
    leg = _leg_behind(at, world, rest, before)
    leg = replace(leg, returned=unread, world=new_world, over=over)
    return Position(order=at.order, leg=leg)


def _leg_behind(at: Position, world: int, rest: UnreadRanges, before: Counts) -> EpochRest:
    """Return the leg behind a position of ``world`` ranks; ``before``: the counts of that leg."""
    was, batches = at.leg, world * at.yielded
    if was is None:
        return EpochRest(world, rest, before, batches)
    return EpochRest(was.begun_by, rest, was.before + before, was.batches + batches)


def _in_turns(
    loaded: Loaded, rest: UnreadRanges, unused: NDArray[np.int64], world: int
) -> tuple[UnreadRanges, NDArray[np.int64], NDArray[np.int64]]:
    """Move places from the row until their number is a multiple of ``world``.

    Return the row, these places, and those that are over if the row has too few.
    """
    lacking = -len(unused) % world
    if lacking > len(rest):
        every = np.concatenate([unused, *_places_of(loaded, rest.ranges)])
        even = len(every) // world * world
        return UnreadRanges([]), np.sort(every[:even]), np.sort(every[even:])
    more = _places_of(loaded, rest.cut(0, lacking))
    left = UnreadRanges(rest.cut(lacking, len(rest)))
    return left, np.sort(np.concatenate([unused, *more])), unused[:0]


def _places_of(loaded: Loaded, ranges: Sequence[tuple[int, int]]) -> list[NDArray[np.int64]]:
    """Return the places of a mixture at numbers of its row of parts."""
    by, epoch = loaded.by, loaded.epoch
    assert by.indexed is not None
    return [as_array(by.indexed.places_of(range(*r), by.orders.row, epoch)) for r in ranges]


def _over(leg: EpochRest | None) -> NDArray[np.int64]:
    """Return the places that a leg deals to nobody."""
    return np.empty(0, np.int64) if leg is None else leg.over


def _whole(by: Chain) -> UnreadRanges:
    assert by.indexed is not None
    # What is left out, too.
    return UnreadRanges([(0, by.indexed.places(by.orders.row.of_all_ranks()))])


def _pool_size(echo: Any, loaded: Loaded, group: int) -> PoolSize:
    """Return the size that the earlier run chose for a pool, at most the size allowed here."""
    if echo.pool is not None:
        return PoolSize(echo.pool)
    size = max(group, loaded.pool_size.size)
    most = max(DEFAULT_POOL_BATCHES * group, echo.pool_bytes or 0)
    return PoolSize(min(size, most))


def _progress_of_alike(loaded: Loaded) -> list[_RankProgress]:
    """Return the progress of each of several ranks with equal states.

    Items that pools held when their leg began had earlier uses, which differ between ranks.
    """
    left, leg = _progress_of(loaded), loaded.position and loaded.position.leg
    rank, world = loaded.by.rank_world
    if not leg or leg.held is None:
        return [left] * world
    is_held = left.ordinals < leg.held_each
    at = left.ordinals[is_held]
    of_rank, of_ranks = leg.held.of_rank(rank).spent[at], list[_RankProgress]()
    for each in range(world):
        spent = left.spent.copy()
        spent[is_held] += leg.held.of_rank(each).spent[at] - of_rank
        of_ranks.append(left._replace(spent=spent))
    return of_ranks


def _progress_of(loaded: Loaded) -> _RankProgress:
    """Return the progress of a rank when it left the epoch."""
    position = loaded.position or Position()
    by = loaded.by.on_leg(position.leg)
    nodes = [node for node in position.parts if node is not None]
    node = nodes[0] if nodes else None
    told = [read for each in nodes if (read := each.read_so_far()) is not None]
    if told:  # the inputs of the first are rows of the source; one at most joins sequences
        packed = max(told, key=lambda read: (len(read.waiting), read.sequences))
        number_of = (node if isinstance(node, FilterRecord) else FilterRecord()).number_of
        offsets = {number_of(at): offset for at, offset in packed.offsets.items()}
        rows, waiting = told[0].rows, as_array(range(0))
        if packed.waiting:  # of what follows the oldest of these some was handed out
            rows = number_of(packed.rows)
            waiting = np.array([*map(number_of, packed.waiting)], np.int64)
        nothing = np.zeros_like(waiting)
        return _RankProgress(rows, waiting, nothing, nothing, packed.sequences, offsets)
    layer = by.flow.echo
    if not isinstance(node, PoolStart) or layer is None or layer.stage.counts is None:
        # (Items that enter an adaptive pool are used at once; the pool only has further copies.)
        return _RankProgress(position.fresh)
    uses_drawn = position.yielded * by.batch_size
    key = pool_key(loaded.seed, loaded.epoch, position.leg)
    size = loaded.pool_size.size
    pool = Pool(layer.stage.counts, size, layer.group, key, by.examples())
    pool.restore(node.snapshot)
    pool.skip(-(-uses_drawn // layer.group) - pool.step)
    return _RankProgress(pool.admitted, *pool.left())


def _unread(
    ranks: Sequence[Loaded], each: Sequence[_RankProgress], rest: UnreadRanges
) -> tuple[list[tuple[int, int]], NDArray[np.int64], NDArray[np.int64], dict[int, int]]:
    """Return the unread ranges of a row, unread places before them, the places in pools, and how
    many tokens were packed of which unread places."""
    first, size, world = ranks[0], len(rest), len(ranks)
    by, selection = first.by, first.by.selection
    position = first.position or Position()
    rows, group = [left.rows for left in each], by.batch_size
    head = 0 if position.leg is None else position.leg.head_each
    # Up to here some rank had read of the row. What is begun is returned by its place.
    ahead = max(0, max(left.rows + (left.rows in left.offsets) for left in each) - head)
    share = selection.share
    deals_by_example = share is not None and share.costs is not None
    if deals_by_example or by.source.has_own_order:
        ahead = min(-(-ahead // group) * group, size // world)  # whole global batches
    places, unread, ranges = [], [np.empty(0, np.int64)], list[tuple[int, int]]()
    begun = dict[int, int]()
    indexed = by.indexed
    assert indexed is not None
    for rank, left in enumerate(each):
        of_rank = by.of_ranks(rank, world, by.size_of_batches).on_leg(position.leg)
        if not len(left.ordinals) and left.rows == head + ahead:
            continue
        of_rank_selection = of_rank.selection
        if not deals_by_example:  # it need not be drawn to know the places
            of_rank_selection = replace(of_rank_selection, drawing=None)
        order = indexed.order(of_rank_selection, first.seed, first.epoch, group)
        places.append(as_array(order.places(left.ordinals)))
        for row, offset in left.offsets.items():
            (place,) = as_array(order.places(range(row, row + 1))).tolist()
            begun[place] = offset
        if not selection.has_runs:
            unread.append(as_array(order.places(range(left.rows, head + ahead))))
    if selection.has_runs:
        assert selection.share is not None
        runs = [replace(selection.share, rank=r).run(size, whole=False) for r in range(world)]
        for run, end, own in zip(runs, [*runs[1:], size], rows, strict=True):
            ranges += rest.cut(run + own - head, end)
    else:
        ranges += rest.cut(world * ahead, size)
    places_held = np.concatenate([np.empty(0, np.int64), *places])
    return ranges, np.concatenate(unread), places_held, begun


def _describe(loaded: Loaded, position: Position, chain: Chain, lost_uses: int) -> str:
    """Describe for the log where other ranks go on."""
    by, leg = loaded.by, position.leg
    indexed = by.indexed
    assert leg is not None
    if indexed is None:
        at = f"{leg.before.fresh_examples:,}"
    else:
        places = indexed.places(by.on_leg(leg).orders.row)
        left = len(leg.rest) + len(leg.returned) + len(leg.over)
        at = f"{places - left:,} of {places:,}"
    lost_copies = f"; {lost_uses:,} copies lost" if by.has_fixed_echo else ""
    return (
        f"goes on in epoch {loaded.epoch} at example {at} with "
        f"{_describe_change(by, chain)}{lost_copies}"
    )


def _describe_change(by: Chain, chain: Chain) -> str:
    """Describe the change of ranks and batch size."""
    (_, was), (_, now) = by.rank_world, chain.rank_world
    changes = [] if now == was else [f"{now} rank{'s' * (now > 1)} instead of {was}"]
    mine, theirs = chain.size_of_batches, by.size_of_batches
    if isinstance(mine, list) and isinstance(theirs, list):
        mine, theirs = mine[0], theirs[0]
    if mine != theirs:
        changes.append(f"batches of {mine} instead of {theirs}")
    return " and ".join(changes) or "batches that are planned otherwise"
