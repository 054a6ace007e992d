"""``stoker cache serve`` and ``stoker cache end``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli import report_errors


def serve(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="This host's address in the cluster.")
    ] = "127.0.0.1:7117",
    size: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Limit of the store, such as 64GiB; auto: half of the memory (0.8 of the disk).",
        ),
    ] = "auto",
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder on a local disk; kept for the next run. Default: memory."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="The cluster's token (default: $STOKER_TOKEN_FILE, or ~/.config/stoker/token)."
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Do not encrypt the traffic; jobs give .cache(insecure=True), too."
        ),
    ] = False,
) -> None:
    """Serve this host's part of a cache over several hosts, until Ctrl-C.

    Start it on each host. Every job names all of them, in the same list:
    .cache(cluster=["node1:7117", "node2:7117"]). All hosts need the same token file. The first
    one makes it; copy it to the others.

    Example: stoker cache serve --listen 10.0.0.5:7117 --size 64GiB
    """
    from stoker.cluster.keeper.command import serve_keeper

    with report_errors("cache serve", ImportError, ValueError):
        serve_keeper(listen, size, folder, token_file, insecure=insecure)


def end() -> None:
    """End the caches that jobs have left running in this host's Ray cluster.

    That frees their memory on all nodes as soon as no job uses it. Jobs that are still running
    read the lost examples from storage.

    Example: stoker cache end
    """
    from stoker.cluster.members.ray_members import end_all

    with report_errors("cache end", ImportError):
        typer.echo(f"ended {end_all()} keepers")
