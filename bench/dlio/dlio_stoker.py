"""stoker as a loader of DLIO, by DLIO's own way to name one (``reader.data_loader_classname``).

Examples are read by DLIO's readers, one for each thread or process, so that all loaders read and
prepare alike. Put this folder on ``PYTHONPATH``, and give DLIO::

    ++workload.reader.data_loader_classname=dlio_stoker.Threads
    ++workload.reader.data_loader_sampler=index

DLIO is at https://github.com/argonne-lcf/dlio_benchmark.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlio_benchmark.common.enumerations import DataLoaderType, DatasetType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from dlio_benchmark.reader.reader_factory import ReaderFactory
from dlio_benchmark.utils.config import ConfigArguments

import stoker


@stoker.thread_safe
class Samples:
    """This rank's samples, as DLIO's reader gives them; each thread has a reader of its own."""

    def __init__(self, loader: BaseDataLoader, indices: list[int]) -> None:
        self.kind, self.part = loader.format_type, loader.dataset_type
        self.epoch = loader.epoch_number
        self.indices = indices
        self._arguments = pickle.dumps(ConfigArguments.get_instance())
        self._here = threading.local()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        reader = getattr(self._here, "reader", None)
        if reader is None:
            reader = self._here.reader = ReaderFactory.get_reader(
                type=self.kind, dataset_type=self.part, thread_index=0, epoch_number=self.epoch
            )
        return reader.read_index(self.indices[index], 1)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_here"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        pickle.loads(self._arguments)  # sets DLIO's only instance, which readers ask
        self._here = threading.local()


class Threads(BaseDataLoader):  # type: ignore[misc]
    """Threads prepare."""

    kind = "thread"
    samples, seed = Samples, 0

    def __init__(self, format_type: Any, dataset_type: Any, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)
        self._batches: stoker.Pipeline[Any] | None = None

    def chain(self, samples: stoker.Pipeline[Any]) -> stoker.Pipeline[Any]:
        """Return the stages before the batch."""
        return samples

    def read(self) -> None:
        """Build the pipeline; called once before the first epoch."""
        is_train = self.dataset_type is DatasetType.TRAIN
        arguments = self._args
        found = arguments.train_global_index_map if is_train else arguments.val_global_index_map
        mine = self.samples(self, sorted(map(int, found)))
        samples = stoker.from_dataset(mine, seed=self.seed)
        chain = self.chain(samples.shuffle() if is_train else samples)
        keeps = self.kind == "process"  # as DLIO's own loader of torch does
        self._batches = chain.batch(self.batch_size, drop_last=True).workers(
            arguments.read_threads, kind=self.kind, persistent=keeps
        )

    def next(self) -> Iterator[Any]:
        """Yield the batches of an epoch."""
        assert self._batches is not None
        yield from self._batches
        self.epoch_number += 1

    def finalize(self) -> None:
        """Do nothing: DLIO calls it behind each epoch."""


class Processes(Threads):
    """Processes prepare."""

    kind = "process"


class Cached(Threads):
    """Threads prepare, and keep as much as fits into 1 GiB a rank."""

    def chain(self, samples: stoker.Pipeline[Any]) -> stoker.Pipeline[Any]:
        return samples.cache("1GiB", version="dlio")


class Echoed(Threads):
    """Threads prepare, and samples are used again while the accelerator would idle.

    DLIO counts uses as samples; ``fresh_RANK.json`` in its output folder has their fresh share.
    """

    def chain(self, samples: stoker.Pipeline[Any]) -> stoker.Pipeline[Any]:
        return samples.echo("auto")

    def next(self) -> Iterator[Any]:
        assert self._batches is not None
        try:
            yield from super().next()
        finally:
            factor = self._batches.stats().realised_factor
            file = Path(self._args.output_folder) / f"fresh_{self._args.my_rank}.json"
            file.write_text(json.dumps(1 / factor))
