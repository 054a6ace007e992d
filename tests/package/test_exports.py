"""The public names: sorted, complete, cheap to import, and shadowed by no module."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from types import ModuleType

import stoker
from command_line import python

SUBMODULES = {module.name for module in pkgutil.iter_modules(stoker.__path__)}

THIRD_PARTY_AFTER_IMPORT = """
import sys

before = set(sys.modules)
import stoker

assert not {"numpy", "stoker.pipeline"} & (set(sys.modules) - before), "before a name is used"
stoker.Pipeline
loaded = {
    name.partition(".")[0]
    for name in set(sys.modules) - before
    # Modules without a spec are made up by extension modules, not imported.
    if getattr(sys.modules[name], "__spec__", None) is not None
}
print(*sorted(loaded - sys.stdlib_module_names - {"stoker"}))
"""


def test_any_module_may_be_imported_first() -> None:
    """A name of the package imports all of it: the modules themselves use none."""
    modules = [f for f in Path(stoker.__file__).parent.rglob("*.py") if f.name != "api.py"]
    assert [f for f in modules if re.search("^from stoker import", f.read_text(), re.M)] == []


def test_all_is_sorted_and_free_of_duplicates() -> None:
    assert list(stoker.__all__) == sorted(stoker.__all__, key=str.lower)
    assert len(set(stoker.__all__)) == len(stoker.__all__)


def test_public_names_are_those_in_all() -> None:
    names = {name for name in {*vars(stoker), *dir(stoker)} if not name.startswith("_")}
    # `from __future__ import annotations` leaves a name behind.
    names = {name for name in names if type(getattr(stoker, name)).__module__ != "__future__"}
    declared = {name for name in stoker.__all__ if name != "__version__"}
    assert names - SUBMODULES == declared - SUBMODULES
    assert isinstance(stoker.__version__, str)
    assert all(hasattr(stoker, name) for name in stoker.__all__)


def test_no_module_bears_the_name_of_a_public_function() -> None:
    package = Path(stoker.__file__).parent
    entries = {entry.name.partition(".")[0] for entry in package.iterdir()}
    public = {name for name in stoker.__all__ if not isinstance(getattr(stoker, name), ModuleType)}
    assert not public & entries


def test_import_loads_numpy_and_msgspec_alone() -> None:
    result = python("-c", THIRD_PARTY_AFTER_IMPORT)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split()) - {"typing_extensions"}  # msgspec loads it if it is there
    assert loaded <= {"numpy", "msgspec"}
