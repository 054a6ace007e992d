"""Tables, beside peers: rows of a Parquet file, and of a table in memory.

400,000 rows of 9 columns of numbers, shuffled, in batches of 1,024: dicts of columns.

- parquet: a file of 80 row groups. Peers that read it once, before, are said to.
- table: the same columns in memory.

``token_peers.py`` says what the columns mean. Peers are in the strongest forms that were found:
torch's datasets make whole batches, by a gather or ``take`` of columns; Hugging Face, Ray Data and
petastorm shuffle shards or blocks, and rows in a buffer of 10,000 to 200,000; torch reads sixteen
row groups at a time, and shuffles these.

Command::

    python bench/table_peers.py --peers all --install

Machine: two cores of an AMD EPYC, 24 GiB, Linux 6.18, files in the page cache; Python 3.11.7.

Results (five rounds)::

    [results/table_peers.json]
    parquet                cpu us          it / stoker    a second  speed  epoch ms  start s
    ----------------------------------------------------------------------------------------
    stoker                 0.0657           1 (1 .. 1)  16,895,027      1      2.39     0.55
    torch                   0.123   1.9 (1.78 .. 2.17)   8,899,156   1.89      6.23     1.16
    torch, 2 workers          3.1  46.4 (42.2 .. 49.6)     355,328   46.6        16     1.23
    Hugging Face             1.83  28.4 (25.9 .. 29.7)     561,905   30.8      11.3     0.54
    Grain                      10     157 (143 .. 160)     121,668    141       792     1.18
    tf.data, read before     1.86  28.8 (26.7 .. 29.3)   1,093,209   15.5       167     2.15
    Ray Data, read before   0.496  7.37 (6.97 .. 7.88)   3,374,828   4.84        49     5.05
    petastorm                2.84  42.2 (39.6 .. 47.2)     711,372   22.9      96.4     1.40

    table             cpu us          it / stoker    a second  speed  epoch ms  start s
    -----------------------------------------------------------------------------------
    stoker            0.0887           1 (1 .. 1)  14,702,091      1      8.05     0.52
    torch              0.234    2.66 (2.6 .. 2.7)   6,497,801   2.22      7.94     1.04
    torch, 2 workers    3.21  35.6 (34.1 .. 38.4)     337,755   42.3      15.6     1.02
    Hugging Face        1.64  18.5 (17.8 .. 21.2)     639,138   23.1      9.54     0.58
    Grain               9.65     109 (108 .. 126)     126,184    116      20.5     0.10
    tf.data             1.79  20.1 (19.6 .. 21.5)   1,156,173   12.8       165     1.67
    Ray Data           0.431  4.84 (4.78 .. 6.47)   3,299,356   4.36      24.5     3.10
    [end]

Caveats: the file is so small that stoker keeps its row groups from the first epoch on, as it does
with such files; torch, Grain and petastorm read it anew in each epoch, from the page cache.
``tables.py`` has epochs in which stoker reads anew, too. Ray reads a file anew by processes that it
starts for each epoch, which takes it seconds. petastorm ran with an older pyarrow, without Spark.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
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
    draw, rows = np.random.default_rng(0), 8_000 if quick else 400_000
    label = draw.integers(0, 100, rows)
    columns = {f"c{n}": draw.random(rows) if n % 2 else label + n for n in range(8)}
    columns["n"] = np.arange(rows)
    for task in TASKS:
        (folder / task).mkdir()
        for name, column in columns.items():
            np.save(folder / task / f"{name}.npy", column)
    path = folder / "parquet" / "rows.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=rows // GROUPS)


evaluate = row_races.evaluate

if __name__ == "__main__":
    row_races.run(__file__, __doc__, TASKS, write)
