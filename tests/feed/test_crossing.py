"""What crosses the network between hosts: values as they are, and nothing that is damaged."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from test_hostile import mutated

from descriptors import open_descriptors
from encodable import Pair, Record, nested, shown
from odd_records import ODD_RECORDS, record_of
from stoker.feeds import remote
from stoker.feeds.messages import (
    Begin,
    End,
    Failed,
    ItemMessage,
    Malformed,
    Message,
    Refused,
    Welcome,
)
from stoker.feeds.shared_memory import from_payload, map_block
from stoker.transport.codec import Damaged, UnknownType, decode, decode_views, encode, encode_views
from stoker.transport.link import Link
from strategies import FULL


def lent(value: Any) -> tuple[bytes, bytearray]:
    """Return the head and the contents of a value's record."""
    head, contents = encode_views(value)
    return head, bytearray(b"".join(contents))


def item_of(head: bytes) -> ItemMessage:
    return ItemMessage(1, 0, 5, 1, 9, [], head, [])


def value_of(message: Message, descriptors: list[int]) -> Any:
    """Return the value of an item, as a job maps it."""
    assert isinstance(message, ItemMessage)
    mappings = [
        map_block(os.dup(each), generation)
        for each, generation in zip(descriptors, message.generations, strict=True)
    ]
    return from_payload(message.header, message.places, mappings)


@given(nested)
def test_all_that_a_cache_keeps_crosses_as_it_was(value: Any) -> None:
    ours, theirs = socket.socketpair()
    feeder, job = Link(ours, "job", 5.0), Link(theirs, "feeder", 5.0)
    with contextlib.closing(feeder), contextlib.closing(job):
        head, contents = encode_views(value)
        remote._send(feeder, item_of(head), contents)
        received = remote._Received()
        made = value_of(*received.next(job))
        received.close()
    assert shown(made) == shown(value)
    assert shown(decode(memoryview(b"".join(encode(value))))) == shown(value)


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


WELCOME = Welcome(True, 3, 11, ["a", "b"], True, 2, 7, 0)
SAID_BY_FEEDERS: list[Message] = [
    WELCOME, Refused("no"), Begin(1, 0, 5), End(1, 0, 6), Failed(1, "é"),
]  # fmt: skip
VALUE = [Pair(np.arange(300), "x" * 20), {"a": (torch.arange(9.0), b"b" * 1500, -1)}]


def frame_of(message: Message, contents: Sequence[Any] = ()) -> bytes:
    """Return what is sent over a connection."""
    ours, theirs = socket.socketpair()
    with theirs:
        link = Link(ours, "test", 5.0)
        remote._send(link, message, contents)
        link.close()
        return b"".join(iter(lambda: theirs.recv(1 << 20), b""))


def test_damaged_frames_harm_nobody() -> None:
    """A job takes them for what they are; no value comes out that is another."""
    draw = random.Random(3)
    head, contents = encode_views(VALUE)
    frames = [frame_of(message) for message in SAID_BY_FEEDERS]
    frames += 4 * [frame_of(item_of(head), contents)]
    good = bad = 0
    gc.collect()
    before = open_descriptors()
    for _ in range(50_000 if FULL else 1_500):
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(mutated(draw.choice(frames), draw))
            theirs.shutdown(socket.SHUT_WR)
            link, received = Link(ours, "test", 5.0), remote._Received()
            try:
                while True:
                    message, descriptors = received.next(link)
                    if isinstance(message, ItemMessage):
                        assert shown(value_of(message, descriptors)) == shown(VALUE)
                    good += 1
            except (EOFError, OSError, Malformed):
                bad += 1
            received.close()
    del link, ours
    gc.collect()
    assert open_descriptors() <= before  # nor is memory kept that a frame only claimed to need
    assert good
    assert bad


def test_damaged_heads_are_values_or_refused() -> None:
    """Whatever an authenticated job is sent: no code runs, and nothing is read elsewhere."""
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
