"""The Ray cluster that this process has joined, for caches, workers and feeds."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

from stoker.basics.future import OneShot, start_thread
from stoker.basics.process import OwningProcess, end_with
from stoker.errors import ClusterError

T = TypeVar("T")
_owner = OwningProcess()


def check_installed(feature: str) -> None:
    """Raise ImportError if Ray is not installed; ``feature`` names what needs it."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError(f"{feature} needs Ray: pip install 'ray[tune]' cryptography")


def require_ray(feature: str) -> Any:
    """Return the ``ray`` module, connected to the cluster that this process has joined.

    Raises ClusterError, which names ``feature``, if it has joined none, or was forked since.
    """
    import ray

    if not _owner.is_current:
        raise ClusterError(
            f"{feature} cannot be used in a forked process: the connection to Ray belongs to its "
            "parent. Iterate in the parent"
        )
    if not ray.is_initialized():
        raise ClusterError(
            f"{feature} needs a Ray cluster, but this process has joined none. Call "
            'ray.init(address="auto") first, or ray.init(address="local") for a cluster of this '
            "host alone"
        )
    return ray


def find_or_start(
    actor: type, name: str, namespace: str, *arguments: Any, may_move: bool = False
) -> Any:
    """Return the cluster's actor of that name; have Ray start it on this node if there is none.

    It takes no core, outlives this process, and is started again if it is killed: on this node, or
    with ``may_move`` on another one if the node is lost.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    make = ray.remote(actor).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1 if may_move else 0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=may_move),
    )
    return make.remote(*arguments)


def ask(question: Callable[[], T], timeout_s: float) -> T | str:
    """Ask Ray; return its answer, or why there is none.

    A thread of its own asks: it may never end. And the error that an actor is lost is kept by the
    frame of ``ray.get`` that raised it, with the frames of all its callers, until the collector
    runs. In the job's own thread these are the job's, with the feed that it no longer uses.
    """
    answer: OneShot[T | str] = OneShot()

    def answer_it() -> None:
        try:
            answer.give(question())
        except BaseException as error:  # Ray raises many types
            answer.give(str(error) or type(error).__name__)

    start_thread("stoker-ray", answer_it)
    try:
        return answer.wait(timeout_s)
    except TimeoutError:
        return f"no answer within {timeout_s:.0f} s"
    finally:
        answer.forget()


def end_with_raylet(before_exit: Callable[[], object] | None = None) -> None:
    """End this actor's process when its raylet is gone; ``before_exit`` is called first.

    Ray lets an actor outlive its raylet; the actor would then hold resources that nobody counts.
    """
    end_with(os.getppid(), by_main_thread=False, before_exit=before_exit)
