"""Messages between a feeder and its jobs: one schema, one message per packet.

Packets go over a Unix socket that keeps packet boundaries (SOCK_SEQPACKET), between processes of
one user. Between hosts, the same messages go over a link (``remote``). A packet that is too long
or does not fit the schema ends its connection. The schema bounds every number and every text, so
code can compute with a decoded message without checks.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

# Raised whenever a message changes; a feeder refuses jobs with another version.
VERSION = 8
# The largest packet. Larger payloads lie in blocks of shared memory. Chosen, not measured.
MAX_PACKET_BYTES = 1 << 16
MAX_NUMBER = (1 << 62) - 1
"""The largest number in a message: the sum of two fits into an int64."""
# The most leases in one message. A job holds hundreds at most; 1,000 numbers of 9 bytes take a
# seventh of a packet.
MAX_LEASES = 1000
# The longest label: it is one line for people.
LABEL_CHARACTERS = 200
# The longest target or reason: at most 32 KB as UTF-8, half of a packet.
TEXT_CHARACTERS = 8000
# The most descriptors that the kernel passes in one message (SCM_MAX_FD).
_MAX_DESCRIPTORS = 253
# Room for them: C ints of four bytes each.
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4)
_TRUNCATED = socket.MSG_TRUNC | socket.MSG_CTRUNC
_CREDENTIALS = struct.Struct("iII")

Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
Seed = Annotated[int, msgspec.Meta(ge=0)]  # below 2^64
Pid = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Label = Annotated[str, msgspec.Meta(max_length=LABEL_CHARACTERS)]
Target = Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS)]
Generations = Annotated[list[Number], msgspec.Meta(max_length=_MAX_DESCRIPTORS)]


class Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """The base of all messages."""


# -- from a job


class Hello(Message):
    """The first message of a job.

    Attributes:
        version: the version of this schema.
        label: the job's command line, for people.
        target: the pipeline that the job wants, ``FILE.py:FUNCTION``; empty for any.
        name: the feed that it wants; empty for any.
        seed, signature: those of its previous feeder, if there was one.
    """

    version: int
    label: Label
    target: Target = ""
    name: Label = ""
    seed: Seed | None = None
    signature: list[str] = []


class EpochRequest(Message, tag="Ask"):
    """Requests an epoch: from a position on, or the next epoch that begins if ``epoch`` is None.

    All replies repeat the ``request_id``, so the job can drop replies to an earlier request.
    """

    request_id: Number
    epoch: Number | None
    number: Number


class Release(Message, tag="Done"):
    """The job no longer needs the items of some leases."""

    leases: Annotated[list[Number], msgspec.Meta(max_length=MAX_LEASES)]


class Leave(Message):
    """The job wants no more of this epoch."""


# -- from a feeder


class Welcome(Message):
    """The reply to ``Hello``.

    Attributes:
        batched: whether it serves batches, rather than examples.
        length: the number of outputs in an epoch, if known.
        seed, signature: those of its pipeline; equal signatures and seeds give equal outputs.
        is_repeatable: whether any output can be prepared again, by epoch and number.
        pid: the feeder's process id.
        max_leases: how many items a job may hold at a time.
        awaited_jobs: how many jobs must request the first epoch; 0 once it has begun.
    """

    batched: bool
    length: Number | None
    seed: Seed
    signature: list[str]
    is_repeatable: bool
    max_leases: Positive
    pid: Pid
    awaited_jobs: Number


class Refused(Message):
    """The feeder does not serve this job, or cannot serve any."""

    reason: str


class Begin(Message):
    """An epoch begins for this job at this output."""

    request_id: Number
    epoch: Number
    number: Number


class ItemMessage(Message):
    """An item: one or several outputs. The descriptors of its blocks come with it.

    Attributes:
        epoch, number: the position of its first output.
        count: the number of outputs; examples come several at a time.
        lease: the item's lease, which ``Release`` repeats.
        generations: the generation of each block's contents.
        header, places: see ``stoker.feeds.shared_memory.Payload``.
        behind: how many further outputs are ready.
    """

    request_id: Number
    epoch: Number
    number: Number
    count: Positive
    lease: Number
    generations: Generations
    header: bytes
    places: list[tuple[Number, Number, Number]]
    behind: Number = 0


class End(Message):
    """The epoch has ended: it had ``total`` outputs, and the job has got all of them."""

    request_id: Number
    epoch: Number
    total: Number


class Failed(Message):
    """The pipeline failed at the next output."""

    request_id: Number
    reason: str


class Evicted(Message):
    """The other jobs continued without this one, because it did not respond for too long."""

    request_id: Number


FromJob = Hello | EpochRequest | Release | Leave
FromFeeder = Welcome | Refused | Begin | ItemMessage | End | Failed | Evicted

encode = msgspec.msgpack.Encoder().encode
_decode_from_job = msgspec.msgpack.Decoder(FromJob).decode
_decode_from_feeder = msgspec.msgpack.Decoder(FromFeeder).decode


class Malformed(Exception):
    """A packet is not a valid message."""


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send a message, with copies of descriptors.

    Raises ValueError if it is too long, and the socket's errors.
    """
    packet = encode(message)
    if len(packet) > MAX_PACKET_BYTES:
        raise ValueError(f"a message of {len(packet):,} bytes is too long")
    if descriptors:
        ancillary = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        connection.sendmsg([packet], [ancillary])
    else:
        connection.send(packet)


def receive_as_feeder(connection: socket.socket) -> FromJob | None:
    """Return a job's message; None if the job is gone. Descriptors from a job are ignored.

    Raises Malformed, and the socket's errors.
    """
    packet, _, flags, _ = connection.recvmsg(MAX_PACKET_BYTES)
    if not packet:
        return None
    message: FromJob = _decode(packet, flags & socket.MSG_TRUNC, _decode_from_job)
    return message


def receive_as_job(connection: socket.socket) -> tuple[FromFeeder | None, list[int]]:
    """Return a feeder's message and its descriptors; None if the feeder is gone.

    Raises Malformed, and the socket's errors.
    """
    packet, ancillary, flags, _ = connection.recvmsg(
        MAX_PACKET_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
    )
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
    try:
        message = decode_from_feeder(packet, flags & _TRUNCATED) if packet else None
        blocks = len(message.generations) if isinstance(message, ItemMessage) else 0
        if len(descriptors) != blocks:
            raise Malformed(f"a message came with {len(descriptors)} descriptors, not {blocks}")
    except Malformed:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return message, descriptors


def decode_from_feeder(packet: bytes, is_truncated: int = 0) -> FromFeeder:
    """Return a feeder's message. Raises Malformed."""
    message: FromFeeder = _decode(packet, is_truncated, _decode_from_feeder)
    return message


def _decode(packet: bytes, is_truncated: int, decode: Callable[[bytes], Any]) -> Any:
    if is_truncated:
        raise Malformed("a message is too long for its buffer")
    try:
        return decode(packet)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error)) from None


def clip_text(text: str, most: int = TEXT_CHARACTERS) -> str:
    """Return a text as valid UTF-8, cut to a length. Names of files may hold other bytes."""
    return text.encode("utf-8", "backslashreplace").decode()[:most]


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and user id of the other end, as the kernel knows them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
