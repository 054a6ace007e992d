"""The frozen value behind a pipeline: its source, stages, seed and workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from numpy.typing import NDArray

from stoker.basics import resources
from stoker.basics.compact_integers import LARGEST
from stoker.basics.validate import is_whole_number
from stoker.engine.skip import RAISE, MaxErrors, budget_of
from stoker.engine.workers.make import Workers
from stoker.errors import CombinationError
from stoker.frameworks.rank import process_group
from stoker.schedule import rng
from stoker.schedule.batch_bounds import PlannedBounds
from stoker.schedule.echo_record import decode as read_record
from stoker.schedule.epoch_rest import EpochRest
from stoker.sources.origin import IndexedSource, SourceBase
from stoker.sources.over import NumberedSource
from stoker.stages.stage import ChainStage, ChainView, first_with, followed, not_known
from stoker.stats import Counts


class Applied(NamedTuple):
    """A user's stage in a chain."""

    stage: Any
    """A ``stoker.Stage``."""
    parts: range
    """The numbers of the chain's stages that it is made of."""


@dataclass(frozen=True)
class Chain(ChainView):
    """A pipeline without its position.

    ``is_seed_open``: whether rank 0's seed may still replace a drawn one, as nothing depends on it.
    ``applied``: the user's stages, each before the stages that contain it.
    """

    is_seed_open: bool = False
    applied: tuple[Applied, ...] = ()

    @classmethod
    def begin(cls, source: SourceBase, seed: Any, max_errors: MaxErrors = 0) -> Chain:
        """Return a chain without stages. Raises TypeError or ValueError for a wrong argument."""
        if seed is not None and not is_whole_number(seed):
            raise TypeError(f"seed must be a whole number or None, not {seed!r}")
        if seed is not None and seed < 0:
            raise ValueError(f"seed must not be negative, not {seed}")
        budget = budget_of(max_errors)
        if seed is None:
            return cls(source, rng.draw_seed(), True, budget, is_seed_open=True)
        return cls(source, int(seed), False, budget)

    def then(self, stage: ChainStage) -> Chain:
        """Return this with one more stage. Raises as ``ChainStage.bind`` does."""
        bound = replace(stage.bind(self), part_of=stage.part_of)
        return replace(self, stages=(*followed(self.stages, [bound]), bound))

    def with_inserted(self, stages: Mapping[int, Callable[[Chain], ChainStage]]) -> Chain:
        """Return this with further stages: each before the stage of a number, or at the end.

        Each is made for the chain before it. Raises as ``ChainStage.bind`` does.
        """
        chain, moved = replace(self, stages=(), applied=()), []
        for number in range(len(self.stages) + 1):
            if number in stages:
                chain = chain.then(stages[number](chain))
            moved.append(len(chain.stages))
            if number < len(self.stages):
                chain = chain.then(self.stages[number])
        applied = tuple(
            each._replace(parts=range(moved[each.parts.start], moved[each.parts.stop - 1] + 1))
            for each in self.applied
            if each.parts
        )
        return replace(chain, applied=applied)

    def apply(self, stage: Any, pipeline: Any) -> Chain:
        """Return this, the chain of ``pipeline``, with the stages that make up a user's stage."""
        stage.check(self)
        extended, before, name = stage.lower(pipeline), len(self.stages), stage.describe()
        chain: Any = getattr(extended, "chain", None)
        added = chain.stages[before:] if isinstance(chain, Chain) else ()
        kept = followed(self.stages, added)
        is_fit = isinstance(chain, Chain) and chain.stages[:before] == kept
        if not is_fit or replace(chain, stages=self.stages, applied=self.applied) != self:
            raise TypeError(
                f"lower() of {name} returned something else than the pipeline that it was given "
                f"with stages added ({type(extended).__name__}): return what its methods return, "
                "such as pipeline.map(fn)"
            )
        parts = [
            replace(each, part_of=f"{name}: {each.part_of}" if each.part_of else name)
            for each in added
        ]
        own = Applied(stage, range(before, before + len(parts)))
        return replace(self, stages=(*kept, *parts), applied=(*chain.applied, own))

    def lengths(self) -> NDArray[Any] | None:
        """Return the length of each example of the source, if it knows them and none is changed."""
        is_bare = all(stage.traits.selects for stage in self.stages)
        return self.indexed.lengths() if is_bare and self.indexed is not None else None

    def for_measuring(self) -> Chain:
        """Return this chain for ``.sizes()``: all examples of the source once, in its order."""
        if not self.source.is_indexed or self.source.has_own_order:
            what = "a stream has no numbers" if not self.source.is_indexed else "measure its parts"
            raise CombinationError(f".sizes() measures examples by their numbers: {what}")
        stage = first_with(
            self.stages,
            lambda t: t.filters or t.skips or t.is_random or t.changes or t.repeats or t.joins
            or t.scans or t.batches,
        )  # fmt: skip
        if stage is not None:
            raise CombinationError(f".sizes() cannot follow {stage.name}: call it before")
        stages = tuple(stage for stage in self.stages if not stage.traits.selects)
        return replace(self, stages=stages, budget=RAISE, steps=None, flows=False)

    def with_seed(self, seed: int) -> Chain:
        return replace(self, seed=seed, is_seed_open=False)

    def replaying(self, record: Any) -> Chain:
        """Return this with the decisions of a run, and with its seed unless the user gave one."""
        read = read_record(record, self.most_items())
        chain = self.with_seed(read.seed) if self.is_seed_drawn else self
        return replace(chain, record=read)

    def apart(self) -> Chain:
        """Return this without the comparison of ranks: other ranks do not iterate over it."""
        stages = tuple(stage.apart() for stage in self.stages)
        return replace(self, stages=stages, is_seed_open=False)

    def with_current_length(self) -> Chain:
        """Return this with its source's current length. Raises ValueError if that must stay."""
        source = self.source.with_current_length()
        if source is self.source:
            return self
        for stage in self.stages:
            stage.check_length(self.source, source)
        return self._over(source)

    def with_index(self, field: Any) -> Chain:
        """Return this with each example's number in a field. Raises TypeError or ValueError."""
        source = self.source
        if not isinstance(field, str) or not field:
            raise TypeError(f".with_index() takes the name of a field, not {field!r}")
        if not isinstance(source, IndexedSource):
            raise CombinationError(f".with_index(): the examples of {source.name} have no numbers")
        if isinstance(source, NumberedSource):
            raise CombinationError(f".with_index(): they are in the field {source.field!r} already")
        stage = next((stage for stage in self.stages if not stage.traits.selects), None)
        if stage is not None:
            raise CombinationError(
                f".with_index() cannot follow {stage.name}: put it right behind the source"
            )
        if field in (source.fields or ()):
            raise ValueError(f".with_index(): examples have a field {field!r}: give another name")
        return self._over(NumberedSource(source, field))

    def _over(self, source: SourceBase) -> Chain:
        """Return this over another source, to which its stages are bound anew."""
        chain = replace(self, source=source, stages=())
        for stage in self.stages:
            chain = chain.then(stage)
        return chain

    def with_steps(self, steps: Any) -> Chain:
        """Return this with epochs of at most ``steps`` outputs. Raises TypeError or ValueError."""
        if not is_whole_number(steps):
            raise TypeError(f".steps() takes a whole number of batches, not {steps!r}")
        if steps < 1:
            raise ValueError(f"an epoch has at least one step, not {steps}")
        if self.steps is not None:
            raise CombinationError(
                f".steps({steps}) cannot follow steps({self.steps}): an epoch ends once"
            )
        return replace(self, steps=int(steps))

    def repeat(self) -> Chain:
        """Return this with data epochs that follow each other beneath its epochs."""
        return replace(self, flows=True)

    def on_leg(self, leg: EpochRest | None) -> Chain:
        """Return this for the rest of an epoch that other ranks began; itself for a whole epoch."""
        if leg is None:
            return self
        if leg not in self._legs:
            self._legs.clear()
            stages = tuple(stage.on_leg(leg, self.rank_world[0]) for stage in self.stages)
            self._legs[leg] = replace(self, stages=stages, leg=leg)
        return self._legs[leg]

    @cached_property
    def _legs(self) -> dict[EpochRest, Chain]:
        """The chain of the last leg: the plan of its batches is made once."""
        return {}

    def of_ranks(self, rank: int, world: int, batches: int | list[int]) -> Chain:
        """Return this for another rank, number of ranks, and size of batches. Raises ValueError."""
        if (*self.rank_world, self.size_of_batches) == (rank, world, batches):
            return self
        examples = len(self.source) if isinstance(self.source, IndexedSource) else 0
        stages = tuple(stage.of_ranks(rank, world, batches, examples) for stage in self.stages)
        chain = replace(self, stages=stages)
        echo = self.flow.echo
        if echo is not None and not echo.holds_batches:
            echo.stage.check_holds(chain.batch_size)
        return chain

    @property
    def data_epoch_steps(self) -> int | None:
        """The most outputs of a data epoch; None without a limit."""
        if self.flows or self.steps is None:
            return None
        return self.steps - (0 if self.leg is None else self.leg.before.steps)

    @property
    def rank_world(self) -> tuple[int, int]:
        """This process's rank, and the number of ranks that share an epoch."""
        share = self.selection.share
        return (0, 1) if share is None else (share.rank, share.world)

    @property
    def shard(self) -> Any:
        return first_with(self.stages, lambda t: t.shards)

    @property
    def awaits_seed(self) -> bool:
        """Whether rank 0 decides the seed, so that it is unknown before ``iter()``."""
        return self.is_seed_open and bool(self.among)

    @property
    def among(self) -> tuple[int, ...]:
        """The numbers of the ranks that compare their pipelines; none where there are not two."""
        among = () if self.shard is None else self.shard.among
        return among if len(among) > 1 else ()

    @property
    def draws(self) -> bool:
        """Whether anything is drawn by the seed; a mixture counts, whose parts may be shuffled."""
        by_stage = (t.shuffles or t.is_random or t.repeats for t in (s.traits for s in self.stages))
        return self.source.has_own_order or self.plans_batches or any(by_stage)

    def check_skips(self) -> None:
        """Raise ValueError if no batches can be skipped, because what is left depends on time."""
        by = '.echo("auto")' if self.follows_clock else None
        if self.late is not None and self.record is None:
            by = f".{self.late.call}"
        if by is not None:
            raise ValueError(
                f"{by} cannot skip batches, because its remaining items depend on timing: load the "
                "state that state_dict() returned after them"
            )

    @property
    def size_of_batches(self) -> int | list[int]:
        """How large batches are, as a state says it: a number, or what their plan is made by."""
        size: int | list[int] = self.batch_size if self.batch is None else self.batch.size
        return size

    @property
    def late(self) -> ChainStage | None:
        """The stage behind which examples that are not ready come later, or None."""
        return first_with(self.stages, lambda t: t.late)

    @property
    def packs(self) -> bool:
        return any(stage.traits.joins for stage in self.stages)

    @property
    def ranks_differ(self) -> bool:
        """Whether each rank has a state of its own, as ranks may read unequally far."""
        share = self.selection.share
        if share is None or share.world == 1:
            return False
        unequal = self.leaves_out_by_value or (self.plans_batches and self.echo is not None)
        follows_alone = self.follows_clock and process_group() is None
        return share.uneven or unequal or follows_alone or self.late is not None

    def __str__(self) -> str:
        names = [self.source.name, *(stage.name for stage in self.stages)]
        return f"{'.'.join(names)} seed={self.seed}"

    @property
    def plans_batches(self) -> bool:
        """Whether batches, or packed sequences, are planned: epochs may differ in their number."""
        return self.orders.rule is not None

    def cuts(self, epoch: int) -> PlannedBounds | None:
        """Return the batches of this rank in an epoch, where they are planned.

        Raises TypeError before the seed is known, ValueError for an example larger than a batch.
        """
        if not self.plans_batches:
            return None
        if self.awaits_seed:
            raise TypeError(
                "the number of batches depends on the seed, which is rank 0's and not known before "
                "iter(): give seed="
            )
        if self.selection.calls_user and not self.orders.has_planned(self.seed, epoch):
            raise TypeError(
                "the number of batches depends on the order that a function says when an epoch "
                "begins, and is not known before"
            )
        return self.orders.cuts(self.seed, epoch)

    def counts(self, epoch: int, fresh: int, uses: int, outputs: int) -> Counts:
        """Return the counts over all ranks when this rank has handed out so much of an epoch."""
        world = self.rank_world[1]
        if not fresh or world == 1 or not self.plans_batches:
            return Counts(world * fresh, world * uses, outputs)
        of_all = self.orders.cuts(self.seed, epoch).of_all(fresh)
        are_uses = self.echo is None and not self.packs
        return Counts(of_all, of_all if are_uses else world * uses, outputs)

    def examples(self, epoch: int = 0) -> int:
        """Return this rank's fresh examples (of a loader, batches). Raises TypeError if unknown."""
        cuts = self.cuts(epoch)
        return self.source.examples(self.selection) if cuts is None else cuts.examples

    def most_examples(self) -> int:
        """Return the most fresh examples that this rank can have in an epoch."""
        if not self.plans_batches:
            return self.source.examples(self.selection)
        if self.packs:  # pieces of documents
            return LARGEST
        # All ranks together have no more.
        return self.source.examples(self.selection.of_all_ranks())

    def examples_in_batches(self, epoch: int) -> int:
        """Return ``examples()`` without those that ``drop_last`` drops if nothing is echoed."""
        examples, drops = self.examples(epoch), self.drops_last and not self.may_leave_out
        if self.plans_batches:
            return examples
        return examples - (examples % self.batch_size if drops else 0)

    def count(self, epoch: int) -> int:
        """Return the number of outputs of an epoch; it may vary only if batches are planned.

        Raises TypeError if it is unknown before the end; also errors of a foreign ``len()``.
        """
        if not self.flows:
            return self.count_of_data_epoch(epoch)
        if self.steps is None:
            raise TypeError(".repeat() has no end; .steps(n) ends an epoch after n batches")
        return self.steps

    def count_of_data_epoch(self, epoch: int, *, trusts_user: bool = True) -> int:
        """Return the number of outputs of a data epoch; raises as ``count`` does.

        ``trusts_user``: whether a user's stage may say how many items come out of it.
        """
        limit = self.data_epoch_steps
        try:
            count = self._all_steps(epoch, trusts_user=trusts_user)
        except TypeError:
            if limit is None:
                raise
            return limit
        return count if limit is None else min(count, limit)

    def count_without_echo(self) -> int:
        """Return the number of outputs that a data epoch would have without echoing."""
        limit = self.data_epoch_steps
        return self._all_steps(0, with_echo=False) if limit is None else limit

    def _all_steps(self, epoch: int, *, with_echo: bool = True, trusts_user: bool = True) -> int:
        count, at, cuts = self.examples(epoch), 0, self.cuts(epoch)
        if self.budget != RAISE:
            raise not_known()
        counts: dict[int, int] = {}  # the inputs of each stage
        while at < len(self.stages):
            counts[at] = count
            traits = self.stages[at].traits
            try:
                if cuts is not None and self.stages[at].batch_rule is not None:
                    count = cuts.batches
                elif not traits.selects and (with_echo or not traits.repeats):
                    count = self.stages[at].count(count)
            except TypeError:
                own = self._count_by_user(at, counts) if trusts_user else None
                if own is None:
                    raise
                count, at = own
            else:
                at += 1
        return count

    def _count_by_user(self, at: int, counts: Mapping[int, int]) -> tuple[int, int] | None:
        """Return the count by a user's stage, and the number of the stage after it; or None."""
        for own, parts in self.applied:
            count = own.count(counts[parts.start]) if at in parts else None
            if count is not None:
                return int(count), parts.stop
        return None

    def sure_count(self, epoch: int) -> int | None:
        """Return ``count_of_data_epoch(epoch)``; None if it is unknown or may differ."""
        if not self.source.is_counted:
            return self.data_epoch_steps
        try:
            return self.count_of_data_epoch(epoch, trusts_user=False)
        except Exception:  # a foreign loader's may raise anything
            return None

    def most_items(self) -> int | None:
        """Return the most items that come out in an epoch; None if unknown."""
        if not self.source.is_indexed:
            return None
        return self.most_examples() * (1 if self.echo is None else self.echo.max_factor)

    def check_start(self) -> None:
        """Let each stage prepare for an epoch. Raises ValueError or StateError if it cannot run."""
        if self.record is not None:
            self.record.check_fits(self.seed, self.signature())
        for stage in self.stages:
            stage.begin(self)
        self.source.warn_unsharded(is_sharded=self.shard is not None)

    def workers_here(self) -> Workers:
        return self.workers or Workers(resources.default_threads(), grows=True)
