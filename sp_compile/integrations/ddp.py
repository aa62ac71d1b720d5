"""Compile a model for DistributedDataParallel, applied by torch, Lightning or accelerate.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "sp"))
    compile_under_ddp(model, mesh["sp"])
    model = DistributedDataParallel(model)         # over all ranks; or fabric.setup(model), a Trainer's strategy="ddp"

For batches, see `sp_compile.data`.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from sp_compile.backend import sp
from sp_compile.generation import wrap_generation
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import MeshOptions, SPConfig
from sp_compile.lowering.base.ranks import resolve
from sp_compile.lowering.torch_compat import compile_in_place, is_compiled, is_under_ddp

__all__ = ["compile_under_ddp"]

COMPILED = "model: expected a model that is not compiled, got a compiled one."
IN_DDP = "model: expected a model without DistributedDataParallel, got one that contains it."
WITHOUT_DDP = (
    "The model was compiled for DistributedDataParallel and is called for training without it, so its gradients "
    "would not be summed over the ranks."
)


def require_unprepared(model: torch.nn.Module) -> None:
    """Refuse a model that is compiled or wrapped in DDP.

    Args:
        model: The model.

    Returns:
        None.

    Raises:
        SpError: The model is compiled (SP831), or it or a submodule is a `DistributedDataParallel` (SP846).
    """
    if is_compiled(model):
        raise SpError("SP831", COMPILED)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise SpError("SP846", IN_DDP)


def compile_under_ddp(
    model: torch.nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Unpack[MeshOptions],
) -> torch.nn.Module:
    """Compile a model in place with backend="sp", for a DDP over all ranks that is applied to it later.

    Gradients stay partial, so that DDP's mean over all ranks is the mean over the replicas. The graph is not split at
    DDP's buckets, regardless of `torch._dynamo.config.optimize_ddp`. A training call outside DDP raises SpError
    (SP832), since the gradients would not be summed.

    Args:
        model: The model, not compiled.
        mesh: The ranks that share a sequence. None selects the default process group.
        fullgraph: As for `torch.compile`.
        dynamic: As for `torch.compile`.
        **options: See `sp_compile.SPConfig` (`attention="ring"`). `param_grads` is "partial" by default.

    Returns:
        The model.

    Raises:
        SpError: The model is already compiled (SP831) or wrapped in DDP (SP846), or an option is invalid (SP101 to
            SP116).
    """
    require_unprepared(model)
    wrap_generation()  # generate() of transformers then runs eagerly
    merged = {"mesh": mesh, "param_grads": "partial", **options}
    SPConfig.of(merged)  # raises here, not at the first call

    def check_ddp() -> None:
        """Raise SpError for a training call outside DDP.

        Raises:
            SpError: The ranks' gradients would not be summed (SP832).
        """
        computes_gradients = model.training and torch.is_grad_enabled()
        if computes_gradients and not is_under_ddp() and resolve(mesh, None).n > 1:
            raise SpError("SP832", WITHOUT_DDP)

    config = {"optimize_ddp": False}
    compile_in_place(model, check_ddp, config, backend=sp, options=merged, fullgraph=fullgraph, dynamic=dynamic)
    return model
