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
        str, typer.Option(metavar="SIZE", help="How much to keep, such as 64GiB, or auto.")
    ] = "auto",
    folder: Annotated[
        Path | None, typer.Option(help="Keep it on a local disk, and for the next time.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="The cluster's token (default: $STOKER_TOKEN_FILE, or ~/.config/stoker/token)."
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Do not encrypt what crosses the network to other hosts."),
    ] = False,
) -> None:
    """Keep this host's part of a cache that is spread over several, until Ctrl-C.

    Jobs name the keepers of all hosts: .cache(cluster=["node1:7117", "node2:7117"]), the same list
    everywhere. Hosts need the same token file; where there is none, one is made.

    Example: stoker cache serve --listen 10.0.0.5:7117 --size 64GiB
    """
    from stoker.cluster.keeper.command import serve_keeper

    with report_errors("cache serve", ValueError):
        serve_keeper(listen, size, folder, token_file, insecure=insecure)


def end() -> None:
    """End what jobs on this host's Ray cluster have left running for the next: their caches.

    That frees the memory of all nodes, as soon as no job uses it any more. Jobs that go on read
    from storage what other nodes had.

    Example: stoker cache end
    """
    from stoker.cluster.members.ray_keeper import end_all

    with report_errors("cache end", ImportError):
        typer.echo(f"ended {end_all()} keepers")
