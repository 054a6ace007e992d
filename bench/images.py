"""JPEGs, cropped at random and resized: how much of what the codec can do arrives?

Files are read, random boxes of 8 to 100 % of their area resized to 224 x 224, half of them flipped,
``uint8`` batches of 64, by two workers, from a warm page cache. Everything runs in a process of its
own, all of them in turns. The limit is a C program that reads the files, decodes the rows and
columns of the boxes alone, and resizes them.

1. photographs: stoker with stoker-native, stoker with Pillow, and peers;
2. the same, decoded in full once and cropped e times (``echo``), against a loop by hand that does
   the same copies, by whole epochs;
3. files of 32 x 32 pixels (CIFAR-10), JPEGs and PNGs, cropped and resized to 32 x 32;
4. photographs of 2,000 x 1,500 pixels, with and without scaling by the codec.

Beside each rate stand the memory that an arm holds in all its processes, and the time to its first
batch. Peers: torch's ``DataLoader`` with Pillow and DALI (on the CPU) resize with antialiasing, as
stoker does; torch and SPDL with OpenCV, tf.data, and Grain with simplejpeg and OpenCV take the two
nearest pixels only.

Command::

    python bench/images.py --jpegs imagenet-sample.tar --cifar cifar10-jpg.tar.xz --peers all
        --install --limit jpeg_floor.c

Results::

    [results/images.json]
    photographs        images/s              over limit  first batch  memory
    ------------------------------------------------------------------------
    stoker                2,320  0.906 (0.878 .. 0.931)       0.18 s  122 MB
    stoker, Pillow        1,049  0.406 (0.393 .. 0.413)       0.23 s  147 MB
    torch, Pillow         1,070  0.407 (0.403 .. 0.422)       0.98 s  318 MB
    torch, OpenCV         1,586  0.621 (0.593 .. 0.635)       0.98 s  394 MB
    tf.data               1,903  0.743 (0.729 .. 0.752)       1.68 s  644 MB
    SPDL, OpenCV          1,462  0.565 (0.559 .. 0.584)       0.15 s  136 MB
    Grain, simplejpeg     1,649  0.638 (0.623 .. 0.646)       0.19 s  186 MB
    DALI                  1,226  0.473 (0.465 .. 0.501)       0.28 s  445 MB
    limit                 2,587              1 (1 .. 1)

    echo 2   images/s         over by hand  first batch  memory
    -----------------------------------------------------------
    stoker      2,152  1.12 (1.03 .. 1.22)       0.36 s  436 MB
    by hand     1,935           1 (1 .. 1)       0.87 s  467 MB

    echo 4   images/s          over by hand  first batch  memory
    ------------------------------------------------------------
    stoker      3,257  1.08 (0.794 .. 1.12)       0.32 s  467 MB
    by hand     3,138            1 (1 .. 1)       0.86 s  536 MB

    small JPEGs        images/s               over DALI  first batch  memory
    ------------------------------------------------------------------------
    stoker               89,422      2.8 (2.77 .. 3.21)       0.12 s   38 MB
    stoker, Pillow        9,622  0.306 (0.299 .. 0.357)       0.17 s   40 MB
    torch, Pillow        17,412  0.575 (0.539 .. 0.646)       0.98 s  261 MB
    torch, OpenCV        35,002     1.14 (1.07 .. 1.33)       0.89 s  350 MB
    tf.data              11,254  0.366 (0.347 .. 0.415)       1.76 s  569 MB
    SPDL, OpenCV         12,325  0.402 (0.385 .. 0.443)       0.10 s   62 MB
    Grain, simplejpeg     9,378  0.306 (0.278 .. 0.331)       0.15 s   74 MB
    DALI                 30,747              1 (1 .. 1)       0.20 s  122 MB

    small PNGs         images/s               over DALI  first batch  memory
    ------------------------------------------------------------------------
    stoker               56,409     2.42 (2.26 .. 2.44)       0.13 s   40 MB
    stoker, Pillow       10,132    0.42 (0.396 .. 0.44)       0.16 s   40 MB
    torch, Pillow        17,924  0.754 (0.692 .. 0.779)       0.88 s  260 MB
    torch, OpenCV        27,701       1.17 (1.1 .. 1.2)       0.84 s  350 MB
    tf.data              10,923  0.446 (0.443 .. 0.477)       1.73 s  571 MB
    SPDL, OpenCV         12,291    0.505 (0.5 .. 0.529)       0.10 s   61 MB
    Grain, simplejpeg     9,920  0.413 (0.402 .. 0.427)       0.13 s   72 MB
    DALI                 23,764              1 (1 .. 1)       0.20 s  123 MB

    large                        images/s              over limit  first batch  memory
    ----------------------------------------------------------------------------------
    stoker                            380  0.883 (0.803 .. 0.892)       0.52 s   66 MB
    stoker, scaled by the codec       507     1.16 (1.06 .. 1.23)       0.33 s   74 MB
    stoker, Pillow                    150   0.35 (0.311 .. 0.361)       0.68 s   91 MB
    torch, Pillow                     226  0.514 (0.466 .. 0.546)       2.00 s  321 MB
    torch, OpenCV                     227  0.527 (0.421 .. 0.561)       2.31 s  308 MB
    tf.data                           368    0.88 (0.799 .. 0.94)       2.81 s  621 MB
    SPDL, OpenCV                      215  0.498 (0.483 .. 0.588)       0.50 s  134 MB
    Grain, simplejpeg                 271  0.619 (0.608 .. 0.671)       0.50 s  162 MB
    DALI                              239  0.552 (0.525 .. 0.578)       0.75 s  983 MB
    limit                             431              1 (1 .. 1)
    [end]

Rows of photographs and small files are of one quiet machine, one day; those of echoes and of large
photographs are older, of a stoker that drew boxes in Python.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from harness import Ratio, Report, parser, report
from inputs import jpegs
from peers import environment, racing
from peers.serve import steady_rates, whole_rates
from PIL import Image

from stoker.images import native

BATCH = 64
WORKERS = 2
FILES = 3_000  # of an epoch, at least: the same files again
PEERS = {
    "torch, OpenCV": ("opencv", "torch_jpegs", "opencv"),
    "tf.data": ("tensorflow", "tensorflow_jpegs", ""),
    "SPDL, OpenCV": ("spdl_jpegs", "spdl_jpegs", ""),
    "Grain, simplejpeg": ("grain_jpegs", "grain_jpegs", ""),
    "DALI": ("dali", "dali_crops", ""),
}
"""Their environments, files and variants; torch with Pillow needs no environment of its own."""


@dataclass(frozen=True)
class Task:
    """Files to be loaded.

    Attributes:
        side: of the images that are made of them.
        has_limit: whether the limit is a program for such files.
    """

    name: str
    folder: Path
    side: int = 224
    has_limit: bool = True


def written(files: list[bytes], folder: Path, count: int) -> Path:
    """Write files, and links to them, until there are so many."""
    suffix = {b"\xff\xd8": "jpg", b"\x89P": "png"}.get(files[0][:2], "webp")
    (folder / "0").mkdir(parents=True)
    for number, data in enumerate(files):
        (folder / "0" / f"{number:05}.{suffix}").write_bytes(data)
    for label in range(1, -(-count // len(files))):
        (folder / str(label)).mkdir()
        for number in range(len(files)):
            name = f"{number:05}.{suffix}"
            os.link(folder / "0" / name, folder / str(label) / name)
    return folder


def colour(files: list[bytes]) -> list[bytes]:
    """Leave out what is not RGB, which the limit cannot decode."""
    return [data for data in files if Image.open(io.BytesIO(data)).mode == "RGB"]


def resized(files: list[bytes], size: tuple[int, int]) -> list[bytes]:
    """Make the same files in another size (width, height)."""
    made = []
    for data in files:
        out = io.BytesIO()
        image = Image.open(io.BytesIO(data)).resize(size, Image.Resampling.LANCZOS)
        image.save(out, "JPEG", quality=90)
        made.append(out.getvalue())
    return made


def encoded(files: list[bytes], kind: str, mode: str = "RGB", **how: Any) -> list[bytes]:
    """Encode the pixels of the same files in another way."""
    made = []
    for data in files:
        out = io.BytesIO()
        image = Image.open(io.BytesIO(data)).convert(mode)
        image.info = {}  # colour profiles, of which OpenCV warns
        image.save(out, kind, **how)
        made.append(out.getvalue())
    return made


def cifar(archive: str | None, count: int, others: list[bytes]) -> list[bytes]:
    """Return small JPEGs out of an archive, or make some of others."""
    if archive is None:
        return resized(others, (32, 32))
    with tarfile.open(archive) as tar:
        members = (member for member in tar if member.name.endswith(".jpg"))
        found = [tar.extractfile(member) for member in islice(members, count)]
        return [file.read() for file in found if file is not None]


def compiled(source: str, folder: Path, side: int = 224, clock: str = "MONOTONIC") -> Path:
    """Compile the C program that is the limit, for images of this side, and with this clock."""
    program, own = folder / f"limit-{side}", folder / f"limit-{side}.c"
    text = Path(source).read_text().replace("224", str(side)).replace("672", str(3 * side))
    own.write_text(text.replace("CLOCK_MONOTONIC", f"CLOCK_{clock}"))
    command: list[Any] = [
        "cc",
        "-O3",
        "-march=native",
        own,
        "-o",
        program,
        "-ljpeg",
        "-lm",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return program


def limit(program: Path, folder: Path, seconds: float, threads: int = WORKERS) -> dict[str, float]:
    """Run the C program on files; it warms up before it counts."""
    names = folder.parent / f"{folder.name}.list"
    names.write_text("".join(f"{path}\n" for path in sorted((folder / "0").iterdir())))
    arguments: list[Any] = [names, "crop_resize", str(threads), str(seconds), "file"]
    out = subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout
    per_s = json.loads(out.partition("RESULT ")[2])["ips"]
    return {"steady_examples": per_s, "steady_s": 1.0, "examples": per_s, "processor_s": threads}


def arms_of(
    task: Task, peers: list[str], known: Mapping[str, tuple[str, str, str]] = PEERS
) -> dict[str, list[object]]:
    """Return what runs in a task, as words of command lines, with some of the ``known`` peers; the
    first is what the others are compared with."""

    def arm(python: str | Path, peer: str, variant: str) -> list[object]:
        program = environment.HERE / "jpegs" / "serve_jpegs.py"
        return [python, "-W", "ignore", program, peer, task.folder, variant, BATCH, WORKERS]

    here = sys.executable
    stoker = partial(arm, here, "stoker_jpegs")
    own = {"stoker": stoker("fast")} if native.library() else {}
    if task.name.startswith("echo"):
        factor = task.name.rpartition(" ")[2]
        kinds = (("stoker", "echo"), ("by hand", "hand")) if own else ()
        return {name: stoker(f"{kind}-{factor}") for name, kind in kinds}
    if task.name == "large" and own:
        own["stoker, scaled by the codec"] = stoker("dct")
    arms = own | {
        "stoker, Pillow": stoker("pillow"),
        "torch, Pillow": arm(here, "torch_jpegs", "pillow"),
    }
    for name in peers:
        place, peer, variant = known[name]
        arms[name] = arm(environment.python(place), peer, variant)
    return arms


def measure(
    made: Report,
    task: Task,
    peers: list[str],
    program: Path | None,
    seconds: float,
    rounds: int,
) -> None:
    """Run the arms of a task in turns."""
    others = {}
    if program and task.has_limit:
        others["limit"] = partial(limit, program, task.folder, seconds)
    arms = arms_of(task, peers)
    found = racing.raced(arms, seconds, rounds, others, SIDE=str(task.side))
    for name, (about, samples) in found.items():
        made.add(task=task.name, arm=name, samples=samples, first_s=about.get("first_s"))


def evaluate(made: Report) -> None:
    """Compare with the limit, with peers, with loops by hand."""
    for task in dict.fromkeys(row["task"] for row in made.rows):
        rows = {row["arm"]: row for row in made.rows if row["task"] == task}
        # A loop by hand fills its pool before it begins: only whole epochs compare.
        rates_of = whole_rates if task.startswith("echo") else steady_rates
        rates = {name: rates_of(row["samples"]) for name, row in rows.items()}
        base = "limit" if "limit" in rates else next(iter(reversed(rates)))
        made.show(
            (task, "images/s", f"over {base}", "first batch", "memory"),
            [line(name, row, rates[name], rates[base]) for name, row in rows.items()],
        )
        expect(made, task, rates)


def line(name: str, row: dict[str, Any], rates: list[float], base: list[float]) -> tuple[Any, ...]:
    """Return a line of a table."""
    held = [sample["memory_bytes"] for sample in row["samples"] if "memory_bytes" in sample]
    return (
        name,
        f"{median(rates):,.0f}",
        Ratio.of(rates, base),
        "" if row["first_s"] is None else f"{row['first_s']:.2f} s",
        f"{max(held) / 1e6:,.0f} MB" if held else "",
    )


def expect(made: Report, task: str, rates: dict[str, list[float]]) -> None:
    """Set the targets of a task."""

    def over(one: str, other: str, least: float) -> None:
        if one in rates and other in rates:
            ratio = Ratio.of(rates[one], rates[other]).median
            made.expect(f"{task}: {one} over {other}", ratio, least)

    if task == "photographs":
        over("stoker", "limit", 0.8)
        for peer in ("torch, Pillow", *PEERS):
            over("stoker", peer, 1.0)
        over("stoker, Pillow", "torch, Pillow", 1.0)
    over("stoker", "by hand", 0.9)


def tasks(place: str | None, small: str | None, quick: bool, within: Path) -> Iterator[Task]:
    """Write the files of each task."""
    files = colour(jpegs(place, BATCH if quick else 500))
    few = files[:BATCH]
    count = 4 * BATCH if quick else FILES
    photographs = written(files, within / "photographs", count)
    yield Task("photographs", photographs)
    for name in ("echo 2",) if quick else ("echo 2", "echo 4"):
        yield Task(name, photographs, has_limit=False)
    tiny = cifar(small, BATCH if quick else FILES, few)
    small_files = {"small JPEGs": tiny, "small PNGs": encoded(tiny, "PNG")}
    for name, made in list(small_files.items())[1 if quick else 0 :]:
        folder = written(made, within / name.replace(" ", "-"), count)
        yield Task(name, folder, side=32, has_limit=False)
    if not quick:  # the same code as of photographs
        yield Task("large", written(resized(few, (2_000, 1_500)), within / "large", 4 * BATCH))


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--jpegs", help="a folder or a tar of JPEGs; by default some are made")
    options.add_argument("--cifar", help="a tar of JPEGs of 32 x 32; by default some are made")
    options.add_argument("--limit", help="the C program that is the limit, its source")
    racing.add_options(options, PEERS)
    options.add_argument("--only", default="", help="tasks whose names have this in them")
    arguments = options.parse_args()
    peers = racing.chosen(arguments, PEERS)
    rounds, seconds = (1, 0.1) if arguments.quick else (arguments.rounds, 2.0)
    with report(__file__, arguments) as made, tempfile.TemporaryDirectory() as folder:
        program = compiled(arguments.limit, Path(folder)) if arguments.limit else None
        for task in tasks(arguments.jpegs, arguments.cifar, arguments.quick, Path(folder)):
            if arguments.only in task.name:
                measure(made, task, peers, program, seconds, rounds)


if __name__ == "__main__":
    main()
