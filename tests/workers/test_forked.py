"""A forked child owns nothing of what its parent iterates: neither workers nor iterators."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import run
from strategies import one_in

KINDS = {
    "processes": 'stoker.from_dataset(Examples(64, 0.003)).batch(4).workers(2, kind="process")',
    "threads": "stoker.from_dataset(Examples(64, 0.003), seed=0).echo(2).batch(8).workers(2)",
    "inline": "stoker.from_dataset(Examples(64, 0.001), seed=0).batch(4).workers(0)",
    "auto": "stoker.echo([np.arange(4)] * 16, max_factor=2).steps(16)",
    "stream": "stoker.from_iterable(lambda: iter(range(64))).batch(4)",
}
DOES = {
    "exits": "pass",
    "closes": "iterator.close()",
    "drops": "del iterator",
    "iterates": "assert sum(1 for _ in pipeline) == 16",
    "looks": """
            str(pipeline), pipeline.epoch, pipeline.counts
            assert pipeline.stats().batches == 0
            try:
                pipeline.state_dict()
            except stoker.StateError as error:
                assert "forked from" in str(error) or "stream" in str(error), error
            else:
                raise AssertionError
    """,
    "asks": """
            for _ in range(2):
                try:
                    next(iterator)
                except RuntimeError as error:
                    assert "call iter(pipeline) in the child" in str(error)
                else:
                    raise AssertionError
    """,
    "multiplies": """
            import multiprocessing
            process = multiprocessing.get_context("fork").Process(target=iterator.close)
            process.start()
            process.join()
            assert process.exitcode == 0
    """,
}


CHILD = """
        child = os.fork()
        if not child:
            {does}
            sys.exit(0)  # runs what is registered for the interpreter's end
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_whatever_forked_children_do_their_parent_goes_on(tmp_path: Path, kind: str) -> None:
    body = f"""
    if __name__ == "__main__":
        multiprocessing.set_start_method("fork")  # forkserver serves no child that was forked
        pipeline = {KINDS[kind]}
        iterator = iter(pipeline)
        next(iterator)
        faulthandler.cancel_dump_traceback_later()  # its thread is not there in a child
        codes = []
        {"".join(CHILD.format(does=does) for does in DOES.values())}
        say(json.dumps([codes, sum(1 for _ in iterator)]))
        say(json.dumps(pipeline.epoch))
    """
    assert run(tmp_path, body) == [[[0] * len(DOES), 15], 1]


@pytest.mark.full
def test_a_child_that_was_forked_while_locks_were_held_ends(tmp_path: Path) -> None:
    body = """
    if __name__ == "__main__":
        multiprocessing.set_start_method("fork")  # forkserver serves no child that was forked
        pipeline = stoker.from_dataset(Examples(400), seed=0).echo().batch(4).workers(2)
        iterator = iter(pipeline)
        codes = []
        faulthandler.cancel_dump_traceback_later()
        for _ in range(40):  # the workers plan and work meanwhile
            next(iterator)
            child = os.fork()
            if not child:
                pipeline.stats(), str(pipeline), pipeline.record()
                sys.exit(0)
            codes.append(os.waitpid(child, 0)[1])
        say(json.dumps(codes))
        iterator.close()
    """
    assert run(tmp_path, body) == [[0] * 40]


EARLY = """
import gc, os

# A hook of a fork that is older than stoker's, as those of the standard library are: it runs in the
# child before them, and in the parent behind them.
hooks = {"before": [], "after_in_child": []}
os.register_at_fork(
    before=lambda: [each() for each in hooks["before"]],
    after_in_child=lambda: [each() for each in hooks["after_in_child"]],
)
"""


@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_a_child_that_drops_it_within_the_fork_ends_nothing_of_its_parents(
    tmp_path: Path, kind: str
) -> None:
    body = f"""
    if __name__ == "__main__":
        multiprocessing.set_start_method("fork")  # forkserver serves no child that was forked
        pipeline = {KINDS[kind]}
        held = [iter(pipeline)]
        next(held[0])
        faulthandler.cancel_dump_traceback_later()
        hooks["after_in_child"].append(held.clear)
        child = os.fork()
        if not child:
            os._exit(0)
        _, status = os.waitpid(child, 0)
        say(json.dumps([os.waitstatus_to_exitcode(status), sum(1 for _ in held[0])]))
    """
    assert run(tmp_path, body, EARLY) == [[0, 15]]


@pytest.mark.parametrize("when", ["before", "after_in_child"])
def test_a_cache_that_is_collected_within_a_fork_is_closed_behind_it(
    tmp_path: Path, when: str
) -> None:
    body = f"""
    def cached():
        examples = stoker.from_dataset(Examples(8), seed=0)
        return examples.cache("4MiB", path={str(tmp_path / "kept")!r}, version="1").batch(4)


    if __name__ == "__main__":
        multiprocessing.set_start_method("fork")  # forkserver serves no child that was forked
        gc.disable()
        for _ in range(2):
            pipeline = cached()
            list(pipeline)
            cycle = [pipeline]
            cycle.append(cycle)
            del pipeline, cycle
            hooks[{when!r}].append(gc.collect)
            child = os.fork()
            if not child:
                assert len(list(cached())) == 2
                os._exit(0)
            hooks[{when!r}].clear()
            say(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
            again = cached()
            say(json.dumps([len(list(again)), again.stats().cache.hits]))
    """
    assert run(tmp_path, body, EARLY) == [0, [2, 8], 0, [2, 8]]
