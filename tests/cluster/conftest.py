"""What all tests of caches over nodes have."""

from __future__ import annotations

import pytest
from nodes import write_token


@pytest.fixture(autouse=True)
def own_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the user's list of caches and token alone; wait for servers of a busy machine."""
    folder = tmp_path_factory.mktemp("places")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("STOKER_TOKEN_FILE", str(write_token(folder)))
    monkeypatch.setattr("stoker.cluster.cache_connection.DEADLINE_S", 60.0)
