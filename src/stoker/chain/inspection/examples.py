"""Single examples of a pipeline, and its next output, without changing its position."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.validate import is_whole_number, whole_from
from stoker.chain.chain import Chain
from stoker.chain.cursor import Cursor
from stoker.chain.epoch_position import EpochPosition
from stoker.chain.step_epochs import StepEpochs
from stoker.engine.flow import Flow
from stoker.engine.work.step import REJECTED, Failure
from stoker.engine.work.work import Work
from stoker.engine.workers.make import Workers
from stoker.schedule.orders.order import Places
from stoker.schedule.sharding import EpochIndices, StridedSharding
from stoker.sources.origin import IndexedSource, check_fields

# Rows of an order that are searched at once: 0.5 MB. Chosen, not measured.
_SEARCHED = 1 << 16


def name_of(chain: Chain, number: Any) -> str:
    """Return the name of an example. Raises TypeError or ValueError where there is none."""
    return _indexed(chain, "name_of").name_of(_number(chain, number, "name_of"))


def labels_of(chain: Chain, field: Any) -> NDArray[Any]:
    """Return the label of each example. Raises TypeError or ValueError where there are none."""
    source = _indexed(chain, "labels")
    check_fields(source, field)
    return source.labels(field)


def example_of(chain: Chain, number: Any, epoch: int, place: Any, use: Any) -> Any:
    """Return an example as an epoch makes it, up to the stage that joins it with others."""
    chain = replace(chain, leg=None)  # places are the same in all legs of an epoch
    flow, source = chain.flow, _indexed(chain, "example")
    number = _number(chain, number, "example")
    epoch = whole_from(0, epoch, ".example() takes epoch= as")
    place = _place_of(chain, number, epoch) if place is None else place
    place = whole_from(0, place, ".example() takes place= as")
    use = whole_from(1, use, ".example() takes use= as")
    return _made(flow, chain.seed, source, number, epoch, place, use)


def _made(
    flow: Flow, seed: int, source: IndexedSource, number: int, epoch: int, place: int, use: int
) -> Any:
    values: list[Any] = []
    order = EpochIndices(_Alone(number), StridedSharding(), 1)
    # Elsewhere the main thread may draw from the global generators meanwhile.
    is_main = threading.current_thread() is threading.main_thread()
    end = next((layer.at for layer in flow.layers if layer.ends_examples), len(flow.layers))
    for segment in flow.segments:
        if segment.at >= end:
            break
        alone = replace(segment, cache=None, cache_at=0)
        work = Work(alone, flow.address(segment.at, seed, epoch), source, order)
        ns = alone.counters()
        at_use = use - 1 if flow.echo is not None and flow.echo.at < segment.at else 0
        with work.seeding(with_global=is_main):
            if segment.source is not None:
                values = work.read(np.array([number], np.int64), [place], ns)
            work.apply(values, [place], [at_use], ns)
        if values[0] is REJECTED:
            raise LookupError(f"example {number} is left out by a filter")
        if type(values[0]) is Failure:
            raise values[0].error
        if segment.batch is not None:
            break
    return values[0]


class _Alone:
    """An order with one example at all places, so that errors name it."""

    together = 0

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return 1

    def at(self, places: Places) -> NDArray[np.int64]:
        return np.full(len(places), self._number, np.int64)


def _place_of(chain: Chain, number: int, epoch: int) -> int:
    """Return the first place of an example among those of this rank in an epoch."""
    source, selection = _indexed(chain, "example"), chain.selection
    if chain.plans_batches:  # the rank that gets it changes no place
        selection = selection.of_all_ranks()
    order = source.order(selection, chain.seed, epoch, group=chain.batch_size)
    for start in range(0, len(order), _SEARCHED):
        stop = min(start + _SEARCHED, len(order))
        found = np.flatnonzero(order.span(start, stop) == number)
        if len(found):
            row = start + int(found[0])
            return int(next(iter(order.places(range(row, row + 1)))))
    here = " on this rank" if chain.rank_world[1] > 1 else ""
    raise LookupError(f"example {number} does not come in epoch {epoch}{here}")


def next_output(position: EpochPosition) -> Any:
    """Return the next output without changing the position. Raises ValueError if it cannot."""
    chain = position.chain
    if not chain.source.is_indexed:
        raise ValueError(
            f".peek() reads an output twice, and {chain.source.name} can be read once: take one "
            "with next(iter(pipeline))"
        )
    if chain.rank_world[1] > 1 and chain.follows_clock:
        raise ValueError(
            ".peek() asks no other rank, and here ranks decide together what comes next: take one "
            "with next(iter(pipeline))"
        )
    alone = replace(chain.apart(), workers=Workers(0))
    twin = StepEpochs(alone) if chain.flows else Cursor(alone)
    twin.load(position.save())
    iterator = twin.begin()
    try:
        return next(iterator)
    except StopIteration:
        raise ValueError(".peek(): the next epoch is empty") from None
    finally:
        iterator.close()


def _indexed(chain: Chain, method: str) -> IndexedSource:
    source = chain.source
    if not isinstance(source, IndexedSource):
        raise ValueError(f".{method}() asks for an example by its number: {source.name} has none")
    return source


def _number(chain: Chain, number: Any, method: str) -> int:
    length = len(_indexed(chain, method))
    if not is_whole_number(number):
        raise TypeError(f".{method}() takes the number of an example, not {number!r}")
    if not 0 <= number < length:
        raise LookupError(
            f"there is no example {number}; the source has examples 0 to {length - 1}"
        )
    return int(number)
