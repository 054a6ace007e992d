"""What a cache server does with whoever comes: other clusters, other data, damage, nonsense."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from nodes import EXAMPLES, NO_STORE, TOKEN, Numbered, counted, epoch_of, over, servers, write_token

import stoker
from authority import certificates
from stoker.cache.counters import ITEMS
from stoker.cache.layout import checksum_of
from stoker.cache.store import ADMISSION
from stoker.cluster import cache_protocol as protocol
from stoker.cluster.cache_connection import CacheConnection, Record, SpecRefused
from stoker.cluster.cache_server import CacheServer
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.membership import Backoff, Members, NamedHosts
from stoker.cluster.owners import Member
from stoker.cluster.remote_node import key_of
from stoker.transport.codec import encode
from stoker.transport.link import Link, LinkError
from stoker.transport.secret import Secret
from strategies import FULL

pytestmark = pytest.mark.filterwarnings(f"ignore:{NO_STORE}:stoker.CacheWarning")
MUTATIONS = 100_000 if FULL else 400
DEFINITION = CacheSpec("Numbered", [], "1", 10, "", "")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    with servers(tmp_path, 1) as made:
        yield made[0]


def record(number: int, size: int = 500) -> Record:
    (head, content) = encode(bytes([number % 256]) * size)
    data = head + content
    key = key_of(number, bytes(8))
    return Record(key, data, checksum_of(key, data))


def test_what_is_brought_is_there_for_others(server: CacheServer) -> None:
    records = [record(number, 100_000 if number % 3 else 10) for number in range(30)]
    one, other = (CacheConnection(server.address, TOKEN, DEFINITION, 1) for _ in range(2))
    keys = [each.key for each in records]
    assert one.get(keys) == [None] * 30
    stored = one.put(records)
    assert (stored.refused, stored.is_full) == ([], False)
    found = other.get([*keys, key_of(99, bytes(8))])
    assert found.pop() is None
    for each, expected in zip(found, records, strict=True):
        assert each is not None
        assert (each.key, bytes(each.data), each.checksum) == expected
    assert server._store.counters.head[ITEMS] == 30


def test_many_small_items_are_brought_in_parts(server: CacheServer) -> None:
    records = [record(number, 1) for number in range(protocol.MAX_KEYS + 9)]
    line = CacheConnection(server.address, TOKEN, DEFINITION, 1)
    assert line.put(records).refused == []
    assert None not in line.get([each.key for each in records])


def test_a_reply_has_a_limit_and_the_rest_is_asked_for_again(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.cluster.cache_server._REPLY_BYTES", 1000)
    line = CacheConnection(server.address, TOKEN, DEFINITION, 1)
    records = [record(number) for number in range(9)]
    line.put(records)
    found = line.get([each.key for each in records])
    assert [each and bytes(each.data) for each in found] == [each.data for each in records]


def test_new_items_wait_for_a_writer_that_is_stopped_but_not_for_ever(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.cluster.cache_server._LOCKED_S", 0.1)
    line = CacheConnection(server.address, TOKEN, DEFINITION, 1)
    with open(Path(server.folder) / ADMISSION, "rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert line.put([record(1)]).refused == [0]
    assert line.put([record(1)]).refused == []


def test_a_full_store_says_so(tmp_path: Path) -> None:
    with servers(tmp_path, 1, size="1MiB") as (server,):
        line = CacheConnection(server.address, TOKEN, DEFINITION, 1)
        replies = [line.put([record(number, 100_000)]) for number in range(12)]
        assert replies[-1].is_full
        assert replies[-1].refused == [0]
        assert CacheConnection(server.address, TOKEN, DEFINITION, 1).welcome.is_full


def test_another_definition_is_refused_and_told_what_differs(server: CacheServer) -> None:
    CacheConnection(server.address, TOKEN, DEFINITION, 1)
    with pytest.raises(SpecRefused, match=r"number of examples \(11, not 10\)"):
        CacheConnection(server.address, TOKEN, msgspec.structs.replace(DEFINITION, examples=11), 1)
    with pytest.raises(SpecRefused, match="the examples' names"):
        CacheConnection(server.address, TOKEN, msgspec.structs.replace(DEFINITION, names="x"), 1)
    CacheConnection(server.address, TOKEN, DEFINITION, 1)


def test_folders_are_the_same_wherever_they_lie(tmp_path: Path, server: CacheServer) -> None:
    for place in ("here", "there", "other"):
        for number in range(6):
            path = tmp_path / place / "class" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes([number]) * 100)
    os.utime(tmp_path / "there" / "class" / "0.jpg", (1, 1))
    (tmp_path / "other" / "class" / "5.jpg").rename(tmp_path / "other" / "class" / "6.jpg")
    here, there, other = (
        over(stoker.from_folder(tmp_path / place, seed=0), [server], None, version=None).batch(2)
        for place in ("here", "there", "other")
    )
    assert len(list(here)) == len(list(there)) == 3
    assert counted(there).peer_hits == 6
    with pytest.raises(stoker.CacheError, match="it differs in the examples' names"):
        iter(other)


def test_who_has_another_token_is_told_so(tmp_path: Path, server: CacheServer, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("STOKER_TOKEN_FILE", str(write_token(tmp_path, bytes([7] * 32))))
    with pytest.raises(stoker.CacheError, match="another token"):
        iter(over(stoker.from_dataset(Numbered(), seed=0), [server], None).batch(2))


def test_encrypted_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        certificates(tmp_path / name)
    source = stoker.from_dataset(Numbered(), seed=0)
    monkeypatch.setenv("STOKER_TLS_FOLDER", str(tmp_path / "ours"))
    with servers(tmp_path, 2) as encrypting:
        for misses in (EXAMPLES, 0):
            assert epoch_of(over(source, encrypting, None).batch(7)).misses == misses
        monkeypatch.setenv("STOKER_TLS_FOLDER", str(tmp_path / "theirs"))
        with pytest.raises(stoker.CacheError, match="authority did not sign its certificate"):
            iter(over(source, encrypting, None).batch(7))
        monkeypatch.delenv("STOKER_TLS_FOLDER")
        with pytest.raises(stoker.CacheError, match="encrypts connections with"):
            iter(over(source, encrypting, None).batch(7))
        with servers(tmp_path / "theirs", 1) as plain:
            monkeypatch.setenv("STOKER_TLS_FOLDER", str(tmp_path / "ours"))
            with pytest.raises(stoker.CacheError, match="does not encrypt connections"):
                iter(over(source, plain, None).batch(7))


@pytest.mark.filterwarnings("default:no cache server")
def test_a_path_where_no_server_keeps_is_told(server: CacheServer) -> None:
    train = over(stoker.from_dataset(Numbered(), seed=0), [server], None).batch(7)
    with pytest.warns(stoker.CacheWarning, match=f"uses path='/nowhere'.*printed: {server.folder}"):
        cache = epoch_of(train)
    assert (cache.local_hits, cache.peer_hits, cache.misses) == (0, 0, EXAMPLES)


def test_a_member_that_does_not_encrypt_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a membership names it, as that of torchrun does, without having asked it."""
    certificates(tmp_path)
    with servers(tmp_path / "plain", 1) as plain:
        monkeypatch.setenv("STOKER_TLS_FOLDER", str(tmp_path))
        with servers(tmp_path / "encrypting", 1) as encrypting:
            hosts = [*encrypting, *plain]
            names = tuple(Member(k.address, k.address, k.limit_bytes) for k in hosts)
            monkeypatch.setattr(NamedHosts, "members", lambda self, **_: Members(2, names))
            # A host without a member shares its counters with other jobs over the same contents.
            source = stoker.from_dataset(Numbered(), seed=0)
            train = over(source, hosts, None, version="one is plain").batch(7)
            with pytest.warns(stoker.CacheWarning, match="does not encrypt.*This node is not used"):
                cache = epoch_of(train)
            assert (cache.members, cache.members_alive) == (2, 1)


def test_a_trusted_network_is_one_for_servers_and_jobs(tmp_path: Path) -> None:
    source = stoker.from_dataset(Numbered(), seed=0)
    server = CacheServer(
        "127.0.0.1:0", TOKEN, limit=8 << 20, folder=str(tmp_path / "k"), insecure=True
    )
    with contextlib.closing(server):
        train = over(source, [server], None, insecure=True).batch(7)
        epoch_of(train)
        assert epoch_of(train).peer_hits == EXAMPLES
        with pytest.raises(stoker.CacheError, match=r"does not encrypt .*insecure=True here"):
            iter(over(source, [server], None).batch(7))


def test_two_clusters_at_once_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with servers(tmp_path / "a", 2) as one, servers(tmp_path / "b", 2) as other:
        for made in (one, other):
            train = over(stoker.from_dataset(Numbered(), seed=0).shuffle(), made).batch(7)
            assert epoch_of(train).misses == EXAMPLES


def test_a_flipped_byte_is_a_miss(tmp_path: Path) -> None:
    with servers(tmp_path, 1) as made:
        source = stoker.from_dataset(Numbered(floats=10_000), seed=0)
        epoch_of(over(source, made, None).batch(7))
        data = Path(made[0].folder, "data.mdb")
        content = bytearray(data.read_bytes())
        at = content.rindex(b"\x00\x00\x00\x00\x00\x00\x3e\x40" * 100)  # 30.0, of example 30
        with data.open("r+b") as file:
            file.seek(at + 400)
            file.write(b"\x01")
        cache = epoch_of(over(source, made, None).batch(7))
        assert (cache.damaged, cache.misses, cache.peer_hits) == (1, 1, EXAMPLES - 1)


def test_mutated_frames_harm_nobody(server: CacheServer) -> None:
    """Whoever has the token may send what it wants: its connection ends, others go on."""
    drawn = random.Random(0)
    honest = CacheConnection(server.address, TOKEN, DEFINITION, 1)
    records = [record(number) for number in range(5)]
    honest.put(records)
    body = b"".join(bytes(each.data) for each in records)
    sizes, checksums = [len(each.data) for each in records], [each.checksum for each in records]
    other_keys = b"".join(key_of(each + 100, bytes(8)) for each in range(5))
    requests = [
        (protocol.GetRequest(b"".join(each.key for each in records)), b""),
        (protocol.PutRequest(other_keys, sizes, checksums), body),
        (protocol.CacheHello(DEFINITION, 1), b""),
    ]
    hello = protocol.encode(protocol.CacheHello(DEFINITION, 1))
    link: Link | None = None
    for number in range(MUTATIONS):
        if link is None:
            link = Link.connect(server.address, Secret(TOKEN), protocol.PURPOSE, timeout_s=60)
            link.send(hello)
            link.receive(wait_s=60)
        request, content = requests[number % len(requests)]
        header = bytearray(protocol.encode(request))
        for _ in range(drawn.randint(1, 4)):
            at = drawn.randrange(len(header))
            kind = drawn.random()
            if kind < 0.7:
                header[at] ^= 1 << drawn.randrange(8)
            elif kind < 0.85:
                del header[at:]
                header += b"\x00"
            else:
                header[at:at] = drawn.randbytes(drawn.randint(1, 9))
        if drawn.random() < 0.3:
            content = content[: drawn.randint(0, len(content))]
        try:
            link.send(bytes(header), content)
            link.receive(wait_s=60)
        except (LinkError, EOFError):
            link = None
    found = honest.get([each.key for each in records])
    assert [each and bytes(each.data) for each in found] == [each.data for each in records]


def test_nothing_that_is_wrong_enters(server: CacheServer) -> None:
    good, damaged = record(1), record(2)._replace(checksum=5)
    line = CacheConnection(server.address, TOKEN, DEFINITION, 1)
    assert line.put([good, damaged]).refused == [1]
    assert line.get([damaged.key]) == [None]
    with pytest.raises(LinkError):
        line.put([record(1)._replace(key=b"too short")])
    assert server._store.counters.head[ITEMS] == 1


def test_tries_come_later_each_time_and_at_once_again_after_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("stoker.cluster.membership.time", clock)
    tries = Backoff()
    assert tries.is_due
    waited: list[float] = []
    for _ in range(9):
        tries.failed()
        assert not tries.is_due
        waited.append(tries.due_s - now[0])
        now[0] = tries.due_s
        assert tries.is_due
    assert waited == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    tries.succeeded()
    assert tries.is_alive
    assert not tries.is_due
    tries.failed()
    assert tries.due_s - now[0] == pytest.approx(0.1)


def test_wrong_clusters_are_refused_where_they_are_written() -> None:
    source = stoker.from_dataset(Numbered(), seed=0)
    with warnings.catch_warnings():
        for wrong, match in (
            ("kubernetes", "'torchrun' or a list"),
            (["node1"], "host:port"),
            (["a:1", "a:1"], "has an address twice"),
        ):
            with pytest.raises(ValueError, match=match):
                source.cache("8MiB", cluster=wrong, version="1")
        with pytest.raises(TypeError):
            source.cache("8MiB", cluster=[7], version="1")  # type: ignore[list-item]
        with pytest.raises(ValueError, match="needs version="):
            source.cache("8MiB", cluster=["a:1"])
        for cache in (source.cache, lambda *a, **k: stoker.cached(Numbered(), *a, **k)):
            with pytest.raises(ValueError, match="a cache over several nodes"):
                cache("8MiB", version="1", insecure=True)
        with pytest.raises(ValueError, match="insecure=True is for kind='ray'"):
            source.workers(2, insecure=True)
        with pytest.raises(ValueError, match="insecure=True is for feeds on other hosts"):
            stoker.feed("a.py:f", name="a", insecure=True)
        with pytest.raises(ValueError, match="insecure=True is for feeds on other hosts"):
            stoker.from_feed("a", insecure=True)
        with pytest.raises(ValueError, match="needs version="):
            stoker.cached(Numbered(), "8MiB", cluster=["a:1"])
