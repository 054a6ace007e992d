"""Copies locks, open files and weak references: each thread needs its own."""

from __future__ import annotations

import io
import threading
import weakref
from typing import Any

from stoker.replicas.copying.copier import Copier, Uncopyable
from stoker.replicas.files import reopen_file


def new_lock(copier: Copier, x: Any) -> Any:
    return threading.Lock()


def new_rlock(copier: Copier, x: Any) -> Any:
    return threading.RLock()


def copy_file(copier: Copier, x: Any) -> Any:
    if x.closed:
        copier.check(lambda: x.closed)
        return x
    if x.writable() and not x.readable():
        return x  # what processes write goes to one file as well
    again = reopen_file(x)
    if again is not x:
        place = x.tell()
        copier.check(lambda: not x.closed and x.tell() == place)
    return again


def copy_bytes_file(copier: Copier, x: io.BytesIO) -> io.BytesIO:
    held, place = x.getvalue(), x.tell()
    copier.check(lambda: x.tell() == place and x.getvalue() == held)
    again = io.BytesIO(held)
    again.seek(place)
    vars(again).update(copier.copy(dict(vars(x))))
    return again


def reopen_hdf5(copier: Copier, x: Any, h5py: Any) -> Any:
    if not x:  # closed
        return x
    if isinstance(x, h5py.File):
        if x.mode != "r":
            raise Uncopyable(f"it is open in mode {x.mode!r}")
        again = h5py.File(x.filename, "r")
        copier.check(lambda: bool(x))
        return again
    if not x.name:
        raise Uncopyable("it has no name")
    return copier.copy(x.file)[x.name]


def copy_weakref(copier: Copier, x: weakref.ref[Any]) -> Any:
    target = x()
    if target is None:
        return x
    if x.__callback__ is not None or type(x) is not weakref.ref:
        raise Uncopyable("it calls back")
    copier.check(lambda: x() is target)
    again = copier.copy(target)
    copier.alive.append(again)
    return weakref.ref(again)
