"""Documents out of token files: by a separator, or by Megatron's index."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from backends import backend  # noqa: F401 - for every test here
from stoker.testing import check_resume
from strategies import few, stream
from token_files import write_llm_c, write_megatron

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
EOT = 7


def cut(tokens: list[int], separator: int) -> list[list[int]]:
    """Cut documents the slow way."""
    found: list[list[int]] = [[]]
    for token in tokens:
        found[-1].append(token)
        if token == separator:
            found.append([])
    return [document for document in found if len(document) > 1]


@same_folder
@given(
    files=st.lists(st.lists(st.integers(0, 8), max_size=40), min_size=1, max_size=3),
    kind=st.sampled_from(["uint16", ">i4", ".npy", "llm.c"]),
)
def test_a_separator_ends_documents(tmp_path: Path, files: list[list[int]], kind: str) -> None:
    files = [[*tokens, EOT, *tokens, 1, 2] for tokens in files]
    paths = [tmp_path / f"{n}{'.npy' if kind == '.npy' else '.bin'}" for n in range(len(files))]
    for path, tokens in zip(paths, files, strict=True):
        if kind == ".npy":
            np.save(path, np.array(tokens, np.uint8))
        elif kind == "llm.c":
            write_llm_c(path, tokens, "<u4" if len(tokens) % 2 else "<u2")
        else:
            np.array(tokens, kind).tofile(path)
    dtype = kind if kind in ("uint16", ">i4") else None
    source = stoker.from_tokens([*map(str, paths)], dtype=dtype, separator=EOT)
    expected = [document for tokens in files for document in cut(tokens, EOT)]
    found = list(source)
    assert [document.tolist() for document in found] == expected
    assert {document.dtype for document in found} == {np.dtype(np.int64)}
    assert source.sizes().tolist() == [*map(len, expected)]
    assert source.sizes(lambda document: len(document)).tolist() == [*map(len, expected)]


@same_folder
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 100), max_size=6), max_size=3), min_size=1, max_size=9
    ),
    kind=st.sampled_from([(1, "u1"), (2, "i1"), (3, "i2"), (4, "i4"), (5, "i8"), (8, "u2")]),
)
def test_the_index_of_megatron_tells_documents(
    tmp_path: Path, documents: list[list[list[int]]], kind: tuple[int, str]
) -> None:
    documents = [*documents, [[1, 2, 3]]]
    for name in ("a", "b"):
        write_megatron(tmp_path / name, documents, *kind)
    expected = [[*itertools.chain(*sequences)] for sequences in documents]
    source = stoker.from_tokens([str(tmp_path / "a.idx"), str(tmp_path / "b.idx")])
    found = [document.tolist() for document in source]
    assert found == 2 * [tokens for tokens in expected if len(tokens) > 1]
    assert source.sizes().tolist() == [*map(len, found)]
    assert "a.bin from token 0 on" in source.name_of(0) or len(expected[0]) < 2


def corpus(folder: Path, count: int = 60) -> tuple[str, list[int]]:
    """Write documents whose tokens tell which they are."""
    draw = np.random.default_rng(0)
    each = [np.append(np.full(draw.integers(1, 9), 10 + n), EOT) for n in range(count)]
    np.concatenate(each).astype(np.uint16).tofile(folder / "corpus.bin")
    return str(folder / "corpus.bin"), [len(document) for document in each]


def test_sizes_by_number_serve_whatever_plans(tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing is read for batches by tokens and for ranks of equal work."""
    path, sizes = corpus(tmp_path)
    source = stoker.from_tokens(path, dtype="uint16", separator=EOT, seed=0)
    reads: list[int] = []
    kind = type(source.chain.source)
    monkeypatch.setattr(kind, "example", lambda *_: reads.append(1))
    planned = source.shuffle().batch_by_tokens(32, len, collate=stoker.collate.pad(0))
    balanced = source.shuffle().shard(rank=0, world_size=2).balance(len)
    assert (len(balanced), reads) == (30, [])
    monkeypatch.undo()
    assert sum(int(batch.lengths.sum()) for batch in planned) == sum(sizes)
    assert all(batch.values.size <= 32 for batch in planned)


@settings(few(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(3, 20), batch=st.integers(1, 4))
def test_packed_it_resumes_anywhere_and_is_the_same_for_any_workers(
    tmp_path: Path, length: int, batch: int
) -> None:
    path, _ = corpus(tmp_path)

    def build(workers: int = 0) -> stoker.Pipeline:
        source = stoker.from_tokens(path, dtype="uint16", separator=EOT, seed=1)
        return source.shuffle().pack(length).batch(batch).workers(workers)

    check_resume(build, every=5)
    assert stream(build(0)) == stream(build(3))


def test_documents_at_urls(tmp_path: Path) -> None:
    import fsspec

    write_megatron(tmp_path / "a", [[[1, 2]], [[3, 4, 5], [6]]], 8, "u2")
    memory = fsspec.filesystem("memory")
    for name in ("a.idx", "a.bin"):
        memory.pipe(f"/documents/{name}", (tmp_path / name).read_bytes())
    try:
        by_index = stoker.from_tokens("memory://documents/*.idx")
        by_token = stoker.from_tokens("memory://documents/a.bin", dtype="uint16", separator=2)
        assert [d.tolist() for d in by_index] == [[1, 2], [3, 4, 5, 6]]
        assert [d.tolist() for d in by_token] == [[1, 2], [3, 4, 5, 6]]
    finally:
        memory.rm("/documents", recursive=True)


def test_what_is_no_file_of_documents(tmp_path: Path) -> None:
    path, _ = corpus(tmp_path)
    write_megatron(tmp_path / "a", [[[1, 2]]], 8, "u2")
    index = str(tmp_path / "a.idx")
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (path, {"dtype": "uint16"}, ValueError, "where do the documents in .* end"),
        (path, {"dtype": "uint16", "separator": 9}, ValueError, "no token 9, the separator"),
        (path, {"dtype": "uint16", "separator": "7"}, TypeError, "a whole number"),
        (path, {"separator": 7}, TypeError, "what are the tokens"),
        (path, {"dtype": "uint16", "stride": 7}, TypeError, "give their length"),
        (index, {"separator": 7}, ValueError, "leave length and separator out"),
        (index, {"length": 1, "dtype": "uint8"}, ValueError, "Megatron's index"),
        ([index, path], {}, TypeError, "what are the tokens"),
    ]
    for paths, arguments, kind, says in cases:
        with pytest.raises(kind, match=says):
            stoker.from_tokens(paths, **arguments)
    whole = (tmp_path / "a.idx").read_bytes()
    for content, says in [
        (whole[:40], "truncated"),
        (whole[:20], "truncated"),
        (whole[:9] + b"\2" + whole[10:], "no index"),
        (whole[:34] + struct.pack("<i", 9) + whole[38:], "does not fit"),
        (whole[:34] + struct.pack("<i", 1) + whole[38:], "has no documents"),
    ]:
        (tmp_path / "a.idx").write_bytes(content)
        with pytest.raises(ValueError, match=says):
            stoker.from_tokens(index)
    (tmp_path / "b.idx").write_bytes(whole)
    with pytest.raises(FileNotFoundError, match=r"b\.bin"):
        stoker.from_tokens(str(tmp_path / "b.idx"))
    write_llm_c(tmp_path / "c.bin", [1, 2, EOT])
    (tmp_path / "c.bin").write_bytes((tmp_path / "c.bin").read_bytes()[:-2])
    with pytest.raises(ValueError, match="its header says 3 tokens"):
        stoker.from_tokens(str(tmp_path / "c.bin"), separator=EOT)


def test_a_mixture_knows_the_lengths_of_its_parts(tmp_path: Path) -> None:
    path, sizes = corpus(tmp_path)
    part = stoker.from_tokens(path, dtype="uint16", separator=EOT).shuffle()
    assert stoker.mix([part, part]).sizes().tolist() == sizes * 2
    with pytest.raises(ValueError, match="measure its parts"):
        stoker.mix([part.map(np.negative), part]).sizes()
