"""``stoker cache serve``: a keeper in the foreground."""

from __future__ import annotations

import signal
import time
from contextlib import closing
from pathlib import Path
from types import FrameType

from stoker.basics.resources import format_bytes
from stoker.cache.location import parse_limit
from stoker.cluster.keeper.server import Keeper
from stoker.transport.secret import make_token_file, token_path


def serve_keeper(
    address: str, size: str, folder: Path | None, token_file: Path | None, *, insecure: bool
) -> None:
    """Run a keeper until this process is interrupted.

    Raises CacheError if the store cannot be made, TokenError for an unusable token, OSError if the
    address is not free, ValueError for invalid arguments, and KeyboardInterrupt at the end.
    """
    limit = parse_limit(size)
    path = token_file or token_path()
    is_new = not path.exists()
    token = make_token_file(path)
    signal.signal(signal.SIGTERM, _interrupt)
    where = None if folder is None else str(folder)
    keeper = Keeper(address, token, limit=limit, folder=where, insecure=insecure)
    with closing(keeper):
        if is_new:
            print(f"made a token in {path}: copy the file to the other hosts", flush=True)
        print(
            f"keeps {format_bytes(keeper.limit_bytes)} at {keeper.address}, in {keeper.folder}",
            flush=True,
        )
        while True:
            # The keeper's threads do the work; a signal ends this process.
            time.sleep(3600)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
