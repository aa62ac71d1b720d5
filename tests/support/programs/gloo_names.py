"""Two threads of one Gloo group assign a name without a lock: torch crashes in about a minute, without this package.

Usage: gloo_names.py SECONDS [corrected]
"""

import sys
import time

import torch
import torch.distributed as dist

if sys.argv[2:] == ["corrected"]:
    import sp_compile.lowering.torch_compat  # noqa: F401

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group, x, gathers = dist.group.WORLD.group_name, torch.ones(1), 0
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    for y in [torch.ops._c10d_functional.all_gather_into_tensor(x, 1, group) for _ in range(64)]:
        torch.ops._c10d_functional.wait_tensor(y)
        gathers += 1
sys.stdout.write(f"{gathers} gathers\n")
dist.destroy_process_group()
