"""The ``sp`` operator namespace, and the one way an operator with a traceable body enters it."""

from collections.abc import Callable
from typing import TypeVar

import torch

LIBRARY = torch.library.Library("sp", "DEF")

Body = TypeVar("Body", bound=Callable[..., object])


def composite(schema: str) -> Callable[[Body], Body]:
    """Decorator: register the function as ``sp::<schema>``.

    The body is CompositeImplicitAutograd: one node in a rewritten graph, but autograd, fake tensors and
    AOTAutograd trace through it, so that the collectives inside are visible to the compiler.
    """

    def register(body: Body) -> Body:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(schema.split("(")[0], body, "CompositeImplicitAutograd")
        return body

    return register
