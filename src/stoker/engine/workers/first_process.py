"""The first worker process of a pipeline, which measures the cost of the user's Python code.

Nobody can know beforehand, so it makes the first batches alone, and times them. It is started
before the code is called: a file or a database that a call opens would be shared by all processes
that are forked later.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stoker.basics.resources import usable_cores, usable_memory_bytes
from stoker.basics.warn import warn
from stoker.engine.work.step import SENDING, Failure
from stoker.engine.work.work import Work
from stoker.engine.workers.cost import INLINE_BATCH_NS, TIMED, CostEstimate
from stoker.engine.workers.processes import starting
from stoker.engine.workers.processes.worker_process import ProcessSlot
from stoker.engine.workers.requests import Compared, Comparison, GilQuestion, Request
from stoker.engine.workers.tuning import MOST_SLEEPING, Autotuner
from stoker.errors import StageError, describe_error
from stoker.stats import ProcessTrial

# The work until it is decided, or a batch if that is less. Chosen, not measured.
_TRIAL_NS = 5_000_000
# The work behind that, if it is costly, in which the process looks at the GIL: in 5 ms its share
# came out as 22 % and as 64 % in two runs. Looking slows cheap examples down, so it comes after.
_PROBED_NS = 15_000_000
# A single request may take so long because other programs run: one for 64 lists of numbers, which
# take 1 ms, took 5.
_SURE_NS = 20_000_000
# As a multiple of the work: if handing rows over takes the loop's thread more, processes gain
# little over that thread alone. Chosen, not measured.
_HANDING = 0.5
# Requests before that is believed: of single ones, one of 4 rows took 10 ms, others 0.6.
_HANDED = 4
# The time of a process for a row beside the user's code and its seeds, a first touch of memory that
# the fork shares with it: dicts and pairs of 1 us took 4 to 6 us.
_ROW_NS = 5_000
# Processes for examples that wait, unless the user names a number: DataLoader's users take 8 to 16
# for remote storage. Chosen, not measured.
_MOST_WAITING = 16
# As a share of its time in which the first process has or wants a processor: if less, it waits.
_WAITS = 0.5
# Memory of a process, with its copies of the parent's pages. Chosen, not measured.
_PROCESS_BYTES = 256 << 20


class _Measured:
    """The cost of a segment's rows: their time in the process, and that to hand them over.

    A row's cost is the least of all requests: other programs only make them longer.
    """

    def __init__(self) -> None:
        self.rows = self.requests = self.work_ns = 0
        self.row_ns = self.handing_row_ns = math.inf
        self._is_first = True

    def add(self, rows: int, work_ns: int, handing_ns: int, own_row_ns: int) -> None:
        """Add a request; the first one does not count, as it imports modules and fills caches.

        ``own_row_ns`` is the cost of a row in a process alone.
        """
        if not self._is_first:
            self.rows += rows
            self.requests += 1
            self.work_ns += work_ns
            self.row_ns = min(self.row_ns, max(0, work_ns / rows - own_row_ns))
            self.handing_row_ns = min(self.handing_row_ns, handing_ns / rows)
        self._is_first = False


def _why_impossible(answer: Any) -> str:
    """Return why a process cannot do the work, by its answer; "" if it can."""
    for each in answer if isinstance(answer, list) else [answer]:
        error = each.error if type(each) is Failure else None
        if not isinstance(error, StageError):
            continue
        if error.stage == SENDING:
            return f"it makes what cannot be sent from a process: {describe_error(error.__cause__)}"
        is_forked = multiprocessing.get_start_method() == "fork"
        cause = error.__cause__
        if is_forked and isinstance(cause, RuntimeError) and "CUDA" in str(cause):
            return (
                "it uses CUDA, which a forked process cannot use: have it use the CPU and end with "
                ".to_torch('cuda'), or call multiprocessing.set_start_method('forkserver') where "
                "the "
                "program begins"
            )
    return ""


class FirstProcess:
    """A worker process that makes all batches until their cost is known.

    Args:
        slots: those of the process.
        add: starts so many more.
        count: the number of processes.
        works: those of the segments on the host, by depth.
        autotuner: has their costs, and keeps the decision.
        tell: tells the user why costly code of theirs runs inline.
        grows: whether there may be more for examples that wait.
    """

    def __init__(
        self,
        slots: list[ProcessSlot],
        add: Callable[[int], list[ProcessSlot]],
        count: int,
        works: Sequence[Work],
        autotuner: Autotuner,
        tell: Callable[[str], None],
        *,
        grows: bool,
    ) -> None:
        self._tell = tell
        self._slots = slots
        self._add = add
        self._count = count
        self._grows = grows
        self._works = works
        self._autotuner = autotuner
        self._wall_ns = self._wanted_ns = 0
        self._seeding_ns: dict[int, int] = {}  # for a call, by depth
        self.impossible = ""
        self._handing_fraction: float | None = None  # of costly work
        self._judged_ns = 0
        self._measured: dict[CostEstimate, _Measured] = {}

    @contextlib.contextmanager
    def run(self, request: Request) -> Iterator[Any]:
        """Run a request, as ``ProcessSlot.run`` does; yield None if it cannot do the work.

        The first two examples of a segment are made in two orders before, and a difference told:
        then other processes, which each see some of the examples, would make other ones.
        """
        segment, (slot, *_) = self._works[request.depth].segment, self._slots
        if (
            len(request.places) > 1
            and segment.cache is None
            and request.depth not in self._seeding_ns
        ):
            with slot.run(Comparison(request.part(slice(2)))) as found:
                compared = found if isinstance(found, Compared) else Compared(False, 0)
                self._seeding_ns[request.depth] = compared.seeding_ns
                if compared.differs:
                    names = ", ".join(each.name for each in segment.users_code)
                    warn(
                        f"{names}: an example comes out different behind other examples. Code that "
                        "remembers, as a counter does, depends on the number of workers: take "
                        ".workers(0), or keep nothing between calls. A generator without a seed, "
                        "as of default_rng(), cannot be repeated: draw from .random_map()'s rng"
                    )
        with slot.run(request) as answered:
            self.impossible = self.impossible or _why_impossible(answered[0])
            yield None if self.impossible else answered

    def note(
        self,
        depth: int,
        cost: CostEstimate,
        rows: int,
        work_ns: int,
        handing_ns: int,
        spent: list[int],
    ) -> None:
        """Add a request: its rows, their time there, this thread's for them, its counters.

        Inline generators are seeded for code that draws alone, so their seeds are no work here.
        """
        segment = self._works[depth].segment
        rowwise = len(segment.operations) + (segment.source is not None)
        calls = sum(segment.calls_users[:rowwise])
        own_ns = _ROW_NS + calls * self._seeding_ns.get(depth, 0)
        _, sampled_ns, wanted_ns, cpu_ns = spent[TIMED]
        if sampled_ns:  # without the share of the time in which other programs had the processor
            delayed_ns = min(max(0, wanted_ns - cpu_ns), sampled_ns)
            work_ns -= work_ns * delayed_ns // sampled_ns
        self._measured.setdefault(cost, _Measured()).add(rows, work_ns, handing_ns, own_ns)
        self._wall_ns += sampled_ns
        self._wanted_ns += wanted_ns

    def is_costly(self) -> bool | None:
        """Whether the work is worth processes; None while that is not known.

        Of costly work it is known once the process has also looked how much it leaves the GIL free.
        """
        if self.impossible:
            return False
        if self._handing_fraction is None:
            is_costly = self._judge()
            if is_costly:
                self._ask_for_gil()
                self._judged_ns = self._tried_ns()
            return None if is_costly else is_costly
        return True if self._tried_ns() - self._judged_ns >= _PROBED_NS else None

    def _judge(self) -> bool | None:
        ats = {work.address.at for work in self._works} & self._autotuner.costs.keys()
        costs = [self._autotuner.costs[at] for at in ats]
        each = [(cost, self._measured.get(cost)) for cost in costs]
        if not all(cost.rows if found is None else found.rows for cost, found in each):
            return None  # of several segments the later ones come late: a pool is filled first
        sent = [(found, cost.rows_per_batch) for cost, found in each if found is not None]
        if self._tried_ns() < _TRIAL_NS and any(found.rows < rows for found, rows in sent):
            return None
        batch_ns = sum(found.row_ns * rows for found, rows in sent)
        own_ns = sum(cost.batch_ns() for cost, found in each if found is None)
        handing_ns = sum(found.handing_row_ns * rows for found, rows in sent)
        work_ns = batch_ns + own_ns  # stoker's own part is then done by threads
        if work_ns <= INLINE_BATCH_NS:
            return False
        if handing_ns >= _HANDING * work_ns:
            return False if all(found.requests >= _HANDED for found, _ in sent) else None
        if self._tried_ns() < _SURE_NS and any(found.requests < 2 for found, _ in sent):
            return None
        self._handing_fraction = handing_ns / work_ns
        return True

    def _tried_ns(self) -> int:
        return sum(found.work_ns for found in self._measured.values())

    def _ask_for_gil(self) -> float | None:
        """Have the process look at the GIL from now on, or tell what it saw."""
        with self._slots[0].run(GilQuestion()) as free:
            return free if isinstance(free, float) else None

    def start_all(self) -> list[ProcessSlot]:
        """Start the other processes; return the slots of all. The consumer's thread calls this."""
        count = self._count
        threads = count
        if self._grows and self._wanted_ns < _WAITS * self._wall_ns:
            threads = max(count, MOST_SLEEPING)
            count = max(count, min(_MOST_WAITING, usable_memory_bytes() // _PROCESS_BYTES))
        self._autotuner.processes = count
        self._autotuner.most_processes = count if self._grows and threads == count else 0
        if self._handing_fraction is not None and (free := self._ask_for_gil()) is not None:
            self._autotuner.process_trial = ProcessTrial(
                count, threads, usable_cores(), free, self._handing_fraction
            )
        slots, self._slots = self._slots, []
        try:
            slots += self._add(count - 1) if count > 1 else []
        except OSError as error:  # of memory or processes, for one
            warn(f"one worker process runs your Python code: {error}")
            self._autotuner.processes, self._autotuner.most_processes = 1, 0
        except BaseException:
            starting.end(slots)
            raise
        return sorted(slots, key=lambda slot: slot.number)

    def end(self) -> None:
        """End the process: the work stays inline, or the run is over."""
        starting.end(self._slots)

    def stay_inline(self) -> Callable[[], None] | None:
        """End the process, and keep the work inline for the pipeline's life.

        Return a function that tells the user why; None if there is nothing to tell.
        """
        self._autotuner.processes = 0
        if all(work.segment.cache is None for work in self._works):  # else it may be writing there
            for slot in self._slots[:1]:
                slot.process.give_up()
        self.end()
        return functools.partial(self._tell, self.impossible) if self.impossible else None
