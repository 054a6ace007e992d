"""Ranks by a launcher's environment variables: torchrun, srun, mpirun.

They shard no data, and only tell of other processes: a launcher may also start some that have
nothing to do with each other.
"""

from __future__ import annotations

import os
from typing import NamedTuple

# Of srun the variable of the step: SLURM_NTASKS is set in the shell of a job, too, where one
# process runs. torchrun's come first: it may run under srun.
_SIZES = {
    "WORLD_SIZE": "RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}


class Launched(NamedTuple):
    """A launcher's environment.

    Attributes:
        variable: the name of the variable that holds the number of processes.
        world: the number of processes, above 1.
        rank: the name of the variable that holds this process's number.
    """

    variable: str
    world: int
    rank: str


def find_launcher() -> Launched | None:
    """Return the launcher's environment; None for a single process, or without a launcher."""
    for size, number in _SIZES.items():
        value = os.environ.get(size, "").strip()
        if value.isdigit():
            return Launched(size, int(value), number) if int(value) > 1 else None
    return None
