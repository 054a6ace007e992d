"""`stoker analyze` on scripts as people write them: what their loaders say goes on being true."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from analysis.analyses import analyze, measured, write_script

# Checks what every loop over a loader is handed, and how often.
COUNTED = """
class Counted(Dataset):
    def __init__(self, length=24, prep_s=0.0005):
        self.length, self.prep_s = length, prep_s

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.prep_s)
        return torch.full((4,), float(index)), index % 3


weight = torch.zeros(1, requires_grad=True)


def step(x):
    (weight * x.sum()).backward()
"""

SCRIPTS = {
    "as timm trains": """
        def train_one_epoch(loader, epochs=1000):
            updates_per_epoch = len(loader)
            last_batch_idx = len(loader) - 1
            num_samples = len(loader.dataset)
            seen = 0
            for batch_idx, (x, y) in enumerate(loader):
                assert batch_idx <= last_batch_idx
                step(x)
                seen += x.size(0)
                progress = 100.0 * batch_idx / last_batch_idx
                left = updates_per_epoch - batch_idx
                1 / left
            assert batch_idx == last_batch_idx
            1 / (num_samples - seen + 1)

        def validate(loader):
            last_idx = len(loader) - 1
            with torch.no_grad():
                for batch_idx, (x, y) in enumerate(loader):
                    assert batch_idx <= last_idx
            assert batch_idx == last_idx

        if __name__ == "__main__":
            train = DataLoader(Counted(), 4, shuffle=True, num_workers=1, drop_last=True,
                               persistent_workers=True)
            val = DataLoader(Counted(12), 4, num_workers=1, persistent_workers=True)
            for epoch in range(100_000):
                train_one_epoch(train)
                validate(val)
        """,
    "a GAN with two loaders": """
        def cycle(loader):
            while True:
                given = 0
                for batch in loader:
                    given += 1
                    assert given <= len(loader), (given, len(loader))
                    yield batch
                assert given == len(loader), (given, len(loader))

        def make(length):
            return DataLoader(Counted(length), 4, shuffle=True)

        if __name__ == "__main__":
            real, fake = make(12), make(20)
            fakes = cycle(fake)
            while True:
                given = 0
                for x, y in real:
                    step(x + next(fakes)[0])
                    given += 1
                assert given == len(real), (given, len(real))
        """,
    "as Hugging Face's Trainer does": """
        if __name__ == "__main__":
            loader = DataLoader(Counted(22), 4, shuffle=True, num_workers=1)
            evals = iter(DataLoader(Counted(10**6), 4, num_workers=1))
            steps_in_epoch = len(loader)
            total = 0
            while True:
                iterator = iter(loader)
                given = 0
                for _ in range(steps_in_epoch // 2):  # two batches for one update
                    for x, y in [next(iterator) for _ in range(2)]:
                        step(x)
                        given += 1
                    with torch.no_grad():
                        next(evals)
                assert given == steps_in_epoch
                try:
                    next(iterator)
                except StopIteration:
                    pass
                else:
                    raise AssertionError("more batches than len(loader)")
        """,
    "next() again and again, epochs of one batch": """
        if __name__ == "__main__":
            loader = DataLoader(Counted(4), 4)
            iterator, given = iter(loader), 0
            while True:
                try:
                    x, y = next(iterator)
                    given += 1
                    assert given <= len(loader), (given, len(loader))
                    step(x)
                except StopIteration:
                    assert given == 1
                    iterator, given = iter(loader), 0
        """,
    "a batch sampler, and two iterators at a time": """
        from torch.utils.data import BatchSampler, RandomSampler

        if __name__ == "__main__":
            data = Counted(30)
            loader = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, False))
            while True:
                given = 0
                for (a, _), (b, _) in zip(loader, loader):
                    step(a.sum() + b.sum())
                    given += 1
                    assert given <= 8, given
                assert given == len(loader) == 8, given
        """,
    "a stream with a length, and one without": """
        class Stream(IterableDataset):
            def __iter__(self):
                for number in range(24):
                    time.sleep(0.0005)
                    yield torch.full((4,), float(number))

        class Sized(Stream):
            def __len__(self):
                return 24

        def epoch(loader):
            given = 0
            for x in loader:
                step(x)
                given += 1
                assert given <= 6, given
            assert given == 6, given

        if __name__ == "__main__":
            import warnings
            warnings.simplefilter("error")
            sized, unsized = DataLoader(Sized(), 4), DataLoader(Stream(), 4)
            while True:
                epoch(sized)
                epoch(unsized)
        """,
    "a dataset for one worker alone": """
        class Alone(Counted):
            def __getitem__(self, index):
                assert torch.utils.data.get_worker_info().num_workers == 1
                return super().__getitem__(index)

        if __name__ == "__main__":
            loader = DataLoader(Alone(), 4, num_workers=1)
            while True:
                given = 0
                for x, y in loader:
                    step(x)
                    given += 1
                assert given == len(loader), given
        """,
    "a stateful loader": """
        from torchdata.stateful_dataloader import StatefulDataLoader

        if __name__ == "__main__":
            loader = StatefulDataLoader(Counted(), 4, num_workers=1)
            while True:
                given = 0
                for x, y in loader:
                    step(x)
                    given += 1
                    assert given <= len(loader), given
                    loader.state_dict()
                assert given == len(loader), given
        """,
}


@pytest.mark.parametrize("script", SCRIPTS)
@measured
def test_every_epoch_is_as_long_as_the_loader_says(script: str, tmp_path: Path) -> None:
    write_script(tmp_path, COUNTED + textwrap.dedent(SCRIPTS[script]))
    found = analyze(tmp_path, "train.py", seconds=30)
    found.assert_whole()
    assert found.told["starts"] == 1, (found.told["notes"], found.errors)
    assert not any("failed" in note for note in found.told["notes"]), found.told["notes"]
    assert any(point["trained"] is not None for point in found.told["prep"])


TWO_TRAINERS = """
import subprocess

def trainer(prep_s):
    train(DataLoader(Sleepy(prep_s), 4, num_workers=1), step_s=0.004)

if __name__ == "__main__":
    if sys.argv[1:]:
        trainer(float(sys.argv[1]))
    else:
        both = [subprocess.Popen([sys.executable, __file__, text]) for text in ("0.0", "0.004")]
        sys.exit(max(one.wait() for one in both))
"""


@measured
def test_two_trainers_are_two_jobs(tmp_path: Path) -> None:
    write_script(tmp_path, TWO_TRAINERS)
    found = analyze(tmp_path, "train.py", seconds=36)
    found.assert_whole()
    (rank,) = found.told["ranks"]
    assert rank["others_fraction"] == 0.0
    assert "Rank" not in found.told["verdict"]


@measured
def test_what_training_has_mapped_is_not_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "archive.bin").write_bytes(bytes(range(256)) * 12 * 200)
    (tmp_path / "checkpoint.bin").write_bytes(bytes(1 << 23))
    (tmp_path / "vocabulary.txt").write_text("a b c")
    os.sync()
    write_script(
        tmp_path,
        """
        import mmap

        class Archive(Dataset):
            def __init__(self):
                self.file = open(os.path.join(HERE, "archive.bin"), "rb", buffering=0)

            def __len__(self):
                return 200

            def __getitem__(self, index):
                time.sleep(0.001)
                raw = os.pread(self.file.fileno(), 3072, 3072 * index)
                return torch.tensor(list(raw[:16]), dtype=torch.float32)

        if __name__ == "__main__":
            with open(os.path.join(HERE, "checkpoint.bin"), "rb") as file:
                model = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            assert sum(model[::4096]) == 0
            train(DataLoader(Archive(), 8, num_workers=1), step_s=0.002)
        """,
    )
    found = analyze(tmp_path, "train.py", seconds=18)
    found.assert_whole()
    reasons, notes = found.told["reasons"], found.told["notes"]
    assert "mapped" not in str(reasons), reasons
    assert not any("stayed in memory" in note for note in notes)
    assert found.told["cold"] is not None
    assert "parts of few large files" in str(reasons) + str(notes)


LATE_VALIDATION = """
def make(length):
    return DataLoader(Sleepy(0.0005, length), 4, num_workers=1)

if __name__ == "__main__":
    data, check = make(64), make(16)
    weight = torch.zeros(1, requires_grad=True)
    while True:
        for batch in data:
            (weight * batch.sum()).backward()
        with torch.no_grad():
            for batch in check:
                pass
"""


@measured
def test_loaders_that_one_function_builds_are_told_apart(tmp_path: Path) -> None:
    path = write_script(tmp_path, LATE_VALIDATION)
    lines = path.read_text().splitlines()
    built = next(at for at, line in enumerate(lines, 1) if "return DataLoader" in line)
    called = next(at for at, line in enumerate(lines, 1) if "make(64)" in line)
    found = analyze(tmp_path, "train.py")
    found.assert_whole()
    assert {one["name"]: one["trains"] for one in found.told["loaders"]} == {
        f"train.py:{built}": True,
        f"train.py:{called}": False,
    }
    assert found.told["loader"]["trains"]
    assert found.told["examples"] == 64
