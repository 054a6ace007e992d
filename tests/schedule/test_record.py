"""Records of what echoes decided: written, read again, and refused if they are something else."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.schedule.echo_record import Decisions, EchoRecord, decode, encode
from strategies import FULL, paths_of

decisions = st.builds(Decisions, st.just(0), st.integers(0, 10**6), st.binary(max_size=300))


@st.composite
def echo_records(draw: st.DrawFn) -> EchoRecord:
    each = draw(st.dictionaries(st.integers(0, 10**4), decisions, max_size=3))
    epochs = {epoch: Decisions(epoch, one.first, one.codes) for epoch, one in each.items()}
    return EchoRecord(draw(st.integers(1, 10**6)), epochs)


SIGNATURE = ["DatasetSource of 40", "echo(auto, max_factor=4)", "batch(8, drop_last=False)"]


@settings(max_examples=500 if FULL else 8)
@given(
    st.integers(0, 2**63), st.lists(st.text(max_size=40), max_size=5), st.none() | echo_records()
)
def test_what_is_written_is_read_again(
    seed: int, signature: list[str], made: EchoRecord | None
) -> None:
    record = encode(seed, signature, made, {})
    for given_ in (record, json.loads(json.dumps(record))):
        found = decode(given_, None)
        assert (found.seed, found.pipeline, found.echo) == (seed, signature, made)


def test_it_takes_at_most_two_bytes_a_step() -> None:
    codes = np.random.default_rng(0).integers(0, 256, 5_000, np.uint8).tobytes()
    made = EchoRecord(4096, {0: Decisions(0, 0, codes)})
    assert len(json.dumps(encode(2**63, SIGNATURE, made, {}))) <= 1.25 * len(codes) + 300


# -- what stands in it


def test_decisions_know_where_they_begin_and_end() -> None:
    made = Decisions(3, 10, bytes([7, 8, 9]))
    assert [made.code(step) for step in (10, 11, 12, 13, 99)] == [7, 8, 9, None, None]
    for step in (0, 9):
        with pytest.raises(stoker.StateError, match=r"epoch 3 begins at batch 10.*state") as caught:
            made.code(step)
        assert "\n" not in str(caught.value)
    with pytest.raises(stoker.StateError, match=r"epoch 3 ends at batch 13.*without .replay"):
        made.raise_ended(13)


@given(st.binary(max_size=20), st.integers(0, 30), st.binary(max_size=20), st.integers(0, 30))
def test_decisions_after_a_resume_join_those_before_it(
    early: bytes, first: int, late: bytes, at: int
) -> None:
    before, after = Decisions(0, first, early), Decisions(0, at, late)
    joined = after.after(before)
    steps = range(70)
    assert after.after(None) == after
    # What was decided anew counts; what was not is kept, if there is no gap.
    if first <= at <= first + len(early):
        assert joined.first == first
        for step in steps:
            known = after if step >= at else before
            assert step < first or joined.code(step) == known.code(step)
    else:
        assert joined == after


def test_an_epoch_or_an_echo_that_is_not_on_record_is_told_with_what_is() -> None:
    epochs = {epoch: Decisions(epoch, 0, b"a") for epoch in (1, 4)}
    record = decode(encode(0, SIGNATURE, EchoRecord(40, epochs), {}), None)
    assert record.of(4) == epochs[4]
    with pytest.raises(stoker.StateError, match=r"no epoch 0; it has 1, 4$"):
        record.of(0)
    many = {epoch: Decisions(epoch, 0, b"a") for epoch in range(40)}
    with pytest.raises(stoker.StateError, match=r"no epoch 99; it has 0, 1, .*9, \.\.\.$"):
        decode(encode(0, SIGNATURE, EchoRecord(40, many), {}), None).of(99)
    with pytest.raises(stoker.StateError, match="no epoch 0; it has none"):
        decode(encode(0, SIGNATURE, EchoRecord(40, {}), {}), None).of(0)
    with pytest.raises(stoker.StateError, match="no epoch 4; it has none"):
        decode(encode(0, SIGNATURE, None, {}), None).of(4)


# -- refused


def sound() -> dict[str, Any]:
    epochs = {e: Decisions(e, 0, bytes(range(40))) for e in (0, 1)}
    return encode(7, SIGNATURE, EchoRecord(64, epochs), {})


def refused(record: Any) -> str:
    with pytest.raises(stoker.StateError) as caught:
        decode(record, None)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


@pytest.mark.parametrize("foreign", [None, 3, [], {}, {"seed": 3}, "", "{", "[]", "3", "null"])
def test_what_is_no_record_is_refused(foreign: Any) -> None:
    assert "no record of a stoker run" in refused(foreign)


def test_a_state_is_no_record() -> None:
    state = stoker.from_arrays(np.arange(9)).echo().batch(2).state_dict()
    assert "pipeline.record() makes one" in refused(state)


@pytest.mark.parametrize("other", [None, 0, 1, 3, "2"])
def test_a_record_of_another_format_is_refused(other: Any) -> None:
    assert f"format {other}; this version reads 2" in refused({**sound(), "format": other})


WRONG: list[Any] = [None, "x", -1, 2.5, [], {}, [[]], {"x": 1}, "?" * 40]


@given(st.data())
def test_a_damaged_record_is_refused_in_one_line(data: st.DataObject) -> None:
    damaged = copy.deepcopy(sound())
    where = [path for path in paths_of(damaged) if path[0] != "pipeline" or len(path) == 1]
    path = data.draw(st.sampled_from(where), label="where")
    wrong = data.draw(st.sampled_from(WRONG), label="by")
    at: Any = damaged
    for step in path[:-1]:
        at = at[step]
    if len(path) in (1, 2, 4) and data.draw(st.booleans(), label="removed"):
        del at[path[-1]]
    elif (
        (path[-1] == "epochs" and wrong == {})
        or (path[-1] == "echo" and wrong is None)
        or path[0] in ("seed", "pipeline")
    ):
        return  # a record of nothing, or of something else
    else:
        at[path[-1]] = wrong
    refused(damaged)


@pytest.mark.parametrize("what", ["pool", "first"])
def test_a_number_that_cannot_be_is_refused(what: str) -> None:
    for wrong in (-1, 0, 2.5):
        damaged = sound()
        echo = damaged["echo"]
        place = echo["epochs"]["1"] if what == "first" else echo
        place[what] = wrong
        if (what, wrong) != ("first", 0):
            refused(damaged)


@given(st.integers(0, 200), st.sampled_from("~A0z"))
def test_a_damaged_letter_in_what_was_decided_is_noticed(at: int, letter: str) -> None:
    damaged = sound()
    epoch = damaged["echo"]["epochs"]["0"]
    codes: str = epoch["codes"]
    at %= len(codes)
    epoch["codes"] = codes[:at] + letter + codes[at + 1 :]
    try:
        assert decode(damaged, None) == decode(sound(), None)  # some bits stand for nothing
    except stoker.StateError:
        assert "damaged" in refused(damaged)
