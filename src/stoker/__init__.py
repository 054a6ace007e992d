"""stoker: data loading that keeps accelerators fed."""

import importlib as _importlib
import typing as _typing

from stoker.version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from stoker.api import *  # noqa: F403
    from stoker.api import __all__ as __all__
else:

    def __getattr__(name):
        """Return a public name. The first use imports them all; ``stoker --version`` needs none."""
        found = globals()[name] = getattr(_importlib.import_module("stoker.api"), name)
        return found

    def __dir__():
        return sorted(_importlib.import_module("stoker.api").__all__)
