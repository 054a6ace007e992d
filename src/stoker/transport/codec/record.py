"""The format of a record: one value as bytes.

A record is a head, then contents. The head holds the lengths of its two parts (4 bytes each), the
schema (MessagePack: how the value is nested, and the types), and the numbers (MessagePack: small
values, lengths and shapes, in order). The contents are byte strings and the memory of arrays and
tensors, in the schema's order. No offsets are stored, so none can be wrong.
Records of one kind have the same schema, so its reader is built once. A byte string that is not
nested has an empty schema and no numbers.
"""

from __future__ import annotations

import struct

LENGTHS = struct.Struct("<II")
# An empty schema and no numbers: the bytes themselves follow.
BYTES_HEAD = LENGTHS.pack(0, 0)
# The deepest nesting. Each level takes three nested calls, and Python allows 1,000.
MAX_DEPTH = 100
# The most elements of zero bytes in one array. Nothing else in a record bounds their number, so a
# damaged record could ask for any.
MAX_EMPTY_ELEMENTS = 1 << 16


class LeftOut:
    """Stored in place of an example that a filter left out."""

    def __reduce__(self) -> str:
        return "LEFT_OUT"  # by name, so that worker processes get the same object


LEFT_OUT = LeftOut()
