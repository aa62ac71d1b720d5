"""Replace convolutions over disjoint patches by a linear layer over patches, whose dim is then a sequence.

    flatten(conv2d(x, w, b, stride=p), 2)    x: (N, C, H * p, W * p), w: (D, C, p, p)
    ->  transpose(linear(reshape(permute(reshape(x, (N, C, H, p, W, p)))), reshape(w, (D, C * p * p)), b), 1, 2)

The patches of an image or a video, (N, H * W, C * p * p), are placed like tokens: each rank computes those of its rows.
A convolution over rows and columns has no single dim that could be sharded. Also conv1d and conv3d, with any size of
the kernel in each dim. Unchanged: overlapping or padded windows, groups, dilation, images that the patches do not
fill, and convolutions of which another shape than (N, D, patches) is read. Bytes moved: none between ranks.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape, parse_overloads
from sp_compile.passes.graph.sizes import Size, exact_quotient, is_same_shape, size_product
from sp_compile.passes.sharding.rule import rule_of

aten = torch.ops.aten
CONVOLUTIONS = parse_overloads("conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding")


@register_pass
class RewritePatchConvolutions(CanonicalPass):
    """Replacement of the convolutions over disjoint patches in one graph."""

    requires = frozenset({"normalized"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Replace each convolution of which only the flat patches are read, and return their number."""
        calls = [OpCall(n) for op in CONVOLUTIONS for n in gm.graph.find_nodes(op="call_function", target=op)]
        changes = 0
        for call in calls:
            grid = _patch_grid(call)
            if grid is not None and call.node.users and all(_is_flat(user, call.node) for user in call.node.users):
                self._rewrite(call, grid)
                changes += 1
        return changes

    def _rewrite(self, call: OpCall, grid: list[Size]) -> None:
        """Replace the flattened results of a convolution by a linear layer over the patches of the grid."""
        node, (batch, channels, *_), weight = call.node, call.shape(), call.shape("weight")
        kernel, dims = weight[2:], len(grid)
        with self.graph.inserting_before(node):
            split = [size for pair in zip(grid, kernel) for size in pair]  # rows of patches, rows of a patch, ...
            x = self.reshape(call.operands[0], (batch, channels, *split), node)
            patches = [2 + 2 * d for d in range(dims)]
            x = self.compute(aten.permute.default, (x, [0, *patches, 1, *(d + 1 for d in patches)]), node)
            x = self.reshape(x, (batch, size_product(grid), channels * size_product(kernel)), node)
            w = self.reshape(call["weight"], (weight[0], size_product(weight[1:])), node)
            y = self.compute(aten.linear.default, (x, w, call["bias"]), node)
            flat = self.compute(aten.transpose.int, (y, 1, 2), node)
        for user in list(node.users):
            self.replace(user, flat)


def _patch_grid(call: OpCall) -> list[Size] | None:
    """Return the number of patches in each dim of the image, or None if windows overlap or do not fill it."""
    kernel, image = call.shape("weight")[2:], call.shape()[2:]
    padding, stride = call["padding"], call["stride"]
    is_padded = padding != "valid" if isinstance(padding, str) else any(p != 0 for p in padding)
    if call.ndim() != call.ndim("weight") or is_padded or call["groups"] != 1 or any(d != 1 for d in call["dilation"]):
        return None
    strides = list(stride) * (len(kernel) if len(stride) == 1 else 1)
    grid = [exact_quotient(size, patch) for size, patch in zip(image, kernel)]
    if not is_same_shape(strides, kernel) or size_product(kernel) == 1:
        return None
    return None if None in grid else [size for size in grid if size is not None]


def _is_flat(user: Node, node: Node) -> bool:
    """Return True if the user reads the convolution's result as (N, D, patches)."""
    rule, (batch, channels, *grid) = rule_of(user), node_shape(node)
    is_view = rule is not None and rule.reshapes and user.args[0] is node
    return is_view and is_same_shape(node_shape(user), (batch, channels, size_product(grid)))
