"""Files on S3: the real client, against a small server that speaks as much of S3 as it needs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stoker
from s3_bucket import Bucket, serving
from scripts import run
from stoker.sources.folder import FolderSource
from stoker.sources.remote.files import FilesSource
from stoker.sources.remote.storage import RemoteOptions

NAMES = ["a#b", "a?b=c", "100%", "%41", "a&b", "<b>", "'\"", "日本", "a+b", "a b", "a:b", "[x]"]
KEYS = [
    *(f"train/cat/{name}.jpg" for name in NAMES),
    *("train/dog/deep/er.png", "train/dog/.hidden.png", "train/dog/notes.txt", "train/stray.jpg"),
    *("train/.git/x.png", "other/cat/1.jpg"),
]


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with serving({key: key.encode() for key in KEYS}) as bucket:
        yield bucket
    gc.collect()


def options_of(bucket: Bucket, **options: Any) -> RemoteOptions:
    return RemoteOptions(storage_options=bucket.options, **options)


def test_class_folders(bucket: Bucket) -> None:
    source = FolderSource("s3://data/train", options_of(bucket))
    assert source.classes == ["cat", "dog"]
    found = source.fetch(range(len(source)))
    expected = [f"train/cat/{name}.jpg" for name in NAMES]
    expected = [*sorted(expected), "train/dog/deep/er.png"]
    assert [example.image.decode() for example in found] == expected
    assert [source.path(i) for i in range(len(source))] == [f"s3://data/{k}" for k in expected]
    assert found[-1].label == 1
    bucket.objects["train/cat/new.jpg"] = b"new"
    again = FolderSource("s3://data/train", options_of(bucket))
    assert (len(source), len(again)) == (13, 14)


def test_patterns_and_lists(bucket: Bucket) -> None:
    source = FilesSource("s3://data/*/cat/*1*", options_of(bucket))
    keys = ["other/cat/1.jpg", "train/cat/%41.jpg", "train/cat/100%.jpg"]
    assert source.fetch([0, 1, 2]) == [(f"s3://data/{key}", key.encode()) for key in keys]
    urls = [f"s3://data/train/cat/{name}.jpg" for name in NAMES]
    found = FilesSource(urls, options_of(bucket)).fetch(range(len(urls)))
    assert found == [(url, url.removeprefix("s3://data/").encode()) for url in urls]


def test_throttling_is_counted_and_passes(bucket: Bucket) -> None:
    source = FolderSource("s3://data/train", options_of(bucket))
    bucket.wrong["train/dog/deep/er.png"] = [(503, "SlowDown"), (500, "InternalError")]
    reader: Any = source.reader()
    assert reader.fetch([12])[0].image == b"train/dog/deep/er.png"
    assert (reader.retries, bucket.gets) == (2, 3)
    reader.close()


def test_failures_name_url_and_status(bucket: Bucket) -> None:
    source = FolderSource("s3://data/train", options_of(bucket, timeout_s=0.3))
    key = "train/dog/deep/er.png"
    bucket.wrong[key] = [(503, "SlowDown")] * 100
    with pytest.raises(stoker.RemoteError, match=rf"s3://data/{key}: .*SlowDown.* after") as got:
        source.fetch([12])
    assert (got.value.status, got.value.url) == (503, f"s3://data/{key}")
    bucket.wrong[key] = [(403, "AccessDenied")]
    with pytest.raises(stoker.RemoteError, match="AccessDenied") as got:
        source.fetch([12])
    assert (got.value.status, got.value.attempts) == (403, 1)
    del bucket.objects[key]
    with pytest.raises(FileNotFoundError, match=f"s3://data/{key}"):
        source.fetch([12])
    with pytest.raises(FileNotFoundError, match="s3://nowhere/train"):
        FolderSource("s3://nowhere/train", options_of(bucket))


def test_nothing_is_said_at_the_end_of_a_program(bucket: Bucket, tmp_path: Path) -> None:
    body = f"""
    pipeline = stoker.from_folder("s3://data/train", storage_options={bucket.options!r})
    say(json.dumps([len(pipeline), len(list(pipeline.batch(4)))]))
    """
    assert run(tmp_path, body) == [[13, 4]]
