"""One budget for files and decoded examples: is choosing for each better than any place alone?

Photographs of their natural sizes, decoded and made 224x224 (all take the same bytes then); and
recordings made into spectrograms. Storage is simulated: a read takes 2 ms and a second for each
80 MB. Caches hold 0.2 to 2 times the bytes of all files. The arms: files alone and decoded examples
alone, as they come; decoded examples with ``admit="worth"``; ``stoker.auto_cache``. Two epochs
fill the store, and really wait for storage; then epochs are measured, for at least 0.1 s: their
processor time, and what their reads take on that storage.

Command::

    python bench/tiers.py --photographs TAR_OF_JPEGS --recordings TAR_OF_WAV

Targets: at least 0.97 of the best place alone at each budget; 1.2 times as fast as each of them at
one budget at least.

Machine: two cores of an AMD EPYC, 24 GiB, Linux 6.18, where little else ran; Python 3.11.7 (a plain
loop iteration takes 22 ns there).

Results::

    [results/tiers.json]
    budget / files     files  decoded  decoded, worth  auto_cache          over the best
    ------------------------------------------------------------------------------------
    photographs, 0.2  0.54 s   0.54 s          0.45 s      0.46 s  0.995 (0.978 .. 1.02)
    photographs, 0.5  0.44 s   0.41 s          0.31 s      0.32 s  0.988 (0.916 .. 1.02)
    photographs, 1.0  0.28 s   0.19 s          0.10 s      0.06 s     1.82 (1.7 .. 1.84)
    photographs, 1.5  0.27 s   0.00 s          0.00 s      0.00 s  0.897 (0.684 .. 1.11)
    photographs, 2.0  0.26 s   0.00 s          0.00 s      0.00 s   1.05 (0.958 .. 1.17)

    budget / files      files  decoded  decoded, worth  auto_cache         over the best
    ------------------------------------------------------------------------------------
    spectrograms, 0.2  0.42 s   0.63 s          0.58 s      0.33 s   1.28 (1.24 .. 1.34)
    spectrograms, 0.5  0.40 s   0.63 s          0.59 s      0.32 s   1.25 (1.25 .. 1.26)
    spectrograms, 1.0  0.10 s   0.58 s          0.51 s      0.06 s   1.55 (1.45 .. 1.59)
    spectrograms, 1.5  0.03 s   0.53 s          0.44 s      0.03 s  0.98 (0.843 .. 1.02)
    spectrograms, 2.0  0.03 s   0.48 s          0.39 s      0.03 s  1.07 (0.934 .. 1.08)
    [end]

Missed for photographs at 1.5: all are kept decoded there, as by hand, and an epoch takes 2 to 3 ms.

Caveats: few examples, so that a store of LMDB pages is coarse; at least 1 MiB, so that for
recordings 0.2 and 0.5 are the same; storage that waits exactly as said; one process, without
workers. Costs are measured as wall times, which other programs on the machine disturb.
"""

from __future__ import annotations

import io
import secrets
import statistics
import tarfile
import time
import warnings
import wave
from collections.abc import Callable
from typing import Any

import numpy as np
from gil import made_jpegs
from harness import Ratio, Report, parser, report

import stoker

SHARES = (0.2, 0.5, 1.0, 1.5, 2.0)
ALONE = ("files", "decoded", "decoded, worth")
ARMS = (*ALONE, "auto_cache")
FILLING = 2  # epochs
REQUEST_S, BYTES_PER_S = 0.002, 80e6
MEASURED_S = 0.1


class Storage:
    """Files on slow storage. ``waits``: whether reads take their time, or only count."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files
        self.waits = True
        self.read_s = 0.0

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> bytes:
        data = self.files[index]
        takes_s = REQUEST_S + len(data) / BYTES_PER_S
        self.read_s += takes_s
        if self.waits:
            time.sleep(takes_s)
        return data


def resized(data: bytes) -> Any:
    """Decode a photograph and make it 224x224."""
    from PIL import Image

    image = Image.fromarray(stoker.images.decode(data))
    return np.asarray(image.convert("RGB").resize((224, 224)))


def spectrogram(data: bytes) -> Any:
    """Return the logarithm of a recording's spectrum, every 5 ms, as float32 [frames, 129]."""
    with wave.open(io.BytesIO(data)) as recording:
        frames = recording.readframes(recording.getnframes())
    samples = np.frombuffer(frames, "<i2").astype(np.float32) / 2**15
    windows = np.lib.stride_tricks.sliding_window_view(samples, 256)[::40]
    power = np.abs(np.fft.rfft(windows * np.hanning(256))) ** 2
    return np.log(power + 1e-6).astype(np.float32)


def files_of(path: str | None, ends: tuple[str, ...], made: Callable[[], Any]) -> list[bytes]:
    """Return the files of a tar, or made ones."""
    if path is None:
        return list(made())
    with tarfile.open(path) as tar:
        members = [m for m in tar if m.isfile() and m.name.lower().endswith(ends)]
        return [tar.extractfile(member).read() for member in members]  # type: ignore[union-attr]


def made_photographs() -> list[bytes]:
    """Make JPEGs of three sizes."""
    return [jpeg for side in (160, 480, 960) for jpeg in made_jpegs(8, (side, side))]


def made_recordings() -> list[bytes]:
    """Make recordings of noise."""
    made, rng = [], np.random.default_rng(0)
    for _ in range(150):
        out = io.BytesIO()
        with wave.open(out, "wb") as recording:
            recording.setnchannels(1)
            recording.setsampwidth(2)
            recording.setframerate(8000)
            samples = rng.integers(-9999, 9999, int(rng.integers(2000, 6000)), dtype=np.int16)
            recording.writeframes(samples.tobytes())
        made.append(out.getvalue())
    return made


def last_epoch(files: list[bytes], prepare: Any, limit: int, arm: str) -> dict[str, Any]:
    """Fill a store, then measure an epoch."""
    storage = Storage(files)
    version = secrets.token_hex(8)
    train: Any = stoker.from_dataset(storage, seed=0).shuffle()
    if arm == "files":
        train = train.cache(limit, version=version)
    train = train.map(prepare)
    if arm.startswith("decoded"):
        admit = "worth" if "worth" in arm else "first"
        train = train.cache(limit, version=version, admit=admit)
    if arm == "auto_cache":
        train = stoker.auto_cache(train, limit, version=version)
    train = train.workers(0)
    for _ in range(FILLING):
        for _ in train:
            pass
    storage.waits = False
    times: list[tuple[float, float]] = []
    while sum(map(sum, times)) < MEASURED_S:
        storage.read_s, began = 0.0, time.process_time()
        for _ in train:
            pass
        times.append((time.process_time() - began, storage.read_s))
    cpu_s, read_s = statistics.median_low(times)
    cache = train.stats().cache
    assert cache is not None
    kept = {place.name.rpartition(".")[2]: place.items for place in cache.places}
    plan = next((line.strip() for line in str(train).splitlines() if "an epoch takes" in line), "")
    return {
        "processor_s": cpu_s,
        "storage_s": read_s,
        "epoch_s": cpu_s + read_s,
        "hits": cache.hits,
        "kept": kept,
        "plan": plan,
        "predicted_s": cache.predicted_s,
    }


def evaluate(made: Report) -> None:
    """Hold the choice against each place alone."""
    least: dict[str, float] = {}
    for data in dict.fromkeys(row["data"] for row in made.rows):
        rows = []
        for share in dict.fromkeys(row["share"] for row in made.rows):
            found = {
                arm: [
                    r for r in made.rows if (r["data"], r["share"], r["arm"]) == (data, share, arm)
                ]
                for arm in ARMS
            }
            times = {arm: [r["epoch_s"] for r in each] for arm, each in found.items()}
            ratios = {arm: Ratio.of(times[arm], times["auto_cache"]) for arm in ALONE}
            least[f"{data}, {share}"] = min(ratio.median for ratio in ratios.values())
            medians = [f"{statistics.median(times[arm]):.2f} s" for arm in ARMS]
            best = min(ratios.values(), key=lambda ratio: ratio.median)
            rows.append((f"{data}, {share}", *medians, best))
        made.show(("budget / files", *ARMS, "over the best"), rows)
    for name, ratio in least.items():
        made.expect(f"{name}: over the best place alone", ratio, 0.97)
    made.expect("best budget: over the best place alone", max(least.values()), 1.2)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--photographs", help="a tar of JPEGs; by default some are made")
    options.add_argument("--recordings", help="a tar of WAV files; by default some are made")
    options.add_argument("--files", type=int, default=100, help="photographs (default %(default)s)")
    arguments = options.parse_args()
    warnings.simplefilter("ignore", stoker.CacheWarning)
    quick = arguments.quick
    photographs = files_of(arguments.photographs, (".jpg", ".jpeg"), made_photographs)
    recordings = files_of(arguments.recordings, (".wav",), made_recordings)
    step = max(1, len(photographs) // arguments.files)
    sets: dict[str, tuple[list[bytes], Any]] = {
        "photographs": (photographs[::step], resized),
        "spectrograms": (
            recordings[:: max(1, len(recordings) // (3 * arguments.files))],
            spectrogram,
        ),
    }
    with report(__file__, arguments) as made:
        for number in range(1 if quick else arguments.rounds):
            for data, (files, prepare) in sets.items():
                for share in SHARES[1::2] if quick else SHARES:
                    limit = max(1 << 20, int(share * sum(map(len, files))))
                    for arm in ARMS[number % 4 :] + ARMS[: number % 4]:
                        row = last_epoch(files, prepare, limit, arm)
                        made.add(round=number, data=data, share=share, arm=arm, **row)


if __name__ == "__main__":
    main()
