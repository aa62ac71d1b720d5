"""Define ``sp::token_function``: a torch.autograd.Function of elementwise ops, so that it has a sharding rule."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule

from .base.library import composite
from .base.registry import ProgramTable
from .torch_compat import autograd_function_apply


class FunctionBodies(NamedTuple):
    """The traced bodies of a torch.autograd.Function."""

    forward: GraphModule  # returns the result, and what the backward reads
    backward: GraphModule  # of the gradient of the result, and what the forward saved
    options: dict[str, Any]  # keyword arguments of `autograd_function_apply`


BODIES: ProgramTable[FunctionBodies] = ProgramTable("functions of tokens")


def register_bodies(bodies: FunctionBodies) -> str:
    """Register the bodies of a function, and return their name, an argument of ``sp::token_function`` in graphs."""
    code = f"{bodies.forward.code}{bodies.backward.code}{sorted(bodies.options.items())}"
    return BODIES.register(code, lambda name: bodies)


@composite("token_function(Tensor[] xs, str name) -> Tensor", padded="as given")
def token_function(xs: list[Tensor], name: str) -> Tensor:
    """Apply an autograd Function whose forward and backward are elementwise.

    Shapes: operands of one shape, or () -> that shape. Bytes: none. Backward: that of the Function.

    Args:
        xs: The operands.
        name: Result of `register_bodies`.
    """
    forward, backward, options = BODIES[name]  # the graphs, and keyword arguments of `autograd_function_apply`
    result = autograd_function_apply(forward, backward, *xs, **options)
    return result[0] if isinstance(result, tuple | list) else result
