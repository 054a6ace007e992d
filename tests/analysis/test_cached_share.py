"""The share of the data in the page cache, of scripts that read files of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from analysis.analyses import analyze, measured, write_files, write_script
from stoker.analysis import cold_reads

SAMPLERS = {
    "distributed, shuffled": "sampler=DistributedSampler(data, 2, 1)",
    "no workers": "num_workers=0",
}

DROP = """
def drop(paths):
    for path in paths:
        with open(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
"""

SCRIPT = (
    DROP
    + """
from torch.utils.data.distributed import DistributedSampler

if __name__ == "__main__":
    data = Files()
    drop(data.paths[::{every}])
    options = {{"num_workers": 1}} | dict({sampler})
    train(DataLoader(data, 4, **options), {step_s})
"""
)


@pytest.fixture(autouse=True)
def _files_can_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "probe"
    path.write_bytes(bytes(2_000))
    os.sync()
    cold_reads.drop_files([str(path)])
    if cold_reads.resident_fraction([str(path)]) != 0.0:
        pytest.skip("this file system keeps its files in memory")


@pytest.mark.parametrize("sampler", SAMPLERS)
@measured
def test_it_is_that_of_files_which_the_job_has_not_read(sampler: str, tmp_path: Path) -> None:
    write_files(tmp_path, 4_000)  # they last for 20 s and more, longer than it is left alone
    write_script(tmp_path, SCRIPT.format(every=3, sampler=SAMPLERS[sampler], step_s=0.02))
    found = analyze(tmp_path, "train.py")
    assert found.told["starts"] == 1
    # Of at least 48 examples. In a random order that is within 0.3 but for one run in 100,000.
    near = 0.3 if "shuffled" in sampler else 0.1
    assert found.told["cached_fraction"] == pytest.approx(2 / 3, abs=near), found.told["notes"]
    assert not any("had read itself" in note for note in found.told["notes"])


READS_A_PART = """
if __name__ == "__main__":
    data = Files()
    if not os.path.exists("dropped"):
        drop(data.paths)
        open("dropped", "w").close()
    weight = torch.zeros(1, requires_grad=True)
    loader = DataLoader(data, 4, num_workers=1)
    for _, batch in zip(range(20), loader):
        (weight * batch.sum()).backward()
"""


@measured
def test_a_part_that_an_earlier_start_of_the_script_has_read_is_left_out(tmp_path: Path) -> None:
    write_files(tmp_path, 300)
    write_script(tmp_path, DROP + READS_A_PART)
    found = analyze(tmp_path, "train.py", seconds=30)
    assert found.told["starts"] > 1
    assert found.told["cached_fraction"] == pytest.approx(0.0, abs=0.1), found.told["notes"]


@measured
def test_a_job_that_has_read_all_of_its_data_is_told(tmp_path: Path) -> None:
    write_files(tmp_path, 200)
    write_script(tmp_path, SCRIPT.format(every=1, sampler="", step_s=0.005))
    found = analyze(tmp_path, "train.py")
    assert found.told["cached_fraction"] == pytest.approx(1.0)
    assert found.told["cold"] is not None
