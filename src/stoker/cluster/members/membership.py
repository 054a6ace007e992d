"""Cluster membership: the protocol, and keepers that the user names.

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
    """The members of a cluster at one time."""

    version: int
    """Grows whenever they change."""
    members: tuple[Member, ...]


class Membership(Protocol):
    """Lists a cluster's members. Picklable: workers, also on other hosts, get a copy.

    Attributes:
        token: the cluster's secret.
        home: the name of the member whose store is on this host; None if no member's is. It is
            fixed for a process.
        folder: that store's folder.
    """

    token: bytes
    home: str | None
    folder: str | None

    def members(self) -> Members:
        """Return the members. May take a second: a separate thread calls it from time to time.

        Raises CacheError where this process does not belong to the cluster.
        """
        ...


def is_elsewhere(boot: str, folder: str | None) -> bool:
    """True if this host is not the one on which the membership began with that store."""
    return boot != boot_id() or (folder is not None and not os.path.isdir(folder))


class NamedHosts:
    """Keepers at addresses that the user gave: ``cluster=["host:port", ...]``.

    A keeper becomes a member when it first answers, and stays one. Members' names are the addresses
    as given, so all nodes must be given the same addresses.

    Args:
        addresses: the keepers' ``host:port``.
        token: the cluster's secret.
        definition: the specification of this process's cache.
        path: the folder of this host's store, if several keepers run here.

    Raises DefinitionRefused where a keeper keeps another cache; CacheError where none answers.
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
        """Find the member on this host. A later one is reached over the network, as the others."""
        self._boot = boot_id()
        self.home = self.folder = None
        for address, (boot, folder) in self._stores.items():
            if self._is_here(boot, folder):
                self.home, self.folder = address, folder
                return

    def _is_here(self, boot: str, folder: str) -> bool:
        """True if a store is on this host, and in ``path`` if that was given."""
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
