"""The demonstration's extra packages, imported when first needed.

`import stoker.demo` must not pull in PyTorch or scikit-learn, and a missing package
must say what to install.
"""

from __future__ import annotations

import importlib
from typing import Any


def needed(module: str) -> Any:
    """Import `module`, or say how to install what the demonstration needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"stoker demo needs {package}, which could not be imported ({error}). "
            "Install what the demo needs with: pip install 'stoker[demo]'"
        ) from error
