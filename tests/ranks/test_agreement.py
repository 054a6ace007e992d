"""Ranks that share an epoch have one seed, one data set, one chain and one place; or are told."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from command_line import python
from scripts import SETUP, script, told_by
from stoker.distributed.store_exchange import RankExchange, TorchStore

TOLD = """
    def ids(pipeline):
        return [int(i) for batch in pipeline for i in batch]

    def of(length=40, seed=None):
        return stoker.from_arrays(np.arange(length), seed=seed).shuffle()

    def said(pipeline, take=lambda pipeline: next(iter(pipeline))):
        try:
            take(pipeline)
        except (ValueError, stoker.StokerError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    told = {}
    open = of(101).shard().batch(8)
    told["lengths"], told["printed"] = len(open), str(open)
    fresh = json.loads(json.dumps(open.state_dict()))  # before anybody knows the seed
    told["epochs"] = [ids(open), ids(open)]
    told["known"], told["seed"] = str(open), open.seed
    told["stepped"] = ids(of().shard().batch(4).repeat().steps(5))
    told["echoed"] = ids(stoker.from_arrays(np.arange(40)).shuffle().shard().echo().batch(4))
    loaded = of(101).shard().batch(8)
    loaded.load_state_dict(fresh)
    told["fresh"] = ids(loaded)

    # A state in the middle, of rank 0, on all of them: the seed comes with it.
    states = []
    with iter(open) as batches:
        next(batches)
        states = [open.state_dict()]
        rest = ids(batches)
    dist.broadcast_object_list(states, src=0)
    again = of(101).shard().batch(8)
    again.load_state_dict(states[0])
    told["resumed"] = ids(again) == rest

    # An epoch that nobody changed compares nothing: rank 1 may come as late as it likes.
    asked = []
    from stoker.distributed import store_exchange
    once = of(seed=1).shard().batch(8)
    ids(once)
    answer = store_exchange.RankExchange.answer
    store_exchange.RankExchange.answer = lambda *a, **kw: asked.append(1) or answer(*a, **kw)
    ids(once)
    told["asked"] = [len(asked)]
    once.set_epoch(5)
    ids(once)
    told["asked"].append(len(asked))
    list(of(seed=2).shard(rank=0, world_size=1).batch(8))
    told["asked"].append(len(asked))

    # The same parts as with the ranks given; and who takes no part is warned once.
    numbers = stoker.from_arrays(np.arange(50), seed=3)
    even, uneven = numbers.shuffle().shard(), numbers.shard(remainder="uneven")
    told["shown"] = str(even)
    told["parts"] = [ids(even.batch(4)), ids(uneven.batch(4))]
    told["process"] = ids(even.batch(4).workers(1, kind="process"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for chain in (numbers.batch(4), numbers.shuffle().batch(4), stoker.from_iterable([1, 2])):
            list(chain)
        list(numbers.shard(rank=0, world_size=1).batch(4))
        list(stoker.from_loader([np.zeros(2)]))
    told["warned"] = [[str(w.message), os.path.basename(w.filename)] for w in caught]

    lengths = np.minimum(np.random.default_rng(2).lognormal(3, 0.8, 301), 200).astype(int) + 1
    planned = of(301).shard().batch_by_tokens(400, lengths)
    try:
        len(planned)
    except TypeError as error:
        told["unplanned"] = str(error)
    told["planned"] = [[batch.tolist() for batch in planned] for _ in range(2)]
    told["plan"] = [len(planned), planned.progress]
    told["plan"].append(len(list(of(301).shard().batch_by_tokens(400, lengths).echo())))
    told["balanced"] = [batch.tolist() for batch in of(301).shard().balance(lengths).batch(8)]

    differ = {}
    differ["sizes"] = said(of(301, seed=1).shard().batch_by_tokens(400, lengths + RANK))
    fixed = stoker.from_arrays(np.arange(301), seed=1)
    other = fixed.order(lambda epoch, rng: np.roll(np.arange(301), RANK)).shard()
    later = fixed.order(lambda epoch, rng: np.roll(np.arange(301), epoch * RANK)).shard()
    told["orders"] = [said(other, list), said(later.batch(50).repeat().steps(9), list)]
    differ["seed"] = said(of(seed=3 + RANK).shard().batch(4))
    differ["given"] = said(of(seed=3 if RANK else None).shard().batch(4))
    differ["length"] = said(of(44 - 4 * RANK).shard().batch(4))
    differ["chain"] = said(of().shard().batch(4 + RANK))
    differ["steps"] = said(of().shard().batch(4).steps(2 + RANK))
    differ["world"] = said(of(seed=1).shard(rank=RANK, world_size=2 + RANK).batch(4))
    later = of(seed=3).shard().batch(4)
    if RANK:
        later.set_epoch(2)
    differ["epoch"] = said(later)
    later = of(seed=3).shard().batch(4)
    next(iter(later))
    state = later.state_dict()
    later = of(seed=3).shard().batch(4)
    if RANK:
        later.load_state_dict(state)
    differ["position"] = said(later)
    differ["by hand"] = said(of().shard(rank=RANK, world_size=WORLD).batch(4))
    differ["uneven"] = said(of(41).shard(remainder="uneven").batch(4))
    told["differ"] = differ

    # A child has no connection to the others: what was given a seed goes on as it did.
    child, parent = os.pipe()
    if not os.fork():
        os.write(parent, json.dumps([
            ids(of(seed=9).shard().batch(4)), said(of().shard().batch(4))
        ]).encode())
        os._exit(0)
    os.wait()
    told["child"] = json.loads(os.read(child, 100_000))

    # A group that is made anew, over the same store or another.
    dist.barrier()
    dist.destroy_process_group()
    told["gone"] = said(of().shard(rank=RANK, world_size=2).batch(4)), said(later)
    early = of(seed=1).shard().batch(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group(
            "gloo", init_method=INIT, rank=RANK, world_size=WORLD,
            timeout=datetime.timedelta(seconds=150),
        )
    told["anew"], told["early"] = ids(of().shard().batch(8)), said(early)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("agreement")
    return told_by(folder, 2, f"    INIT = {f'file://{folder}/again'!r}\n{TOLD}")


def test_a_seed_that_nobody_gave_is_rank_0s(told: list[dict[str, Any]]) -> None:
    first, second = told
    for epoch in range(2):
        parts = [set(each["epochs"][epoch]) for each in told]
        assert [len(part) for part in parts] == [50, 50]
        assert not parts[0] & parts[1]
    assert first["epochs"][0] != first["epochs"][1]
    assert first["seed"] == second["seed"]
    assert [each["lengths"] for each in told] == [7, 7]
    for each in told:
        assert "seed of rank 0, which ranks tell each other at the first iter()" in each["printed"]
        assert f"seed {first['seed']} (drawn)" in each["known"]
        assert each["resumed"]
    for kind in ("stepped", "echoed", "fresh", "anew"):
        assert not set(first[kind]) & set(second[kind]), kind
        assert len(set(first[kind])) == len(set(second[kind])) >= 20


def test_ranks_compare_at_the_first_iter_and_after_set_epoch_alone(
    told: list[dict[str, Any]],
) -> None:
    assert [each["asked"] for each in told] == [[0, 1, 1], [0, 1, 1]]


def test_parts_are_those_of_ranks_that_are_given(told: list[dict[str, Any]]) -> None:
    assert sorted(x for each in told for x in each["parts"][1]) == list(range(50))
    for rank, each in enumerate(told):
        data = stoker.from_arrays(np.arange(50), seed=3)
        given = data.shuffle().shard(rank=rank, world_size=2).batch(4)
        even = [int(x) for batch in given for x in batch]
        assert each["parts"] == [even, list(range(rank, 50, 2))]
        assert each["process"] == even
        assert f"shard(rank={rank}, world_size=2)" in each["shown"]
        (message, filename), (of_loader, _) = each["warned"]
        assert "each of 2 ranks iterates over all batches of the list" in of_loader
        assert "each of 2 ranks iterates over all examples" in message
        assert ".shard()" in message
        assert filename == "script.py"


def test_ranks_take_equal_steps_of_one_plan(told: list[dict[str, Any]]) -> None:
    assert all("give seed=" in each["unplanned"] for each in told)
    assert told[0]["plan"] == told[1]["plan"]
    for epoch in range(2):
        found = [x for each in told for batch in each["planned"][epoch] for x in batch]
        assert len({*found}) == len(found) > 301 - 2
        assert len({len(each["planned"][epoch]) for each in told}) == 1
    steps = list(zip(*(each["balanced"] for each in told), strict=True))
    assert all(len({len(batch) for batch in step}) == 1 for step in steps)
    found = [x for step in steps for batch in step for x in batch]
    assert len({*found}) == len(found) == 300
    for each in told:
        assert all("ranks differ in the order of the epoch" in said for said in each["orders"])


ORDERS = """
    import glob, pathlib, tarfile, tempfile
    import pyarrow as pa, pyarrow.parquet as pq

    root = pathlib.Path(tempfile.mkdtemp()) / f"of rank {RANK}"  # another place on each host
    for at in range(8):
        folder = root / "files" / str(at % 4)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{at}.txt").write_text(f"line {at}")
        np.save(folder / f"{at // 4}.npy", np.arange(3) + at)
        pq.write_table(pa.table({"x": [at, at]}), root / f"{at}.parquet")
        with tarfile.open(root / f"{at}.tar", "w") as tar:
            tar.add(folder / f"{at}.txt", f"{at}.txt")

    def found(pattern, backwards):
        return sorted(glob.glob(str(root / pattern)), reverse=backwards)

    class Listed:
        def __init__(self, files):
            self.root, self.files, self.asked = root, files, 0
            self.losses = [float(RANK)] * len(files)

        def __len__(self):
            return len(self.files)

        def __getitem__(self, index):
            self.asked += 1
            return self.files[index]

    from torch.utils.data import Subset
    numbers = list(range(8))

    def backwards_if(b):
        listed = Listed(found("files/*/*.txt", b))
        subset = Subset(Listed(found("files/*/*.txt", False)), numbers[::-1] if b else numbers)
        some = stoker.from_files(found("files/*/*.txt", b))
        return {
            "arrays": stoker.from_arrays(np.arange(8)[::-1] if b else np.arange(8)),
            "list": stoker.from_dataset(found("files/*/*.txt", b)),
            "numbers": stoker.from_dataset(numbers[::-1] if b else numbers),
            "listed": stoker.from_dataset(listed),
            "subset": stoker.from_dataset(subset),
            "files": some,
            "equal names": stoker.from_files(found("files/*/0.npy", b)),
            "text": stoker.from_text(found("files/*/*.txt", b)),
            "tar": stoker.from_tar(found("*.tar", b)),
            "parquet": stoker.from_parquet(found("*.parquet", b)),
            "mix": stoker.mix([some, stoker.from_arrays(np.arange(9))], weights=[1, 2]),
            "numbered": stoker.from_table(
                pa.table({"x": numbers[::-1 if b else 1]})
            ).with_index("n"),
        }, listed

    told = {"alike": {}, "differ": {}}
    for is_alike in (True, False):
        made, listed = backwards_if(RANK == 1 and not is_alike)
        for kind, pipeline in made.items():
            try:
                iter(pipeline.shard()).close()
            except ValueError as error:
                told["alike" if is_alike else "differ"][kind] = str(error)
    told["asked"] = listed.asked
"""


@pytest.mark.full
def test_ranks_that_list_their_data_in_another_order_are_told(tmp_path: Path) -> None:
    for each in told_by(tmp_path, 2, ORDERS):
        assert not each["alike"]
        assert each["asked"] == 0
        assert list(each["differ"]) == [
            "arrays", "list", "numbers", "listed", "subset", "files", "equal names", "text", "tar",
            "parquet", "mix", "numbered",
        ]  # fmt: skip
        for text in each["differ"].values():
            assert text.startswith("ranks differ in order or content of the data (")
            assert text.endswith("): list the same data in the same order on all ranks, as "
                                 "sorted() does")  # fmt: skip
        assert "(example 0: 0.txt on rank 0, 7.txt on rank 1)" in each["differ"]["files"]
        assert "(files[0]: '0.txt' on rank 0, '7.txt' on rank 1)" in each["differ"]["listed"]


DIFFER = {
    "seed": "ValueError: ranks differ in seed (3 on rank 0, 4 on rank 1): give all ranks the same",
    "given": "ValueError: ranks differ in seed (none given on rank 0, 3 on rank 1)",
    "length": "ValueError: ranks differ in length of the data (44 on rank 0, 40 on rank 1): give",
    "chain": "ValueError: ranks differ in chain (rank 0 and rank 1: ",
    "steps": "ValueError: ranks differ in chain (rank 0 and rank 1: ",
    "sizes": "ValueError: ranks differ in chain (rank 0 and rank 1: ",
    "epoch": "StateError: ranks differ in epoch (0 on rank 0, 2 on rank 1): load the same state",
    "position": "StateError: ranks differ in position (0 on rank 0, 1 on rank 1): load the same",
    "by hand": "ValueError: each of 2 ranks would draw a seed of its own, and parts would overlap",
    "world": "",  # given by hand, with a seed: ranks are not asked
    "uneven": "",
}


@pytest.mark.parametrize("kind", DIFFER)
def test_what_differs_is_named(told: list[dict[str, Any]], kind: str) -> None:
    for each in told:
        assert each["differ"][kind].startswith(DIFFER[kind])
        assert bool(DIFFER[kind]) == bool(each["differ"][kind])


def test_without_the_group_a_seed_must_be_given(told: list[dict[str, Any]]) -> None:
    first, second = (each["child"] for each in told)
    assert sorted(first[0] + second[0]) == list(range(40))
    assert "give the pipeline seed=" in first[1]
    for each in told:
        assert "give the pipeline seed=" in each["gone"][0]
        says = "ValueError: .shard() was called before init_process_group, so each of 2 ranks"
        assert each["early"].startswith(says)


ALONE = """
    other = stoker.from_arrays(np.arange(8), seed=1)
    list(other.shard().batch(2))
    if RANK == 0:
        try:
            list(other.shard().batch(2))
        except stoker.StokerError as error:
            say(str(error))
    else:
        say("trains")
    time.sleep(100)
"""


@pytest.mark.full  # in short: test_a_rank_that_does_not_come_is_named_on_the_one_that_did
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    # Validation on rank 0 alone, of a pipeline that stands for all.
    there = f"open({str(tmp_path)!r} + f'/{{{{RANK}}}}.there', 'w')"
    other = f"os.path.exists({str(tmp_path)!r} + f'/{{{{1 - RANK}}}}.there')"
    meet = f"{there}.close()\n        while not {other}: time.sleep(0.01)\n        "
    begin = "dist.init_process_group("  # within 3 s of the other: when both have imported torch
    setup = SETUP.replace("seconds=150", "seconds=3").replace(begin, meet + begin)
    init = f"file://{tmp_path / 'rendezvous'}"
    with contextlib.ExitStack() as stack:
        running = []
        for rank in range(2):
            folder = tmp_path / str(rank)
            folder.mkdir()
            text = setup.format(rank=rank, world=2, init=init) + ALONE
            running.append(stack.enter_context(script(folder, text)))
        assert running[1].line() == "trains"
        line = running[0].line()
    assert line.startswith("rank 1 did not come to iter() of from_arrays")
    assert "within 3 s" in line
    assert ".shard(rank=0, world_size=1)" in line


MESHES = """
    from torch.distributed.device_mesh import init_device_mesh

    def refused(make):
        try:
            make()
        except (ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def ids(pipeline):
        return [int(i) for batch in pipeline for i in batch]

    def of(mesh, **kw):
        return stoker.from_arrays(np.arange(40)).shuffle().shard(mesh=mesh, **kw)

    told = {"bare": str(stoker.from_arrays(np.arange(40)).shard())}
    of_data = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    told["data"] = ids(of(of_data).batch(4))
    told["still bare"] = str(stoker.from_arrays(np.arange(40)).shard())
    of_model = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    told["peers"] = ids(of(of_model).batch(4))
    told["printed"] = str(of(of_model))
    import types
    state = types.ModuleType("accelerate.state")  # all that is looked at
    state.AcceleratorState = types.SimpleNamespace(_shared_state={"device_mesh": of_model})
    sys.modules["accelerate.state"] = state
    told["accelerated"] = str(stoker.from_arrays(np.arange(40)).shard())
    del sys.modules["accelerate.state"]
    slow = stoker.from_dataset(Slow(200)).shuffle().shard(mesh=of_model).echo()
    told["echoed"] = [
        [batch["id"].tolist(), batch["x"].tolist()]
        for batch in slow.random_map(jitter, on="x").batch(4)
    ]
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "cp"))
    told["both"] = ids(of(both).batch(4))
    odd = init_device_mesh("cpu", (2, 1), mesh_dim_names=("x", "tp"))
    told["chosen"] = ids(of(odd, mesh_dims="x").batch(4))
    told["refused"] = [
        refused(lambda: stoker.from_arrays(np.arange(40)).shard()),
        refused(lambda: of(odd)),
        refused(lambda: of(odd, mesh_dims="y")),
        refused(lambda: of(init_device_mesh("cpu", (2,)))),
        refused(lambda: of(both["cp"])),
        refused(lambda: of(both, rank=0, world_size=1)),
        refused(lambda: of("cuda")),
        refused(lambda: stoker.from_arrays(np.arange(4)).shard(mesh_dims="dp")),
    ]
"""


@pytest.mark.full
def test_a_mesh_says_whose_part_is_whose(tmp_path: Path) -> None:
    told = told_by(tmp_path, 2, MESHES)
    first, second = told
    for kind in ("data", "both", "chosen"):
        assert sorted(first[kind] + second[kind]) == list(range(40)), kind
    assert first["peers"] == second["peers"]
    assert sorted(first["peers"]) == list(range(40))
    assert first["echoed"] == second["echoed"]  # whatever each of them waits for
    for each in told:
        assert "shard(rank=0, world_size=1)" in each["printed"]
        assert each["accelerated"].splitlines()[1:] == each["printed"].splitlines()[2:]
        assert "world_size=2" in each["bare"]
        assert each["still bare"] == each["bare"]
        says = [
            r"ValueError: .shard(): there is a device mesh with the dimension 'tp'",
            r"ValueError: .shard(mesh=mesh): which of ('x', 'tp') split the data? Say so: "
            r"mesh_dims=",
            r"ValueError: .shard(mesh=mesh, mesh_dims=): 'y' is none of ('x', 'tp')",
            r"ValueError: .shard(mesh=mesh): the dimensions of this mesh have no names",
            r"ValueError: .shard(mesh=mesh): the data is split by",
            r"CombinationError: .shard() takes rank= and world_size=, or a mesh",
            r"TypeError: .shard() takes mesh= as a torch DeviceMesh, not 'cuda'",
            r"CombinationError: .shard(): mesh_dims= needs a mesh",
        ]
        for found, start in zip(each["refused"], says, strict=True):
            assert found.startswith(start), found


GRIDS = """
    from torch.distributed.device_mesh import init_device_mesh

    told = {}
    for names, shape in {
        "dp, tp": (2, 2),
        "dp_replicate, dp_shard, cp": (2, 1, 2),
        "dp_replicate, dp_shard": (2, 2),
    }.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names.split(", "))
        source = stoker.from_dataset(Slow(48)).shuffle().shard(mesh=mesh)
        for how, echoed in {"plain": source, "echoed": source.echo()}.items():
            made = echoed.random_map(jitter, on="x").batch(4)
            told[f"{names}: {how}"] = [[b["id"].tolist(), b["x"].tolist()] for b in made]
"""


@pytest.mark.full
def test_peers_in_a_grid_of_four_ranks_get_equal_batches(tmp_path: Path) -> None:
    told = told_by(tmp_path, 4, GRIDS)
    for kind in told[0]:
        parts = [each[kind] for each in told]
        if "dp_shard: " not in kind:  # else all four have a part of their own
            assert parts[0] == parts[1], kind
            assert parts[2] == parts[3], kind
            parts = parts[::2]
        ids = [{i for batch, _ in part for i in batch} for part in parts]
        assert set().union(*ids) == set(range(48)), kind
        assert sum(map(len, ids)) == 48, kind


LAUNCHED = {
    "torchrun": ("WORLD_SIZE", "RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),
}


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for names in LAUNCHED.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    return monkeypatch


def data(seed: int | None = 0) -> stoker.Pipeline[Any]:
    return stoker.from_arrays(np.arange(8), seed=seed)


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_a_launcher_without_a_group_is_an_error_that_names_its_variables(
    launcher: str, no_launcher: pytest.MonkeyPatch
) -> None:
    size, rank = LAUNCHED[launcher]
    no_launcher.setenv("SLURM_NTASKS", "4")  # a job's shell, where one process runs
    assert "world_size=1" in str(data().shard())
    no_launcher.setenv(size, "2")
    no_launcher.setenv(rank, "1")
    says = rf"no process group, but {size}=2 .*rank=int\(os.environ\['{rank}'\]\) and world_size=2"
    with pytest.raises(ValueError, match=says):
        data().shard()
    given: Any = {"rank": int(os.environ[rank]), "world_size": int(os.environ[size])}
    assert [int(x) for x in data().shard(**given)] == [1, 3, 5, 7]
    with pytest.raises(ValueError, match="give the pipeline seed="):
        iter(data(None).shuffle().shard(**given))
    no_launcher.setenv(size, "1")
    assert "world_size=1" in str(data().shard())


def test_torchrun_says_more_than_the_launcher_that_started_it(
    no_launcher: pytest.MonkeyPatch,
) -> None:
    no_launcher.setenv("SLURM_STEP_NUM_TASKS", "2")
    no_launcher.setenv("SLURM_PROCID", "0")
    no_launcher.setenv("WORLD_SIZE", "16")
    no_launcher.setenv("RANK", "9")
    with pytest.raises(ValueError, match="but WORLD_SIZE=16 "):
        data().shard()
    no_launcher.setenv("WORLD_SIZE", "1")
    assert "world_size=1" in str(data().shard())


def test_who_reads_everything_under_a_launcher_is_warned() -> None:
    code = "import numpy as np, stoker\nlist(stoker.from_arrays(np.arange(4), seed=0).batch(2))\n"
    done = python("-c", code, SLURM_STEP_NUM_TASKS="2")
    assert done.returncode == 0
    assert "each of 2 ranks iterates over all examples" in done.stderr


def test_ranks_by_hand_need_a_seed_where_something_is_drawn() -> None:
    begun = data(None).shuffle().shard(rank=1, world_size=2)
    with pytest.raises(ValueError, match="parts would overlap: give the pipeline seed="):
        iter(begun)
    assert sorted(int(x) for x in data(None).shuffle().shard(rank=0, world_size=1)) == list(
        range(8)
    )
    given = data(5).shuffle().shard(rank=1, world_size=2)
    batches = iter(given)
    next(batches)
    begun.load_state_dict(given.state_dict())  # a state has one
    assert [int(x) for x in begun] == [int(x) for x in batches]


DRAWING: dict[str, Callable[[stoker.Pipeline[Any]], stoker.Pipeline[Any]]] = {
    "shuffle": lambda p: p.shuffle().shard(rank=0, world_size=2).batch(2),
    "own order": lambda p: (
        p.order(lambda e, r: r.permutation(8)).shard(rank=0, world_size=2).batch(2)
    ),
    "random_map": lambda p: p.shard(rank=0, world_size=2).random_map(lambda x, rng: x).batch(2),
    "echo": lambda p: p.shard(rank=0, world_size=2).echo(2, pool=4).batch(2),
    "planned": lambda p: p.shard(rank=0, world_size=2).batch_by_tokens(9, np.arange(1, 9)),
    "mixture": lambda p: stoker.mix([p.shuffle(), data(None)]).shard(rank=0, world_size=2).batch(2),
}


@pytest.mark.parametrize("kind", DRAWING)
def test_whatever_draws_asks_ranks_for_a_seed(kind: str) -> None:
    with pytest.raises(ValueError, match="give the pipeline seed="):
        iter(DRAWING[kind](data(None)))


def test_an_evaluation_over_ranks_needs_no_seed() -> None:
    parts = [
        data(None).shard(rank=rank, world_size=2, remainder="pad").batch(2) for rank in range(2)
    ]
    batches = [[batch.tolist() for batch in part] for part in parts]
    assert batches == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def claims_of(claims: dict[int, int]) -> list[list[int]]:
    return [[rank, claims[rank]] for rank in sorted(claims)]


def torch_meeting(store: Any, rank: int) -> RankExchange:
    return RankExchange(TorchStore(store), rank, (0, 1), "test")


def test_a_rank_that_does_not_come_is_named_on_the_one_that_did() -> None:
    store = torch.distributed.HashStore()
    for _ in range(2):  # what is asked next is not taken for what was asked before
        with pytest.raises(stoker.StokerError, match=r"rank 1 did not come to iter\(\) of data"):
            torch_meeting(store, 0).answer("here", sorted, "data", 0.05)


def test_what_the_first_rank_decides_is_told_to_all_and_forgotten() -> None:
    store = torch.distributed.HashStore()
    for number in range(3):
        with ThreadPoolExecutor() as threads:
            told = [
                threads.submit(
                    torch_meeting(store, rank).answer, rank + number, claims_of, "data", 60.0
                )
                for rank in (1, 0)
            ]
            expected = [[rank, rank + number] for rank in range(2)]
            assert [each.result() for each in told] == [expected] * 2
    assert store.num_keys() <= 4  # two counts, and the last answer


def test_a_store_that_is_gone_is_told() -> None:
    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(stoker.StokerError, match="could not compare data: the process that keeps"):
        torch_meeting(Gone(), 1).answer("here", sorted, "data", 60.0)
