"""``stoker pack``."""

from __future__ import annotations

from typing import Annotated

from stoker.cli import Argument, report_errors


def pack(
    source: Annotated[
        str,
        Argument(
            metavar="SRC",
            help="A folder SRC/CLASS/... of images, or its URL; or FILE.py:FUNCTION, a function "
            "without arguments that returns a source without stages.",
        ),
    ],
    folder: Annotated[
        str, Argument(metavar="DEST", help="Folder for the shards; must be empty or new.")
    ],
    *,
    shard_size: Annotated[
        str, Argument(metavar="SIZE", help="Size at which a shard ends.")
    ] = "256MiB",
) -> None:
    """Pack many small files into few tar shards, for from_tar.

    Each shard is read back and compared before it gets its name. DEST/shards.json, written last,
    lists the content of each shard.

    Example: stoker pack train/ train-shards/ --shard-size 1GiB
    """
    from rich.console import Console

    from stoker.pack.run import pack_command

    errors = Console(stderr=True, highlight=False)
    with report_errors("pack", ValueError, TypeError, ImportError), errors.status("") as status:
        say = status.update if errors.is_terminal else None
        report = pack_command(source, folder, shard_size, say)
    print(report)
