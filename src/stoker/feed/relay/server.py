"""The relay server on the feeder's host: relays of other hosts connect here.

For each connection of a relay this server is an ordinary job of the feed: it takes outputs from
shared memory, and sends their contents without a copy. The feeder treats relays that are slow,
silent or gone like such jobs.
"""

from __future__ import annotations

import threading
from typing import Any

from stoker.engine.heads import batch_rows
from stoker.errors import FeedError
from stoker.feed import local_socket, messages
from stoker.feed.client import FeedClient, FeedEpoch
from stoker.feed.connection import FeedAddress
from stoker.feed.messages import Ask, Begin, End, Failed, Malformed, Refused
from stoker.feed.relay import protocol
from stoker.feed.relay.protocol import Join, RelayServerEnd, RemoteItem, Taken
from stoker.feed.token import find_or_make_token
from stoker.transport import codec
from stoker.transport.link import Link, split_address
from stoker.transport.listener import Listener
from stoker.transport.tls import host_tls

# How long the feeder of this host may take until it listens.
_CONNECT_S = 5.0


class RelayServer:
    """Makes the feed ``name`` of this process reachable at ``listen``, a ``host:port``.

    With ``insecure`` its traffic is not encrypted.

    Raises FeedError if it cannot listen there, TokenError, ValueError for an invalid address.
    """

    def __init__(self, listen: str, name: str, *, insecure: bool = False) -> None:
        self._name = name
        host, port = split_address(listen)
        token = find_or_make_token()
        try:
            self._listener = Listener(
                host,
                port,
                token,
                protocol.PURPOSE,
                self._serve,
                timeout_s=protocol.SILENT_S,
                tls=host_tls(),
                insecure=insecure,
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
                raise Malformed("Join comes first")
            client = self._joined(end, join)
            if client is None:
                return
            try:
                end.send(client.about)
                RelayedJob(end, client).serve()
            finally:
                client.close()
        except (EOFError, OSError, Malformed):
            pass

    def _joined(self, end: RelayServerEnd, join: Join) -> FeedClient | None:
        """Return a job of the feed for a relay; None if it was refused."""
        try:
            if join.version != protocol.VERSION:
                raise FeedError("the relay runs another version of stoker than the feeder")
            if join.name != self._name:
                raise FeedError(f"there is no feed {join.name!r}, it is {self._name!r}")
            label = "".join(c if c.isprintable() else "?" for c in join.label)
            goes_on_for = None if join.seed is None else (join.seed, join.outline)
            return FeedClient(
                FeedAddress(
                    self._name,
                    lambda: local_socket.connect_within(self._name, _CONNECT_S),
                    label=f"{label}, {end.peer}",
                    goes_on_for=goes_on_for,
                )
            )
        except FeedError as error:
            end.send(Refused(messages.plain(str(error))))
            return None


class RelayedJob:
    """A job of the feed whose outputs are forwarded to a relay.

    One thread receives the relay's messages, another sends outputs.
    """

    def __init__(self, end: RelayServerEnd, client: FeedClient) -> None:
        self._end = end
        self._client = client
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ask: Ask | None = None
        self._room = 0  # items that the relay has room for
        self._epoch: FeedEpoch | None = None
        self._is_gone = False

    def serve(self) -> None:
        """Serve until the relay leaves. Raises Malformed, EOFError or OSError."""
        thread = threading.Thread(target=self._hand_out, name="stoker-feed-relayed", daemon=True)
        thread.start()
        try:
            while True:
                self._hear(self._end.receive())
        finally:
            with self._lock:
                self._is_gone = True
                self._changed.notify()
                epoch = self._epoch
            if epoch is not None:
                epoch.interrupt()
            self._end.close()
            thread.join()

    def _hear(self, message: Any) -> None:
        with self._lock:
            if isinstance(message, Taken):
                self._room += 1
            elif isinstance(message, Ask) and self._ask is None:
                self._ask, self._room = message, self._client.about.lent
            else:
                raise Malformed(f"{type(message).__name__} out of turn")
            self._changed.notify()

    def _hand_out(self) -> None:
        try:
            while True:
                with self._lock:
                    self._changed.wait_for(lambda: self._is_gone or self._ask is not None)
                    ask = self._ask
                    if self._is_gone or ask is None:
                        return
                    at = None if ask.epoch is None else (ask.epoch, ask.number)
                    self._client.at = at
                    self._epoch = iter(self._client)
                last = self._hand_out_epoch(ask.turn, self._epoch)
                with self._lock:
                    self._ask = None
                    if self._is_gone:
                        return
                self._end.send(last)
        except OSError:
            pass  # it is gone
        finally:
            self._end.close()  # wakes the other thread

    def _hand_out_epoch(self, turn: int, epoch: FeedEpoch) -> End | Failed:
        """Send an epoch's outputs; return the message for its end."""
        at = 0, 0
        try:
            at = epoch.begin()
            self._end.send(Begin(turn, *at))
            while self._wait_for_room():
                outputs = epoch.take()
                self._send(at, outputs)
                at = at[0], at[1] + len(outputs)
                del outputs  # the feeder waits for its memory
        except StopIteration:
            pass
        except (FeedError, TypeError, ValueError) as error:
            return Failed(turn, messages.plain(str(error)))
        finally:
            epoch.close()
        return End(turn, *at)

    def _wait_for_room(self) -> bool:
        """Wait until the relay has room for an item; False if the relay is gone."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_gone or self._room > 0)
            self._room -= 1
            return not self._is_gone

    def _send(self, at: tuple[int, int], outputs: list[Any]) -> None:
        value: Any = outputs
        rows = len(outputs)
        if self._client.about.batched:
            value = outputs[0]
            rows = batch_rows(value)
        try:
            head, contents = codec.encode_views(value)
        except TypeError as error:
            raise TypeError(f"this feed cannot go to other hosts: {error}") from None
        digest = protocol.checksum(*contents)
        item = RemoteItem(*at, len(outputs), rows, digest, head)
        self._end.send(item, *contents)
