"""The GPU of these tests, which is not there."""

from collections.abc import Iterator

import pytest
import torch
from support.cuda.guard import built
from support.cuda.worker import AbsentGpu

from sp_compile.lowering.torch_compat import has_cpp_compiler
from sp_compile.lowering.triton import AVAILABLE


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> Iterator[AbsentGpu]:
    """A process with an absent GPU: see ``tests/support/cuda/worker.py``."""
    if not has_cpp_compiler():
        pytest.skip("the guard of a device that is not there is C++, and no C++ compiler was found")
    if not AVAILABLE:
        pytest.skip("Inductor writes Triton for a GPU, and triton is not installed")
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA: benchmarks/gpu_*.py measure a real GPU")
    from torch._inductor.cpp_builder import get_cpp_compiler

    absent = AbsentGpu(str(built(request.config.cache.mkdir("absent_gpu"), get_cpp_compiler())))
    yield absent
    absent.close()
