"""The linear recurrence against torch.associative_scan: how long it takes to compile, and memory of the backward.

As a script, one compilation in a process of its own, with an empty cache of Inductor's: prints JSON.
"""

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from measuring.scans.scan_cases import associative, milliseconds
from peak_memory import peak_activation_bytes

from sp_compile import linear_scan

WIDTH = 8
"""Columns of the tensors whose memory is counted: torch's backward makes S * S numbers of each."""


def fresh(what: str, length: int) -> dict[str, list[float]]:
    """Compiles in another process with an empty cache: "compile", CPU seconds, and "run", ms of each round."""
    with tempfile.TemporaryDirectory(prefix="scans-") as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, __file__, what, str(length)]
        return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)


def compiled(what: str, length: int) -> dict[str, list[float]]:
    a, b = torch.rand(length, 64), torch.randn(length, 64)
    both = {"ours": lambda a, b: linear_scan(a, b, 0), "torch": associative}
    torch.compile(lambda x: x + 1)(a)  # lookups of every first compilation
    function = torch.compile(both[what], fullgraph=True)
    begin = spent()
    out = function(a, b)
    seconds = spent() - begin
    torch.testing.assert_close(out, linear_scan(a, b, 0), rtol=1e-3, atol=1e-3)
    return {"compile": [seconds], "run": [milliseconds(lambda: function(a, b)) for _ in range(7)]}


def spent() -> float:
    """CPU seconds of this process and of the compilers that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def extra_bytes(length: int, torchs: bool = False) -> float:
    """The most memory that forward and backward hold, over the bytes of a and b; their gradients are not counted."""
    a, b = (torch.rand(length, WIDTH, requires_grad=True) for _ in range(2))

    def step() -> None:
        h = higher_order(a, b) if torchs else linear_scan(a, b, 0)
        h.sum().backward()

    step()
    return peak_activation_bytes(step, [a, b]) / (a.nbytes + b.nbytes)


def higher_order(a: Tensor, b: Tensor) -> Tensor:
    """The operator of combine_mode="pointwise", which refuses CPU tensors; its backward is the same on all devices."""
    from torch._higher_order_ops.associative_scan import associative_scan_op

    def flat(left_a: Tensor, left_b: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return left_a * a, a * left_b + b

    return associative_scan_op(flat, (a, b), ())[1]


def slope(lengths: list[int], extra: list[float]) -> float:
    """Return the slope of the logarithm of extra bytes over the logarithm of the length."""
    return math.log(extra[-1] * lengths[-1] / (extra[0] * lengths[0])) / math.log(lengths[-1] / lengths[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(compiled(sys.argv[1], int(sys.argv[2]))))
