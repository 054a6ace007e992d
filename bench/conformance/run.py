"""Tests that others wrote for their loaders and states, run on stoker.

Each suite has an environment of its own (``bench/peers/NAME.txt``, made by ``--install``), comes at
a pinned commit from GitHub, or with its package, and is run as it is: ``torch_loader.py`` stands
where it imports torchdata's loader, the other modules here give it pipelines. A test that fails
needs a reason in ``reasons.toml``, and one with a reason must fail. Commands::

    python bench/conformance/run.py --install           # all suites
    python bench/conformance/run.py torch nodes         # two of them; the rows of others stay
    python bench/conformance/run.py --page write        # the table of docs/tested.md

Rows: ``results/conformance.json``. ``--github FOLDER`` takes ``FOLDER/OWNER/NAME`` for GitHub.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BENCH, ROOT = HERE.parent, HERE.parents[1]
sys.path.insert(0, str(BENCH))

from harness import RESULTS, Report, parser, report  # noqa: E402
from peers import environment  # noqa: E402

PAGE = ROOT / "docs" / "tested.md"
ROWS = RESULTS / "conformance.json"
TITAN = ("torchtitan", "tests/unit_tests", "tests/assets/tokenizer", "tests/assets/sft_test")
"""Without the sample of C4, which is large: tests of it are left out below."""
TORCHDATA = "meta-pytorch/data", "e640e6fc91792e1c92cdabb603ee5be63919934a", "test"
LOADER = {
    "torchdata/__init__.py": "",
    "torchdata/stateful_dataloader/__init__.py": "from torch_loader import *\n",
}
"""What stands in torchdata's place."""
REASONS = HERE / "reasons.toml"


@dataclass(frozen=True)
class Suite:
    """Tests of others.

    Attributes:
        says: their name on the page.
        peer: the environment.
        source: repository, commit and folder; none: the package ships them.
        tests: arguments of pytest, within the folder; none: ``chains.py`` with the suite's name.
        needs: folders to check out, if not that one.
        modules: what stands before the packages of the environment.
    """

    says: str
    peer: str
    source: tuple[str, str, str] | None = None
    tests: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()


SUITES = {
    "torch": Suite(
        "torch: `TestDataLoader`, torchdata's copy",
        "torchdata",
        TORCHDATA,
        ("stateful_dataloader/test_dataloader.py::TestDataLoader",),
        modules=tuple(LOADER.items()),
    ),
    "torchdata": Suite(
        "torchdata: `test_state_dict.py`",
        "torchdata",
        TORCHDATA,
        ("stateful_dataloader/test_state_dict.py",),
        modules=tuple(LOADER.items()),
    ),
    "nodes": Suite(
        "nodes: torchdata's `run_test_save_load_state`, six chains", "torchdata", TORCHDATA
    ),
    "grain": Suite("grain: `assert_equal_output_after_checkpoint`, 232 chains", "grain_chains"),
    "dcp": Suite("dcp: `torch.distributed.checkpoint` of plain states, six chains", "torchdata"),
    "lightning": Suite(
        "lightning: the test of resumed loops",
        "lightning",
        ("Lightning-AI/pytorch-lightning", "be98784a1a03581b7051a355ae1084fd352d7cea", "tests"),
        (
            *("-p", "lightning_loader", "-k-True-"),
            "tests_pytorch/loops/test_loops.py::test_fit_loop_save_and_restore_dataloaders",
        ),
    ),
    "accelerate": Suite(
        "accelerate: `StatefulDataLoaderTester`",
        "accelerate",
        ("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83", "tests"),
        ("test_data_loader.py::StatefulDataLoaderTester",),
        modules=tuple(LOADER.items()),
    ),
    "transformers": Suite(
        "transformers: the `Trainer`'s tests of resuming",
        "transformers",
        ("huggingface/transformers", "e2372ffabdf6da99364d3d053da7783acf5f623c", "."),
        (
            *("-p", "trainer_batches", "-kresum"),
            "tests/trainer/test_trainer.py::TrainerIntegrationTest",
        ),
        ("tests/trainer",),
    ),
    "torchtitan": Suite(
        "torchtitan: tests of its loader, over Grain",
        "torchtitan",
        ("pytorch/torchtitan", "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a", "."),
        (
            *("-p", "grain_batches", "-kloader or resumption"),
            *(
                f"tests/unit_tests/{module}.py"
                for module in ("components/data/test_grain_data", "test_dataset_checkpointing")
            ),
        ),
        TITAN,
    ),
    "torchtitan_torchdata": Suite(
        "torchtitan, before: the same, over torchdata",
        "torchtitan",
        ("pytorch/torchtitan", "c537bca68d96cbedcee6c22cfd693dfecdb54752", "."),
        (
            "-knot rejects and not round_trip and not trainer_config and not matching_sequences",
            *(
                f"tests/unit_tests/test_{test}"
                for test in (
                    "dataloader.py::TestParallelAwareDataloader",
                    "chat_dataset.py::TestChatDatasetCheckpointing",
                    "chat_dataset.py::TestInterleavedChatDataLoader",
                )
            ),
        ),
        TITAN,
        tuple(LOADER.items()),
    ),
}


def checked_out(suite: Suite, github: str, home: Path) -> Path:
    """Fetch folders of a repository at a commit; return the one with the tests."""
    assert suite.source is not None
    name, commit, folder = suite.source
    there = home / commit
    if not there.exists():

        def git(*words: str) -> None:
            subprocess.run(["git", "-C", str(there), *words], check=True)

        there.mkdir(parents=True)
        git("init", "-q")
        git("remote", "add", "origin", f"{github}/{name}")
        git("sparse-checkout", "set", *(suite.needs or [folder]))
        git("fetch", "-q", "--depth=1", "--filter=blob:none", "origin", commit)
        git("checkout", "-q", "FETCH_HEAD")
    return there / folder


def rows_of(name: str, python: str, github: str, home: Path) -> Iterator[dict[str, str]]:
    """Run a suite; return a row for each test."""
    suite = SUITES[name]
    folder = home if suite.source is None else checked_out(suite, github, home)
    before = home / f"before-{name}"
    for path, text in suite.modules:
        (before / path).parent.mkdir(parents=True, exist_ok=True)
        (before / path).write_text(text)
    paths = [before, HERE, ROOT / "src", folder, ROOT / "tests" / "other_package"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    if not suite.tests:
        command = [python, str(HERE / "chains.py"), name]
        told = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE).stdout
        yield from map(json.loads, told.splitlines())
        return
    found = home / f"{name}.xml"
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--timeout=90", "--tb=short"]
    command = [python, "-m", "pytest", *options, f"--junitxml={found}", *suite.tests]
    with (home / f"{name}.log").open("w") as log:
        done = subprocess.run(command, cwd=folder, env=variables, stdout=log, stderr=log)
    if done.returncode not in (0, 1):  # 1: tests failed
        raise SystemExit(
            f"{name}: pytest ended with {done.returncode}\n{Path(log.name).read_text()}"
        )
    is_one_class = "::" in suite.tests[-1]
    for case in ET.parse(found).iter("testcase"):
        test = str(case.get("name"))
        if not is_one_class:
            test = f"{str(case.get('classname')).rpartition('.')[2]}.{test}"
        ends = {child.tag: str(child.get("message")) for child in case}
        failed = ends.get("failure", ends.get("error", ""))
        outcome = "failed" if failed else "skipped" if "skipped" in ends else "passed"
        yield {"test": test, "outcome": outcome, "error": " ".join(failed.split())[:160]}


def reasons() -> list[dict[str, Any]]:
    """Return the entries of ``reasons.toml``: suite, tests (patterns), and why they fail."""
    entries: list[dict[str, Any]] = tomllib.loads(REASONS.read_text())["reason"]
    return entries


def is_told(entry: dict[str, Any], row: dict[str, Any]) -> bool:
    """Return whether an entry is about a row's test."""
    return entry["suite"] == row["suite"] and any(fnmatch(row["test"], p) for p in entry["tests"])


def evaluate(made: Report) -> None:
    """Count, and hold failures against their reasons."""
    entries = reasons()
    for name in dict.fromkeys(row["suite"] for row in made.rows):
        rows = [row for row in made.rows if row["suite"] == name]
        told = {row["test"] for row in rows if any(is_told(entry, row) for entry in entries)}
        failed = {row["test"] for row in rows if row["outcome"] == "failed"}
        made.say(f"{name}: " + ", ".join(f"{n} {word}" for word, n in counts(rows).items()))
        wrong = [f"  {'has no reason' if t in failed else 'passes'}: {t}" for t in failed ^ told]
        if wrong:
            made.say("\n".join(sorted(wrong)))
        made.expect(f"{name}: tests that differ from reasons.toml", len(wrong), 0, at_least=False)


def counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped."""
    outcomes = [row["outcome"] for row in rows]
    return {word: outcomes.count(word) for word in ("passed", "failed", "skipped")}


def page(rows: list[dict[str, Any]]) -> str:
    """Return what ``docs/tested.md`` says of the rows."""
    head = ["tests", "at", "pass", "fail", "skipped", "of other parts"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    others = tomllib.loads(REASONS.read_text())["other_parts"]
    for name, suite in SUITES.items():
        own = [row for row in rows if row["suite"] == name]
        loaders = [row for row in own if row["test"] not in others.get(name, [])]
        n = counts(loaders)
        of = f"{n['passed']} of {n['passed'] + n['failed']}"
        at = suite.source[1][:7] if suite.source else "the package"
        cells = [suite.says, at, of, n["failed"], n["skipped"], len(own) - len(loaders)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines.append("")
    for entry in reasons():
        failed = sum(is_told(entry, row) and row["outcome"] == "failed" for row in rows)
        tests = ", ".join(f"`{test}`" for test in entry["tests"])
        why = f"- {entry['suite']}, {failed}: {entry['why']} ({tests})"
        lines.append(textwrap.fill(why, 118, subsequent_indent="  ", break_long_words=False))
    return "\n".join(lines) + "\n"


def with_table(text: str, table: str) -> str:
    """Return the page with this table between its marks."""
    marks = "<!-- conformance -->\n", "<!-- end of conformance -->\n"
    marked = re.compile(f"{marks[0]}.*?{marks[1]}", re.DOTALL)
    return marked.sub(lambda _: marks[0] + "\n" + table + "\n" + marks[1], text)


def stored_rows() -> list[dict[str, Any]]:
    """Return the rows of earlier runs."""
    if not ROWS.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(ROWS.read_text())["rows"]
    return rows


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    options.add_argument("--install", action="store_true", help="make the environments anew")
    options.add_argument("--github", default="https://github.com", help="where repositories are")
    options.add_argument("--page", choices=["write", "check"], help="the table of docs/tested.md")
    arguments = options.parse_args()
    if arguments.page:
        text = with_table(PAGE.read_text(), page(stored_rows()))
        if arguments.page == "write":
            PAGE.write_text(text)
        elif text != PAGE.read_text():
            raise SystemExit("docs/tested.md has another table: run.py --page write")
        return
    chosen = arguments.suites or (["dcp"] if arguments.quick else list(SUITES))
    if arguments.install:
        for peer in sorted({SUITES[name].peer for name in chosen}):
            environment.install(peer)
    with report(str(HERE), arguments) as made, tempfile.TemporaryDirectory() as home:
        made.rows += [row for row in stored_rows() if row["suite"] not in chosen]
        for name in chosen:
            python = sys.executable if made.quick else environment.python(SUITES[name].peer)
            for row in rows_of(name, str(python), arguments.github, Path(home)):
                made.add(suite=name, **row)
            print(name, flush=True)


if __name__ == "__main__":
    main()
