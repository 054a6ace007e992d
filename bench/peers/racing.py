"""What the scripts beside peers share: options, and arms that run in turns, a process each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from harness import interleaved
from peers import environment

Sample = dict[str, Any]
"""What ``environment.Peer.timed`` returns."""


class Raced(NamedTuple):
    """An arm's first answer, and its samples, one a round."""

    about: dict[str, Any]
    samples: list[Sample]


def add_options(made_by: argparse.ArgumentParser, known: Mapping[str, Sequence[str]]) -> None:
    """Add the options for choosing and installing peers."""
    made_by.add_argument(
        "--peers", default="", help=f"of {', '.join(known)}, with ; between them, or all"
    )
    made_by.add_argument("--install", action="store_true", help="make the peers' environments")


def chosen(arguments: argparse.Namespace, known: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the chosen peers, whose environments are made where that is asked for.

    Each of the ``known`` has its environment's name first.
    """
    names = [name.strip() for name in arguments.peers.replace("all", ";".join(known)).split(";")]
    found = [name for name in names if name]
    if arguments.install:
        for place in dict.fromkeys(known[name][0] for name in found):
            environment.install(place)
    return found


def raced(
    commands: Mapping[str, Sequence[object]],
    seconds: float,
    rounds: int,
    others: Mapping[str, Callable[[], Sample]] | None = None,
    **variables: str,
) -> dict[str, Raced]:
    """Start a process for each arm, and run all of them in turns.

    Args:
        commands: words of an arm's command line.
        seconds: of a sample, at least; it is whole epochs.
        others: what is sampled beside the arms, and needs no process.
        variables: of the processes' environment.
    """
    with ExitStack() as ends:
        cases: dict[str, Callable[[], Sample]] = {}
        about: dict[str, dict[str, Any]] = {}
        for name, command in commands.items():
            peer = environment.Peer(command, **variables)
            ends.callback(peer.close)
            about[name], cases[name] = peer.about, partial(peer.timed, seconds)
        found = interleaved(cases | dict(others or {}), rounds)
        return {name: Raced(about.get(name, {}), samples) for name, samples in found.items()}


def processor_us(samples: Sequence[Sample]) -> list[float]:
    """Return the processor time of an example, of all processes of an arm, in us."""
    return [each["processor_s"] / each["examples"] * 1e6 for each in samples]
