"""Tests that run twice: with stoker-native, and as if it were not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stoker.images import native

BACKENDS = ["stoker-native", "Pillow"] if native.library() else ["Pillow"]


@pytest.fixture(params=BACKENDS, autouse=True, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "Pillow":
            patch.setattr(native, "library", lambda: None)
        yield request.param
