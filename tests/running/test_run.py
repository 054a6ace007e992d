"""`stoker run`: unedited scripts in real processes, with the losses of the plain run."""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import msgspec
import psutil
import pytest

from analysis.reports import PREP, about, job
from command_line import call
from running.run_scripts import (
    COMMAND,
    PRELUDE,
    run,
    run_both,
    start,
    write_advice,
    write_script,
)
from scripts import TIMEOUT_S
from scripts import run as run_lines
from stoker.analysis.model.report import (
    UNSAFE,
    Action,
    LoaderOptions,
    Prepared,
    read_report,
    write_report,
)
from stoker.analysis.reports.advice import advise
from stoker.running.edits import show_edits
from stoker.running.plan import make_plan, read_plan, write_plan

pytest.importorskip("torch")

LINE = PRELUDE.count("\n") + 4  # of the first line of a script's own code
PLAIN = """
loader = DataLoader(Rows(), 8, shuffle=True, num_workers=0)
stream = DataLoader(list(range(8)), 4)
if __name__ == "__main__":
    train(make_model(), loader)
    print(len(list(stream)), torch.rand(1).item(), __name__, sys.argv)
    raise SystemExit(3)
"""


@pytest.mark.full
def test_a_plain_loop_has_the_losses_and_the_exit_status_of_the_plain_run(tmp_path: Path) -> None:
    script = write_script(tmp_path, PLAIN)
    report = write_advice(tmp_path, "num_workers=2", loader=f"train.py:{LINE}")
    words = "--apply", report, script.name, "--lr", "1"
    with tempfile.TemporaryDirectory() as folder:  # workers' sockets need a short path
        found = run_both(tmp_path, *words, code=3, TMPDIR=folder)
        assert [*Path(folder).glob("pymp-*")] == []
    lines = found.stderr.splitlines()
    assert lines[0] == (
        f"stoker run: train.py:{LINE}: num_workers 0 -> 2, persistent; same batches, checked"
    )
    compared = "8 batches compared with the script's own, bit for bit: the same"
    assert any(line.startswith(f"stoker run: train.py:{LINE}: {compared}") for line in lines)
    turned_off = run(tmp_path, *words, STOKER_RUN="0")
    assert (turned_off.returncode, turned_off.stderr) == (3, "")


@pytest.mark.full
def test_loaders_of_one_line_have_the_names_of_the_analysis(tmp_path: Path) -> None:
    body = """
    def build(data):
        return DataLoader(data, 4)

    class Noisy(Rows):
        def __getitem__(self, index):
            return torch.rand(4), 1.0

    class OfItsOwn(DataLoader):
        def __iter__(self):
            yield from self._get_iterator()

    own = OfItsOwn(Noisy(8), 4)
    for epoch in range(2):
        loaders = [build(Rows(8)), build(Noisy(8))]
        for loader in [*loaders, own]:
            list(loader)
    """
    script = write_script(tmp_path, body)
    line = LINE + 1
    report = write_advice(tmp_path, "num_workers=1", loader=f"train.py:{line + 12}")
    found = run(tmp_path, "--exact", "--apply", report, script.name)
    assert found.returncode == 0, found.stderr
    told = [line for line in found.stderr.splitlines() if line.startswith("stoker run: train")]
    assert told[0].startswith(f"stoker run: train.py:{line}: num_workers 0 -> 1")
    assert f"train.py:{line + 12}: left as it is: examples are random" in found.stderr
    assert f"train.py:{line + 10}: left as it is: examples are random" in found.stderr
    assert "was not iterated" not in found.stderr
    assert len(told) == 4, "none is told again in the second epoch"


SHOWN = {
    "loader = DataLoader(data, 4)": "+loader = DataLoader(data, 4, num_workers=6, persis",
    "make(DataLoader(dåta, num_workers=0,))": "+make(DataLoader(dåta, num_workers=6, persis",
    "loader = DataLoader(data, **options)": "train.py:1: DataLoader(..., num_workers=6, persis",
    "loader = DataLoader(data, batch_size=(2 * 2))": "+loader = DataLoader(data, num_workers=6, ",
    "loader = DataLoader((data))": "+loader = DataLoader((data), num_workers=6, persis",
    "loader = build(data)": "train.py:1: DataLoader(..., num_workers=6, persis",
}


@pytest.mark.parametrize("code", SHOWN)
def test_the_diff_that_a_user_would_write(code: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{code}\n")
    advised = LoaderOptions(num_workers=6), LoaderOptions(persistent_workers=True)
    actions = [Action("", "", about(1.5), "", options=options) for options in advised]
    loader = msgspec.structs.replace(PREP.loader, name="train.py:1", place=(str(script), 1))
    report = msgspec.structs.replace(PREP, actions=actions, loader=loader)
    words = ["run", "--apply", str(tmp_path / "report.json"), "--print-diff", str(script)]
    report = msgspec.structs.replace(report, command=["python", str(script)])
    write_report(report, tmp_path / "report.json")
    shown = call(*words)
    assert shown.code == 0, shown.stderr
    assert f"\n{SHOWN[code]}" in f"\n{shown.stdout}"
    assert "Not where the script changes its dataset between epochs" in shown.stdout
    assert script.read_text() == f"{code}\n"
    if code != "loader = build(data)" and "**" not in code:
        edited = [line[1:] for line in shown.stdout.splitlines() if line.startswith("+loader")]
        assert all(ast.parse(line) for line in edited)


def test_nothing_to_write_is_said() -> None:
    report = msgspec.structs.replace(PREP, actions=[])
    assert show_edits(report) == "The report advises no other options of the loader.\n"
    options = LoaderOptions(num_workers=6)
    unsafe = Action("Six workers", "", about(1.5), "", safety=UNSAFE, options=options)
    report = msgspec.structs.replace(PREP, actions=[unsafe])
    assert show_edits(report) == "Left out, as it would change the data: Six workers.\n"


def test_words_with_spaces_stay_words() -> None:
    report = msgspec.structs.replace(PREP, command=["python", "train.py", "--name", "a b"])
    assert report.script == "train.py --name 'a b'"


def test_who_was_measured_here_leaves_no_orphans_to_what_follows(tmp_path: Path) -> None:
    """A script that takes the place of the measuring process expects none."""
    body = f"""
        import ctypes
        from stoker.analysis.scripts.script_process import ScriptProcess
        script = ScriptProcess([sys.executable, "-c", "pass"], Path({os.fspath(tmp_path)!r}))
        script.stop()
        adopts = ctypes.c_int(-1)
        ctypes.CDLL(None).prctl(37, ctypes.byref(adopts))
        say(str(adopts.value))
    """
    assert run_lines(tmp_path, "from pathlib import Path\n" + textwrap.dedent(body)) == [0]


def test_a_plan_is_handed_over_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    advice = Action("", "", about(1.5), "", options=LoaderOptions(num_workers=6))
    report = msgspec.structs.replace(PREP, actions=[advice])
    plan = make_plan(report)
    monkeypatch.setenv("STOKER_RUN_PLAN", write_plan(plan))
    assert read_plan() == plan
    assert plan.loader == PREP.loader.name
    assert (plan.workers, plan.gain) == (6, 1.5)
    assert not plan.cache
    many = Action("", "", about(1.5), "", options=LoaderOptions(num_workers=99_999_999_999))
    write_report(msgspec.structs.replace(PREP, actions=[many]), tmp_path / "report.json")
    with pytest.raises(ValueError, match="is not a report"):
        read_report(tmp_path / "report.json")


@pytest.mark.parametrize("rate", [80, 450, 2_000])
def test_the_gain_of_a_cache_is_that_of_the_advice(rate: float) -> None:
    found = job(G=500, P={0: rate, 1: rate, 2: 2 * rate}, workers=1, S=None, C=None, cores=2)
    prepared = Prepared(example_bytes=1_000, varies=False)
    report = msgspec.structs.replace(found, examples=10_000, prepared=prepared)
    report = msgspec.structs.replace(report, actions=advise(report))
    (kept,) = (action for action in report.actions if "cached" in action.code)
    assert make_plan(report, cache=True).kept_gain == kept.gain.value
    random = msgspec.structs.replace(report, prepared=None)
    assert make_plan(random, cache=True).kept_gain is None


CACHED = """
class Slow(Rows):
    def __getitem__(self, index):
        until = time.perf_counter() + 0.002
        while time.perf_counter() < until:
            pass
        return super().__getitem__(index)


class Jittered(Slow):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand(4), y


if __name__ == "__main__":
    loader = DataLoader(Slow(), 8, shuffle=True)
    train(make_model(), loader)
    train(make_model(), DataLoader(Jittered(), 8, shuffle=True), 1)
    train(make_model(), DataLoader(Slow(16), 8), 2)
"""


@pytest.mark.full
def test_examples_are_kept_where_none_is_random(tmp_path: Path) -> None:
    script = write_script(tmp_path, CACHED)
    lines = script.read_text().splitlines()
    line = 1 + lines.index("    loader = DataLoader(Slow(), 8, shuffle=True)")
    report = write_advice(tmp_path, "num_workers=1", loader=f"train.py:{line}")
    found = run_both(tmp_path, "--exact", "--apply", report, "--cache", script.name)
    assert f"train.py:{line}: cached (2" in found.stderr
    assert "not cached: its examples are random" in found.stderr
    assert f"train.py:{line + 3}: cached (" in found.stderr
    assert "differs" not in found.stderr


UNEQUAL = """
class Told(Rows):
    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        x, y = super().__getitem__(index)
        return x * (info.num_workers if info else 1), y

if __name__ == "__main__":
    model = make_model()
    for epoch in range(3):
        train(model, DataLoader(Told(), 8, num_workers=1), 1)
"""


@pytest.mark.full
def test_what_was_undone_stays_so_where_loaders_are_built_anew(tmp_path: Path) -> None:
    script = write_script(tmp_path, UNEQUAL)
    report = write_advice(tmp_path, "num_workers=2")
    found = run_both(tmp_path, "--apply", report, script.name)
    assert found.stderr.count("batch 1 differs: ") == 1


DRAWN_ANEW = """
class Slow(Rows):
    def __init__(self, seed):
        super().__init__(24)
        self.seed = seed

    def __getitem__(self, index):
        until = time.perf_counter() + 0.002
        while time.perf_counter() < until:
            pass
        x, y = super().__getitem__(index)
        return x + self.seed, y

if __name__ == "__main__":
    model = make_model()
    for epoch in range(6):
        train(model, DataLoader(Slow(epoch), 8), 1)
"""


@pytest.mark.full
def test_data_that_differ_in_each_epoch_are_neither_kept_nor_compared_for_long(
    tmp_path: Path,
) -> None:
    script = write_script(tmp_path, DRAWN_ANEW)
    found = run_both(tmp_path, "--apply", write_advice(tmp_path), "--cache", script.name)
    lines = found.stderr.splitlines()
    assert sum(": cached (2" in line for line in lines) == 1
    assert sum("3 batches compared with the script's own" in line for line in lines) == 2
    assert sum("not cached: its dataset is another one each time" in line for line in lines) == 1


@pytest.mark.full
def test_a_closed_standard_output_is_the_scripts_own(tmp_path: Path) -> None:
    script = write_script(tmp_path, "raise SystemExit(3 if sys.stdout is None else 4)")
    report = write_advice(tmp_path, "num_workers=2")
    command = [sys.executable, *COMMAND, "--apply", str(report), script.name]
    found = start(tmp_path, "sh", "-c", f"exec {shlex.join(command)} >&-")
    assert found.returncode == 3, found.stderr
    assert found.stderr == ""


@pytest.mark.full
def test_a_traceback_is_the_scripts_own(tmp_path: Path) -> None:
    body = """
    class Torn(Rows):
        def __getitem__(self, index):
            if index == 21:
                raise ValueError("row 21 is torn")
            return super().__getitem__(index)

    train(make_model(), DataLoader(Torn(), 8))
    """
    script = write_script(tmp_path, body)
    report = write_advice(tmp_path, "num_workers=2")
    found = run_both(tmp_path, "--apply", report, script.name, code=1)
    assert "ValueError: row 21 is torn" in found.stderr.splitlines()
    assert found.stderr.count("Traceback") == 1
    assert "worker process" not in found.stderr.replace("a worker failed", "")


@pytest.mark.full
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    script = write_script(tmp_path, "train(make_model(), DataLoader(Rows(), 8), epochs=10**6)")
    report = write_advice(tmp_path, "num_workers=2")
    process = subprocess.Popen(
        [sys.executable, *COMMAND, "--apply", report, script.name],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) == 2
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=TIMEOUT_S)
    assert "KeyboardInterrupt" in rest
    assert process.returncode == -signal.SIGINT
    assert psutil.wait_procs(workers, timeout=TIMEOUT_S)[1] == []


SHAPES = {
    "stream": """
    class Numbers(IterableDataset):
        def __iter__(self):
            yield from (Rows()[at] for at in range(24))

    train(make_model(), DataLoader(Numbers(), 4, num_workers=1))
    """,
    "stateful": """
    from torchdata.stateful_dataloader import StatefulDataLoader

    train(make_model(), StatefulDataLoader(Rows(), 8, shuffle=True, num_workers=1))
    """,
    "infinite": """
    class Endless(DataLoader):
        def __init__(self, rows):
            sampler = torch.utils.data.RandomSampler(rows, replacement=True, num_samples=10**9)
            super().__init__(rows, batch_size=8, sampler=sampler)

    loader = Endless(Rows())
    batches = iter(loader)  # open at the end
    model = make_model()
    for step in range(60):
        x, y = next(batches)
        model(x).sum().backward()
        print(step, repr(model(x).sum().item()))
    """,
    "accelerate": """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    ours = DataLoader(Rows(), 8, shuffle=True)
    model, loader = accelerator.prepare(model, ours)
    train(model, loader)
    """,
    "trainer": """
    import transformers
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def forward(self, x, labels):
            return {"loss": ((self.net(x).squeeze(1) - labels) ** 2).mean()}

    class Named(Rows):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return {"x": x, "labels": torch.tensor(y)}

    if __name__ == "__main__":
        options = TrainingArguments(
            "out", num_train_epochs=2, per_device_train_batch_size=8, use_cpu=True,
            save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=4,
        )
        trainer = Trainer(Model(), options, train_dataset=Named())
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        print([repr(log.get("loss")) for log in trainer.state.log_history])
    """,
    "lightning": """
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def training_step(self, batch, at):
            x, y = batch
            loss = ((self.net(x).squeeze(1) - y.float()) ** 2).mean()
            print(repr(loss.item()))
            return loss

        def validation_step(self, batch, at):
            print("val", repr(self.net(batch[0]).sum().item()))

        def predict_step(self, batch, at):
            return self.net(batch[0]).sum().item()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

        def train_dataloader(self):
            return DataLoader(Rows(), 8, shuffle=True)

        def val_dataloader(self):
            return DataLoader(Rows(16), 8)

        def predict_dataloader(self):
            return DataLoader(Rows(8), batch_size=4)

    if __name__ == "__main__":
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )
        module = Module()
        trainer.fit(module)
        print(repr(trainer.predict(module)))  # it builds the loader again from its arguments
    """,
}


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_the_losses_of_the_plain_run(tmp_path: Path, shape: str) -> None:
    script = write_script(tmp_path, SHAPES[shape])
    line = f"train.py:{LINE + 3}"  # of the endless one
    report = write_advice(tmp_path, "num_workers=2", loader=line)
    found = run_both(tmp_path, "--apply", report, script.name)
    assert "Exception ignored" not in found.stderr
    told = [line for line in found.stderr.splitlines() if line.startswith("stoker run: ")]
    if shape == "stream":
        assert "left as it is: a stream" in told[0]
    elif shape == "stateful":
        assert told == []
    else:
        assert "num_workers 0 -> 2" in told[0], found.stderr
        assert "same batches, checked" in told[0]
    if shape == "accelerate":  # it builds the loader again
        ours = script.read_text().splitlines().index("ours = DataLoader(Rows(), 8, shuffle=True)")
        assert told[0].startswith(f"stoker run: train.py:{ours + 1}: num_workers")


EVALUATES = """
def evaluate():
    total = 0.0
    for number, (x, _) in enumerate(loader):
        with torch.no_grad():
            total += model(x).sum().item()
    print("evaluated", repr(total))


loader = DataLoader(Rows(480), 8, shuffle=True)
model = make_model()
for epoch in range(3):
    for number, (x, _) in enumerate(loader):
        loss = model(x).sum()
        loss.backward()
        if (epoch, number) == (0, 30):
            evaluate()
    print(epoch, repr(loss.item()))
    evaluate()
"""


@pytest.mark.full
def test_an_evaluation_on_the_training_loader_is_the_scripts_own(
    tmp_path: Path,
) -> None:
    script = write_script(tmp_path, EVALUATES)
    line = PRELUDE.count("\n") + EVALUATES[: EVALUATES.index("loader =")].count("\n") + 3
    report = write_advice(tmp_path, "num_workers=2", loader=f"train.py:{line}")
    found = run_both(tmp_path, "--apply", report, script.name)
    compared = re.findall(r"(\d+) batches compared .*: the same", found.stderr)
    assert compared == ["19", "32"], "together, not an epoch each"


DISTRIBUTED = """
import torch.distributed as dist
from torch.utils.data import DistributedSampler

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    data = Rows(64)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler, num_workers=1)
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    lines = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, _ in loader:
            loss = model(x).sum()
            loss.backward()
        lines.append(repr(loss.item()))
    with open(f"losses-{dist.get_rank()}", "w") as file:
        file.write(" ".join(lines))
    dist.destroy_process_group()
"""


@pytest.mark.full
def test_each_rank_says_what_it_did(tmp_path: Path) -> None:
    """Whether `stoker run` starts torchrun, or torchrun `stoker run`."""
    script = write_script(tmp_path, DISTRIBUTED)
    report = write_advice(tmp_path, "num_workers=2")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2"]

    def losses() -> list[str]:
        files = [tmp_path / f"losses-{rank}" for rank in range(2)]
        texts = [file.read_text() for file in files]
        for file in files:
            file.unlink()
        return texts

    plain = start(tmp_path, *launcher, script.name)
    assert plain.returncode == 0, plain.stderr
    expected = losses()
    inner: list[str | Path] = [sys.executable, *COMMAND, "--apply", report, script.name]
    for start_it in (
        lambda: run(tmp_path, "--apply", report, *launcher[1:], script.name),
        lambda: start(tmp_path, *launcher, "--no-python", *inner),
    ):
        found = start_it()
        assert found.returncode == 0, found.stderr
        for rank in range(2):
            assert f"stoker run [rank {rank}]: train.py:" in found.stderr
        assert losses() == expected


ENDING = {
    "after training": ("train(make_model(), DataLoader(Rows(), 8), 2)", 0),
    "without a loader": ("print('nothing to train')", 0),
    "with an error": ("raise ValueError('no such data')", 1),
}


@pytest.mark.full
@pytest.mark.parametrize("when", ENDING)
def test_a_script_that_ends_with_an_error_is_run_after_its_analysis(
    tmp_path: Path, when: str
) -> None:
    body, code = ENDING[when]
    script = write_script(tmp_path, f"{body}\nraise SystemExit(3)\n")
    plain = start(tmp_path, sys.executable, script.name)
    found = run(tmp_path, script.name)
    assert found.returncode == plain.returncode == (code or 3), found.stderr
    assert found.stdout == plain.stdout
    assert found.stderr.endswith(plain.stderr)


@pytest.mark.full
def test_the_report_of_another_script_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = write_advice(tmp_path, "num_workers=2")  # of train.py
    for words in (
        ["other.py"], ["-m", "my.other"], ["torchrun", "--nproc-per-node", "2", "other.py"],
    ):  # fmt: skip
        (tmp_path / "other.py").write_text("raise SystemExit(3)\n")
        found = call("run", "--apply", report, *words)
        assert found.code == 1
        assert "report.json is the report of train.py, not of other.py" in found.stderr
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "train.py").write_text("raise SystemExit(3)\n")
    assert run(tmp_path, "--apply", report, "-m", "my.train").returncode == 3


def test_wrong_use_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = write_advice(tmp_path, "num_workers=2")
    script = write_script(tmp_path, PLAIN)
    (tmp_path / "no.json").write_text("{}")
    for arguments, message in (
        (("--apply", "no.json", script.name), "no.json is not a report of"),
        (("--print-diff", script.name), "stoker analyze --json report.json train.py, then --apply"),
        (("--apply", report, "missing.py"), "there is no script and no command 'missing.py'"),
    ):
        found = call("run", *arguments)
        assert found.code == 1
        assert message in found.stderr
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one rank cannot be measured alone" in call("run", script.name).stderr
