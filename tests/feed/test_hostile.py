"""What is wrong on the wire: it ends the connection that it came over, and nothing else."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import failing
import numpy as np
import pytest
import served
from playing import feeder_of, feeding

import stoker
from descriptors import open_descriptors
from patience import WITHIN_S
from stoker.feeds import local_feeds, messages, shared_memory
from stoker.feeds.messages import (
    Begin,
    End,
    EpochRequest,
    Evicted,
    Failed,
    Hello,
    ItemMessage,
    Leave,
    Malformed,
    Message,
    Refused,
    Release,
    Welcome,
)  # fmt: skip
from stoker.feeds.shared_memory import Blocks
from strategies import FULL, shortened

HELLO = Hello(messages.VERSION, "a job", "", "", 11, ["a", "b"])
WELCOME = Welcome(True, 3, 11, ["a", "b"], True, 2, 7, 0)
ITEM = ItemMessage(1, 0, 5, 1, 9, [3], b"header", [(0, 64, 8)])
FROM_JOB = [
    HELLO,
    EpochRequest(1, None, 0),
    EpochRequest(2, 3, 4),
    Release([1, 2, 300]),
    Leave(),
]
FROM_FEEDER = [
    WELCOME, Refused("no"), Begin(1, 0, 5), ITEM, End(1, 0, 6), Failed(1, "é"),
    Evicted(1),
]  # fmt: skip
SAID_BY_JOBS, SAID_BY_FEEDERS = (
    [messages.encode(message) for message in said] for said in (FROM_JOB, FROM_FEEDER)
)
PACKETS = SAID_BY_JOBS + SAID_BY_FEEDERS
LENGTHS = [b"\xdb", b"\xdd", b"\xdf", b"\xc6"]  # of texts, arrays, maps and bytes, in 32 bits


def mutated(packet: bytes, draw: random.Random) -> bytes:
    """Return a message that something was done to, a few times."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        at = draw.randrange(len(packet) + 1)
        what = draw.randrange(12)
        if what == 0:
            packet = packet[:at]
        elif what == 1:
            packet = packet[:at] + draw.randbytes(draw.randint(1, 9)) + packet[at:]
        elif what == 2:
            packet = packet[:at] + draw.choice(LENGTHS) + draw.randbytes(4) + packet[at + 5 :]
        elif what == 3:
            packet = packet[:at] + draw.choice(PACKETS)[draw.randrange(9) :]
        elif what == 4:  # a number as large, or as small, as there are
            number = draw.choice([b"\xcf", b"\xd3"]) + draw.choice([b"\xff", b"\x7f", b"\x80"]) * 8
            packet = packet[:at] + number + packet[at + 1 :]
        else:
            packet = packet[:at] + draw.randbytes(1) + packet[at + 1 :]
    return packet or b"\0"


def test_whatever_comes_is_a_message_or_malformed() -> None:
    """And what is a message can be sent again, so that answering it cannot fail."""
    draw = random.Random(1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rounds = 100_000 if FULL else 4_000
    good = 0
    with ours, theirs:
        for number in range(rounds):
            by_job = number % 2
            theirs.send(mutated(draw.choice(SAID_BY_JOBS if by_job else SAID_BY_FEEDERS), draw))
            try:
                message: Any
                if by_job:
                    message = messages.receive_as_feeder(ours)
                else:
                    message, descriptors = messages.receive_as_job(ours)
                    assert not descriptors
            except Malformed:
                continue
            assert isinstance(message, Message)
            messages.send(theirs, message)
            assert ours.recv(messages.MAX_PACKET_BYTES)
            good += 1
    assert rounds // 20 < good < rounds // 2


# -- a feeder, and those who connect to it


def pipe_descriptors(count: int) -> Any:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, np.zeros(count, np.int32).tobytes())]


def targeted(draw: random.Random) -> bytes:
    """Return a message that fits the schema, and asks for what is not, or is not a job's to ask."""
    largest = messages.MAX_NUMBER
    return messages.encode(
        draw.choice(
            [
                Hello(messages.VERSION, "[/x] \x1b[2J"),
                Hello(messages.VERSION, "", "é" * messages.TEXT_CHARACTERS),
                Hello(messages.VERSION, "", "", "", 2**64 - 1, signature_of("batches")),
                Hello(messages.VERSION, "", signature=signature_of("batches")),
                EpochRequest(largest, largest, 0),
                EpochRequest(1, largest, 19),
                EpochRequest(2, 0, largest),
                EpochRequest(3, 1, 18),
                EpochRequest(4, None, largest),
                Release([0] * messages.MAX_LEASES),
                Release(list(range(100))),
            ]
        )
    )


@functools.cache
def signature_of(kind: str) -> list[str]:
    return list(getattr(served, kind)().chain.signature())


def attack(name: str, draw: random.Random) -> None:
    """Connect, greet perhaps, and say what makes no sense."""
    connection = local_feeds.connect(name)
    assert connection is not None
    with connection:
        connection.settimeout(10)
        with contextlib.suppress(OSError):  # the feeder has hung up
            if draw.random() < 0.7:
                messages.send(connection, Hello(messages.VERSION, "hostile"))
            if draw.random() < 0.3:
                messages.send(connection, EpochRequest(1, None, 0))
            for _ in range(draw.randint(0, 5)):
                kind = draw.randrange(4)
                packet = draw.choice(PACKETS)
                if kind == 0:
                    packet = targeted(draw)
                elif kind == 1:
                    packet = packet[: draw.randrange(1, len(packet) + 1)]
                elif kind == 2:
                    packet = mutated(packet, draw)
                if draw.random() < 0.02:
                    packet = bytes(messages.MAX_PACKET_BYTES + draw.randint(-1, 1))
                passed = pipe_descriptors(draw.choice([1, 2, 253])) if draw.random() < 0.2 else []
                connection.sendmsg([packet], passed)
            if draw.random() < 0.5:
                connection.setblocking(False)
                connection.recv(messages.MAX_PACKET_BYTES)


@pytest.mark.parametrize("kind", ["batches", "filtered", "examples"])
def test_an_honest_job_goes_on_beside_a_hostile_one(name: str, kind: str) -> None:
    draw = random.Random(f"beside {kind}")
    expected = served.expected(kind, 0), served.expected(kind, 1)
    with feeding(getattr(served, kind), name) as feeder:
        feed = stoker.from_feed(name)
        for epoch in range(60 if FULL else 2):
            got = []
            for output in feed:
                got.append(served.digest(output))
                for _ in range(5 if FULL else 2):
                    attack(name, draw)
            assert epoch > 1 or got == expected[epoch]
            assert len(got) == len(expected[0])
        assert feeder.is_alive()


def test_messages_that_would_end_a_feeder(name: str) -> None:
    """Text that is no UTF-8, and too long; a seed that cannot be, and numbers beyond counting."""
    hello, signature = messages.encode(Hello(messages.VERSION, "")), signature_of("batches")
    with feeding(served.batches, name) as feeder:
        for packets in (
            [messages.encode(HELLO).replace(b"a job", b"a \xff\xfe\xfd")],
            [messages.encode(Hello(messages.VERSION, "", "x" * 65_500))],
            [messages.encode(["Hello", messages.VERSION, "", "", "", -1, signature])],
            [hello, messages.encode(["Ask", 1, 2**64 - 1, 19])],
            [hello, messages.encode(["Ask", 1, 0, 2**64 - 1])],
        ):
            connection = local_feeds.connect_within(name, WITHIN_S)
            assert connection is not None
            with connection:
                connection.settimeout(WITHIN_S)
                for packet in packets:
                    connection.send(packet)
                with contextlib.suppress(ConnectionResetError):
                    while packet := connection.recv(messages.MAX_PACKET_BYTES):
                        assert b"ItemMessage" not in packet
            feed = stoker.from_feed(name)
            found = [served.digest(batch) for batch in feed]
            place = feed.state_dict()["loader"][0]  # behind the epoch: where the next one begins
            assert found == served.expected("batches", place["epoch"] - 1)
            assert feeder.is_alive()
            del feed


def test_a_command_line_that_looks_like_markup_is_shown_as_it_is(name: str) -> None:
    from rich.console import Console

    from stoker.feeds.feed_view import FeedView
    from stoker.feeds.local_feeds import FeedSettings
    from stoker.feeds.server import FeedServer

    listener = local_feeds.listen(name)
    assert listener is not None
    feeder = FeedServer(listener, served.batches(), FeedSettings(name, ""))
    shown: list[str] = []

    def show() -> None:
        out = io.StringIO()
        Console(file=out, width=200).print(FeedView(feeder).table())
        shown.append(out.getvalue())
        if "train" in shown[-1] or len(shown) > 100:
            raise KeyboardInterrupt

    connection = local_feeds.connect(name)
    assert connection is not None
    with connection:
        messages.send(connection, Hello(messages.VERSION, "train [/b] [red]\x1b[2J"))
        with pytest.raises(KeyboardInterrupt):
            feeder.serve(show, 0.05)
    feeder.close()
    assert "train [/b] [red]?[2J" in shown[-1]


def test_a_failure_that_names_a_file_of_any_name(name: str, tmp_path: Path) -> None:
    """What is no UTF-8 can be part of a reason, of a target and of a command line."""
    folder = os.fsencode(tmp_path) + b"/c"
    os.mkdir(folder)
    Path(os.fsdecode(folder + b"/caf\xe9.png")).symlink_to("nowhere")
    with feeding(lambda: stoker.from_folder(tmp_path), name) as feeder:
        for _ in range(2):
            with pytest.raises(stoker.StokerError, match=r"caf\\udce9\.png"):
                list(stoker.from_feed(name))
        assert feeder.is_alive()


def test_a_target_and_arguments_of_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = os.path.join(tmp_path, os.fsdecode(b"caf\xe9.py"))
    Path(script).write_text(Path(failing.__file__).read_text())
    monkeypatch.setattr("sys.argv", [script, os.fsdecode(b"\xff" * 300)])
    feed = stoker.feed(f"{script}:loader", name=name)
    assert list(feed) == [[number] for number in range(10)]


def test_a_seed_that_cannot_be_told_is_refused(name: str) -> None:
    from stoker.feeds.local_feeds import FeedSettings
    from stoker.feeds.server import FeedServer

    listener = local_feeds.listen(name)
    assert listener is not None
    with listener, pytest.raises(stoker.FeedError, match=r"below 2\*\*64"):
        FeedServer(
            listener,
            stoker.from_dataset(range(9), seed=2**64),
            FeedSettings(name, ""),
        )


# -- a job, and a feeder that is none


Says = Callable[[Any], Any]


class Impostor:
    """Answers as a feeder would, up to where ``says`` takes over."""

    def __init__(self, name: str, says: Says, welcome: Any = None) -> None:
        listener = local_feeds.listen(name)
        assert listener is not None
        self._listener = listener
        self._says = says
        self._welcome = WELCOME if welcome is None else welcome
        self._blocks = Blocks()
        self.payload: Any = None
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Impostor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.payload = None
        self._blocks.clear()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(WITHIN_S)
                    self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        messages.receive_as_feeder(connection)
        if not isinstance(self._welcome, Message):
            connection.send(self._welcome)
            return
        messages.send(connection, self._welcome)
        ask = messages.receive_as_feeder(connection)
        if isinstance(ask, EpochRequest):
            self._connection, self._turn = connection, ask.request_id
            self._says(self)
            connection.recv(1)  # until the job hangs up, or says what it thinks of it

    def begins(self) -> None:
        self.send(Begin(self._turn, 0, 0))

    def send(self, message: Any, descriptors: list[int] | None = None) -> None:
        if isinstance(message, Message):
            message = messages.encode(message)
        rights: Any = np.array(descriptors or [], "i")
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        self._connection.sendmsg([message], passed if descriptors else [])

    def item(self, number: int = 0, **changed: Any) -> None:
        """Send an output in shared memory."""
        with_descriptors = changed.pop("descriptors", None)
        self.payload = shared_memory.to_payload(np.full(10_000, float(number)), self._blocks)
        self.payload.mark(number + 1)
        fields = {
            "request_id": self._turn,
            "epoch": 0,
            "number": number,
            "count": 1,
            "lease": number,
            "generations": [block.generation for block in self.payload.blocks],
            "header": self.payload.header,
            "places": self.payload.places,
            **changed,
        }
        held = [block.descriptor for block in self.payload.blocks]
        self.send(ItemMessage(**fields), held if with_descriptors is None else with_descriptors)


def unsealed() -> int:
    memory = os.memfd_create("none", os.MFD_CLOEXEC)
    os.ftruncate(memory, 1 << 20)
    return memory


def no_memory() -> int:
    return os.open("/dev/null", os.O_RDONLY)


def item(**changed: Any) -> Says:
    return lambda feeder: (feeder.begins(), feeder.item(**changed))


def handing(make: Callable[[], int], times: int = 1) -> Says:
    def says(feeder: Any) -> None:
        feeder.begins()
        descriptor = make()
        feeder.item(descriptors=[descriptor] * times)
        os.close(descriptor)

    return says


def then(*said: Any) -> Says:
    def says(feeder: Any) -> None:
        feeder.begins()
        for message in said:
            feeder.send(message)

    return says


NONSENSE: dict[str, Says] = {
    "no message": lambda feeder: feeder.send(b"\xc1"),
    "too long": lambda feeder: feeder.send(bytes(messages.MAX_PACKET_BYTES + 1)),
    "half a message": then(messages.encode(End(1, 0, 0))[:-1]),
    "no UTF-8": then(messages.encode(Failed(1, "abc")).replace(b"abc", b"\xff\xfe\xfd")),
    "what a job says": then(messages.encode(Release([]))),
    "a welcome": then(WELCOME),
    "a refusal": then(Refused("not you")),
    "an answer to what was not asked yet": then(Evicted(99)),
    "an item before the beginning": lambda feeder: feeder.item(),
    "the end before the beginning": lambda feeder: feeder.send(End(1, 0, 0)),
    "an end of another epoch": then(End(1, 1, 0)),
    "an end that skips outputs": then(End(1, 0, 3)),
    "two beginnings": then(Begin(1, 0, 0)),
    "descriptors of nothing": lambda feeder: feeder.send(Begin(1, 0, 0), [0]),
    "no descriptors": item(descriptors=[]),
    "too many descriptors": handing(no_memory, 253),
    "no memory": handing(no_memory),
    "memory that may shrink": handing(unsealed),
    "a pipe": handing(lambda: os.dup(0)),
    "another number": item(number=1),
    "another epoch": item(epoch=1),
    "several at once": item(count=2),
    "no header": item(header=b""),
    "half a header": item(header=b"\x80\x05\x95\xff\xff"),
    "no pickle": item(header=b"\xff" * 100),
    "another pickle": item(header=b"N."),
    "a header that is nowhere": item(header=b"", places=[(7, 0, 10)]),
    "a header behind the end": item(header=b"", places=[(0, 1 << 40, 10)]),
    "an array that is nowhere": item(places=[]),
    "an array in another block": item(places=[(3, 0, 80_000)]),
    "an array behind the end": item(places=[(0, 1 << 40, 80_000)]),
    "an array that is too short": item(places=[(0, 0, 79_999)]),
}
RIGHT = {"another pickle"}  # it gives None, which a feed may hand out


@pytest.mark.parametrize("what", shortened(NONSENSE, 8))
def test_what_makes_no_sense_to_a_job_is_one_feed_error(name: str, what: str) -> None:
    gc.collect()
    before = open_descriptors()
    raised = first_of(name, NONSENSE[what])
    if what in RIGHT:
        assert raised == ""
    else:
        assert raised.startswith("FeedError: the feeder of ")
        assert "invalid message" in raised
        assert "\n" not in raised
    gc.collect()
    assert open_descriptors() <= before


def first_of(name: str, says: Says) -> str:
    """Take an output of a feed; return what was raised."""
    with Impostor(name, says):
        outputs = iter(stoker.from_feed(name))
        try:
            assert next(outputs) is None
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            outputs.close()
    return ""


@pytest.mark.parametrize(
    "welcome",
    [
        b"\xc1",
        messages.encode(WELCOME)[:-1],
        messages.encode(WELCOME).replace(b"\xa1a", b"\xa1\xff"),
        messages.encode(Welcome(True, -1, 1, [], True, 2, 7, 0)),
        messages.encode(Welcome(True, 3, 1, [], True, 0, 7, 0)),
        messages.encode(Evicted(1)),
    ],
    ids=["no message", "half", "no UTF-8", "a length below 0", "nothing lent", "no welcome"],
)
def test_a_welcome_that_makes_no_sense_is_a_feed_error(name: str, welcome: bytes) -> None:
    with Impostor(name, lambda feeder: None, welcome), pytest.raises(stoker.FeedError):
        stoker.from_feed(name)


def test_whatever_comes_to_a_job_is_an_output_or_a_feed_error(name: str) -> None:
    draw = random.Random(2)
    rounds = 3_000 if FULL else 100

    def says(feeder: Any) -> None:
        feeder.begins()
        feeder.item()
        for message in (End(1, 0, 1), Evicted(1), ITEM, Failed(1, "x")):
            if draw.random() < 0.5:
                feeder.send(mutated(messages.encode(message), draw), [0] * draw.randrange(3))
        feeder._connection.shutdown(socket.SHUT_RDWR)

    with Impostor(name, says):
        for _ in range(rounds):
            outputs = iter(stoker.from_feed(name))
            with contextlib.suppress(stoker.FeedError):
                for output in outputs:
                    assert output is None or np.array_equal(output, np.zeros(10_000))
            outputs.close()


def test_states_of_a_job_that_cannot_be(name: str) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        *({"number": number} for number in (-1, "1", 20, None)),
        *({"epoch": epoch} for epoch in (-1, 2**70, 1.5)),
        {"signature": 3},
        {"seed": "x"},
    )
    with feeding(served.batches, name):
        for each in wrong:
            feed = stoker.from_feed(name)
            state = feed.state_dict()
            state["loader"][0].update({"epoch": 0, "number": 3, **each})
            feed.load_state_dict(state)
            with pytest.raises(stoker.StateError):
                iter(feed)
            assert feeder_of(name) is not None
