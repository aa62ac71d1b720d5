"""The C++ scans and their compiler: many processes at once, one that is missing, one that fails; whose they are."""

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.scans.local_scans import has_native

from sp_compile.lowering.scan.kernels import native
from sp_compile.lowering.scan.kernels.trusted import open_to_others, require_trusted
from sp_compile.lowering.scan.scan_table import Problem
from sp_compile.lowering.torch_compat import compile_cpp

needs_compiler = pytest.mark.skipif(not has_native(), reason="no C++ compiler")


@pytest.mark.slow
@needs_compiler
def test_processes_compile_at_the_same_time(tmp_path: Path) -> None:
    """As ranks do that start with an empty cache."""
    code = (
        "import torch; from sp_compile.lowering.scan.kernels import native; "
        "from sp_compile.lowering.scan.scan_table import Problem; "
        "x = torch.ones(1, 9, 3); problem = Problem.of('scan', x, torch.float32, torch.float64, op='sum'); "
        "print(native.scan(problem, x, None)[0].sum())"
    )
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    work = [
        subprocess.Popen(
            [sys.executable, "-W", "error::UserWarning", "-c", code], env=environment, stdout=-1, stderr=-1
        )
        for _ in range(3)
    ]
    for process in work:
        out, error = process.communicate(timeout=300)
        assert out.decode().strip() == "tensor(135.)", error.decode()


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "_failures", [])
    native._compiled.cache_clear()
    native._folder.cache_clear()
    yield
    native._compiled.cache_clear()
    native._folder.cache_clear()


PROBLEM = Problem("scan", "cpu", 1, 8, 8, torch.float32, torch.float32, torch.float64, op="sum")


@pytest.mark.usefixtures("nothing_compiled")
def test_without_a_compiler_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_cpp_compiler", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not has_native()
        assert not native.fits(PROBLEM)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_compiler_that_fails_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("C++ compile error")

    monkeypatch.setattr(native, "compile_cpp", fail)
    monkeypatch.setattr(native, "has_cpp_compiler", lambda: True)
    with pytest.warns(UserWarning, match="C\\+\\+ compile error"):
        assert not native.fits(PROBLEM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not native.fits(PROBLEM)
        assert not native.fits(Problem("linear", "cpu", 1, 8, 8, *[torch.float64] * 3))
        assert not has_native()


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that others may enter, as Inductor's own."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("mode", [0o755, 0o775, 0o757])
def test_libraries_are_kept_where_nobody_else_may_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    used: list[str] = []
    cache = folder / "cache"
    cache.mkdir()
    cache.chmod(mode)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setattr(native, "compile_cpp", lambda source, flags, where, check: used.append(where(str(cache))))
    monkeypatch.setattr(native, "_private", [])
    monkeypatch.setattr(native, "has_cpp_compiler", lambda: True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        native.fits(PROBLEM)
        native.fits(PROBLEM._replace(op="max"))
    assert len(set(used)) == 1
    assert (used[0] == str(cache)) == (mode == 0o755)
    assert open_to_others(used[0]) is None
    assert sum("chmod go-w" in str(one.message) for one in told) == (mode != 0o755)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache)


@needs_compiler
def test_a_library_that_another_may_write_is_not_loaded(folder: Path) -> None:
    source = 'extern "C" int answer() { return 42; }'
    with pytest.raises(PermissionError, match="is not loaded"):
        compile_cpp(source, (), lambda _: str(folder), lambda path: os.chmod(path, 0o777) or require_trusted(path))
    for library in folder.rglob("*.so"):
        library.chmod(0o755)
    assert compile_cpp(source, (), lambda _: str(folder), require_trusted).answer() == 42


def test_whose_files_are_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link, hidden = folder / "lib.so", folder / "link.so", folder / "hidden"
    file.write_text("")
    link.symlink_to(file)
    assert open_to_others(file) is None
    file.chmod(0o666)
    assert open_to_others(file) == open_to_others(link) == file
    file.chmod(0o644)
    folder.chmod(0o1777)  # as /tmp: others may add files, and neither replace nor remove this one
    assert open_to_others(file) is None
    folder.chmod(0o777)
    assert open_to_others(file) == folder
    folder.chmod(0o755)
    hidden.mkdir(mode=0o700)
    (hidden / "lib.so").write_text("")
    (hidden / "lib.so").chmod(0o666)  # nobody else can come here
    assert open_to_others(hidden / "lib.so") is None
    if os.geteuid() == 0:
        os.chown(file, 4321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert open_to_others(file) in (file, folder)


@pytest.mark.parametrize(
    "problem",
    [
        Problem("scan", "cuda", 1, 8, 8, torch.float32, torch.float32, torch.float64, op="sum"),
        Problem("scan", "cpu", 1, 8, 8, torch.complex64, torch.complex64, torch.complex64, op="sum"),
        Problem("scan", "cpu", 1, 8, 8, torch.uint16, torch.int64, torch.int64, op="sum"),
        Problem("scan", "cpu", 1, 8, 8, torch.bfloat16, torch.bfloat16, torch.bfloat16, op="sum"),
        Problem("scan", "cpu", 1, 8, 8, torch.int64, torch.int64, torch.int32, op="sum"),
        Problem("linear", "cpu", 1, 8, 8, torch.int64, torch.int64, torch.int64),
    ],
)
def test_does_not_fit(problem: Problem) -> None:
    assert not native.fits(problem)
