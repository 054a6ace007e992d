"""A keeper in a process of its own. It ends when the process that started it ends."""

from __future__ import annotations

import os
import sys

import msgspec

from stoker.basics.process import end_with
from stoker.cluster.keeper.server import Keeper
from stoker.cluster.members.torchrun import Start, Started
from stoker.errors import StokerError
from stoker.transport.address import join_address


def main() -> None:
    """Read the settings from standard input, and serve until standard input is closed."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    try:
        keeper = Keeper(
            join_address(start.host, 0),
            start.token,
            limit=start.limit,
            folder=start.folder,
            insecure=start.insecure,
        )
    except (OSError, ValueError, ImportError, StokerError) as error:
        _say(Started(error=str(error)))
        return
    end_with(start.parent, by_main_thread=False, before_exit=keeper.close)
    try:
        _say(Started(keeper.address, keeper.folder, keeper.limit_bytes))
        while os.read(0, 1):  # the parent sends nothing more: wait until it closes the pipe
            pass
    finally:
        keeper.close()


def _say(started: Started) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(started) + b"\n")
    sys.stdout.flush()
