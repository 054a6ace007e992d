"""Cache servers that have the token and lie: whatever they answer, examples are right."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nodes import EXAMPLES, NO_STORE, TOKEN, Numbered, epoch_of, over, servers

import stoker
from odd_records import ODD_RECORDS
from stoker.cache.layout import KEY_BYTES, checksum_of
from stoker.cluster import cache_protocol as protocol
from stoker.cluster.cache_connection import CacheConnection, Record, SpecRefused
from stoker.cluster.cache_spec import CacheSpec
from stoker.transport.link import Link, LinkError
from stoker.transport.listener import Listener
from stoker.transport.secret import Secret
from strategies import FULL

pytestmark = pytest.mark.filterwarnings(f"ignore:{NO_STORE}:stoker.CacheWarning")
MUTATIONS = 100_000 if FULL else 400
Answer = Callable[[bytes], tuple[int, bytes]]


class Lying:
    """Answers each question with the checksum and the record that a function makes of its key."""

    def __init__(self, answer: Answer, started_ns: int = 0) -> None:
        self._answer = answer
        self._started_ns = started_ns
        self._listener = Listener("127.0.0.1", 0, Secret(TOKEN), protocol.PURPOSE, self._serve)
        self.address = self._listener.address
        self.close = self._listener.close

    def _serve(self, link: Link) -> None:
        while True:
            request = protocol.decode_request(link.receive()[0])
            if isinstance(request, protocol.CacheHello):
                link.send(
                    protocol.encode(
                        protocol.CacheWelcome(
                            "elsewhere", "/nowhere", 1 << 20, True, self._started_ns
                        )
                    )
                )
            elif isinstance(request, protocol.GetRequest):
                answers = [self._answer(key) for key in protocol.split_keys(request.keys)]
                sizes = [len(record) for _, record in answers]
                got = protocol.GetReply(sizes, [checksum for checksum, _ in answers])
                link.send(protocol.encode(got), *(record for _, record in answers))


@contextlib.contextmanager
def lying(answer: Answer) -> Iterator[stoker.Pipeline[object]]:
    """Return a pipeline over a cache server that lies."""
    with contextlib.closing(Lying(answer)) as liar:
        source = stoker.from_dataset(Numbered(), seed=0)
        yield over(source, [liar], None).batch(7)  # type: ignore[list-item]


def damaged(train: stoker.Pipeline[object]) -> int:
    """Go through an epoch, in which everything is right; return what was damaged in it."""
    cache = epoch_of(train)
    assert (cache.peer_hits, cache.misses) == (0, EXAMPLES)
    return cache.damaged


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Return an answer that something was done to, a few times."""
    made = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, kind = draw.randrange(len(made) + 1), draw.randrange(6)
        if kind == 0:
            del made[at:]
        elif kind == 1:
            made[at:at] = draw.randbytes(draw.randint(1, 9))
        elif kind == 2:  # a length, or a number
            made[at : at + 1] = draw.choice([b"\xdd", b"\xdf", b"\xcf", b"\xc6"]) + draw.randbytes(
                8
            )
        elif kind == 3:
            made[at:at] = b"\x91" * draw.choice([1, 3_000])
        else:
            made[at : at + 1] = draw.randbytes(1)
    return bytes(made)


@pytest.mark.timeout(1800)
def test_answers_of_any_bytes_end_a_connection_at_most() -> None:
    """Whatever a cache server says: there is an answer, or a LinkError, and nothing else."""
    draw = random.Random(6)
    item = b"item" * 100
    answers: list[tuple[protocol.Reply, bytes]] = [
        (protocol.GetReply([400, -1], [5, 0]), item),
        (protocol.PutReply([0], False), b""),
    ]
    met = protocol.encode(protocol.CacheWelcome("elsewhere", "/nowhere", 1 << 20, True, 0))
    said: list[bytes] = []

    def serve(link: Link) -> None:
        link.receive()
        link.send(said[0] if draw.random() < 0.1 else met)
        while True:
            link.receive()
            link.send(said[0], said[1])

    outcomes = collections.Counter[str]()
    keys = [bytes(16), bytes(15) + b"1"]
    lying = Listener("127.0.0.1", 0, Secret(TOKEN), protocol.PURPOSE, serve)
    with contextlib.closing(lying) as listener:
        for number in range(MUTATIONS):
            reply, body = answers[number % 2]
            said[:] = mutated(protocol.encode(reply), draw), body
            try:
                line = CacheConnection(listener.address, TOKEN, CacheSpec("", [], "", 1, "", ""), 1)
            except (LinkError, SpecRefused):
                outcomes["refused"] += 1
                continue
            try:
                if number % 2 == 0:
                    assert len(line.get(keys)) == 2
                else:
                    line.put([Record(keys[0], item, 5)])
                outcomes["answered"] += 1
            except LinkError:
                outcomes["refused"] += 1
            finally:
                line.close()
    assert outcomes["refused"]
    assert outcomes["answered"]


def test_what_is_no_item_is_damage() -> None:
    """It is read from storage; nothing crashes, hangs or takes memory."""
    assert len(ODD_RECORDS) <= EXAMPLES  # so that each is an answer
    records = itertools.cycle(ODD_RECORDS.values())

    def answer(key: bytes) -> tuple[int, bytes]:
        record = next(records)
        return checksum_of(key, record), record

    with lying(answer) as train:
        assert damaged(train) == EXAMPLES


def test_the_item_of_another_key_is_damage(tmp_path: Path) -> None:
    """Its checksum is right, and not that of what was asked for."""
    with servers(tmp_path, 1) as (honest,):
        epoch_of(over(stoker.from_dataset(Numbered(), seed=0), [honest], None).batch(7))
        with honest._store._environment().begin() as txn:
            keys = sorted(k for k in txn.cursor().iternext(values=False) if len(k) == KEY_BYTES)
        others = dict(zip(keys, honest._store.records(keys[1:] + keys[:1]), strict=True))

        def answer(key: bytes) -> tuple[int, bytes]:
            found = others[key]
            assert found is not None
            return found[0], bytes(found[1])

        with lying(answer) as train:
            assert damaged(train) == EXAMPLES


@pytest.mark.parametrize("started_ns", [0, 1 << 62])
def test_a_server_that_lies_about_when_it_joined_costs_nothing_but_requests(
    tmp_path: Path, started_ns: int
) -> None:
    """It is asked for what it never owned, or for what others did, and nobody believes its bytes.

    Of its age the others' clients tell their own cache servers, which pass it on.
    """
    liar = Lying(lambda key: (checksum_of(key, b"wrong"), b"wrong"), started_ns)
    with contextlib.closing(liar), servers(tmp_path, 2) as honest:
        members = [*honest, liar]
        dataset = Numbered()
        source = stoker.from_dataset(dataset, seed=0).shuffle()
        clients = [over(source, members, home).batch(7) for home in (0, 1)]  # type: ignore[arg-type]
        for train in (*clients, *clients):
            epoch_of(train)
        assert EXAMPLES <= dataset.reads < 4 * EXAMPLES


def test_a_store_of_what_was_never_written_is_read_from_its_source(tmp_path: Path) -> None:
    """So is what lies on this host: damage is said once, and nobody crashes."""
    folder = str(tmp_path / "store")
    train = stoker.from_dataset(Numbered(), seed=0).cache("8MiB", version="1", path=folder).batch(7)
    with pytest.MonkeyPatch.context() as patch:
        odd = iter(ODD_RECORDS.values())
        patch.setattr("stoker.cache.example_cache.encode", lambda _: [next(odd, b"\x01")])
        patch.setattr("stoker.cache.admission.RandomCheck.run", lambda *_: None)
        epoch_of(train)
    with pytest.warns(stoker.CacheWarning, match="is damaged: a record that cannot be read"):
        cache = epoch_of(train)
    assert (cache.damaged, cache.hits) == (EXAMPLES, 0)
