"""``advise``: measures which is cheaper, decoding whole images before an echo or crops after it.

There are two orders. Cropping files decodes, at each use, the part that the crop needs. Decoding
first decodes the whole image once, and each use crops pixels. Which one is cheaper depends on the
files, on the crop and on the number of uses.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from stoker.basics.pytree import Field
from stoker.images.decoding import decode, file_bytes, is_file
from stoker.images.image_map import ImageMap, RandomImageMap

# Files that are decoded in both orders, ``_ROUNDS`` times: some seconds for photographs. Chosen,
# not measured.
_MAX_IMAGES = 48
# The fastest of three rounds counts: another program seldom disturbs all of them.
_ROUNDS = 3

_last_advice: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], CropAdvice]]
_last_advice = weakref.WeakKeyDictionary()
"""The last advice for each crop, and the source of the measured images."""


class SourceAndStages(Protocol):
    """The part of a chain that ``advise`` reads."""

    @property
    def source(self) -> Any: ...
    @property
    def stages(self) -> Sequence[Any]: ...


class HasChain(Protocol):
    """The part of a pipeline that ``advise`` reads."""

    @property
    def chain(self) -> Any: ...


@dataclass(frozen=True)
class CropAdvice:
    """The cost of decoding and cropping a sample of images, in one thread.

    Attributes:
        images: the number of measured images.
        decode_ms: processor time of decoding one image in full, in ms.
        crop_of_pixels_ms: processor time of cropping a decoded image, in ms.
        crop_of_file_ms: processor time of cropping an encoded image, in ms.
    """

    images: int
    decode_ms: float
    crop_of_pixels_ms: float
    crop_of_file_ms: float

    @property
    def least_factor(self) -> float:
        """The echo factor from which decoding first is cheaper; inf if it never is."""
        saved_ms = self.crop_of_file_ms - self.crop_of_pixels_ms
        return max(1.0, self.decode_ms / saved_ms) if saved_ms > 0 else math.inf

    @property
    def keeps_up_to(self) -> float:
        """The largest R at which cropping files keeps up with training, without an echo.

        R is the time to prepare an example divided by the time to train on it, measured with full
        decodes.
        """
        return (self.decode_ms + self.crop_of_pixels_ms) / self.crop_of_file_ms

    def __str__(self) -> str:
        lines = [
            f"{self.images} images, ms of processor time each: decode {self.decode_ms:.2f}, crop "
            f"pixels {self.crop_of_pixels_ms:.2f}, crop the file {self.crop_of_file_ms:.2f}"
        ]
        if self.least_factor == math.inf:
            lines.append("crop files: cropping pixels is never cheaper, at any echo factor")
        elif self.least_factor <= 1:
            lines.append("decode first: cropping a file costs as much as decoding all of it")
        else:
            lines += [
                f"crop files while that keeps up with training: up to R = {self.keeps_up_to:.1f}, "
                "measured with full decodes",
                "above that, decode before the echo and crop pixels after it: cheaper from a "
                f"factor of {self.least_factor:.1f} on",
            ]
        return "\n".join(lines)


def advise(pipeline: HasChain) -> CropAdvice:
    """Measure on a pipeline's own images which is cheaper: cropping files, or decoding first.

    It reads up to 48 examples from the beginning of an epoch, as the pipeline does, and measures
    both orders on each of them three times, in the calling thread. The pipeline's position does not
    change.

    Example: ``print(stoker.images.advise(train))``

    Args:
        pipeline: a pipeline with a crop of ``stoker.images``, such as ``random_resized_crop``: of
            files, or behind a ``.map(stoker.images.decode)``.

    Returns:
        The measurements, after printing them. ``print(pipeline)`` repeats them from then on.

    Raises:
        ValueError: the pipeline has no such crop, other functions stand between the decoding and
            the crop, or there are no examples.
        TypeError: the examples' images are not encoded files (``bytes``).
        OSError: none of the images can be decoded. Single damaged ones are left out.
    """
    if not hasattr(pipeline, "chain"):
        raise TypeError(f"advise needs a pipeline, not a {type(pipeline).__name__}")
    stages = pipeline.chain.stages
    first, crop_at = _find_crop(stages)
    crop, on = stages[crop_at].fn, _image_field(stages[first])
    stages_before = tuple(s for s in stages[:first] if not _is_left_out(s))
    chain = dataclasses.replace(pipeline.chain, stages=stages_before, steps=None, flows=False)
    pipeline_type: Any = type(pipeline)
    with closing(iter(pipeline_type(chain))) as examples:
        files = [_find_encoded_image(example, on) for example in islice(examples, _MAX_IMAGES)]
    if not files:
        raise ValueError("the pipeline has no examples to measure")
    decode_whole = stages[first].fn if first < crop_at else decode
    files = _decodable(files, decode_whole, crop)
    costs_s = np.min(
        [_measure_costs_s(files, decode_whole, crop) for _ in range(_ROUNDS)], axis=0
    ).mean(axis=0)
    advice = CropAdvice(len(files), *(1000 * costs_s).tolist())
    _last_advice[crop] = weakref.ref(pipeline.chain.source), advice
    print(advice)
    return advice


def hint(chain: SourceAndStages, at: int) -> str:
    """Return the note that ``print(pipeline)`` shows after the first stage that gets files.

    It names the cheaper order if ``advise`` has measured it. Otherwise it names ``advise``, if
    files are decoded in full and cropped later.
    """
    stages: Sequence[Any] = chain.stages
    if not (_decodes(stages[at].fn) or _crops(stages[at].fn)):
        return ""
    try:
        first, crop_at = _find_crop(stages)
    except ValueError:
        return ""
    if first != at:
        return ""
    source, advice = _last_advice.get(stages[crop_at].fn, (None, None))
    if advice is None or source is None or source() is not chain.source:
        note = "  in full; stoker.images.advise(pipeline) tells whether cropping files is cheaper"
        return note if first < crop_at else ""
    factor = advice.least_factor
    if first < crop_at:
        if factor <= 1:
            return "  in full; measured: cheaper than cropping files"
        range_text = "at any factor" if factor == math.inf else f"up to a factor of {factor:.1f}"
        return f"  in full; measured: cropping files is cheaper {range_text}"
    if factor == math.inf or not any(stage.traits.repeats for stage in stages[:at]):
        return ""
    return f"  measured: decoding before the echo is cheaper from a factor of {factor:.1f} on"


def _find_crop(stages: Sequence[Any]) -> tuple[int, int]:
    """Return the first stage that gets files, and the stage that crops. Raises ValueError."""
    with_functions = [at for at, stage in enumerate(stages) if hasattr(stage, "fn")]
    crop_at = next((at for at in with_functions if _crops(stages[at].fn)), None)
    if crop_at is None:
        raise ValueError(
            "this pipeline has no crop of stoker.images: add one, such as "
            ".random_map(stoker.images.random_resized_crop(224), on='image')"
        )
    first = next(
        (at for at in with_functions if at <= crop_at and _decodes(stages[at].fn)), crop_at
    )
    between = [
        stages[at].name
        for at in with_functions
        if first < at < crop_at and not _decodes(stages[at].fn)  # each part of a mixture may
    ]
    if between:
        raise ValueError(
            f"this pipeline cannot crop files, because {between[0]} needs whole images before the "
            "crop"
        )
    if _image_field(stages[first]) != _image_field(stages[crop_at]):
        raise ValueError(
            f"{stages[crop_at].name} and {stages[first].name} work on different fields: give both "
            "the same on="
        )
    return first, crop_at


def _image_field(stage: Any) -> str | int | None:
    """Return the field of a stage that has the image: the first of several."""
    on: str | int | tuple[str | int, ...] | None = stage.on
    return on[0] if isinstance(on, tuple) else on


def _decodes(fn: Any) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn is decode


def _crops(fn: Any) -> bool:
    return isinstance(fn, (ImageMap, RandomImageMap)) and "crop" in fn.name


def _is_left_out(stage: Any) -> bool:
    """True if the measurement leaves out a stage: an echo, a cache, sharding, batches."""
    traits = stage.traits
    return bool(traits.repeats or traits.caches or traits.shards or traits.batches)


def _find_encoded_image(example: Any, on: str | int | None) -> bytes:
    data = example if on is None else Field(on).get(example)
    if not is_file(data):
        raise TypeError(
            f"the images are of type {type(data).__name__}, not encoded files (bytes), so there is "
            "nothing to decode"
        )
    return file_bytes(data)


def _decodable(files: list[bytes], decode_whole: Callable[[bytes], Any], crop: Any) -> list[bytes]:
    """Return the files that can be decoded and cropped. Raises the last error if none can."""
    decodable: list[bytes] = []
    for at, data in enumerate(files):
        try:
            _measure_costs_s([data], decode_whole, crop)
        except (OSError, ValueError):
            if not decodable and at == len(files) - 1:
                raise
        else:
            decodable.append(data)
    return decodable


def _measure_costs_s(
    files: list[bytes], decode_whole: Callable[[bytes], Any], crop: Any
) -> list[tuple[float, float, float]]:
    """Return three processor times per file: full decode, crop of pixels, crop of the file."""
    costs: list[tuple[float, float, float]] = []
    for number, data in enumerate(files):

        def crop_once(image: Any, seed: int = number) -> None:  # the same box each time
            if isinstance(crop, RandomImageMap):
                crop(image, np.random.default_rng(seed))
            else:
                crop(image)

        began_s = time.thread_time()
        pixels = decode_whole(data)
        decoded_s = time.thread_time()
        crop_once(pixels)
        done_s = time.thread_time()
        crop_once(data)
        costs.append((decoded_s - began_s, done_s - decoded_s, time.thread_time() - done_s))
    return costs
