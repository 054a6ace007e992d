"""The commands: parse, call, print."""

from __future__ import annotations

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


def main() -> None:
    """Run the command line."""
    app()
