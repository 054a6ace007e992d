"""An Optuna study whose trials share one preparation, in four processes.

    pip install optuna
    python examples/optuna_study.py

Trials begin and end when they like, and bad ones are pruned in the middle of everything: the others
lose nothing by it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import optuna
import torch
from task import make_pipeline, network, train_epoch

import stoker

PROCESSES = 4
TRIALS = 3  # of each
EPOCHS = 3


def work(journal: str) -> None:
    """Run trials of the study, one after the other."""
    torch.set_num_threads(1)
    batches = stoker.feed(make_pipeline, name="optuna-study", jobs=PROCESSES).to_torch()

    def objective(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("rate", 1e-3, 1.0, log=True)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for epoch in range(EPOCHS):
            loss = train_epoch(model, optimizer, batches)
            trial.report(loss, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return loss

    study(journal).optimize(objective, n_trials=TRIALS)


def study(journal: str) -> optuna.Study:
    """Return the study, which lies in a file."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(journal))
    return optuna.create_study(study_name="rates", storage=storage, load_if_exists=True)


def main() -> None:
    if len(sys.argv) > 1:
        work(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        journal = str(Path(folder) / "journal.log")
        study(journal)
        call = [sys.executable, __file__, journal]
        codes = [job.wait() for job in [subprocess.Popen(call) for _ in range(PROCESSES)]]
        best = study(journal).best_trial
        print(f"best of {len(study(journal).trials)}: {best.params}, loss {best.value:.3f}")
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
