"""How often ``stoker gate --base`` calls a job worse than itself on a noisy machine.

Twenty comparisons of a training script with a copy of itself in another folder, five runs of each
side by turns, while another process takes a processor for some seconds now and then. Its workers
decode, so that the other process slows it. Two conditions have the tolerance that the docs advise,
one has none at all.

Command::

    python bench/gate_noise.py

Target: no comparison is worse.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, no GPU, shared with other work at a load of
16 to 40, beside the disturbance of this script.

Results::

    [results/gate_noise.json]
    worse if        worse  undecided  not worse
    -------------------------------------------
    rate<base           0         19          1
    rate<0.95*base      0         19          1
    stall>base+5%       0         18          2

    second rounds: 1 of 20
    [end]

Caveats: at such a load hardly anything is decided; a quieter machine decides more, and this does
not show how often it is right. None of twenty says that fewer than one in seven is (95 %); 0.06 %
are expected without any tolerance, by the decision alone (tests/analysis/test_gate_decisions.py).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from harness import Report, parser, report

from stoker.analysis.gate.conditions import parse_condition
from stoker.analysis.gate.judging import judge
from stoker.analysis.gate.runs import Runner

CONDITIONS = "rate<base", "rate<0.95*base", "stall>base+5%"
COMPARISONS = 20

SCRIPT = """
import time
import torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Work(Dataset):
    def __len__(self):
        return {batches} * 8

    def __getitem__(self, index):
        until = time.process_time() + 0.001
        while time.process_time() < until:
            pass
        return torch.full((4,), float(index))


if __name__ == "__main__":
    weight = torch.zeros(1, requires_grad=True)
    for batch in DataLoader(Work(), 8, num_workers=1):
        (weight * batch.sum()).backward()
        time.sleep(0.008)
"""


def disturb(seed: int) -> None:
    """Take a processor for some seconds, leave it for some seconds, and so on."""
    rng = random.Random(seed)
    while True:
        until = time.monotonic() + rng.uniform(0.5, 6.0)
        while time.monotonic() < until:
            pass
        time.sleep(rng.uniform(0.5, 6.0))


@contextlib.contextmanager
def disturbed() -> Iterator[None]:
    """Disturb during the block."""
    process = multiprocessing.get_context("spawn").Process(target=disturb, args=(1,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _say_nothing(text: str) -> None:
    pass


def evaluate(found: Report) -> None:
    """Count the verdicts."""
    verdicts = Counter((row["condition"], row["verdict"]) for row in found.rows)
    names = "worse", "undecided", "not worse"
    rows = [(text, *(verdicts[text, name] for name in names)) for text in CONDITIONS]
    found.show(("worse if", *names), rows)
    rounds = {row["comparison"]: row["rounds"] for row in found.rows}
    found.say(f"second rounds: {sum(count > 1 for count in rounds.values())} of {len(rounds)}")
    worse = {row["comparison"] for row in found.rows if row["verdict"] == "worse"}
    found.expect("comparisons that are worse", len(worse), 0, at_least=False)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    comparisons, runs, batches = (1, 2, 20) if arguments.quick else (COMPARISONS, 5, 150)
    conditions = [parse_condition(text) for text in CONDITIONS]
    with report(__file__, arguments) as found, tempfile.TemporaryDirectory() as name, disturbed():
        folder = Path(name)
        (folder / "base").mkdir()
        for place in (folder, folder / "base"):
            (place / "train.py").write_text(SCRIPT.format(batches=batches))
        with contextlib.chdir(folder):
            for number in range(comparisons):
                command = [sys.executable, "train.py"]
                runner = Runner(command, folder / "base", runs, 30.0, _say_nothing)
                rounds = runner.run_rounds(conditions)
                for condition in conditions:
                    judged = judge(condition, rounds)
                    found.add(
                        comparison=number,
                        condition=condition.text,
                        verdict=judged.verdict,
                        value=judged.value,
                        low=judged.low,
                        high=judged.high,
                        rounds=len(rounds),
                    )
                    if not arguments.quick:
                        print(number, judged, flush=True)


if __name__ == "__main__":
    main()
