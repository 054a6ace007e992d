"""Who does the work: rows are claimed once each, tasks wait for what they need, errors arrive."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from epochs import working
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.workers.cost import CostEstimate
from stoker.engine.workers.threads import CHUNK_NS, Task, WorkerPool, is_worker
from stoker.engine.workers.tuning import Autotuner
from strategies import few

LONG_S = 60.0
COSTLY_NS = 10**12
"""A row that takes so long is worth threads on any machine."""


class Runner:
    """Notes which rows of which task are done, and that nothing is done too soon.

    Args:
        depth: how near to the consumer its segment is.
        cost: how rows are divided into chunks.
        each: is called with the number of the task before its rows are done, by who does them.
    """

    def __init__(
        self,
        depth: int = 0,
        cost: CostEstimate | None = None,
        each: Callable[[int], object] = lambda number: None,
    ) -> None:
        self.depth = depth
        self.is_sent = False
        self.cost = cost or CostEstimate(1)
        self.each = each
        self.needs: dict[int, list[Task]] = {}
        self.done_rows: dict[int, list[int]] = {}
        self.order: list[int] = []
        self.completed: list[int] = []
        self.accounted = 0
        self.by: set[str] = set()

    def task(self, number: int, rows: int = 1) -> Task:
        self.done_rows[number] = []
        return Task(self, number, rows)

    def run(self, task: Task, start: int, stop: int, remote: Any) -> tuple[list[int], bool]:
        assert all(need.done for need in self.needs.get(task.number, ()))
        self.each(task.number)
        self.by.add(threading.current_thread().name)
        self.order.append(task.number)
        self.done_rows[task.number].extend(range(start, stop))
        return [stop - start, *[0] * 5], False

    def account(self, spent: list[int]) -> None:
        self.accounted += spent[0]

    def complete(self, task: Task) -> None:
        assert sorted(self.done_rows[task.number]) == list(range(task.rows))
        assert not task.done
        self.completed.append(task.number)


class Gate:
    """Holds up who comes to it until it is opened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self, number: int) -> None:
        self.reached.set()
        assert self._open.wait(LONG_S)

    def open(self) -> None:
        self._open.set()


costs = st.builds(
    lambda rows, kind: (rows, kind), st.integers(1, 9), st.sampled_from(["new", "whole", "light"])
)


@few(40)
@given(
    threads=st.integers(0, 3),
    cost=costs,
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
)
def test_every_row_is_done_once(threads: int, cost: tuple[int, str], sizes: list[int]) -> None:
    runner = Runner(cost=CostEstimate(cost[0]))
    runner.cost.whole = cost[1] == "whole"
    runner.cost.light = cost[1] == "light"
    with working(threads) as pool:
        tasks = [runner.task(number, rows) for number, rows in enumerate(sizes)]
        for task in tasks:
            pool.submit(task)
        for task in reversed(tasks):
            pool.wait(task)
            assert task.done
            assert task.done_ns > 0
    for task in tasks:
        assert sorted(runner.done_rows[task.number]) == list(range(task.rows))
    assert sorted(runner.completed) == list(range(len(sizes)))
    assert runner.accounted == runner.cost.rows == sum(sizes)


_tasks = st.tuples(st.integers(0, 2), st.integers(1, 3), st.sets(st.integers(0, 11), max_size=4))


@few(40)
@given(threads=st.integers(0, 3), planned=st.lists(_tasks, min_size=1, max_size=12))
def test_a_task_waits_for_what_it_needs(
    threads: int, planned: list[tuple[int, int, set[int]]]
) -> None:
    runners = [Runner(depth) for depth in range(3)]
    tasks: list[Task] = []
    with working(threads, depths=3) as pool:
        for number, (depth, rows, chosen) in enumerate(sorted(planned, key=lambda one: one[0])):
            runner = runners[depth]
            task = runner.task(number, rows)
            needs = runner.needs[number] = [tasks[at] for at in chosen if at < number]
            tasks.append(task)
            pool.submit(task, needs)
        for task in tasks:
            pool.wait(task)
    assert sorted(n for runner in runners for n in runner.completed) == list(range(len(tasks)))


def test_without_threads_it_is_done_where_it_is_handed_in() -> None:
    """And nobody plans ahead."""

    def fail(number: int) -> None:
        raise MemoryError

    def plan() -> bool:
        planned.append(1)
        return False

    planned: list[int] = []
    runner = Runner(cost=CostEstimate(2))
    with working(0) as pool:
        assert pool.inline
        assert pool.workers == 0
        pool.plan_with(plan)
        pool.plan()
        task = runner.task(0, 5)
        pool.submit(task)
        assert task.done
        with pytest.raises(MemoryError):
            pool.submit(Runner(each=fail).task(0))
    assert runner.by == {threading.current_thread().name}
    assert not planned


def test_threads_do_it_and_are_known_as_workers() -> None:
    said: list[bool] = []
    runner = Runner(each=lambda number: said.append(is_worker()))
    with working(2) as pool:
        assert not pool.inline
        assert pool.workers == 2
        task = runner.task(0)
        pool.submit(task)
        pool.wait(task)
    assert said == [True]
    assert not is_worker()


class Slot:
    """A slot of a worker process, which notes who is at work there."""

    def __init__(self, process: str) -> None:
        self.process = process

    def stop(self) -> None: ...

    def close(self) -> None: ...


def test_no_process_gets_a_second_request_while_another_has_none() -> None:
    met = threading.Barrier(3)  # no task ends before all three are under way
    processes: list[str] = []

    class Meeting(Runner):
        def run(self, task: Task, start: int, stop: int, remote: Any) -> tuple[list[int], bool]:
            processes.append(remote.process)
            met.wait(LONG_S)
            return super().run(task, start, stop, remote)

    slots = [Slot(process) for process in "aabbcc"]
    with contextlib.closing(WorkerPool(6, 1, Autotuner(), slots)) as pool:
        pool.begin()
        for number in range(30):
            processes.clear()
            tasks = [Meeting().task(3 * number + each) for each in range(3)]
            for task in tasks:
                pool.submit(task)
            for task in tasks:
                pool.wait(task)
            assert sorted(processes) == ["a", "b", "c"]


def test_what_is_nearest_to_the_consumer_is_done_first() -> None:
    gate = Gate()
    order: list[str] = []
    first = Runner(0, each=lambda n: gate(n) if n == 0 else order.append(f"far {n}"))
    last = Runner(1, each=lambda n: order.append(f"near {n}"))
    with working(1, depths=2) as pool:
        pool.submit(first.task(0))
        assert gate.reached.wait(LONG_S)
        rest = [first.task(1), last.task(0), first.task(2), last.task(1)]
        for task in rest:
            pool.submit(task)
        gate.open()
        far = rest[2]
        pool.wait(far)  # the last one of all
    assert order == ["near 0", "near 1", "far 1", "far 2"]


def test_who_waits_for_what_stands_behind_a_pool_helps() -> None:
    gate = Gate()
    far, near = Runner(0, each=gate), Runner(1)
    with working(1, depths=2) as pool:
        pool.submit(far.task(0))
        assert gate.reached.wait(LONG_S)
        task = near.task(0, 3)
        pool.submit(task)
        pool.wait(task)  # the one worker is held up
        gate.open()
    assert near.by == {threading.current_thread().name}


@pytest.mark.parametrize("threads", [1, 2])
def test_what_breaks_a_worker_is_raised_to_who_waits(threads: int) -> None:
    def fail(number: int) -> None:
        raise MemoryError("none left")

    runner = Runner(each=fail)
    with working(threads) as pool:
        task = runner.task(0)
        pool.submit(task)
        with pytest.raises(MemoryError, match="none left"):
            pool.wait(task)
        assert not task.done
        with pytest.raises(MemoryError):  # it stays broken
            pool.wait(task)
    assert runner.completed == []


def test_close_ends_what_is_under_way_and_begins_nothing() -> None:
    gate = Gate()
    runner = Runner(each=gate)
    raised: list[BaseException] = []
    tuned = Autotuner()
    tuned.settle(1)
    pool = WorkerPool(1, 1, tuned)
    pool.begin()
    under_way, queued = runner.task(0, 2), runner.task(1)
    pool.submit(under_way)
    pool.submit(queued)
    assert gate.reached.wait(LONG_S)

    def wait() -> None:
        try:
            pool.wait(queued)
        except RuntimeError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    pool.shut()
    assert pool.closed
    waiter.join(LONG_S)
    assert [str(error) for error in raised] == ["the iterator was closed while it was waited for"]
    gate.open()
    pool.close()
    assert runner.done_rows == {0: [0], 1: []}  # the row it was at, and no more
    assert not under_way.done
    late = runner.task(2)
    pool.submit(late)
    assert not late.done
    with pytest.raises(RuntimeError):
        pool.wait(late)


def test_a_worker_may_close_its_own_pool() -> None:
    closed = threading.Event()

    def close(number: int) -> None:
        pool.close()
        closed.set()

    with working(1) as pool:
        pool.submit(Runner(each=close).task(0))
        assert closed.wait(LONG_S)


def test_a_worker_plans_for_as_long_as_more_is_due() -> None:
    left = [True] * 5 + [False]
    over = threading.Event()
    planners: set[bool] = set()

    def plan() -> bool:
        planners.add(is_worker())
        more = left.pop(0)
        if not more:
            over.set()
        return more

    with working(2) as pool:
        pool.plan_with(plan)
        pool.plan()
        assert over.wait(LONG_S)
    assert planners == {True}
    assert not left


def test_work_has_its_turn_between_two_plans() -> None:
    gate = Gate()
    order: list[str] = []
    runner = Runner(each=lambda n: gate(n) if n == 0 else order.append("work"))
    plans = iter([True, True, False])

    def plan() -> bool:
        order.append("plan")
        return next(plans)

    with working(1) as pool:
        pool.plan_with(plan)
        pool.submit(runner.task(0))
        assert gate.reached.wait(LONG_S)
        pool.plan()
        tasks = [runner.task(n) for n in (1, 2, 3)]
        for task in tasks:
            pool.submit(task)
        gate.open()
        pool.wait(tasks[-1])
    assert order == ["plan", "work", "plan", "work", "plan", "work"]


def test_planning_comes_behind_all_work_where_it_may_block() -> None:
    gate = Gate()
    order: list[str] = []
    over = threading.Event()
    runner = Runner(each=lambda n: gate(n) if n == 0 else order.append("work"))

    def plan() -> bool:
        order.append("plan")
        over.set()
        return False

    pool = WorkerPool(1, 1, Autotuner())
    assert pool.inline
    pool.work_ahead()
    assert not pool.inline
    pool.begin()
    try:
        pool.plan_with(plan)
        pool.submit(runner.task(0))
        assert gate.reached.wait(LONG_S)
        pool.plan()
        pool.submit(runner.task(1))
        pool.submit(runner.task(2))
        gate.open()
        assert over.wait(LONG_S)
    finally:
        pool.close()
    assert order == ["work", "work", "plan"]


def test_a_worker_plans_once_what_it_depends_on_is_there() -> None:
    gate = Gate()
    planned = threading.Event()
    seen: list[bool] = []
    runner = Runner(each=gate)
    with working(1) as pool:
        task = runner.task(0)

        def plan() -> bool:
            seen.append(task.done)
            planned.set()
            return False

        pool.plan_with(plan)
        pool.submit(task)
        assert gate.reached.wait(LONG_S)
        assert not pool.plan_after(task)
        assert not planned.is_set()
        gate.open()
        assert planned.wait(LONG_S)
        assert pool.plan_after(task)  # the caller goes on himself
    assert seen == [True]


def test_costly_work_brings_in_threads_and_the_next_epoch_begins_with_them() -> None:
    tuned = Autotuner()
    cost = tuned.cost(0, 4)
    assert tuned.cost(0, 99) is cost  # of the first epoch
    cost.releases_gil = True  # so that nothing need be tried
    for _ in range(2):  # what the first piece costs decides nothing
        cost.note(100, 100 * COSTLY_NS)
    runner = Runner(cost=cost)
    pool = WorkerPool(3, 1, tuned)
    pool.begin()
    try:
        assert pool.inline
        first, second = runner.task(0, 4), runner.task(1, 4)
        pool.submit(first)
        pool.wait(first)
        assert pool.active == tuned.active == 3
        pool.submit(second)
        pool.wait(second)
    finally:
        pool.close()
    assert WorkerPool(3, 1, tuned).active == 3
    assert WorkerPool(2, 1, tuned).active == 2  # never more than there may be
    assert WorkerPool(0, 1, tuned).inline


@given(
    rows=st.integers(1, 512),
    most=st.one_of(st.none(), st.integers(1, 4096)),
    row_ns=st.floats(0, 1e12),
    target_ns=st.integers(1, 10**9),
)
def test_a_chunk_takes_about_as_long_as_it_should(
    rows: int, most: int | None, row_ns: float, target_ns: int
) -> None:
    cost = CostEstimate(rows)
    cost.chunk_rows = most or rows
    cost.row_ns = row_ns
    chunk = cost.chunk(target_ns)
    assert 1 <= chunk <= cost.chunk_rows
    assert chunk == 1 or chunk * max(row_ns, 1.0) <= target_ns * (1 + 1e-9)
    if chunk < cost.chunk_rows:
        assert (chunk + 1) * max(row_ns, 1.0) > target_ns * (1 - 1e-9)
    cost.whole = True
    assert cost.chunk(target_ns) == cost.chunk_rows


def test_who_knows_nothing_begins_carefully() -> None:
    cost = CostEstimate(32)
    assert cost.chunk(CHUNK_NS) == 1
    assert cost.batch_ns() == 0
    cost.light = True
    assert cost.chunk(CHUNK_NS) == 32


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 10**9)), min_size=1, max_size=20))
def test_an_estimate_lies_between_what_was_measured(measured: list[tuple[int, int]]) -> None:
    cost = CostEstimate(8)
    for rows, ns in measured:
        before, settled = cost.row_ns, cost.rows >= 8
        cost.note(rows, ns)
        assert cost.row_ns is not None
        if before is None:
            assert cost.row_ns == ns / rows
        elif not settled:  # the first are slow: the least counts
            assert cost.row_ns == min(before, ns / rows)
        else:
            low, high = sorted((before, ns / rows))
            assert low * (1 - 1e-9) <= cost.row_ns <= high * (1 + 1e-9)
    assert cost.rows == sum(rows for rows, _ in measured)
    assert cost.work_ns == sum(ns for _, ns in measured)
    assert cost.batch_ns() == (cost.row_ns or 0) * 8
