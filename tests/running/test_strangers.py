"""`stoker analyze` and `stoker run` on four kinds of strangers' scripts."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from analysis.analyses import analyze, measured
from running.run_scripts import run, run_both, write_script

pytest.importorskip("torch")

PHOTOS = """
import random

class Photos(Rows):
    def __getitem__(self, index):
        time.sleep(0.004)
        x, y = super().__getitem__(index)
        return x.flip(0) if random.random() < 0.5 else x, y

if __name__ == "__main__":
    train(make_model(), DataLoader(Photos(480), 8, shuffle=True), int(sys.argv[2]))
"""


@measured
def test_a_vision_script_that_augments_by_itself_without_workers_is_sped_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_script(tmp_path, PHOTOS)
    with tempfile.TemporaryDirectory() as folder:  # workers' sockets need a short path
        monkeypatch.setenv("TMPDIR", folder)
        found = analyze(tmp_path, script.name, "--epochs", "1000", seconds=20)
        assert [*Path(folder).glob("pymp-*"), *Path(folder).glob("stoker-*")] == []
    monkeypatch.undo()
    assert found.told
    verdict, action, command, *_ = found.out.strip().splitlines()
    assert "limited by preparing data: it loses" in verdict
    assert re.match(r"Use \d workers? instead of 0: [\d.]+ times as fast", action)
    assert action.rstrip().endswith("minutes. Other random draws, as with another seed.")
    assert command.strip() == "stoker run train.py --epochs 1000"
    applied = run(tmp_path, "--apply", "report.json", script.name, "--epochs", "12")
    assert applied.returncode == 0, applied.stderr
    assert "; other random draws, as with another seed" in applied.stderr
    (gain,) = re.findall(r"([\d.]+) times as fast as with the script's own", applied.stderr)
    assert float(gain) > 1.1
    exact = run(tmp_path, "--exact", "--apply", "report.json", script.name, "--epochs", "1")
    assert "left as it is: examples are random" in exact.stderr


CHANGED = """
class Harder(Rows):
    epoch = 0

    def __getitem__(self, index):
        time.sleep(0.002)
        x, y = super().__getitem__(index)
        return x * (1 + self.epoch), y

if __name__ == "__main__":
    model, data = make_model(), Harder(64)
    loader = DataLoader(data, 8, shuffle=True)
    for data.epoch in range(int(sys.argv[1])):
        train(model, loader, 1)
"""


@measured
def test_a_dataset_that_the_script_changes_between_epochs_keeps_its_changes(
    tmp_path: Path,
) -> None:
    script = write_script(tmp_path, CHANGED)
    found = analyze(tmp_path, script.name, "10000", seconds=20)
    assert found.told["loader"]["changes"] == ["epoch"]
    applied = run_both(tmp_path, "--cache", "--apply", "report.json", script.name, "4")
    assert "not cached: the script changes its dataset between epochs (epoch)" in applied.stderr
    assert "persistent; " not in applied.stderr


COUNTS = """
class Counts(Rows):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)

if __name__ == "__main__":
    train(make_model(), DataLoader(Counts(), 8), int(sys.argv[1]))
"""


@pytest.mark.full  # in short: test_a_dataset_that_moves_when_it_is_read_is_left_as_it_is
def test_a_dataset_that_counts_its_reads_is_left_alone_before_it_is_measured(
    tmp_path: Path,
) -> None:
    script = write_script(tmp_path, COUNTS)
    found = run_both(tmp_path, script.name, "300")
    assert "it runs as it is: train.py:" in found.stderr
    assert "changes what the dataset holds (reads), and other workers" in found.stderr
    assert "P: data in memory" not in found.stderr


PIPELINE = """
import numpy as np
import stoker

def slow(x):
    time.sleep(0.002)
    return x * 2

if __name__ == "__main__":
    train = stoker.from_arrays(np.zeros((240, 4), np.float32), seed=0).shuffle().map(slow)
    train = train.batch(8).workers(1)
    val = stoker.from_arrays(np.zeros((64, 4), np.float32), seed=0).batch(8)
    model = make_model()
    for epoch in range(int(sys.argv[1])):
        given = 0
        for x in train.as_dataloader() if epoch % 2 else train:
            model(torch.as_tensor(x)).sum().backward()
            given += 1
        assert given == len(train), given
        with torch.no_grad():
            assert sum(1 for _ in val) == 8
"""


@measured
def test_a_pipeline_of_stoker_is_seen(tmp_path: Path) -> None:
    script = write_script(tmp_path, PIPELINE)
    found = analyze(tmp_path, script.name, "10000", seconds=20)
    assert found.code == 0, found.errors
    assert found.told["bound"] == "prep"
    assert "map(slow)" in found.told["stages"]
    assert found.told["loader"]["name"].startswith("train.py:")
    assert found.told["command"][-2:] == ["train.py", "10000"]
    applied = run(tmp_path, script.name, "100")
    assert applied.returncode == 0, applied.stderr
    assert "its code is yours to edit" in applied.stderr


@measured
def test_a_pipeline_that_ends_before_it_is_analyzed_is_told_to_train_for_longer(
    tmp_path: Path,
) -> None:
    script = write_script(tmp_path, PIPELINE)
    found = analyze(tmp_path, script.name, "1", seconds=100)
    assert found.code == 1
    assert "ended before its pipeline was analyzed: let it train for longer" in found.errors
