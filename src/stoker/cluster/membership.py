"""Cluster membership: the protocol, and members at addresses that the user gave.

A membership lists the members and the sizes of their stores. Whether they answer is the business of
``node_client``. To add a way to find members, write a class with the attributes and the method of
``Membership``, and name it in ``cluster/opening.py``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from stoker.basics.warn import warn
from stoker.cache.store_dir import boot_id
from stoker.cluster.cache_connection import CacheConnection, SpecRefused
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.owners import Member
from stoker.errors import CacheError, CacheWarning
from stoker.transport.link import LinkError, split_address

# The first wait; it doubles each time. A node that was only busy is tried again within a batch or
# two. Chosen, not measured.
FIRST_S = 0.1
# The longest wait, and so the longest time for which a node that is back goes unused. Each try
# costs one connection. Chosen, not measured.
LAST_S = 5.0


class Members(NamedTuple):
    """The members of a cluster at one moment."""

    version: int
    """Grows whenever the members change."""
    members: tuple[Member, ...]


class Membership(Protocol):
    """Lists a cluster's members. It is picklable: workers, on other hosts too, get a copy.

    Attributes:
        token: the cluster's secret.
        insecure: whether connections are not encrypted.
        local_member: the name of the member with a store on this host; None if there is none. It
            does not change within a process.
        folder: the folder of that store.
    """

    token: bytes
    insecure: bool
    local_member: str | None
    folder: str | None

    def members(self, *, at_once: bool = False) -> Members:
        """Return the members. It may take a second, and one thread calls it at a time.

        With ``at_once`` there is a new member, of which another node told: look for it, even if the
        last look was a moment ago.

        Raises CacheError if this process does not belong to the cluster.
        """
        ...


def has_moved(boot: str, folder: str | None) -> bool:
    """True if the membership came to another host, where that store's folder does not exist."""
    return boot != boot_id() or (folder is not None and not os.path.isdir(folder))


class Backoff:
    """Remembers whether a member answers, and when to try it again if it does not.

    Attributes:
        is_alive: whether the last try succeeded.
        due_s: the time of the next try, by ``time.monotonic``, if the last one failed.
    """

    def __init__(self) -> None:
        self._delay_s = FIRST_S
        self.is_alive = False
        self.due_s = time.monotonic()

    @property
    def is_due(self) -> bool:
        """True if the member does not answer and it is time to try again."""
        return not self.is_alive and time.monotonic() >= self.due_s

    def succeeded(self) -> None:
        """Record that the member answered."""
        self.is_alive = True
        self._delay_s = FIRST_S

    def failed(self) -> None:
        """Record a failed try. The wait before the next try doubles, up to 5 s."""
        self.is_alive = False
        self.due_s = time.monotonic() + self._delay_s
        self._delay_s = min(LAST_S, 2 * self._delay_s)


class NamedHosts:
    """Cache servers at addresses that the user gave: ``cluster=["host:port", ...]``.

    A cache server becomes a member when it first answers, and stays a member. Its name is its
    address as the user wrote it, so the user must give all nodes the same addresses.

    Args:
        addresses: the cache servers' ``host:port``.
        token: the cluster's secret.
        spec: the specification of this process's cache.
        path: the folder of this host's store, if several cache servers run on this host.
        insecure: whether connections are not encrypted; the cache servers must have been told the
            same.

    Raises SpecRefused if a cache server holds another cache, CacheError if no cache server answers.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        token: bytes,
        spec: CacheSpec,
        path: str | None,
        *,
        insecure: bool = False,
    ) -> None:
        self.token = token
        self.insecure = insecure
        self.local_member: str | None = None
        self.folder: str | None = None
        self._spec = spec
        self._path = path
        self._boot = boot_id()
        self._members: dict[str, Member] = {}
        self._stores: dict[str, tuple[str, str]] = {}
        self._backoffs = {address: Backoff() for address in addresses}
        self._is_ready = False
        self._last_error = ""
        members = self.members()
        self._is_ready = True
        self._use_local_store()
        if not members.members:
            raise CacheError(
                f"no cache server answers at {', '.join(addresses)} ({self._last_error}). Start "
                "one on each of these hosts (stoker cache serve --listen HOST:PORT), with the same "
                "token"
            )
        if path is not None and self.local_member is None:
            local_folders = [folder for boot, folder in self._stores.values() if boot == boot_id()]
            warn(
                f"no cache server on this host uses path={path!r}, so this host stores no examples "
                "and gets all of them over the network. Give path= the folder that this host's "
                "cache server printed: "
                + (", ".join(local_folders) or "no cache server runs on this host"),
                CacheWarning,
            )

    def members(self, *, at_once: bool = False) -> Members:
        for address, backoff in self._backoffs.items():
            if address in self._members or not (backoff.is_due or at_once):
                continue
            newest_ns = max((member.joined_ns for member in self._members.values()), default=0)
            try:
                client = CacheConnection(
                    address, self.token, self._spec, newest_ns, insecure=self.insecure
                )
            except SpecRefused:
                if not self._is_ready:
                    raise
                backoff.failed()
            except LinkError as error:
                self._last_error = str(error)
                backoff.failed()
            else:
                backoff.succeeded()
                welcome = client.welcome
                client.close()
                self._members[address] = Member(
                    address, address, max(1, welcome.limit_bytes), welcome.started_ns
                )
                self._stores[address] = welcome.boot, welcome.folder
        return Members(len(self._members), tuple(self._members.values()))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if has_moved(self._boot, self.folder):
            self._use_local_store()

    def _use_local_store(self) -> None:
        """Find the member on this host.

        Called once: a cache server that starts here later is used over the network, like the
        others.
        """
        self._boot = boot_id()
        self.local_member = self.folder = None
        for address, (boot, folder) in self._stores.items():
            if self._is_local(boot, folder):
                self.local_member, self.folder = address, folder
                return

    def _is_local(self, boot: str, folder: str) -> bool:
        """True if a store is on this host, and in ``path`` if the user gave it."""
        if boot != boot_id() or not os.path.isdir(folder):
            return False
        return self._path is None or folder == os.path.realpath(os.path.expanduser(self._path))


def check_hosts(hosts: object) -> tuple[str, ...]:
    """Return the addresses in a user's ``cluster=``. Raises TypeError or ValueError."""
    message = (
        "cluster= must be 'ray', 'torchrun' or a list of addresses such as 'node1:7117', but it "
        f"is {hosts!r}"
    )
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise (ValueError if isinstance(hosts, str) else TypeError)(message)
    if not hosts or not all(isinstance(host, str) for host in hosts):
        raise TypeError(message)
    check: Callable[[str], object] = split_address
    for host in hosts:
        check(host)
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"cluster= has an address twice: {list(hosts)}")
    return tuple(hosts)
