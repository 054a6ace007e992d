"""``from_parquet(filters=)``: the rows that match, by statistics and a pass over some columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyarrow import dataset, parquet

from stoker.sources.arrow.parquet import ParquetSource


def matching_rows(source: ParquetSource, filters: Any) -> NDArray[np.bool_]:
    """Return for each row of Parquet files whether it matches the filters, ``bool [n]``.

    It reads only the named columns, and only row groups that may have a match.
    """
    alternatives = _checked(filters)
    names = dict.fromkeys(column for all_of in alternatives for column, _, _ in all_of)
    source = source.of_columns([*names])
    matches, ends = np.zeros(len(source), np.bool_), source.blocks
    try:
        condition = parquet.filters_to_expression(alternatives)
        # Statistics do not tell of NaN, which is unequal to everything.
        told = [[c for c in all_of if c[1] not in ("!=", "not in")] for all_of in alternatives]
        groups = source.groups_that_may_match(
            parquet.filters_to_expression(told) if all(told) else None
        )
        for group, table in zip(groups, source.tables(groups), strict=True):
            found = dataset.dataset(table).to_table(columns={"matches": condition})["matches"]
            end = int(ends[group])
            matches[end - table.num_rows : end] = found.fill_null(False).to_numpy()
    except (TypeError, NotImplementedError) as error:  # of pyarrow
        raise TypeError(f"from_parquet(filters={filters!r}): {error}") from error
    except ValueError as error:
        raise ValueError(f"from_parquet(filters={filters!r}): {error}") from error
    return matches


def _checked(filters: Any) -> list[list[Any]]:
    """Return filters as alternatives, each a list of conditions. Raises TypeError."""
    if isinstance(filters, (list, tuple)) and filters:
        alternatives = filters if isinstance(filters[0], list) else [filters]
        if all(_are_conditions(conditions) for conditions in alternatives):
            return [list(map(tuple, conditions)) for conditions in alternatives]
    raise TypeError(
        "from_parquet() takes filters= as a list of conditions (column, operator, value), such as "
        f"[('height', '>=', 256)], or a list of such lists; not {filters!r}"
    )


def _are_conditions(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and bool(given) and all(map(_is_condition, given))


def _is_condition(each: Any) -> bool:
    return isinstance(each, (list, tuple)) and len(each) == 3 and isinstance(each[0], str)
