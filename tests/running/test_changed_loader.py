"""A loader with other settings: the batches and the generators of the script's own, bit for bit."""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    dataloader,
)

from stoker.basics.warn import say  # noqa: E402
from stoker.running.batches import ChangedLoader, RunBatches  # noqa: E402
from stoker.running.loaders import LoaderChoice, LoaderSettings, choose  # noqa: E402
from stoker.running.outcome import SpeedTurns  # noqa: E402
from stoker.running.plan import RunPlan  # noqa: E402

DataLoader: Any = torch.utils.data.DataLoader
PLAN = RunPlan(loader="here", workers=2, batch_size=4, cores=2, trainers=1)


class Squares(Dataset[Any]):
    def __init__(self, length: int = 22) -> None:
        self.length = length
        self.scale = 1
        self.bad = -1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise KeyError("no such square")
        return torch.tensor([index**2 * self.scale, index])


class Jittered(Squares):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + torch.rand(2)


class Rarely(Squares):
    """Draws for each example, and changes hardly any."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.steps = [own]

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) * self.draw()

    def draw(self) -> int:
        (own,) = self.steps
        drawn = torch.rand(1, generator=own) if isinstance(own, torch.Generator) else own.random()
        return 2 if drawn < 1e-9 else 1


class Seeded(Rarely):
    def draw(self) -> int:
        self.steps[0].seed(3)
        return super().draw()


def settings_of(loader: Any) -> LoaderSettings:
    return LoaderSettings(loader.num_workers, loader.prefetch_factor, loader.persistent_workers)


def change(
    loader: Any, new: LoaderSettings, said: list[str] | None = None, *, compares: bool = False
) -> Any:
    """Return the loader's counterpart with new settings; ``iterate`` is its ``iter``."""
    choice = LoaderChoice(settings_of(loader), new)
    say = (said if said is not None else []).append
    return ChangedLoader(dataloader, torch, choice, say, compares=compares)


def play(loader: Any, changed: Any, breaks: tuple[int, ...], early: bool) -> list[Any]:
    """Train, with a draw at each step, and return all that was seen and drawn.

    ``breaks``: after how many batches the loop ends, for each epoch; ``early``: with draws between
    ``iter()`` and the first ``next()``.
    """
    torch.manual_seed(7)
    found: list[Any] = []
    for stop in breaks:
        iterator = iter(loader) if changed is None else changed.iterate(loader)
        if early:
            found.append(torch.rand(1).item())
        for number, batch in enumerate(iterator, 1):
            found.append((batch.tolist(), torch.rand(1).item()))
            if loader.generator is not None:
                found.append(torch.rand(1, generator=loader.generator).item())
            if number == stop:
                break
        del iterator
        found.append(torch.rand(1).item())
    return found


def _shuffled(**options: Any) -> Any:
    return DataLoader(Squares(), 4, shuffle=True, **options)


def _with_generator(**options: Any) -> Any:
    generator = torch.Generator()
    generator.manual_seed(3)
    return DataLoader(Squares(), 4, shuffle=True, generator=generator, **options)


def _weighted(**options: Any) -> Any:
    return DataLoader(Squares(), 4, sampler=WeightedRandomSampler([1.0] * 22, 22), **options)


def _unbatched(**options: Any) -> Any:
    return DataLoader(Squares(9), None, shuffle=True, **options)


OWN = {
    "none": {},
    "two": {"num_workers": 2},
    "kept": {"num_workers": 1, "persistent_workers": True},
}


SHORT = [(_shuffled, "none"), (_with_generator, "two")]
CASES = [(make, own) for make in (_shuffled, _with_generator, _weighted, _unbatched) for own in OWN]


@pytest.mark.parametrize(
    ("make", "own"),
    [
        pytest.param(*case, marks=[] if case in SHORT else [pytest.mark.full], id=f"{at}-{case[1]}")
        for at, case in enumerate(CASES)
    ],
)
def test_batches_and_draws_are_the_scripts_own(make: Any, own: str) -> None:
    options: Any = OWN[own]
    breaks, early = (99, 5, 2, 99), make is _shuffled
    expected = play(make(**options), None, breaks, early)
    for new, compares in ((LoaderSettings(1, 4, True), True), (LoaderSettings(3, 2, False), False)):
        loader, said = make(**options), list[str]()
        changed = change(loader, new, said, compares=compares)
        assert play(loader, changed, breaks, early) == expected
        batches = len(loader)
        assert said == ([_compared(batches)] if compares else [])


def _compared(count: int) -> str:
    return f"{count} batches compared with the script's own, bit for bit: the same"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let this process compute as workers do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("own", "new", "told"), [(0, 1, True), (1, 2, False)])
def test_threads_of_torch_that_the_comparison_does_not_have_are_told(
    own: int, new: int, told: bool
) -> None:
    torch.set_num_threads(2)
    loader, said = DataLoader(Squares(), 4, num_workers=own), list[str]()
    changed = change(loader, LoaderSettings(new, 2, False), said, compares=True)
    assert sum(1 for _ in changed.iterate(loader)) == len(loader)
    note = (
        ", both by one thread of torch; the script's own process has 2, so a sum that torch makes"
    )
    assert said[0].startswith(_compared(len(loader)) + note * told)
    assert (said[0] == _compared(len(loader))) is not told


def test_a_line_is_not_glued_to_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar = pytest.importorskip("tqdm").tqdm(total=3, file=sys.stderr)
    bar.update()
    say("stoker run: told")
    bar.close()
    assert "\rstoker run: told\n\r" in capsys.readouterr().err


class _ByWorkers(Squares):
    """Examples that depend on who reads them, from a number on."""

    def __getitem__(self, index: int) -> Any:
        if index < 8:
            return torch.tensor([index, 0.0])
        info = torch.utils.data.get_worker_info()
        return torch.tensor([index, 0 if info is None else info.num_workers]) + torch.rand(1)


@pytest.mark.parametrize("own", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_batch_that_differs_is_the_scripts_own_and_the_change_is_undone(own: int) -> None:
    def make() -> Any:
        return DataLoader(_ByWorkers(), 4, num_workers=own)

    expected = play(make(), None, (99, 99), False)
    loader, said = make(), list[str]()
    changed = change(loader, LoaderSettings(own + 1, 2, True), said, compares=True)
    assert play(loader, changed, (99, 99), False) == expected
    assert said == [
        "batch 3 differs: the script's own has other values; from here on it is loaded as the "
        "script says"
    ]


def test_only_the_first_batches_are_compared() -> None:
    loader, said = DataLoader(Squares(60), 1), list[str]()
    changed = change(loader, LoaderSettings(1, 2, False), said, compares=True)
    iterator = changed.iterate(loader)
    for number in range(1, 56):
        next(iterator)
        assert said == ([_compared(50)] if number >= 50 else [])
    del iterator


def test_an_epoch_whose_end_is_not_asked_for_is_compared() -> None:
    loader, said = DataLoader(Squares(8), 4), list[str]()
    changed = change(loader, LoaderSettings(1, 2, True), said, compares=True)
    iterator = changed.iterate(loader)
    assert [next(iterator)[0, 1].item() for _ in range(len(loader))] == [0, 4]
    assert said == [_compared(2)]


def test_values_that_cannot_be_compared_are_told() -> None:
    loader, said = DataLoader([object()] * 4, 2, collate_fn=_mix), list[str]()
    changed = change(loader, LoaderSettings(1, 2, False), said, compares=True)
    assert len(list(changed.iterate(loader))) == 2
    assert "no more could be: complex" in said[0] or "cannot be compared" in said[0]


def _mix(examples: list[Any]) -> Any:
    return [iter(range(3))]


def test_an_error_of_the_scripts_own_loader_is_raised() -> None:
    class Torn(_ByWorkers):
        def __getitem__(self, index: int) -> Any:
            info = torch.utils.data.get_worker_info()
            if index == 5 and info.num_workers == 1:
                raise KeyError("only with one worker")
            return torch.tensor(index)

    loader, said = DataLoader(Torn(), 2, num_workers=1), list[str]()
    changed = change(loader, LoaderSettings(2, 2, False), said, compares=True)
    iterator = changed.iterate(loader)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(KeyError, match="only with one worker"):
        next(iterator)
    assert [batch[0].item() for batch in iterator] == list(range(6, 22, 2))
    assert "batch 3 differs: the script's own loader fails there (KeyError)" in said[0]


def test_two_iterators_of_one_loader_at_a_time() -> None:
    loader = _shuffled()
    torch.manual_seed(1)
    expected = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    changed = change(loader, LoaderSettings(1, 2, True))
    torch.manual_seed(1)
    pairs = zip(changed.iterate(loader), changed.iterate(loader), strict=True)
    assert [(a.tolist(), b.tolist()) for a, b in pairs] == expected


def test_a_process_that_the_script_forks_leaves_workers_that_persist() -> None:
    loader = DataLoader(Squares(8), 4)
    changed = change(loader, LoaderSettings(1, 2, True))
    expected = [batch.tolist() for batch in changed.iterate(loader)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on
        child = os.fork()
    if child == 0:
        signal.alarm(150)
        del changed
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert [batch.tolist() for batch in changed.iterate(loader)] == expected


CHANGES: list[Any] = [
    lambda dataset: None,
    lambda dataset: setattr(dataset, "scale", 5),
    lambda dataset: dataset.table.__setitem__(77_777, 1),
    lambda dataset: dataset.files.__setitem__(2500, ("", 2510)),
    lambda dataset: dataset.noise.__setitem__(1, 0.5),
    lambda dataset: setattr(dataset.helper, "count", 7),
    lambda dataset: dataset.own.seed(3),
    lambda dataset: setattr(dataset.args, "size", 7),
    lambda dataset: dataset.steps.__setitem__(1, _times(9)),
]


def _times(factor: int) -> Callable[[int], int]:
    return lambda value: value * factor


@pytest.mark.parametrize("kind", [np.zeros, torch.zeros], ids=["array", "tensor"])
def test_what_changes_between_epochs_reaches_workers_that_persist(kind: Any) -> None:
    """Be it a number, a value of a large array or of a long list, or inside of an object."""
    dataset: Any = Squares(4)
    dataset.table, dataset.files = kind(1 << 18), [("", index) for index in range(5000)]
    dataset.noise = torch.zeros(3, dtype=torch.bfloat16)
    dataset.helper, dataset.own = _Helper(), random.Random(0)
    dataset.args, dataset.steps = argparse.Namespace(size=1), [_times(1), _times(2)]
    loader = DataLoader(dataset, 4, collate_fn=functools.partial(_tell, dataset))
    changed = change(loader, LoaderSettings(1, 2, True))
    seen = [*changed.iterate(loader)]
    for change_it in CHANGES:
        change_it(dataset)
        seen += changed.iterate(loader)
        assert seen[-1] == _tell(dataset, [])
    assert len(set(seen)) == len(CHANGES), "the first one changes nothing"


def _tell(dataset: Any, examples: list[Any]) -> tuple[Any, ...]:
    return (
        dataset.scale,
        float(dataset.table.sum()),
        dataset.files[2500],
        float(dataset.noise.float().sum()),
        dataset.helper.count,
        dataset.own.getstate(),
        dataset.args.size,
        dataset.steps[1](1),
    )


def test_a_dataset_that_changes_during_an_epoch_has_the_change_undone() -> None:
    said: list[str] = []
    loader = DataLoader(Squares(8), 4)
    changed = change(loader, LoaderSettings(1, 2, True), said)
    for _ in changed.iterate(loader):
        loader.dataset.scale += 1
    assert "changed during the epoch" in said[0]
    loader.dataset.scale = 1
    iterator = changed.iterate(loader)
    next(iterator)
    loader.dataset.scale = 10
    assert next(iterator)[0, 0] == 160, "it is read here, when it is asked for"


def test_an_error_of_the_dataset_is_the_scripts_own() -> None:
    said: list[str] = []
    loader = DataLoader(Squares(8), 2)
    loader.dataset.bad = 5
    changed = change(loader, LoaderSettings(2, 2, True), said)
    iterator = changed.iterate(loader)
    assert [next(iterator)[0, 1].item() for _ in range(2)] == [0, 2]
    with pytest.raises(KeyError, match="no such square") as raised:
        next(iterator)
    assert str(raised.value) == "'no such square'", "not a worker's report of it"
    assert raised.value.__context__ is None
    assert next(iterator)[0, 1] == 6, "as PyTorch goes on"
    assert "a worker failed (KeyError)" in said[0]


class _Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(8))


class _Liar(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))

    def __len__(self) -> int:
        return 4


class _Anew(BatchSampler):
    """Its own iterator, which ``iter()`` starts anew, as Lightning's for predictions."""

    def __iter__(self) -> Any:
        self.whole = super().__iter__()
        return self

    def __next__(self) -> Any:
        return next(self.whole)


@pytest.mark.parametrize("bad", [-1, 9])
def test_a_sampler_that_iter_starts_anew(bad: int) -> None:
    data = Squares()
    loader = DataLoader(data, batch_sampler=_Anew(range(22), 4, drop_last=False))
    expected = [batch.tolist() for batch in DataLoader(data, 4)]
    changed = change(loader, LoaderSettings(2, 2, True))
    found = iter(changed.iterate(loader))
    data.bad = bad  # workers have it, and the script's own process reads the rest
    given = [next(found).tolist() for _ in range(2)]
    data.bad = -1
    assert [*given, *(batch.tolist() for batch in found)] == expected


def test_a_sampler_that_gives_more_than_it_said() -> None:
    said: list[str] = []
    loader = DataLoader(Squares(8), None, sampler=_Liar())
    batches = change(loader, LoaderSettings(2, 2, True), said).iterate(loader)
    assert [batch[1].item() for batch in batches] == list(range(7))
    assert "more batches than it said" in said[0]


# What is chosen


def choice_of(loader: Any, /, **plan: Any) -> LoaderChoice:
    before = _states()
    found = choose(loader, dataloader, msgspec.structs.replace(PLAN, **plan), "here")
    assert _states() == before
    return found


def _states() -> list[Any]:
    return [
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
        torch.get_rng_state().tolist(),
    ]


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class _Counting(Squares):
    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return index, self.calls


def _mask(examples: list[Any]) -> Any:
    return torch.stack(examples) * random.random()


@pytest.mark.parametrize(("own_s", "leaves"), [(0.5, True), (1.0, False), (2.0, False)])
def test_a_change_that_makes_training_slower_is_left(own_s: float, leaves: bool) -> None:
    own, new, said = LoaderSettings(0, None, False), LoaderSettings(2, 2, True), list[str]()
    turns = SpeedTurns(LoaderChoice(own, new), said.append, predicted=1.5)
    for number in range(5):
        assert turns.settings == new
        assert not turns.is_over
        turns.add(1.0, own=False)
        turns.add(own_s * (1 + number / 100), own=True)
    assert turns.is_over
    assert turns.settings == (own if leaves else new)
    (text,) = said
    assert text.startswith(f"{1.02 * own_s:.2f} times as fast as with the script's own settings (")
    assert ("; from here on it is loaded as the script says" in text) == leaves
    assert ", by 5 turns in this run; predicted 1.50" in text


@pytest.mark.parametrize(
    ("own", "epochs", "batches_per_s"),
    [(0, (99,), 0.0), (2, (99, 30, 50), 0.0), (0, (20,) * 12, 0.0), (0, (20,) * 12, 50.0)],
)
def test_turns_with_the_scripts_own_settings_change_no_batch_and_no_draw(
    own: int, epochs: tuple[int, ...], batches_per_s: float
) -> None:
    """Also where an epoch is shorter than a second, as a stretch should be."""

    def make() -> Any:
        return DataLoader(Squares(4 * max(epochs)), 4, shuffle=True, num_workers=own)

    expected = play(make(), None, epochs, False)
    loader, said = make(), list[str]()
    choice = LoaderChoice(settings_of(loader), LoaderSettings(1, 2, True))
    turns = SpeedTurns(choice, said.append, batches_per_s=batches_per_s)
    changed = ChangedLoader(dataloader, torch, choice, said.append, turns=turns)
    assert play(loader, changed, epochs, False) == expected
    turns.end()
    assert "times as fast as with the script's own settings" in said[0], said


def test_what_a_deterministic_loader_gets() -> None:
    found = choice_of(DataLoader(Squares(), 4, shuffle=True))
    assert found.new == LoaderSettings(2, 2, True)
    assert found.same
    assert choice_of(DataLoader(Squares(), 4, num_workers=2), workers=1).new.workers == 1


LEFT = {
    "a stream": lambda: DataLoader(_Stream(), 4),
    "examples are random": lambda: DataLoader(Jittered(), 4),
    "(calls), and would change": lambda: DataLoader(_Counting(), 4),
    "would be drawn": lambda: DataLoader(Squares(), 4, collate_fn=_mask),
    "BatchSampler may go on": lambda: DataLoader(
        Squares(), batch_sampler=BatchSampler(_Endless(), 4, drop_last=False)
    ),
    "its sampler _Liar": lambda: DataLoader(Squares(), 4, sampler=_Liar()),
    "its sampler RandomSampler": lambda: DataLoader(
        Squares(), 4, sampler=RandomSampler(Squares(), True, generator=torch.Generator())
    ),
    "cannot be tried: ": lambda: DataLoader(Squares(), 4, collate_fn=lambda _: lambda: 1),
    "cannot be tried: KeyError": lambda: DataLoader({i + 1: i for i in range(9)}, 4),
}


@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_as_it_is_and_why(why: str) -> None:
    found = choice_of(LEFT[why](), exact=True)
    assert not found.is_changed
    assert why in found.why


@pytest.mark.parametrize(
    "own", [random.Random(0), np.random.default_rng(0), np.random.RandomState(0), torch.Generator()]
)
def test_draws_of_a_datasets_own_generator_are_seen_though_examples_stay_as_they_are(
    own: Any,
) -> None:
    found = choice_of(DataLoader(Rarely(own), 4), cache=True, exact=True)
    assert not found.is_changed
    assert "examples are random" in found.why
    assert found.why.endswith("not cached: its examples are random")


def test_a_generator_that_is_seeded_for_each_example_is_not_random() -> None:
    assert choice_of(DataLoader(Seeded(random.Random()), 4)).is_changed


SERVED = [0]


class _Moving(Squares):
    """Counts its readings, and changes no example before the hundredth."""

    served = 0

    def __init__(self, count: Any = None) -> None:
        super().__init__()
        self.helper = _Helper()
        self.count = count

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) * (1 + (self.count(self) > 100))


class _Helper:
    count = 0


def _count_in_attribute(dataset: Any) -> int:
    dataset.served += 1
    return int(dataset.served)


def _count_in_helper(dataset: Any) -> int:
    dataset.helper.count += 1
    return int(dataset.helper.count)


def _count_in_class(dataset: Any) -> int:
    _Moving.served += 1
    return _Moving.served


def _count_in_global(dataset: Any) -> int:
    SERVED[0] += 1
    return SERVED[0]


def _turn(dataset: Any) -> int:
    dataset.turn = not getattr(dataset, "turn", False)
    return 0


class _CountedBatches:
    count = 0

    def __call__(self, examples: list[Any]) -> Any:
        self.count += 1
        return torch.stack(examples) * (1 + (self.count > 100))


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize(
    ("count", "name"),
    [
        (_count_in_attribute, "served"),
        (_count_in_helper, "helper"),
        (_count_in_class, "its items or globals"),
        (_count_in_global, "count"),
        (_turn, "turn"),
    ],
)
def test_a_dataset_that_moves_when_it_is_read_is_left_as_it_is(
    count: Any, name: str, own: int
) -> None:
    loader = DataLoader(_Moving(count), 4, num_workers=own)
    found = choice_of(loader, workers=3, cache=True)
    assert not found.is_changed
    assert "reading its examples changes what the dataset holds" in found.why
    assert name in found.why
    counting: Any = {"num_workers": own, "collate_fn": _CountedBatches()}
    collated = choice_of(DataLoader(Squares(), 4, **counting), workers=3)
    assert not collated.is_changed
    assert "(collate_fn)" in collated.why


class _Lazy(Squares):
    """Opens a file at its first example, and remembers examples and the last index."""

    def __getitem__(self, index: int) -> Any:
        vars(self).setdefault("file", Path(__file__).open())  # noqa: SIM115
        vars(self).setdefault("known", {})[index] = index
        self.last = index
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_only_the_first_reading_leaves_is_no_obstacle() -> None:
    assert choice_of(DataLoader(_Lazy(), 4)).is_changed


def test_what_the_script_changes_between_epochs_is_not_kept() -> None:
    found = choice_of(DataLoader(Squares(), 4), changes=["epoch"], cache=True, persistent=True)
    assert found.new == LoaderSettings(2, 2, False)
    assert "not persistent: the script changes its dataset between epochs (epoch)" in found.why
    assert "not cached: the script changes its dataset" in found.why


def test_random_examples_are_drawn_by_other_workers_unless_they_are_to_be_exact() -> None:
    options: Any = {"num_workers": 1}
    found = choice_of(DataLoader(Jittered(), 4, shuffle=True, **options))
    assert (found.new.workers, found.same) == (2, False)
    assert not choice_of(DataLoader(Jittered(), 4), exact=True).is_changed


class _OwnDraws(Squares):
    def __init__(self) -> None:
        super().__init__(400)
        self.own = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return self.own.random()


class _OwnCollate(_OwnDraws):
    def __call__(self, examples: list[Any]) -> Any:
        return torch.as_tensor([self.own.random() for _ in examples])


@pytest.mark.parametrize("where", ["dataset", "collate"])
def test_generators_that_a_loader_holds_draw_apart_in_each_worker_and_epoch(where: str) -> None:
    in_collate = where == "collate"
    data, collate = (Squares(400), _OwnCollate()) if in_collate else (_OwnDraws(), None)
    loader: DataLoader[Any] = DataLoader(data, 4, collate_fn=collate)
    found = choice_of(loader)
    assert (found.new.workers, found.same) == (2, False)
    changed = ChangedLoader(dataloader, torch, found, print)
    drawn = [value for _ in range(2) for batch in changed.iterate(loader) for value in batch]
    assert len({value.item() for value in drawn}) == len(drawn) == 800


def test_each_trainer_has_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.running.loaders.usable_cores", lambda: 8)
    assert choice_of(DataLoader(Squares(), 4), workers=6, cores=8).new.workers == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    # usable_cores() has divided by the ranks.
    monkeypatch.setattr("stoker.running.loaders.usable_cores", lambda: 2)
    shared = choice_of(DataLoader(Squares(), 4), workers=6, cores=8)
    assert shared.new.workers == 2
    assert "share of the cores" in shared.why


def test_an_iterator_that_an_interrupt_left_unmade_is_dropped() -> None:
    unmade = RunBatches.__new__(RunBatches)
    assert not hasattr(unmade, "_num_yielded")
    unmade.__del__()
