"""The JSON file of a gate: its runs and judgements."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.analysis.gate.figures import RunFigures
from stoker.analysis.gate.judging import Judgement
from stoker.analysis.model.report import HostLoad


class GateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a script, in the order in which they ran, and what they decide."""

    schema: str = "stoker-gate/1"
    stoker: str
    """The version of stoker that wrote the file."""
    made: str
    """Date and time, ISO 8601."""
    command: list[str]
    runs: list[RunFigures]
    base: list[RunFigures] = []
    """The other version's, each beside the run of the same number; empty without one."""
    judgements: list[Judgement]
    verdict: str
    """"worse", "not worse" or "undecided": the worst of the judgements."""
    host: HostLoad | None = None
    """Who used the processors during the runs; None where the kernel does not tell."""


def write_record(record: GateRecord, path: Path) -> None:
    """Write a record as JSON. Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
