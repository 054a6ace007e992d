"""Tar shards and zip archives."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shards import pack, pairs

import stoker
from stoker.testing import check_resume
from strategies import few, stream

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let indexes lie in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "stoker" / "indexes"


def grouped(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """Group files the slow way."""
    examples: dict[str, dict[str, Any]] = {}
    for name, data in files.items():
        folder, slash, last = name.rpartition("/")
        stem, _, field = last.partition(".")
        key = folder + slash + stem
        examples.setdefault(key, {"__key__": key})[field.lower()] = data
    return list(examples.values())


parts = st.text(st.sampled_from("abÅ0-"), min_size=1, max_size=6)
names = st.builds(
    "{}{}.{}".format,
    st.sampled_from(["", "x/", "x.y/z/", "a" * 90 + "/", "long/" * 60]),
    parts,
    st.sampled_from(["jpg", "cls", "seg.png", "json"]),
)


@same_folder
@given(
    files=st.dictionaries(names, st.binary(max_size=1200), min_size=1, max_size=12),
    form=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, "zip"]),
)
def test_files_are_grouped_wherever_they_lie(
    tmp_path: Path, files: dict[str, bytes], form: Any
) -> None:
    path = tmp_path / ("shard.zip" if form == "zip" else "shard.tar")
    shard = pack(path, files, form)
    os.utime(shard, ns=(0, hash(frozenset(files.items())) & 0xFFFFFFFF))
    assert list(stoker.from_tar(shard)) == grouped(files)
    assert list(stoker.from_tar(shard)) == grouped(files)  # by the index that was kept


def test_what_is_no_field_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "shard.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in [
            ("d", tarfile.DIRTYPE),
            ("d/1.jpg", tarfile.FIFOTYPE),
            ("latest", tarfile.SYMTYPE),
        ]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "elsewhere"
            tar.addfile(info)
        for name in ("readme", ".hidden.jpg", "__MACOSX/1.jpg", "d/1.JPG"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    assert list(stoker.from_tar(path)) == [{"__key__": "d/1", "jpg": b"x"}]


def linked(path: Path, links: dict[str, tuple[bytes, str]]) -> Path:
    """Make an archive of one file, ``./d/1.jpg``, and links."""
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("./d/1.jpg")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"image"))
        for name, (kind, target) in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)
    return path


def test_links_are_the_files_that_they_lead_to(tmp_path: Path) -> None:
    links = {
        "./d/2.jpg": (tarfile.LNKTYPE, "./d/1.jpg"),
        "./e/3.jpg": (tarfile.SYMTYPE, "4.jpg"),
        "./e/4.jpg": (tarfile.SYMTYPE, "../d/2.jpg"),
    }
    shard = linked(tmp_path / "a.tar", links)
    for _ in range(2):  # the second time by the index that was kept
        found = {each["__key__"]: each["jpg"] for each in stoker.from_tar(shard)}
        assert found == dict.fromkeys(["./d/1", "./d/2", "./e/3", "./e/4"], b"image")
    os.truncate(shard, 1024 + 100)
    with pytest.raises(ValueError, match="truncated"):
        stoker.from_tar(shard)


def test_links_to_elsewhere_are_refused(tmp_path: Path) -> None:
    for kind, target in [
        (tarfile.LNKTYPE, "2.jpg"),
        (tarfile.SYMTYPE, "/data/2.jpg"),
        (tarfile.SYMTYPE, "3.jpg"),
    ]:
        shard = linked(tmp_path / "a.tar", {"3.jpg": (kind, target)})
        with pytest.raises(ValueError, match=rf"'3\.jpg' is a link to '{target}'.*--dereference"):
            stoker.from_tar(shard)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as zipped:
        zipped.writestr("1.jpg", b"x")
        info = zipfile.ZipInfo("2.jpg")
        info.create_system, info.external_attr = 3, 0o120777 << 16  # as ``zip -y`` does
        zipped.writestr(info, "1.jpg")
    with pytest.raises(ValueError, match=r"'2\.jpg' is a link"):
        stoker.from_tar(tmp_path / "a.zip")


def test_only_the_fields_that_are_asked_for(tmp_path: Path) -> None:
    shard = pack(tmp_path / "a.tar", pairs(0, 3))
    train = stoker.from_tar(shard, ["cls"]).map(int, on="cls").batch(3)
    (batch,) = train
    assert batch["cls"].tolist() == [0, 1, 2]
    assert batch["__key__"] == ["000000", "000001", "000002"]
    with pytest.raises(LookupError, match="no field 'jpg'"):
        stoker.from_tar(shard, ["cls"]).map(len, on="jpg")
    with pytest.raises(ValueError, match="no field 'png'; it has 'jpg', 'cls'"):
        stoker.from_tar(shard, ["png"])
    wrong: list[Any] = ["cls", 3, [], ["jpg", 1], ["jpg", "jpg"]]
    for fields in wrong:
        with pytest.raises(
            (ValueError, TypeError), match=r"fields (must be a list of names|has 'jpg' twice)"
        ):
            stoker.from_tar(shard, fields)


@settings(few(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), kind=st.booleans())
def test_resumes_anywhere_and_is_the_same_for_any_workers(
    tmp_path: Path, counts: list[int], kind: bool
) -> None:
    suffix = "zip" if kind else "tar"
    shards = [
        pack(tmp_path / f"{n}-{count}.{suffix}", pairs(10 * n, count))
        for n, count in enumerate(counts)
    ]

    def build(workers: int = 0) -> stoker.Pipeline:
        return stoker.from_tar(shards, seed=3).shuffle().batch(4).workers(workers)

    check_resume(build)
    assert stream(build(0)) == stream(build(3))


def test_archives_behind_one_another_are_one_shard(tmp_path: Path) -> None:
    first = Path(pack(tmp_path / "0.tar", pairs(0, 3))).read_bytes()
    second = Path(pack(tmp_path / "1.tar", pairs(3, 2))).read_bytes()
    both = tmp_path / "both.tar"
    both.write_bytes(first + second)
    examples = list(stoker.from_tar(both))
    assert examples == grouped(pairs(0, 5))
    for behind in (b"no header" * 100, b"x"):
        both.write_bytes(first + behind)
        assert list(stoker.from_tar(both)) == examples[:3]
    both.write_bytes(first + second[:520])
    with pytest.warns(UserWarning, match="truncated"):
        assert len(list(stoker.from_tar(both, max_errors=1))) == 3


def test_a_folder_for_indexes_that_is_relative_or_none_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = pack(tmp_path / "a.tar", pairs(0, 3))
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(stoker.from_tar(shard)) == 3
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert len(stoker.from_tar(shard)) == 3
    assert not list((tmp_path / "here").iterdir())
    assert (tmp_path / "home/.cache/stoker/indexes").is_dir()


def test_an_index_is_kept_until_the_shard_changes(tmp_path: Path, cache_folder: Path) -> None:
    shard = pack(tmp_path / "a.tar", pairs(0, 3))
    assert len(stoker.from_tar(shard)) == 3
    (kept,) = set(cache_folder.iterdir()) - {cache_folder / ".swept"}
    before = kept.stat().st_mtime_ns
    assert len(stoker.from_tar(shard)) == 3
    assert kept.stat().st_mtime_ns == before
    pack(tmp_path / "a.tar", pairs(0, 5))
    assert len(stoker.from_tar(shard)) == 5
    (kept,) = set(cache_folder.iterdir()) - {cache_folder / ".swept"}
    for damaged in (b"", kept.read_bytes()[:-1], b"x" * 100):
        kept.write_bytes(damaged)
        assert len(stoker.from_tar(shard)) == 5
    assert not [file for file in cache_folder.iterdir() if file.name.startswith(".new")]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_changes_under_its_index(tmp_path: Path, workers: int) -> None:
    shard = pack(tmp_path / "a.tar", pairs(0, 40))
    train = stoker.from_tar(shard).batch(2).workers(workers)
    pack(tmp_path / "a.tar", pairs(0, 41))
    says = r"a\.tar/000000.*'jpg' of example '000000': .*a\.tar has changed.*build it again"
    with pytest.raises(stoker.StageError, match=says):
        next(iter(train))


def test_truncated_shards(tmp_path: Path) -> None:
    shard = pack(tmp_path / "a.tar", {f"{n}.bin": bytes([n]) * 1000 for n in range(6)})
    whole = Path(shard).read_bytes()
    os.truncate(shard, 512 + 3 * 1536 + 700)
    says = r"a\.tar is truncated: it ends .* '3\.bin'.*example '3' is not all there.*max_errors="
    with pytest.raises(ValueError, match=says):
        stoker.from_tar(shard)
    with pytest.warns(UserWarning, match="what comes behind is left out"):
        train = stoker.from_tar(shard, max_errors=1)
    assert [example["__key__"] for example in train] == ["0", "1", "2"]
    with pytest.warns(UserWarning, match="left out"):
        train = stoker.from_tar(shard, max_errors="0.1%")
    with pytest.raises(stoker.TooManyErrors, match=r"'bin' of example '3': .*a\.tar is truncated"):
        list(train)
    Path(shard).write_bytes(whole[:3072] + b"garbage!" * 64 + whole[3584:])
    with pytest.raises(ValueError, match=r"a\.tar is damaged: there is no header at byte 3,072"):
        stoker.from_tar(shard)
    Path(shard).write_bytes(whole[:600] + whole[3_000:3_100])
    with pytest.raises(ValueError, match="truncated"):
        stoker.from_tar(shard)


def test_truncated_and_damaged_zips(tmp_path: Path) -> None:
    shard = pack(tmp_path / "a.zip", {f"{n}.bin": bytes(range(200)) for n in range(4)})
    whole = Path(shard).read_bytes()
    os.truncate(shard, 300)
    with pytest.raises(ValueError, match=r"a\.zip is truncated or damaged"):
        stoker.from_tar(shard)
    at = whole.index(b"1.bin") + 5
    Path(shard).write_bytes(whole[:at] + b"\xff" * 50 + whole[at + 50 :])
    with pytest.raises(stoker.StageError, match=r"'bin' of example '1': .*damaged"):
        list(stoker.from_tar(shard))


def test_a_missing_field_names_shard_and_key_or_is_skipped(tmp_path: Path) -> None:
    files = pairs(0, 6)
    del files["000003.cls"]
    shard = pack(tmp_path / "a.tar", files)
    says = r"a\.tar: example '000003' has no 'cls', only 'jpg'"
    with pytest.raises(stoker.StageError, match=says) as caught:
        list(stoker.from_tar(shard, ["jpg", "cls"]))
    assert caught.value.path == f"{shard}/000003"
    assert len(list(stoker.from_tar(shard, ["jpg", "cls"], max_errors=1))) == 5


def test_what_is_refused(tmp_path: Path) -> None:
    def made(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    tar = Path(pack(tmp_path / "a.tar", pairs(0, 2))).read_bytes()
    with tarfile.open(tmp_path / "twice.tar", "w") as twice:
        for _ in range(2):
            twice.addfile(tarfile.TarInfo("1.jpg"))
    with zipfile.ZipFile(tmp_path / "lzma.zip", "w", zipfile.ZIP_LZMA) as odd:
        odd.writestr("1.jpg", b"x")
    wrong: list[tuple[str, Any]] = [
        (r"a\.tar\.gz is compressed \(gzip\).*Decompress it \(gzip -d\)",
         [made("b.tar", tar), made("a.tar.gz", gzip.compress(tar))]),
        (r"Decompress it \(xz -d\)", made("a.tar.xz", lzma.compress(tar))),
        (r"Decompress it \(zstd -d\)", made("a.tar.zst", b"\x28\xb5\x2f\xfd" + tar)),
        (r"is not a tar archive", made("text.tar", b"hello" * 300)),
        (r"is empty", made("empty.tar", b"")),
        (r"has no examples", made("none.tar", bytes(1024))),
        (r"example '1' has 'jpg' twice", tmp_path / "twice.tar"),
        (r"'1.jpg' is encrypted, or compressed by other", tmp_path / "lzma.zip"),
    ]  # fmt: skip
    for says, path in wrong:
        with pytest.raises(ValueError, match=says):
            stoker.from_tar(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        stoker.from_tar(tmp_path / "nowhere-{0..3}.tar")
    with pytest.raises(IsADirectoryError, match=r"is a folder: give the files in it, as .*/\*"):
        stoker.from_tar(tmp_path)


def test_what_has_no_order_is_no_list_of_shards(tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    pack(shard, pairs(0, 2))
    wrong: list[Any] = [tmp_path.glob("*.tar"), {shard}, {shard: 1}, bytes(shard), None, 3]
    for shards in wrong:
        for source in (stoker.from_tar, stoker.from_parquet):
            with pytest.raises(TypeError, match="takes a path, a pattern, or a list of them, not"):
                source(shards)
    with pytest.raises(TypeError, match=r"not generator: give sorted\(\.\.\.\) of it"):
        stoker.from_tar(path for path in [shard])  # type: ignore[arg-type]


def test_a_shard_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "a{1,2}").mkdir()
    shard = tmp_path / "a{1,2}" / "[x]*.tar"
    pack(shard, pairs(0, 2))
    assert len(stoker.from_tar(shard)) == 2


# -- the folder of indexes


def idle(file: Path, days: float) -> None:
    then = time.time() - days * 86_400
    os.utime(file, (then, then))


def test_indexes_that_nobody_needs_are_swept(tmp_path: Path, cache_folder: Path) -> None:
    def made(name: str) -> tuple[str, Path]:
        before = set(cache_folder.iterdir()) if cache_folder.exists() else set()
        shard = pack(tmp_path / name, pairs(0, 3))
        stoker.from_tar(shard)
        (new,) = {file for file in cache_folder.iterdir() if file.name != ".swept"} - before
        return shard, new

    used, used_index = made("used.tar")
    _, unused_index = made("unused.tar")
    for name, days in ((".new-old", 1.0), (".new-fresh", 0.0), ("strange", 0.0)):
        (cache_folder / name).write_bytes(b"xyz")
        idle(cache_folder / name, days)
    idle(used_index, 40)
    idle(unused_index, 40)
    assert len(stoker.from_tar(used)) == 3  # from the index, which is in use from now on
    everything = set(cache_folder.iterdir())
    _, first = made("first.tar")
    assert set(cache_folder.iterdir()) == everything | {first}  # it was swept today
    idle(cache_folder / ".swept", 2)
    _, second = made("second.tar")
    left = everything - {unused_index, cache_folder / ".new-old"}
    assert set(cache_folder.iterdir()) == left | {first, second}


# -- how it is read


@pytest.fixture
def preads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that were asked for of local files by offset, each time."""
    asked: list[int] = []
    pread = os.pread

    def counted(descriptor: int, nbytes: int, start: int) -> bytes:
        asked.append(nbytes)
        return pread(descriptor, nbytes, start)

    monkeypatch.setattr(os, "pread", counted)
    return asked


def test_the_small_files_of_an_example_are_read_at_once(tmp_path: Path, preads: list[int]) -> None:
    together = pairs(0, 6)
    apart = {f"{n}.{field}": bytes([n]) * 9_000 for field in ("jpg", "cls") for n in range(3)}
    large = {"a.jpg": bytes(300_000), "a.cls": b"1"}
    for files, reads in ((together, 6), (apart, 6), (large, 2)):
        shard = pack(tmp_path / f"{len(files)}-{reads}.tar", files)
        train = stoker.from_tar(shard).workers(0)
        preads.clear()
        found = list(train)
        assert len(preads) == reads
        assert found == list(grouped(files))
        classes = stoker.from_tar(shard, ["cls"]).workers(0)
        preads.clear()
        assert [each["cls"] for each in classes] == [each["cls"] for each in found]
        assert len(preads) == len(found)


def test_headers_of_small_files_are_read_many_at_a_time(tmp_path: Path, preads: list[int]) -> None:
    small = pack(tmp_path / "small.tar", {f"{n}.bin": bytes(2_000) for n in range(300)})
    large = pack(tmp_path / "large.tar", {f"{n}.bin": bytes(200_000) for n in range(30)})
    assert len(stoker.from_tar(small)) == 300
    assert len(preads) < 30
    preads.clear()
    assert len(stoker.from_tar(large)) == 30
    assert len(preads) >= 30
    assert sum(preads) < 500_000  # nothing of the files themselves
