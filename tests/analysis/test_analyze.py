"""`stoker analyze` on scripts that know nothing of stoker: real scripts, workers and ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from analysis.analyses import (
    analyze,
    command_of,
    environment,
    measured,
    write_files,
    write_script,
    write_shell,
)
from command_line import python
from patience import wait_until
from strategies import shortened

MAIN = 'if __name__ == "__main__":\n    '


@measured
def test_a_prep_bound_script_is_told_apart_and_the_advice_runs(tmp_path: Path) -> None:
    """It prepares 4 ms an example and trains 4 ms a batch."""
    write_files(tmp_path, 203)
    script = write_script(
        tmp_path,
        """
        if __name__ == "__main__":
            loader = DataLoader(
                Files(0.004), 8, shuffle=True, num_workers=1, drop_last=True
            )
            train(loader, 0.004, epochs=int(sys.argv[1]))
        """,
    )
    found = analyze(tmp_path, "--html", "report.html", "train.py", "10000", seconds=36)
    assert found.code == 0, found.errors
    assert "train.py" in (tmp_path / "report.html").read_text()
    report = found.told
    assert report["schema"] == "stoker-analysis/1"
    assert report["bound"] == "prep"
    assert report["starts"] == 1
    split = report["split"]
    assert sum(split.values()) == pytest.approx(1.0)
    assert split["prep_stall"] > 0.5 > split["compute"]
    assert all(found.rates[name] is not None for name in "GPSCF")
    # A sleep takes no less than it was asked for; how much more, a busy machine decides.
    assert found.rates["P"]["value"] < 1 / 0.004
    assert report["replayed"]["value"] < 8 / 0.004
    for rate in found.rates.values():
        assert rate["low"] <= rate["value"] <= rate["high"]
    counts = [point["workers"] for point in report["prep"]]
    assert counts[:2] == [1, *range(2, report["cores"] + 1)][:2]
    assert counts[-1] > report["cores"], "preparing sleeps: more workers than cores are tried"
    assert report["loader"]["name"].startswith("train.py:")
    assert report["examples"] == 203
    assert report["example_bytes"] == 3000
    assert report["verdict"] in " ".join(found.out.split())
    (more,) = (action for action in report["actions"] if "num_workers=" in action["code"])
    # How many more pay, a busy machine decides.
    assert int(re.findall(r"num_workers=(\d+)", more["code"])[0]) > 1
    assert all(action["gain"]["value"] > 1 for action in report["actions"])
    assert "will start" in found.errors
    assert "it edits no file" in " ".join(found.errors.lower().split())

    # Both were measured with the cache that is advised.
    assert report["kept"]["workers"] == 1, report["notes"]
    assert report["kept"]["trained"] is not None

    # What is said to be written in the script runs there.
    (kept,) = (a for a in report["actions"] if "stoker.cached" in a["code"])
    cached = kept["code"].removeprefix("DataLoader(").removesuffix(", ...)")
    assert cached.startswith("stoker.cached(dataset, ")
    cached = cached.replace("dataset", "Files(0.004)", 1)
    text = script.read_text().replace("Files(0.004), 8", f"{cached}, 8")
    printed = "print(len(loader), sum(len(batch) for batch in loader))\n    "
    end = text.index("train(loader, 0.004")
    script.write_text("import stoker\n" + text[:end] + printed + text[end:])
    done = python("-W", "error", script, "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["25", "200"]


# in short: test_calibration.py, and what is said of no file below
@measured
def test_a_compute_bound_script_has_nothing_to_gain(tmp_path: Path) -> None:
    write_script(tmp_path, MAIN + "train(DataLoader(Sleepy(0.0), 4, num_workers=1), step_s=0.1)")
    found = analyze(tmp_path, "train.py")
    assert found.told["bound"] == "compute"
    assert found.told["split"]["compute"] > 0.9
    assert found.rates["S"] is None
    assert "no file" in found.told["reasons"]["S"]
    # It sleeps behind its backward passes, of a single number.
    costs = {cost["name"]: cost["share"]["value"] for cost in found.told["step"]}
    assert costs["the rest"] > 0.5
    assert sum(costs.values()) == pytest.approx(1.0, abs=0.03)


@measured
def test_a_transform_that_takes_whole_batches_is_tried_as_one(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        class Brighten:
            def __call__(self, image):
                for _ in range(40):
                    image = (image * 1.01).clamp(0, 1)
                return image

        class Cut:
            size = 16  # what makes examples of one size stays with them

            def __call__(self, image):
                for _ in range(20):
                    image = image[:, :16, :16].clone()
                return image

        class Images(Sleepy):
            transforms = None

            def __getitem__(self, index):
                image = torch.rand(3, 24, 24)
                for transform in self.transforms:
                    image = transform(image)
                return image

        if __name__ == "__main__":
            images = Images()
            images.transforms = [Cut(), Brighten()]
            train(DataLoader(images, 16, num_workers=1), step_s=0.001)
        """,
    )
    found = analyze(tmp_path, "train.py")
    (tried,) = found.told["on_device"]
    assert tried["name"] == "Brighten"
    assert tried["seconds"] > 0
    assert tried["device"] is None  # a thread stood for it
    said = [*found.told["notes"], *(action["title"] for action in found.told["actions"])]
    forecasts = sum("move Brighten to the device" in text for text in said)
    # Of its cost, a busy machine may see too little.
    assert forecasts == any(cost["name"] == "Brighten" for cost in found.told["transforms"])


SHAPES = {
    "no automatic batches": """
        if __name__ == "__main__":
            train(DataLoader(Sleepy(0.001), batch_size=None, num_workers=1), step_s=0.0005)
        """,
    "made in the loop": """
        if __name__ == "__main__":
            weight = torch.zeros(1, requires_grad=True)
            for _ in range(1000):
                for batch in DataLoader(Sleepy(0.001, 64), 8, num_workers=1):
                    (weight * batch.sum()).backward()
        """,
    "dictionaries that the script empties, and writes into": """
        class Dicts(Sleepy):
            def __getitem__(self, index):
                return {"x": super().__getitem__(index), "y": index}

        if __name__ == "__main__":
            weight = torch.zeros(1, requires_grad=True)
            for _ in range(1000):
                for batch in DataLoader(Dicts(0.001), 8, num_workers=1):
                    assert set(batch) == {"x", "y"}
                    x = batch.pop("x")
                    assert x.dtype == torch.float32 and int(x[0, 0]) == int(batch["y"][0])
                    x += 1
                    (weight * x.sum()).backward()
        """,
}


# test_scripts.py has streams, samplers of batches and stateful loaders; test_drains.py drains all.
@pytest.mark.parametrize("shape", SHAPES)
@measured
def test_loaders_of_every_shape_are_analyzed(tmp_path: Path, shape: str) -> None:
    write_script(tmp_path, SHAPES[shape])
    found = analyze(tmp_path, "train.py")
    found.assert_whole()
    assert found.told["starts"] == 1


# That the training loader is found is shown in test_scripts.py.
@measured
def test_a_loader_is_chosen(tmp_path: Path) -> None:
    path = write_script(
        tmp_path,
        """
        def main():
            test = DataLoader(Sleepy(0.0005, 64), 8)
            data = DataLoader(Sleepy(0.001, 64), 8, num_workers=1)
            weight = torch.zeros(1, requires_grad=True)
            while True:
                with torch.no_grad():
                    for batch in test:
                        time.sleep(0.001)
                for batch in data:
                    (weight * batch.sum()).backward()

        if __name__ == "__main__":
            main()
        """,
    )
    lines = path.read_text().splitlines()
    number = {
        name: 1 + next(at for at, line in enumerate(lines) if f"{name} = DataLoader" in line)
        for name in ("test", "data")
    }
    found = analyze(tmp_path, "--loader", f"train.py:{number['test']}", "train.py")
    assert found.told["loader"]["name"] == f"train.py:{number['test']}"
    assert found.told["loader"]["workers"] == 0
    assert {loader["name"]: loader["trains"] for loader in found.told["loaders"]} == {
        f"train.py:{number['data']}": True,
        f"train.py:{number['test']}": False,
    }


@measured
def test_a_script_that_ends_early_is_started_again_with_the_same_input(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        MAIN
        + 'assert input() == "go"\n    '
        + "train(DataLoader(Sleepy(0.001, 48), 8, num_workers=1), epochs=1)",
    )
    (tmp_path / "answers").write_text("go\n")
    with open(tmp_path / "answers") as answers:
        found = analyze(tmp_path, "train.py", seconds=60, stdin=answers)
    found.assert_whole()
    assert found.told["starts"] == 2


FAILURES = {
    "crash in the dataset": (
        """
        class Broken(Sleepy):
            def __getitem__(self, index):
                raise OSError("disk on fire")

        if __name__ == "__main__":
            train(DataLoader(Broken(), 8, num_workers=1))
        """,
        "disk on fire",
    ),
    "no loader": ("print('nothing to see')", "ended by itself"),
    "no loader until the end": ("time.sleep(1000)", "time for the analysis was up"),
    "standard input": ("input('continue? ')", "standard input is empty"),
}


@pytest.mark.full
@pytest.mark.parametrize("failure", FAILURES)
def test_a_script_that_shows_nothing_gets_a_clear_outcome(tmp_path: Path, failure: str) -> None:
    body, said = FAILURES[failure]
    write_script(tmp_path, body)
    found = analyze(tmp_path, "train.py", seconds=6 if "until" in failure else 15)
    assert found.code == 1
    assert said in found.errors
    assert "stoker.analysis" not in found.errors  # no traceback of ours
    assert found.report is None


@measured
def test_workers_that_start_in_each_epoch_are_to_be_kept(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        if __name__ == "__main__":
            train(DataLoader(Sleepy(0.001, 40), 1, num_workers=1), step_s=0.012)
        """,
    )
    found = analyze(tmp_path, "train.py", seconds=60)
    assert found.told["startup_s"] > 0
    assert any("persistent_workers" in action["code"] for action in found.told["actions"])


@measured
def test_two_ranks_the_one_that_is_short_of_data_is_named(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import torch.distributed as dist

        if __name__ == "__main__":
            dist.init_process_group("gloo")
            rank = dist.get_rank()
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
            loader = DataLoader(Sleepy(0.01 if rank == 1 else 0.0), 4, num_workers=1)
            for _ in range(1000):
                for batch in loader:
                    model(batch).sum().backward()
                    time.sleep(0.004)
        """,
    )
    found = analyze(
        tmp_path, "torchrun", "--standalone", "--nproc-per-node", "2", "train.py", seconds=30
    )
    ranks = found.told["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert "Rank 1 is short of data" in found.told["verdict"]
    for rank in ranks:  # what rank 0 loses in the collective is a stall, too, and not compute
        assert rank["split"]["compute"] < 0.6
    assert ranks[0]["others_fraction"] > 0.3 > ranks[0]["wait_fraction"]
    assert ranks[1]["wait_fraction"] > 0.3 > ranks[1]["others_fraction"]


@measured
def test_a_module_beside_its_siblings_and_another_sitecustomize(tmp_path: Path) -> None:
    package = tmp_path / "job"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rates.py").write_text("STEP_S = 0.002")
    write_script(
        package,
        """
        import sitecustomize
        from job.rates import STEP_S

        if __name__ == "__main__":
            assert sitecustomize.MARK == "of the user"
            assert sys.argv[1:] == ["--max-seconds", "7"]
            train(DataLoader(Sleepy(0.001), 8, num_workers=1), STEP_S)
        """,
    )
    hidden = tmp_path / "site"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text('MARK = "of the user"')
    words = "-m", "job.train", "--max-seconds", "7"
    found = analyze(tmp_path, *words, PYTHONPATH=str(hidden))
    assert found.code == 0, found.errors
    assert found.told["loader"]


@measured
def test_a_shell_script_that_starts_the_training_and_prints_megabytes(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        class Loud(Sleepy):
            def __getitem__(self, index):
                print("x" * 100_000)
                return super().__getitem__(index)

        if __name__ == "__main__":
            train(DataLoader(Loud(0.001), 8, num_workers=1))
        """,
    )
    found = analyze(tmp_path, write_shell(tmp_path))
    assert found.code == 0, found.errors
    assert found.rates["G"] is not None
    assert len(found.out) + len(found.errors) < 20_000


@pytest.mark.interrupts
@pytest.mark.parametrize("number", shortened([signal.SIGKILL, signal.SIGINT], 1))
def test_nothing_is_left_running(tmp_path: Path, number: signal.Signals) -> None:
    write_script(
        tmp_path,
        """
        class Told(Sleepy):
            def __getitem__(self, index):
                open(os.path.join(HERE, f"worker-{os.getpid()}"), "w").close()
                return super().__getitem__(index)

        if __name__ == "__main__":
            # By forkserver, which 3.14 takes, they stay after SIGKILL: with PyTorch alone, too.
            train(DataLoader(Told(0.01), 8, num_workers=2, multiprocessing_context="fork"))
        """,
    )
    folder = {"TMPDIR": str(tmp_path)}
    analysis = subprocess.Popen(
        command_of("--max-seconds", "300", "train.py"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
        env=environment() | folder,
        start_new_session=True,
    )
    # PyTorch's workers see that their parent is gone once they have begun, not while they start.
    wait_until(lambda: len(list(tmp_path.glob("worker-*"))) == 2)
    script = psutil.Process(analysis.pid).children(recursive=True)
    assert len(script) >= 3  # the script and two workers
    os.kill(analysis.pid, number)
    out, _ = analysis.communicate(timeout=200)
    _, alive = psutil.wait_procs(script, timeout=200)
    assert alive == []
    if number == signal.SIGINT:
        assert analysis.returncode == 130
        assert b"stopped" in out
        assert b"Traceback" not in out
    else:  # the folder of a dead analysis goes with the next one
        assert list(tmp_path.glob("stoker-analysis-*"))
        write_script(tmp_path, "")
        python("-m", "stoker", "analyze", "--max-seconds", "12", "train.py", cwd=tmp_path, **folder)
    assert not list(tmp_path.glob("stoker-analysis-*"))
