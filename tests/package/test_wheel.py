"""The packages that a release uploads: what is in them, and that the wheel works alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from bare_environment import make_bare_environment, requirements
from command_line import python
from scripts import ROOT

FIRST_MINUTES = """
import warnings
from pathlib import Path

import numpy as np

import stoker

assert Path(stoker.__file__).is_relative_to({site!r}), stoker.__file__
x, y = np.arange(400.0).reshape(100, 4), np.arange(100)
train = stoker.from_arrays(x, y, seed=0).shuffle().echo(2)
train = train.random_map(lambda v, rng: v + rng.random(), on=0).batch(10)
uses = np.concatenate([labels for _, labels in train])
assert sorted(uses) == sorted([*range(100)] * 2)
for batch in stoker.monitor([1, 2, 3]):
    pass
assert train.state_dict() and str(train) and str(train.stats())

def prepare(number):
    return np.full(1000, number)

cached = stoker.from_dataset(range(50), seed=0).map(prepare).cache("4MiB").batch(5)
for _ in range(2):
    assert [batch[:, 0].tolist() for batch in cached][3] == [15, 16, 17, 18, 19]
try:
    train.to_torch()
except ImportError as error:
    assert "pip install torch" in str(error), error
else:
    raise AssertionError("there is no torch")
"""


def build(project: Path, folder: Path, **environment: str) -> tuple[Path, Path]:
    """Build both packages as a release does; return the paths of the archive and the wheel."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    environ = {**os.environ, **environment}
    subprocess.run(command, cwd=project, check=True, capture_output=True, env=environ)
    (sources,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sources, wheel


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def files(folder: str) -> set[str]:
    """Return the paths of the sources in a folder, without what is built or run there."""
    kinds = {".py", ".typed", ".md", ".html", ".css", ".js", ".json", ".c", ".h", ".sh", ".csv"}
    found = {path for path in (ROOT / folder).rglob("*") if path.suffix in kinds}
    return {str(path.relative_to(ROOT)) for path in found}


@pytest.mark.full
def test_the_wheel_holds_the_package_and_the_archive_its_papers(
    packages: tuple[Path, Path],
) -> None:
    sources, wheel = packages
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith("stoker-")}
    assert names >= {name.removeprefix("src/") for name in files("src")}
    assert not [name for name in names if "__pycache__" in name or not name.startswith("stoker/")]
    with tarfile.open(sources) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    for folder in ("src", "docs"):
        assert held >= files(folder)
    assert held >= {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"}
    assert not [name for name in held if name.startswith(("bench", "experiments", "tests"))]


@pytest.mark.full
def test_the_wheel_is_the_same_from_the_archive(
    packages: tuple[Path, Path], tmp_path: Path
) -> None:
    sources, wheel = packages
    with tarfile.open(sources) as tar:
        tar.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    _, again = build(unpacked, tmp_path / "dist")
    assert again.read_bytes() == wheel.read_bytes()


@pytest.mark.full
def test_the_wheel_works_with_what_it_requires_alone(
    packages: tuple[Path, Path], tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    make_bare_environment(site, *requirements("stoker"))
    with zipfile.ZipFile(packages[1]) as archive:
        archive.extractall(site)
    variables = {"PYTHONPATH": str(site), "PYTHONWARNINGS": ""}
    main = "from stoker.cli import main; main()"
    programs = {
        "first": [FIRST_MINUTES.format(site=str(site))],
        "doctor": [main, "doctor"],
        "help": [main, "analyze", "--help"],
    }
    said = {
        name: python("-S", "-W", "error", "-c", *words, cwd=tmp_path, **variables)
        for name, words in programs.items()
    }
    assert "".join(each.stderr for each in said.values() if each.returncode) == ""
    assert "pip install torch" in said["doctor"].stdout


@pytest.mark.full
def test_a_wheel_of_the_library_names_what_it_holds(tmp_path: Path) -> None:
    """A bill of materials and the licences, if libjpeg-turbo is linked into it; else none."""
    libjpeg = tmp_path / "libjpeg"
    for folder in ("include", "lib", "licenses"):
        (libjpeg / folder).mkdir(parents=True)
    (libjpeg / "include" / "jconfig.h").write_text(
        "#include_next <jconfig.h>\n/* #define LIBJPEG_TURBO_VERSION 3.1.2 */\n"
    )
    (libjpeg / "lib" / "libjpeg.a").write_text("INPUT(-ljpeg)\n")  # a linker takes scripts, too
    (libjpeg / "licenses" / "LICENSE.md").write_text("of libjpeg-turbo")
    native = shutil.copytree(
        ROOT / "native", tmp_path / "native", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    _, shared = build(native, tmp_path / "shared")
    _, linked = build(native, tmp_path / "linked", STOKER_NATIVE_LIBJPEG=str(libjpeg))
    _, again = build(native, tmp_path / "again", STOKER_NATIVE_LIBJPEG=str(libjpeg))
    assert linked.read_bytes() == again.read_bytes()
    bills = {}
    for wheel in (shared, linked):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
            bills[wheel] = [archive.read(name) for name in names if "/sboms/" in name]
            assert ("stoker_native/licenses/LICENSE.md" in names) == (wheel == linked)
    assert bills[shared] == []
    (bill,) = map(json.loads, bills[linked])
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "stoker-native"
    (part,) = bill["components"]
    assert (part["name"], part["version"]) == ("libjpeg-turbo", "3.1.2")
    assert part["licenses"] == [{"expression": "IJG AND BSD-3-Clause AND Zlib"}]
    assert bill["dependencies"][0] == {
        "ref": bill["metadata"]["component"]["bom-ref"],
        "dependsOn": [part["bom-ref"]],
    }


def test_the_licence_is_the_same_in_both_packages() -> None:
    assert (ROOT / "native" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
