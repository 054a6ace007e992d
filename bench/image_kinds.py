"""Other JPEGs, PNGs and WebPs: processor time an image, beside loops by hand and in C.

Random boxes as in ``images.py``, in one thread: stoker's whole pipeline inline, against a loop that
reads the same files and decodes them by simplejpeg or OpenCV, and against the C program that is the
limit. Photographs as they are, progressive, grey, as PNGs and as WebPs; files of 32 x 32 pixels;
photographs of 12 megapixels, decoded in full.

Command::

    python bench/image_kinds.py --jpegs imagenet-sample.tar --cifar cifar10-jpg.tar.xz --peers all
        --install --limit jpeg_floor.c

Machine: two cores of an AMD EPYC, 24 GiB; Python 3.11.7, Pillow 13.0.0, OpenCV 5.0.0.93.
Nothing ran beside it.

Results::

    [results/image_kinds.json]
    files                                  arm  us an image   stoker's rate over it
    -------------------------------------------------------------------------------
    photographs                         stoker        812.5
                                    simplejpeg      1,035.2     1.27 (1.25 .. 1.37)
                                        OpenCV      1,132.8     1.39 (1.34 .. 1.39)
                                         limit        746.8  0.911 (0.899 .. 0.921)
    progressive                         stoker      2,031.2
                                    simplejpeg      2,187.5      1.08 (1.02 .. 1.1)
                                        OpenCV      2,265.6     1.12 (1.08 .. 1.15)
                                         limit      1,941.5  0.951 (0.938 .. 0.973)
    grey                                stoker        517.6
                                    simplejpeg        664.1     1.27 (1.21 .. 1.31)
                                        OpenCV        703.1     1.38 (1.31 .. 1.41)
                                         limit        450.9  0.868 (0.856 .. 0.896)
    small JPEGs                         stoker         17.1
                                    simplejpeg         24.7     1.44 (1.37 .. 1.47)
                                        OpenCV         29.7      1.73 (1.65 .. 1.8)
                                         limit         10.3  0.601 (0.571 .. 0.605)
    PNGs                                stoker      3,085.9
                                        OpenCV      4,296.9     1.42 (1.35 .. 1.48)
    small PNGs                          stoker         29.7
                                        OpenCV         47.0     1.58 (1.53 .. 1.64)
    WebPs                               stoker      2,929.7
                                        OpenCV      2,421.9  0.827 (0.775 .. 0.838)
    12 megapixels, decoded in full      stoker     22,916.7
                                    simplejpeg     22,083.3   0.964 (0.898 .. 1.39)
                                        OpenCV     48,125.0      2.1 (1.71 .. 3.61)
    [end]

Of a file of 32 x 32 half of the time is C's, and libjpeg three tenths; a fifth is the kernel's, to
open and to read it, and the rest Python's, to list it, to stack and to hand it out. Of a PNG zlib
takes 60 %, and the filters 23 %.

Missed: Pillow's decoder of animations takes seven tenths of a WebP's time: it decodes to four
channels, which Pillow then copies twice. A program in C on the same files takes 2.3 ms with that
decoder, 2.2 ms without, and 1.8 ms where it decodes no row below the box: a libwebp of stoker's own
would be half as fast again, and one more library to bundle and to mend.

Caveats: loops by hand draw in Python's order, shuffle nothing but names, and resize with the two
nearest pixels, as the C program does; stoker resizes with antialiasing, and its draws can be
repeated. simplejpeg has libjpeg-turbo 3, stoker and the C program here Debian's 2.1.5. The kernel
counts processor time in ticks of 10 ms.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

from harness import Ratio, Report, parser, report
from inputs import jpegs
from peers import environment, racing

from images import BATCH, Task, cifar, colour, compiled, encoded, limit, resized, written

PEERS = {
    "simplejpeg": ("webdataset_jpegs", "simplejpeg"),
    "OpenCV": ("webdataset_jpegs", "opencv"),
}
"""Their environment, and what decodes in the loop by hand."""

WHOLE = "12 megapixels, decoded in full"
GOALS = {
    "photographs": ("limit", 0.8),
    "progressive": ("limit", 0.8),
    "grey": ("limit", 0.8),
    "small JPEGs": ("limit", 0.6),
    "PNGs": ("OpenCV", 1.0),
    "small PNGs": ("OpenCV", 1.0),
    "WebPs": ("OpenCV", 1.0),
    WHOLE: ("simplejpeg", 1.0),
}
"""How fast stoker has to be, as a fraction of which arm."""


def tasks(place: str | None, small: str | None, quick: bool, within: Path) -> Iterator[Task]:
    """Write the files of each kind."""
    files = colour(jpegs(place, 8 if quick else 2 * BATCH))[: 2 * BATCH]
    tiny = cifar(small, 8 if quick else 2_000, files)
    kinds = {
        "photographs": lambda: files,
        "progressive": lambda: encoded(files, "JPEG", quality=90, progressive=True),
        "grey": lambda: encoded(files, "JPEG", "L", quality=90),
        "small JPEGs": lambda: tiny,
        "PNGs": lambda: encoded(files, "PNG"),
        "small PNGs": lambda: encoded(tiny, "PNG"),
        "WebPs": lambda: encoded(files, "WEBP", quality=80),
        WHOLE: lambda: resized(files[:8], (400, 300) if quick else (4_000, 3_000)),
    }
    for number, (name, made) in enumerate(kinds.items()):
        side = 32 if name.startswith("small") else 224
        folder = written(made(), within / str(number), 1)
        yield Task(name, folder, side, has_limit=GOALS[name][0] == "limit")


def arms_of(task: Task, peers: list[str]) -> dict[str, list[object]]:
    """Return what runs for a kind of files, as words of command lines."""
    program = environment.HERE / "jpegs" / "serve_jpegs.py"
    batch = min(BATCH, len(list(task.folder.glob("*/*"))))
    is_whole = task.name == WHOLE

    def arm(python: str | Path, peer: str, variant: str) -> list[object]:
        return [python, "-W", "ignore", program, peer, task.folder, variant, batch, 0]

    arms = {"stoker": arm(sys.executable, "stoker_jpegs", "decode" if is_whole else "fast")}
    for name in peers:
        place, by = PEERS[name]
        if by == "opencv" or GOALS[task.name][0] != "OpenCV":
            variant = f"{by}-decode" if is_whole else by
            arms[name] = arm(environment.python(place), "loop_jpegs", variant)
    return arms


def evaluate(made: Report) -> None:
    """Hold stoker against each arm, kind by kind."""
    table = []
    for task in dict.fromkeys(row["task"] for row in made.rows):
        us = {row["arm"]: row["processor_us"] for row in made.rows if row["task"] == task}
        for arm, each in us.items():
            share = "" if arm == "stoker" else Ratio.of(each, us["stoker"])
            table.append((task if arm == "stoker" else "", arm, f"{median(each):,.1f}", share))
        peer, least = GOALS[task]
        if peer in us:
            made.expect(f"{task}: {peer}", Ratio.of(us[peer], us["stoker"]).median, least)
    made.show(("files", "arm", "us an image", "stoker's rate over it"), table)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--jpegs", help="a folder or a tar of JPEGs; by default some are made")
    options.add_argument("--cifar", help="a tar of JPEGs of 32 x 32; by default some are made")
    options.add_argument("--limit", help="the C program that is the limit, its source")
    racing.add_options(options, PEERS)
    arguments = options.parse_args()
    peers, quick = racing.chosen(arguments, PEERS), arguments.quick
    rounds, seconds = (1, 0.05) if quick else (arguments.rounds, 0.5)
    with report(__file__, arguments) as made, tempfile.TemporaryDirectory() as folder:
        for task in tasks(arguments.jpegs, arguments.cifar, quick, Path(folder)):
            others = {}
            if arguments.limit and task.has_limit:
                program = compiled(arguments.limit, Path(folder), task.side, "THREAD_CPUTIME_ID")
                others["limit"] = partial(limit, program, task.folder, seconds, 1)
            side = str(task.side)
            found = racing.raced(arms_of(task, peers), seconds, rounds, others, SIDE=side)
            for name, (_, samples) in found.items():
                made.add(task=task.name, arm=name, processor_us=racing.processor_us(samples))


if __name__ == "__main__":
    main()
