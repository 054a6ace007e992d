"""The cache of a pipeline or dataset; users of the same data share one store."""

from __future__ import annotations

import functools
import os
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.fingerprint import Fingerprint
from stoker.basics.resources import format_bytes
from stoker.basics.signals import finalize
from stoker.basics.warn import warn
from stoker.cache import inventory, location, store_dir
from stoker.cache.admission import RandomCheck
from stoker.cache.counters import DAMAGED, ITEMS, PAYLOAD_BYTES, USED_BYTES
from stoker.cache.handles import HANDLES, Handle
from stoker.cache.identity import ItemPlaces, NumberedKeys, digest, item_key
from stoker.cache.layout import StoredItem
from stoker.cache.location import Limit
from stoker.cache.store import MISSING, Missing
from stoker.errors import CacheWarning
from stoker.stats import CacheCounts, CacheStats
from stoker.transport.codec import Damaged, UnknownType, decode, encode

# How long a flush waits by default. A user would wait so long without an explanation. Chosen, not
# measured.
_FLUSH_S = 5.0


class ExampleCache:
    """The cache of one chain's items. It is picklable, and each process opens it on first use.

    Args:
        limit: the size of a new store.
        path: the store's folder, or None for a store in memory.
        keep: whether the store stays after its last user; None: only if ``path`` is given.
        identity: identifies the chain's items in other runs; None if they are valid in this job
            only.
        describes: the contents, for messages.
        examples: the number of examples.

    Raises ValueError for invalid arguments.
    """

    is_shared_by_nodes = False
    """True if the cache is spread over several nodes."""

    def __init__(
        self,
        limit: Limit,
        *,
        path: str | os.PathLike[str] | None,
        keep: bool | None,
        identity: str | None,
        describes: str,
        examples: int,
    ) -> None:
        self.limit = location.parse_limit(limit)
        self.temporary = not (path is not None if keep is None else keep)
        if not self.temporary and identity is None:
            raise ValueError(
                "a cache that is kept for later runs needs version= here: stoker cannot check that "
                f"{describes} is still the same then. Give version=, and change it whenever data "
                "or functions change; or give keep=False"
            )
        if identity is None:
            _warn_of_ranks(describes)
        self._chain = digest(identity or secrets.token_hex(16))
        self.in_memory = path is None
        if path is None:
            name = re.sub(r"[^\w.-]+", "-", describes).strip("-")[-40:]
            self.folder = os.path.join(location.memory_folder(), f"{name}-{self._chain.hex()[:12]}")
        else:
            self.folder = location.local_folder(path)
        self.describes = describes
        self.examples = examples
        self._user = secrets.randbits(62) + 1, secrets.randbits(62) + 1
        self._has_compared_size = False
        self._was_opened = False
        self._begin()

    def _begin(self) -> None:
        self._handle: Handle | None = None
        self._numbered: NumberedKeys | None = None
        self._places: tuple[Handle | None, ItemPlaces | None] = None, None
        self._has_no_room = False
        self._begin_locks()

    def _begin_locks(self) -> None:
        self._random_check = RandomCheck()

    def __getstate__(self) -> dict[str, Any]:
        per_process = ("_handle", "_numbered", "_places", "_has_no_room", "_random_check")
        return {name: value for name, value in vars(self).items() if name not in per_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def open(self) -> bool:
        """Open the store, or make it. Called before workers start; True the first time.

        Raises CacheError if no store can be made.
        """
        self.find(())
        is_first, self._was_opened = not self._was_opened, True
        return is_first

    def key(self, fingerprint: Fingerprint, place: int | str) -> bytes:
        """Return an item's key. ``place`` is its index or name in the source."""
        return item_key(self._chain, fingerprint)

    def keys_of(self, indices: NDArray[np.int64]) -> list[bytes]:
        """Return the keys of examples that only their numbers identify."""
        if self._numbered is None:
            self._numbered = NumberedKeys(self.examples)
        return self._numbered.of(indices, self.key)

    def find(
        self, keys: Sequence[bytes], sizes: Sequence[int] | None = None, *, lends: bool = False
    ) -> list[Any]:
        """Return the items, which the caller owns; ``MISSING`` for each one that the store lacks.

        Args:
            keys: the items' keys.
            sizes: the bytes of their files, -1 for an item without a file; None if no item has one.
            lends: whether arrays may be read-only views of the store.
        """
        values, saved_bytes = self._look_up(keys, sizes, lends=lends)
        misses = sum(value is MISSING for value in values)
        self.count(hits=len(keys) - misses, misses=misses, saved_bytes=saved_bytes)
        return values

    def find_whole(self, keys: Sequence[bytes], sizes: Sequence[int], *, lends: bool) -> list[Any]:
        """Return items as ``find`` does; nothing, and nothing counted, if one is missing."""
        values, saved_bytes = self._look_up(keys, sizes, lends=lends)
        if any(value is MISSING for value in values):
            return []
        self.count(hits=len(keys), saved_bytes=saved_bytes)
        return values

    def find_numbered(
        self, numbers: NDArray[np.int64], *, lends: bool = False, whole: bool = False
    ) -> list[Any]:
        """Return items as ``find`` does, of examples that only their numbers identify.

        With ``whole``, return and count nothing if one is missing.
        """
        handle = self._open_handle()
        if handle is None or self.is_shared_by_nodes:
            return [] if whole else self.find(self.keys_of(numbers), lends=lends)
        places = self._places_in(handle)
        read = functools.partial(self._decode, handle, lends=lends)
        values, saved_bytes, unknown = places.find(numbers, read, lends=lends)
        if unknown:
            rest = numbers[unknown]
            looked_up, more_bytes = self._look_up(
                self.keys_of(rest), None, lends=lends, numbers=rest.tolist()
            )
            for at, value in zip(unknown, looked_up, strict=True):
                values[at] = value
            saved_bytes += more_bytes
        misses = [*map(type, values)].count(Missing)
        if whole and misses:
            return []
        handle.store.counters.add(
            self._user, hits=len(values) - misses, misses=misses, saved_bytes=saved_bytes
        )
        return values

    def find_one(self, number: int) -> Any:
        """Return an array or bytes that this process has read before; None for anything else.

        The caller owns the item. A miss is not counted.
        """
        handle = self._open_handle()
        if handle is None or self.is_shared_by_nodes:
            return None
        found = self._places_in(handle).find_one(number)
        if found is None:
            return None
        handle.store.counters.add(self._user, hits=1, saved_bytes=found[1])
        return found[0]

    def _places_in(self, handle: Handle) -> ItemPlaces:
        """Return the places of items in this store; a new process, or user, begins with none."""
        known_in, places = self._places
        if places is None or known_in is not handle:
            places = ItemPlaces(handle.store.map, self.examples, handle.store.ask_for)
            self._places = handle, places
        return places

    def _look_up(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int] | None,
        *,
        lends: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> tuple[list[Any], int]:
        """Return items as ``find`` does, and the bytes that were not read from storage.

        With ``numbers``, which are those of the examples, their places are remembered.
        """
        handle = self._open_handle()
        if handle is None:
            return [MISSING] * len(keys), 0
        store = handle.store
        places = None if numbers is None else self._places_in(handle)
        lengths: list[int] = []  # of the found records

        def read(record: memoryview) -> Any:
            value = self._decode(handle, record)
            if value is not MISSING:
                lengths.append(len(record))
            return value

        def read_at(record: memoryview, start: int, at: int) -> Any:
            size = len(record)
            value = self._decode(handle, store.map[start : start + size], lends=lends)
            if value is not MISSING:
                lengths.append(size)
                if places is not None and numbers is not None:
                    places.add(numbers[at], start, size, value)
            return value

        values = store.get_many(
            keys,
            read,
            functools.partial(self._note_damage, handle),
            read_at if lends or places is not None else None,
        )
        if sizes is None:
            return values, sum(lengths)
        hit_sizes = [
            size for size, value in zip(sizes, values, strict=True) if value is not MISSING
        ]
        each = zip(hit_sizes, lengths, strict=True)
        return values, sum(size if size >= 0 else length for size, length in each)

    def _decode(self, handle: Handle, record: memoryview, *, lends: bool = False) -> Any:
        """Return the value of a record; ``MISSING`` if it cannot be decoded here."""
        try:
            return decode(record, lends=lends)
        except UnknownType:
            return MISSING
        except Damaged as error:
            self._note_damage(handle, f"a record that cannot be read ({error})")
            return MISSING

    def _note_damage(self, handle: Handle, what: str) -> None:
        handle.record_damage(what, self._user)

    def batch_lookups(self) -> Any:
        """Return an object that looks items up at other nodes ahead of use; None on one host."""
        return None

    def read_ahead(self, numbers: NDArray[np.int64]) -> None:
        """Have items read from the disk, without waiting, that this process has read before.

        The order of an epoch is known (NoPFS: Dryden et al., SC 2021): these come soon.
        """
        handle = None if self.in_memory else self._open_handle()
        if handle is not None:
            self._places_in(handle).read_ahead(numbers)

    def count(self, **counts: int) -> None:
        """Add to fields of ``CacheCounts``, if there is a store."""
        handle = self._open_handle()
        if handle is not None and any(counts.values()):
            handle.store.counters.add(self._user, **counts)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        handle = self._open_handle()
        return [False] * len(keys) if handle is None else handle.store.holds(keys)

    @property
    def takes(self) -> bool:
        """True if there is a store with room for more items."""
        handle = self._open_handle()
        if handle is None:
            return False
        return not handle.store.is_full and not handle.store.counters.head[DAMAGED]

    def check_repeats(self, what: str, value: Any, read_again: Callable[[], Any]) -> None:
        """Check, before the first item enters the store, that items are not random.

        One item is checked, for all processes that got this cache from this one.

        Raises ValueError if its value changes, TypeError for values that cannot be stored.
        """
        if self._random_check.has_passed:
            return
        handle = self._open_handle()
        if handle is None:
            return
        counters = handle.store.counters
        if counters.is_checked(self._user):
            self._random_check.has_passed = True
        else:
            self._random_check.run(what, value, read_again)
            counters.record_check(self._user)

    def offer(self, key: bytes, value: Any) -> None:
        """Offer an item; if there is room, another thread writes it later.

        Args:
            key: the item's key.
            value: the item.

        Raises TypeError for values that cannot be stored.
        """
        record = encode(value)
        size = sum(map(len, record))
        if self._enter(StoredItem(key, record, size, self._user, self._chain)):
            # The writer corrects the count if the item does not fit.
            self.count(admitted=1, admitted_bytes=size)
        else:
            self.count(refused=1, refused_bytes=size)

    def _enter(self, item: StoredItem) -> bool:
        """Queue an item to be stored; False if the queue is full."""
        handle = self._open_handle()
        return handle is not None and handle.writer.offer(item)

    def flush(self, timeout_s: float = _FLUSH_S) -> bool:
        """Wait until this process's offered items are written; False after the timeout."""
        handle = self._handle
        return handle is None or not handle.is_alive or handle.writer.flush(timeout_s)

    def counts(self) -> CacheCounts:
        """Return the counts so far, over all processes that got this cache from this one."""
        handle = self._handle
        if handle is None or not handle.is_alive:
            return CacheCounts()
        return handle.store.counters.of(self._user)

    def stats(self, since: CacheCounts | None = None) -> CacheStats:
        """Return the counts after ``since``, and the state of the store."""
        counts = self.counts() - (since or CacheCounts())
        handle = self._handle
        if handle is None or not handle.is_alive:
            return CacheStats(**vars(counts))
        head = handle.store.counters.head
        own_items, own_bytes = handle.store.totals_of(self._chain)
        return CacheStats(
            **vars(counts),
            folder=self.folder,
            items=int(head[ITEMS]),
            payload_bytes=int(head[PAYLOAD_BYTES]),
            used_bytes=int(head[USED_BYTES]),
            limit_bytes=handle.store.limit_bytes,
            full=handle.store.is_full,
            own_items=own_items,
            own_bytes=own_bytes,
        )

    def _open_handle(self) -> Handle | None:
        handle = self._handle
        if handle is not None and handle.is_alive:
            return handle
        if self._has_no_room:
            return None
        with HANDLES.lock:
            if self._handle is None or not self._handle.is_alive:
                self._begin_locks()  # new ones: after a fork, the old ones may be held
                self._handle = HANDLES.get(self.folder, self._join_or_make)
                self._has_no_room = self._handle is None
                if self._handle is not None:
                    finalize(self, HANDLES.release, self._handle)
                    if not self.temporary and not self.is_shared_by_nodes:  # else the server says
                        self._handle.store_dir.keep()
                    self._warn_if_size_differs(self._handle.store.limit_bytes)
            return self._handle

    def _warn_if_size_differs(self, actual_bytes: int) -> None:
        """Warn once if an existing store has another size than the requested one."""
        requested, has_compared = self.limit, self._has_compared_size
        self._has_compared_size = True
        if has_compared or not isinstance(requested, int):
            return
        if abs(requested - actual_bytes) >= location.LEAST_BYTES:
            warn(
                f"the cache in {self.folder} was made with {format_bytes(actual_bytes)}, and keeps "
                f"that size. For {format_bytes(requested)}, remove it first (stoker cache remove "
                f"{self.folder})",
                CacheWarning,
            )

    @property
    def _limit_to_make(self) -> Limit:
        return self.limit

    def _join_or_make(self) -> store_dir.StoreDir | None:
        """Join or make the store's folder; None if there is no room for a store."""
        found, is_new = inventory.join_or_make(
            self.folder, self._limit_to_make, describes=self.describes, temporary=self.temporary
        )
        if found is None:
            warn(
                f"{os.path.dirname(self.folder)} has no room for a cache: the run continues "
                "without it",
                CacheWarning,
            )
        self._has_compared_size |= is_new
        return found


def _warn_of_ranks(describes: str) -> None:
    """Say under torchrun, in the first rank of a host, that its ranks do not share a cache."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1 and os.environ.get("LOCAL_RANK") == "0":
        warn(
            f"each of the {ranks} ranks of this host keeps a cache of {describes} of its own: "
            "nothing says that their examples are the same. Give version= for one that all share",
            CacheWarning,
        )
