"""tf.data: from_tensor_slices, a full shuffle, batch, prefetch; a private pool of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

PACKAGE = "tensorflow-cpu"


def epochs(
    images: Any, labels: Any, batch: int, workers: int
) -> Callable[[], Iterable[tuple[Any, Any]]]:
    options = tf.data.Options()
    options.threading.private_threadpool_size = workers
    data = (
        tf.data.Dataset.from_tensor_slices((images, labels))
        .shuffle(len(labels), reshuffle_each_iteration=True)
        .batch(batch, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
        .with_options(options)
    )
    return data.as_numpy_iterator
