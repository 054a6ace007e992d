"""URLs of feeds on other hosts: ``tcp://host:port/NAME``."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.feed.local_socket import check_name
from stoker.transport.address import split_address

_SCHEME = "tcp://"


def is_url(text: object) -> bool:
    """True if ``text`` is the URL of a feed on another host."""
    return isinstance(text, str) and text.startswith(_SCHEME)


@dataclass(frozen=True)
class FeedUrl:
    """A feed's address: ``host:port``, and its name there."""

    address: str
    name: str

    @staticmethod
    def of(text: str) -> FeedUrl:
        """Parse a URL. Raises ValueError."""
        address, _, name = text.removeprefix(_SCHEME).partition("/")
        try:
            split_address(address)
            check_name(name)
        except ValueError as error:
            raise ValueError(
                f"{text!r} is not the URL of a feed ({error}): write tcp://host:port/NAME"
            ) from None
        return FeedUrl(address, name)

    def __str__(self) -> str:
        return f"{_SCHEME}{self.address}/{self.name}"
