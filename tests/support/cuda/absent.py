"""Emulate an absent H100 for torch, Inductor and Triton, in a separate process.

The guard (``guard.cpp``) allows fake tensors of "cuda" in a torch without CUDA; `pretend()` replaces the device queries
of compilers. Inductor then generates its code, and Triton compiles for sm_90; nothing can run.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20, gcnArchName="", uuid="0", is_integrated=False,
)  # fmt: skip
GBPS, TENSOR_TFLOPS = 3350.0, 989.0
"""GB/s of memory, and TFLOP/s of half types. Source: NVIDIA H100 SXM5 data sheet."""


class Draws(torch.Generator):
    """The random generator of the device, which is not used."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]

    def clone_state(self) -> Draws:
        return Draws()


QUERIES: dict[str, Any] = {
    "torch.version.cuda": "13.0",
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.is_initialized": lambda: True,
    "torch.cuda._lazy_init": lambda: None,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda.set_device": lambda device: None,
    "torch.cuda.synchronize": lambda device=None: None,
    "torch.cuda.get_device_name": lambda device=None: PROPERTIES.name,
    "torch.cuda.get_device_capability": lambda device=None: (9, 0),
    "torch.cuda.get_device_properties": lambda device=None: PROPERTIES,
    "torch.cuda.get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "torch.cuda.set_rng_state": lambda state, device=None: None,
    "torch.cuda.default_generators": (Draws(),),
    "torch.cuda._DeviceGuard": lambda index: contextlib.nullcontext(),
    "torch.cuda.device": lambda device: contextlib.nullcontext(),
    "torch._C._cuda_getDevice": lambda: 0,
    "torch._C._cuda_getCurrentRawStream": lambda index: 0,
    "torch._C._get_sm_carveout_experimental": lambda: 0,
}
"""Replacements of the device queries during compilation, by name."""


def pretend() -> None:
    """Emulate an H100 in this process, which has loaded the guard before torch."""
    for name, answer in QUERIES.items():
        owner, _, last = name.rpartition(".")
        setattr(eval(owner, {"torch": torch}), last, answer)
    _set_up_triton()
    _set_up_inductor()


def _set_up_triton() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    known = {"multiprocessor_count": 132, "max_shared_mem": 232448, "warpSize": 32, "max_num_regs": 65536}
    answers: dict[str, Any] = {
        "get_current_target": lambda: GPUTarget("cuda", 90, 32),
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device=0: 0,
        "get_active_torch_device": lambda: torch.device("cuda", 0),
        "get_device_interface": lambda: torch.cuda,
        "is_active": lambda: True,
        "utils": SimpleNamespace(get_device_properties=lambda device: known),
    }
    driver.set_active(SimpleNamespace(**answers))


def _set_up_inductor() -> None:
    # Imported here: these modules query torch.cuda when they are imported.
    import torch._inductor.utils as utils
    import triton.testing
    from torch._inductor import config

    triton.testing.get_dram_gbps = utils.get_gpu_dram_gbps = lambda *_: GBPS
    triton.testing.get_max_tensorcore_tflops = triton.testing.get_max_simd_tflops = lambda *_: TENSOR_TFLOPS
    config.compile_threads = 1
    config.force_disable_caches = True
    config.joint_graph_constant_folding = False  # it computes
