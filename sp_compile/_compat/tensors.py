"""What torch keeps to itself about tensors, fake tensors and symbolic sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import detect_fake_mode  # tried on 2.13
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # tried on 2.13
from torch.fx.experimental.symbolic_shapes import statically_known_true  # tried on 2.13
from torch.utils import _pytree as pytree  # tried on 2.13

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "detect_fake_mode",
    "follows",
    "get_data",
    "is_functorch_tensor",
    "pytree",
    "size_hint",
    "statically_known_true",
    "storage_of",
    "version_of",
]

get_data = torch._C._autograd._get_data_attr  # what `x.data` is in Dynamo's graphs; tried on 2.13
is_functorch_tensor = torch._C._functorch.is_functorch_wrapped_tensor  # tried on 2.13


def storage_of(x: torch.Tensor) -> int:
    """The identity of the memory that a strided tensor lies in, fake ones too (tried on 2.13)."""
    return x.untyped_storage()._cdata


def version_of(x: torch.Tensor) -> int:
    """How often the tensor has been written in place (tried on 2.13)."""
    return x._version


def follows(mode: FakeTensorMode | None, fact: Any) -> bool:
    """Does the fact (a sympy relation) follow from guards that the program already has?

    Adds none (tried on 2.13).
    """
    env = mode.shape_env if mode is not None else None
    return env is not None and bool(env._maybe_evaluate_static(fact) == True)  # noqa: E712  (None: not known)


def size_hint(size: torch.SymInt) -> int:
    """The value of a symbolic size in the call that is being compiled; adds no guard (tried on 2.13)."""
    return int(size.node.hint)
