"""What crosses the network between hosts: values as they are, and nothing that is damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from stoker.feed.crossing import (
    Beat,
    GatewayEnd,
    Join,
    RelayEnd,
    RemoteItem,
    Taken,
    checksum,
)
from stoker.feed.messages import Ask, Begin, End, Failed, Malformed, Message, Refused, Welcome
from stoker.ipc import portable
from stoker.net.link import Link
from strategies import FULL


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    first: Any
    second: Any


dtypes = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(),
    npst.floating_dtypes(sizes=(16, 32, 64)),
    npst.complex_number_dtypes(sizes=(64, 128)),
    npst.datetime64_dtypes(),
    npst.unicode_string_dtypes(),
    npst.byte_string_dtypes(),
)
arrays = npst.arrays(dtypes, npst.array_shapes(min_dims=0, min_side=0)).flatmap(
    lambda array: st.sampled_from([array, array.T, array[::-1] if array.ndim else array])
)
tensors = st.sampled_from([torch.uint8, torch.bool, torch.bfloat16, torch.float64]).map(
    lambda dtype: torch.arange(24).reshape(2, 3, 4).to(dtype).permute(0, 2, 1)
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(max_size=2_000),
    arrays,
    tensors,
    st.sampled_from([np.float32(2.5), np.int64(-3), np.datetime64("2020-01-02"), np.str_("a")]),
)
keys = st.one_of(st.text(max_size=5), st.integers(0, 9))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.builds(Pair, inner, inner),
        st.builds(Sample, inner, inner),
    ),
    max_leaves=8,
)


def parts_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if dataclasses.is_dataclass(value):
        return [getattr(value, f.name) for f in dataclasses.fields(value)]
    return list(value) if isinstance(value, (list, tuple)) else []


def assert_alike(value: Any, other: Any) -> None:
    assert type(value) is type(other)
    if isinstance(value, np.ndarray):
        assert (value.dtype, value.shape) == (other.dtype, other.shape)
        assert value.tobytes() == other.tobytes()
    elif isinstance(value, torch.Tensor):
        assert (value.dtype, value.stride()) == (other.dtype, other.stride())
        assert torch.equal(value, other)
    elif parts := parts_of(value):
        others = parts_of(other)
        assert len(parts) == len(others)
        for one, another in zip(parts, others, strict=True):
            assert_alike(one, another)
    else:
        assert value == other


@given(values)
def test_values_are_read_as_they_were_written(value: Any) -> None:
    outline, contents = portable.write(value)
    assert_alike(portable.read(outline, bytearray(b"".join(contents))), value)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, 2**63, "\udc80", np.array([object()]), len, torch.ones(2).to_sparse(), 1j],
)
def test_what_cannot_be_said_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"\(at field\.1\)"):
        portable.write({"field": [0, value]})


def test_a_class_that_nobody_has_imported() -> None:
    """A named tuple is made up; a dataclass cannot be."""
    made, none = (
        portable.write(value)[0].replace(b"test_crossing", b"somewhere_new")
        for value in (Pair(1, 2), Sample(1, 2))
    )
    value = portable.read(made, b"")
    assert value == (1, 2)
    assert (type(value).__name__, value.second) == ("Pair", 2)
    with pytest.raises(portable.Unknown, match=r"somewhere_new\.Sample"):
        portable.read(none, b"")


WELCOME = Welcome("n", "t", True, 3, 11, ["a", "b"], True, False, 2, 7, 0)
SAID_BY_RELAYS: list[Message] = [
    Join(1, "feed", "a relay", 11, ["a", "b"]), Ask(1, None, 0), Ask(2, 3, 4), Taken(), Beat(),
]  # fmt: skip
SAID_BY_GATEWAYS: list[Message] = [
    WELCOME, Refused("no"), Begin(1, 0, 5), End(1, 0, 6), Failed(1, "é"), Beat(),
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
        GatewayEnd(link).send(message, *contents)
        link.close()
        return b"".join(iter(lambda: theirs.recv(1 << 20), b""))


def test_damaged_frames_harm_nobody() -> None:
    """Each end takes them for what they are; no value comes out that is another."""
    draw = random.Random(3)
    outline, contents = portable.write(VALUE)
    item = RemoteItem(0, 5, 1, 2, checksum(*contents), outline)
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
                        assert isinstance(GatewayEnd(link).receive(), Message)
                    else:
                        message, body = RelayEnd(link).receive(place)
                        assert isinstance(message, Message)
                        if isinstance(message, RemoteItem):
                            assert message == item
                            assert_alike(portable.read(message.outline, body.data), VALUE)
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


def test_damaged_outlines_are_values_or_refused() -> None:
    """Whatever an authenticated relay is sent: no code runs, and nothing is read elsewhere."""
    draw = random.Random(4)
    outline, contents = portable.write(VALUE)
    body = bytearray(b"".join(contents))
    refused = 0
    for _ in range(100_000 if FULL else 5_000):
        damaged = mutated(outline, draw)
        try:
            portable.read(damaged, body[: draw.choice([len(body), len(body), 64, 0])])
        except (ValueError, portable.Unknown):
            refused += 1
    assert refused


EIGHT = b"ABCDEFGH" + bytes(56)
ODD = {
    "objects": ([5, "|O", [1], None], EIGHT),
    "an object": ([7, "|O", b"ABCDEFGH"], b""),
    "elements without bytes": ([5, "|V0", [2**61], None], b""),
    "texts without bytes": ([5, "<U0", [2**61], None], b""),
    "a dtype by its name": ([5, "object", [1], None], EIGHT),
    "a tensor of a function": ([6, "load", [1], None], EIGHT),
    "a tensor of a class": ([6, "Tensor", [1], None], EIGHT),
    "letters that there are not": ([5, "<U2", [8], None], b"\xff" * 64),
    "a letter that there is not": ([7, "<U1", b"\xff" * 4], b""),
    "axes that there are not": ([5, "<f8", [1], [7]], EIGHT),
    "more names than parts": ([3, True, "m", "N", ["a", "b"], [1]], b""),
    "no names": ([3, True, "m", "N", ["a b"], [1]], b""),
    "names that are reserved": ([3, True, "m", "class", ["_a"], [1]], b""),
    "keys that cannot be": ([2, [[1, []]], [1]], b""),
    "a byte string that is not there": ([4, 2**61], b""),
}


@pytest.mark.parametrize("name", ODD)
def test_what_no_feed_hands_out_is_refused(name: str) -> None:
    outline, contents = ODD[name]
    with pytest.raises(ValueError, match=r"."):
        portable.read(msgspec.msgpack.encode(outline), bytearray(contents))


def test_outlines_that_are_nested_too_deep_are_refused() -> None:
    with pytest.raises(ValueError, match="recursion"):
        portable.read(b"\x92\x01\x91" * 100_000 + b"\x01", b"")


def test_large_claims_take_no_memory() -> None:
    for shape in ([2**40], [0, 2**61], [2**31, 2**31, 2**31]):
        outline = msgspec.msgpack.encode([5, "<f8", shape, None])
        with pytest.raises(ValueError, match=r"less than|reshape|too big"):
            portable.read(outline, b"")


@pytest.fixture
def ends() -> Iterator[tuple[GatewayEnd, RelayEnd]]:
    ours, theirs = socket.socketpair()
    gateway, relay = GatewayEnd(Link(ours, "relay", 5.0)), RelayEnd(Link(theirs, "gateway", 5.0))
    yield gateway, relay
    gateway.close()
    relay.close()


def test_who_waits_is_kept_by_beats_and_others_are_given_up(
    ends: tuple[GatewayEnd, RelayEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.feed.crossing.BEAT_S", 0.01)
    monkeypatch.setattr("stoker.feed.crossing.SILENT_S", 0.3)
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
    relay.send(Taken())
    thread.join()  # nobody beats any more
    assert [type(message) for message in heard] == [Taken]
    with pytest.raises(OSError, match="sent nothing"):
        relay.receive()
