"""Tables, beside peers: rows of a Parquet file, and of a table in memory.

400,000 rows of 9 columns of numbers, shuffled, in batches of 1,024: dicts of columns.

- parquet: a file of 80 row groups. Peers that read it whole before are said to.
- table: the same columns in memory.

Command::

    python bench/table_peers.py --peers all --install

"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import Report
from peers import row_races
from peers.row_races import Arm

TASKS = {
    "parquet": {
        "stoker": Arm("", "stoker_rows"),
        "torch": Arm("", "torch_rows", "0"),
        "torch, 2 workers": Arm("", "torch_rows", "2"),
        "Hugging Face": Arm("huggingface", "huggingface_rows"),
        "Grain": Arm("grain", "grain_rows"),
        "tf.data, read before": Arm("tensorflow", "tensorflow_rows"),
        "Ray Data, read before": Arm("ray", "ray_rows"),
        "petastorm": Arm("petastorm", "petastorm_rows"),
    },
    "table": {
        "stoker": Arm("", "stoker_rows"),
        "torch": Arm("", "torch_rows", "0"),
        "torch, 2 workers": Arm("", "torch_rows", "2"),
        "Hugging Face": Arm("huggingface", "huggingface_rows"),
        "Grain": Arm("grain", "grain_rows"),
        "tf.data": Arm("tensorflow", "tensorflow_rows"),
        "Ray Data": Arm("ray", "ray_rows"),
    },
}
GROUPS = 80


def write(folder: Path, quick: bool) -> None:
    """Write the same columns as a Parquet file and as arrays."""
    draw, rows = np.random.default_rng(0), 40_000 if quick else 400_000
    label = draw.integers(0, 100, rows)
    columns = {f"c{n}": draw.random(rows) if n % 2 else label + n for n in range(8)}
    columns["n"] = np.arange(rows)
    for task in TASKS:
        (folder / task).mkdir()
        for name, column in columns.items():
            np.save(folder / task / f"{name}.npy", column)
    path = folder / "parquet" / "rows.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=rows // GROUPS)


def evaluate(made: Report) -> None:
    """Hold every arm against stoker."""
    row_races.show(made)


def main() -> None:
    row_races.run(__file__, __doc__, evaluate, TASKS, write)


if __name__ == "__main__":
    main()
