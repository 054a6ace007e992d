"""The relay server on the feeder's host: relays of other hosts connect to it.

For each connection of a relay, this server is an ordinary job of the feed: it reads outputs from
shared memory, and sends their contents without a copy. So the feeder treats a relay that is slow,
silent or gone like any other job.
"""

from __future__ import annotations

import threading
from typing import Any

from stoker.basics import pytree
from stoker.basics.future import start_thread
from stoker.errors import FeedError
from stoker.feed import local_socket, messages
from stoker.feed.client import FeedClient, FeedEpoch
from stoker.feed.connection import FeedAddress
from stoker.feed.messages import Begin, End, EpochRequest, Failed, Malformed, Refused
from stoker.feed.relay import protocol
from stoker.feed.relay.protocol import ItemTaken, Join, RelayServerEnd, RemoteItem
from stoker.feed.token import find_or_make_token
from stoker.transport.address import split_address
from stoker.transport.codec.encoder import encode_views
from stoker.transport.link import Link
from stoker.transport.listener import Listener
from stoker.transport.secret import Secret

# How long this process's own feeder may take to listen. Chosen, not measured.
_CONNECT_S = 5.0


class RelayServer:
    """Makes the feed ``name`` of this process available at ``listen``, a ``host:port``.

    With ``insecure``, its traffic is not encrypted; relays must be told so, too.

    Raises FeedError if it cannot listen there, TokenError, ImportError if cryptography is missing,
    ValueError for an invalid address.
    """

    def __init__(self, listen: str, name: str, *, insecure: bool = False) -> None:
        self._name = name
        host, port = split_address(listen)
        secret = Secret.of_host(find_or_make_token(), insecure=insecure)
        try:
            self._listener = Listener(
                host,
                port,
                secret,
                protocol.PURPOSE,
                self._serve,
                timeout_s=protocol.SILENT_S,
            )
        except OSError as error:
            raise FeedError(f"the feed cannot listen on {listen}: {error}") from error

    @property
    def address(self) -> str:
        """``host:port``, with the actual port."""
        return self._listener.address

    def close(self) -> None:
        """End all connections; their threads end."""
        self._listener.close()

    def _serve(self, link: Link) -> None:
        """Serve a relay until it leaves, or sends an invalid message."""
        end = RelayServerEnd(link)
        try:
            join = end.receive()
            if not isinstance(join, Join):
                raise Malformed("Join must come first")
            client = self._join(end, join)
            if client is None:
                return
            try:
                end.send(client.welcome)
                RelayedJob(end, client).serve()
            finally:
                client.close()
        except (EOFError, OSError, Malformed):
            pass

    def _join(self, end: RelayServerEnd, join: Join) -> FeedClient | None:
        """Return a job of the feed for a relay; None if it was refused."""
        try:
            if join.version != protocol.VERSION:
                raise FeedError("the relay runs another version of stoker than the feeder")
            if join.name != self._name:
                raise FeedError(
                    f"there is no feed {join.name!r} at this address: its feed is {self._name!r}"
                )
            label = "".join(c if c.isprintable() else "?" for c in join.label)
            continues = None if join.seed is None else (join.seed, join.signature)
            return FeedClient(
                FeedAddress(
                    self._name,
                    lambda: local_socket.connect_within(self._name, _CONNECT_S),
                    label=f"{label}, {end.peer}",
                    continues=continues,
                )
            )
        except FeedError as error:
            end.send(Refused(messages.clip_text(str(error))))
            return None


class RelayedJob:
    """A job of the feed that forwards its outputs to a relay.

    One thread receives the relay's messages, another one sends outputs.
    """

    def __init__(self, end: RelayServerEnd, client: FeedClient) -> None:
        self._end = end
        self._client = client
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._request: EpochRequest | None = None
        self._room = 0  # items that the relay has room for
        self._epoch: FeedEpoch | None = None
        self._is_gone = False

    def serve(self) -> None:
        """Serve until the relay leaves. Raises Malformed, EOFError or OSError."""
        thread = start_thread("stoker-feed-relayed", self._send_epochs)
        try:
            while True:
                self._handle(self._end.receive())
        finally:
            with self._lock:
                self._is_gone = True
                self._changed.notify()
                epoch = self._epoch
            if epoch is not None:
                epoch.interrupt()
            self._end.close()
            thread.join()

    def _handle(self, message: Any) -> None:
        with self._lock:
            if isinstance(message, ItemTaken):
                self._room += 1
            elif isinstance(message, EpochRequest) and self._request is None:
                self._request, self._room = message, self._client.welcome.max_leases
            else:
                raise Malformed(f"{type(message).__name__} out of turn")
            self._changed.notify()

    def _send_epochs(self) -> None:
        try:
            while True:
                with self._lock:
                    self._changed.wait_for(lambda: self._is_gone or self._request is not None)
                    request = self._request
                    if self._is_gone or request is None:
                        return
                    position = None if request.epoch is None else (request.epoch, request.number)
                    self._client.position = position
                    self._epoch = iter(self._client)
                last = self._send_epoch(request.request_id, self._epoch)
                with self._lock:
                    self._request = None
                    if self._is_gone:
                        return
                self._end.send(last)
        except OSError:
            pass  # the relay is gone
        finally:
            self._end.close()  # wakes the other thread

    def _send_epoch(self, request_id: int, epoch: FeedEpoch) -> End | Failed:
        """Send an epoch's outputs; return the message that ends it."""
        position = 0, 0
        try:
            position = epoch.begin()
            self._end.send(Begin(request_id, *position))
            while self._wait_for_room():
                outputs = epoch.take_outputs()
                self._send(position, outputs)
                position = position[0], position[1] + len(outputs)
                del outputs  # ends the lease: the feeder needs its memory
        except StopIteration:
            pass
        except (FeedError, TypeError, ValueError) as error:
            return Failed(request_id, messages.clip_text(str(error)))
        finally:
            epoch.close()
        return End(request_id, *position)

    def _wait_for_room(self) -> bool:
        """Wait until the relay has room for an item; False if the relay is gone."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_gone or self._room > 0)
            self._room -= 1
            return not self._is_gone

    def _send(self, position: tuple[int, int], outputs: list[Any]) -> None:
        value: Any = outputs
        rows = len(outputs)
        if self._client.welcome.batched:
            value = outputs[0]
            rows = pytree.batch_rows(value)
        try:
            head, contents = encode_views(value)
        except TypeError as error:
            raise TypeError(f"this feed cannot serve other hosts: {error}") from None
        item = RemoteItem.of(position, len(outputs), rows, head, contents)
        self._end.send(item, *contents)
