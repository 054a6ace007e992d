"""Compiles the library and puts it into the wheel, which serves every Python: py3-none-PLATFORM.

``CC`` and ``CFLAGS`` are those of make. ``STOKER_NATIVE_LIBJPEG`` names a folder with ``include``,
``lib/libjpeg.a`` and ``licenses``, as ``build_libjpeg.sh`` makes it: that libjpeg is linked
statically, and the wheel holds its licenses, and names it in a bill of materials (PEP 770).
Otherwise it is the system's shared libjpeg.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden"]


def command(here: Path, made: Path) -> list[str]:
    """Return the command that compiles the library."""
    libjpeg = os.environ.get("STOKER_NATIVE_LIBJPEG")
    include = [f"-I{libjpeg}/include"] if libjpeg else []
    library = [f"{libjpeg}/lib/libjpeg.a"] if libjpeg else ["-ljpeg"]
    sources = sorted(map(str, (here / "csrc").glob("*.c")))
    given = shlex.split(os.environ.get("CFLAGS", ""))
    cc = shlex.split(os.environ.get("CC", "cc"))
    return [*cc, *FLAGS, *given, *include, *sources, "-o", str(made), *library, "-lz", "-lm"]


def bill_of_materials(libjpeg: Path, version: str) -> str:
    """Return what the wheel holds beside its own code, as CycloneDX 1.6 in JSON.

    It has no time and no random number, so that a build can be repeated.

    Args:
        libjpeg: the folder of libjpeg-turbo.
        version: of the wheel.
    """
    config = (libjpeg / "include" / "jconfig.h").read_text()
    found = re.search(r"LIBJPEG_TURBO_VERSION\s+(\S+)", config)
    if found is None:
        raise ValueError(f"{libjpeg}/include/jconfig.h names no version of libjpeg-turbo")
    own, turbo = (
        f"pkg:pypi/stoker-native@{version}",
        f"pkg:github/libjpeg-turbo/libjpeg-turbo@{found[1]}",
    )
    component = {"type": "library", "bom-ref": turbo, "name": "libjpeg-turbo", "version": found[1]}
    # Its LICENSE.md: the library, its API and build system, its SIMD extensions.
    component |= {"licenses": [{"expression": "IJG AND BSD-3-Clause AND Zlib"}], "purl": turbo}
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": "stoker-native",
                "version": version,
                "licenses": [{"expression": "Apache-2.0"}],
                "purl": own,
            }
        },
        "components": [component],
        "dependencies": [{"ref": own, "dependsOn": [turbo]}, {"ref": turbo}],
    }
    return json.dumps(bill, indent=2) + "\n"


class CustomBuildHook(BuildHookInterface[Any]):
    """The hook that hatchling calls."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say what the wheel is called."""
        self._folder = tempfile.TemporaryDirectory()
        made = Path(self._folder.name, "libstoker_native.so")
        subprocess.run(command(Path(self.root), made), check=True)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"][str(made)] = f"stoker_native/{made.name}"
        if libjpeg := os.environ.get("STOKER_NATIVE_LIBJPEG"):
            build_data["force_include"][f"{libjpeg}/licenses"] = "stoker_native/licenses"
            bill = Path(self._folder.name, "libjpeg-turbo.cdx.json")
            bill.write_text(bill_of_materials(Path(libjpeg), self.metadata.version))
            build_data["sbom_files"].append(str(bill))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        self._folder.cleanup()
