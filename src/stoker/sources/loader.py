"""The source over a user's loader: ready batches, in the loader's own order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from stoker.distributed.unsharded import warn_unsharded_loader
from stoker.errors import StateError
from stoker.sources.iterable import Passes, Standing
from stoker.sources.origin import ChainOfSource, Origin, SourcePlan


class LoaderSource(Origin):
    """Any re-iterable of ready batches, with the user's settings, one epoch at a time.

    Attributes:
        loader: the user's loader.
        before: its own state before the present pass, None where it is unknown.
    """

    yields_batches = True

    def __init__(self, loader: Any) -> None:
        self._passes = Passes(loader, "from_loader", "batches")
        self._standing = Standing(loader, self._passes.open)
        self.loader = loader
        self.before: Any = None
        self._has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")

    @property
    def name(self) -> str:
        return self._passes.name

    @property
    def takes_state(self) -> bool:
        """True if it seems to have its own state; only taking one shows it for certain."""
        return self._has_state

    @property
    def is_counted(self) -> bool:
        """True if its length is reliable: an ``IterableDataset`` may report a wrong one.

        (torch also warns of that later, if it was asked for the length.)
        """
        torch_data: Any = sys.modules.get("torch.utils.data")
        streams = () if torch_data is None else torch_data.IterableDataset
        counted = hasattr(self.loader, "__len__")
        return counted and not isinstance(getattr(self.loader, "dataset", None), streams)

    def count(self) -> int:
        """Return the loader's number of batches; the loader may raise any error."""
        return len(self.loader)

    def open(self) -> Iterator[Any]:
        """Begin a pass. Resets an iterator that has ``reset`` and does not reset itself."""
        if self._has_state:
            self._standing.put_back()
            self.before = self._standing.before()
        iterator = self._passes.open()
        return _Resetting(iterator) if iterator is self.loader else iterator

    def state(self) -> Any:
        """Return the loader's own state; None if it has none, whatever methods it has.

        (accelerate's wrapper has them around a plain ``DataLoader`` too, and they raise
        AttributeError there.)
        """
        if self._has_state:
            try:
                return self.loader.state_dict()
            except AttributeError:
                self._has_state = False
        return None

    def state_between(self, *, left: bool) -> Any:
        return None if left else self.state()

    def leave(self, place: dict[str, Any] | None, *, is_ahead: bool) -> None:
        """Record that the consumer left a pass, of which more may have been read."""
        self._standing.leave(place, is_ahead=is_ahead)

    def end(self) -> None:
        """Take note that a pass came to its end."""
        self._standing.end()

    def load(self, state: Any) -> None:
        self._standing.end()
        self.loader.load_state_dict(state)

    def check_state(self, chain: ChainOfSource) -> None:
        if not self._has_state and chain.flows:
            raise StateError(
                "a pass over a loader has no state in its middle, because its batches cannot be "
                "made again: save after the last batch of an epoch, use torchdata's "
                "StatefulDataLoader, or build on from_dataset(loader.dataset)"
            )
        if not self._has_state:
            raise StateError(
                "an epoch over a loader has no state in its middle, because its batches cannot be "
                "made again: save between epochs, use torchdata's StatefulDataLoader, or build on "
                "from_dataset(loader.dataset)"
            )
        if chain.has_fixed_echo:
            raise StateError(
                "in the middle of a pass over a loader, the pool of a fixed factor cannot be made "
                f"again: {'leave .repeat() out and ' if chain.flows else ''}save between epochs, "
                'or take .echo("auto"), whose pool may begin empty'
            )

    def attribute(self, name: str) -> Any:
        return super().attribute(name) if name == "class_names" else getattr(self.loader, name)

    def extent(self, *, is_followed: bool) -> str:
        where = "a thread of its own" if is_followed else "the consumer's thread"
        return f"read in {where}, as its owner set it up"

    def lower(self, to: SourcePlan) -> None:
        to.take_batches(self)

    def warn_unsharded(self, *, is_sharded: bool) -> None:
        """Warn if there are several ranks and the loader is not sharded."""
        warn_unsharded_loader(self.loader)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)
            return
        within = getattr(self.loader, "batch_sampler", None)
        samplers = getattr(self.loader, "sampler", None), getattr(within, "sampler", None)
        for sampler in {id(each): each for each in samplers}.values():
            tell = getattr(sampler, "set_epoch", None)  # DistributedSampler's
            if tell is not None:
                tell(epoch)


class _Resetting(Iterator[Any]):
    """An epoch of an iterator that starts over when it is reset (DALI's)."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            # DALI's iterators; those that reset themselves would skip an epoch.
            if getattr(self._iterator, "_auto_reset", "no") != "yes":
                self._iterator.reset()
            raise
