"""Messages between a feeder and its jobs: one schema, one packet a message.

Packets go over a Unix socket that keeps their borders (SOCK_SEQPACKET), between processes of one
user. A packet that is too long or does not fit the schema ends its connection. So the schema bounds
every number and every text: a decoded message can be answered and computed with.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

# Raised whenever a message changes: jobs of other versions are refused with both numbers.
VERSION = 5
# Of a packet: larger payloads lie in blocks of shared memory.
MOST_BYTES = 1 << 16
LARGEST = (1 << 62) - 1
"""The largest number in a message: sums of two fit into an int64."""
# In one message: a job holds hundreds at most. At eight digits each they leave most of a packet
# free.
MOST_LEASES = 1000
# More jobs than one host runs.
MOST_PEERS = 128
# A label is a line for people.
LABEL_CHARACTERS = 200
# Of a target, or a reason: at most 32 KB as UTF-8, half of a packet.
TEXT_CHARACTERS = 8000
# The kernel passes as many at a time (SCM_MAX_FD).
_MOST_DESCRIPTORS = 253
# Of C ints, four bytes each.
_ROOM = socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4)
_LOST = socket.MSG_TRUNC | socket.MSG_CTRUNC
_CREDENTIALS = struct.Struct("iII")

Number = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
Seed = Annotated[int, msgspec.Meta(ge=0)]  # below 2^64
Pid = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Label = Annotated[str, msgspec.Meta(max_length=LABEL_CHARACTERS)]
Target = Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS)]
Generations = Annotated[list[Number], msgspec.Meta(max_length=_MOST_DESCRIPTORS)]


class Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """The base of all messages."""


# From a job.


class Hello(Message):
    """The first message of a job.

    Attributes:
        version: of this schema.
        label: the job's command line, for people.
        target: the pipeline that the job wants, ``FILE.py:FUNCTION``; empty for any.
        seed, outline: of its previous feeder, if there was one.
        peers: process ids of the jobs that were served beside it; the feeder waits for them.
    """

    version: int
    label: Label
    target: Target = ""
    seed: Seed | None = None
    outline: list[str] = []
    peers: Annotated[list[Pid], msgspec.Meta(max_length=MOST_PEERS)] = []


class Ask(Message):
    """Begin to hand out an epoch: the next one that begins, or from a position on.

    Answers repeat its ``turn``; another ``turn`` belongs to an earlier request.
    """

    turn: Number
    epoch: Number | None
    number: Number


class Done(Message):
    """The job has finished with hand-overs.

    Attributes:
        leases: the numbers of the hand-overs.
        wait_ns: nanoseconds that the job has waited for the feed so far.
    """

    leases: Annotated[list[Number], msgspec.Meta(max_length=MOST_LEASES)]
    wait_ns: Number


class Leave(Message):
    """Hand out no more of this epoch."""


# From a feeder.


class Welcome(Message):
    """The answer to ``Hello``.

    Attributes:
        name: of the feed.
        target: the pipeline that it serves.
        batched: whether it hands out batches, rather than examples.
        length: outputs of an epoch, if known.
        seed, outline: of its pipeline; equal outlines and seeds give equal outputs.
        again: whether any output can be prepared again, by epoch and number.
        autostarted: whether it ends with its last job (``stoker.share``).
        pid: of the feeder.
        lent: how many items a job may hold at a time.
        awaited_jobs: how many jobs must ask before the first epoch begins; 0 once it has begun.
        address: ``host:port`` for other hosts; empty if it serves this host only.
    """

    name: str
    target: str
    batched: bool
    length: Number | None
    seed: Seed
    outline: list[str]
    again: bool
    autostarted: bool
    lent: Positive
    pid: Pid
    awaited_jobs: Number
    address: str = ""


class Refused(Message):
    """The feeder will not serve this job, or cannot serve any."""

    reason: str


class Peers(Message):
    """The process ids of the jobs that are served at present."""

    pids: list[Pid]


class Begin(Message):
    """An epoch begins for this job, at this output."""

    turn: Number
    epoch: Number
    number: Number


class ItemMessage(Message):
    """A hand-over; the descriptors of its blocks come with it.

    Attributes:
        epoch, number: of its first output; ``count`` of them (examples come several at a time).
        lease: the number of the hand-over; ``Done`` repeats it.
        generations: the generation of each block's contents.
        header, places: see ``stoker.transport.payload.Payload``.
        behind: how many further outputs are ready.
    """

    turn: Number
    epoch: Number
    number: Number
    count: Positive
    lease: Number
    generations: Generations
    header: bytes
    places: list[tuple[Number, Number, Number]]
    behind: Number = 0


class End(Message):
    """The epoch had so many outputs, and the job has them all."""

    turn: Number
    epoch: Number
    total: Number


class Failed(Message):
    """The pipeline failed at the output that would have come next."""

    turn: Number
    reason: str


class Evicted(Message):
    """The others went on without this job: it did not answer for too long."""

    turn: Number


FromJob = Hello | Ask | Done | Leave
FromFeeder = Welcome | Refused | Peers | Begin | ItemMessage | End | Failed | Evicted

_encode = msgspec.msgpack.Encoder().encode
_decode_from_job = msgspec.msgpack.Decoder(FromJob).decode
_decode_from_feeder = msgspec.msgpack.Decoder(FromFeeder).decode


class Malformed(Exception):
    """A packet is no message."""


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send a message, with copies of descriptors.

    Raises ValueError when it is too long, and the socket's errors.
    """
    packet = _encode(message)
    if len(packet) > MOST_BYTES:
        raise ValueError(f"a message of {len(packet):,} bytes is too long")
    if descriptors:
        passed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        connection.sendmsg([packet], [passed])
    else:
        connection.send(packet)


def receive_as_feeder(connection: socket.socket) -> FromJob | None:
    """Return a job's message; None when it is gone. Descriptors that it sends are ignored.

    Raises Malformed, and what sockets raise.
    """
    packet, _, flags, _ = connection.recvmsg(MOST_BYTES)
    if not packet:
        return None
    message: FromJob = _read(packet, flags & socket.MSG_TRUNC, _decode_from_job)
    return message


def receive_as_job(connection: socket.socket) -> tuple[FromFeeder | None, list[int]]:
    """Return a feeder's message and its descriptors; None when the feeder is gone.

    Raises Malformed, and what sockets raise.
    """
    packet, ancillary, flags, _ = connection.recvmsg(MOST_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
    try:
        message = _read(packet, flags & _LOST, _decode_from_feeder) if packet else None
        blocks = len(message.generations) if isinstance(message, ItemMessage) else 0
        if len(descriptors) != blocks:
            raise Malformed(f"{len(descriptors)} descriptors came with it")
    except Malformed:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return message, descriptors


def _read(packet: bytes, lost: int, decode: Callable[[bytes], Any]) -> Any:
    if lost:
        raise Malformed("a message is too long")
    try:
        return decode(packet)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error)) from None


def plain(text: str, most: int = TEXT_CHARACTERS) -> str:
    """Return a text as valid UTF-8: file names may hold other bytes."""
    return text.encode("utf-8", "backslashreplace").decode()[:most]


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and user id of the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
