"""JAX: batches on its devices and shardings, in processes of their own that have several devices.

JAX starts threads as soon as it is used, and a process that has them must not fork. So nothing of
JAX is imported into the process of the tests.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from command_line import python

SETUP = """
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from typing import NamedTuple

import stoker
from stoker.testing import check_resume, equal


class Row(NamedTuple):
    x: object
    label: object
    name: str


class Rows:
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return Row(np.full((64, 16), index, np.float32), index, f"row {index}")


def rows():
    return stoker.from_dataset(Rows(), seed=0).shuffle()


devices = jax.devices()
sharding = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
"""


def run_with_jax(code: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SETUP + textwrap.dedent(code))
    done = python("-W", "error", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr


@pytest.mark.full
def test_batches_go_to_devices_and_over_shardings(tmp_path: Path) -> None:
    run_with_jax(
        """
        plain = list(rows().batch(8))
        for place in (devices[1], sharding):
            moved = list(rows().batch(8).to_jax(place))  # all are held: no memory is used again
            for host, batch in zip(plain, moved, strict=True):
                assert isinstance(batch, Row)
                assert isinstance(batch.x, jax.Array)
                assert batch.x.devices() == (set(devices) if place is sharding else {devices[1]})
                assert np.array_equal(batch.x, host.x)
                assert np.array_equal(batch.label, host.label)
                assert batch.name == host.name
        assert moved[0].x.sharding.is_equivalent_to(sharding, 3)
        assert "to_jax(NamedSharding of 4 devices)" in str(rows().batch(8).to_jax(sharding))
        assert "to_jax(" in str(rows().batch(8).to_jax(devices[1]))

        # Behind .to_jax(): maps, keys for random maps, copies that may be donated.
        def noise(row, key):
            return row._replace(x=row.x + jax.random.normal(key, row.x.shape))

        def build(place):
            return rows().batch(8).to_jax(place).echo(2, pool=3).random_map(noise)

        first, second = list(build(sharding)), list(build(sharding))
        assert len(first) == 24
        assert all(equal(a, b) for a, b in zip(first, second))
        assert len({float(row.x.sum()) for row in first}) == 24
        check_resume(lambda: build(devices[0]), every=7)

        spend = jax.jit(lambda x: x * 2, donate_argnums=0)
        seen = []
        for row in rows().batch(8).to_jax(sharding).echo(3, pool=4):
            assert row.x.sharding.is_equivalent_to(sharding, 3)
            seen.append(float(row.x.sum()))
            spend(row.x)
        assert len(seen) == 36 and sum(seen) == 3 * sum(float(row.x.sum()) for row in plain)

        # A batch that cannot be divided says so.
        try:
            list(rows().batch(18).to_jax(sharding))
        except stoker.StageError as error:
            assert "18" in str(error) and "NamedSharding" in str(error)
        else:
            raise AssertionError

        # jnp arrays in examples, in collate, from loaders.
        def in_jax(row):
            return row._replace(x=jnp.asarray(row.x, jnp.bfloat16))

        batch = next(iter(rows().map(in_jax).batch(8)))
        assert type(batch.x) is np.ndarray and batch.x.dtype == jnp.bfloat16
        moved = next(iter(rows().map(in_jax).batch(8).to_jax(sharding)))
        assert moved.x.dtype == jnp.bfloat16 and np.array_equal(moved.x, batch.x)
        stacked = next(iter(rows().batch(8, collate=lambda e: jnp.stack([r.x for r in e]))))
        assert isinstance(stacked, jax.Array)
        echoed = stoker.echo([jnp.full((4, 2), i) for i in range(5)], 2)
        assert len(list(echoed)) == 10
        assert echoed.stats().uses == 40 and echoed.stats().read_bytes == 5 * 4 * 2 * 4

        # Images stay where they are.
        pixels = np.arange(8 * 2 * 5 * 3).reshape(8, 2, 5, 3).astype(np.uint8)
        placed = jax.device_put(pixels, sharding)
        for fn in (stoker.images.to_chw, stoker.images.normalize()):
            assert fn(placed).devices() == set(devices)
            assert np.allclose(fn(placed), fn(pixels), atol=1e-5)
        try:
            stoker.images.hflip(placed)
        except ValueError as error:
            assert "change images before .to_jax() makes them JAX arrays" in str(error)
        else:
            raise AssertionError

        # Nor are worker processes forked from a process that has JAX's threads.
        try:
            iter(rows().batch(8).workers(2, kind="process"))
        except RuntimeError as error:
            assert "forkserver" in str(error)
        else:
            raise AssertionError
        """,
        tmp_path,
    )


@pytest.mark.full
def test_jax_is_not_imported_unasked(tmp_path: Path) -> None:
    code = (
        "import sys, numpy, stoker\n"
        "train = stoker.from_arrays(numpy.zeros((8, 2)), seed=0).batch(2).to_torch().echo(2)\n"
        "list(train)\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=240)
