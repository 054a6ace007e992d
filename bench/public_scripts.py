"""Whether `stoker run` leaves what public training scripts compute as it is, and what it brings.

Scripts as their authors publish them, unedited, each started three times by its own command: as it
is, with ``stoker analyze``, and with ``stoker run --apply REPORT.json --do workers,cache``. Losses,
accuracies and PSNR that the script prints, or else logs, are compared word for word with those of
the first start. What was applied is as `stoker run` says it; predicted and achieved are what it
writes into the report. Where a script's own data or weights could not be had, local stand-ins of
the same form take their place under the same names: Fashion-MNIST (8,000 pictures of it) for MNIST,
240 photographs of ImageNet for Caltech101, paragraphs of WikiText-2 for texts and pairs,
Llama and BERT of two layers with random weights for models.

The scripts are not part of this project. ``SCRIPTS.json`` lists them where they were put::

    [{"name": ..., "kind": ..., "source": ..., "folder": ..., "command": [...]}, ...]

``environment`` and ``do`` (other words for ``--do``) may be given, too.

Command::

    python bench/public_scripts.py SCRIPTS.json

Target: the same losses in each script.

Machine: two cores of an AMD EPYC, at a load of 1.2 to 2.4, their own (in each row; 31 and 36 in two
rows without speeds). The figures are of one round: a prediction and a run some seconds later. Each
epoch takes one to six seconds, and epochs differ by some percent. Python 3.11.7, PyTorch 2.13.0 on
processors, so that training and workers share them; torchvision 0.28.0 without its compiled
operators, pytorch-ignite 0.5.5, Lightning 2.6.6, Accelerate 1.15, TRL 1.16. The scripts of the last
five rows are byte for byte those of the packages. Four of the scripts were copied by hand from
their repositories and not compared byte for byte; test_performance reads its scores from a stand-in
for the glue metric with accuracy and F1 alone. Missed: mnist_rnn and mnist_save_resume_engine,
whose pictures of 28 x 28 are found in some ten microseconds each, are 18 and 19 % below their
predictions, and dcgan is a third above its own. These rows were made before the analysis trained on
a cache to predict its gain: then mnist_rnn reached 1.98, 1.88 and 1.53 where 1.94, 1.74 and 1.61
were predicted, the last on a busy machine. And before it left out evaluations on the training
loader, which mnist_save_resume_engine makes after each epoch; not measured since. dcgan's steps of
7 to 20 ms depend on what a worker does beside them on two cores. dpo's loader gives too few batches
to tell. test_performance has one epoch of 50 batches that was not compared. Ignite's mnist.py draws
no seed, so that two starts of it differ. dcgan wants an empty folder for its output, and reads 500
photographs of ImageNet.

Results (one round)::

    [results/public_scripts.json]
    script                                    kind    losses  predicted  achieved
    -----------------------------------------------------------------------------
    vae                                 plain loop  72 equal       1.13      1.18
    mnist_rnn                           plain loop  75 equal       1.72      1.40
    super_resolution                        Ignite   5 equal       2.32      2.26
    train_fabric                            Fabric  45 equal       1.02      0.98
    train_fabric, 2 ranks       DDP under torchrun  90 equal       1.03      1.03
    test_performance             Accelerate launch   3 equal       1.07      1.20
    reward                       Accelerate launch  61 equal       1.00      1.06
    sft, streaming                          stream  61 equal          -         -
    bug_report_model                     Lightning   1 equal          -         -
    mnist_save_resume_engine                Ignite  12 equal       1.89      1.54
    dcgan                                   Ignite  10 equal       1.67      2.23
    dpo                       Hugging Face Trainer  41 equal          -         -
    kto                       Hugging Face Trainer  41 equal       1.00      0.98
    sft                       Hugging Face Trainer  81 equal       1.00      1.03

    predicted within 10% of what was achieved: 7 of 11
    [end]
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from harness import Report, parser, report

_LONGEST_S = 900
_NEAR = 0.1
# A word that ends in the name of a measure, what stands between, and a number.
_LOSS = re.compile(
    r"(\w*(?:loss|accuracy|psnr|err[dg]))['\"]?[^\w\n-]{1,60}(-?\d[\d.]*(?:e-?\d+)?)", re.IGNORECASE
)
_OWN = """
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self):
            return 256

        def __getitem__(self, index):
            return torch.full((4,), float(sum(range(20_000)) % (index + 1)))

    torch.manual_seed(0)
    weight = torch.zeros(4, requires_grad=True)
    for epoch in range(3):
        for batch in DataLoader(Numbers(), 8, shuffle=True):
            loss = (batch @ weight - 1).square().mean()
            loss.backward()
            weight.data -= 1e-6 * weight.grad
            print(f"loss: {loss.item():.8f}")
"""


def find_losses(text: str) -> list[str]:
    """Return the losses and accuracies that a script prints; sorted, as ranks print at a time."""
    return sorted(f"{name.lower()} {value}" for name, value in _LOSS.findall(text))


def measure(script: dict[str, Any], budget_minutes: float, found: Path) -> dict[str, Any]:
    """Start a script three times; return what a row says of it."""
    stoker = [sys.executable, "-c", "from stoker.cli import main; main()"]
    command = script["command"]
    row: dict[str, Any] = {
        "name": script["name"], "kind": script["kind"], "source": script["source"],
        "command": shlex.join(command), "exit": [], "seconds": [], "losses": 0, "equal": None,
        "applied": [], "predicted": None, "achieved": None, "preparing": "",
        "load_1min": os.getloadavg()[0],
    }  # fmt: skip

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        began_s = time.monotonic()
        done = subprocess.run(
            words, cwd=script["folder"], env=os.environ | script.get("environment", {}),
            capture_output=True, text=True, check=False, timeout=_LONGEST_S,
        )  # fmt: skip
        row["seconds"].append(round(time.monotonic() - began_s, 1))
        row["exit"].append(done.returncode)
        return done

    plain = start(*command)
    if plain.returncode:
        row["applied"] = [(plain.stderr.strip() or "nothing told").splitlines()[-1][:300]]
        return row
    analyzed = start(
        *stoker, "analyze", "--budget", str(budget_minutes), "--json", str(found), *command
    )
    if not found.is_file():
        row["applied"] = [analyzed.stderr.strip().splitlines()[-1][:300]]
        return row
    do = script.get("do", "workers,cache")
    applied = start(*stoker, "run", "--apply", str(found), "--do", do, *command)
    # Some write them to their log alone.
    losses = [find_losses(one.stdout) or find_losses(one.stderr) for one in (plain, applied)]
    told = [line for line in applied.stderr.splitlines() if "stoker run" in line]
    outcome = json.loads(found.read_text())
    return row | {
        "losses": len(losses[0]),
        "equal": bool(losses[0]) and losses[0] == losses[1] and not applied.returncode,
        "applied": [line.split("stoker run", 1)[1].removeprefix(": ") for line in told],
        "predicted": outcome.get("run", {}).get("predicted"),
        "achieved": outcome.get("run", {}).get("achieved"),
        "preparing": (outcome["preparing"] or {"text": ""})["text"],
        "split": outcome["split"],
    }


def evaluate(made: Report) -> None:
    """Hold the losses of each script against its own."""
    shown = []
    for row in made.rows:
        gains = [row[name] for name in ("predicted", "achieved")]
        cells = ["-" if gain is None else f"{gain:.2f}" for gain in gains]
        said = "not started" if row["equal"] is None else "equal" if row["equal"] else "DIFFERENT"
        shown.append((row["name"], row["kind"], f"{row['losses']} {said}", *cells))
    made.show(("script", "kind", "losses", "predicted", "achieved"), shown)
    told = [row for row in made.rows if row["achieved"]]
    near = sum(abs(row["predicted"] / row["achieved"] - 1.0) <= _NEAR for row in told)
    made.say(f"predicted within {_NEAR:.0%} of what was achieved: {near} of {len(told)}")
    run = [row for row in made.rows if row["equal"] is not None]
    different = sum(not row["equal"] for row in run)
    made.expect("scripts with other losses", different, 0, at_least=False)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("scripts", nargs="?", help="SCRIPTS.json; without it, a script of its own")
    arguments = options.parse_args()
    with report(__file__, arguments) as made, tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "own.py").write_text(textwrap.dedent(_OWN))
        own = {"name": "own", "kind": "plain loop", "source": "", "folder": folder}
        own["command"] = [sys.executable, "own.py"]  # type: ignore[assignment]
        scripts = (
            [own] if arguments.scripts is None else json.loads(Path(arguments.scripts).read_text())
        )
        for script in scripts:
            found = Path(folder) / "report.json"
            found.unlink(missing_ok=True)
            made.add(**measure(script, 0.2 if arguments.quick else 1.2, found))
            print(json.dumps(made.rows[-1]), flush=True)


if __name__ == "__main__":
    main()
