"""A small server that speaks as much of S3 as its real client needs to read."""

from __future__ import annotations

import contextlib
import http.server
import re
from collections.abc import Iterator
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import servers

PAGE = 3  # keys in one answer to a listing


class Bucket(http.server.ThreadingHTTPServer):
    """One bucket, `data`, in memory; `wrong` maps keys to what their next answers are."""

    daemon_threads = True

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.objects = objects
        self.wrong: dict[str, list[tuple[int, str]]] = {}
        self.gets = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a program reaches it without options."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "a key",
            "AWS_SECRET_ACCESS_KEY": "a secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @property
    def options(self) -> dict[str, object]:
        return {
            "key": "a key",
            "secret": "a secret",
            "endpoint_url": self.url,
            "client_kwargs": {"region_name": "us-east-1"},
        }


@contextlib.contextmanager
def serving(objects: dict[str, bytes]) -> Iterator[Bucket]:
    """Serve a bucket of these objects, by key."""
    with servers.serving(Bucket(objects)) as bucket:
        yield bucket


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
                self.send_object(self.server.objects[key])
            else:
                self.answer(404, error("NoSuchKey"))

    do_HEAD = do_GET

    def send_object(self, data: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            self.answer(200, data)
        else:
            first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
            self.answer(206, data[first : last + 1], f"bytes {first}-{last}/{len(data)}")

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

    def answer(self, status: int, body: bytes, content_range: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}, it says</Message></Error>".encode()
