"""Windows of tokens out of files: read by ``stoker-native`` where it is installed, or by NumPy.

The library reads and widens many windows in one call without the GIL. Where it stops, NumPy goes
on, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stoker import native
from stoker.sources.open_files import MOST_OPEN, OpenFiles
from stoker.sources.token_files import TokenFile

_WINDOWS = 256  # in a call: signals wait for its end
_WINDOWS_OF_MANY_FILES = 16  # their files stay open meanwhile, beside those that always do


class WindowReader:
    """Reads windows as ``int64``. Safe to use from any thread.

    Args:
        files: where they are.

    Attributes:
        releases_gil: whether almost all of it is done without the GIL: by the library. NumPy's many
            short reads release it as well, but another thread makes each wait for it at its end.
            So does opening files again and again, where there are very many.
    """

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self._files = files
        self._opened = OpenFiles()
        self._begins = np.array([file.start for file in files], np.int64)
        kinds = {file.dtype for file in files}
        (dtype,) = kinds if len(kinds) == 1 else (None,)
        self._dtype = dtype if dtype is not None and dtype.isnative else None
        self._stay_open = len(files) <= MOST_OPEN
        self._at_once = _WINDOWS if self._stay_open else _WINDOWS_OF_MANY_FILES

    @property
    def releases_gil(self) -> bool:
        return self._is_native and self._stay_open

    @property
    def _is_native(self) -> bool:
        return self._dtype is not None and _of_library() is not None

    def read(
        self,
        files: NDArray[np.int64],
        tokens: NDArray[np.int64],
        inputs: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> None:
        """Fill rows with the windows of these files (by number) from these tokens on.

        ``inputs`` and ``targets`` are C-ordered, ``[windows, length]``. Raises ValueError if a file
        has changed or is too short; OSError.
        """
        done = self._read_widened(files, tokens, inputs, targets) if self._is_native else 0
        if done < len(files):
            self._read_and_widen(files[done:], tokens[done:], inputs[done:], targets[done:])

    def _read_widened(
        self,
        files: NDArray[np.int64],
        tokens: NDArray[np.int64],
        inputs: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> int:
        """Have the library read; returns how many windows are there."""
        read_windows, dtype = _of_library(), self._dtype
        assert read_windows is not None
        assert dtype is not None
        starts = self._begins[files] + tokens * dtype.itemsize
        for at in range(0, len(files), self._at_once):
            part = slice(at, at + self._at_once)
            numbers = files[part].tolist()
            opened = {n: self._opened.opened(*self._files[n][:2]) for n in dict.fromkeys(numbers)}
            descriptors = np.array([opened[n].descriptor for n in numbers], np.int32)
            done = read_windows(descriptors, starts[part], dtype, inputs[part], targets[part])
            if done < len(numbers):
                return at + done
        return len(files)

    def _read_and_widen(
        self,
        files: NDArray[np.int64],
        tokens: NDArray[np.int64],
        inputs: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> None:
        for number in dict.fromkeys(files.tolist()):
            path, version, dtype, begins, _ = self._files[number]
            there = files == number
            starts = (begins + tokens[there] * dtype.itemsize).tolist()
            found = np.empty((len(starts), inputs.shape[1] + 1), dtype)
            self._opened.read_values(path, version, starts, found)
            of_file = slice(None) if len(starts) == len(files) else there
            inputs[of_file] = found[:, :-1]
            targets[of_file] = found[:, 1:]


def _of_library() -> Callable[..., int] | None:
    """Return the library's function; None where there is no library, or one before 0.2."""
    found: Callable[..., int] | None = getattr(native.library(), "read_windows", None)
    return found
