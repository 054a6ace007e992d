"""``stoker feed``."""

from __future__ import annotations

from typing import Annotated

from stoker.cli import Argument, report_errors


def feed(
    target: Annotated[
        str,
        Argument(
            metavar="FILE.py:FUNCTION",
            help="A function without arguments that returns a pipeline; or module:FUNCTION.",
        ),
    ],
    *,
    name: Annotated[str, Argument("The name by which jobs take the feed.")],
    staging: Annotated[
        int | None,
        Argument(
            "Batches that shared memory may hold (default: 8; if the pipeline yields "
            "examples, 64 chunks of up to 64 of them)."
        ),
    ] = None,
    jobs: Annotated[
        int, Argument(least=1, help="Jobs to wait for before the first epoch begins.")
    ] = 1,
    timeout_s: Annotated[
        float,
        Argument(
            "How long the other jobs wait for a job that does not respond.",
            metavar="SECONDS",
            least=0.1,
        ),
    ] = 60.0,
    listen: Annotated[
        str,
        Argument(
            metavar="HOST:PORT",
            help="Also serve jobs on other hosts, at this address of this host on the cluster's "
            "network. Default: this host only.",
        ),
    ] = "",
    insecure: Annotated[
        bool,
        Argument(
            "Do not encrypt the traffic with other hosts; their jobs must say so, too.",
        ),
    ] = False,
) -> None:
    """Prepare each epoch once, for several jobs on this host and on others.

    In a job, stoker.from_feed(NAME) is a pipeline like any other: augment, echo, batch and move
    there. Each job gets every batch exactly once per epoch. A job joins at the beginning of an
    epoch, and may leave or be killed at any moment. The slowest job sets the pace; a table, printed
    every ten seconds, shows which one that is. Ctrl-C ends the feed.

    Example: stoker feed train.py:make_pipeline --name imagenet --jobs 4
    """
    from stoker.adapters.entrypoint import target_of
    from stoker.feeds.feed_view import serve
    from stoker.feeds.local_feeds import FeedSettings

    with report_errors("feed", ImportError, TypeError, ValueError):
        serve(
            FeedSettings(
                name, target_of(target), staging, jobs, timeout_s, listen=listen, insecure=insecure
            )
        )
