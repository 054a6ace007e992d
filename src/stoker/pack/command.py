"""``stoker pack``."""

from __future__ import annotations

from typing import Annotated

import typer

from stoker.cli import report_errors


def pack(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A folder of class folders of images, or its URL; or FILE.py:FUNCTION, a function "
            "without arguments that returns a pipeline of a source alone.",
        ),
    ],
    folder: Annotated[str, typer.Argument(metavar="DEST", help="The folder that gets the shards.")],
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="A shard ends where it has reached this.")
    ] = "256MiB",
    form: Annotated[str, typer.Option("--format", metavar="tar|parquet")] = "tar",
) -> None:
    """Turn many files into few: shards that from_tar or from_parquet reads by number.

    A run that was stopped, or killed, goes on with the shard that it was at. Each shard is read
    back and compared before it gets its name, and DEST/shards.json tells what is in it.

    Example: stoker pack train/ train-shards/ --shard-size 1GiB
    """
    from rich.console import Console

    from stoker.pack.run import pack_command

    errors = Console(stderr=True, highlight=False)
    with report_errors("pack", ValueError, TypeError, ImportError), errors.status("") as status:
        say = status.update if errors.is_terminal else None
        told = pack_command(source, folder, shard_size, form, say)
    typer.echo(told)
