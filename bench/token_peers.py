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
    stoker                2.54              1 (1 .. 1)    725,887      1      3.31     0.31
    torch                0.569  0.224 (0.168 .. 0.332)  1,859,396  0.386     0.333     0.92
    torch, 2 workers      17.2     6.53 (5.02 .. 7.58)     81,867   8.59      3.81     0.93
    Hugging Face          5.34     2.19 (1.51 .. 2.24)    195,002   3.89      4.48     0.53
    Grain, array            11        4.24 (3.21 .. 5)    110,652    6.5      2.16     0.10
    Grain, ArrayRecord    27.8       11 (7.95 .. 12.6)     57,289   12.7      3.91     0.10
    tf.data               8.48      3.4 (2.67 .. 3.77)    238,660   3.01      13.8     1.82
    LitData               42.7     17.1 (12.3 .. 17.9)     43,148   16.8      12.8     1.06
    Streaming             84.5     34.8 (26.4 .. 37.5)     17,678   42.6      51.1     2.52
    Megatron              90.2       36 (25.5 .. 40.5)     17,921   41.5      12.4     2.85

    packed                       cpu us             it / stoker  a second  speed  epoch ms  start s
    -----------------------------------------------------------------------------------------------
    stoker                         15.3              1 (1 .. 1)    68,314      1      1.59     0.33
    torch                          12.4  0.813 (0.759 .. 0.875)    81,188  0.835     0.455     0.85
    torch, 2 workers                195       13.4 (11.9 .. 15)     6,124   11.5      5.38     0.91
    Hugging Face, packed before    11.8  0.791 (0.724 .. 0.858)    87,344  0.782      2.41     0.79
    Grain, ConcatThenSplit          166     10.1 (9.07 .. 11.4)     6,908   9.13         4     0.10
    tf.data, rebatch               81.4     5.27 (4.98 .. 5.42)    19,915   3.34      10.7     1.88
    LitData, packed before         88.9      5.8 (5.38 .. 6.15)    16,167   4.19      6.07     1.07
    Megatron, GPTDataset            293       19.4 (18 .. 23.4)     4,537   14.5      6.35     2.99
    [end]

Behind, and why:

- windows, torch without workers: it gathers from a mapped file and widens once, 0.4 us a window;
  inputs and targets are two views of that. In stoker each can be written to alone, and has
  ``view(-1)``; and a file that is cut short is an error, not SIGBUS. Of its 1.3 to 1.4 us under
  ``.workers(0)``, ``pread`` takes 0.6 (0.3 by a map), widening into two arrays 0.2, calls 0.1, the
  order and the engine 0.3 (profiles on a busy machine). Since these rows the defaults use no
  threads here, which had cost 0.8 us more; they were not measured again.
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
