"""Relative paths: a pipeline reads the files that they meant when it was built."""

from __future__ import annotations

import pickle
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stoker

SOURCES: dict[str, Any] = {
    "folder": lambda at: stoker.from_folder(f"{at}classes"),
    "pattern": lambda at: stoker.from_files(f"{at}classes/*/*.png"),
    "list": lambda at: stoker.from_files([f"{at}classes/c/1.png", f"{at}classes/d/2.png"]),
    "text": lambda at: stoker.from_text(f"{at}rows.jsonl"),
    "jsonl": lambda at: stoker.from_jsonl([f"{at}rows.jsonl"]),
    "csv": lambda at: stoker.from_csv(f"{at}rows.csv"),
    "tar": lambda at: stoker.from_tar(f"{at}*.tar"),
    "tokens": lambda at: stoker.from_tokens(f"{at}t.npy", 7),
    "parquet": lambda at: stoker.from_parquet(f"{at}rows.parquet"),
    "arrays": lambda at: stoker.from_arrays(np.load(f"{at}t.npy", mmap_mode="r")),
    "huggingface": lambda at: stoker.from_huggingface(
        datasets.Dataset.from_dict({"image": [f"{at}classes/c/1.png"]}).cast_column(
            "image", datasets.Image()
        )
    ),
}


@pytest.mark.filterwarnings("ignore:.*fits in the page cache")
@pytest.mark.parametrize("kind", SOURCES)
def test_relative_paths_mean_what_they_meant_when_the_pipeline_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "there" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "there" / "data")
    for name in ("c/1.png", "d/2.png"):
        Path("classes", name).parent.mkdir(parents=True, exist_ok=True)
        Path("classes", name).write_bytes(name.encode())
    Path("rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    Path("rows.csv").write_text("n\n1\n2\n")
    with tarfile.open("a.tar", "w") as tar:
        tar.add("classes/c/1.png", "1.png")
    np.save("t.npy", np.arange(64))
    pq.write_table(pa.table({"n": [1, 2]}), "rows.parquet")
    monkeypatch.chdir("..")
    here = SOURCES[kind]("data/")
    before = pickle.dumps(list(here))
    built = SOURCES[kind]("data/")
    monkeypatch.chdir(tmp_path)
    assert pickle.dumps(list(built)) == before
    assert pickle.dumps(list(built.cache("1MiB"))) == before
