"""Recipes: each script trains to its end, and after a kill as if nothing had happened.

They run as they are, but for the constants at their top, which are made smaller.
"""

from __future__ import annotations

import contextlib
import re
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recipe_data
import torch

from command_line import python
from s3_bucket import serving

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
SMALL: dict[str, dict[str, Any]] = {
    "photographs": {"EPOCHS": 2, "BATCH": 8, "SIZE": 32, "LEARNING_RATE": 0.05, "ECHO": 2},
    "tokens": {
        "STEPS": 40,
        "VALIDATE_EVERY": 10,
        "BATCH": 8,
        "LENGTH": 16,
        "VOCABULARY": 16,
        "WIDTH": 64,
        "LAYERS": 1,
    },
    "huggingface_images": {"EPOCHS": 3, "BATCH": 8, "SIZE": 32},
    "huggingface_text": {"EPOCHS": 2, "BATCH": 8, "LENGTH": 8, "WIDTH": 16},
    "parquet": {"EPOCHS": 2, "BATCH": 16, "CATEGORIES": 4, "FEATURES": 4},
    "shards": {"EPOCHS": 3, "BATCH": 8, "SIZE": 32, "CLASSES": 2},
    "sound": {"EPOCHS": 2, "BATCH": 8, "RATE": 2_000, "SECONDS": 0.25, "WINDOW": 64},
    "video": {"EPOCHS": 2, "BATCH": 4, "SIZE": 32, "FRAMES": 8, "LEARNING_RATE": 0.003},
}
SAVE_EVERY, STOP_AFTER = 4, 10
"""Steps: it is stopped in the middle of an epoch, two steps behind a checkpoint."""

DEARER = {"huggingface_images", "huggingface_text", "sound", "video"}

every_recipe = pytest.mark.parametrize("name", SMALL)

KILLED = f"""
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = 0


def count(*_):
    global steps
    steps += 1
    if steps == {STOP_AFTER}:
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(count)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def smaller(script: Path, folder: Path, constants: dict[str, Any]) -> Path:
    """Write a script with other constants."""
    text = script.read_text()
    for name, value in constants.items():
        text, found = re.subn(
            rf"^{name} = [^#\n]*", f"{name} = {value!r}", text, flags=re.MULTILINE
        )
        assert found == 1, f"{script} has no {name}"
    (folder / script.name).write_text(text)
    return folder / script.name


def recipe(name: str, folder: Path, **others: Any) -> Path:
    """Make a folder with a recipe's data, and its script."""
    folder.mkdir()
    getattr(recipe_data, name)(folder)
    constants = {**SMALL[name], "SAVE_EVERY": SAVE_EVERY, **others}
    return smaller(RECIPES / f"{name}.py", folder, constants)


def trained(folder: Path) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(folder / "checkpoint.pt")
    return saved


def assert_equal(resumed: Path, whole: Path) -> None:
    ours, theirs = trained(resumed), trained(whole)
    assert ours["train"] == theirs["train"]
    for name, weights in theirs["model"].items():
        assert torch.equal(ours["model"][name], weights), name


def quality(said: str) -> tuple[float, float]:
    """Return what the last validation said: the loss in training, and the measure."""
    numbers = re.findall(r"(?:loss|accuracy|valid) (\d+\.\d+)", said.splitlines()[-1])
    return float(numbers[0]), float(numbers[1])


# -- in this process, stopped by an exception


class Stopped(Exception):
    """Raised in the middle of training."""


def run_here(script: Path, *, stop_after: int | None = None) -> tuple[int, dict[str, Any]]:
    """Run a script in its folder to its end, or to a step; return its steps and its names."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == stop_after:
            raise Stopped

    hook = register_optimizer_step_post_hook(count)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.chdir(script.parent):
            names = runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        hook.remove()
    return steps, names


@contextlib.contextmanager
def in_memory(folder: Path) -> Iterator[dict[str, str]]:
    """Put the Parquet files of a folder into fsspec's file system in memory."""
    import fsspec

    memory = fsspec.filesystem("memory")
    for file in folder.glob("*/*.parquet"):
        memory.pipe(f"/clicks/{file.relative_to(folder)}", file.read_bytes())
    try:
        yield {"TRAIN": "memory://clicks/train/", "VALID": "memory://clicks/valid/"}
    finally:
        memory.rm("/clicks", recursive=True)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name in DEARER)) for name in SMALL],
)
def test_it_goes_on_where_it_was_stopped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, and it learns."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "indexes"))
    scripts = [recipe(name, tmp_path / how) for how in ("whole", "stopped")]
    with contextlib.ExitStack() as stack:
        if name == "parquet":
            urls = stack.enter_context(in_memory(tmp_path / "whole"))
            scripts = [smaller(script, script.parent, urls) for script in scripts]
        run_here(scripts[0])
        with pytest.raises(Stopped):
            run_here(scripts[1], stop_after=STOP_AFTER)
        capsys.readouterr()
        steps, names = run_here(scripts[1])
        saved = STOP_AFTER // SAVE_EVERY * SAVE_EVERY
        assert names["train"].counts.steps == saved + steps
        loss, measure = quality(capsys.readouterr().out)
        assert loss < 1.0 if name == "tokens" else measure >= 0.75
    assert_equal(tmp_path / "stopped", tmp_path / "whole")


# -- as users run it, killed


def run(folder: Path, *arguments: str, environment: dict[str, str]) -> tuple[int, str]:
    """Run Python in a folder; return its code and what it said."""
    done = python("-W", "error", *arguments, cwd=folder, OMP_NUM_THREADS="1", **environment)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout


@pytest.fixture
def store(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Serve the Parquet files from an object store; yields the environment of its clients."""
    (tmp_path / "stored").mkdir()
    recipe_data.parquet(tmp_path / "stored")
    files = (tmp_path / "stored").glob("*/*.parquet")
    objects = {
        f"clicks/{file.relative_to(tmp_path / 'stored')}": file.read_bytes() for file in files
    }
    with serving(objects) as bucket:
        yield bucket.environment


@pytest.mark.full
@pytest.mark.parametrize("name", ["tokens", "parquet"])
def test_a_kill_changes_nothing(name: str, tmp_path: Path, store: dict[str, str]) -> None:
    urls = {f"{part.upper()}": f"s3://data/clicks/{part}/" for part in ("train", "valid")}
    environment = {"XDG_CACHE_HOME": str(tmp_path / "indexes"), **store}
    said = {}
    for kind in ("whole", "killed"):
        script = recipe(name, tmp_path / kind, **(urls if name == "parquet" else {}))
        if kind == "killed":
            (tmp_path / "kill.py").write_text(KILLED)
            code, _ = run(
                script.parent, str(tmp_path / "kill.py"), script.name, environment=environment
            )
            assert code == -signal.SIGKILL
        code, said[kind] = run(script.parent, script.name, environment=environment)
        assert code == 0
    assert_equal(tmp_path / "killed", tmp_path / "whole")
    assert said["killed"].splitlines()[-1] == said["whole"].splitlines()[-1]


@pytest.mark.full
def test_photographs_that_are_repeated_while_none_is_ready(tmp_path: Path) -> None:
    """No run is like another, but every photograph comes in every epoch, kill or not."""
    script = recipe("photographs", tmp_path / "auto", ECHO="auto", SAVE_EVERY=2)
    (tmp_path / "kill.py").write_text(KILLED)
    run(script.parent, str(tmp_path / "kill.py"), script.name, environment={})
    run(script.parent, script.name, environment={})
    steps, names = run_here(script)
    assert (steps, names["train"].counts.fresh_examples) == (0, 2 * 48)


# -- beside DataLoader


BESIDE = {name: RECIPES / "dataloader" / f"{name}.py" for name in SMALL}
# torchvision needs the operators of torch's build for CUDA, and cannot be imported beside another.
RUN_BESIDE = [name for name, script in BESIDE.items() if "torchvision" not in script.read_text()]


@pytest.mark.parametrize("name", sorted({*SMALL} - {*RUN_BESIDE}))
def test_what_stands_beside_it_compiles(name: str) -> None:
    compile(BESIDE[name].read_text(), BESIDE[name], "exec")


@pytest.mark.full
@pytest.mark.parametrize("name", RUN_BESIDE)
def test_what_stands_beside_it_runs(name: str, tmp_path: Path) -> None:
    script = BESIDE[name]
    ours = recipe(name, tmp_path / "data")
    known = re.findall(r"^([A-Z_]+) = ", script.read_text(), re.MULTILINE)
    constants = {key: value for key, value in SMALL[name].items() if key in known}
    if name == "parquet":
        constants |= {"TRAIN": str(ours.parent / "train"), "VALID": str(ours.parent / "valid")}
    (tmp_path / "data" / "beside").mkdir()
    smaller(script, tmp_path / "data" / "beside", {**constants, "WORKERS": 2})
    program = f"""
import sys, warnings
sys.path.insert(0, "beside")
warnings.simplefilter("ignore")
import {name} as beside
for loader in beside.train, beside.valid:
    print(sum(len(batch) > 1 for batch in loader))
"""
    done = python("-c", program, cwd=ours.parent, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert all(int(count) > 0 for count in done.stdout.split())


# -- the pages


def data_lines(script: Path) -> int:
    """Count the lines of a script that are about its data."""
    data = re.split(r"^# The (?:data|model)\b.*$", script.read_text(), flags=re.MULTILINE)[1]
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") for line in data.splitlines()
    )


@every_recipe
def test_its_page_counts_lines(name: str) -> None:
    page = (ROOT / "docs" / "recipes" / f"{name}.md").read_text()
    counted = re.search(r"data takes (\d+) lines here, (\d+) with `DataLoader`", page)
    assert counted is not None
    scripts = RECIPES / f"{name}.py", BESIDE[name]
    assert [int(found) for found in counted.groups()] == [*map(data_lines, scripts)]


def test_every_recipe_is_tested_and_its_page_shows_it() -> None:
    check_pages("recipes", {*SMALL})
    assert {*SMALL} == {script.stem for script in (RECIPES / "dataloader").glob("*.py")}


def check_pages(folder: str, names: set[str]) -> None:
    """Assert that each script of a folder of examples, and no other, is shown on its page."""
    scripts, pages = ROOT / "examples" / folder, ROOT / "docs" / folder
    assert names == {script.stem for script in scripts.glob("*.py")}
    assert names == {page.stem for page in pages.glob("*.md")}
    index = (ROOT / "docs" / "recipes.md").read_text()
    for name in names:
        assert f"({folder}/{name}.md)" in index
        script = (scripts / f"{name}.py").read_text()
        quote = f"<!-- from: examples/{folder}/{name}.py -->\n```python\n{script}```\n"
        assert quote in (pages / f"{name}.md").read_text(), name
