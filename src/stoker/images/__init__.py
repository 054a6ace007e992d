"""Images: decoding them (extra ``[images]``), and changing batches of them at random."""

from stoker.images.augmenting import mixup, random_erase, random_flip, random_noise
from stoker.images.decoding import decode

__all__ = ["decode", "mixup", "random_erase", "random_flip", "random_noise"]
