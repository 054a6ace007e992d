"""HTTP as a file system, which reads files and lists none.

Only the session of fsspec's file system is used, since the file system does not distinguish a
failed answer from a broken connection.
"""

from __future__ import annotations

import re
from typing import Any

from stoker.sources.files import refuse_too_large
from stoker.sources.remote import storage
from stoker.sources.remote.failures import PassingError, StatusError, UnusableError
from stoker.sources.remote.storage import (
    SIZE_UNTOLD,
    UNKNOWN,
    RemoteOptions,
    Storage,
    digest_of,
    import_extra,
)

_LEGAL = r"A-Za-z0-9!$&'()*+,;=@_~.\-:/?#\[\]"
_LEGAL_URL = re.compile(rf"[{_LEGAL}]*(?:%[0-9A-Fa-f]{{2}}[{_LEGAL}]*)*")
# Two mirrors tell other ETags of the same bytes; of that many answers in turn, all come from the
# other one once in four billion reads.
_ANSWERS = 32
# Ways to send the bytes as they are that servers tell as encodings: S3 of what was uploaded so.
_PLAIN = {"identity", "utf-8", "aws-chunked", ""}


class WebStorage(Storage):
    """HTTP: paths are URLs, as they are sent."""

    def __init__(self, kind: Any, url: str, options: RemoteOptions) -> None:
        self._aiohttp = import_extra("aiohttp", url)
        self._yarl = import_extra("yarl", url)

        async def client(**settings: Any) -> Any:
            aiohttp = self._aiohttp
            # What comes encoded is refused: only of plain bytes the length tells whether all came.
            pool = aiohttp.TCPConnector(limit=options.requests)
            own = {"connector": pool, "auto_decompress": False}
            return aiohttp.ClientSession(**{**own, **settings})

        # A session of its own can be closed, and then by us alone.
        own = {"skip_instance_cache": True, "asynchronous": True}
        fs = kind(**{"get_client": client, **options.storage_options, **own})
        super().__init__(fs, import_extra("fsspec.asyn", url).get_loop())
        timeout = self._aiohttp.ClientTimeout(
            total=None, connect=storage.STALL_S, sock_read=storage.STALL_S
        )
        headers = {"Accept-Encoding": "identity", **fs.kwargs.get("headers", {})}
        self._request = {"timeout": timeout, **fs.kwargs, "headers": headers}

    async def read(self, path: str, size: int) -> bytes:
        """Read a file; the session checks its length against the answer's header."""
        data, answer = await self._get(path)
        chunked = "chunked" in answer.headers.get("Transfer-Encoding", "").lower()
        if answer.content_length is None and not chunked:  # it may be cut short
            raise UnusableError("the answer does not state its length")
        if len(data) != size != UNKNOWN:
            raise PassingError(f"{len(data)} bytes instead of the {size} listed")
        return data

    async def read_part(
        self, path: str, start: int, nbytes: int, whole_bytes: int, version: int = 0
    ) -> bytes:
        for _ in range(_ANSWERS):
            data, answer = await self._get(path, (start, start + nbytes), version)
            if not version or _version_of(answer) == version:
                break
        content_range = answer.headers.get("Content-Range", "")
        size = content_range.rpartition("/")[2]
        if size.isdecimal() and int(size) != whole_bytes != UNKNOWN:
            raise UnusableError(
                f"it has {int(size):,} bytes now, and had {whole_bytes:,} when the pipeline was "
                "built: build it anew"
            )
        if version and _version_of(answer) != version:
            raise UnusableError(
                "its ETag or Last-Modified has changed since the pipeline was built, so parts of "
                "two files would be mixed: build it again"
            )
        if len(data) != nbytes or not content_range.replace("=", " ").startswith(f"bytes {start}-"):
            raise PassingError(
                f"{len(data)} bytes instead of {nbytes} ({content_range or 'no range'})"
            )
        return data

    async def look_up(self, path: str) -> tuple[int, int]:
        """Ask for the first byte: not all servers answer HEAD."""
        data, answer = await self._get(path, (0, 1))
        if not data:
            return 0, _version_of(answer)
        size = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if not size.isdecimal():
            raise UnusableError(SIZE_UNTOLD)
        return int(size), _version_of(answer)

    def to_path(self, url: str) -> str:
        """Return the URL, with invalid characters quoted."""
        return url if _LEGAL_URL.fullmatch(url) else str(self._yarl.URL(url))

    async def close(self) -> None:
        if self._fs._session is not None:
            await self._fs._session.close()

    async def _get(
        self, url: str, span: tuple[int, int] | None = None, version: int = 0
    ) -> tuple[bytes, Any]:
        """Return the bytes, and the answer; no bytes of another version (0: of any)."""
        session = await self._fs.set_session()
        request, expected = self._request, 200
        if span is not None:
            headers = {**request["headers"], "Range": f"bytes={span[0]}-{span[1] - 1}"}
            request, expected = {**request, "headers": headers}, 206
        try:
            async with session.get(self._yarl.URL(url, encoded=True), **request) as answer:
                if expected == 206 and _is_empty(answer):
                    return b"", answer
                if expected == 206 and answer.status == 200:
                    raise UnusableError(
                        "the server sends whole files only, not parts of them (ranges): copy the "
                        "file to a local disk"
                    )
                if answer.status != expected:
                    retry_after = answer.headers.get("Retry-After")
                    raise StatusError(answer.status, answer.reason, retry_after)
                encoding = answer.headers.get("Content-Encoding", "").lower()
                if not _PLAIN.issuperset(each.strip() for each in encoding.split(",")):
                    raise UnusableError(
                        f"the answer is encoded ({encoding}), which was not requested"
                    )
                if version and _version_of(answer) != version:
                    answer.close()  # the next connection may lead to another mirror
                    return b"", answer
                return await _read_body(answer, url), answer
        except TimeoutError as error:
            raise PassingError(f"no answer for {storage.STALL_S:g} s") from error
        except self._aiohttp.TooManyRedirects as error:
            raise UnusableError(f"more than {len(error.history)} redirects") from error
        except self._aiohttp.ClientResponseError as error:  # whose status is made up
            raise PassingError(f"the answer is not HTTP: {_shorten(error.message)}") from error
        except self._aiohttp.RedirectClientError as error:
            raise UnusableError(f"it redirects to {_shorten(str(error))}") from error


def _version_of(answer: Any) -> int:
    """Return the version in an answer's headers, as in ``Entries``."""
    tags = [answer.headers[name] for name in ("ETag", "Last-Modified") if name in answer.headers]
    return digest_of(tags[:1])


def _is_empty(answer: Any) -> bool:
    """True if a file has no first byte that could be sent as a part."""
    if answer.status == 200:
        return bool(answer.content_length == 0)
    return bool(answer.status == 416 and answer.headers.get("Content-Range", "") == "bytes */0")


async def _read_body(answer: Any, url: str) -> bytes:
    """Read a body of any length that fits into memory."""
    if answer.content_length is not None:
        refuse_too_large(answer.content_length, url)
        return bytes(await answer.read())
    body = bytearray()
    looked = 0
    async for part in answer.content.iter_any():
        body += part
        if len(body) > 2 * looked:  # it may never end
            looked = len(body)
            refuse_too_large(2 * looked, url)
    return bytes(body)


def _shorten(text: str) -> str:
    return " ".join(text.split())[:200]
