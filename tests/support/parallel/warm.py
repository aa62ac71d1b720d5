"""Compile models once in the process that forks ranks, so that ranks start with all compiler modules imported."""

from __future__ import annotations

import gc

import torch
import torch.distributed.tensor  # noqa: F401  (imported before a fork)
from support.parity import Sums, build, sp
from support.ranks import configure_torch
from torch.hub import tqdm

import sp_compile.functional  # noqa: F401

tqdm.monitor_interval = 0  # Inductor's bar of progress: no thread in a process that forks
torch.set_num_threads(1)
configure_torch()
run, x = sp(build(Sums)), torch.ones(2, 8, 16, dtype=torch.float64)
if torch.backends.cuda.is_built():  # whose autograd starts threads at its first backward, and is lost to who forks then
    with torch.no_grad():
        run(x)
else:
    run(x).backward()
torch.compile(torch.sin)(torch.ones(4))  # Inductor tries out vector instructions, each kind in a process of its own
torch._dynamo.reset()

gc.collect()  # ranks need not scan these objects: garbage collection is a fifth of the time of a compilation
gc.freeze()
gc.set_threshold(50_000, 20, 20)
