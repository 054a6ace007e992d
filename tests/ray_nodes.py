"""A Ray cluster for tests: three nodes on this machine."""

from __future__ import annotations

import contextlib
import gc
import secrets
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

# One for the process: Ray remembers the first that it has read.
TOKEN = secrets.token_hex(32)

# What `atexit` has of a node of `Cluster` holds its clients, and from Python 3.13 on a forked child
# of multiprocessing begins with `atexit._clear()`: gRPC, which knows nothing of the fork, ends the
# child by SIGSEGV when the last reference to a client goes there. So none is the last.
_nodes: list[Any] = []

MARKS = [
    # Ray's own: files that it leaves to the collector, and what it says of its future.
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@contextlib.contextmanager
def ray_cluster(*sent: ModuleType) -> Iterator[Any]:
    """Join a head without cores for actors, where the test runs, and two nodes with two each.

    Functions of the modules that are ``sent`` need not be there on the nodes.
    """
    import ray
    from ray._raylet import Config  # type: ignore[attr-defined, unused-ignore]
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        # Else it would put a token into the user's home.
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        patch.setenv("RAY_worker_niceness", "0")  # by default actors come after everything else
        Config.initialize("")  # which it reads when it is imported
        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80e6},
        )
        for name in ("left", "right"):
            made.add_node(num_cpus=2, resources={name: 10}, object_store_memory=80e6)
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        for module in sent:
            ray.cloudpickle.register_pickle_by_value(module)
        yield made
        _nodes.extend(made.list_all_nodes())
        ray.shutdown()
        made.shutdown()
        del made
    Config.initialize("")
    gc.collect()  # a forked child that freed Ray's clients would wait for threads it has not got
