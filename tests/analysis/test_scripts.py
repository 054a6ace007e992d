"""`stoker analyze` on scripts as people write them: what their loaders say goes on being true."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from analysis.analyses import Outcome, analyze, write_script

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


def unharmed(found: Outcome) -> None:
    assert found.code == 0, found.errors + found.out
    assert found.report is not None
    assert found.report["crash"] is None
    assert found.rates["G"] is not None, found.report["reasons"]
    assert found.rates["P"] is not None, found.report["reasons"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_epoch_is_as_long_as_the_loader_says(script: str, tmp_path: Path) -> None:
    write_script(tmp_path, COUNTED + textwrap.dedent(SCRIPTS[script]))
    found = analyze(tmp_path, "train.py", minutes=0.2)
    unharmed(found)
    assert found.report is not None
    assert found.report["starts"] == 1
    assert not any("failed" in note for note in found.report["notes"]), found.report["notes"]
    assert any(point["trained"] is not None for point in found.report["prep"])
