"""Whether `stoker run` leaves what public training scripts compute as it is, and what it brings.

Scripts as their authors publish them, unedited, each started three times by its own command: as it
is; under ``stoker analyze``; and with ``stoker run --apply REPORT.json --do workers,cache``. Losses
and accuracies that the script prints are compared word for word with those of the first start. What
was applied is as `stoker run` says it; predicted and achieved are what it writes into the report.
Where a script's own data or weights could not be had, local stand-ins of the same form take their
place under the same names: Fashion-MNIST (8,000 or 3,000 pictures of it) for MNIST, paragraphs of
WikiText-2 for texts, a Llama of two layers with random weights for models.

The scripts are not part of this project. ``SCRIPTS.json`` lists them where they were put::

    [{"name": ..., "kind": ..., "source": ..., "folder": ..., "command": [...]}, ...]

Command::

    python bench/public_scripts.py SCRIPTS.json

Target: the same losses in each script.

Machine: two cores of an Intel Xeon, shared with other jobs (load 22 to 37, and rising while these
ran): the speed of an analysis and that of the run some minutes later are those of two machines, and
"achieved" says nothing of the change. Python 3.11.7, PyTorch 2.13.0 on processors; torchvision
0.28.0 without its compiled operators. The Lightning script seeds nothing; it was seeded from
outside.

Results (one round)::

    [results/public_scripts.json]
    script                               kind         losses  predicted  achieved
    -----------------------------------------------------------------------------
    vae                            plain loop       36 equal       1.13      0.26
    mnist_rnn                      plain loop       60 equal       1.43      0.36
    train_fabric                       Fabric       21 equal       1.06      0.41
    train_fabric, 2 ranks  DDP under torchrun       30 equal       1.00      1.26
    bug_report_model                Lightning        1 equal          -         -
    reward, launched        Accelerate launch  0 not started          -         -
    sft, streaming                     stream       61 equal          -         -
    [end]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from harness import Report, parser, report

_LONGEST_S = 900
# A word that ends in loss or accuracy, what stands between, and a number.
_LOSS = re.compile(
    r"(\w*(?:loss|accuracy))['\"]?[^\w\n-]{1,30}(-?\d[\d.]*(?:e-?\d+)?)", re.IGNORECASE
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

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=script["folder"], env=os.environ | script.get("environment", {}),
            capture_output=True, text=True, check=False, timeout=_LONGEST_S,
        )  # fmt: skip

    plain = start(*command)
    analyzed = start(
        *stoker, "analyze", "--budget", str(budget_minutes), "--json", str(found), *command
    )
    row = {
        "name": script["name"], "kind": script["kind"], "source": script["source"],
        "exit": [plain.returncode, analyzed.returncode], "losses": 0, "equal": None,
        "applied": [], "predicted": None, "achieved": None, "preparing": "",
        "load_1min": os.getloadavg()[0],
    }  # fmt: skip
    if not found.is_file():
        row["applied"] = [analyzed.stderr.strip().splitlines()[-1][:300]]
        return row
    applied = start(*stoker, "run", "--apply", str(found), "--do", "workers,cache", *command)
    losses = [find_losses(one.stdout) for one in (plain, applied)]
    told = [line for line in applied.stderr.splitlines() if "stoker run: " in line]
    outcome = json.loads(found.read_text())
    return row | {
        "exit": [*row["exit"], applied.returncode], "losses": len(losses[0]),
        "equal": losses[0] == losses[1] and plain.returncode == applied.returncode == 0,
        "applied": [line.split("stoker run: ", 1)[1] for line in told],
        "predicted": outcome.get("run", {}).get("predicted"),
        "achieved": outcome.get("run", {}).get("achieved"),
        "preparing": (outcome["preparing"] or {"text": ""})["text"],
        "split": outcome["split"],
    }  # fmt: skip


def evaluate(made: Report) -> None:
    """Hold the losses of each script against its own."""
    shown = []
    for row in made.rows:
        gains = [row[name] for name in ("predicted", "achieved")]
        cells = ["-" if gain is None else f"{gain:.2f}" for gain in gains]
        said = "not started" if row["equal"] is None else "equal" if row["equal"] else "DIFFERENT"
        shown.append((row["name"], row["kind"], f"{row['losses']} {said}", *cells))
    made.show(("script", "kind", "losses", "predicted", "achieved"), shown)
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
