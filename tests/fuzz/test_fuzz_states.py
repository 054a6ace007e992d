"""States and records that were not saved but made, with checksums that are right."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mutations import ODD_NUMBERS, fuzz, mutated

import stoker
from stoker.basics import compact_integers
from strategies import Examples, jitter, opened, signed

pytestmark = pytest.mark.timeout(1800)

EXAMPLES = 60
MOST_BATCHES = 400

ODD: list[Any] = [None, True, "", " ", ":", -1, 2.5, float("nan"), float("inf"), [], {}, [[]]]
ODD += [{"0": 1}, 10**400, -(2**63), [None], *ODD_NUMBERS]


def source() -> stoker.Pipeline:
    return stoker.from_dataset(Examples(EXAMPLES), seed=0).workers(0)


def with_parts() -> stoker.Pipeline:
    parts = [stoker.from_dataset(Examples(EXAMPLES)).shuffle() for _ in range(2)]
    return stoker.mix(parts, weights=[3, 1], seed=0).batch(4).workers(0)


CHAINS: dict[str, Callable[[], stoker.Pipeline]] = {
    "plain": lambda: source().shuffle().random_map(jitter, on="x").batch(4),
    "echo": lambda: source().shuffle().echo(2.5, pool=16).random_map(jitter, on="x").batch(4),
    "filter": lambda: source().filter(_most, on="id").echo(2, pool=16).batch(4),
    "batches": lambda: source().batch(4).echo(3, pool=4),
    "shard": lambda: source().shuffle().shard(rank=1, world_size=3).echo(2, pool=16).batch(4),
    "repeat": lambda: source().shuffle().echo(2, pool=16).batch(4).repeat().steps(7),
    "mix": with_parts,
}


def _most(number: int) -> bool:
    return number % 5 > 0


def changed(value: Any, rng: np.random.Generator) -> Any:
    """Return something else for one of the values in a structure."""
    children = (
        list(value) if isinstance(value, dict) else range(len(value) if type(value) is list else 0)
    )
    if children and rng.integers(8):
        at = list(children)[int(rng.integers(len(children)))]
        made = copy.copy(value)
        if rng.integers(12) == 0:
            del made[at]
        else:
            made[at] = changed(value[at], rng)
        return made
    kind = rng.integers(4)
    if type(value) is int and kind:
        return value + int(rng.choice([-1, 1, 64, -value, value, 10**6]))
    if type(value) is list and value and kind:
        return [value[:-1], [*value, value[-1]], value[::-1]][int(kind) - 1]
    if type(value) is str and len(value) > 8 and kind:
        return repacked(value, rng)
    return copy.deepcopy(ODD[int(rng.integers(len(ODD)))])


def repacked(text: str, rng: np.random.Generator) -> str:
    """Change what is packed in a text; a text that packs nothing is mutated as it is."""
    parts = text.split(":")
    at = int(rng.integers(len(parts)))
    try:
        content = compact_integers.decode_bytes(parts[at], 1 << 20).tobytes()
    except ValueError:
        return mutated(text.encode(), rng).decode("latin-1")
    parts[at] = compact_integers.encode_bytes(
        np.frombuffer(mutated(content or b"\0", rng), np.uint8)
    )
    return ":".join(parts)


def mutated_json(data: bytes, rng: np.random.Generator) -> bytes:
    value = json.loads(data)
    for _ in range(int(rng.choice([1, 1, 2, 3]))):
        value = changed(value, rng)
    return json.dumps(value).encode()


@functools.cache
def states(kind: str) -> list[bytes]:
    pipeline, found = CHAINS[kind](), []
    for _ in range(2):
        found.append(json.dumps(opened(pipeline.state_dict())).encode())
        for _ in pipeline:
            found.append(json.dumps(opened(pipeline.state_dict())).encode())
    return found


@pytest.mark.filterwarnings("ignore:the state was saved under NumPy")
@pytest.mark.parametrize("kind", sorted(CHAINS))
def test_states(kind: str) -> None:
    pipeline = CHAINS[kind]()

    def load(data: bytes) -> None:
        state = json.loads(data)
        state = signed(state) if isinstance(state, dict) else state
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*pool.*")
            pipeline.load_state_dict(state)
            with iter(pipeline) as batches:
                taken = sum(1 for _ in itertools.islice(batches, MOST_BATCHES))
        assert taken < MOST_BATCHES
        pipeline.state_dict()

    fuzz(f"state {kind}", states(kind), load, stoker.StateError, mutate=mutated_json, share=7)


def followed() -> stoker.Pipeline:
    return source().shuffle().echo("auto", max_factor=3).batch(4)


@functools.cache
def recorded() -> bytes:
    pipeline = followed().workers(1)
    for _ in range(2):
        for _ in pipeline:
            pass
    return json.dumps(pipeline.record()).encode()


@pytest.mark.filterwarnings("ignore:echo.*with a pool of")  # the record says so
def test_records() -> None:
    def replay(data: bytes) -> None:
        chain = followed().replay(json.loads(data))
        for _ in range(2):
            assert sum(1 for _ in itertools.islice(chain, MOST_BATCHES)) < MOST_BATCHES

    refusals = (stoker.StateError,)
    fuzz("record", [recorded()], replay, refusals, mutate=mutated_json)
