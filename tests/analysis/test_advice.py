"""What would help, by reports of jobs of every kind."""

from __future__ import annotations

import io
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from analysis.recordings import Parts, keep, recorded
from analysis.reports import ALONE, COMPUTE, FETCH, PREP, REPORTS, job
from stoker.analysis.model.model import Change, predict
from stoker.analysis.model.report import (
    Action,
    AsItIs,
    DeviceTrial,
    Prepared,
    Rate,
    Report,
    Split,
    to_measured,
)
from stoker.analysis.model.what_if import answer
from stoker.analysis.reports.advice import advise
from stoker.analysis.reports.diagnosis import make_report
from stoker.analysis.reports.terminal import show_answer
from stoker.analysis.reports.verdict import write_verdict
from stoker.stats import ProcessTrial, ThreadTrial

CODES = {
    "processes": 'kind="process"',
    "workers": "num_workers=",
    "cache": "cache",
    "packing": "stoker pack",
    "echo": "echo(",
}


def named(report: Report) -> list[str]:
    """Return the kinds of actions, in their order."""
    return [
        next(kind for kind, code in CODES.items() if code in action.code)
        for action in advise(report)
    ]


@pytest.mark.parametrize("device", ["cuda:0", None])
def test_a_transform_on_the_device_shortens_preparing_and_lengthens_the_step(
    device: str | None,
) -> None:
    def tried(batch_s: float, report: Report = PREP) -> Report:
        return replace(report, on_device=[DeviceTrial("ColorJitter", batch_s, device)])

    def moves(report: Report) -> list[Action]:
        return [action for action in advise(report) if "ColorJitter" in action.title]

    (move,) = moves(tried(0.001))  # 0.3 of preparing, which limits the job
    assert 1.3 < move.gain.value <= 1 / 0.7 + 1e-6
    assert ".to_torch(device).random_map(fn)" in move.code
    assert "1 ms on " + (device or "one thread of a processor, which stands for") in move.why
    assert move.condition
    assert predict(to_measured(PREP)).prep_stall > 0.5
    batch_s = PREP.loader.batch_size / predict(to_measured(PREP)).rate
    (slower,) = moves(tried(0.4 * batch_s))
    assert slower.gain.value <= move.gain.value
    assert not moves(tried(2 * batch_s))
    assert not moves(tried(0.001, replace(PREP, transforms=[])))


@pytest.mark.parametrize("name", REPORTS)
def test_every_action_helps_and_the_best_comes_first(name: str) -> None:
    found = advise(REPORTS[name])
    text = write_verdict(replace(REPORTS[name], actions=found))
    assert text[0].isupper()
    assert "\n" not in text
    assert ("is kept busy" if REPORTS[name].bound == "compute" else "limited by") in text
    for action in found:
        assert action.gain.value >= 1.02
        assert action.gain.low <= action.gain.value <= action.gain.high
        assert action.title
        assert action.why
    kinds = named(REPORTS[name])
    apart = [kind for kind in kinds if kind in ("echo", "packing")]
    ranked = [a.gain.value for a in found[: len(found) - len(apart)]]
    assert ranked == sorted(ranked, reverse=True)
    assert kinds[len(ranked) :] == apart  # what is not fresh, or holds under a condition: last
    assert apart == [kind for kind in ("echo", "packing") if kind in apart]
    assert all(
        bool(a.condition) == (kind in ("echo", "packing"))
        for a, kind in zip(found, kinds, strict=True)
    )


def test_what_limits_is_what_the_advice_is_about() -> None:
    assert named(COMPUTE) == []
    assert "processes" not in named(replace(COMPUTE, thread_trial=ThreadTrial(8, 8, 1.0)))
    assert not {"cache", "packing"} & set(named(REPORTS["unknown"]))
    assert {"cache", "echo", "packing"} <= set(named(FETCH))
    assert not {"cache", "packing"} & set(named(replace(FETCH, cached_fraction=1.0)))
    assert named(ALONE)[0] == "workers"


def test_packing_reads_a_mib_where_it_read_a_file() -> None:
    (action,) = [a for a in advise(FETCH) if "stoker pack" in a.code]
    files = "545 files opened an epoch in place of 1,281,167, and 139,288 reads of a MiB"
    assert files in action.title
    assert action.code.endswith(".shuffle(block=9)")
    found = to_measured(FETCH)
    assert found.storage is not None
    packed = predict(found, Change(storage_mbps=found.storage * (1 << 20) / 1e6))
    assert action.gain.value == pytest.approx(packed.rate / predict(found).rate)
    assert packed.rate > 1.3 * predict(found).rate
    for more in ({"file_bytes": None}, {"file_bytes": 2.0**20}, {"examples": None}):
        assert not [a for a in advise(replace(FETCH, **more)) if "stoker pack" in a.code]


def test_echoing_is_advised_up_to_four() -> None:
    starved = job(G=9_000, P={1: 100, 4: 400}, workers=4, S=9_000, cores=4)
    (echo,) = (action for action in advise(starved) if "echoing" in action.title)
    assert "4 times" in echo.title
    assert "stoker.echo(loader, transform=" in echo.code
    assert echo.gain.value == pytest.approx(4.0)


def waiting(cpu_s: float, P: dict[int, float] | None = None) -> Report:
    """Return a job on two cores whose preparing takes 10 ms, ``cpu_s`` of them computing."""
    found = job(G=1_000, P=P or {1: 100, 2: 200}, workers=2, S=9_000, cores=2)
    prep = [replace(point, cpu_s=cpu_s) for point in found.prep]
    return replace(found, prep=prep, step_cpu_s=0.0)


def test_more_workers_than_cores_are_advised_where_preparing_waits() -> None:
    (more,) = (action for action in advise(waiting(0.001)) if "num_workers=" in action.code)
    assert more.code == "DataLoader(..., num_workers=10)"
    assert more.gain.value == pytest.approx(5.0)
    assert "extrapolated in proportion" in more.why
    assert "2 processors are enough" in more.why
    seen = advise(waiting(0.001, {1: 100, 2: 200, 10: 600}))
    (more,) = (action for action in seen if "num_workers=" in action.code)
    assert more.gain.value == pytest.approx(3.0)
    assert "was measured" in more.why
    for would_not_help in (waiting(0.01), waiting(0.001, {1: 190, 2: 200})):
        assert "workers" not in named(would_not_help)


PREPARED = Prepared(example_bytes=1_000_000, varies=False)
RANDOM = replace(PREPARED, varies=True)


def test_a_cache_around_the_dataset_is_named_first() -> None:
    small = replace(PREP, examples=20_000, echo_after_s=None, prepared=PREPARED)
    kept = advise(small)[0]
    assert kept.code == 'DataLoader(stoker.cached(dataset, "19.6 GiB"), ...)'
    assert kept.title.startswith("keep prepared examples (100% of the dataset)")
    said = str(replace(small, actions=advise(small)))
    assert said.count("Keep prepared examples (100% of the dataset)") == 1
    assert "Same batches, checked." in said
    half = replace(small, examples=64_000)
    (part,) = (action for action in advise(half) if "stoker.cached" in action.code)
    assert 1.02 < part.gain.value < kept.gain.value
    random = replace(small, prepared=RANDOM)
    fed = replace(COMPUTE, examples=20_000, echo_after_s=None, prepared=PREPARED)
    for report in (random, fed):
        assert not [action for action in advise(report) if "stoker.cached" in action.code]


# Measured: two cores, which training has for itself at 188 examples/s. Beside one worker that
# decodes, it reached 107 on data in memory, where processor time alone would allow 137.
CROWDED = Parts(
    rate=107.0, wait=0.02, G=188.0, P={1: 150.0, 2: 250.0}, trained={1: 107.0, 2: 107.0},
    workers=1, prep_cpu_s=0.004, step_cpu_s=0.0106,
)  # fmt: skip
ONE_BY_ONE = Parts(
    rate=83.5, wait=0.555, G=188.0, P={0: 150.0, 1: 150.0}, trained={0: 83.5, 1: 107.0},
    workers=0, prep_cpu_s=0.004, step_cpu_s=0.0106,
)  # fmt: skip


@pytest.mark.parametrize("slower", [None, 1.0, 1.4])
@pytest.mark.parametrize("parts", [CROWDED, ONE_BY_ONE])
def test_the_gain_of_a_cache_is_that_of_training_on_one(parts: Parts, slower: float | None) -> None:
    """The host may have become slower since the job ran as it is: then it was so beside, too."""
    record = recorded(parts)
    record.cores = 2
    by = slower or 1.0
    keep(record.ranks[0], 170.0 / by, parts.rate / by if slower else 0.0)
    report = replace(make_report(record), examples=10_000)
    (kept,) = (a for a in advise(report) if "stoker.cached" in a.code)
    assert kept.gain.value == pytest.approx(170 / parts.rate, rel=0.01)
    # Half of the examples bring less than half of the gain, as the others take longer.
    half = replace(report, memory_bytes=int(10_000 * (1.05 * 40_000 + 512)))
    (some,) = (a for a in advise(half) if "stoker.cached" in a.code)
    assert 1.02 < some.gain.value < (1 + kept.gain.value) / 2
    assert not [a for a in advise(replace(report, kept=None)) if "stoker.cached" in a.code]


def test_no_workers_are_advised_that_start_longer_than_they_save() -> None:
    found = job(G=500, P={0: 80, 1: 80, 2: 160}, workers=0, S=None, C=None)

    def advises(epoch_s: float) -> bool:
        prep = [replace(point, startup_s=0.05) for point in found.prep]
        assert found.predicted is not None
        report = replace(found, prep=prep, examples=round(epoch_s * found.predicted))
        return any("num_workers=" in action.code for action in advise(report))

    assert advises(1.0)
    assert not advises(0.05)


def test_workers_are_kept_where_starting_them_takes_a_part_of_the_epoch() -> None:
    seen = AsItIs(Rate(100.0, 95.0, 105.0), 0.5, 9.0)
    short = replace(PREP, examples=1_000, as_it_is=seen, startup_s=3.0)
    first_s = short.loader.workers * short.loader.batch_size / short.prep[-1].rate.value
    (kept,) = (a for a in advise(short) if "persistent_workers" in a.code)
    assert kept.gain.value == pytest.approx((10.0 + 3.0) / (10.0 + first_s))
    assert kept.gain.low <= kept.gain.value <= kept.gain.high
    for report in (replace(short, startup_s=0.0), replace(short, examples=10_000_000)):
        assert not [a for a in advise(report) if "persistent_workers" in a.code]


def test_nothing_is_kept_of_a_dataset_that_changes() -> None:
    seen = AsItIs(Rate(100.0, 95.0, 105.0), 0.5, 9.0)
    short = replace(PREP, examples=1_000, as_it_is=seen, startup_s=3.0, prepared=PREPARED)

    def advised(**found: Any) -> list[Action]:
        return advise(replace(short, loader=replace(short.loader, **found)))

    kept = ("persistent_workers", "stoker.cached")
    warned = [a for a in advised() if any(code in a.code for code in kept)]
    assert len(warned) == 2
    assert all("no two of them were seen" in action.why for action in warned)
    assert not [a for a in advised(changes=[]) if "between epochs" in a.why]
    for found, said in (
        ({"changes": ["epoch"]}, "Without persistent_workers: the script changes its dataset"),
        ({"moves": ["count"]}, "But reading its examples changes what the dataset holds (count)"),
    ):
        actions = advised(**found)
        assert not [a for a in actions if any(code in a.code for code in kept)]
        (more,) = (action for action in actions if "num_workers=" in action.code)
        assert said in more.why


def test_what_is_drawn_at_random_is_cached_in_front_of_that() -> None:
    def cached(prepared: Prepared | None) -> Action:
        report = replace(FETCH, examples=20_000, prepared=prepared)
        (found,) = (a for a in advise(report) if "never evicts" in a.title)
        return found

    for prepared in (None, RANDOM):
        found = cached(prepared)
        assert "stoker.cached" not in found.code
        assert "stoker.from_files(...).cache(...)" in found.code
        assert "iB" not in found.title + found.code
    assert "stoker.cached(dataset" in cached(PREPARED).code


@pytest.mark.parametrize(
    ("trial", "processes"),
    [
        (ThreadTrial(8, 8, 1.1), 8),
        (ThreadTrial(16, 8, 1.1), 8),
        (ThreadTrial(8, 8, 4.0), 8),
        (ThreadTrial(8, 8, 6.0), None),
        (ThreadTrial(8, 4, 3.0), None),  # no more could be had of so few cores
        (ThreadTrial(8, 1, 1.0), None),
        (None, None),
    ],
)
def test_processes_are_named_where_threads_wait_for_each_other(
    trial: ThreadTrial | None, processes: int | None
) -> None:
    found = job(G=3_000, P={1: 180, 8: 200}, workers=8, S=2_500, cached_fraction=0.3)
    report = replace(found, thread_trial=trial)
    actions = [action for action in advise(report) if "process" in action.code]
    assert [action.code for action in actions] == (
        [f'.workers({processes}, kind="process")'] if processes else []
    )
    for action in actions:
        assert 4 < action.gain.value < 8 * 180 / 200


@pytest.mark.parametrize(("free", "is_named"), [(0.9, True), (0.1, False)])
def test_threads_are_named_where_code_in_processes_leaves_the_gil_free(
    free: float, is_named: bool
) -> None:
    found = job(G=3_000, P={1: 180, 8: 200}, workers=8, S=2_500, cached_fraction=0.3)
    report = replace(found, process_trial=ProcessTrial(1, 1, 1, free, 0.25))
    actions = [action for action in advise(report) if "thread_safe" in action.code]
    assert len(actions) == is_named
    for action in actions:
        assert 1.1 < action.gain.value < 1.3


def test_less_is_kept_of_decoded_examples_than_of_files() -> None:
    large = replace(FETCH, examples=64_000, prepared=PREPARED)  # a MB each, in half of 64 GiB
    files, found = (a for a in advise(large) if "never evicts" in a.title)
    assert "(51% of the dataset)" in found.title
    assert "stoker.cached(" in found.code
    assert "keep the files (100% of the dataset)" in files.title
    assert found.gain.value < files.gain.value


def test_a_little_to_gain_is_not_nothing() -> None:
    little = job(G=600, P={1: 145, 4: 577}, workers=4, S=9_000)
    assert little.bound == "compute"
    said = write_verdict(replace(little, actions=advise(little)))
    assert said.endswith("At most 4% is to gain in the data path")
    fed = replace(COMPUTE, split=Split(1.0, 0.0, 0.0))
    assert write_verdict(fed).endswith("There is nothing to gain in the data path")


def test_data_from_a_network_gets_advice_too() -> None:
    P = {1: 100.0, 2: 200.0}
    parts = Parts(
        rate=200.0, wait=0.8, G=1_000.0, P=P, trained=P, workers=2, cached=0.0, prep_cpu_s=0.001
    )
    record = recorded(parts)
    record.ranks[0].opened = [{"kind": "socket", "name": "192.0.2.1"}]
    report = make_report(record)
    assert report.rates.P is None
    assert report.bound == "fetch" == predict(to_measured(report)).bound
    assert report.split.fetch_stall == pytest.approx(0.8, abs=0.01)
    assert report.split.prep_stall == 0.0
    assert "num_workers=" in report.actions[0].code
    said = io.StringIO()
    show_answer(report, answer(to_measured(report), Change()), Console(file=said))
    assert "P includes fetching over the network" in said.getvalue()
