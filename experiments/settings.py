"""Every number of the experiment, in one place: one recipe for all arms."""

from __future__ import annotations

from dataclasses import dataclass, field

from experiments.digits import DigitSpec
from experiments.grids import Grid


@dataclass(frozen=True)
class Settings:
    """What an experiment is run with. Tests shrink it; the command uses it as it stands."""

    digits: DigitSpec = field(
        default_factory=lambda: DigitSpec(train=12_288, canvas_px=48, fragments=20)
    )
    seeds: int = 5
    """Runs of each arm, but of the bound in memory. Runs of one seed share initial weights and the
    order of the data."""

    batch_size: int = 32
    learning_rate: float = 0.001
    """Of Adam, constant, for every arm. Training without echoing gets to 95 % as soon with 0.001 as
    with 0.002 and 0.004, and later with 0.0005 and 0.008."""
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

    seconds: float = 10.0
    """What the target is chosen from: as many fresh examples as storage gives in this time. So a
    faster machine trains to a higher target, and training without echoing takes as long."""
    least_fresh: int = 3_072
    """So many examples at least, however slow the machine: fewer teach the network too little."""
    budget_fresh: int | None = None
    """That many fresh examples instead."""
    target_accuracy: float | None = None
    """That target instead."""
    longest_s: float = 30.0
    """A run ends after so many seconds, if it did not reach the target by then."""
    grid: Grid = ((512, 512), (1_024, 128), (4_096, 256), (1 << 40, 1_024))
    """Where networks are evaluated, all arms at the same points."""

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
