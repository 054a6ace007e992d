"""Files on S3: the real client, against a small server that speaks as much of S3 as it needs."""

from __future__ import annotations

import gc
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

import stoker
from scripts import run
from stoker.sources.remote.files import FilesSource, RemoteFolderSource

pytest.importorskip("s3fs")

PAGE = 3  # keys in one answer to a listing


class Bucket(http.server.ThreadingHTTPServer):
    """One bucket, `data`, in memory; `wrong` maps keys to what their next answers are."""

    daemon_threads = True

    def __init__(self, keys: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.objects = {key: key.encode() for key in keys}
        self.wrong: dict[str, list[tuple[int, str]]] = {}
        self.gets = 0

    @property
    def options(self) -> dict[str, object]:
        return {
            "key": "a key",
            "secret": "a secret",
            "endpoint_url": f"http://127.0.0.1:{self.server_port}",
            "client_kwargs": {"region_name": "us-east-1"},
        }


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path[1:]).partition("/")
        if bucket != "data":
            self.answer(404, error("NoSuchBucket"))
        elif not key:
            options = parse_qs(url.query, keep_blank_values=True)
            self.answer(200, self.listing({name: value[0] for name, value in options.items()}))
        else:
            self.server.gets += 1
            wrong = self.server.wrong.get(key)
            if wrong:
                status, code = wrong.pop(0)
                self.answer(status, error(code))
            elif key in self.server.objects:
                self.answer(200, self.server.objects[key])
            else:
                self.answer(404, error("NoSuchKey"))

    def listing(self, options: dict[str, str]) -> bytes:
        prefix, delimiter = options.get("prefix", ""), options.get("delimiter", "")
        entries: dict[str, bool] = {}
        for key in sorted(self.server.objects):
            if key.startswith(prefix):
                head, found, _ = key[len(prefix) :].partition(delimiter or "\0")
                entries[prefix + head + found] = bool(found)
        first = int(options.get("continuation-token", 0))
        names = list(entries)[first : first + PAGE]
        more = first + PAGE < len(entries)
        parts = [f"<IsTruncated>{str(more).lower()}</IsTruncated>"]
        parts += ["<EncodingType>url</EncodingType>"] if "encoding-type" in options else []
        parts += [f"<NextContinuationToken>{first + PAGE}</NextContinuationToken>"] if more else []
        for name in names:
            shown = quote(name) if "encoding-type" in options else escape(name)
            if entries[name]:
                parts.append(f"<CommonPrefixes><Prefix>{shown}</Prefix></CommonPrefixes>")
            else:
                size = len(self.server.objects[name])
                parts.append(f"<Contents><Key>{shown}</Key><Size>{size}</Size></Contents>")
        return f"<ListBucketResult>{''.join(parts)}</ListBucketResult>".encode()

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}, it says</Message></Error>".encode()


NAMES = ["a#b", "a?b=c", "100%", "%41", "a&b", "<b>", "'\"", "日本", "a+b", "a b", "a:b", "[x]"]
KEYS = [
    *(f"train/cat/{name}.jpg" for name in NAMES),
    *("train/dog/deep/er.png", "train/dog/.hidden.png", "train/dog/notes.txt", "train/stray.jpg"),
    *("train/.git/x.png", "other/cat/1.jpg"),
]


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with Bucket(KEYS) as bucket:
        thread = threading.Thread(target=bucket.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield bucket
        bucket.shutdown()
        thread.join()
    gc.collect()


def test_class_folders(bucket: Bucket) -> None:
    source = RemoteFolderSource("s3://data/train", storage_options=bucket.options)
    assert source.classes == ["cat", "dog"]
    found = source.fetch(range(len(source)))
    expected = [f"train/cat/{name}.jpg" for name in NAMES]
    expected = [*sorted(expected), "train/dog/deep/er.png"]
    assert [example.image.decode() for example in found] == expected
    assert [source.path(i) for i in range(len(source))] == [f"s3://data/{k}" for k in expected]
    assert found[-1].label == 1
    bucket.objects["train/cat/new.jpg"] = b"new"
    again = RemoteFolderSource("s3://data/train", storage_options=bucket.options)
    assert (len(source), len(again)) == (13, 14)


def test_patterns_and_lists(bucket: Bucket) -> None:
    source = FilesSource("s3://data/*/cat/*1*", storage_options=bucket.options)
    keys = ["other/cat/1.jpg", "train/cat/%41.jpg", "train/cat/100%.jpg"]
    assert source.fetch([0, 1, 2]) == [(f"s3://data/{key}", key.encode()) for key in keys]
    urls = [f"s3://data/train/cat/{name}.jpg" for name in NAMES]
    found = FilesSource(urls, storage_options=bucket.options).fetch(range(len(urls)))
    assert found == [(url, url.removeprefix("s3://data/").encode()) for url in urls]


def test_throttling_is_counted_and_passes(bucket: Bucket) -> None:
    source = RemoteFolderSource("s3://data/train", storage_options=bucket.options)
    bucket.wrong["train/dog/deep/er.png"] = [(503, "SlowDown"), (500, "InternalError")]
    reader = source.reader()
    assert reader.fetch([12])[0].image == b"train/dog/deep/er.png"
    assert (reader.retries, bucket.gets) == (2, 3)
    reader.close()


def test_failures_name_url_and_status(bucket: Bucket) -> None:
    source = RemoteFolderSource("s3://data/train", retry_s=0.3, storage_options=bucket.options)
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


def test_no_such_bucket(bucket: Bucket) -> None:
    with pytest.raises(FileNotFoundError, match="s3://nowhere/train"):
        RemoteFolderSource("s3://nowhere/train", storage_options=bucket.options)


def test_nothing_is_said_at_the_end_of_a_program(bucket: Bucket, tmp_path: Path) -> None:
    body = f"""
    pipeline = stoker.from_folder("s3://data/train", storage_options={bucket.options!r})
    say(json.dumps([len(pipeline), len(list(pipeline.batch(4)))]))
    """
    assert run(tmp_path, body) == [[13, 4]]
