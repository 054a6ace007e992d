"""The stages of a chain, one a file, and what a stage of your own is made of."""

from stoker.stages.composite import Stage
from stoker.stages.stage import ChainView, Traits

__all__ = ["ChainView", "Stage", "Traits"]
