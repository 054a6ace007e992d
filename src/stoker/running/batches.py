"""Hands a loader's batches over with other settings, and with the draws of its own.

PyTorch draws a seed for the workers from the loader's generator at each ``iter()``, and none where
workers persist; then the sampler draws. Both happen here when they would with the script's own
settings: without workers, the sampler starts at the first ``next()``. The loader itself is not
changed: iterators get a view of it.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from stoker.analysis.probe.state import digest_state
from stoker.analysis.probe.step_parts import count_passes
from stoker.basics.signals import again_soon, raise_interrupt
from stoker.engine.work.held_generators import find_generators
from stoker.errors import CacheError
from stoker.running.comparison import DEAD_WORKER, BatchComparison, IndicesBehind, fill
from stoker.running.examples.kept_examples import KeptExamples
from stoker.running.loaders import (
    LoaderChoice,
    LoaderSettings,
    LoaderView,
    acts_at_end,
    start_workers,
)
from stoker.running.order import BatchOrder
from stoker.running.outcome import SpeedTurns

# Batches that are compared with the untouched loader's. Each costs what it costs without a change.
_COMPARED = 50
# Stores that stay open when their loaders are gone: of training, validation and a few others. Where
# each epoch has another dataset, its stores must not add up. Chosen, not measured.
_STORES = 4


class ChangedLoader:
    """A loader with other settings.

    Attributes:
        choice: its settings.
        turns: those with and without the change, and the settings of the next epoch.
        say: called with a sentence if something is undone.
        to_compare: how many of the next batches are compared with the untouched loader's.
        stores: those of examples, by identity, open also when this loader is gone: one that is
            built anew for each epoch finds its examples again.
    """

    def __init__(
        self,
        module: Any,
        torch: Any,
        choice: LoaderChoice,
        say: Any,
        *,
        compares: bool = False,
        stores: dict[str, KeptExamples] | None = None,
        turns: SpeedTurns | None = None,
    ) -> None:
        """``turns``: those of loaders before, in whose place this one is built."""
        self.module = module
        self.torch = torch
        self.choice = choice
        self.say = say
        self.turns = SpeedTurns(choice, say) if turns is None else turns
        self.to_compare = _COMPARED if compares and choice.same and choice.twice else 0
        self._compares_hits = bool(self.to_compare and choice.new.cache_bytes)
        self.stores: dict[str, KeptExamples] = {} if stores is None else stores
        self._examples: KeptExamples | None = None
        self._cached: tuple[Any, str] = None, ""  # the dataset, and its state
        # Neither PyTorch's workers that persist nor these see what the script changes later.
        self._is_fixed = choice.own.persistent and choice.own.workers > 0
        self._kept: Any = None  # PyTorch's iterator, whose workers persist
        self._kept_order = BatchOrder(())
        self._last: weakref.ref[RunBatches] | None = None
        self._digests = "", ""
        self._has_drawn = False

    @property
    def settings(self) -> LoaderSettings:
        """The settings of now."""
        return self.turns.settings

    def iterate(self, loader: Any) -> RunBatches:
        """Return an iterator of an epoch, as ``iter(loader)`` does."""
        own = self.choice.own
        self.turns.begun += 1
        if self.settings.cache_bytes:
            self._check_cache(loader)
        draws = not (own.persistent and own.workers and self._has_drawn)
        self._has_drawn = True
        seeds = self.torch.Generator()
        if draws:
            script = self.torch.default_generator if loader.generator is None else loader.generator
            seeds.set_state(script.get_state())
            # As PyTorch draws the base seed of the workers.
            self.torch.empty((), dtype=self.torch.int64).random_(generator=loader.generator)
        last = None if self._last is None else self._last()
        # Two iterators of one loader at a time: workers cannot serve both.
        is_free = last is None or last.is_over
        batches = RunBatches(self, loader, seeds, keeps=self.settings.persistent and is_free)
        if own.workers:
            batches.start()
        self._last = weakref.ref(batches)
        return batches

    def _check_cache(self, loader: Any) -> None:
        """Make the cache, or leave it out if the dataset is not what it was."""
        dataset, state = loader.dataset, digest_state(loader.dataset)
        if self._examples is None:
            try:
                self._examples = self._keep(dataset, state)
                self._cached = dataset, state
                return
            except (CacheError, OSError) as error:
                problem = f"there can be no cache ({error})"
        elif self._is_fixed or (dataset is self._cached[0] and state == self._cached[1]):
            if self._compares_hits:  # the first epoch has filled the cache
                self._compares_hits, self.to_compare = False, _COMPARED
            return
        else:
            problem = "its dataset has changed"
        self.turns.settings = msgspec.structs.replace(self.choice.new, cache_bytes=0)
        self.end_kept()
        self.say(f"{problem}: its examples are read in each epoch from here on")

    def _keep(self, dataset: Any, state: str) -> KeptExamples:
        """Return a dataset behind its store. Raises CacheError, OSError."""
        # With the state, as another loader may be built in this place over other data.
        identity = f"{self.choice.identity} {state}"
        before = self.stores.pop(identity, None)
        if before is None:
            found = KeptExamples(dataset, self.settings.cache_bytes, identity)
        else:
            found = before.around(dataset)
        self.stores[identity] = found  # the last one
        while len(self.stores) > _STORES:
            del self.stores[next(iter(self.stores))]
        return found

    def open(self, loader: Any, order: BatchOrder, seeds: Any, *, keeps: bool) -> Any:
        """Return PyTorch's iterator with the settings of now, over an order of batches."""
        if not keeps:
            return self.make(loader, order, self.settings, seeds, persistent=False)
        kept, before = self._kept, self._digests
        self._digests = digest_state(loader.dataset), digest_state(loader.collate_fn)
        if kept is not None and (self._is_fixed or self._digests == before):
            self._kept_order.follow(order)
            kept._reset(LoaderView(loader))
            return kept
        # What the script changed between epochs reaches new workers only.
        self.end_kept()
        self._kept_order = BatchOrder(())
        self._kept_order.follow(order)
        self._kept = self.make(loader, self._kept_order, self.settings, seeds, persistent=True)
        return self._kept

    def make(
        self,
        loader: Any,
        order: Any,
        settings: LoaderSettings,
        seeds: Any,
        *,
        persistent: bool,
        **replaced: Any,
    ) -> Any:
        """Return a new iterator of PyTorch's. ``seeds``: a generator for the workers' base seed."""
        generator = self.torch.Generator()  # the script's own has been drawn from
        generator.set_state(seeds.get_state())
        changed = replaced | {
            "num_workers": settings.workers,
            "prefetch_factor": settings.prefetch,
            "persistent_workers": persistent and settings.workers > 0,
            "generator": generator,
            "_index_sampler": order,
        }
        if settings.cache_bytes:
            changed["dataset"] = self._examples
        if settings.workers and not self.choice.same:
            changed["worker_init_fn"] = functools.partial(
                _draw_apart, loader.worker_init_fn, loader.collate_fn
            )
        if settings.workers == 0:
            changed["timeout"] = 0  # PyTorch refuses another one
            return self.module._SingleProcessDataLoaderIter(LoaderView(loader, changed))
        if self.choice.own.workers == 0:
            # Named, as the first use of the default would choose it for the whole script.
            changed["multiprocessing_context"] = multiprocessing.get_context("fork")
        with warnings.catch_warnings():
            if self.choice.own.workers == 0:
                # From Python 3.12 on, for processes with threads; the script asked for no workers.
                warnings.simplefilter("ignore", DeprecationWarning)
            return start_workers(self.module, LoaderView(loader, changed))

    def make_untouched(self, loader: Any, order: Any, seeds: Any) -> Any:
        """Return a new iterator with the script's own settings, for comparison.

        Without workers, one stands for the script's process, unless that reads already.
        """
        own = self.choice.own
        if own.workers or self.settings.workers == 0:
            # Beside a second loader it may take longer than the script allows.
            return self.make(loader, order, own, seeds, persistent=False, timeout=0)
        alone, hide = LoaderSettings(1, 2, False), functools.partial(_hide_worker, self.torch)
        return self.make(loader, order, alone, seeds, persistent=False, worker_init_fn=hide)

    def check_dataset(self, loader: Any) -> None:
        """Undo the change if the script has changed the dataset during the epoch that has ended."""
        if self.choice.own.workers:
            return  # new workers will see it
        before = self._cached[1] if self.settings.cache_bytes else self._digests[0]
        is_watched = self.settings.cache_bytes or self._kept is not None
        if is_watched and digest_state(loader.dataset) != before:
            self.undo("its dataset was changed during the epoch, which workers do not see")

    def undo(self, why: str) -> None:
        """Use the script's own settings from now on."""
        self.end_kept()
        self.turns.settings = self.choice.own
        self.to_compare = 0
        self.say(f"{why}; from here on it is loaded as the script says")

    def end_kept(self) -> None:
        """End workers that persist."""
        if self._kept is not None:
            self._kept._shutdown_workers()
            self._kept = None


def _draw_apart(init: Callable[[int], None] | None, collate: Any, number: int) -> None:
    """Seed the generators that a worker's dataset and collate function hold.

    Its fork has those of the others.
    """
    info = sys.modules["torch"].utils.data.get_worker_info()
    for at, generator in enumerate(find_generators([info.dataset, collate])):
        words = np.random.SeedSequence([info.seed, at]).generate_state(1, np.uint64)
        generator.seed(int(words[0] >> np.uint64(1)))
    if init is not None:
        init(number)


def _hide_worker(torch: Any, number: int) -> None:
    """Have ``get_worker_info()`` answer as in the script's own process."""
    torch.utils.data._utils.worker._worker_info = None


class RunBatches:
    """An iterator of one epoch.

    Attributes:
        is_over: True if it has ended, or failed.
    """

    def __init__(self, changed: ChangedLoader, loader: Any, seeds: Any, *, keeps: bool) -> None:
        self._changed, self._loader, self._seeds, self._keeps = changed, loader, seeds, keeps
        self._inner: Any = None
        self._comparison: BatchComparison | None = None
        self._order: BatchOrder | None = None
        self._stretches: _Stretches | None = None
        self._passes = -1  # backward passes when the first batch came
        self.is_over = False

    def start(self) -> None:
        """Draw the order of the epoch, and start the workers on it."""
        changed, sampler = self._changed, self._loader._index_sampler
        self._order = BatchOrder(sampler, changed.choice.own.lead, holds=acts_at_end(sampler))
        if changed.to_compare:
            self._order.copies = deque()
        try:
            self._inner = changed.open(self._loader, self._order, self._seeds, keeps=self._keeps)
        except (OSError, RuntimeError) as error:
            raise_interrupt(error)
            if not changed.choice.twice:
                raise
            problem = f"workers cannot be started ({error})"
        else:
            self._order.keep_up()  # now, as PyTorch draws the seed of the workers first
            if changed.to_compare:
                self._start_comparison(self._order)
            return
        self._fall_back(problem)

    def __iter__(self) -> RunBatches:
        return self

    def __len__(self) -> int:
        return len(self._loader._index_sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "is_over" not in vars(self):  # an interrupt left it unmade
            raise AttributeError(name)
        if self._inner is None:
            self.start()
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        if self.is_over:
            raise StopIteration
        if self._inner is None:
            self.start()
        try:
            self._take_turns()
            batch = self._take()
            if self._comparison is not None:
                batch = self._compare(self._comparison, batch)
        except StopIteration:
            if self._comparison is not None:
                self._end_comparison("")
            # First, as the end may choose other settings for the next epoch.
            self._changed.check_dataset(self._loader)
            self.end()
            raise
        except Exception:
            assert self._order is not None
            self._order.pass_batch()  # the loop may go on with the next one
            self._close_comparison()
            raise
        assert self._order is not None
        self._order.pass_batch()
        if self._passes < 0:
            self._passes = count_passes()
        return batch

    def _take_turns(self) -> None:
        """Go on with the turns, and use the iterator whose turn it is."""
        changed, order = self._changed, self._order
        assert order is not None
        turns, trains = changed.turns, 0 <= self._passes < count_passes()
        turns.trains = turns.trains or trains
        if self._stretches is None:
            # An evaluation on the loader that trains does not count, nor an epoch that fills.
            is_one = turns.trains == trains and changed.settings == changed.choice.new
            is_filled = not changed.settings.cache_bytes or turns.begun > 1
            if turns.is_over or changed.to_compare or not is_one or not is_filled:
                return
            stretches = _Stretches(changed, self._loader, order, self._inner, self._seeds)
            turns.shorten(stretches.room)
            if not stretches.fits(turns.waits_for_own):
                return
            self._stretches = stretches
        self._inner = self._stretches.choose()

    def _start_comparison(self, order: BatchOrder) -> None:
        assert order.copies is not None
        try:
            indices = IndicesBehind(order.copies)
            batches = self._changed.make_untouched(self._loader, indices, self._seeds)
        except (OSError, RuntimeError) as error:
            raise_interrupt(error)
            order.copies = None
            self._end_comparison(f"processes for it cannot be started ({error})")
        else:
            self._comparison = BatchComparison(batches)

    def _compare(self, comparison: BatchComparison, batch: Any) -> Any:
        """Return the batch, or the script's own where they differ."""
        changed, why = self._changed, comparison.find_difference(batch)
        if comparison.problem:
            self._end_comparison(comparison.problem)
        elif not why:
            changed.to_compare -= 1
            assert self._order is not None
            if changed.to_compare <= 0 or self._order.is_at_last:  # a loop may not ask for the end
                self._end_comparison("")
        else:
            self._fall_back(f"batch {comparison.compared + 1} differs: {why}")
            return next(self._inner)
        return batch

    def _end_comparison(self, problem: str) -> None:
        """Compare no more batches, and say what was found."""
        compared = 0 if self._comparison is None else self._comparison.compared
        count = f"{compared} batch{'es' * (compared != 1)}"
        found = f"{count} compared with the script's own, bit for bit: the same"
        changed, threads = self._changed, self._changed.torch.get_num_threads()
        if changed.choice.own.workers == 0 and changed.settings.workers and threads > 1:
            # Nor could the comparison use more: after a fork, they may hang.
            found += (
                f", both by one thread of torch; the script's own process has {threads}, so a sum "
                "that torch makes in the dataset may differ in its last digits"
            )
        self._changed.say(f"{found}; no more could be: {problem}" if problem else found)
        self._changed.to_compare = 0
        self._close_comparison()

    def _close_comparison(self) -> None:
        if self._comparison is not None:
            assert self._order is not None
            self._order.copies = None
            self._comparison.close()
            self._comparison = None

    def _take(self) -> Any:
        assert self._order is not None
        if self._inner._num_workers and self._order.has_starved():
            self._inner._try_put_index()
        try:
            return next(self._inner)
        except StopIteration:
            if not self._order.has_more():
                raise
            problem = "its sampler gave more batches than it said"
        except Exception as error:
            raise_interrupt(error)
            if not self._must_read_here(error):
                raise
            # Without a name for the error: the script's own one is raised again below, alone.
            who = "a worker" if self._changed.settings.workers else "reading with a cache"
            problem = f"{who} failed ({type(error).__name__})"
        self._fall_back(problem)
        return next(self._inner)

    def _must_read_here(self, error: Exception) -> bool:
        changed = self._changed
        if changed.settings == changed.choice.own or not changed.choice.twice:
            return False
        if self._stretches is not None and self._stretches.is_own(self._inner):
            return False
        # A script without workers gets its own error, in its own process, and others a worker's.
        alone = changed.choice.own.workers == 0 or changed.settings.workers == 0
        return alone or str(error).startswith(DEAD_WORKER)

    def _fall_back(self, problem: str) -> None:
        """Read the rest of the epoch as the script says."""
        assert self._order is not None
        changed = self._changed
        self._close_comparison()
        self._close_stretches()
        changed.undo(problem)
        _shut_down(self._inner)
        self._inner = None
        self._order = self._order.rest()
        self._inner = changed.make(
            self._loader, self._order, changed.settings, self._seeds, persistent=False
        )

    def _close_stretches(self) -> None:
        if self._stretches is not None:
            self._stretches.close()
            self._stretches = None

    def end(self) -> None:
        """End what stands beside the loader's own iterator; a loop may leave it before its end."""
        self._close_comparison()
        self._close_stretches()
        self.is_over = True

    def __del__(self) -> None:
        try:
            self.end()
        except AttributeError:
            pass  # an interrupt left it unmade
        except KeyboardInterrupt:
            again_soon()


class _Stretches:
    """The turns of an epoch: the changed loader's iterator, and one as the script says.

    Both read one order. Before they change places, the one whose turn is over hands over what its
    workers were given. The first batches of a stretch, which were prepared ahead, do not count.
    """

    def __init__(
        self, changed: ChangedLoader, loader: Any, order: BatchOrder, inner: Any, seeds: Any
    ) -> None:
        self._changed, self._loader, self._order, self._seeds = changed, loader, order, seeds
        self._with = self._now = inner
        self._own: Any = None
        self._number = 0  # batches of this stretch so far
        self._began_s = 0.0
        self._rests = False  # there is no other turn in this epoch

    def is_own(self, iterator: Any) -> bool:
        """True for the iterator with the script's own settings."""
        return iterator is self._own

    @property
    def room(self) -> int:
        """The longest stretch of either kind that the rest of the epoch has room for."""
        return self._order.left - 2 * max(self._ahead(own) for own in (False, True)) - 2

    def fits(self, own: bool) -> bool:
        """True if enough batches of the epoch are left for a stretch."""
        return self._order.left > 2 * self._ahead(own) + self._changed.turns.batches + 1

    def _ahead(self, own: bool) -> int:
        choice = self._changed.choice
        return (choice.own if own else choice.new).lead

    def choose(self) -> Any:
        """Return the iterator of the next batch."""
        order, turns, own = self._order, self._changed.turns, self._now is self._own
        if self._rests:
            return self._now
        first = self._ahead(own) + 1
        if self._number == 0 and turns.waits_for_own:  # an epoch before has ended there
            order.reader = order
        elif self._number == first:
            self._began_s = time.perf_counter()
        elif self._number == first + turns.batches:
            turns.add(time.perf_counter() - self._began_s, own=own)
            order.reader = order  # no iterator: what was given is handed over first
        self._number += 1
        if order.reader is order and order.has_given_none:
            self._change_places(not own)
        return self._now

    def _change_places(self, own: bool) -> None:
        changed, turns, order = self._changed, self._changed.turns, self._order
        self._number = 1
        if turns.settings == changed.choice.own:  # the change did not pay
            self._rests, own = True, True
            changed.end_kept()
            _shut_down(self._with)
        elif turns.is_over or not self.fits(own):
            self._rests, own = True, False
        order.reader = None
        if own and self._own is None:
            settings = changed.choice.own
            try:
                self._own = changed.make(
                    self._loader, order, settings, self._seeds, persistent=False, timeout=0
                )
            except (OSError, RuntimeError) as error:  # its workers cannot be started
                raise_interrupt(error)
                self._rests, own = True, False
        self._now = self._own if own else self._with
        order.reader = self._now._sampler_iter
        fill(self._now)

    def close(self) -> None:
        """End the workers of the script's own settings."""
        _shut_down(self._own)


def _shut_down(batches: Any) -> None:
    """End the workers of PyTorch's iterator, if it has any."""
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()
