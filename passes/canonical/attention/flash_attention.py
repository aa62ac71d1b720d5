"""Replace functions of the flash_attn package, an autograd.Function around one kernel, by attention.

    flash_attn_func(q, k, v, causal=True, window_size=(31, 0), softcap=30.0)             q: (B, S, H, D)
        ->  sp.masked_attention(q, k, v, predicate="(k <= q) & (q - k <= 31)", score=30*tanh(s/30))

The replacement transposes to (B, H, S, D). Varlen functions are rewritten as torch's `varlen_attn`. Kernels are matched
by name, `_flash_attn_forward` and `_flash_attn_varlen_forward` in any namespace, as the package and its builds on hubs
register them. Arguments are matched by name, too: FlashAttention-3 passes the ends of documents to the first kernel.

An autograd.Function is one call in the graph, with its forward and backward as *bodies*, which are graphs. A *bare
kernel* is called outside of a Function.

The forward of the Function is inlined, with attention in place of its kernel. Its other ops only move, pad and slice,
and its backward is one kernel, the derivative. Causal masks and windows are aligned to the last query and the last key.
Bytes moved: none. Unchanged, with a note: other Functions around these kernels (hand-written rings, readers of the
log-sum-exp) and arguments without an equivalent, such as paged keys.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import autograd_function_apply, set_grad_enabled
from sp_compile.passes.base import register_pass
from sp_compile.passes.canonical.reduce_pairs import function_bodies, result_at
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_packet, node_shape, read_results
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.edit import interpret_graph
from sp_compile.passes.graph.sizes import is_same_size

from .proofs import KEY_INDEX, QUERY_INDEX
from .score_functions import SCORE, head_symbol, register_expression
from .varlen import RewriteVarlenAttention, window_predicate

aten, sp = torch.ops.aten, torch.ops.sp
# names of the forward kernels and of their backward kernels
FLASH_KERNELS = {
    "_flash_attn_forward": "_flash_attn_backward",
    "_flash_attn_varlen_forward": "_flash_attn_varlen_backward",
}
FLASH_OPTIONS = frozenset("dropout_p softmax_scale causal window_size_left window_size_right softcap".split())
# arguments that define the result
READ_ARGUMENTS = FLASH_OPTIONS | frozenset("q k v alibi_slopes cu_seqlens_q cu_seqlens_k".split())
# arguments that only affect scheduling, or that have no effect without others
IGNORED_ARGUMENTS = frozenset(
    "return_softmax deterministic max_seqlen_q max_seqlen_k num_splits pack_gqa sm_margin scheduler_metadata "
    "rotary_interleaved is_rotary_interleaved zero_tensors".split()
)
NEUTRAL_VALUES = (None, False, 0, -1)  # values by which other arguments are disabled
# ops that a Function may contain in any number, since autograd has their derivatives
MOVE_TARGETS = frozenset(
    getattr(aten, name)
    for name in "alias detach clone contiguous slice select narrow transpose permute view reshape flatten unflatten "
    "unsqueeze squeeze constant_pad_nd pad stack cat empty empty_like zeros_like new_empty unbind copy select_scatter "
    "slice_scatter".split()
)
# ops that detach inside a forward, where autograd does not apply; the inlined graph skips them
NON_DIFFERENTIABLE = (aten.alias.default, aten.detach.default)


@register_pass
class ReplaceFlashFunctions(RewriteVarlenAttention):
    """Replacement of the Functions of one graph and, where no gradient is needed, of bare kernels."""

    provides = frozenset({"canonical", "mask predicates"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace every flash kernel, alone or in an autograd.Function, or report why it remains."""
        calls = [n for n in gm.graph.nodes if n.target is autograd_function_apply or _kernel_name(n) in FLASH_KERNELS]
        return sum(self._rewrite_call(node) for node in calls)

    def _rewrite_call(self, node: Node) -> bool:
        """Replace one call, of a Function around a flash kernel or of a kernel itself.

        Returns False for other Functions and, with a note, for calls that are not supported.
        """
        bodies = function_bodies(node)
        if not bodies:
            kernel = node
            # Result 0 is the attention, result 1 the log-sum-exp.
            reason = None if set(read_results(node)) == {0} else "its log-sum-exp is read"
        else:
            kernels = [n for n in bodies[0].graph.nodes if _kernel_name(n) in FLASH_KERNELS]
            if not kernels:
                return False
            kernel, reason = kernels[0], _function_refusal(kernels, bodies, read_results(node))
        reason = reason or _kernel_refusal(kernel)
        if reason is not None:
            self.note_refusal(node, f"its operands are gathered: {reason}")
            return False
        (index,) = read_results(node)  # one, as other calls are refused
        with self.graph.inserting_before(node):
            if kernel is node:
                out = self._emit_kernel(node, value_of=lambda x: x, like=node)  # its operands are in this graph
            else:
                operands = node.args[2:]  # after the two bodies
                out = self._inline_forward(bodies[0], operands, kernel, index, node)
        self.replace(node, {index: out})
        return True

    def _inline_forward(self, body: GraphModule, operands: Sequence[Any], kernel: Node, index: int, like: Node) -> Node:
        """Inline the forward of a Function, with attention in place of its kernel, and return one result.

        Autograd then derives the backward from the inlined ops.

        Args:
            body: The graph of the forward.
            operands: The operands of the Function.
            kernel: The kernel in the body.
            index: The index of the result that is read.
            like: The node whose metadata new nodes copy.
        """
        needed = _ancestors(result_at(body.graph.output_node().args[0], index))

        def inline_node(node: Node, values: Mapping[Node, Any]) -> Any:
            """Return the value of a node of the body in this graph; None if the result does not need it."""
            if node not in needed or node is kernel:
                return None
            if node.target is operator.getitem and node.args[0] is kernel:
                return self._emit_kernel(kernel, values.__getitem__, like)
            if node.target in NON_DIFFERENTIABLE:  # a detach in the forward of a Function does not stop its gradients
                return values[node.args[0]]
            return self.copy_call(node, values, like)

        return result_at(interpret_graph(body, operands, inline_node), index)

    def _emit_kernel(self, kernel: Node, value_of: Callable[[Node], Any], like: Node) -> Node:
        """Emit attention with the arguments and the layout of a flash kernel.

        The layout is (B, S, H, D) or, for packed documents, (T, H, D).

        Args:
            kernel: The call of the kernel, in this graph or in the body of a Function.
            value_of: Returns the node of this graph for an operand of the kernel.
            like: The node whose metadata new nodes copy.
        """
        arguments = OpCall(kernel).args
        q, k, v = (value_of(arguments[name]) for name in "qkv")
        # The distances to the first and the last key that a query reads; -1 for no limit.
        left, right = (arguments.get(f"window_size_{side}", -1) for side in ("left", "right"))
        window = (left, 0 if arguments.get("causal") else right)  # causal: no key after the query
        scale, dropout_p = arguments["softmax_scale"], arguments.get("dropout_p", 0.0)
        options = self._score_options(arguments, value_of)
        q_ends, k_ends = _document_ends(arguments)
        if q_ends is not None:  # packed documents
            ends = (value_of(q_ends), value_of(k_ends))
            return self.emit_attention((q, k, v), ends, window, scale, like, dropout_p, **options)
        # Windows are aligned to the last query and the last key: query q is at key n0 + q, where n0 = keys - queries.
        queries, keys = node_shape(q)[1], node_shape(k)[1]
        position, sizes = ("q", []) if is_same_size(queries, keys) else ("(n0 + q)", [self.sizes(keys - queries)])
        predicate = " & ".join(window_predicate(position, *window))
        enable_gqa = not is_same_size(node_shape(q)[2], node_shape(k)[2])
        heads_first = [self.compute(aten.transpose.int, (x, 1, 2), like) for x in (q, k, v)]
        if not options and predicate in ("", "(k <= q)"):
            target, is_causal = aten.scaled_dot_product_attention.default, predicate != ""
            attn_mask = None
            args, options = (*heads_first, attn_mask, dropout_p, is_causal), {"scale": scale, "enable_gqa": enable_gqa}
        else:
            target = sp.masked_attention.default
            vectors: tuple[list[Node], list[Node]] = [], []  # rows and cols: the predicate reads none
            args = (*heads_first, *vectors, sizes if predicate else [], predicate, dropout_p, scale, enable_gqa)
        attention = self.compute(target, args, like, options)
        return self.compute(aten.transpose.int, (attention, 1, 2), like)

    def _score_options(self, arguments: Mapping[str, Any], value_of: Callable[[Node], Any]) -> dict[str, Any]:
        """Return the arguments of `sp.masked_attention` for the soft cap and the ALiBi slopes of a kernel.

        These are the name of a score function of each pair of query and key, and the slopes, one for each head. The
        result is {} if the kernel has neither.
        """
        cap, slopes = arguments.get("softcap", 0.0), arguments.get("alibi_slopes")
        options: dict[str, Any] = {}
        score = cap * sympy.tanh(SCORE / cap) if cap else SCORE
        if slopes is not None:
            score -= head_symbol(0) * sympy.Abs(QUERY_INDEX - KEY_INDEX)  # symbol 0: the first tensor of `heads`
            options["heads"] = [value_of(slopes)]
        return options if score == SCORE else {**options, "score": register_expression(score)}


def _kernel_name(node: Node) -> str:
    """Return the name of the operator that a node calls, without its namespace."""
    return str(getattr(node_packet(node), "__name__", "")) if node.op == "call_function" else ""


def _document_ends(args: Mapping[str, Any]) -> list[Any]:
    """Return [ends of the documents of queries, ends of those of keys], cumulative; each None if there are none.

    They are arguments of the varlen kernel, and of the only kernel of FlashAttention-3.
    """
    return [args.get(f"cu_seqlens_{x}") for x in "qk"]


def _kernel_refusal(kernel: Node) -> str | None:
    """Return the reason why attention cannot replace a flash kernel with these arguments, or None.

    READ_ARGUMENTS are supported, IGNORED_ARGUMENTS have no effect on the result, and others must be disabled.
    """
    args = OpCall(kernel).args
    q_ends, k_ends = _document_ends(args)  # None without packed documents
    if (q_ends is None) != (k_ends is None):
        return "only one of queries and keys has documents"
    other_args = [name for name in args if name not in READ_ARGUMENTS | IGNORED_ARGUMENTS]
    unsupported = [name for name in other_args if args[name] not in NEUTRAL_VALUES]
    if unsupported:
        return f"its kernel has the arguments {', '.join(unsupported)}"
    slopes = args.get("alibi_slopes")
    if slopes is not None:
        queries, keys = (node_shape(args[name])[1] for name in "qk")
        # Packed documents of queries and keys have equal lengths if both read the same node of ends.
        has_equal_lengths = is_same_size(queries, keys) if q_ends is None else q_ends is k_ends
        if len(node_shape(slopes)) != 1 or not has_equal_lengths:
            return "its slopes differ between batch entries, or the numbers of keys and queries differ"
    return None


def _function_refusal(
    kernels: Sequence[Node], bodies: Sequence[GraphModule], read_indices: Collection[int]
) -> str | None:
    """Return the reason why a Function is not one flash kernel and its derivative, or None if it is.

    Attention with autograd's derivative can replace only such a Function.

    Args:
        kernels: The flash kernels in its forward.
        bodies: The forward and the backward of the Function.
        read_indices: The indices of the results that are read.
    """
    forward, backward = bodies
    # One forward kernel and its backward kernel, FLASH_KERNELS[name of the forward kernel], with the same options.
    backward_kernels = [n for n in backward.graph.nodes if _kernel_name(n) in FLASH_KERNELS.values()]
    names = [FLASH_KERNELS[_kernel_name(n)] for n in kernels]
    if len(kernels) != 1 or [_kernel_name(n) for n in backward_kernels] != names:
        return "it is not one forward kernel and one backward kernel"
    (kernel,), (backward_kernel,) = kernels, backward_kernels
    args, backward_args = OpCall(kernel).args, OpCall(backward_kernel).args
    common_options = FLASH_OPTIONS & args.keys() & backward_args.keys()
    different = sorted(name for name in common_options if args[name] != backward_args[name])
    if different:
        return f"its backward has a different {', '.join(different)}"
    # Other ops only move values.
    for node in (*forward.graph.nodes, *backward.graph.nodes):
        is_kernel_part = node in (kernel, backward_kernel) or node.target in (operator.getitem, set_grad_enabled)
        if node.op == "call_function" and not is_kernel_part and node_packet(node) not in MOVE_TARGETS:
            return f"it contains another op ({node.target})"
    # Only the attention, result 0 of the kernel, is read: the kernel's users are getitem(kernel, index). The backward
    # returns a gradient, not None, for each input from which q, k and v are computed.
    results = [result_at(forward.graph.output_node().args[0], index) for index in read_indices]
    if len(results) != 1 or any(n.args[1] != 0 for n in _ancestors(results[0]) & set(kernel.users)):
        return "its log-sum-exp is read"
    gradients = zip(forward.graph.find_nodes(op="placeholder"), backward.graph.output_node().args[0])
    attention_inputs = _ancestors(args["q"]) | _ancestors(args["k"]) | _ancestors(args["v"])
    if any(x in attention_inputs and gradient is None for x, gradient in gradients):
        return "one of them has no gradient"
    return None


def _ancestors(node: Node) -> set[Node]:
    """Return the node and all nodes of its graph that it is computed from."""
    return reachable_set([node], lambda n: n.all_input_nodes)
