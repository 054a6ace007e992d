"""What examples/recipes/parquet.py has from its pipelines, from a DataLoader over pyarrow."""

import numpy as np
import pyarrow.dataset
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

TRAIN = "s3://bucket/clicks/train/"
VALID = "s3://bucket/clicks/valid/"
COLUMNS = ["features", "category", "clicked"]
BATCH = 1024
WORKERS = 4


# The data.
class Batches(IterableDataset):
    """Row groups in random order, each worker its own; a batch has rows of one row group."""

    def __init__(self, url, is_shuffled):
        self.url, self.is_shuffled = url, is_shuffled
        self.epoch, self.done = 0, 0

    def __iter__(self):
        # Opened here, in the worker: Arrow's client of S3 does not survive a fork.
        files = pyarrow.dataset.dataset(self.url).get_fragments()
        groups = [group for file in files for group in file.split_by_row_group()]
        worker, draw = get_worker_info(), np.random.default_rng([0, self.epoch])
        order = draw.permutation(len(groups)) if self.is_shuffled else np.arange(len(groups))
        skipped, self.done = self.done, 0
        for number in order[worker.id :: worker.num_workers]:
            table = groups[number].to_table(columns=COLUMNS)
            if self.is_shuffled:
                draw = np.random.default_rng([1, self.epoch, number])
                table = table.take(draw.permutation(len(table)))
            for rows in table.combine_chunks().to_batches(max_chunksize=BATCH):
                self.done += 1
                if self.done > skipped:  # read again, and dropped
                    yield self.arrays(rows)
        self.epoch, self.done = self.epoch + 1, 0

    def arrays(self, rows):
        found = {name: rows[name] for name in COLUMNS}
        found["features"] = found["features"].flatten()
        found = {name: torch.tensor(each.to_numpy(False)) for name, each in found.items()}
        return {**found, "features": found["features"].reshape(len(rows), -1)}

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]


train = StatefulDataLoader(Batches(TRAIN, True), None, num_workers=WORKERS, persistent_workers=True)
valid = DataLoader(Batches(VALID, False), None, num_workers=WORKERS)
