"""The guard of a device that is not there (``guard.cpp``): compiled for the torch at hand, and loaded before it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
FLAGS = "-shared -fPIC -std=c++20 -O0".split()


def built(folder: Path, compiler: str) -> Path:
    """The shared object for this torch, in the folder; compiled if it is not there yet."""
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    known = f"{torch.__version__} {torch.__file__} {compiler} {FLAGS} {SOURCE.read_text()}"
    made = folder / f"absent_gpu_{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        include = [f"-I{path}" for path in include_paths()]
        libraries = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
        part = made.with_suffix(f".{os.getpid()}")  # of processes that make it at once, the last one wins
        command = [compiler, *FLAGS, *include, str(SOURCE), "-o", str(part), *libraries, "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        part.replace(made)
    return made


def load(guard: str) -> None:
    """Load the guard into this process, before torch, which queries devices once."""
    assert "torch" not in sys.modules
    ctypes.CDLL(guard, mode=ctypes.RTLD_GLOBAL)
