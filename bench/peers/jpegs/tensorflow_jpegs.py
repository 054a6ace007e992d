"""tf.data over image files: of a JPEG the codec decodes the box alone; two-pixel bilinear."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from serve_jpegs import SIDE, box, files_of


def epochs(folder: str, variant: str, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    paths, labels = zip(*files_of(folder), strict=True)
    rng = np.random.default_rng()
    is_jpeg = paths[0].endswith(".jpg")

    def drawn(height: Any, width: Any) -> Any:
        return np.array(box(int(height), int(width), rng.random), np.int32)

    def crop(path: Any, label: Any) -> Any:
        data = tf.io.read_file(path)
        whole = None if is_jpeg else tf.image.decode_png(data, channels=3)
        shape = tf.io.extract_jpeg_shape(data) if is_jpeg else tf.shape(whole)
        window = tf.numpy_function(drawn, [shape[0], shape[1]], tf.int32, stateful=True)
        window = tf.ensure_shape(window, [4])
        if is_jpeg:
            image = tf.image.decode_and_crop_jpeg(data, window, channels=3)
        else:
            top, left, height, width = tf.unstack(window)
            image = tf.image.crop_to_bounding_box(whole, top, left, height, width)
        image = tf.image.resize(image, [SIDE, SIDE])
        image = tf.image.random_flip_left_right(image)
        return tf.cast(image, tf.uint8), label

    options = tf.data.Options()
    options.threading.private_threadpool_size = workers
    data = (
        tf.data.Dataset.from_tensor_slices((list(paths), list(labels)))
        .shuffle(len(paths), reshuffle_each_iteration=True)
        .map(crop, num_parallel_calls=workers, deterministic=False)
        .batch(batch, drop_remainder=True)
        .prefetch(2)
        .with_options(options)
    )
    return data.as_numpy_iterator
