"""``stoker feed``."""

from __future__ import annotations

from typing import Annotated

import typer

from stoker.cli import report_errors


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

    with report_errors("feed", TypeError, ValueError):
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
