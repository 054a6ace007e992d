"""Values on a connection: they come out as they went in, whatever they are made of."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.basics import pytree
from stoker.cluster.workers.link_channel import FlatValue, Inbox, say_alive
from stoker.transport.link import Link, LinkError

arrays = st.builds(
    lambda dtype, shape, order: np.asarray(
        np.arange(int(np.prod(shape))).reshape(shape).astype(dtype), order=order
    ),
    st.sampled_from(["u1", "f4", "f8", "c16", "S3"]),
    st.lists(st.integers(0, 40), min_size=0, max_size=3),
    st.sampled_from(["C", "F"]),
)
values = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(), st.binary(max_size=9_000), arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def ends() -> tuple[Link, Link]:
    """Two ends of a connection."""
    one, other = socket.socketpair()
    return Link(one, "one", 5.0), Link(other, "other", 5.0)


@given(st.lists(values, min_size=1, max_size=3))
def test_values_come_out_as_they_went_in(ends: tuple[Link, Link], sent: list[Any]) -> None:
    there, here = ends
    inbox = Inbox()

    def send() -> None:
        for value in sent:
            say_alive(there)
            FlatValue(value).send(there)

    sending = threading.Thread(target=send)
    sending.start()
    for value in sent:
        assert pytree.equal(inbox.receive(here, wait_s=5.0), value)
    sending.join()


def test_arrays_that_come_out_may_be_written_to(ends: tuple[Link, Link]) -> None:
    there, here = ends
    FlatValue([np.zeros(5_000), np.ones(3)]).send(there)

    for array in Inbox().receive(here):
        array += 1
        assert array.flags.aligned


def test_silence_is_told_and_the_connection_goes_on(ends: tuple[Link, Link]) -> None:
    there, here = ends
    inbox = Inbox()
    with pytest.raises(TimeoutError, match="has sent nothing for"):
        inbox.receive(here, wait_s=0.05)
    FlatValue("late").send(there)

    assert inbox.receive(here, wait_s=5.0) == "late"


@pytest.mark.parametrize("header", [b"abc", struct.pack("<2Q", 10, 10), struct.pack("<Q", 0)])
def test_parts_that_do_not_fit_are_refused(header: bytes) -> None:
    one, other = socket.socketpair()
    there, here = Link(one, "one", 5.0), Link(other, "other", 5.0)
    there.send(header, b"1234")

    with pytest.raises(LinkError, match="parts do not fit"):
        Inbox().receive(here)
