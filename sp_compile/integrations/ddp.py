"""DistributedDataParallel, whoever puts it around a model: torch, Lightning, accelerate.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "sp"))
    compile_under_ddp(model, mesh["sp"])
    model = DistributedDataParallel(model)         # over all ranks; or fabric.setup(model), a Trainer's strategy="ddp"

Batches: `sp_compile.data`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from sp_compile.backend import sp
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import SPConfig
from sp_compile.lowering.base.ranks import resolve
from sp_compile.lowering.torch_compat import compile_in_place, is_compiled, is_under_ddp

__all__ = ["compile_under_ddp"]

COMPILED = "model: expected a model that is not compiled, got a compiled one."
WITHOUT_DDP = (
    "The model was compiled for DistributedDataParallel and is called for training without it, so its gradients "
    "would not be summed over the ranks."
)


def compile_under_ddp(
    model: torch.nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> torch.nn.Module:
    """Compile a model in place, with backend="sp", so that a DDP over all ranks can be put around it; returns it.

    Gradients are left partial for DDP, whose mean over all ranks is then that of the replicas; and the graph stays
    whole, whatever `torch._dynamo.config.optimize_ddp` says. mesh: the ranks that share a sequence, all by default.
    options: the fields of `sp_compile.SPConfig`. fullgraph, dynamic: as `torch.compile` has them.

    Raises SpError: the model is compiled already, an option is unknown; and where it is called for training with no DDP
    around it, where nobody would sum its gradients.
    """
    if is_compiled(model):
        raise SpError("SP831", COMPILED)
    given = {"mesh": mesh, "param_grads": "partial", **options}
    SPConfig.of(given)  # raises here, not at the first call

    def check() -> None:
        if model.training and torch.is_grad_enabled() and not is_under_ddp() and resolve(mesh, None).n > 1:
            raise SpError("SP832", WITHOUT_DDP)

    compile_in_place(model, check, backend=sp, options=given, fullgraph=fullgraph, dynamic=dynamic)
    return model
