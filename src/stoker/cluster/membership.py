"""Who belongs to a cluster: a small protocol, and the members that are named by hand.

Membership says who there is and what they may keep. Who answers is found out by those who ask
(``peers``). To add a way to find members, make a class with the attributes and the method of
``Membership``, and name it in ``joining``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from stoker.cache.integrity import boot_id
from stoker.cluster.backoff import Backoff
from stoker.cluster.definition import Definition
from stoker.cluster.line import DefinitionRefused, Line
from stoker.cluster.owners import Member
from stoker.errors import CacheError
from stoker.net.address import split_address
from stoker.net.link import LinkError


class Members(NamedTuple):
    """The members of a cluster at a time."""

    version: int
    """Grows whenever they change."""
    members: tuple[Member, ...]


class Membership(Protocol):
    """Says who belongs to a cluster. Pickles: worker processes have one, too.

    Attributes:
        token: the cluster's secret.
        home: the name of the member whose store is on this host; None: there is none.
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
        self, addresses: Sequence[str], token: bytes, definition: Definition, path: str | None
    ) -> None:
        self.token = token
        self.home: str | None = None
        self.folder: str | None = None
        self._definition = definition
        self._path = path
        self._known: dict[str, Member] = {}
        self._addresses = tuple(addresses)
        self._tries = {address: Backoff() for address in addresses}
        self._has_begun = False
        self._why = ""
        found = self.members()
        self._has_begun = True
        if not found.members:
            raise CacheError(
                f"no keeper answers at {', '.join(addresses)} ({self._why}): start one on each of "
                "these hosts (stoker cache serve --listen HOST:PORT)"
            )

    def members(self) -> Members:
        for address, tries in self._tries.items():
            if address in self._known or not tries.is_due:
                continue
            try:
                line = Line(address, self.token, self._definition, len(self._known))
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
                if self.home is None and self._is_here(welcome.boot, welcome.folder):
                    self.home, self.folder = address, welcome.folder
        return Members(len(self._known), tuple(self._known.values()))

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
