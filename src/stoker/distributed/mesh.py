"""This process's shard in a torch ``DeviceMesh``, from the names of its dimensions.

Some dimensions split the data; along the others ranks work on the same batch. The names that
Accelerate, torchtitan and Lightning give dimensions decide which is which. Nothing here imports
torch.
"""

from __future__ import annotations

import gc
import math
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

_DATA = "dp|ddp|fsdp|hsdp|data.*|replicate.*|shard.*|batch.*"
_MODEL = "tp|pp|cp|sp|tensor.*|pipe.*|context.*|seq.*|model.*"


class MeshPart(NamedTuple):
    """A process's shard, and the ranks that it works with.

    Attributes:
        rank, world: the shard's number and the number of shards; ranks that work on one batch have
            the same shard.
        among: the numbers in the process group of all ranks of the mesh.
    """

    rank: int
    world: int
    among: tuple[int, ...]


def is_mesh(given: Any) -> bool:
    """True if this is a ``DeviceMesh``."""
    module: Any = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(given, module.DeviceMesh)


def shard_of(mesh: Any, dims: str | Sequence[str] | None) -> MeshPart:
    """Return this process's shard.

    Args:
        mesh: a ``DeviceMesh``.
        dims: the names of the dimensions that split the data; None: decided by all names.

    Raises ValueError if the names do not decide, if further dimensions of the whole mesh split the
    data, or if this process is not in the mesh.
    """
    names = tuple(mesh.mesh_dim_names or ())
    if not names:
        raise ValueError(
            ".shard(mesh=mesh): the dimensions of this mesh have no names: give it some, such as "
            "init_device_mesh(..., mesh_dim_names=('dp', 'tp')), or give rank= and world_size="
        )
    chosen = _choose_dims(names, dims)
    at = mesh.get_coordinate()
    if at is None:
        raise ValueError(".shard(mesh=mesh): this process is not in the mesh")
    shape = tuple(mesh.mesh.shape)
    rank, world = 0, 1
    for name, size, coordinate in zip(names, shape, at, strict=True):
        if name in chosen:
            rank, world = rank * size + coordinate, world * size
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    if dims is None and root is not mesh:
        whole = tuple(root.mesh_dim_names or ())
        of_data = _choose_dims(whole, None)
        parts = math.prod(
            n for name, n in zip(whole, root.mesh.shape, strict=True) if name in of_data
        )
        if parts != world:
            raise ValueError(
                f".shard(mesh=mesh): the data is split by {of_data} of {whole}, but this is only "
                f"its "
                f"part {names}: give the whole mesh"
            )
    return MeshPart(rank, world, tuple(int(number) for number in root.mesh.flatten().tolist()))


def unsplit_dimension() -> str | None:
    """Return a mesh dimension of this process along which data must not be split, or None.

    Torch keeps no list of meshes, so this searches the garbage collector's objects: 0.1 s for a
    million.
    """
    module: Any = sys.modules.get("torch.distributed.device_mesh")
    if module is None:
        return None
    world = sys.modules["torch.distributed"].get_world_size()
    for mesh in [each for each in gc.get_objects() if type(each) is module.DeviceMesh]:
        for name, size in zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False):
            of_data, of_model = _words(name)
            # Of a joint dimension, such as "dp_cp", the whole mesh has the parts.
            is_odd = not of_data and not of_model and size < world
            if size > 1 and (is_odd or (of_model and not of_data)):
                return str(name)
    return None


def _choose_dims(names: tuple[str, ...], dims: str | Sequence[str] | None) -> tuple[str, ...]:
    if dims is not None:
        chosen = (dims,) if isinstance(dims, str) else tuple(dims)
        unknown = [name for name in chosen if name not in names]
        if unknown:
            raise ValueError(f".shard(mesh=mesh, mesh_dims=): {unknown[0]!r} is none of {names}")
        return chosen
    kinds = {name: _words(name) for name in names}
    if any(of_data == of_model for of_data, of_model in kinds.values()):
        raise ValueError(
            f".shard(mesh=mesh): which of {names} split the data? Say so: "
            f"mesh_dims=({names[0]!r},), "
            "or rank= and world_size="
        )
    return tuple(name for name, (of_data, _) in kinds.items() if of_data)


def _words(name: str) -> tuple[bool, bool]:
    """True if a dimension's name contains words for data, and words for models."""
    words = [word.rstrip("0123456789") for word in re.split(r"[^a-z0-9]+", name.lower())]
    of_data = any(re.fullmatch(_DATA, word) for word in words)
    return of_data, any(re.fullmatch(_MODEL, word) for word in words)
