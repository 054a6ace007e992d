"""Is the forecast right of what moving a transform to the device would do?

``stoker analyze`` tries a transform on whole batches, and forecasts the speed of the job that calls
it there. Here somebody moves it: a job on photographs that are blurred in the dataset
(``jobs/blurred.py``), or in the loop for whole batches. There is no GPU: one thread of a processor
stands for the device, in the forecast and in the move, and a sleep for the rest of a step. Small
and large blurs, short and long steps, one worker. For each an analysis, which makes the forecast,
then both jobs in turns; their speeds are those behind the first batches.

Command::

    python bench/device_move.py --data FOLDER

FOLDER has ``imagenet-sample.tar``, photographs.

Targets: half of the forecasts within 10 %, none further than 25 %.

Machine: two cores of an AMD EPYC, 24 GiB, Linux 6.18; Python 3.11.7, PyTorch 2.13.0.

Results::

    [results/device_move.json]
    blur, step                 predicted                achieved  error
    -------------------------------------------------------------------
    reach 3, 10 ms   1.15 (1.15 .. 1.15)     1.18 (1.16 .. 1.29)  -3.2%
    reach 3, 30 ms   0.88 (0.80 .. 1.04)  0.875 (0.825 .. 0.926)  +0.2%
    reach 6, 10 ms   1.39 (1.26 .. 1.39)     1.31 (1.28 .. 1.35)  +5.9%
    reach 6, 30 ms   1.02 (0.88 .. 1.23)   0.967 (0.926 .. 1.06)  +5.5%
    reach 10, 10 ms  1.15 (1.08 .. 1.23)     1.22 (1.13 .. 1.25)  -5.8%
    reach 10, 30 ms  1.09 (0.98 .. 1.21)    1.05 (0.961 .. 1.13)  +4.2%
    [end]

Caveats: on a GPU a blur of a whole batch is short and training is not; of that nothing was
measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from analyze_accuracy import JOBS, run
from harness import Ratio, Report, parser, report
from inputs import jpegs

from stoker.analysis.model.report import read_report
from stoker.analysis.reports.advice import forecast_move

FILES, BATCH = 1_600, 16
CASES = [(reach, device_ms) for reach in (3, 6, 10) for device_ms in (10.0, 30.0)]


def speed(folder: Path, *words: str) -> float:
    """Return examples/s of an epoch, without its start."""
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "log"
        run([sys.executable, str(JOBS / "blurred.py"), str(folder), *words, "--log", str(log)])
        times = json.loads(log.read_text())
    first = min(8, len(times) // 2)
    return BATCH * (len(times) - 1 - first) / float(times[-1] - times[first])


def forecast(folder: Path, max_seconds: float, *words: str) -> dict[str, float]:
    """Return the forecast of the job's analysis: the gain and its interval."""
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "report.json"
        call = ["-c", "from stoker.cli import main; main()", "analyze", "--json", str(out)]
        call += ["--max-seconds", str(max_seconds), str(JOBS / "blurred.py"), str(folder), *words]
        run([sys.executable, *call])
        found = forecast_move(read_report(out))
    if found is None:
        return {}
    return {"predicted": found.gain.value, "low": found.gain.low, "high": found.gain.high}


def evaluate(made: Report) -> None:
    """Hold each forecast against the move."""
    lines, errors = [], []
    for row in made.rows:
        achieved = Ratio.of(row["moved"], row["as_it_is"])
        name = f"reach {row['reach']}, {row['device_ms']:g} ms"
        if "predicted" in row:
            errors.append(row["predicted"] / achieved.median - 1)
            shown = f"{row['predicted']:.2f} ({row['low']:.2f} .. {row['high']:.2f})"
            lines.append((name, shown, achieved, f"{errors[-1]:+.1%}"))
        else:
            lines.append((name, "nothing told", achieved, ""))
    made.show(("blur, step", "predicted", "achieved", "error"), lines)
    made.expect("forecasts", len(errors), len(made.rows))
    if errors:
        off = sorted(map(abs, errors))
        made.expect("median error", statistics.median(off), 0.1, at_least=False)
        made.expect("largest error", off[-1], 0.25, at_least=False)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--data", type=Path, help="folder of datasets; noise without")
    arguments = options.parse_args()
    photographs = str(arguments.data / "imagenet-sample.tar") if arguments.data else None
    with report(__file__, arguments) as made, tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "photographs"
        folder.mkdir()
        found = jpegs(photographs, 40)
        for number in range(96 if arguments.quick else FILES):
            (folder / f"{number:05}.jpg").write_bytes(found[number % len(found)])
        for reach, device_ms in CASES[:1] if arguments.quick else CASES:
            words = ["--reach", str(reach), "--device-ms", str(device_ms)]
            told = forecast(folder, 15 if arguments.quick else 60, *words, "--epochs", "20")
            speeds: dict[str, list[float]] = {"as_it_is": [], "moved": []}
            for _ in range(1 if arguments.quick else arguments.rounds):
                speeds["as_it_is"].append(speed(folder, *words))
                speeds["moved"].append(speed(folder, *words, "--moved"))
            made.add(reach=reach, device_ms=device_ms, **told, **speeds)


if __name__ == "__main__":
    main()
