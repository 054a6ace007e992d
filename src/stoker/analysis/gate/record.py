"""The JSON file of a gate: its runs and judgements."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.analysis.gate.figures import RunFigures
from stoker.analysis.gate.judging import Judgement
from stoker.analysis.model.report import HostLoad, read_json

GATE_SCHEMA = "stoker-gate/1"


class GateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a script, in the order in which they ran, and what they decide."""

    schema: str = GATE_SCHEMA
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


def read_record(path: Path) -> GateRecord:
    """Read a record. Raises OSError, or ValueError for a file that is none of this version."""
    record = read_json(path, GateRecord, f"a file of `stoker gate --json` ({GATE_SCHEMA})")
    if record.schema != GATE_SCHEMA:
        raise ValueError(
            f"{path} has the schema {record.schema!r}; this version of stoker reads "
            f"{GATE_SCHEMA!r}. Run the gate again"
        )
    return record
