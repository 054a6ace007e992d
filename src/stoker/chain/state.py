"""Writes and reads saved states: exact at the last yielded batch, small, checked field by field.

A state is a flat dict for JSON: a few numbers for people, and all else as one text (``content``),
with the signature of its chain and a checksum, which finds damage. So states of all steps have the
same keys, as checkpointers ask for that merge trees. Whether the values are possible, the chain
that saved it tells.

Values that no run of the pipeline could have saved are refused before anything is made of them, so
that a state never takes more memory or time than the pipeline itself. The files of streams write
and read their nodes. Errors that only the replay of a pool can find are raised by the replay.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from stoker.basics import compact_integers
from stoker.basics.compact_integers import check_integer
from stoker.basics.warn import warn
from stoker.chain.chain import Chain
from stoker.echoing.stage import DEFAULT_POOL_BATCHES
from stoker.engine.checkpoint import Bounds, PoolSize, Position
from stoker.engine.flow import Flow, Sift
from stoker.engine.orders import Orders
from stoker.engine.survivors import LOST
from stoker.errors import StateError
from stoker.schedule.echo_record import difference_of
from stoker.schedule.epoch_rest import EpochRest
from stoker.schedule.selection import Cut
from stoker.stats import Counts

# Raised by each change after which older states cannot be read: they are refused by number.
FORMAT = 4
_SHOWN = ("format", "epoch", "step", "finished")
"""The fields that stand beside the text. ``epoch`` is also read; the others are only shown."""
_POOL = "0"
"""The name of the pool in a state."""
_DIGEST_DIGITS = 8
_IMPOSSIBLE = (LookupError, TypeError, ValueError, AttributeError, msgspec.ValidationError)
"""What reading raises for a state that no run could have saved; msgspec's is no ValueError in its
older versions."""


@dataclass(frozen=True)
class Loaded:
    """The values of a state.

    ``by`` is the chain of the rank that saved it; it may have another rank, number of ranks, or
    batch size than the one that loads it. ``rank``: that rank, if ranks' states differ. ``skip``:
    the outputs of the next epoch that ``resume_at`` leaves out.
    """

    by: Chain
    rank: int | None
    seed: int
    epoch: int
    position: Position | None
    pool_size: PoolSize
    before: Counts
    handed_out: int | None
    skip: int = 0


def write(
    chain: Chain,
    epoch: int,
    position: Position,
    pool_size: PoolSize,
    before: Counts,
    handed_out: int | None = None,
    skip: int = 0,
) -> dict[str, Any]:
    """Return a state, ready for JSON except for a loader's own state.

    ``handed_out``: the outputs of all step epochs, with ``.repeat()``. ``skip``: as in ``Loaded``.
    """
    leg, outputs = position.leg, chain.steps
    step = position.yielded + (0 if leg is None else leg.before.steps)
    ended = bool(epoch and not step)
    if handed_out is not None:
        ended = bool(outputs and handed_out and not handed_out % outputs)
    state: dict[str, Any] = {
        "format": FORMAT,
        "epoch": epoch,
        "step": step,
        "finished": ended,
        "numpy": np.__version__,
        "pipeline": chain.signature(),
        "world": chain.rank_world[1],
        "batch": chain.size_of_batches,
        "seed": chain.seed,
        "yielded": position.yielded,
        "uses": position.uses,
        "pool_sizes": {_POOL: pool_size.size} if pool_size.size else {},
        "parts": [node.to_json() for node in position.parts if node is not None],
        "spent": {str(account): n for account, n in position.spent.items()},
        "filtered": position.filtered,
        "fresh": position.fresh,
        "loaded": position.loaded,
        "before": [before.fresh_examples, before.uses, before.steps],
    }
    if chain.ranks_differ:
        state["rank"] = chain.rank_world[0]
    if leg is not None:
        state["leg"] = leg.to_json()
    drawn = chain.source.drawn_before(chain.orders.row, epoch)
    if drawn is not None:
        state["drawn"] = drawn
    if handed_out is not None:
        state["handed_out"] = handed_out
    if skip:
        state["skip"] = skip
    if position.order:
        state["order"] = position.order
    sealed = seal(state)
    if not chain.source.is_indexed:  # its own, maybe not JSON; no checkpointer divides a tuple
        own = position.loader_state
        sealed["loader"] = () if own is None else (own,)
    return sealed


def seal(fields: dict[str, Any]) -> dict[str, Any]:
    """Return these fields as a state: those to be shown, and one text with all others."""
    shown = {name: fields[name] for name in _SHOWN if name in fields}
    rest = {name: value for name, value in fields.items() if name not in shown}
    return {**shown, "content": json.dumps({**rest, "checksum": _checksum(fields)})}


def unseal(state: Any) -> dict[str, Any]:
    """Return the fields of a state, and a loader's own as ``loader``. Raises StateError."""
    if not isinstance(state, dict) or "format" not in state:
        raise StateError("this is no state of a stoker pipeline (state_dict() makes one)")
    if state["format"] != FORMAT:
        known = compact_integers.short_repr(state["format"])
        raise StateError(f"the state has format {known}; this version reads {FORMAT}")
    try:
        fields: dict[str, Any] = {
            **json.loads(state["content"]),
            **{name: state[name] for name in _SHOWN},
        }
        checksum, own = fields.pop("checksum"), state.get("loader", ())
        if type(own) not in (list, tuple) or len(own) > 1:
            raise ValueError("a loader has one state")
    except (*_IMPOSSIBLE, RecursionError) as error:
        raise StateError(f"the state is damaged: {type(error).__name__}: {error}") from error
    if checksum != _checksum(fields):
        raise StateError("the state is damaged: its checksum does not fit")
    return {**fields, "loader": own[0]} if own else fields


def read(state: Any, chain: Chain, *, elastic: bool = True) -> Loaded:
    """Read a state for a chain. Raises StateError when it does not fit or is damaged.

    The seed must be the same if the chain was given one; ranks and the size of batches must be if
    not ``elastic``.
    """
    seed = None if chain.is_seed_drawn else chain.seed
    state = unseal(state)
    try:
        by = _saved_by(state, chain, elastic=elastic)
        rank = by.rank_world[0] if "rank" in state else None
        theirs = check_integer(state["seed"], 0, None)
        if seed is not None and seed != theirs:
            raise StateError(
                f"the state belongs to another run: its seed is {theirs}, this pipeline's is {seed}"
            )
        before = [check_integer(count) for count in state["before"]]
        _note_drawn(state, by)
        there = _on_leg(state, by)
        size = _pool_size(state["pool_sizes"], there.flow)
        on_record = None if chain.record is None else chain.record.echo
        held = size if on_record is None else PoolSize(on_record.size)
        loaded = Loaded(
            by,
            rank,
            theirs,
            check_integer(state["epoch"]),
            _position(state, there, held),
            size,
            Counts(*before),
            check_integer(state["handed_out"]) if "handed_out" in state else None,
            check_integer(state.get("skip", 0)),
        )
        version = _minor(state["numpy"][:80])
    except _IMPOSSIBLE as error:
        raise StateError(f"the state is damaged: {type(error).__name__}: {error}") from error
    if version != _minor(np.__version__):
        warn(
            f"the state was saved under NumPy {state['numpy'][:80]}, this is {np.__version__}: its "
            "random streams may differ, and then so does the rest of the epoch"
        )
    return loaded


def _note_drawn(state: dict[str, Any], by: Chain) -> None:
    """Tell the source what was drawn before the epoch; raises StateError if that is not known."""
    epoch = check_integer(state["epoch"])
    if "drawn" in state:
        drawn = [check_integer(count) for count in _list(state["drawn"])]
        by.source.note_drawn(by.orders.row, epoch, drawn)
        return
    try:
        by.source.drawn_before(by.orders.row, epoch)
    except ValueError as error:
        raise StateError(str(error)) from None


def _saved_by(state: dict[str, Any], chain: Chain, *, elastic: bool) -> Chain:
    """Return the chain of the rank that saved a state."""
    world, size = check_integer(state["world"], 1), state["batch"]
    is_alike = type(size) is type(chain.size_of_batches)  # planned or not, as the other one
    rank = chain.rank_world[0] if world == chain.rank_world[1] else 0
    rank = check_integer(state.get("rank", rank), 0, world - 1)
    lines, mine = list(state["pipeline"]), chain.signature()
    by = chain
    if is_alike and (elastic or lines == mine):
        with contextlib.suppress(ValueError):  # as a pool that holds no such batch raises
            by = chain.of_ranks(rank, world, size)
    theirs = by.signature()
    if lines != theirs:
        # A signature that differs only in ranks and batch size is no difference.
        changes = {theirs[at]: line for at, line in enumerate(mine)} if by is not chain else {}
        raise StateError(
            "the state belongs to another pipeline: "
            f"{difference_of([changes.get(line, line) for line in lines], mine)}"
        )
    if (*by.rank_world, by.size_of_batches) != (rank, world, size):
        known = compact_integers.short_repr(size)
        raise ValueError(f"{world:,} ranks with batches of {known} do not fit it")
    return by


def _on_leg(state: dict[str, Any], by: Chain) -> Chain:
    """Return the chain that saved a state, on the leg of the epoch that is in it."""
    if "leg" in state:
        indexed = by.indexed
        begun_by, world = check_integer(state["leg"]["begun_by"], 1), by.rank_world[1]
        counts = None if by.echo is None else by.echo.counts
        most = 1 if counts is None else counts.most
        if indexed is not None:
            row = by.of_ranks(0, begun_by, by.size_of_batches).orders.row.of_all_ranks()
            places, end = indexed.places(row), indexed.places_end(row)
        elif not by.source.yields_batches and "loader" in state:
            places = end = 0  # of a stream, none is listed
        else:
            raise ValueError("a leg of an epoch is in it, and this pipeline's have none")
        leg = EpochRest.from_json(state["leg"], world, places, end, most)
        if (leg.offsets or leg.sequences) and not by.packs:
            raise ValueError("packed sequences are in it, and this pipeline packs none")
        if indexed is None and (leg.held is not None or len(leg.over)):
            raise ValueError("places of the epoch are in it, and a stream has none")
        by = by.on_leg(leg)
        if by.data_epoch_steps is not None and by.data_epoch_steps < 0:
            raise StateError(
                f"the state is behind batch {leg.before.steps:,}, where .steps({by.steps}) never is"
            )
    return by


def _checksum(state: dict[str, Any]) -> int:
    try:
        return zlib.crc32(json.dumps(state, sort_keys=True).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"the state is damaged: {error}") from error


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _pool_size(saved: Any, flow: Flow) -> PoolSize:
    """Read the size of the pool."""
    if not saved:
        return PoolSize()
    if flow.echo is None or len(saved) > 1:
        raise ValueError("a pool is in it that this pipeline has not")
    echo, group = flow.echo.stage, flow.echo.group
    least, most = group, DEFAULT_POOL_BATCHES * group
    if echo.is_adaptive:  # pool= may differ from the saved run's
        least, most = 1, compact_integers.LARGEST
    elif echo.pool is not None:
        least = most = echo.pool
    elif echo.pool_bytes is not None:
        most = max(most, echo.pool_bytes)
    return PoolSize(check_integer(saved[_POOL], least, most))


def _position(state: dict[str, Any], by: Chain, pool_size: PoolSize) -> Position | None:
    """Read the position in an epoch of the chain that saved it; None at the beginning."""
    yielded, nested = check_integer(state["yielded"]), "loader" in state
    nodes, flow, leg, steps = _list(state["parts"]), by.flow, by.leg, by.data_epoch_steps
    orders, echo, goes_on = by.orders, flow.echo, flow.carries_pool or leg is not None
    if not yielded and not nested and not (goes_on and nodes):
        return None if leg is None else Position(order=_order(state, orders), leg=leg)
    if steps is not None and yielded > steps:
        raise StateError(f"the state is at batch {yielded:,}, where .steps({steps}) never is")
    is_iterated = not by.source.is_indexed
    examples = compact_integers.LARGEST if is_iterated else by.most_examples()
    accounts = sum(not stage.traits.caches for stage in by.stages)
    found = Position(
        yielded,
        check_integer(state["uses"]),
        check_integer(state["fresh"], 0, examples),
        spent={
            check_integer(int(a), LOST, accounts): check_integer(n)
            for a, n in state["spent"].items()
        },
        filtered=check_integer(state["filtered"]),
        loaded=check_integer(state["loaded"], 0, compact_integers.LARGEST if is_iterated else 0),
        loader_state=state.get("loader"),
        order=_order(state, orders),
        leg=leg,
    )
    epoch = check_integer(state["epoch"])
    if is_iterated:
        if nodes:
            raise ValueError("pools are in it that cannot be made again")
        _check_iterated(flow, yielded, nested, leg)
    elif nested:
        raise StateError("a loader's state is in it, and this pipeline has no loader")
    else:
        group, cuts = orders.group, None
        if orders.rule is not None:
            cuts = orders.cuts(check_integer(state["seed"], 0, None), epoch)
            examples = cuts.examples
            if orders.packs:
                found.fresh = found.fresh if by.ranks_differ else cuts.start(found.uses)
            else:
                group = cuts.largest
                if echo is None:  # one state serves all ranks, whose batches have unequal sizes
                    found.uses = found.fresh = cuts.start(yielded)
        in_step = 1 if echo is None else echo.group
        bounds = Bounds(
            examples, yielded, group, pool_size, in_step, epoch, flow.carries_pool, cuts
        )
        given = iter(_in_place(nodes, flow))
        found.parts = [node for layer in flow.layers for node in layer.read(given, bounds)]
        bounds.check(found.uses)
    return found


def _order(state: dict[str, Any], orders: Orders) -> str:
    """Read the digest of an order that a user's function decided; "" where there is none."""
    if not orders.calls_user or not (state["yielded"] or "leg" in state):
        return ""
    digest = state["order"]
    if type(digest) is not str or len(digest) != _DIGEST_DIGITS:
        raise ValueError(f"{compact_integers.short_repr(digest)} is no digest of an order")
    return digest


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{compact_integers.short_repr(value)} is no list")
    return list(value)


def _check_iterated(flow: Flow, yielded: int, nested: bool, leg: EpochRest | None) -> None:
    """Check a position over a loader or a stream: its own state is all there is."""
    selection = flow.orders.selection
    if nested and not flow.source.takes_state:
        raise StateError("a loader's state is in it, and this pipeline's source takes none")
    if leg is not None and (flow.echo is not None or selection.between != Cut()):
        raise ValueError("a leg of an epoch is in it, and this pipeline's have none")
    if not yielded and leg is None:
        return
    fixed = flow.echo is not None and not flow.is_adaptive
    if not nested or fixed or flow.is_decided or not selection.is_kept_by_streams:
        raise StateError(
            "the state is in the middle of an epoch that this pipeline cannot make again"
        )


def _in_place(nodes: list[Any], flow: Flow) -> list[Any]:
    """Return a node for each layer with a kind.

    None for a filter that is there for ``max_errors=`` alone, if the saved run had none.
    """
    kinds, filters = [node["kind"] for node in nodes], Sift.kind
    if kinds == list(flow.kinds):
        return nodes
    others = [kind for kind in flow.kinds if kind != filters]
    if kinds == others and not flow.has_filter:
        rest = iter(nodes)
        return [None if kind == filters else next(rest) for kind in flow.kinds]
    if [kind for kind in kinds if kind != filters] == others:
        raise StateError(
            "the state was saved with another max_errors=: examples it left out cannot be told"
        )
    raise ValueError(f"{compact_integers.short_repr(kinds)} are in it, not {list(flow.kinds)}")
