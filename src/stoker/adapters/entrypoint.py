"""An entry point: a function in a file or module that returns a pipeline."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stoker.errors import FeedError
from stoker.pipeline import Pipeline


def target_of(function: Callable[[], Any] | str) -> str:
    """Return ``FILE.py:FUNCTION`` or ``module:FUNCTION``, for another process to import.

    Raises FeedError for functions that another process cannot find; ValueError for other texts.
    """
    if isinstance(function, str):
        where, colon, name = function.rpartition(":")
        if not colon or not where or not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(
                f"{function!r} names no function; write FILE.py:FUNCTION or module:FUNCTION, "
                "such as train.py:make_pipeline"
            )
        return f"{Path(where).resolve()}:{name}" if where.endswith(".py") else function
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not name or found is not function:
        raise FeedError(
            f"another process cannot find {function!r}: share a function without arguments at the "
            "top level of a file"
        )
    assert module is not None
    if module.__name__ != "__main__":
        return f"{module.__name__}:{name}"
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name != "__main__":  # python -m
        return f"{spec.name}:{name}"
    file = getattr(module, "__file__", None)
    code = getattr(function, "__code__", None)
    if not all(os.path.isfile(path or "") for path in (file, code.co_filename if code else file)):
        raise FeedError(
            f"another process cannot find {name}(), because it is not in a file (it was typed in, "
            "or comes from a notebook or standard input): put it into a file, such as prep.py, "
            f'and share it as "prep.py:{name}"'
        )
    assert file is not None
    return f"{Path(file).resolve()}:{name}"


def make_pipeline(target: str) -> Pipeline:
    """Import a target's function, call it, and return its pipeline. Raises FeedError."""
    where, _, name = target.rpartition(":")
    with _as_feed_error(f"importing {where}"):
        function = _from_file(Path(where)) if where.endswith(".py") else _module(where)
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise FeedError(f"{where} has no function {name}")
    with _as_feed_error(target):
        pipeline = function()
    if not isinstance(pipeline, Pipeline):
        raise FeedError(f"{target} returned a {type(pipeline).__name__}, not a stoker pipeline")
    return pipeline


@contextlib.contextmanager
def _as_feed_error(what: str) -> Iterator[None]:
    """Turn any error of the user's code into a FeedError."""
    try:
        yield
    except FeedError:
        raise
    except (Exception, SystemExit) as error:
        raise FeedError(f"{what} failed: {type(error).__name__}: {error}") from error


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise FeedError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As an import does: pickle and dataclasses look for classes there.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m does
    return importlib.import_module(name)
