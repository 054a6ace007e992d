"""Sharding: the part of an epoch that this process gets, and padding for evaluation.

What it changes is which rows are whose (``PaddedSharding``); this says where it may stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.basics.validate import is_whole_number
from stoker.basics.warn import warn
from stoker.distributed import mesh as meshes
from stoker.distributed.launchers import find_launcher
from stoker.engine.checkpoint import PoolSize
from stoker.engine.skip import RAISE
from stoker.errors import CombinationError, StateError
from stoker.frameworks.queries import framework_mesh
from stoker.frameworks.rank import own_rank, process_group
from stoker.schedule.selection import Cut, Selection
from stoker.stages.stage import ChainStage, ChainView, Traits, first_with, refuse_behind

REMAINDERS = ("drop", "uneven", "pad", "pad_full")


@dataclass(frozen=True)
class Padding:
    """The arguments ``remainder="pad"`` or ``"pad_full"``, and ``mask``, of ``.shard()``.

    Attributes:
        fills: whether the last batch is padded to its full size.
        mask: the field of batches that tells what is padding, None for none.
    """

    fills: bool
    mask: str | None

    @property
    def to(self) -> str:
        """Return the part of it that decides which rows there are."""
        return "full" if self.fills else "equal"

    def __str__(self) -> str:
        mask = "" if self.mask is None else f", mask={self.mask!r}"
        return f"remainder={'pad_full' if self.fills else 'pad'!r}{mask}"

    def check_before(self, before: ChainView) -> None:
        """Raise ValueError where what comes has no order that all ranks know, or another one."""
        source = before.source
        if not source.is_indexed:
            raise CombinationError(
                f".shard({self}) deals examples by their numbers, and a stream has none: "
                ".shard(remainder='uneven') keeps all of them"
            )
        if source.has_own_order:
            raise CombinationError(
                f".shard({self}) is for evaluation, and an epoch of a mixture does not have each "
                "example once: evaluate its parts one after another"
            )
        if first_with(before.stages, lambda t: t.shuffles) is not None:
            raise CombinationError(
                f".shard({self}) is for evaluation, in the order of the data: leave .shuffle() out"
            )

    def check_behind(self, chain: ChainView) -> None:
        """Raise ValueError where something behind it leaves examples out, or repeats them."""
        at = next(i for i, stage in enumerate(chain.stages) if stage.traits.shards)
        behind = chain.stages[at + 1 :]
        stage = first_with(behind, lambda t: t.selects)
        if stage is not None:
            instead = "leave it out of evaluation"
            if not stage.traits.shuffles:
                instead = f"put .{stage.name} before .shard(), to evaluate fewer"
            raise CombinationError(f".shard({self}) deals the examples in their order: {instead}")
        stage = first_with(behind, lambda t: t.filters or t.skips or t.repeats or t.joins)
        if stage is not None:
            raise CombinationError(
                f".shard({self}) hands out every example once, and .{stage.name} after it does "
                "not: leave it out of evaluation, or use .shard(remainder='uneven')"
            )
        if chain.budget != RAISE:
            raise CombinationError(
                f".shard({self}) hands out every example once, and max_errors={chain.budget} may "
                "leave some out: remove max_errors=, or use .shard(remainder='uneven')"
            )
        if chain.flows or chain.steps is not None:
            call = ".repeat()" if chain.flows else f".steps({chain.steps})"
            raise CombinationError(
                f".shard({self}) hands out every example once in an epoch: remove {call} "
                "(.take(n) before .shard() evaluates fewer)"
            )
        if chain.drops_last and not self.fills:
            raise CombinationError(
                f".shard({self}) hands out every example once, and drop_last=True leaves the last "
                "ones out: remove it, or use remainder='pad_full', which fills the last batch"
            )
        if self.mask is not None and not chain.is_batched:
            raise CombinationError(
                f".shard({self}): the mask is a field of batches: add .batch(n), or read "
                "pipeline.last.valid"
            )


@dataclass(frozen=True)
class Shard(ChainStage):
    """The stage ``.shard()``.

    Attributes:
        rank, world, uneven: its arguments.
        assumed: whether this is taken for the only process because nothing tells of others.
        among: the numbers in the process group of the ranks that share an epoch, and compare
            their pipelines; none where rank and world were given, or there is no group.
        padding: how parts are padded, if they are.
        balance: by which sizes global batches are dealt, if they are; ``costs``: those of the
            source's examples.
    """

    rank: int
    world: int
    uneven: bool
    assumed: bool = False
    among: tuple[int, ...] = ()
    padding: Padding | None = None
    traits = Traits(selects=True, shards=True, keeps_fields=True)

    @staticmethod
    def of(
        rank: Any,
        world_size: Any,
        mesh: Any,
        mesh_dims: str | Sequence[str] | None,
        remainder: Any,
        mask: Any,
    ) -> Shard:
        """Check the arguments of ``.shard()``; without them torch, JAX and Ray Train are asked.

        Where none of them tells, nor a launcher's environment, this is the only process.

        Raises ValueError or TypeError for what is no rank.
        """
        if (rank is None) != (world_size is None):
            raise CombinationError(".shard() needs rank= and world_size= together, or neither")
        if rank is not None and mesh is not None:
            raise CombinationError(".shard() takes rank= and world_size=, or a mesh")
        if mesh_dims is not None and mesh is None:
            raise CombinationError(".shard(): mesh_dims= needs a mesh: give mesh= first")
        if remainder not in REMAINDERS:
            names = ", ".join(map(repr, REMAINDERS))
            raise ValueError(f".shard() takes remainder= as one of {names}, not {remainder!r}")
        if mask is not None and (not isinstance(mask, str) or not mask):
            raise TypeError(f".shard() takes mask= as a field's name, not {mask!r}")
        is_padded = remainder in ("pad", "pad_full")
        if mask is not None and not is_padded:
            raise CombinationError(f".shard(mask={mask!r}) marks padding: add remainder='pad'")
        assumed, among = False, tuple[int, ...]()
        if rank is None:
            rank, world_size, among = _found(mesh, mesh_dims)
            assumed = not among and world_size == 1
        for name, value in (("rank", rank), ("world_size", world_size)):
            if not is_whole_number(value):
                raise TypeError(f".shard() takes {name}= as a whole number, not {value!r}")
        if not 0 <= rank < world_size:
            raise ValueError(
                f".shard(): a rank lies between 0 and world_size - 1; {rank=}, {world_size=}"
            )
        padding = Padding(remainder == "pad_full", mask) if is_padded else None
        uneven = remainder == "uneven"
        return Shard(int(rank), int(world_size), uneven, assumed, among, padding)

    @property
    def call(self) -> str:
        how = ", remainder='uneven'" * self.uneven
        how += "" if self.padding is None else f", {self.padding}"
        return f"shard(rank={self.rank}, world_size={self.world}{how})"

    def bind(self, before: ChainView) -> Shard:
        """Check that it stands where numbers alone say what is whose."""
        if before.source.yields_batches:
            raise CombinationError(
                "a loader is sharded by its sampler (DistributedSampler): set it there"
            )
        refuse_behind(
            "shard()",
            before,
            lambda t: t.shards or not (t.selects or t.inside or t.caches),
            "put it right after the source, .shuffle() or .cache()",
        )
        if before.source.has_own_order and self.uneven:
            raise CombinationError(
                "all ranks get equal shares of each part of a mixture: leave remainder= out"
            )
        if self.padding is not None:
            self.padding.check_before(before)
        return self

    def begin(self, chain: ChainView) -> None:
        """Raise ValueError where the process group is not that of the call, or where ranks would
        take unequal numbers of steps; warn where equal parts are empty."""
        group = own_rank()
        if self.padding is not None:
            self.padding.check_behind(chain)
        elif self.world > 1 and chain.steps is None:
            self._check_steps(chain)
        if self.padding is None and not self.uneven and chain.source.is_indexed:
            count = chain.source.count()
            if 0 < count < self.world:
                warn(
                    f"{count} examples are fewer than {self.world} ranks: equal parts of "
                    "them are empty (.shard(remainder='uneven') keeps them)",
                )
        if (
            self.among
            and group is not None
            and (group[0] not in self.among or max(self.among) >= group[1])
        ):
            raise ValueError(
                f".shard() was called in another process group, and this is now rank {group[0]} of "
                f"{group[1]}: build the pipeline after init_process_group"
            )
        if self.assumed and group is not None and group[1] > 1:
            raise ValueError(
                f".shard() was called before init_process_group, so each of {group[1]} ranks would "
                "get all examples: build the pipeline after it, or give rank= and world_size="
            )

    def _check_steps(self, chain: ChainView) -> None:
        """Raise ValueError where ranks would take unequal numbers of steps."""
        if chain.follows_clock and (self.uneven or process_group() is None):
            raise CombinationError(
                '.echo("auto") on several ranks needs equal parts and a process group to agree '
                "in: call .shard() after init_process_group, or use .steps(n), or a fixed factor"
            )
        joins = first_with(chain.stages, lambda t: t.joins)
        decides = joins or first_with(chain.stages, lambda t: t.filters)
        ranks_agree = chain.follows_clock and decides is None
        if self.uneven or not chain.leaves_out_by_value or ranks_agree:
            return
        if joins is not None:
            raise CombinationError(
                ".shard() gives every rank equally many steps, but the number of packed "
                "sequences differs between ranks: end epochs with .steps(n)"
            )
        raise CombinationError(
            ".shard() gives every rank equally many steps, but filters, scans and "
            "max_errors= may leave them unequal: leave examples out before sharding "
            "(from_dataset of a list of the good ones), end epochs with .steps(n), or use "
            ".shard(remainder='uneven') and torch's Join"
        )

    def check_leg(self, chain: ChainView) -> None:
        """Refuse what is the rank's own: its cuts, its order, its end."""
        selection = chain.selection
        assert selection.share is not None
        is_dealt_anew = selection.share.anew
        if selection.last != Cut() or (not is_dealt_anew and selection.between != Cut()):
            raise StateError(
                ".take() and .skip() behind .shard() count each rank's examples: put them before it"
            )
        if self.uneven:
            raise StateError("remainder='uneven' gives ranks parts that do not end together")
        if selection.is_shuffled and not is_dealt_anew:
            raise StateError(
                "each rank shuffles a fixed part of its own: put .shuffle() before .shard()"
            )

    def of_ranks(self, rank: int, world: int, batches: Any, examples: int) -> Shard:
        return replace(self, rank=rank, world=world, among=())

    def apart(self) -> Shard:
        return replace(self, among=())

    def select(self, selection: Selection) -> Selection:
        part = selection.shard(self.rank, self.world, uneven=self.uneven)
        return part if self.padding is None else part.pad(fills=self.padding.fills)

    @property
    def padding_mask(self) -> str | None:
        return None if self.padding is None else self.padding.mask

    def signature(self) -> str:
        """Return the number of ranks: those of equal length share a state."""
        if self.uneven:
            return self.call
        padding = "" if self.padding is None else f", pad={self.padding.to}"
        return f"shard(world_size={self.world}{padding})"

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        """Say how parts compare."""
        if self.assumed:
            return "  one process: there is no process group"
        if self.padding is not None:
            last = "up to a whole batch" if self.padding.fills else "up to equal rows"
            return f"  all examples; padded with the last one {last}"
        return "  all examples" if self.uneven else "  parts of equal length"


def _found(mesh: Any, dims: str | Sequence[str] | None) -> tuple[int, int, tuple[int, ...]]:
    """Return rank, world, and who shares an epoch, as a mesh, a group or a launcher tells."""
    if mesh is None and process_group() is not None:
        mesh = framework_mesh()
    if mesh is not None:
        if not meshes.is_mesh(mesh):
            raise TypeError(f".shard() takes mesh= as a torch DeviceMesh, not {mesh!r}")
        return meshes.shard_of(mesh, dims)
    group = own_rank()
    if group is None:
        there = find_launcher()
        if there is None:
            return 0, 1, ()
        raise ValueError(
            f".shard() found no process group, but {there.variable}={there.world} in the "
            "environment: call torch.distributed.init_process_group first, or give "
            f"rank=int(os.environ[{there.rank!r}]) and world_size={there.world} (0 and 1 for "
            "independent processes)"
        )
    if process_group() is not None and (name := meshes.unsplit_dimension()) is not None:
        raise ValueError(
            f".shard(): there is a device mesh with the dimension {name!r}, along which ranks may "
            "work on the same batch: give the mesh, .shard(mesh=mesh), or rank= and world_size="
        )
    return (*group, tuple(range(group[1])))
