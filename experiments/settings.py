"""Every number of the experiment, in one place: one recipe for all arms."""

from __future__ import annotations

from dataclasses import dataclass, field

from experiments.digits import DigitSpec


@dataclass(frozen=True)
class Settings:
    """What an experiment is run with. Tests shrink it; the command uses it as it stands."""

    digits: DigitSpec = field(default_factory=DigitSpec)
    seeds: int = 3
    """Runs of each arm. Runs of one seed share initial weights and the order of the data."""

    batch_size: int = 32
    learning_rate: float = 0.003
    """Of Adam, constant, for every arm."""
    widths: tuple[int, int, int] = (16, 32, 64)
    """Channels of the three convolutions."""

    pool_batches: int = 8
    """What an echo keeps, in batches, wherever it stands. Filling it costs as many steps."""
    largest_pool_fraction: float = 0.05
    """No pool may hold more of the training images: beyond, one would simply cache them."""
    readers: int = 8
    """Threads that read and prepare; behind a server, which is read otherwise, as many as cores."""
    slowness: float = 4.0
    """R: production time of one fresh batch over the time of one training step."""

    remote_latency_s: float = 0.020
    """Latency of the HTTP server, in seconds."""
    remote_requests: int = 32
    """Requests in flight to it."""

    target_accuracy: float | None = 0.90
    """What runs are timed to; None: chosen from what the in-memory runs reach."""
    target_share: float = 0.95
    """The share of that, where the target is chosen."""

    budget_fresh: int = 3_072
    """Fresh examples of every run, at least; a point of the grid."""
    budget_seconds_share: float = 1.15
    """Seconds of every run, at least: what storage needs for so many times these examples. More,
    so that training without echoing gets to the target."""
    grid: tuple[tuple[int, int], ...] = ((1_536, 128), (4_096, 256), (1 << 40, 2_048))
    """The evaluation grid of all arms, in fresh examples: up to the first number a point every
    second number. Coarse behind the budget, where only the in-memory copy gets to."""
    longest_run: float = 1.5
    """A run ends at this multiple of the budget of seconds, wherever it then is."""

    scene: tuple[tuple[float, float], ...] = ((1.0, 1.5), (3.4, 2.5), (1.0, 2.5))
    """The storage that slows down and recovers: R, and for how many seconds. Empty: no scene."""
    scene_window_batches: int = 20
    """Over so many batches the scene's factor and share of time waited are taken."""
    scene_step_samples: int = 20
    """Steps timed at a time to find the latencies of the scene."""

    image_px: int = 48
    """Side to which images of a user's folder are resized."""
    most_train_images: int = 8_192
    most_test_images: int = 1_000
    """Images taken of a user's folder at most, for training and for testing."""

    step_samples: int = 90
    """Training steps timed to calibrate, after a third as many to warm up."""
    drain_batches: int = 12
    """Fresh batches timed to calibrate, after a third as many to warm up."""
