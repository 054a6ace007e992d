"""Records that ``encode`` never writes: what a stranger may put into a store, or send for one."""

from __future__ import annotations

import struct
from typing import Any

import msgspec


def record_of(signature: Any, numbers: list[Any], contents: bytes = b"") -> bytes:
    """Return a record of any signature, numbers and contents."""
    signature, packed = msgspec.msgpack.encode(signature), msgspec.msgpack.encode(numbers)
    return struct.pack("<II", len(signature), len(packed)) + signature + packed + contents


def nested(depth: int) -> msgspec.Raw:
    """Return the signature of lists within each other."""
    return msgspec.Raw(b"\x92\xa4list" * depth + b"\xa5plain")


EIGHT = b"ABCDEFGH"
ODD_RECORDS = {
    "objects": record_of(["array", "|O"], [[1]], EIGHT),
    "an object": record_of(["scalar", "|O"], [], EIGHT),
    "fields that are objects": record_of(["array", [["a", "|O"]]], [[1]], EIGHT),
    "fields of fields": record_of(["array", [["a", [["b", "|O"]]]]], [[1]], EIGHT),
    "rows of objects": record_of(["array", [["a", "|O", [2]]]], [[1]], 2 * EIGHT),
    "a dtype by its name": record_of(["array", "object"], [[1]], EIGHT),
    "several dtypes": record_of(["array", "O,O"], [[1]], 2 * EIGHT),
    "elements without bytes": record_of(["array", "|V0"], [[2**62]]),
    "texts without bytes": record_of(["array", "<U0"], [[2**31, 2**31]]),
    "less than it says": record_of(["array", "<f8"], [[2]], EIGHT),
    "less than nothing": record_of(["array", "<f8"], [[-1, -1]], EIGHT),
    "a size beyond 64 bits": record_of(["array", "<f8"], [[2**63, 2**63]], EIGHT),
    "a size that wraps around": record_of(["tensor", "float32"], [[2**32, 2**32]]),
    "no size": record_of(["array", "<f8"], ["8"], EIGHT),
    "a tensor of a function": record_of(["tensor", "load"], [[1]], EIGHT),
    "a tensor of a class": record_of(["tensor", "Tensor"], [[1]], EIGHT),
    "a short byte string": record_of("bytes", [9], EIGHT),
    "a byte string of less than nothing": record_of("bytes", [-4], EIGHT),
    "as many zeros as a number says": record_of(["bytes_", "plain"], [2**40]),
    "a number that is none": record_of("integer", [float("inf")]),
    "a number of no digits": record_of("integer", ["z"]),
    "half of a number": record_of("complex", [1.0]),
    "no numbers": record_of("plain", []),
    "no numbers in a list": record_of(["list", "plain", "plain"], [1]),
    "more numbers": record_of("plain", [1, 2]),
    "a number of parts": record_of("plain", [{"a": 1}]),
    "no kind": record_of("nonsense", []),
    "no part": record_of(["nonsense", "plain"], [1]),
    "no name": record_of([], []),
    "a number for a part": record_of(7, []),
    "keys that cannot be": record_of(["dict", [["list"]], "plain"], [1]),
    "fewer keys": record_of(["dict", [], "plain"], [1]),
    "no class": record_of(["named", 5, [], "plain"], [1]),
    "nested too deep": record_of(nested(5_000), [1]),
    "deeper than it can be written": record_of(nested(120), [1]),
    "nested dtypes": record_of(
        ["array", [["a", msgspec.Raw(b"\x91\x92\xa1a" * 9_000 + b"\xa3<f8")]]], [[1]], EIGHT
    ),
    "a long list": struct.pack("<II", 5, 5) + b"\xdd\xff\xff\xff\xff" * 2,
    "lengths beyond its end": struct.pack("<II", 2**16 - 1, 2**32 - 1) + EIGHT,
    "less than its lengths": b"\x01",
    "more than it says": record_of(["array", "<f8"], [[1]], 2 * EIGHT),
    "more than nothing": record_of("plain", [1], EIGHT),
    "a head without a signature": struct.pack("<II", 0, 5) + EIGHT,
    "axes that there are not": record_of(["array", "<f8", 7], [[1]], EIGHT),
    "an axis twice": record_of(["array", "<f8", 0, 0], [[2, 1]], 2 * EIGHT),
    "more axes": record_of(["array", "<f8", 1, 0], [[1]], EIGHT),
    "axes of a tensor that there are not": record_of(["tensor", "float64", 1], [[1]], EIGHT),
    "more names than parts": record_of(["named", "m:N", ["a", "b"], "plain"], [1]),
    "no text": record_of("surrogates", [4], b"\xff\xfe\xfd\xfc"),
    "letters that there are not": record_of(["scalar", "<U2"], [], b"\xff" * 8),
}
