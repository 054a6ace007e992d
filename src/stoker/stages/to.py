"""Batches on a device: as torch tensors, or as JAX arrays, copied one batch ahead of their use.

JAX copies in the background, and keeps the host's arrays alive for as long as it reads them. JAX is
never imported here: a user who names a place of JAX has imported it.

Only ``Mover`` knows torch's devices, and only ``JaxMover`` JAX's. Of torch's devices, only CUDA has
a side stream and pinned staging memory; to others a batch is copied at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree, resources
from stoker.basics.buffers import allocate_aligned
from stoker.basics.signals import pass_on
from stoker.engine.items import DoneTask, DrivenStream, Item, PulledStream, WouldBlock, with_value
from stoker.engine.setup import PaddingMask, StreamContext
from stoker.engine.work.step import Failure, WorkAddress
from stoker.engine.workers.threads import WorkerPool
from stoker.errors import CombinationError, StageError
from stoker.stages.stage import ChainStage, ChainView, StreamStage, Traits, refuse_behind

_NUMERIC = "biufc"
# NumPy's word for dtypes of other packages, as bfloat16 is.
_REGISTERED = 2
# The most memory of batches that a pipeline pins, since nobody else can use it then: seven batches
# of 256 images of 224 x 224 as float32, 27 as bytes.
_MAX_PINNED_BYTES = 1 << 30


def is_jax_place(place: Any) -> bool:
    """True if this is a ``jax.Device`` or a ``jax.sharding.Sharding``."""
    jax: Any = sys.modules.get("jax")
    return jax is not None and isinstance(place, (jax.Device, jax.sharding.Sharding))


def name_of(place: Any) -> str:
    """Return the name of a device, or the number of devices of a sharding."""
    devices = getattr(place, "device_set", None)
    return str(place) if devices is None else f"{type(place).__name__} of {len(devices)} devices"


class JaxMover:
    """Moves batches to a place of JAX. Used by the consumer's thread alone.

    On a device each array becomes one of JAX's. Under a sharding a batch is this process's part of
    a global one, as ``jax.make_array_from_process_local_data`` has it.
    """

    def __init__(self, place: Any, name: str) -> None:
        import jax

        self._jax: Any = jax
        self._place = place
        self._is_sharded = isinstance(place, jax.sharding.Sharding)
        self.name = name

    def usable_bytes(self) -> int:
        """Return the free memory of the fullest device; the host's if devices do not tell."""
        devices: Iterable[Any] = [self._place]
        if self._is_sharded:
            devices = self._place.addressable_devices
        message = [stats for stats in (device.memory_stats() for device in devices) if stats]
        free = [t["bytes_limit"] - t["bytes_in_use"] for t in message if "bytes_limit" in t]
        return int(min(free)) if free else resources.usable_memory_bytes()

    def start(self, batch: Any) -> Callable[[], Any]:
        """Begin to move a batch; the returned function gives it. JAX waits when it is used."""
        moved = pytree.map_leaves(self._move, batch)
        return lambda: moved

    def close(self) -> None:
        """Do nothing: JAX keeps what it reads."""

    def _move(self, leaf: Any) -> Any:
        if pytree.is_tensor(leaf):
            leaf = leaf.detach().cpu().numpy()
        if not _is_a_jax_type(leaf):
            return leaf
        if isinstance(leaf, np.ndarray):
            leaf = pytree.native(leaf)
        if not self._is_sharded:
            return self._jax.device_put(leaf, self._place)
        if pytree.is_jax_array(leaf):
            leaf = np.asarray(leaf)
        return self._jax.make_array_from_process_local_data(self._place, leaf)


def _is_a_jax_type(leaf: Any) -> bool:
    if pytree.is_jax_array(leaf):
        return True
    return isinstance(leaf, np.ndarray) and (
        leaf.dtype.kind in _NUMERIC or leaf.dtype.isbuiltin == _REGISTERED
    )


@dataclass(frozen=True)
class To(StreamStage):
    """The stages ``.to_torch()`` and ``.to_jax()``.

    The consumer's thread drives its stream, and all behind it.

    Attributes:
        device: the name of a device of torch; or a ``jax.Device`` or ``jax.sharding.Sharding``.
        out: tensors there, in a batch's structure, that each batch is copied into; or None.
    """

    device: Any
    out: Any = field(default=None, compare=False, repr=False)
    traits = Traits(moves=True)
    kind = None
    is_decided = False

    @staticmethod
    def of_torch(device: Any, out: Any) -> To:
        """Check the arguments of ``.to_torch()``."""
        name = _torch_device(device)
        if out is not None:
            import torch

            place = torch.device(name)
            for path, leaf in zip(pytree.leaf_names(out), pytree.leaves(out), strict=True):
                if not isinstance(leaf, torch.Tensor):
                    raise TypeError(
                        f".to_torch(out=...) takes tensors, in the structure of a batch, not "
                        f"{type(leaf).__name__} at {path!r}"
                    )
                if leaf.device.type != place.type or place.index not in (None, leaf.device.index):
                    raise ValueError(
                        f".to_torch({name!r}, out=...): the tensor at {path!r} is on {leaf.device}"
                    )
        return To(name, out)

    @staticmethod
    def of_jax(place: Any) -> To:
        """Check the argument of ``.to_jax()``."""
        if not is_jax_place(place):
            raise TypeError(
                ".to_jax() takes a jax.Device or a jax.sharding.Sharding, such as "
                "jax.devices()[0], "
                f"not {place!r}"
            )
        return To(place)

    @property
    def call(self) -> str:
        return f"to_{'jax' if is_jax_place(self.device) else 'torch'}({name_of(self.device)})"

    @property
    def allocate(self) -> Callable[[int], memoryview]:
        place = self.device
        is_cuda = isinstance(place, str) and place.startswith("cuda")
        return PinnedMemory(place).allocate if is_cuda else allocate_aligned

    def mover(self) -> Mover | JaxMover:
        """Return the mover for this device."""
        if is_jax_place(self.device):
            return JaxMover(self.device, self.name)
        return Mover(self.device, self.out)

    def followed_by(self, stage: ChainStage) -> To:
        """Refuse a stage behind tensors that the next batch overwrites."""
        if self.out is not None:
            raise CombinationError(
                f"{stage.name} cannot follow .to_torch(out=...), which writes the next batch over "
                "these tensors: put it last"
            )
        return self

    def bind(self, before: ChainView) -> To:
        """Check that batches come here, from the host."""
        refuse_behind(self.name, before, lambda t: t.moves, "move once")
        if not before.is_batched:
            raise CombinationError(f".{self.name} moves batches: put .batch(n) before it")
        return self

    def stream(self, upstream: PulledStream, context: StreamContext) -> DeviceStream:
        return DeviceStream(
            upstream, self.mover(), context.address, context.worker_pool, context.mask
        )

    def signature(self) -> None:
        return None


def _torch_device(device: Any) -> str:
    """Return a device's name after checking it.

    Raises:
        ImportError: torch is missing.
        TypeError: this is no device.
        RuntimeError: torch knows no such device.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(".to_torch() needs PyTorch: pip install torch") from error
    if not isinstance(device, (str, int, torch.device)) or isinstance(device, bool):
        raise TypeError(
            f".to_torch() takes a device, such as 'cuda' or 'cpu', not {device!r}: change the "
            f"dtype "
            "in a map"
        )
    try:
        return str(torch.device(device))
    except RuntimeError as error:
        raise RuntimeError(
            f".to_torch() takes a device of torch, such as 'cuda' (any GPU of NVIDIA or AMD), "
            f"'mps' or "
            f"'cpu', not {device!r}"
        ) from error


class PinnedMemory:
    """Allocates page-locked memory, which a GPU reads while the processor goes on.

    Batches are made there, so that the training loop's thread does not copy them on the host before
    the GPU does.

    Args:
        device: the name of the device of CUDA that reads it.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._blocks: weakref.WeakValueDictionary[int, _PinnedBlock] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def allocate(self, size: int) -> memoryview:
        """Return new memory, usual memory if no more can be pinned. Any thread may ask."""
        import torch

        with self._lock, contextlib.suppress(RuntimeError):  # of the device, which has none left
            held = sum(block.nbytes for block in self._blocks.values())
            if held + size <= _MAX_PINNED_BYTES:
                with torch.cuda.device(self._device):
                    tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                memory: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
                block = _PinnedBlock((size,), np.uint8, memory)
                block.tensor = tensor
                self._blocks[id(block)] = block
                return block.data
        return allocate_aligned(size)


class _PinnedBlock(np.ndarray[Any, Any]):
    """Memory of a tensor. It is a subclass so that NumPy does not take it for the base of views."""

    tensor: Any


class Mover:
    """Moves batches to one device. Used by the consumer's thread alone.

    On the CPU, NumPy arrays become tensors that share their memory, and nothing is copied.
    Elsewhere each batch is copied on a side stream, which the consumer's stream waits for only when
    the batch is handed over; what does not lie in pinned memory is first written there.

    With ``out``, a batch is copied into these tensors when it is handed over, on the device and in
    the consumer's stream: behind all that reads the one before it.
    """

    # Staging buffers: one being copied from, one being filled. More would pin memory and hide
    # nothing.
    STAGES = 2

    def __init__(self, device: str, out: Any = None) -> None:
        import torch

        self._torch = torch
        self._out = out
        self._device = torch.device(device)
        self.name = To(device).name
        self._side: Any = None
        # The last batches: when each is copied, its staging memory, and the batch itself, whose
        # memory is read until then.
        self._staging: deque[tuple[Any, dict[int, Any], Any]] = deque()
        try:
            torch.empty(0, device=self._device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            why = str(error).partition("\n")[0].partition(". ")[0]
            raise RuntimeError(
                f".{self.name} finds no such device: {why}. This torch is {torch.__version__}; "
                ".to_torch() gives tensors without one"
            ) from error
        if self._device.type == "cuda":
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def usable_bytes(self) -> int:
        return resources.usable_device_bytes(self._device)

    def start(self, batch: Any) -> Callable[[], Any]:
        """Begin to move a batch; the returned function waits for it and gives it."""
        finish = self._start(batch)
        return finish if self._out is None else lambda: self._write(finish())

    def _start(self, batch: Any) -> Callable[[], Any]:
        if self._side is None:
            moved = pytree.map_leaves(self._directly, batch)
            return lambda: moved
        torch = self._torch
        buffers: dict[int, Any] = {}
        if len(self._staging) >= self.STAGES:
            done, buffers, _ = self._staging.popleft()
            done.synchronize()
        with torch.cuda.stream(self._side):
            number = iter(range(1 << 30))
            moved = pytree.map_leaves(lambda leaf: self._stage(leaf, buffers, next(number)), batch)
            copied = torch.cuda.Event()
            copied.record(self._side)
        self._staging.append((copied, buffers, batch))

        def finish() -> Any:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for leaf in pytree.leaves(moved):
                if pytree.is_tensor(leaf) and leaf.is_cuda and not pytree.is_sparse(leaf):
                    leaf.record_stream(current)
            return pytree.map_leaves(self._sparse, moved)

        return finish

    def _write(self, moved: Any) -> Any:
        names, tensors = pytree.leaf_names(self._out), pytree.leaves(self._out)
        parts = pytree.leaves_like(self._out, moved)
        for name, tensor, part in zip(names, tensors, parts, strict=True):
            found, wanted = (
                f"{tuple(each.shape)} of {each.dtype}" if pytree.is_tensor(each) else repr(each)
                for each in (part, tensor)
            )
            if found != wanted:
                raise ValueError(
                    f"at {name!r} the batch has {found}, and out= {wanted}"
                    " (.batch(n, drop_last=True) makes no short batch)"
                )
            tensor.copy_(part)
        return self._out

    def close(self) -> None:
        """Wait until the device has read all memory of batches, and let go of it."""
        for copied, *_ in self._staging:
            copied.synchronize()
        self._staging.clear()

    def _directly(self, leaf: Any) -> Any:
        if _is_numeric(leaf):
            leaf = self._torch.from_numpy(_writable(leaf))
        return leaf.to(self._device) if pytree.is_tensor(leaf) else leaf

    def _sparse(self, leaf: Any) -> Any:
        """Move a sparse tensor, which no staging buffer holds, when it is handed over."""
        is_sparse = pytree.is_tensor(leaf) and pytree.is_sparse(leaf)
        return leaf.to(self._device) if is_sparse else leaf

    def _stage(self, leaf: Any, buffers: dict[int, Any], number: int) -> Any:
        torch = self._torch
        array = _writable(leaf) if _is_numeric(leaf) else None
        if array is not None:
            leaf = torch.from_numpy(array)
        if not pytree.is_tensor(leaf) or leaf.device == self._device or pytree.is_sparse(leaf):
            return leaf
        if leaf.device.type == "cpu" and not leaf.is_pinned():
            buffer = buffers.get(number)
            if buffer is None or buffer.numel() < leaf.numel() or buffer.dtype != leaf.dtype:
                buffer = torch.empty(leaf.numel(), dtype=leaf.dtype, pin_memory=True)
                buffers[number] = buffer
            pinned = buffer[: leaf.numel()].view(leaf.shape)
            # torch copies in its OpenMP threads, as many as cores, which then spin and take the
            # cores from workers (bench/gpu.py).
            if array is None:
                pinned.copy_(leaf)
            else:
                np.copyto(pinned.numpy(), array)
            leaf = pinned
        return leaf.to(self._device, non_blocking=True)


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that torch takes: no tensor is read-only.

    Bytes are put into this machine's order. A feed's views are read-only, on memory that is this
    process's to write to. Other read-only arrays are copied.
    """
    array = pytree.native(array)
    if array.flags.writeable:
        return array
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if isinstance(root.base, mmap.mmap) and not isinstance(root, np.memmap):
        view = array.view()
        with contextlib.suppress(ValueError):
            view.flags.writeable = True
            return view
    return array.copy()


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"


class DeviceStream(DrivenStream):
    """Batches on a device. The next one is copied while one is used."""

    blocking = True

    def __init__(
        self,
        upstream: PulledStream,
        mover: Mover | JaxMover,
        address: WorkAddress,
        worker_pool: WorkerPool,
        mask: PaddingMask | None = None,
    ) -> None:
        super().__init__()
        self.upstream: PulledStream = upstream
        self._mask = mask
        self._mover = mover
        self._address = address
        self._worker_pool = worker_pool
        self._under_way: deque[tuple[Item, Any]] = deque()
        self._next: Item | None = None
        self._over = False
        self._error: Exception | None = None
        self.total = upstream.total

    @property
    def fresh(self) -> int:
        return self.upstream.fresh

    def poll(self, count: int) -> tuple[int, bool]:
        """Return the batches on their way to the device (0 or 1), and whether none is left."""
        if self._next_item is None and not self._under_way:
            self._begin_early()
        ready = self._next_item is not None or bool(self._under_way) or self._error is not None
        return int(ready), self._over and not ready

    def wait_for(self, count: int) -> None:
        """Wait until a batch is on its way to the device, or none is left."""
        if self._next_item is None and not self._under_way and self._error is None:
            self._begin(wait=True)

    @property
    def is_full(self) -> bool:
        """True if there is no room for more on the host."""
        return self.upstream.is_full

    def ready_since(self) -> tuple[int, int | None]:
        """Return the number of waiting batches, on the host too, and since when it is full."""
        ready, since = self.upstream.ready_since()
        return ready + len(self._under_way), since

    def _take(self, may_block: bool) -> Item | None:
        """Take the next batch on the device, and begin to move the one after it.

        The consumer alone asks, and may always wait.
        """
        if not self._under_way and not self._begin(wait=True):
            return None
        item, move = self._under_way.popleft()
        self._begin_early()
        value = move if type(move) is Failure else self._try(move, item)
        return with_value(item, DoneTask([value]))

    def usable_bytes(self) -> int:
        return self._mover.usable_bytes()

    def recompute(self, number: int) -> Item:
        item = self.upstream.recompute(number)
        self._worker_pool.wait(item.task)
        value = item.task.values[item.row]
        if type(value) is not Failure:
            value = self._try(lambda: self._mover.start(value)(), item)
        return with_value(item, DoneTask([value]))

    def _begin_early(self) -> None:
        """Start to move the next batch if the host has it. Its error is raised at its turn."""
        if self._error is None:
            try:
                self._begin(wait=False)
            except Exception as error:
                pass_on(error)
                self._error = error

    def _begin(self, *, wait: bool) -> bool:
        """Start to move the next batch; without ``wait`` only if the host has it ready."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._next is None:
            try:
                self._next = self.upstream.pull(may_block=wait)
            except WouldBlock:
                return False
            self._over = self._next is None
        item = self._next
        if item is None or not (wait or item.task.done):
            return False
        self._worker_pool.wait(item.task)
        self._next = None
        value, item.task.values[item.row] = item.task.values[item.row], None
        if type(value) is not Failure:
            value = self._try(lambda: self._mover.start(self._mark(value, item)), item)
        self._under_way.append((item, value))
        return True

    def _mark(self, value: Any, item: Item) -> Any:
        return (
            value
            if self._mask is None
            else self._mask.added(value, self._number(item), item.fresh - item.rows, item.fresh)
        )

    def _try(self, move: Callable[[], Any], item: Item) -> Any:
        try:
            return move()
        except StageError as error:
            return Failure(error)
        except Exception as error:
            pass_on(error)
            return Failure(StageError(self._mover.name, error, batch=self._number(item)))

    def _number(self, item: Item) -> int:
        return self._address.batch_number(item.place)

    def clear(self) -> None:
        self._mover.close()
        self._under_way.clear()
        self._next = self._next_item = None
