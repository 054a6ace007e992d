"""Mutated bytes for parsers of what strangers wrote, and a check of what a parser makes of them.

A seeded generator draws everything, so a number names a case: the same in every run.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

FULL = os.environ.get("STOKER_TEST_PROFILE") == "full"
COUNT = 100_000 if FULL else 300
WITHIN_S = 150

ODD_BYTES = [0, 1, 0x7F, 0x80, 0xFF, *b"-+_ 9.(["]
ODD_NUMBERS = [0, 1, 0x7FFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Change, cut, double, put in or take out a few bytes."""
    changed = bytearray(data)
    for _ in range(int(rng.choice([1, 1, 2, 4]))):
        if not changed:
            break
        at, kind = int(rng.integers(len(changed))), rng.integers(10)
        some = int(rng.choice([1, 4, 64, 512]))
        if kind < 3:
            changed[at] = int(rng.integers(256))
        elif kind < 5:
            changed[at] = int(rng.choice(ODD_BYTES))
        elif kind == 5:
            del changed[at:]
        elif kind == 6:
            del changed[at : at + some]
        elif kind == 7:
            changed[at:at] = rng.bytes(some)
        elif kind == 8:
            changed[at:at] = changed[at : at + some]
        else:
            width, order = int(rng.choice([2, 4, 8])), str(rng.choice(["little", "big"]))
            number = int(ODD_NUMBERS[int(rng.integers(len(ODD_NUMBERS)))]) % (1 << 8 * width)
            changed[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
    return bytes(changed)


@contextlib.contextmanager
def bounded(case: str) -> Iterator[None]:
    """Fail a case that does not end."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"{case} hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(WITHIN_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz(
    name: str,
    seeds: Sequence[bytes],
    parse: Callable[[bytes], object],
    refusals: type[Exception] | tuple[type[Exception], ...],
    *,
    says: str = "",
    mutate: Callable[[bytes, np.random.Generator], bytes] = mutated,
    share: int = 1,
) -> Counter[str]:
    """Parse mutated seeds: each is parsed, or refused by an error of these kinds, in time.

    Args:
        name: of the parser. The files of ``corpus/NAME`` are parsed first, as they are: what was
            once parsed wrongly.
        seeds: what is mutated.
        parse: raises for what it refuses.
        refusals: what it may raise, and nothing below that.
        share: of the cases: one of so many, where several tests are of the same parser.
        says: what the text of each refusal has in it, such as the name of the file.

    Returns how many were parsed, and how many refused.
    """
    outcomes: Counter[str] = Counter()

    def try_one(case: str, data: bytes) -> None:
        try:
            with bounded(case):
                parse(data)
        except refusals as error:
            if says not in str(error):
                raise AssertionError(f"{case} does not say {says!r}: {error!r}") from error
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"{case} raised {error!r}: {data[:2000]!r}") from error
        else:
            outcomes["parsed"] += 1

    for path in sorted((Path(__file__).parent / "corpus" / name).glob("*")):
        try_one(str(path), path.read_bytes())
    for number in range(-(-COUNT // share)):
        rng = np.random.default_rng([number, *name.encode()])
        data = seeds[int(rng.integers(len(seeds)))]
        try_one(f"{name} {number}", mutate(data, rng))
    assert outcomes["refused"], "nothing was refused: the seeds are not read at all"
    assert outcomes["parsed"], "nothing was parsed: the seeds are wrong"
    return outcomes
