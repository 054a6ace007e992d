"""The demonstration from start to end: images, calibration, runs, report.

python -m experiments.demo --help
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import stoker
from experiments.arms import Arm, default_arms, full_arms
from experiments.calibration import Calibration, calibrate, step_seconds
from experiments.images import ImageSet, composed_digits, user_images
from experiments.pictures import write_picture
from experiments.report import conclusion, summaries, target_of
from experiments.rows import as_json, write_json
from experiments.runs import Evaluation, RunRecord, pool_examples, run_arm
from experiments.scene import Scene, run_scene, stretches_of
from experiments.screen import RunsView, Screen
from experiments.settings import Settings
from experiments.storage import EmulatedStorage, Storage, in_memory, storage_of
from experiments.workloads import one_thread
from stoker.basics.resources import format_bytes


def run_settings(
    settings: Settings,
    out: Path,
    *,
    full: bool,
    data: Path | None,
    remote: bool = False,
    arms: Sequence[Arm] | None = None,
    screen: Screen | None = None,
) -> None:
    """Run an experiment and leave `demo.json` and `demo.png` in `out`."""
    if settings.seeds < 1:
        raise ValueError(f"a demo needs at least one seed, not {settings.seeds}")
    screen = screen or Screen()
    arms = arms or (full_arms() if full else default_arms())
    out.mkdir(parents=True, exist_ok=True)
    if data is None:
        with screen.working("composing digits") as progress:
            images = composed_digits(settings.digits, out / "images", progress)
    else:
        with screen.working("reading your images once") as progress:
            images = user_images(data, settings, progress)
        settings = replace(settings, target_accuracy=None)
    _introduce(screen, images, settings, arms)
    with one_thread(), storage_of(images, settings, remote=remote) as storage:
        _Experiment(settings, out, images, arms, storage, screen).run()


class _Experiment:
    """What is known so far, so that an interruption loses no run that is over."""

    def __init__(
        self,
        settings: Settings,
        out: Path,
        images: ImageSet,
        arms: Sequence[Arm],
        storage: Storage,
        screen: Screen,
    ) -> None:
        self._settings = settings
        self._out = out
        self._images = images
        self._arms = arms
        self._plan = plan_of(arms, settings)
        self._storage = storage
        self._screen = screen
        self._target = settings.target_accuracy
        self._budget_fresh = 0
        self._calibrations: dict[float, Calibration] = {}
        self._scene: Scene | None = None
        self._runs: list[RunRecord] = []

    def run(self) -> None:
        self._calibrate()
        if self._settings.scene:
            self._play()
        try:
            with self._screen.runs(self._plan) as view:
                self._train(view)
        except KeyboardInterrupt:
            if self._runs:
                self._write(complete=False)
                self._screen.say(
                    f"Stopped. What was over, {len(self._runs)} of {len(self._plan)} runs, is in "
                    f"{self._out / 'demo.json'}."
                )
            raise
        self._write(complete=True)

    def _calibrate(self) -> None:
        settings, screen = self._settings, self._screen
        with screen.working("measuring a training step"):
            step_s = step_seconds(self._images, settings)
        for slowness in dict.fromkeys([settings.slowness, *(arm.slowness for arm in self._arms)]):
            with screen.working(f"setting the storage's speed for R = {slowness:g}"):
                found = calibrate(self._images, settings, self._storage, slowness, step_s)
            self._calibrations[slowness] = found
            screen.say(
                f"Storage is {self._storage.name}: "
                f"[bold]{self._storage.described(found.limits)}[/]. Training without echoing then "
                f"measured {found.batch_s * 1e3:.1f} ms from batch to batch, "
                f"{found.step_s * 1e3:.1f} ms of them a step. R is told with the result: "
                "it is that of the runs."
            )
        batches = round(settings.seconds / self._calibrations[settings.slowness].batch_s)
        self._budget_fresh = settings.budget_fresh or max(
            settings.least_fresh, batches * settings.batch_size
        )

    def _play(self) -> None:
        images, settings, screen = self._images, self._settings, self._screen
        storage, which = EmulatedStorage(images, settings), "storage"
        known = self._calibrations[settings.slowness]
        with screen.working("setting the storage's speed for a scene"):
            if storage.name != self._storage.name:
                which = f"{storage.name} storage, not {self._storage.name},"
                known = calibrate(images, settings, storage, settings.slowness, known.step_s)
            stretches = stretches_of(images, storage, settings, known)
        screen.say(f'Scene: {which} slows down and recovers while echo("auto") is trained.')
        with screen.scene(sum(stretch.seconds for stretch in stretches)) as view:
            self._scene = run_scene(images, storage, settings, stretches, view.moved)
        screen.say(f"[bold]{self._scene.conclusion}[/]")

    def _train(self, view: RunsView) -> None:
        memory = in_memory(self._images, self._settings)
        with ExitStack() as opened:
            slow = {
                slowness: opened.enter_context(self._storage.opened(found.limits))
                for slowness, found in self._calibrations.items()
            }
            for arm, seed in self._plan:
                in_memory_too = arm.place == "memory"
                if self._target is None and not in_memory_too:
                    self._target = target_of(self._runs, self._budget_fresh)
                view.started(arm, self._target)
                source = memory if in_memory_too else slow[arm.slowness]
                record = run_arm(
                    arm, seed, self._images, source, self._settings, self._is_over, view.evaluated
                )
                self._runs.append(record)
                view.finished(record)

    def _is_over(self, evaluation: Evaluation) -> bool:
        if self._target is None:
            return evaluation.fresh >= self._budget_fresh
        return evaluation.accuracy >= self._target or evaluation.seconds >= self._settings.longest_s

    def _write(self, complete: bool) -> None:
        target = self._target
        found = summaries(self._runs, target) if target is not None else []
        found.sort(key=lambda s: self._arms.index(s.arm))
        closing = conclusion(found, target) if complete and target is not None else "interrupted"
        write_json(
            self._out / "demo.json",
            as_json(
                self._images, self._settings, self._storage.name,
                list(self._calibrations.values()), self._budget_fresh, self._runs, found, target,
                self._scene, closing, complete,
            ),
        )  # fmt: skip
        if not complete or target is None:
            return
        ordered = sorted(self._runs, key=lambda run: self._arms.index(run.arm))
        title = f"{self._images.name[0].upper()}{self._images.name[1:]}"
        write_picture(self._out / "demo.png", ordered, target, self._scene, title)
        self._screen.table(found, target)
        self._screen.say(f"[bold]{closing}[/]")
        self._screen.say(f"Raw rows: {self._out / 'demo.json'}. Picture: {self._out / 'demo.png'}.")


def plan_of(arms: Sequence[Arm], settings: Settings) -> list[tuple[Arm, int]]:
    """Return the runs in their order: arm and seed.

    From memory first, once, for that sets the target. Then seed by seed, so that what else the
    machine does meets all arms alike; every other seed in the opposite order.
    """
    plan = [
        (arm, seed)
        for seed in range(settings.seeds)
        for arm in (arms if seed % 2 == 0 else list(reversed(arms)))
        if arm.place != "memory" or seed == 0
    ]
    return sorted(plan, key=lambda run: run[0].place != "memory")


def _introduce(screen: Screen, images: ImageSet, settings: Settings, arms: Sequence[Arm]) -> None:
    train = len(images.train_paths)
    screen.say(
        f"{train:,} training files ({format_bytes(images.train_bytes)}) and "
        f"{len(images.test_images):,} test images: {images.name}, {len(images.classes)} classes."
    )
    largest = max(pool_examples(images, settings, arm.most_uses) for arm in arms)
    share = largest / train
    text = f"Pools hold at most {largest:,} examples, {share:.1%} of the training files"
    if share > settings.largest_pool_fraction:
        text += ": so few files would simply be cached, do not read much into the speed-up"
    screen.say(text + ".")
    seeds = "1 seed" if settings.seeds == 1 else f"{settings.seeds} seeds"
    screen.say(f"{len(arms)} arms, each with {seeds}; what trains from memory, the bound, once.")


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for demo.json, demo.png and the demo's image files.")
    ] = Path("stoker-demo"),
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each arm but the bound in memory.")
    ] = Settings.seeds,
    full: Annotated[
        bool, typer.Option("--full", help="Also echo after augmentation, more factors, and R = 1.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Your own images, one sub-folder a class, instead of the digits."),
    ] = None,
    remote: Annotated[
        bool,
        typer.Option("--remote", help="Read from a local HTTP server instead of emulated storage."),
    ] = False,
) -> None:
    """Train one small network with and without echoing, on storage that is too slow for it.

    Shows what echoing buys: fresh examples, steps and seconds to a target accuracy. The task is
    sized by the speed of the machine, so that it takes under three minutes. Ctrl-C ends it
    cleanly; image files are kept for the next run.

    Example: scripts/demo --out /tmp/demo --seeds 8
    """
    try:
        run_settings(replace(Settings(), seeds=seeds), out, full=full, data=data, remote=remote)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    except (ImportError, OSError, ValueError, stoker.StokerError) as error:
        typer.echo(f"scripts/demo: {error}", err=True)
        raise typer.Exit(1) from None


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(demo)

if __name__ == "__main__":
    app(prog_name="scripts/demo")
