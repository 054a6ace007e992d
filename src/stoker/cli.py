"""The commands: parse, call, print."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
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


_Name = Annotated[str, typer.Argument(metavar="NAME", help="A name from the list, or a folder.")]


@contextlib.contextmanager
def _failing(command: str, *errors: type[Exception], stopped: str = "stopped") -> Iterator[None]:
    """Say what goes wrong in a line on stderr: exit status 1, and 130 behind Ctrl-C."""
    expected: tuple[type[Exception], ...] = (OSError, stoker.StokerError, *errors)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(stopped, err=True)
        raise typer.Exit(130) from None
    except expected as error:
        typer.echo(f"stoker {command}: {error}", err=True)
        raise typer.Exit(1) from None


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


@app.command(
    hidden=True,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def demo() -> None:
    """Say where the demo is: in the repository, not in the package."""
    typer.echo("stoker demo: the demo is in stoker's repository: run scripts/demo there", err=True)
    raise typer.Exit(2)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def analyze(
    script: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT|-m MODULE|LAUNCHER",
            help="The training script and its arguments, as you would give them to python; or a "
            "launcher such as torchrun with its own.",
        ),
    ],
    budget: Annotated[
        float, typer.Option(min=0.1, help="Minutes that the analysis may take at most.")
    ] = 5.0,
    loader: Annotated[
        str | None,
        typer.Option(
            help="The loader to analyze, by where it is built, such as train.py:41; "
            "else the one that trains most."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report here, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report here, as a page.")] = None,
) -> None:
    """Tell why the accelerator is idle in a training script, and what would help.

    Runs the script, unedited, through four phases: as it is; with batches that are handed over
    again and again (G, what training takes in); its loader alone, with the data in memory (P,
    preparation); its files alone, cold and warm (S and C). From these: the split of the time
    into compute, prep stall and fetch stall, and a list of what to do with what each brings.

    Options of the analysis stand before the script. No root and no edits are needed. The exit
    status is 1 where the script crashed, with a report of what was measured before, or where
    nothing could be measured.

    Examples:

      stoker analyze train.py --epochs 90

      stoker analyze --html report.html -m my.train --config base.yaml

      stoker analyze --budget 10 torchrun --nproc-per-node 2 train.py
    """
    from rich.console import Console

    from stoker.analysis.model.report import write_report
    from stoker.analysis.model.trace import AnalysisError
    from stoker.analysis.reports import terminal
    from stoker.analysis.reports.diagnosis import make_report
    from stoker.analysis.reports.page import write_page
    from stoker.analysis.scripts.script_job import trace_script
    from stoker.analysis.scripts.script_process import make_command, summarize_crash

    errors = Console(stderr=True, highlight=False)
    stopped = "stopped; nothing of the script is left running"
    with _failing("analyze", ValueError, AnalysisError, stopped=stopped):
        for path in (json, html):
            if path is not None and not path.absolute().parent.is_dir():
                raise ValueError(f"{path}: there is no folder {path.absolute().parent}")
        command = make_command(script)
        errors.print(terminal.describe_plan(command, budget * 60), markup=False)
        with errors.status("") as status:
            say = status.update if errors.is_terminal else partial(errors.print, markup=False)
            trace = trace_script(command, budget_s=budget * 60, loader=loader, say=say)
        report = make_report(trace)
        if json is not None:
            write_report(report, json)
        if html is not None:
            write_page(report, html)
    terminal.show_report(report, Console(highlight=False))
    if report.crash is not None:
        errors.print(f"stoker analyze: {summarize_crash(report.crash)}", markup=False)
        raise typer.Exit(1)


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
    hosts: Annotated[
        int, typer.Option(metavar="N", help="Hosts whose caches hold a part of the data each.")
    ] = 1,
    network_mbps: Annotated[
        float, typer.Option(metavar="MB/s", help="What a host takes from the others' memories.")
    ] = 1250.0,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="records", help="The files packed into shards."),
    ] = None,
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
    from stoker.analysis.model.model import RECORDS, Change
    from stoker.analysis.model.report import read_report, to_measured
    from stoker.analysis.model.what_if import answer, write_answer
    from stoker.analysis.reports import terminal
    from stoker.basics.resources import parse_bytes

    with _failing("what-if", ValueError):
        found = read_report(report)
        if form not in (None, "records"):
            raise ValueError(f"format={form}: records, which are files packed into shards")
        change = Change(
            cores=cores,
            cache_bytes=None if cache is None else parse_bytes(cache),
            storage_mbps=storage_mbps,
            accelerator=1.0 if accelerator is None else _parse_multiple(accelerator),
            jobs=jobs,
            echo=echo,
            echo_at=echo_at,
            hosts=hosts,
            network_mbps=network_mbps,
            records=RECORDS[-1] if form else "",
        )
        answered = answer(to_measured(found), change)
        if json is not None:
            write_answer(answered, json)
        terminal.show_answer(found, answered)


def _parse_multiple(text: str) -> float:
    """Read a multiple such as ``2x`` or ``2``. Raises ValueError."""
    try:
        return float(text.strip().removesuffix("x"))
    except ValueError:
        raise ValueError(f"accelerator={text}: a multiple, for example 2x or 0.5x") from None


@app.command()
def feed(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function without arguments that returns a pipeline; or module:FUNCTION.",
        ),
    ],
    name: Annotated[str, typer.Option(help="What jobs take it by.")],
    staging: Annotated[
        str | None,
        typer.Option(
            metavar="N|SIZE",
            help="Batches that may stand in shared memory, or bytes such as 2GiB (default: 8 "
            "batches; where the pipeline yields examples, 64 chunks of up to 64 of them).",
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Jobs to wait for before the first epoch begins.")
    ] = 1,
    patience: Annotated[
        float,
        typer.Option(
            min=0.1, help="Seconds that others wait for a job that says nothing, frozen perhaps."
        ),
    ] = 60.0,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where jobs on other hosts find it: an address of this host, on the network of "
            "the cluster. By default they do not.",
        ),
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Do not encrypt what crosses the network to other hosts."),
    ] = False,
) -> None:
    """Prepare an epoch once, for all jobs that take it, on this host and on others.

    A job takes it with stoker.from_feed(NAME), which is a pipeline like any other: augment, echo,
    batch and move there. Each job gets every batch exactly once an epoch; it joins where one
    begins, and may leave, or be killed, at any moment. The slowest job sets the pace; the view says
    which one that is. Ctrl-C ends the feed.

    Example: stoker feed train.py:make_pipeline --name imagenet --jobs 4
    """
    from stoker.feed.foreground import serve

    with _failing("feed", TypeError, ValueError):
        limit = int(staging) if staging is not None and staging.isdigit() else staging
        serve(
            target,
            name=name,
            staging=limit,
            jobs=jobs,
            patience_s=patience,
            listen_at=listen,
            insecure=insecure,
        )


@app.command()
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
    with _failing("pack", ValueError, TypeError, ImportError), errors.status("") as status:
        say = status.update if errors.is_terminal else None
        told = pack_command(source, folder, shard_size, form, say)
    typer.echo(told)


caches = typer.Typer(no_args_is_help=True, help="Look at the caches on this host, or remove them.")
app.add_typer(caches, name="cache")


@caches.command("list")
def cache_list() -> None:
    """List the caches of this user: what is in them, how full they are, who uses them.

    Example: stoker cache list
    """
    from stoker.cache.inventory import print_table

    print_table()


@caches.command("info")
def cache_info(which: _Name) -> None:
    """Tell about one cache: its budget, its items, and what its users found in it.

    Example: stoker cache info /scratch/cache
    """
    from stoker.cache.inventory import print_info

    with _failing("cache"):
        print_info(which)


@caches.command("remove")
def cache_remove(which: _Name) -> None:
    """Remove a cache that nobody uses. What it held is read from its source again.

    Example: stoker cache remove /scratch/cache
    """
    from stoker.cache.inventory import remove, resolve_name

    with _failing("cache"):
        folder = resolve_name(which)
        remove(folder)
        typer.echo(f"removed {folder}")


@caches.command("serve")
def cache_serve(
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

    with _failing("cache serve", ValueError):
        serve_keeper(listen, size, folder, token_file, insecure=insecure)


@caches.command("end")
def cache_end() -> None:
    """End what jobs on this host's Ray cluster have left running for the next: their caches.

    That frees the memory of all nodes, as soon as no job uses it any more. Jobs that go on read
    from storage what other nodes had.

    Example: stoker cache end
    """
    from stoker.cluster.members.ray_keeper import end_all

    with _failing("cache end", ImportError):
        typer.echo(f"ended {end_all()} keepers")


def _flowing(command: Callable[..., object] | None) -> str:
    """Return a command's docstring with a line a paragraph: the terminal's width breaks them."""
    paragraphs = inspect.cleandoc((command and command.__doc__) or "").split("\n\n")
    return "\n\n".join(text.replace("\n", " ") for text in paragraphs)


for _command in (*app.registered_commands, *caches.registered_commands):
    _command.help = _flowing(_command.callback)


def main() -> None:
    """Run the command line."""
    app()
