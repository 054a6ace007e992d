"""Who belongs to a cluster: a small protocol, and the members that are named by hand.

Membership says who there is and what they may keep. Who answers is found out by those who ask
(``node_client``). To add a way to find members, make a class with the attributes and the method of
``Membership``, and name it in ``cluster.opening``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from stoker.basics.warn import warn
from stoker.cache.store_dir import boot_id
from stoker.cluster.backoff import Backoff
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.keeper.client import DefinitionRefused, KeeperClient
from stoker.errors import CacheError, CacheWarning
from stoker.schedule.owners import Member
from stoker.transport.link import LinkError, split_address


class Members(NamedTuple):
    """The members of a cluster at a time."""

    version: int
    """Grows whenever they change."""
    members: tuple[Member, ...]


class Membership(Protocol):
    """Says who belongs to a cluster. Pickles: workers have one, too, on other hosts as well.

    Attributes:
        token: the cluster's secret.
        home: the name of the member whose store is on this host; None: there is none. It stays the
            same for a process.
        folder: where that store is.
    """

    token: bytes
    home: str | None
    folder: str | None

    def members(self) -> Members:
        """Return who there is. May take a second: a thread of its own asks from time to time.

        Raises CacheError where this process has no place in the cluster.
        """
        ...


def is_elsewhere(boot: str, folder: str | None) -> bool:
    """Tell whether this host is another one than where a membership began, with that store."""
    return boot != boot_id() or (folder is not None and not os.path.isdir(folder))


class NamedHosts:
    """Keepers at addresses that the user gave: ``cluster=["host:port", ...]``.

    They are members from the moment when they answer for the first time, and stay so. Their names
    are the addresses as they were given, so all nodes have to be given the same ones.

    Args:
        addresses: of the keepers.
        token: the cluster's secret.
        definition: what this process caches.
        path: the folder of the store on this host, where several could be it.

    Raises DefinitionRefused where a keeper keeps something else; CacheError where none answers.
    """

    def __init__(
        self, addresses: Sequence[str], token: bytes, definition: CacheSpec, path: str | None
    ) -> None:
        self.token = token
        self.home: str | None = None
        self.folder: str | None = None
        self._definition = definition
        self._path = path
        self._boot = boot_id()
        self._known: dict[str, Member] = {}
        self._stores: dict[str, tuple[str, str]] = {}
        self._addresses = tuple(addresses)
        self._tries = {address: Backoff() for address in addresses}
        self._has_begun = False
        self._why = ""
        found = self.members()
        self._has_begun = True
        self._settle()
        if not found.members:
            raise CacheError(
                f"no keeper answers at {', '.join(addresses)} ({self._why}): each of these "
                "hosts needs one (stoker cache serve --listen HOST:PORT), with the same token"
            )
        if path is not None and self.home is None:
            here = [folder for boot, folder in self._stores.values() if boot == boot_id()]
            warn(
                f"no keeper of this host keeps in {path}: nothing is kept here, and all that is "
                "kept comes over the network. path= is the folder that a keeper printed; "
                + (f"those here printed {', '.join(here)}" if here else "none runs on this host"),
                CacheWarning,
            )

    def members(self) -> Members:
        for address, tries in self._tries.items():
            if address in self._known or not tries.is_due:
                continue
            try:
                line = KeeperClient(address, self.token, self._definition, len(self._known))
            except DefinitionRefused:
                if not self._has_begun:
                    raise
                tries.failed()
            except LinkError as error:
                self._why = str(error)
                tries.failed()
            else:
                tries.succeeded()
                welcome = line.welcome
                line.close()
                self._known[address] = Member(address, address, max(1, welcome.limit_bytes))
                self._stores[address] = welcome.boot, welcome.folder
        return Members(len(self._known), tuple(self._known.values()))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if is_elsewhere(self._boot, self.folder):
            self._settle()

    def _settle(self) -> None:
        """Find the member on this host. One that comes later is reached as the others are."""
        self._boot = boot_id()
        self.home = self.folder = None
        for address, (boot, folder) in self._stores.items():
            if self._is_here(boot, folder):
                self.home, self.folder = address, folder
                return

    def _is_here(self, boot: str, folder: str) -> bool:
        """Tell whether a store is on this host, and the one that was meant."""
        if boot != boot_id() or not os.path.isdir(folder):
            return False
        return self._path is None or folder == os.path.realpath(os.path.expanduser(self._path))


def check_hosts(hosts: object) -> tuple[str, ...]:
    """Return addresses as a user gave them. Raises TypeError or ValueError."""
    wrong = (
        f"cluster= is 'ray', 'torchrun' or a list of addresses such as 'node1:7117', not {hosts!r}"
    )
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise (ValueError if isinstance(hosts, str) else TypeError)(wrong)
    if not hosts or not all(isinstance(host, str) for host in hosts):
        raise TypeError(wrong)
    check: Callable[[str], object] = split_address
    for host in hosts:
        check(host)
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"cluster= names a host twice: {list(hosts)}")
    return tuple(hosts)
