"""``stoker doctor``: what this host and this environment give to data loading, to be pasted whole.

It measures nothing that takes time: ``stoker analyze`` does, on a training script.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stoker.basics.resources import format_bytes, usable_cores, usable_memory_bytes
from stoker.cache.location import check_memory_folder
from stoker.cli import report_errors
from stoker.errors import CacheError
from stoker.version import __version__

# What each optional package is for, and what pip installs for it.
_OPTIONAL = {
    "torch": ("tensors, .to_torch(), DataLoader", "torch"),
    "pillow": ("images.decode", "pillow"),
    "stoker-native": ("JPEG crops, pixels of networks and token windows in C", "./native"),
    "pyarrow": ("from_parquet, from_csv, from_table", "pyarrow"),
    "fsspec": ("remote storage (s3://, https://)", "'fsspec[http,s3]'"),
    "jax": ("JAX arrays", "jax"),
    "keras": ("Keras", "keras"),
    "cryptography": ("caches and feeds across hosts, actors of Ray", "cryptography"),
    "ray": ('.workers(kind="ray"), caches under Ray', "'ray[tune]' cryptography"),
}
_REQUIRED = ("numpy", "lmdb", "msgspec", "psutil", "rich", "xxhash")
# Docker gives containers this much by default: one batch of large images, and no cache, fits in it.
_DOCKER_SHM_BYTES = 64 << 20
# Each remote connection, worker process, open shard and thread's copy of a file takes some; macOS
# shells give 256, Linux ones 1,024. Chosen, not measured.
_FEW_DESCRIPTORS = 1024
# What launchers tell their ranks.
_RANKS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class Finding(NamedTuple):
    """A line of the report.

    Attributes:
        name: of what was looked at.
        text: what was found.
        advice: what to do; empty if nothing is wrong.
    """

    name: str
    text: str
    advice: str = ""


def doctor() -> None:
    """Show what this machine and this Python give to data loading, and what is missing for what.

    It needs no script and takes a few seconds. Lines that begin with "!" say what to change. Paste
    the whole text into an issue.

    Example: stoker doctor
    """
    with report_errors("doctor"):
        findings = [finding for look in _LOOKS for finding in look()]
        width = max(len(finding.name) for finding in findings)
        for name, text, advice in findings:
            print(f"{'!' if advice else ' '} {name:{width}}  {text}")
            if advice:
                print(f"  {'':{width}}  -> {advice}")


def _python() -> Iterator[Finding]:
    gil = ""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        is_on = sys._is_gil_enabled()  # type: ignore[attr-defined]  # from 3.13 on
        gil = ", free-threaded, " + ("but an import turned the GIL on" if is_on else "no GIL")
    yield Finding("stoker", f"{__version__}, in {Path(__file__).parents[1]}")
    yield Finding("Python", f"{platform.python_version()}{gil} ({platform.platform()})")
    yield Finding("processes", f"start by {multiprocessing.get_start_method()}")


def _packages() -> Iterator[Finding]:
    yield Finding("packages", ", ".join(f"{name} {_version(name)}" for name in _REQUIRED))
    for name, (use, package) in _OPTIONAL.items():
        version = _version(name)
        missing = f"not installed; needed for {use}: pip install {package}"
        yield Finding(name, version or missing)


def _native() -> Iterator[Finding]:
    from stoker.images.native import library

    try:
        found = library()
    except ImportError as error:
        yield Finding("native path", "cannot be loaded", str(error))
    else:
        how = "in use" if found else "not in use: Pillow and NumPy do its work, more slowly"
        yield Finding("native path", how)


def _processor() -> Iterator[Finding]:
    all_cores, cores = os.cpu_count() or 1, usable_cores()
    text = f"{cores} of {all_cores} usable"
    if cores < all_cores:
        text += " (affinity, control groups, or LOCAL_WORLD_SIZE)"
    load = os.getloadavg()[0]
    busy = ""
    if load > 2 * all_cores:
        busy = "other processes keep this host busy: workers will get less than these cores"
    yield Finding("cores", f"{text}; load {load:.1f}", busy)


def _memory() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{format_bytes(usable_memory_bytes())} of {format_bytes(memory.total)} usable"
    yield Finding("memory", text)
    cached = getattr(memory, "cached", None)  # of Linux
    if cached is not None:
        yield Finding("page cache", f"{format_bytes(cached)} of files are in memory")


def _shared_memory() -> Iterator[Finding]:
    root = "/dev/shm"
    if not os.path.isdir(root):
        text = f"no {root}: caches in memory lie in {tempfile.gettempdir()}, perhaps on a disk"
        yield Finding("shared memory", text)
        return
    size, _, free = shutil.disk_usage(root)
    text = f"{format_bytes(free)} of {format_bytes(size)} free in {root}"
    advice = ""
    try:
        check_memory_folder()
    except CacheError as error:
        advice = str(error)
    if not os.access(root, os.W_OK):
        advice = "mount it so that this user may write to it, or give caches path= on a local disk"
    elif size <= _DOCKER_SHM_BYTES:
        advice = "give the container more (docker run --shm-size=64g, or --ipc=host)"
    elif free <= _DOCKER_SHM_BYTES:
        advice = "make room for caches and feeds: stoker cache list, and remove files that are left"
    yield Finding("shared memory", text, advice)


def _descriptors() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = ""
    if soft < _FEW_DESCRIPTORS:
        raised = hard == resource.RLIM_INFINITY or hard >= _FEW_DESCRIPTORS
        remedy = "ulimit -n" if raised else "have an administrator raise the hard limit, nofile"
        advice = f"many workers or shards need more: {remedy}"
    text = f"at most {soft:,}"
    if hard != soft:
        most = "any number" if hard == resource.RLIM_INFINITY else f"{hard:,}"
        text += f"; {most} after ulimit -n"
    yield Finding("open files", text, advice)


def _ranks() -> Iterator[Finding]:
    found = [f"{name}={os.environ[name]}" for name in _RANKS if name in os.environ]
    yield Finding("ranks", ", ".join(found) or "no launcher's variables: a job of one process")


def _accelerators() -> Iterator[Finding]:
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    on_host = f"{len(cards)} of NVIDIA on this host" if cards else "none of NVIDIA on this host"
    if _version("torch") is None:
        yield Finding("GPU", on_host)
        return
    try:
        import torch
    except Exception as error:  # a broken installation raises anything
        yield Finding("GPU", on_host, f"PyTorch cannot be imported: {error}")
        return
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("GPU", f"PyTorch sees {', '.join(names)}")
    elif torch.backends.mps.is_available():
        yield Finding("GPU", "PyTorch sees Apple's (mps)")
    else:
        unseen = f"PyTorch {torch.__version__} does not see it: install a build with CUDA"
        yield Finding("GPU", f"{on_host}; PyTorch sees none", unseen if cards else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_LOOKS = (
    *(_python, _packages, _native, _processor, _memory, _shared_memory, _descriptors, _ranks),
    _accelerators,
)
