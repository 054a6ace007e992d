"""Tokens for language models, beside peers: windows of a large file, and packed documents.

- windows: of 1,024 tokens, inputs and targets ``int64``, shuffled, batches of 64, from 20 million
  tokens.
- packed: 6,000 documents of 50 to 3,000 tokens, shuffled, joined to sequences of 2,049, batches
  of 8.

Every arm is a process of its own, with two workers where it has any; all of them run in turns, by
whole epochs of 0.7 s or more. "cpu us" is the processor time of an example, of all processes of an
arm; "a second" is the rate behind the first batch of an epoch, which comes after "epoch ms", and
"speed" stoker's rate over that. The first batch of all comes after "start s", imports included,
once. What a peer reads in a form of its own was written before, and a check of the first epoch saw
that everything came once, shuffled.

Peers are in the strongest forms that were found. torch's dataset is asked for whole batches:
without workers, that is NumPy's gather from a memory map. Hugging Face and LitData pack once,
before, in an order that stays; they, tf.data and Megatron number no documents in these forms.

Command::

    python bench/token_peers.py --peers all --install

Machine: two cores of an AMD EPYC, 24 GiB, Linux 6.18, files in the page cache; Python 3.11.7.

Results (five rounds)::

    [results/token_peers.json]
    windows             cpu us             it / stoker   a second  speed  epoch ms  start s
    ---------------------------------------------------------------------------------------
    stoker                1.29              1 (1 .. 1)    821,220      1      1.28     0.17
    torch                0.596  0.459 (0.441 .. 0.468)  1,797,499  0.457      0.32     1.27
    torch, 2 workers      16.1     12.5 (11.7 .. 12.8)     90,090   9.16      3.05     0.84
    Hugging Face           5.2        4 (3.93 .. 4.12)    199,081   4.08      4.23     1.36
    Grain, array          11.1     8.62 (8.48 .. 8.87)    112,155   7.39      2.05     0.09
    Grain, ArrayRecord    27.6     21.5 (19.9 .. 22.8)     58,446   14.2      3.34     0.10
    tf.data               8.41      6.53 (6.2 .. 7.56)    250,258   3.28      13.9     1.69
    LitData               36.7     28.5 (28.1 .. 30.9)     52,995   15.8      8.66     1.00
    Streaming             79.4     61.6 (56.4 .. 64.7)     19,134   43.2      50.8     2.35
    Megatron              77.9       60 (57.6 .. 63.6)     20,341   39.9      11.4     2.44

    packed                       cpu us          it / stoker  a second  speed  epoch ms  start s
    --------------------------------------------------------------------------------------------
    stoker                         14.2           1 (1 .. 1)    72,228      1      1.26     0.10
    torch                            12   0.846 (0.687 .. 1)    84,038  0.859     0.411     0.73
    torch, 2 workers                177  12.5 (10.3 .. 18.3)     6,403   10.5      4.65     0.75
    Hugging Face, packed before    12.2    0.835 (0.71 .. 1)    86,608  0.814      2.39     1.29
    Grain, ConcatThenSplit          130  9.16 (8.48 .. 10.6)     8,864   8.13      4.09     0.10
    tf.data, rebatch               76.1  5.26 (4.98 .. 5.44)    19,910   3.52      9.87     1.43
    LitData, packed before         85.1  6.08 (5.92 .. 6.19)    17,074   4.24      5.99     0.88
    Megatron, GPTDataset            251  17.8 (17.6 .. 22.2)     5,454   13.4       7.1     2.38
    [end]

Behind, and why:

- windows, torch without workers: it gathers from a mapped file and widens once, 0.4 us a window;
  inputs and targets are two views of that. In stoker each can be written to alone, and has
  ``view(-1)``; and a file that is cut short is an error, not SIGBUS. Of its 1.3 to 1.4 us under
  ``.workers(0)``, ``pread`` takes 0.6 (0.3 by a map), widening into two arrays 0.2, calls 0.1, the
  order and the engine 0.3 (profiles on a busy machine).
- packed, torch without workers: the loop by hand that ``tables.py`` has, too. Hugging Face has
  nothing left to do but to copy rows.

Caveats: MosaicML Streaming asks for an older NumPy than the one it ran with, and ran without
torchvision, which windows do not need. Megatron ran without its GPU extras.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from peers import row_races
from peers.row_races import Arm

TASKS = {
    "windows": {
        "stoker": Arm("", "stoker_rows"),
        "torch": Arm("", "torch_rows", "0"),
        "torch, 2 workers": Arm("", "torch_rows", "2"),
        "Hugging Face": Arm("huggingface", "huggingface_rows"),
        "Grain, array": Arm("grain", "grain_rows", "array"),
        "Grain, ArrayRecord": Arm("grain", "grain_rows", "records"),
        "tf.data": Arm("tensorflow", "tensorflow_rows"),
        "LitData": Arm("litdata", "litdata_rows"),
        "Streaming": Arm("streaming", "streaming_rows"),
        "Megatron": Arm("megatron", "megatron_rows"),
    },
    "packed": {
        "stoker": Arm("", "stoker_rows"),
        "torch": Arm("", "torch_rows", "0"),
        "torch, 2 workers": Arm("", "torch_rows", "2"),
        "Hugging Face, packed before": Arm("huggingface", "huggingface_rows"),
        "Grain, ConcatThenSplit": Arm("grain", "grain_rows"),
        "tf.data, rebatch": Arm("tensorflow", "tensorflow_rows"),
        "LitData, packed before": Arm("litdata", "litdata_rows"),
        "Megatron, GPTDataset": Arm("megatron", "megatron_rows"),
    },
}


def write(folder: Path, quick: bool) -> None:
    """Write tokens that tell which window or document they are of."""
    draw = np.random.default_rng(0)
    tokens, documents = (600_000, 400) if quick else (20_000_000, 6_000)
    lengths = draw.integers(50, 3_001, documents)
    for name, each in (
        ("windows", np.arange(tokens) // 1_024),
        ("packed", np.repeat(np.arange(documents) + 1, lengths)),
    ):
        (folder / name).mkdir()
        each.astype(np.uint16).tofile(folder / name / "tokens.bin")
    np.save(folder / "packed" / "ends.npy", np.cumsum(lengths))


evaluate = row_races.evaluate

if __name__ == "__main__":
    row_races.run(__file__, __doc__, TASKS, write)
