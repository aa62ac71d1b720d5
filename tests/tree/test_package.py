"""The wheel and the sdist hold every file, and the package can be imported from anywhere, installed or not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT = "import sp_compile, sp_compile.passes, sp_compile.lowering; print(sp_compile.__file__, sp_compile.__version__)"
BUILD = "from setuptools import build_meta as b; import sys; getattr(b, 'build_' + sys.argv[1])(sys.argv[2])"


def sources() -> set[str]:
    """Return the files of the package, by their names in a wheel."""
    found = set()
    for folder, prefix in (("sp_compile", ""), ("passes", "sp_compile/"), ("lowering", "sp_compile/")):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".cpp", ".typed") and file.resolve() == file:
                found.add(prefix + file.relative_to(ROOT).as_posix())
    return found


def python(program: str, folder: Path, *arguments: str, path: Path | None = None) -> str:
    """Return the output of a program in a new Python process, started in a folder."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Copy the files of the repository, without build outputs, to a folder."""
    folder = tmp_path_factory.mktemp("copy")
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    packed = "\0".join(name for name in names if name and (ROOT / name).exists())
    subprocess.run(
        f"tar -c --null -T - | tar -x -C {folder}", shell=True, cwd=ROOT, input=packed, text=True, check=True
    )
    return folder


def test_wheel(copy: Path, tmp_path: Path) -> None:
    python(BUILD, copy, "wheel", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    assert not sources() - held
    assert not [name for name in held if name.split("/")[0] in ("passes", "lowering", "tests")]
    printed = python(IMPORT, tmp_path, path=tmp_path / "installed")
    assert printed.startswith(str(tmp_path / "installed"))


def test_sdist(copy: Path, tmp_path: Path) -> None:
    python(BUILD, copy, "sdist", str(tmp_path))
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert not (sources() | {"README.md", "SECURITY.md", "LICENSE"}) - held


@pytest.mark.slow
def test_import_in_the_root_without_installation() -> None:
    """-S leaves installed packages out; torch and the others are found by their path."""
    packages = Path(__import__("torch").__file__).parents[1]
    program = f"import sys; sys.path.append({str(packages)!r}); {IMPORT}"
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith(str(ROOT / "sp_compile")), done.stderr


MODULES_OF_PROJECTS = {"myst_parser": "myst-parser"}  # modules whose project has another name


def test_make_installs_what_tests_skip_without() -> None:
    """`make test` installs what fast tests need, `make test-slow` also what recipes and the site need."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = {name: {re.match(r"[\w-]+", line)[0] for line in lines} for name, lines in extras.items()}  # type: ignore[index]
    of_all = installed["test"] | installed["recipes"] | installed["docs"] | installed["examples"]
    for file in (ROOT / "tests").rglob("test_*.py"):
        for indent, module in re.findall(r'^( *).*importorskip\("(\w+)', file.read_text(), re.MULTILINE):
            if (ROOT / "tests" / module).exists():
                continue  # a file of the tests
            expected = of_all if indent else installed["test"]  # without an indent the whole file is skipped
            assert MODULES_OF_PROJECTS.get(module, module) in expected, (file.name, module)
