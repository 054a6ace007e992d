"""tf.data over tensors in memory: row numbers are shuffled and batched, and a map gathers them.

``from_tensor_slices(...).shuffle(n).batch(size)``, row by row, is slower. A Parquet file is read
whole by pyarrow before. Documents are joined and split by ``rebatch``.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from serve_rows import BATCHES, LENGTH, PACKED, WORKERS, Documents, columns_of, tokens_of


def numbers(count: int) -> Any:
    """Return shuffled numbers, anew in each epoch."""
    return tf.data.Dataset.range(count).shuffle(count, reshuffle_each_iteration=True)


def fed(data: Any) -> Any:
    options = tf.data.Options()
    options.threading.private_threadpool_size = WORKERS
    return data.prefetch(tf.data.AUTOTUNE).with_options(options).as_numpy_iterator


def gathered(columns: dict[str, Any], task: str) -> Any:
    held = {name: tf.constant(column) for name, column in columns.items()}

    def gather(rows: Any) -> Any:
        return {name: tf.gather(column, rows) for name, column in held.items()}

    order = numbers(len(columns["n"])).batch(BATCHES[task])
    return fed(order.map(gather, num_parallel_calls=tf.data.AUTOTUNE))


def windows(folder: str, variant: str) -> Any:
    tokens = tf.constant(tokens_of(folder))
    count = (len(tokens) - 1) // LENGTH
    steps = tf.range(LENGTH + 1, dtype=tf.int64)

    def gather(rows: Any) -> Any:
        found = tf.cast(tf.gather(tokens, rows[:, None] * LENGTH + steps), tf.int64)
        return found[:, :-1], found[:, 1:]

    order = numbers(count).batch(BATCHES["windows"])
    return fed(order.map(gather, num_parallel_calls=tf.data.AUTOTUNE))


def packed(folder: str, variant: str) -> Any:
    documents = Documents(folder)
    tokens = tf.constant(tokens_of(folder))
    ends = tf.constant([0, *documents.ends], tf.int64)

    def document(number: Any) -> Any:
        found = tf.cast(tokens[ends[number] : ends[number + 1]], tf.int64)
        count = tf.size(found)
        return found, tf.fill([count], number), tf.range(count)

    each = numbers(len(documents)).map(document, num_parallel_calls=tf.data.AUTOTUNE)
    return fed(each.rebatch(PACKED, drop_remainder=True).batch(BATCHES["packed"]))


def table(folder: str, variant: str) -> Any:
    return gathered(columns_of(folder), "table")


def parquet(folder: str, variant: str) -> Any:
    import pyarrow.parquet as pq

    whole = pq.read_table(f"{folder}/rows.parquet")
    return gathered({name: whole[name].to_numpy() for name in whole.column_names}, "parquet")
