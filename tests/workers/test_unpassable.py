"""Values that do not survive the way from a worker: the batch says so, and holds nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stoker
from strategies import one_in


class Unloadable:
    """Can be pickled, and not be loaded again."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise KeyError("not to be loaded")


class LikeClosed(Unloadable):
    """Fails to load as a closed connection would."""

    def __reduce__(self) -> Any:
        return _end, ()


def _end() -> None:
    raise EOFError("not to be loaded")


class Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("not to be copied")


class OnceDumped:
    """Comes into this process, and cannot be sent back to a worker."""

    def __init__(self) -> None:
        self.lock: Any = None

    def __setstate__(self, state: Any) -> None:
        self.lock = threading.Lock()


def some(made: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda n: made() if n % 8 == 3 else n


def of(count: int = 24) -> stoker.Pipeline:
    return stoker.from_dataset(range(count), seed=0)


COLLATES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "shorter": lambda examples: examples[1:],
    "longer": lambda examples: [*examples, 1],
    "tuple": tuple,
    "dict": lambda examples: {"all": examples},
    "array": lambda examples: np.array(examples, object),
}


@pytest.mark.parametrize("made", [threading.Lock, Unloadable, LikeClosed, Uncopied])
@pytest.mark.parametrize("collate", one_in(2, COLLATES))
def test_a_batch_with_what_cannot_be_sent_is_an_error_that_names_it(
    collate: str, made: Callable[[], Any]
) -> None:
    train = of().map(some(made)).batch(4, collate=COLLATES[collate]).workers(1, kind="process")
    seen: list[Any] = []
    with pytest.raises(stoker.StageError) as raised:
        seen.extend(train)
    assert not isinstance(raised.value, stoker.WorkerDied)
    for batch in seen:
        assert {*map(type, batch["all"] if isinstance(batch, dict) else batch)} == {int}


def test_a_collate_may_return_a_list_of_any_length() -> None:
    train = of(8).batch(4, collate=lambda examples: examples[1:]).workers(1, kind="process")
    assert list(train) == [[1, 2, 3], [5, 6, 7]]


def test_a_batch_that_cannot_be_sent_names_the_batch() -> None:
    train = of().map(some(threading.Lock)).batch(4, collate=list).workers(1, kind="process")
    with pytest.raises(stoker.StageError, match=r"worker process.* batch 0.*pickle") as raised:
        list(train)
    assert raised.value.batch == 0


@pytest.mark.parametrize("made", [threading.Lock, Unloadable, Uncopied])
@pytest.mark.parametrize("of_batches", [False, True])
def test_maps_over_batches_and_single_examples_are_no_exception(
    made: Callable[[], Any], of_batches: bool
) -> None:
    train = of().batch(4).map(lambda x: [*x, made()]) if of_batches else of().map(some(made))
    with pytest.raises(stoker.StageError, match=None if of_batches else "worker process"):
        list(train.workers(1, kind="process"))


def test_what_is_kept_and_cannot_be_sent_again_is_an_error() -> None:
    train = of().map(some(OnceDumped)).echo(2, pool=8).map(lambda each: each)
    with pytest.raises(stoker.StageError):
        list(train.batch(4, collate=list).workers(1, kind="process"))


class Unsayable(Exception):
    def __str__(self) -> str:
        raise ValueError("not to be said")


def fail(n: int) -> int:
    if n % 8 == 3:
        raise Unsayable(n)
    return n


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_exception_that_has_no_message_is_one_of_its_example(kind: str) -> None:
    with pytest.raises(stoker.StageError, match=r"map\(fail\) failed on example 3: Unsayable, of"):
        list(of().map(fail).batch(4).workers(1, kind=kind))
    train = of().map(fail, max_errors=3).batch(7).workers(1, kind=kind)
    assert len(list(train)) == 3
    assert all("Unsayable" in skip.cause for skip in train.stats().skips)
