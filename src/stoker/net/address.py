"""Where a process listens: ``host:port``."""

from __future__ import annotations

import socket


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, or ``[host]:port`` with an address of IPv6.

    Raises ValueError.
    """
    host, separator, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not (separator and host and is_port) or (":" in host and not is_bracketed):
        raise ValueError(
            f"an address is host:port, or [host]:port with an address of IPv6, not {address!r}"
        )
    return host, int(port)


def joined_address(host: str, port: int) -> str:
    """Return what `split_address` splits."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_host_towards(host: str) -> str:
    """Return this host's own address on the interface that leads to another host.

    Nothing is sent. Raises OSError if no interface does.
    """
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
