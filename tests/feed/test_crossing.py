"""What crosses the network between hosts: values as they are, and nothing that is damaged."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from encodable import Pair, Record, nested, shown
from odd_records import ODD_RECORDS, record_of
from stoker.feed.messages import (
    Begin,
    End,
    EpochRequest,
    Failed,
    Malformed,
    Message,
    Refused,
    Welcome,
)
from stoker.feed.relay.protocol import (
    Heartbeat,
    ItemTaken,
    Join,
    RelayServerEnd,
    RelaySourceEnd,
    RemoteItem,
)
from stoker.transport.codec.decoder import Damaged, RecordView, UnknownType, decode, decode_views
from stoker.transport.codec.encoder import encode, encode_views
from stoker.transport.link import Link
from strategies import FULL


def lent(value: Any) -> tuple[bytes, bytearray]:
    """Return the head and the contents of a value's record."""
    head, contents = encode_views(value)
    return head, bytearray(b"".join(contents))


@given(nested)
def test_all_that_a_cache_keeps_crosses_as_it_was(value: Any) -> None:
    head, contents = encode_views(value)
    item = RemoteItem.of((0, 5), 1, 2, head, contents)
    ours, theirs = socket.socketpair()
    gateway, relay = (
        RelayServerEnd(Link(ours, "relay", 5.0)),
        RelaySourceEnd(Link(theirs, "gateway", 5.0)),
    )
    with contextlib.closing(gateway), contextlib.closing(relay):
        gateway.send(item, *contents)
        message, body = relay.receive(place)
    assert isinstance(message, RemoteItem)
    made = pickle.loads(pickle.dumps(RecordView(message.head, body), 5))
    assert shown(made) == shown(value)
    assert shown(decode(memoryview(b"".join(encode(value))))) == shown(value)


def test_what_cannot_be_said_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"\(at field\.1\)"):
        encode_views({"field": [0, object()]})


def test_a_class_that_nobody_has_imported() -> None:
    """A named tuple is made up; a dataclass cannot be."""
    made, none = (
        encode_views(value)[0].replace(b"encodable", b"somewhere")
        for value in (Pair(1, 2), Record(1, 2))
    )
    value = decode_views(made, b"")
    assert value == (1, 2)
    assert (type(value).__name__, value.right) == ("Pair", 2)
    with pytest.raises(UnknownType, match=r"somewhere\.Record"):
        decode_views(none, b"")
    with pytest.raises(UnknownType, match=r"somewhere\.Pair"):
        decode(memoryview(made))  # a store gives back what it was given, or nothing


WELCOME = Welcome("n", "t", True, 3, 11, ["a", "b"], True, False, 2, 7, 0)
SAID_BY_RELAYS: list[Message] = [
    Join(1, "feed", "a relay", 11, ["a", "b"]), EpochRequest(1, None, 0),
    EpochRequest(2, 3, 4), ItemTaken(), Heartbeat(),
]  # fmt: skip
SAID_BY_GATEWAYS: list[Message] = [
    WELCOME, Refused("no"), Begin(1, 0, 5), End(1, 0, 6), Failed(1, "é"), Heartbeat(),
]  # fmt: skip
VALUE = [Pair(np.arange(300), "x" * 20), {"a": (torch.arange(9.0), b"b" * 1500, -1)}]


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Return data that something was done to, a few times."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        at = draw.randrange(len(data) + 1)
        what = draw.randrange(8)
        if what == 0:
            data = data[:at]
        elif what == 1:
            data = data[:at] + draw.randbytes(draw.randint(1, 9)) + data[at:]
        elif what == 2:  # a length
            data = data[:at] + draw.choice(b"\xdb\xdd\xdf\xc6").to_bytes() + draw.randbytes(4)
        elif what == 3:  # a number
            number = draw.choice([b"\xcf", b"\xd3"]) + draw.choice([b"\xff", b"\x7f", b"\x80"]) * 8
            data = data[:at] + number + data[at + 1 :]
        else:
            data = data[:at] + draw.randbytes(1) + data[at + 1 :]
    return data


def frame_of(message: Message, *contents: memoryview) -> bytes:
    """Return what is sent over a connection."""
    ours, theirs = socket.socketpair()
    with theirs:
        link = Link(ours, "test", 5.0)
        RelayServerEnd(link).send(message, *contents)
        link.close()
        return b"".join(iter(lambda: theirs.recv(1 << 20), b""))


def test_damaged_frames_harm_nobody() -> None:
    """Each end takes them for what they are; no value comes out that is another."""
    draw = random.Random(3)
    head, contents = encode_views(VALUE)
    item = RemoteItem.of((0, 5), 1, 2, head, contents)
    by_relays = [frame_of(message) for message in SAID_BY_RELAYS]
    by_gateways = [frame_of(message) for message in SAID_BY_GATEWAYS]
    by_gateways += 4 * [frame_of(item, *contents)]
    good = bad = 0
    for number in range(100_000 if FULL else 3_000):
        by_relay = number % 2
        data = mutated(draw.choice(by_relays if by_relay else by_gateways), draw)
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            link = Link(ours, "test", 5.0)
            try:
                while True:
                    if by_relay:
                        assert isinstance(RelayServerEnd(link).receive(), Message)
                    else:
                        message, body = RelaySourceEnd(link).receive(place)
                        assert isinstance(message, Message)
                        if isinstance(message, RemoteItem):
                            assert message == item
                            assert shown(decode_views(message.head, body)) == shown(VALUE)
                    good += 1
            except (EOFError, OSError, Malformed):
                bad += 1
            except MemoryError:
                bad += 1  # what `place` says to an item that is too large
    assert good
    assert bad


def place(size: int) -> Any:
    if size > 1 << 20:
        raise MemoryError
    return np.empty(size, np.uint8)


def test_damaged_heads_are_values_or_refused() -> None:
    """Whatever an authenticated relay is sent: no code runs, and nothing is read elsewhere."""
    draw = random.Random(4)
    head, body = lent(VALUE)
    refused = 0
    for _ in range(100_000 if FULL else 5_000):
        damaged = mutated(head, draw)
        try:
            decode_views(damaged, body[: draw.choice([len(body), len(body), 64, 0])])
        except (Damaged, UnknownType):
            refused += 1
    assert refused


@pytest.mark.parametrize("name", ODD_RECORDS)
def test_what_no_feed_hands_out_is_refused(name: str) -> None:
    record = ODD_RECORDS[name]
    lengths = struct.unpack_from("<II", record.ljust(8, b"\0"))
    start = min(len(record), 8 + sum(lengths))
    with pytest.raises(Damaged):
        decode_views(record[:start], bytearray(record[start:]))


@pytest.mark.parametrize("fields", [["a b"], ["_a"], ["class"]])
def test_named_tuples_of_odd_names_are_not_made_up(fields: list[str]) -> None:
    record = record_of(["named", "m:N", fields, "plain"], [1])
    with pytest.raises(Damaged):
        decode_views(record, b"")


def test_large_claims_take_no_memory() -> None:
    for shape in ([2**40], [0, 2**61], [2**31, 2**31, 2**31]):
        with pytest.raises(Damaged, match=r"too small|offset|too big|dimension"):
            decode_views(record_of(["array", "<f8"], [shape]), b"")


@pytest.fixture
def ends() -> Iterator[tuple[RelayServerEnd, RelaySourceEnd]]:
    ours, theirs = socket.socketpair()
    gateway, relay = (
        RelayServerEnd(Link(ours, "relay", 5.0)),
        RelaySourceEnd(Link(theirs, "gateway", 5.0)),
    )
    yield gateway, relay
    gateway.close()
    relay.close()


def test_who_waits_is_kept_by_beats_and_others_are_given_up(
    ends: tuple[RelayServerEnd, RelaySourceEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.feed.relay.protocol.HEARTBEAT_S", 0.01)
    monkeypatch.setattr("stoker.feed.relay.protocol.SILENT_S", 0.3)
    gateway, relay = ends
    heard: list[Any] = []

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError, Malformed):
            for _ in itertools.count():
                heard.append(gateway.receive())

    thread = threading.Thread(target=listen)
    thread.start()
    timer = threading.Timer(0.9, gateway.send, [Begin(1, 2, 3)])  # three times as long as allowed
    timer.start()
    message, _ = relay.receive()
    assert isinstance(message, Begin)
    timer.join()
    relay.send(ItemTaken())
    thread.join()  # nobody beats any more
    assert [type(message) for message in heard] == [ItemTaken]
    with pytest.raises(OSError, match="sent nothing"):
        relay.receive()
