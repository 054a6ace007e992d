"""``stoker cache serve`` and ``stoker cache end``."""

from __future__ import annotations

import signal
import time
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Annotated

from stoker.basics.resources import format_bytes
from stoker.cache.location import parse_limit
from stoker.cli import Argument, report_errors
from stoker.transport.secret import make_token_file, token_path


def serve(
    *,
    listen: Annotated[
        str, Argument(metavar="HOST:PORT", help="This host's address in the cluster.")
    ] = "127.0.0.1:7117",
    size: Annotated[
        str,
        Argument(
            metavar="SIZE",
            help="Limit of the store, such as 64GiB; auto: half of the memory (0.8 of the disk).",
        ),
    ] = "auto",
    folder: Annotated[
        Path | None,
        Argument("Folder on a local disk; kept for the next run. Default: memory."),
    ] = None,
    token_file: Annotated[
        Path | None,
        Argument("The cluster's token (default: $STOKER_TOKEN_FILE, or ~/.config/stoker/token)."),
    ] = None,
    insecure: Annotated[
        bool,
        Argument("Do not encrypt the traffic; jobs give .cache(insecure=True), too."),
    ] = False,
) -> None:
    """Serve this host's part of a cache over several hosts, until Ctrl-C.

    Start it on each host. Every job names all of them, in the same list:
    .cache(cluster=["node1:7117", "node2:7117"]). All hosts need the same token file. The first
    one makes it; copy it to the others.

    Example: stoker cache serve --listen 10.0.0.5:7117 --size 64GiB
    """
    with report_errors("cache serve", ImportError, ValueError):
        _serve_until_interrupted(listen, size, folder, token_file, insecure=insecure)


def end() -> None:
    """End the caches that jobs have left running in this host's Ray cluster.

    That frees their memory on all nodes as soon as no job uses it. Jobs that are still running
    read the lost examples from storage.

    Example: stoker cache end
    """
    from stoker.cluster.ray_members import end_all

    with report_errors("cache end", ImportError):
        print(f"ended {end_all()} cache servers")


def _serve_until_interrupted(
    address: str, size: str, folder: Path | None, token_file: Path | None, *, insecure: bool
) -> None:
    """Run a cache server until this process is interrupted.

    Raises CacheError if the store cannot be made, TokenError for an unusable token, OSError if the
    address is not free, ValueError for invalid arguments, and KeyboardInterrupt at the end.
    """
    from stoker.cluster.cache_server import CacheServer  # here: `stoker --help` imports this module

    limit = parse_limit(size)
    path = token_file or token_path()
    is_new = not path.exists()
    token = make_token_file(path)
    signal.signal(signal.SIGTERM, _interrupt)
    where = None if folder is None else str(folder)
    server = CacheServer(address, token, limit=limit, folder=where, insecure=insecure)
    with closing(server):
        if is_new:
            print(f"made a token in {path}: copy the file to the other hosts", flush=True)
        print(
            f"keeps {format_bytes(server.limit_bytes)} at {server.address}, in {server.folder}",
            flush=True,
        )
        while True:
            # The cache server's threads do the work; a signal ends this process.
            time.sleep(3600)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
