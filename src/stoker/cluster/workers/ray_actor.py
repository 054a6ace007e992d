"""The code of a Ray actor: it prepares batches that a trainer requests over its socket.

Ray places the actor and ends it with its trainer. The pipeline reaches it once, through Ray. Each
connection is for one epoch: the epoch comes first, then one request after another. The actor works
on one request at a time; meanwhile it receives another connection's request, and sends its answers.
It ends with its raylet.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stoker.basics.future import start_thread
from stoker.cluster.workers.link_channel import FlatValue, Inbox, say_alive
from stoker.engine.work.segment import Segment
from stoker.engine.work.step import WorkAddress
from stoker.engine.work.work import Work
from stoker.engine.workers.requests import WorkExecutor
from stoker.sources.origin import IndexedSource
from stoker.transport.link import Link, LinkError
from stoker.transport.listener import Listener
from stoker.transport.ray_session import end_with_raylet
from stoker.transport.secret import Secret


@dataclass(frozen=True)
class WorkerSpec:
    """A pipeline's work: everything that stays the same in all epochs."""

    segments: Sequence[Segment]
    source: IndexedSource | None

    def works(self, addresses: Sequence[WorkAddress]) -> list[Work]:
        """Return the work of an epoch, by depth."""
        segments = {segment.at: segment for segment in self.segments}
        return [Work(segments[each.at], each, self.source, None) for each in addresses]


PURPOSE = "worker"
# How often an actor says that it is at work: a tenth of ``SILENCE_S``.
BEAT_S = 1.0
# A day: a trainer may be stopped for long, and go on; Ray ends actors that have none.
_PATIENCE_S = 86_400.0


class ActorPlace(NamedTuple):
    """An actor's location.

    Attributes:
        address: its ``host:port``.
        node: its node's address in the cluster.
        pid: its process there.
    """

    address: str
    node: str
    pid: int


class PreparingActor:
    """Prepares examples and batches; Ray runs it as an actor."""

    def begin(self, program: bytes, token: bytes, insecure: bool) -> ActorPlace:
        """Take the pipeline's work, and listen for clients that have the token."""
        import ray

        end_with_raylet()
        if "torch" in sys.modules:
            # Ray gave it one core: torch's threads would share that.
            sys.modules["torch"].set_num_threads(1)
        self._program: WorkerSpec = pickle.loads(program)
        self._runner = WorkExecutor()
        self._turn = threading.Lock()
        self._at_work: dict[Link, threading.Lock] = {}
        start_thread("stoker-beat", self._beat)
        node = ray.util.get_node_ip_address()
        self._listener = Listener(
            node,
            0,
            Secret.of_host(token, insecure=insecure),
            PURPOSE,
            self._serve,
            timeout_s=_PATIENCE_S,
        )
        return ActorPlace(self._listener.address, node, os.getpid())

    def _serve(self, link: Link) -> None:
        """Run requests until the trainer closes the connection."""
        inbox = Inbox()
        works = self._program.works(inbox.receive(link))
        while True:
            request = inbox.receive(link)
            with self._sending_beats(link) as sending:
                with self._turn:
                    work = works[request.depth]
                    ns = work.segment.counters()
                    answer = self._runner.do(work, request, ns)
                try:
                    reply = FlatValue((answer, ns))
                except Exception as error:
                    reply = FlatValue((self._runner.sendable(work, request, answer, error), ns))
                with sending:
                    reply.send(link)

    @contextlib.contextmanager
    def _sending_beats(self, link: Link) -> Iterator[threading.Lock]:
        """Send signs of life while working; yields the lock for sending."""
        self._at_work[link] = sending = threading.Lock()
        try:
            yield sending
        finally:
            del self._at_work[link]

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            for link, sending in list(self._at_work.items()):
                if sending.acquire(blocking=False):  # else the answer is on its way
                    try:
                        say_alive(link)
                    except LinkError:
                        pass  # its own thread is told, too
                    finally:
                        sending.release()
