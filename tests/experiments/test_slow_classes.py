"""The orders in which slow examples come, and the page that has the table of their trainings."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments.slow_classes.__main__ import main
from experiments.slow_classes.orders import ORDERS, as_they_come, late, slow_last
from experiments.slow_classes.page import PAGE, ROWS, with_table

BATCH = 32


def test_each_order_has_each_example_once() -> None:
    is_slow = np.random.default_rng(0).random(40 * BATCH) < 0.2
    for order in ORDERS.values():
        assert sorted(order(is_slow, BATCH)) == list(range(len(is_slow)))


def test_slow_examples_come_later_and_not_too_late() -> None:
    is_slow = np.random.default_rng(0).random(40 * BATCH) < 0.2
    own = np.arange(len(is_slow)) // BATCH
    for order, most in ((late(2), 2), (as_they_come, 40), (slow_last, 40)):
        batch = np.argsort(order(is_slow, BATCH)) // BATCH
        assert np.abs(batch - own).max() <= most
        assert (batch - own)[is_slow].mean() > 0 > (batch - own)[~is_slow].mean()
    all_fast = np.zeros(len(is_slow), bool)
    for order in ORDERS.values():
        assert order(all_fast, BATCH).tolist() == list(range(len(is_slow)))


def test_the_page_has_the_table_of_the_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text
    assert len(json.loads(ROWS.read_text(encoding="utf-8"))["rows"]) == 2 * len(ORDERS)


@pytest.mark.full
def test_the_quick_one_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick"])
    said = capsys.readouterr().out
    assert said.count("`late=2`") == 4
