"""What the rows say: damage by number of uses and by distance."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"
LINEAR = RESULTS / "repeats_linear.jsonl"
LANGUAGE = RESULTS / "repeats_language.jsonl"
