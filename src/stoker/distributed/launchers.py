"""Ranks that a launcher tells of in the environment: torchrun, srun, mpirun.

Nothing is divided by them unless somebody asks for it (``.shard(env=True)``): a launcher starts
processes that have nothing to do with each other just as well.
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
    """What a launcher says.

    Attributes:
        variable: the name of the variable that says how many processes there are.
        world: how many, above 1.
        rank: which of them this is; None where no number is said.
    """

    variable: str
    world: int
    rank: int | None


def launched() -> Launched | None:
    """Return what a launcher says of several processes; None where there is one, or no launcher."""
    for size, number in _SIZES.items():
        said, rank = os.environ.get(size, "").strip(), os.environ.get(number, "").strip()
        if said.isdigit():
            known = int(rank) if rank.isdigit() else None
            return Launched(size, int(said), known) if int(said) > 1 else None
    return None
