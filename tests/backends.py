"""Tests that run twice: with stoker-native, and as if it were not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stoker.images import native

BACKENDS = ["stoker-native", "without"] if native.library() else ["without"]


@pytest.fixture(params=BACKENDS, autouse=True, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "without":
            patch.setattr(native, "library", lambda: None)
        yield request.param
