"""The actors of one pipeline: requested from Ray, kept between epochs, ended with it.

Ray alone ends them: when the last reference to an actor is dropped, and when the process that
requested it has ended, in whatever way.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from stoker.basics.process import OwningProcess
from stoker.cluster.workers.ray_actor import ActorPlace, PreparingActor, WorkerSpec
from stoker.engine.plan.plan import Plan
from stoker.transport.ray_session import check_installed, require_ray
from stoker.transport.secret import new_token

# An actor does one request at a time; Ray is told so unless the user says otherwise.
_ONE_CORE = {"num_cpus": 1}
_OURS = {"lifetime", "name", "namespace", "get_if_exists", "max_restarts", "max_task_retries"}
_WHAT = '.workers(kind="ray")'
_inherited: list[ActorPool] = []
"""Pools that a forked child inherited. Freeing them would end the parent's actors."""
_pools: weakref.WeakSet[ActorPool] = weakref.WeakSet()


def check(options: Any) -> None:
    """Raise ImportError without Ray, TypeError and ValueError for invalid options."""
    check_installed(_WHAT)
    if not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        raise TypeError(f"ray_options are a dict with names of Ray's options, not {options!r}")
    refused = sorted(_OURS & options.keys())
    if refused:
        raise ValueError(f"actors end with their pipeline: {', '.join(refused)} cannot be given")


class Actor:
    """An actor that has started.

    Attributes:
        handle: Ray's actor handle.
        place: its address, node and process.
    """

    def __init__(self, handle: Any, place: ActorPlace) -> None:
        self.handle = handle
        self.place = place

    def __str__(self) -> str:
        name = self.handle._actor_id.hex()[:12]
        return f"actor {name} (process {self.place.pid} on node {self.place.node})"


class ActorPool:
    """The actors of one pipeline.

    Args:
        plan: the pipeline's work; sent to each actor once.
        options: Ray's actor options: placement, and resources of each actor.
        insecure: whether connections to them are not encrypted.

    Attributes:
        plan: that plan.
        token: the secret of connections to them.
        insecure: whether these are not encrypted.
        actors: the started ones that are not known to be lost.
        losses: texts of warnings, one a lost actor.
    """

    def __init__(self, plan: Plan, options: Mapping[str, Any], *, insecure: bool = False) -> None:
        ray = require_ray(_WHAT)
        self.plan = plan
        self._owner = OwningProcess()
        self.token = new_token()
        self.insecure = insecure
        self.actors: list[Actor] = []
        self.losses: list[str] = []
        self._lock = threading.RLock()
        self._requested: dict[Any, Any] = {}  # actors by what tells that they have come up
        self._options = {**_ONE_CORE, **options}
        spec = WorkerSpec(plan.segments, plan.indexed)
        # As bytes: arrays would come out of Ray's own memory, and could not be written to.
        self._spec = ray.put(ray.cloudpickle.dumps(spec))
        _pools.add(self)

    @property
    def is_ours(self) -> bool:
        """True if this process made it, rather than a process that forked this one."""
        return self._owner.is_current

    @property
    def requested(self) -> int:
        """How many requested actors have not started yet."""
        return len(self._requested)

    def request(self, count: int) -> None:
        """Request more actors from Ray."""
        import ray

        make = ray.remote(PreparingActor).options(**self._options)
        for _ in range(count):
            handle = make.remote()
            begun = handle.begin.remote(self._spec, self.token, self.insecure)
            self._requested[begun] = handle

    def collect(self, wait_s: float) -> list[Actor]:
        """Return newly started actors; wait up to this many seconds for the first.

        Raises an actor's error from unpickling the pipeline; Ray's error for an actor that it
        cannot start.
        """
        import ray

        if not self._requested:
            return []
        up, _ = ray.wait(list(self._requested), num_returns=1, timeout=wait_s)
        found = []
        for each in up:
            handle = self._requested.pop(each)
            try:
                place = ray.get(each)
            except ray.exceptions.RayTaskError as error:
                cause = error.as_instanceof_cause()
                cause.add_note(
                    "In an actor, which received the pipeline: the modules and files that the "
                    "pipeline uses must be on the cluster's nodes (ray.init(runtime_env=...) can "
                    "install them)."
                )
                raise cause from None
            except ray.exceptions.RayActorError as error:
                self.losses.append(f"an actor was lost before it came up: {error}")
                continue
            found.append(Actor(handle, ActorPlace(*place)))
        self.actors += found
        return found

    def lose(self, actor: Actor, why: object) -> None:
        """Count an actor as lost, and have Ray end its process."""
        import ray

        with self._lock:
            if actor not in self.actors:
                return
            self.actors.remove(actor)
            rest = len(self.actors)
            by = f"{rest} others" if rest > 1 else "another one" if rest else "this process"
            self.losses.append(f"{actor} was lost: {why}. Its work is done by {by}")
        ray.kill(actor.handle)


def _keep_in_children() -> None:
    _inherited.extend(_pools)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_in_children)
