"""Ranks that share one GPU: a process group whose collectives go through the host's memory.

NCCL refuses two ranks on one GPU, and not all that Gloo does for tensors of a GPU is right. What is on the GPU is
copied to the host here, exchanged by Gloo there, and copied back, before a call returns.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _unregister_process_group
from torch.distributed.distributed_c10d import _world

from sp_compile.lowering.torch_compat import process_group, register_process_group

CPU = torch.device("cpu")
_groups: list[dist.ProcessGroup] = []  # the registry holds them weakly


def stage(group: dist.ProcessGroup) -> None:
    """Make the collectives of a Gloo group move tensors of a GPU through the host."""
    name = group.group_name
    staged = Staged(process_group(name))
    _groups.append(staged)
    for known in (_world.pg_map, _world.pg_names, _world.pg_group_ranks, _world.pg_backend_config):
        known[staged] = known[group]
    _unregister_process_group(name)
    register_process_group(name, staged)


class Staged(dist.ProcessGroup):
    def __init__(self, carrier: dist.ProcessGroup) -> None:
        super().__init__(carrier.rank(), carrier.size())
        self._carrier = carrier
        self._set_group_name(carrier.group_name)
        self._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, carrier._get_backend(CPU))

    def getBackendName(self) -> str:
        return "staged"

    def allreduce(self, tensors: list[Tensor], *options: Any) -> Any:
        return self._run(lambda x: self._carrier.allreduce([x], *options), tensors[0])

    def broadcast(self, tensors: list[Tensor], *options: Any) -> Any:
        return self._run(lambda x: self._carrier.broadcast([x], *options), tensors[0])

    def _allgather_base(self, output: Tensor, given: Tensor, *options: Any) -> Any:
        return self._run(lambda out, x: self._carrier._allgather_base(out, x, *options), output, given)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, *options: Any) -> Any:
        return self._run(lambda out, x: self._carrier._reduce_scatter_base(out, x, *options), output, given)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], given: list[Tensor], *options: Any) -> Any:
        return self._run(lambda out, x: self._carrier._allgather_base(out, x), outputs[0], given[0])

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], given: list[Tensor], *options: Any) -> Any:
        return self._run(lambda out, x: self._carrier._reduce_scatter_base(out, x), outputs[0], given[0])

    def alltoall_base(self, output: Tensor, given: Tensor, here: list[int], there: list[int], *options: Any) -> Any:
        return self._run(lambda out, x: self._carrier.alltoall_base(out, x, here, there, *options), output, given)

    def _run(self, collective: Any, result: Tensor, *operands: Tensor) -> Any:
        copies = [x.cpu() for x in (result, *operands)]
        work = collective(*copies)
        work.wait()
        if copies[0] is not result:
            result.copy_(copies[0])
        return work
