"""README and docs: their Python runs, their commands parse, their links and outputs hold.

The ``python`` blocks of a page are one program, run in order in a folder of its own, warnings
being errors; lines keep their numbers, so that a traceback points into the page. A comment
``<!-- setup: ... -->`` holds Python that readers need not see. A ``text`` block behind a comment
``<!-- printed -->`` must have been printed by then, numbers and bars aside. A block
behind a comment ``<!-- from: PATH -->`` is quoted from that file.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import call
from scripts import PATH

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "stoker"
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "changelog.md"),
]
ABOUT = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md")]
# Their Python runs in test_recipes.py and test_language.py.
RECIPES = sorted([*(ROOT / "docs").glob("recipes/*.md"), *(ROOT / "docs").glob("language/*.md")])
RUN_LIMIT_S = 240

_BLOCK = re.compile(
    r"^<!--[ ]setup:\n (?P<setup>.*?) ^-->$"
    r"| (?P<printed>^<!--[ ]printed[ ]-->\n\n?)? ^```(?P<language>\w+)\n (?P<body>.*?) ^```$",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_QUOTE = re.compile(
    r"^<!--[ ]from:[ ](?P<path>\S+)[ ]-->\n ```\w+\n (?P<body>.*?) ^```$",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)#]*)(?:#(?P<heading>[^)]*))?\)")

SLOW = {  # what they train, or nothing that another page does not start as well
    "analysis-method.md",
    "analyze.md",
    "caching.md",
    "coming-from.md",
    "echoing.md",
    "epochs.md",
    "first-steps.md",
    "how-do-i.md",
    "images.md",
    "index.md",
    "loaders.md",
    "monitoring.md",
    "one-page.md",
    "ranks.md",
    "recipes.md",
    "remote.md",
    "resuming.md",
    "run.md",
    "sharing.md",
    "tested.md",
}
HEAVY = {  # what they import
    "frameworks.md",
    "sources.md",
}

every_page = pytest.mark.parametrize("page", PAGES + ABOUT + RECIPES, ids=lambda page: page.name)


def _program(page: Path) -> str:
    """Return the page's Python, every line where the page has it."""
    text = page.read_text()
    lines = [""] * (text.count("\n") + 1)
    for found in _BLOCK.finditer(text):
        group = "setup" if found["language"] is None else "body"
        if found["language"] in (None, "python"):
            first = text.count("\n", 0, found.start(group))
            for number, line in enumerate(found[group].splitlines(), first):
                lines[number] = line
    return "\n".join(lines) + "\n"


def _blocks(page: Path, language: str) -> list[re.Match[str]]:
    return [m for m in _BLOCK.finditer(page.read_text()) if m["language"] == language]


def _without_numbers(text: str) -> list[str]:
    """Return the lines of a text without what differs between two runs."""
    text = re.sub(r" *█* *(<- bottleneck)?$", "", text, flags=re.MULTILINE)
    # On a slow machine only:
    text = re.sub(r"^  (their time|threads wait for each other): .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\d[\d,.]*( [KMG]iB| B)?", "0", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.full] * (p.name in SLOW | HEAVY)) for p in PAGES],
    ids=lambda page: page.name,
)
def test_python_runs_and_prints_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    runs = len(_blocks(page, "python"))
    assert 0 < runs == page.read_text().count("```python"), "a page shows something that runs"
    script = tmp_path / f"page_{page.stem}.py"  # jax.py would be taken for jax
    # Feeds are known by name to all of the machine: another run's are not these.
    # Pages show no main guard, which Python 3.14 needs to start processes unless it forks.
    forks = "import multiprocessing; multiprocessing.set_start_method('fork'); del multiprocessing"
    program = _program(page).replace('"docs-', f'"docs-{os.getpid()}-')
    assert program.startswith("\n"), "the first line of a page is its title"
    script.write_text(forks + program)
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PATH, "PYTHONIOENCODING": "utf-8", "COLUMNS": "100"},
        capture_output=True,
        encoding="utf-8",
        timeout=RUN_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    printed = "\n".join(_without_numbers(done.stdout + done.stderr))
    for block in _blocks(page, "text"):
        if block["printed"]:
            assert "\n".join(_without_numbers(block["body"])) in printed, printed


@every_page
def test_commands_parse(page: Path) -> None:
    for block in _blocks(page, "bash"):
        for line in block["body"].splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["stoker"]:
                # Behind a script, --help is the script's.
                at = 2 if words[1] in ("analyze", "gate", "run") else len(words)
                result = call(*words[1:at], "--help", *words[at:])
                assert result.code == 0, f"{line}: {result}"
            elif words and "/" in words[0]:
                assert os.access(ROOT / words[0], os.X_OK), line


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for found in _LINK.finditer(page.read_text()):
        target = page.parent / found["target"] if found["target"] else page
        assert target.exists(), found[0]
        if found["heading"]:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
            assert found["heading"] in anchors, found[0]


@every_page
def test_quotes_are_what_the_files_say(page: Path) -> None:
    for quote in _QUOTE.finditer(page.read_text()):
        assert _flush_left(quote["body"]) in _flush_left((ROOT / quote["path"]).read_text()), quote


def _flush_left(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


def test_the_skill_for_assistants_is_the_page() -> None:
    page = (ROOT / "docs" / "one-page.md").read_text()
    page = re.sub(r"<!-- setup:.*?-->\n\n", "", page, flags=re.DOTALL)
    page = re.sub(r"\]\((?!https?:)([^)]+)\)", r"](../../docs/\1)", page)
    skill = (ROOT / "skills" / "stoker" / "SKILL.md").read_text()
    assert skill.partition("---\n\n")[2] == page, "copy the page, without its set-up"
