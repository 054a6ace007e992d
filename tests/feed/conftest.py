"""What all tests of feeds have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playing import fresh_name, wait_until


@pytest.fixture
def name() -> Iterator[str]:
    """Return a feed's name; no feed has it when the test has ended."""
    made = fresh_name()
    yield made
    wait_until(lambda: made not in Path("/proc/net/unix").read_text(), "the address is free")
