"""Recipes for language models: under torchrun each learns, and goes on with other ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_recipes import check_pages, smaller

from s3_bucket import serving
from scripts import TIMEOUT_S
from token_files import write_megatron

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "language"
MODEL = {"WIDTH": 32, "LAYERS": 1, "SAVE_EVERY": 10}
SMALL: dict[str, dict[str, Any]] = {
    "pretraining": {"BATCH": 8, "LENGTH": 16, "VOCABULARY": 16, "END": 15},
    "streaming": {"CORPUS": "s3://data/corpus/", "BATCH": 8, "LENGTH": 32},
    "chat": {"BATCH": 2, "LENGTH": 64, "VOCABULARY": 300},
    "preferences": {"TOKENS": 256, "LENGTH": 64},
    "images_and_text": {"COST": 400, "LENGTH": 128, "PATCH": 4},
}


def pretraining(folder: Path) -> None:
    """Write tokens that go round in each document."""
    draw = np.random.default_rng(0)
    documents = [[*(np.arange(draw.integers(4, 40)) % 7).tolist(), 15] for _ in range(100)]
    np.concatenate(documents[:60]).astype(np.uint16).tofile(folder / "web-0.bin")
    write_megatron(folder / "books", [[document] for document in documents[60:]], 8, "u2")


def streaming(folder: Path) -> None:
    """Write texts to Parquet; the bucket serves the files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for part in range(2):
        texts = ["the same words again and again " * (1 + n % 3) for n in range(120)]
        table = pa.table({"text": texts})
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=4)


def _json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def chat(folder: Path) -> None:
    said = [("two and two?", "four"), ("a colour?", "blue"), ("the capital?", "Rome")]
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in said * 12
    ]
    _json_lines(folder / "chats.jsonl", rows)


def preferences(folder: Path) -> None:
    rows = [
        {"prompt": f"say {n % 5}: ", "chosen": "yes" * (1 + n % 4), "rejected": "no" * (1 + n % 3)}
        for n in range(60)
    ]
    _json_lines(folder / "pairs.jsonl", rows)


def images_and_text(folder: Path) -> None:
    from PIL import Image

    rows = []
    for n in range(40):
        colour, shape = [("red", (255, 0, 0)), ("blue", (0, 0, 255))][n % 2], (8 + 4 * (n % 3), 12)
        Image.new("RGB", shape, colour[1]).save(folder / f"{n}.png")
        rows.append({"image": f"{n}.png", "text": f"it is {colour[0]}"})
    _json_lines(folder / "captions.jsonl", rows)


def losses(
    folder: Path, name: str, ranks: int, steps: int, env: dict[str, str]
) -> dict[int, float]:
    """Train under torchrun; return the loss that each save was told with."""
    smaller(SCRIPTS / f"{name}.py", folder, {**MODEL, **SMALL[name], "STEPS": steps})
    running = subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(ranks), f"{name}.py",
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, errors = running.communicate(timeout=TIMEOUT_S)
    finally:
        if running.poll() is None:  # ranks outlive a torchrun that is killed alone
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 0, errors
    told = re.findall(r"step (\d+): loss (\S+)", said)
    return {int(step): float(loss) for step, loss in told}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Serve the corpus from an object store; yields the environment of its clients."""
    streaming(tmp_path)
    files = {f"corpus/{file.name}": file.read_bytes() for file in tmp_path.glob("*.parquet")}
    with serving(files) as bucket:
        yield bucket.environment


@pytest.mark.full
@pytest.mark.parametrize("name", SMALL)
def test_it_learns_and_goes_on_with_other_ranks(
    name: str, tmp_path: Path, store: dict[str, str]
) -> None:
    if name != "streaming":
        globals()[name](tmp_path)
    (tmp_path / "training.py").write_text((SCRIPTS / "training.py").read_text())
    first = losses(tmp_path, name, 2, 20, store)
    later = losses(tmp_path, name, 1, 60, store)
    assert [*first, *later] == [10, 20, 30, 40, 50, 60]
    assert later[60] < 0.8 * first[10]


def test_every_recipe_is_tested_and_its_page_shows_it() -> None:
    check_pages("language", {*SMALL, "training"})
