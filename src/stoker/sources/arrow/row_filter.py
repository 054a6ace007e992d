"""``from_parquet(filters=)``: finds matching rows by statistics and a pass over some columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.sources.arrow.parquet import ParquetSource
from stoker.sources.arrow.table import import_pyarrow

_OPERATORS = ("=", "==", "!=", "<", ">", "<=", ">=", "in", "not in")


class _Condition(NamedTuple):
    column: str
    operator: str
    value: Any

    def may_match(self, statistics: Any) -> bool:
        """True if a row group with these statistics of the column may have a match."""
        if statistics is None or not statistics.has_min_max:
            return True
        low, high, value = statistics.min, statistics.max, self.value
        try:
            match self.operator:
                case "=" | "==":
                    return bool(low <= value <= high)
                case "<":
                    return bool(low < value)
                case "<=":
                    return bool(low <= value)
                case ">":
                    return bool(high > value)
                case ">=":
                    return bool(high >= value)
                case "in":
                    return any(low <= each <= high for each in value)
                case _:  # statistics do not tell of NaN, which is unequal to everything
                    return True
        except TypeError:  # not to be compared: pyarrow will say so
            return True


def matching_rows(source: ParquetSource, filters: Any) -> NDArray[np.bool_]:
    """Return for each row of Parquet files whether it matches the filters, ``bool [n]``.

    It reads only the named columns, and only row groups that may have a match.

    Args:
        filters: a list of conditions ``(column, operator, value)``, all of which must hold; or a
            list of such lists, one of which must hold.

    Raises TypeError or ValueError for invalid filters, and for values that do not fit the columns.
    """
    alternatives = _parse(filters)
    names = list(dict.fromkeys(each.column for one in alternatives for each in one))
    source = source.of_columns(names)
    groups = [
        group
        for group in range(source.row_groups)
        if any(_may_match(one, source.statistics(group)) for one in alternatives)
    ]
    parquet = import_pyarrow("from_parquet", "pyarrow.parquet")
    dataset = import_pyarrow("from_parquet", "pyarrow.dataset")
    matches = np.zeros(len(source), np.bool_)
    ends = source.blocks
    try:
        condition = parquet.filters_to_expression(
            [[tuple(each) for each in one] for one in alternatives]
        )
        for group, table in zip(groups, source.tables(groups), strict=True):
            found = dataset.dataset(table).to_table(columns={"matches": condition})["matches"]
            end = int(ends[group])
            matches[end - table.num_rows : end] = found.fill_null(False).to_numpy()
    except (TypeError, NotImplementedError) as error:  # of pyarrow
        raise TypeError(f"from_parquet(filters={filters!r}): {error}") from error
    return matches


def _may_match(conditions: Sequence[_Condition], statistics: dict[str, Any]) -> bool:
    return all(each.may_match(statistics.get(each.column)) for each in conditions)


def _parse(filters: Any) -> list[list[_Condition]]:
    """Return filters as alternatives, each a list of conditions. Raises TypeError or ValueError."""
    shape = (
        "from_parquet() takes filters= as a list of conditions (column, operator, value), such "
        "as [('height', '>=', 256)], or a list of such lists"
    )
    if not isinstance(filters, (list, tuple)) or not filters:
        raise TypeError(f"{shape}; not {filters!r}")
    alternatives = filters if isinstance(filters[0], list) else [filters]
    found = []
    for conditions in alternatives:
        if not isinstance(conditions, (list, tuple)) or not conditions:
            raise TypeError(f"{shape}; not {conditions!r}")
        one = []
        for each in conditions:
            if not isinstance(each, (list, tuple)) or len(each) != 3 or type(each[0]) is not str:
                raise TypeError(f"{shape}; not {each!r}")
            condition = _Condition(*each)
            if condition.operator not in _OPERATORS:
                raise ValueError(
                    f"from_parquet(filters=): there is no operator {condition.operator!r}, but "
                    f"{', '.join(_OPERATORS)}"
                )
            one.append(condition)
        found.append(one)
    return found
