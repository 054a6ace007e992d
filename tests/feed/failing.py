"""Functions that cannot be served, or not for long."""

from __future__ import annotations

from typing import Any

import stoker


def fails_on_7() -> stoker.Pipeline:
    return stoker.from_dataset(range(20), seed=0).map(_not_7).batch(2)


@stoker.thread_safe
def _not_7(value: int) -> int:
    if value == 7:
        raise ValueError("seven")
    return value


def adaptive() -> stoker.Pipeline:
    return stoker.from_dataset(range(20), seed=0).batch(2).echo("auto")


def late() -> stoker.Pipeline:
    return stoker.from_dataset(range(20), seed=0).late(1).batch(2)


def flowing() -> stoker.Pipeline:
    return stoker.from_dataset(range(20), seed=0).batch(2).repeat().steps(7)


def on_device() -> stoker.Pipeline:
    return stoker.from_dataset(range(20), seed=0).batch(2).to_torch()


def raises() -> stoker.Pipeline:
    raise RuntimeError("no data today")


def returns_none() -> Any:
    return None


def unpicklable() -> stoker.Pipeline:
    return stoker.from_dataset(range(20), seed=0).map(lambda value: lambda: value)


def loader() -> stoker.Pipeline:
    return stoker.from_loader([[number] for number in range(10)])
