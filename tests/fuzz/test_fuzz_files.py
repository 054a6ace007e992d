"""Files that strangers wrote: archives, their kept indexes, and files of tokens."""

from __future__ import annotations

import io
import itertools
import tarfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from mutations import fuzz, mutated

import stoker

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:.*what comes behind is left out"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def tar(kind: int, prefix: str = "") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as archive:
        for number, suffix in itertools.product(range(3), ("jpg", "cls")):
            member = tarfile.TarInfo(f"{prefix}é{number}.{suffix}")
            data = str(number).encode() * 300
            member.size = len(data)
            if kind == tarfile.PAX_FORMAT:
                member.pax_headers = {"size": str(len(data)), "comment": "none"}
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def zipped(method: int) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for number, suffix in itertools.product(range(3), ("jpg", "cls")):
            archive.writestr(f"é{number}.{suffix}", str(number) * 300)
    return stream.getvalue()


KINDS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
TARS = [tar(kind, prefix) for kind in KINDS for prefix in ("", "d/" * 70)]
SIZES = [b"-0000000010\0", b"77777777777\0", b"0000000_010\0", b"+0000000010\0", b"99999999999\0"]
SIZES += [b"\xff" * 12, b"\x80" + b"\xff" * 11, b"\x80" + bytes(3) + b"\x7f" + b"\xff" * 7]


def mutated_tar(data: bytes, rng: np.random.Generator) -> bytes:
    """Mutate a tar archive; mostly the checksums of headers are right again."""
    changed = bytearray(data)
    if rng.integers(3) == 0:  # the sizes in headers, and in extended headers
        at = int(rng.integers(len(changed) // 512)) * 512
        changed[at + 124 : at + 136] = SIZES[int(rng.integers(len(SIZES)))]
        if rng.integers(2):
            other = str(rng.choice(["-10", "9" * 3, "1e3", "³³³", " 90", "0x9"])).encode()
            changed = changed.replace(b"size=900", b"size=" + other.ljust(3)[:3])
    else:
        changed = bytearray(mutated(data, rng))
    if rng.integers(5):
        for at in range(0, len(changed) - 511, 512):
            head = changed[at : at + 512]
            if head[257:262] == b"ustar":
                total = sum(head) - sum(head[148:156]) + 8 * 32
                changed[at + 148 : at + 156] = b"%06o\0 " % total
    return bytes(changed)


def read_shard(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    list(stoker.from_tar(path, seed=0).workers(0))


def test_tar_archives(folder: Path) -> None:
    path = folder / "a.tar"
    refusals = (ValueError, stoker.StageError)
    fuzz("tar", TARS, partial(read_shard, path), refusals, says=str(path), mutate=mutated_tar)


def test_zip_archives(folder: Path) -> None:
    path = folder / "a.zip"
    seeds = [zipped(zipfile.ZIP_STORED), zipped(zipfile.ZIP_DEFLATED)]
    refusals = (ValueError, stoker.StageError)
    fuzz("zip", seeds, partial(read_shard, path), refusals, says=str(path))


def test_kept_indexes_of_shards(folder: Path) -> None:
    """What is in the user's own folder may be damaged, too: the shard is then read anew."""
    path = folder / "a.tar"
    path.write_bytes(TARS[0])
    whole = list(stoker.from_tar(path, seed=0).workers(0))
    (kept,) = (
        each for each in (folder / "cache").rglob("*") if each.is_file() and each.name[0] != "."
    )
    seed = kept.read_bytes()
    digest_bytes = 16

    def signed(data: bytes, rng: np.random.Generator) -> bytes:
        content = mutated(data[digest_bytes:], rng)
        return xxhash.xxh3_128_digest(content) + content if rng.integers(8) else mutated(data, rng)

    def read(data: bytes) -> None:
        kept.write_bytes(data)
        found = list(stoker.from_tar(path, seed=0).workers(0))
        if kept.read_bytes() != data:  # it was not used, but written anew
            assert found == whole
            raise Rebuilt

    refusals = (Rebuilt, ValueError, stoker.StageError)
    fuzz("index", [seed], read, refusals, mutate=signed)


class Rebuilt(Exception):
    """An index that cannot be used."""


def npy(array: Any, version: tuple[int, int]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version)
    return stream.getvalue()


HEADERS = [
    "{'descr': '<u2', 'fortran_order': False, 'shape': (-5,), }",
    "{'descr': '<u2', 'fortran_order': False, 'shape': (" + "9" * 400 + ",), }",
    "{'descr': '|V0', 'fortran_order': False, 'shape': (4611686018427387904,), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (50,), }",
    "{'descr': [('a', '<u2')], 'fortran_order': False, 'shape': (50,), }",
    "(" * 3000,
    "{'descr': '<u2'\n'''",
    "{'descr': '<u2', 'fortran_order': False, 'shape': (50L,), }",
    "\x00",
]


def test_headers_of_token_files(folder: Path) -> None:
    path = folder / "a.npy"
    tokens = np.arange(50, dtype=np.uint16)
    seeds = [npy(tokens, version) for version in ((1, 0), (2, 0), (3, 0))]

    def header(data: bytes, rng: np.random.Generator) -> bytes:
        """Mutate the header alone, or put another one in its place."""
        if rng.integers(4) == 0:
            text = HEADERS[int(rng.integers(len(HEADERS)))].encode() + b"\n"
            return data[:6] + b"\x01\x00" + len(text).to_bytes(2, "little") + text + data[-100:]
        return mutated(data[:-100], rng) + data[-100:]

    def read(data: bytes) -> None:
        path.write_bytes(data)
        list(stoker.from_tokens(path, 4, seed=0).workers(0))

    fuzz("tokens", seeds, read, (ValueError, TypeError), says=str(path), mutate=header)
