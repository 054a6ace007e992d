"""The documentation site: it builds without a warning, and its reference has all public names."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import stoker
import stoker.images
import stoker.sources
import stoker.stages
import stoker.types
from command_line import python

ROOT = Path(__file__).parents[2]
PUBLIC = {
    *(f"stoker.{name}" for name in stoker.__all__ if name != "__version__"),
    *(f"stoker.images.{name}" for name in stoker.images.__all__),
    *(f"stoker.sources.{name}" for name in stoker.sources.__all__),
    *(f"stoker.stages.{name}" for name in stoker.stages.__all__),
    *(f"stoker.types.{name}" for name in stoker.types.__all__),
}
# Modules that have a page; a type alias; names with two addresses.
ELSEWHERE = {
    *("stoker.collate", "stoker.images", "stoker.testing", "stoker.types"),
    *("stoker.sources.Access", "stoker.sources.Indices"),
    *("stoker.sources.Source", "stoker.stages.Stage"),
}


def test_the_reference_has_each_public_name_once() -> None:
    listed: Counter[str] = Counter()
    for page in (ROOT / "docs" / "api").glob("*.md"):
        module = "stoker"
        for kind, name in re.findall(r"^\.\. (\w+):: ([\w.]+)", page.read_text(), re.MULTILINE):
            if kind == "currentmodule":
                module = name
            else:
                listed[f"{module}.{name}"] += 1
    assert sorted((PUBLIC - ELSEWHERE) - set(listed)) == [], "add them to docs/api"
    assert [name for name, times in listed.items() if times > 1] == []


def test_each_public_function_has_an_example() -> None:
    text = (ROOT / "docs" / "api" / "examples.py").read_text()
    shown = re.findall(r"^# %% (\S+)$", text, re.MULTILINE)
    functions = {name: _find(name) for name in PUBLIC}
    functions |= {f"stoker.Pipeline.{name}": f for name, f in vars(stoker.Pipeline).items()}
    others = ("stoker.collate.pad", "stoker.collate.varlen", "stoker.testing.equal")
    functions |= {name: _find(name) for name in others}
    functions = {
        name: function
        for name, function in functions.items()
        if inspect.isfunction(function) and not name.rpartition(".")[2].startswith("_")
    }
    without = {
        name
        for name, function in functions.items()
        if not re.search("Examples?:|::", inspect.getdoc(function) or "")
    }
    assert sorted(without - set(shown)) == [], "add them to docs/api/examples.py"
    assert sorted(set(shown) - set(functions) - {"stoker.testing.check_threads"}) == []
    assert len(shown) == len(set(shown))


def _find(name: str) -> object:
    found: object = stoker
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


@pytest.mark.full
def test_the_examples_run(tmp_path: Path) -> None:
    examples = ROOT / "docs" / "api" / "examples.py"
    done = python("-W", "error", examples, cwd=tmp_path, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr


def test_llms_txt_has_each_page_of_the_site() -> None:
    docs = ROOT / "docs"
    listed = re.findall(
        r"^- \[(.*)\]\((.*)\.html\): ", (docs / "llms.txt").read_text(), re.MULTILINE
    )
    pages = {page.stem for page in docs.glob("*.md")} - {"index"} | {"api/index"}
    assert sorted(name for _, name in listed) == sorted(pages)
    for title, name in listed:
        assert (docs / f"{name}.md").read_text().startswith(f"# {title}\n"), name


@pytest.mark.full
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    words = ["--builder", "html", "--fail-on-warning", "--keep-going", "--quiet", "-d"]
    folders = tmp_path / "trees", ROOT / "docs", tmp_path
    done = python("-m", "sphinx", *words, *folders, KERAS_BACKEND="torch")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "searchindex.js").stat().st_size > 100_000
    reference = "".join(page.read_text() for page in (tmp_path / "api").glob("*.html"))
    missing = [name for name in sorted(PUBLIC - ELSEWHERE) if f'id="{name}"' not in reference]
    assert missing == []
