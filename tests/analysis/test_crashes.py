"""`stoker analyze` on scripts that crash: the terminal, the report and the exit status say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from analysis.analyses import Outcome, analyze, write_script, write_shell
from strategies import shortened

FULL = os.environ.get("STOKER_TEST_PROFILE") == "full"

CRASHING = """
import signal
from collections import Counter

HOW = {
    "raise": lambda: 1 / 0,
    "exit": lambda: sys.exit(3),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def crash(how):
    print("last words", flush=True)
    HOW[how]()


def crash_in(loader, how, phase):
    weight = torch.zeros(1, requires_grad=True)
    handed, times = 0, Counter()
    while True:
        for batch in loader:
            (weight * batch.sum()).backward()
            time.sleep(0.002)
            handed += 1
            times[int(batch[0, 0])] += 1
            again = max(times.values()) > 3  # few batches came again and again: that is G
            if (
                (phase == "as it is" and handed == 4)  # which lasts for a time, on any machine
                or (phase == "G" and again)
                or (phase == "P" and again and times[int(batch[0, 0])] == 1)  # fresh ones again
            ):
                crash(how)
"""

HOW = {
    "raise": ("exit code 1", "ZeroDivisionError"),
    "exit": ("exit code 3", "last words"),
    "segv": ("killed by SIGSEGV", "last words"),
    "kill": ("killed by SIGKILL", "last words"),
}
WHEN = {"as it is": "while it ran as it is", "G": "handed over again", "P": "read and trained on"}


def told(found: Outcome, how: str, when: str, last: str) -> None:
    """Check that the terminal, the report and the exit status agree."""
    assert found.code == 1
    crash = found.told["crash"]
    assert crash["how"] == how
    assert when in crash["when"]
    assert last in crash["output"]
    said = f"crashed {crash['when']}: {how}"
    assert said in found.errors
    assert any(said in note and last in note for note in found.told["notes"])
    assert f"crashed {crash['when']}" in found.told["verdict"]
    assert last in found.errors
    assert found.told["starts"] == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "phase"),
    [(how, phase) for how in HOW for phase in WHEN]
    if FULL
    else [("segv", "P"), ("kill", "as it is"), ("exit", "G")],
)
def test_a_crash_is_told(how: str, phase: str, tmp_path: Path) -> None:
    write_script(
        tmp_path,
        CRASHING
        + 'if __name__ == "__main__":\n'
        + "    loader = DataLoader(Sleepy(0.0005), 4, shuffle=True, num_workers=1)\n"
        + f"    crash_in(loader, {how!r}, {phase!r})\n",
    )
    found = analyze(tmp_path, "train.py")
    told(found, HOW[how][0], WHEN[phase], HOW[how][1])


@pytest.mark.full
@pytest.mark.parametrize("how", HOW if FULL else ["raise", "segv"])
def test_a_crash_before_the_first_batch_is_told(how: str, tmp_path: Path) -> None:
    write_script(tmp_path, CRASHING + f"crash({how!r})\n")
    found = analyze(tmp_path, "train.py")
    assert found.code == 1
    assert f"crashed before its first batch: {HOW[how][0]}" in found.errors
    assert HOW[how][1] in found.errors
    assert found.report is None


@pytest.mark.full
def test_a_crash_behind_a_launcher_that_hides_it_is_told(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        CRASHING
        + 'if __name__ == "__main__":\n'
        + '    crash_in(DataLoader(Sleepy(0.0005), 4), "raise", "as it is")\n',
    )
    found = analyze(tmp_path, write_shell(tmp_path, "echo all done"))
    told(found, "ZeroDivisionError: division by zero", WHEN["as it is"], "ZeroDivisionError")
    assert "all done" not in found.told["crash"]["output"]


LEAVING = {
    "os._exit": """
        if __name__ == "__main__":
            train(DataLoader(Sleepy(0.0005, 80), 4), epochs=1)
            os._exit(0)
    """,
    "daemonic": """
        import multiprocessing

        def work(done):
            train(DataLoader(Sleepy(0.0005, 80), 4), epochs=1)
            done.set()
            time.sleep(600)

        if __name__ == "__main__":
            done = multiprocessing.Event()
            multiprocessing.Process(target=work, args=(done,), daemon=True).start()
            done.wait()
    """,
}


@pytest.mark.parametrize("how", shortened(LEAVING, 0))
def test_a_process_that_leaves_without_pythons_end_is_no_crash(how: str, tmp_path: Path) -> None:
    write_script(tmp_path, LEAVING[how])
    found = analyze(tmp_path, write_shell(tmp_path, "echo all done"))
    assert "crashed" not in found.errors
    assert found.told["crash"] is None
    assert found.code == 0


@pytest.mark.parametrize("end", shortened(["os.kill(os.getpid(), 9)", "os._exit(3)"], 1))
def test_a_trainer_that_is_gone_behind_a_shell_is_told(end: str, tmp_path: Path) -> None:
    write_script(
        tmp_path,
        f"""
        if __name__ == "__main__":
            train(DataLoader(Sleepy(0.0005, 80), 4), epochs=1)
            {end}
        """,
    )
    found = analyze(tmp_path, write_shell(tmp_path, "echo all done"))
    told(found, "its process was killed, or left behind", WHEN["as it is"], "all done")


RANKS = (
    CRASHING
    + """
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    loader = DataLoader(Sleepy(0.0005), 4)
    if dist.get_rank() == 0:
        for batch in loader:
            time.sleep(0.02)
        time.sleep(60)
    before, how = sys.argv[1:]
    if before == "before":
        crash(how)
    crash_in(loader, how, "as it is")
"""
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "how"),
    [(before, how) for before in ("before", "behind") for how in HOW]
    if FULL
    else [("behind", "raise")],
)
def test_of_several_ranks_the_one_that_crashed_is_shown(
    before: str, how: str, tmp_path: Path
) -> None:
    write_script(tmp_path, RANKS)
    found = analyze(
        tmp_path, "torchrun", "--standalone", "--nproc-per-node", "2", "train.py", before, how,
        seconds=30,
    )  # fmt: skip
    assert found.code == 1
    assert f"rank 1 of the script crashed while it ran as it is: {HOW[how][0]}" in found.errors
    crash = found.told["crash"]
    output = crash["output"]
    assert crash["rank"] == 1
    assert HOW[how][1] in output
    assert "torch/distributed" not in output
    assert "ChildFailedError" not in output


@pytest.mark.full
def test_what_goes_wrong_behind_the_end_is_noted_and_no_crash(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        if __name__ == "__main__":
            try:
                train(DataLoader(Sleepy(0.0005), 8))
            finally:
                raise OSError("no room for the checkpoint")
        """,
    )
    found = analyze(tmp_path, "train.py", seconds=48)  # time to end
    assert found.code == 0, found.errors
    assert found.told["crash"] is None
    assert any("no room for the checkpoint" in note for note in found.told["notes"])


@pytest.mark.full
@pytest.mark.parametrize(
    "body",
    [
        "while True:\n    try:\n        run()\n    except BaseException:\n        pass",
        "try:\n    run()\nfinally:\n    time.sleep(60)",
    ],
)
def test_who_does_not_end_when_told_to_is_ended_by_force(body: str, tmp_path: Path) -> None:
    run = "def run():\n    train(DataLoader(Sleepy(0.0005), 8))\n\n\n"
    write_script(tmp_path, run + body + "\n")
    found = analyze(tmp_path, "train.py")
    assert found.code == 0, found.errors
    assert found.rates["P"] is not None
    assert len([note for note in found.told["notes"] if "by force" in note]) == 1
