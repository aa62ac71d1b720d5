"""Replace convolutions over disjoint patches by a linear layer over patches, whose dim is then a sequence.

    flatten(conv2d(x, w, b, stride=p), 2)    x: (N, C, H * p, W * p), w: (D, C, p, p)
    ->  transpose(linear(reshape(permute(reshape(x, (N, C, H, p, W, p)))), reshape(w, (D, C * p * p)), b), 1, 2)

The patches of an image or a video, (N, H * W, C * p * p), are placed like tokens: each rank computes those of its rows.
A convolution over rows and columns has no single dim that could be sharded. Also conv1d and conv3d, with any size of
the kernel in each dim. Windows that overlap, that padding extends, or that do not fill an image of the inputs are
copied, at most `MAX_COPIES` times the image:

    conv2d(x, w, b, stride=s, padding=q)  ->  as above, of unfold(unfold(pad(x, q), 2, p, s), 3, p, s)

Unchanged: such windows of computed values, groups, dilation, and convolutions of which another shape than (N, D,
patches) is read. Bytes moved: none between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape, parse_overloads
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, exact_quotient, is_same_shape, size_product
from sp_compile.passes.sharding.matchers import permutation_of
from sp_compile.passes.sharding.rule import rule_of

aten = torch.ops.aten
MAX_COPIES = 4  # largest size of all windows together, in multiples of the size of their image
CONVOLUTIONS = parse_overloads("conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding")


@register_pass
class RewritePatchConvolutions(CanonicalPass):
    """Replacement of the convolutions over disjoint patches in one graph."""

    requires = frozenset({"normalized"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace each convolution over patches of which only (N, D, patches) is read, and return their number."""
        calls = [OpCall(n) for op in CONVOLUTIONS for n in gm.graph.find_nodes(op="call_function", target=op)]
        changes = 0
        for call in calls:
            windows = _find_windows(call)
            users = list(call.node.users)
            if windows is None or not users:
                continue
            if all(_is_flat_view(x, call) or _is_channels_last(x, call) for x in users):
                self._rewrite(call, windows)
                changes += 1
        return changes

    def _rewrite(self, call: OpCall, windows: PatchWindows) -> None:
        """Replace the views (N, D, patches) of a convolution by a linear layer over patches.

        The comments have the shapes for a 2d convolution with a grid of (H, W) patches of p * p pixels.
        """
        node, (batch, channels, *_), weight_shape = call.node, call.shape(), call.shape("weight")
        grid, kernel, num_dims = node_shape(node)[2:], weight_shape[2:], len(weight_shape) - 2
        with self.graph.inserting_before(node):
            x = call.operands[0]
            if windows.is_split:
                split = [size for pair in zip(grid, kernel) for size in pair]
                x = self.reshape(x, (batch, channels, *split), node)  # (N, C, H, p, W, p)
                order = [*range(2, 2 + 2 * num_dims, 2), 1, *range(3, 3 + 2 * num_dims, 2)]
            else:
                x = self._unfold(x, kernel, windows, node)  # (N, C, H, W, p, p)
                order = [*range(2, 2 + num_dims), 1, *range(2 + num_dims, 2 + 2 * num_dims)]
            x = self.compute(aten.permute.default, (x, [0, *order]), node)  # (N, H, W, C, p, p)
            x = self.reshape(x, (batch, size_product(grid), channels * size_product(kernel)), node)
            w = self.reshape(call["weight"], (weight_shape[0], size_product(weight_shape[1:])), node)
            y = self.compute(aten.linear.default, (x, w, call["bias"]), node)  # (N, H * W, D)
            for user in list(node.users):
                new = self._view(user, y, call)
                self.replace(user, new)

    def _view(self, user: Node, patches: Node, call: OpCall) -> Node:
        """Emit the result of a user of the convolution as a view of the patches, (N, H * W, D).

        The user is flatten(y, 2), (N, D, H * W), or a permutation (N, H, W, D) of the convolution's result y.
        """
        if _is_flat_view(user, call):
            return self.compute(aten.transpose.int, (patches, 1, 2), call.node)
        return self.reshape(patches, node_shape(user), user)

    def _unfold(self, x: Node, kernel: Sequence[Size], windows: PatchWindows, like: Node) -> Node:
        """Emit the windows of an image, (N, C, H, W, p, p) for two dims, a view of the padded image.

        The windows may overlap, so the reshape to patches copies them.
        """
        if any(windows.padding):
            widths = [width for padding in reversed(windows.padding) for width in (padding, padding)]  # last dim first
            x = self.compute(aten.constant_pad_nd.default, (x, widths), like)
        for dim, (size, stride) in enumerate(zip(kernel, windows.strides), start=2):
            x = self.compute(aten.unfold.default, (x, dim, size, stride), like)
        return x


class PatchWindows(NamedTuple):
    """Windows of a convolution that become patches."""

    strides: list[int]  # by dim of the image
    padding: list[int]  # zeros on both sides, by dim
    is_split: bool  # True if the windows are disjoint and fill the image, so that they are a split of it


def _find_windows(call: OpCall) -> PatchWindows | None:
    """Return the windows of a convolution that become patches, or None if it remains a convolution.

    Disjoint windows that fill the image are a reshape of it. Windows that overlap or are padded are copied, which is
    done only for images of the inputs, at most MAX_COPIES times their size.
    """
    kernel, image = call.shape("weight")[2:], call.shape()[2:]
    padding = [0] if call["padding"] == "valid" else call["padding"]
    # Without a batch dim, the operand has one dim less than the weight.
    if call.ndim() != call.ndim("weight") or call["groups"] != 1 or any(d != 1 for d in call["dilation"]):
        return None
    if isinstance(padding, str):  # "same"
        return None
    # A single number applies to all dims.
    strides, widths = (list(x) * len(kernel) if len(x) == 1 else list(x) for x in (call["stride"], padding))
    if size_product(kernel) == 1:  # a product at each position, which ranks compute on their rows
        return None
    is_filled = None not in [exact_quotient(size, patch) for size, patch in zip(image, kernel)]
    if is_filled and is_same_shape(strides, kernel) and not any(widths):
        return PatchWindows(strides, widths, is_split=True)
    # The windows must be copied. Those along one dim need not be: ranks exchange the rows that conv1d reads.
    sizes = (*kernel, *image, *strides, *widths)
    if not all(isinstance(x, int) for x in sizes) or len(kernel) == 1 or not _is_image(call.operands[0]):
        return None
    copies = math.prod(kernel) / math.prod(strides)  # number of windows that contain an element, on average
    return PatchWindows(strides, widths, is_split=False) if copies <= MAX_COPIES else None


def _is_image(x: Node) -> bool:
    """Return True for an input of the program that is no parameter, and for views and pointwise results of one."""
    while x.op == "call_function" and len(x.all_input_nodes) == 1:
        rule = rule_of(x)
        is_pointwise = torch.Tag.pointwise in getattr(x.target, "tags", ())
        only_moves_data = rule is not None and rule.lazy
        if not is_pointwise and not only_moves_data:
            return False
        x = x.all_input_nodes[0]
    return x.op == "placeholder" and not node_info(x).parameter


def _is_flat_view(user: Node, call: OpCall) -> bool:
    """Return True if the user is a view (N, D, patches) of the convolution's result, such as flatten(y, 2)."""
    rule, (batch, channels, *grid) = rule_of(user), node_shape(call.node)
    is_view = rule is not None and rule.reshapes and user.args[0] is call.node
    return is_view and is_same_shape(node_shape(user), (batch, channels, size_product(grid)))


def _is_channels_last(user: Node, call: OpCall) -> bool:
    """Return True if the user moves the channels of the convolution's result to the end, (N, H, W, D)."""
    ndim = len(node_shape(call.node))
    return permutation_of(user) == (0, *range(2, ndim), 1) and user.args[0] is call.node
