"""Streams, states and errors of many pipelines stay what they were, bit for bit.

Each line of ``corpus.jsonl`` is a case (``corpus_builder``), with digests of what it gave when it
was written: of the batches of two epochs; or with the first line of its error. A change that moves
one of them says why. A state in the middle of the first epoch leads to the same tail. To write them
anew::

    PYTHONPATH=tests:tests/corpus:tests/other_package python -m test_corpus
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from corpus_builder import Case, build, draw

import stoker
from stoker.errors import CombinationError
from strategies import FULL, frozen

CORPUS = Path(__file__).parent / "corpus.jsonl"
CASES = 340
EPOCHS = 2
BLOCK = 34
"""Cases that one test goes through."""

THREADS_EVERY, PROCESSES_EVERY = (1, 1) if FULL else (3, 12)
"""With workers, the case in so many that is tried where costly tests run."""

Found = dict[str, Any]


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def told(error: Exception, folder: Path) -> str:
    """Return the first line of an error, without where this run wrote its files."""
    first = str(error).partition("\n")[0].replace(str(folder), "FOLDER")
    kind = ValueError if isinstance(error, CombinationError) else type(error)
    return f"{kind.__name__}: {first}"


def shape(state: dict[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in state.items()}


def observe(case: Case, folder: Path, workers: tuple[int, str | None]) -> Found:
    """Return what a case gives: of each epoch, how many batches, and their digest."""
    found: Found = {"epochs": []}
    count, kind = workers

    def built() -> stoker.Pipeline[Any]:
        made = build(case, folder)
        return made if case["source"][0] == "loader" else made.workers(count, kind=kind)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pipeline = built()
            streams = []
            for _ in range(EPOCHS):
                streams.append([digest(frozen(batch)) for batch in pipeline])
                found["epochs"].append([len(streams[-1]), digest(streams[-1])])
        except (stoker.StokerError, ValueError, TypeError) as error:
            found["error"] = told(error, folder)
            return found
        first = built()
        trees = [shape(first.state_dict()), shape(pipeline.state_dict())]
        with iter(first) as batches:
            half = len(list(islice(batches, len(streams[0]) // 2)))
            try:
                state = first.state_dict()
            except stoker.StateError as error:  # of streams
                found["no_state"] = told(error, folder)
                return found
        assert trees == [shape(state)] * 2
        resumed = built()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert [digest(frozen(batch)) for batch in resumed] == streams[0][half:]
    return found


def cases() -> list[tuple[Case, Found]]:
    rows = map(json.loads, CORPUS.read_text().splitlines())
    return [(row["case"], row["found"]) for row in rows]


BLOCKS = range(0, CASES, BLOCK)


@pytest.mark.parametrize(
    ("workers", "kind", "every"),
    [
        (0, None, 1),
        (1, "thread", 11),
        (4, "thread", 7),
        (2, "process", 34),
        *(
            pytest.param(workers, kind, every, marks=pytest.mark.full)
            for kind, every in (("thread", THREADS_EVERY), ("process", PROCESSES_EVERY))
            for workers in ((1, 4) if FULL else (4,))
        ),
    ],
)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_corpus_gives_what_it_gave(
    block: int, workers: int, kind: str | None, every: int, tmp_path: Path
) -> None:
    for case, found in cases()[block : block + BLOCK : every]:
        if kind == "thread" and ["draws"] in case["stages"]:  # no word for threads covers it
            continue
        got = observe(case, tmp_path, (workers, kind))
        assert got == found, json.dumps(case)


def test_the_corpus_has_every_source_and_stage() -> None:
    from corpus_builder import SOURCES, STAGES

    without_error = [case for case, found in cases() if "error" not in found]
    assert len(without_error) > 300
    assert {case["source"][0] for case in without_error} >= SOURCES.keys() - {"faulty"}
    assert {name for case in without_error for name, *_ in case["stages"]} == STAGES.keys()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, CORPUS.open("w") as out:
        for number in range(CASES):
            case = draw(number)
            found = observe(case, Path(folder), (0, None))
            print(json.dumps({"case": case, "found": found}), file=out)
            if "error" in found:
                print(number, case, found["error"], file=sys.stderr)


if __name__ == "__main__":
    main()
