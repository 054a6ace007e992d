"""Addresses of processes on a network, as text: ``host:port``, or ``[host]:port`` for IPv6."""

from __future__ import annotations

import socket


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, or of ``[host]:port`` with an IPv6 address.

    Raises ValueError for other texts.
    """
    host, separator, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not (separator and host and is_port) or (":" in host and not is_bracketed):
        raise ValueError(
            f"an address must be host:port, or [host]:port for IPv6, but it is {address!r}"
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_host_towards(host: str) -> str:
    """Return this host's address on the interface that leads to another host.

    Nothing is sent. Raises OSError if there is no such interface.
    """
    # Any port will do (9 is "discard"): connecting a datagram socket sends nothing.
    family, _, _, _, address_there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address_there)
        return str(probe.getsockname()[0])
