"""Python functions in JavaScript; that they compute the same is tested in the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker.analysis.model.model import predict
from stoker.analysis.reports.javascript import translate

LIMIT = 3


def double(value: float) -> float:
    """Return twice the value."""
    return 2 * value


def clamp(first_value: float) -> float:
    if first_value > LIMIT:
        first_value = double(LIMIT)
    return first_value


def raise_to_power(value: float) -> float:
    return value**2


def compare_in_a_chain(value: float) -> bool:
    return 0 < value < 1


def loop_while(value: float) -> float:
    while value > 1:
        value /= 2
    return value


def collect(values: list[float]) -> set[float]:
    return {value for value in values}  # noqa: C416


def test_a_function_brings_what_it_uses() -> None:
    script = translate(clamp)
    assert "const LIMIT = 3;" in script
    assert "function double(value) {\n  return (2 * value);\n}" in script
    assert "function clamp(firstValue)" in script
    assert script.count("function ") == 2


def test_checks_stay_in_python() -> None:
    script = translate(predict)
    assert "checkChange" not in script
    assert "FED = 0.05" in script


@pytest.mark.parametrize("function", [raise_to_power, compare_in_a_chain, loop_while, collect])
def test_what_cannot_be_translated_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="cannot be said in JavaScript"):
        translate(function)
