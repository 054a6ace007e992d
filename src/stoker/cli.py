"""The commands: parse, call, print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import stoker

app = typer.Typer(
    name="stoker",
    help="Data loading that keeps accelerators fed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stoker {stoker.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for demo.json, demo.png and the demo's image files.")
    ] = Path("stoker-demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = 3,
    full: Annotated[
        bool, typer.Option("--full", help="Also echo after augmentation, more factors, and R = 1.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Your own images, one sub-folder a class, instead of the digits."),
    ] = None,
    remote: Annotated[
        bool,
        typer.Option("--remote", help="Read from a local HTTP server instead of emulated storage."),
    ] = False,
) -> None:
    """Train one small network with and without echoing, on storage that is too slow for it.

    Shows what echoing buys: fresh examples, steps and seconds to a target accuracy. Takes
    under three minutes on two cores. Ctrl-C ends it cleanly; image files are kept for the
    next run.

    Example: stoker demo --out /tmp/demo --seeds 5
    """
    from stoker.demo import run_demo

    try:
        run_demo(out=out, seeds=seeds, full=full, data=data, remote=remote)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    except (ImportError, OSError, ValueError, stoker.StokerError) as error:
        typer.echo(f"stoker demo: {error}", err=True)
        raise typer.Exit(1) from None


@app.command("what-if")
def what_if(
    report: Annotated[
        Path, typer.Argument(metavar="REPORT.json", help="What `stoker analyze --json` wrote.")
    ],
    cores: Annotated[
        int | None, typer.Option(metavar="N", help="Cores, each with a worker on it.")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(metavar="SIZE", help="A cache that never evicts, e.g. 200GiB.")
    ] = None,
    storage_mbps: Annotated[
        float | None, typer.Option(metavar="MB/s", help="Storage bandwidth.")
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(metavar="TIMES", help="Its speed, as a multiple: 2x, 0.5x.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(metavar="K", help="Jobs at a time on this host, on the same data.")
    ] = 1,
    echo: Annotated[
        float, typer.Option(metavar="E", help="Echoing factor: mean uses of a fresh example.")
    ] = 1.0,
    echo_at: Annotated[
        str,
        typer.Option(metavar="PLACE", help="batch, after-augmentation or before-augmentation."),
    ] = "batch",
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the answer as JSON, too.")
    ] = None,
) -> None:
    """Predict how fast a job that was analyzed would run if something were different.

    Shows speed, what limits it and the split of the time, before and after; the cache and the
    cores that would be enough; and speed as a curve over each quantity. Without options: the job
    as it was measured, and all the curves. Any options together are one question.

    Example: stoker what-if report.json --cache 200GiB --cores 16
    """
    from stoker.analysis import answers, questions
    from stoker.analysis.model import Change
    from stoker.analysis.report import measured, read_report
    from stoker.machine import parse_bytes

    try:
        found = read_report(report)
        change = Change(
            cores=cores,
            cache_bytes=None if cache is None else parse_bytes(cache),
            storage_mbps=storage_mbps,
            accelerator=1.0 if accelerator is None else _times(accelerator),
            jobs=jobs,
            echo=echo,
            echo_at=echo_at,
        )
        answer = questions.ask(measured(found), change)
        if json is not None:
            questions.write_answer(answer, json)
        answers.show(found, answer)
    except (OSError, ValueError) as error:
        typer.echo(f"stoker what-if: {error}", err=True)
        raise typer.Exit(1) from None


def _times(text: str) -> float:
    """Read a multiple such as ``2x`` or ``2``. Raises ValueError."""
    try:
        return float(text.strip().removesuffix("x"))
    except ValueError:
        raise ValueError(f"accelerator={text}: a multiple, for example 2x or 0.5x") from None


caches = typer.Typer(no_args_is_help=True, help="Look at the caches on this host, or remove them.")
app.add_typer(caches, name="cache")


@caches.command("list")
def cache_list() -> None:
    """List the caches of this user: what is in them, how full they are, who uses them.

    Example: stoker cache list
    """
    from stoker.caching.listing import table

    table()


@caches.command("info")
def cache_info(
    which: Annotated[
        str, typer.Argument(metavar="NAME", help="A name from the list, or a folder.")
    ],
) -> None:
    """Tell about one cache: its budget, its items, and what its users found in it.

    Example: stoker cache info /scratch/cache
    """
    from stoker.caching.listing import info

    _ending(lambda: info(which))


@caches.command("remove")
def cache_remove(
    which: Annotated[
        str, typer.Argument(metavar="NAME", help="A name from the list, or a folder.")
    ],
) -> None:
    """Remove a cache that nobody uses. What it held is read from its source again.

    Example: stoker cache remove /scratch/cache
    """
    from stoker.caching.listing import removed

    _ending(lambda: typer.echo(f"removed {removed(which)}"))


def _ending(command: Callable[[], None]) -> None:
    try:
        command()
    except (OSError, stoker.StokerError) as error:
        typer.echo(f"stoker cache: {error}", err=True)
        raise typer.Exit(1) from None


def main() -> None:
    """Run the command line."""
    app()
