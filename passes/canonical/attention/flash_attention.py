"""Replace functions of the flash_attn package, an autograd.Function around one kernel, by attention.

    flash_attn_func(q, k, v, causal=True, window_size=(31, 0), softcap=30.0)             q: (B, S, H, D)
        ->  sp.masked_attention(q, k, v, predicate="(k <= q) & (q - k <= 31)", score=30*tanh(s/30))

The replacement transposes to (B, H, S, D). Varlen functions are rewritten as torch's `varlen_attn`. Kernels are matched
by name, `_flash_attn_forward` and `_flash_attn_varlen_forward` in any namespace, as the package and its builds on hubs
register them. Arguments are matched by name, too: FlashAttention-3 passes the ends of documents to the first kernel.

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

from sp_compile.lowering.torch_compat import autograd_function_apply, schema_of, set_grad_enabled
from sp_compile.passes.base import register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_packet, node_shape, read_results
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.edit import interpret_graph
from sp_compile.passes.graph.sizes import is_same_size

from .proofs import KEY_INDEX, QUERY_INDEX
from .score_functions import SCORE, head_symbol, register_expression
from .varlen import RewriteVarlenAttention, window_predicate

aten, sp = torch.ops.aten, torch.ops.sp
FLASH_KERNELS = {
    "_flash_attn_forward": "_flash_attn_backward",
    "_flash_attn_varlen_forward": "_flash_attn_varlen_backward",
}
"""Names of the forward kernels and of their backward kernels."""
FLASH_OPTIONS = frozenset("dropout_p softmax_scale causal window_size_left window_size_right softcap".split())
READ_ARGUMENTS = FLASH_OPTIONS | frozenset("q k v alibi_slopes cu_seqlens_q cu_seqlens_k".split())
"""Arguments that define the result."""
IGNORED_ARGUMENTS = frozenset(
    "return_softmax deterministic max_seqlen_q max_seqlen_k num_splits pack_gqa sm_margin scheduler_metadata "
    "rotary_interleaved is_rotary_interleaved zero_tensors".split()
)
"""Arguments that only affect scheduling, or that have no effect without others."""
NEUTRAL_VALUES = (None, False, 0, -1)
"""Values by which other arguments are disabled."""
MOVE_TARGETS = frozenset(
    getattr(aten, name)
    for name in "alias detach clone contiguous slice select narrow transpose permute view reshape flatten unflatten "
    "unsqueeze squeeze constant_pad_nd pad stack cat empty empty_like zeros_like new_empty unbind copy select_scatter "
    "slice_scatter".split()
)
"""Ops that a Function may contain in any number, since autograd knows their derivatives."""
NON_DIFFERENTIABLE = (aten.alias.default, aten.detach.default)
"""Ops that detach inside a forward, where autograd does not apply; the inlined graph skips them."""


@register_pass
class ReplaceFlashFunctions(RewriteVarlenAttention):
    """Replacement of the Functions of one graph and, where no gradient is needed, of bare kernels."""

    provides = frozenset({"canonical", "mask predicates"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        found = [n for n in gm.graph.nodes if n.target is autograd_function_apply or _kernel_name(n) in FLASH_KERNELS]
        return sum(self._rewrite_call(node) for node in found)

    def _rewrite_call(self, node: Node) -> bool:
        bodies = _function_bodies(node)
        if not bodies:
            kernel, why = node, _result_refusal(node)
        elif kernels := [n for n in bodies[0].graph.nodes if _kernel_name(n) in FLASH_KERNELS]:
            kernel, why = kernels[0], _function_refusal(kernels, bodies, read_results(node))
        else:
            return False
        why = why or _kernel_refusal(kernel)
        if why is not None:
            self.note_refusal(node, f"its operands are gathered: {why}")
            return False
        (index,) = read_results(node)
        with self.graph.inserting_before(node):
            if kernel is node:
                fresh = self._attention(node, lambda x: x, node)
            else:
                fresh = self._inline_forward(bodies[0], node.args[2:], kernel, index, node)
        self.replace(node, {index: fresh})
        return True

    def _inline_forward(self, body: GraphModule, operands: Sequence[Any], kernel: Node, index: int, like: Node) -> Node:
        """Inline the forward of a Function and return its result with this index."""
        wanted = _ancestors(_result_at(body.graph.output_node().args[0], index))

        def place(node: Node, placed: Mapping[Node, Any]) -> Any:
            """Copy a node of the body, with attention in place of the kernel; None if the result does not need it."""
            if node not in wanted or node is kernel:
                return None
            if node.target is operator.getitem and node.args[0] is kernel:
                return self._attention(kernel, placed.__getitem__, like)
            return placed[node.args[0]] if node.target in NON_DIFFERENTIABLE else self.copy_call(node, placed, like)

        return _result_at(interpret_graph(body, operands, place), index)

    def _attention(self, kernel: Node, placed: Callable[[Node], Any], like: Node) -> Node:
        """Return attention with the kernel's arguments and the kernel's layout of the result."""
        arguments = _kernel_arguments(kernel)
        q, k, v = (placed(arguments[name]) for name in "qkv")
        left, right = (arguments.get(f"window_size_{side}", -1) for side in ("left", "right"))
        window = left, 0 if arguments.get("causal") else right
        scale, dropout_p, cap = (
            arguments["softmax_scale"],
            arguments.get("dropout_p", 0.0),
            arguments.get("softcap", 0.0),
        )
        score = cap * sympy.tanh(SCORE / cap) if cap else SCORE
        more: dict[str, Any] = {}
        if arguments.get("alibi_slopes") is not None:
            score -= head_symbol(0) * sympy.Abs(QUERY_INDEX - KEY_INDEX)
            more["heads"] = [placed(arguments["alibi_slopes"])]
        if score != SCORE:
            more["score"] = register_expression(score)
        if _document_ends(arguments)[0] is not None:
            ends = placed(arguments["cu_seqlens_q"]), placed(arguments["cu_seqlens_k"])
            return self.emit_attention((q, k, v), ends, window, scale, like, dropout_p, **more)
        queries, keys = node_shape(q)[1], node_shape(k)[1]
        place, sizes = ("q", []) if is_same_size(queries, keys) else ("(n0 + q)", [self.sizes(keys - queries)])
        predicate, grouped = (
            " & ".join(window_predicate(place, *window)),
            not is_same_size(node_shape(q)[2], node_shape(k)[2]),
        )
        heads_first = [self.compute(aten.transpose.int, (x, 1, 2), like) for x in (q, k, v)]
        if not more and (not predicate or (predicate == "(k <= q)")):
            args = (*heads_first, None, dropout_p, bool(predicate))
            out = self.compute(
                aten.scaled_dot_product_attention.default, args, like, {"scale": scale, "enable_gqa": grouped}
            )
        else:
            args = (*heads_first, [], [], sizes if predicate else [], predicate, dropout_p, scale, grouped)
            out = self.compute(sp.masked_attention.default, args, like, more)
        return self.compute(aten.transpose.int, (out, 1, 2), like)


def _function_bodies(node: Node) -> list[GraphModule]:
    """Return the forward and the backward of a Function; no bodies for an operator."""
    refs = node.args[:2] if node.target is autograd_function_apply else ()
    named = [node.graph.owning_module.get_submodule(str(ref.target)) for ref in refs if isinstance(ref, Node)]
    return [body for body in named if isinstance(body, GraphModule)]


def _kernel_name(node: Node) -> str:
    """Return the name of the operator that a node calls, without its namespace."""
    return str(getattr(node_packet(node), "__name__", "")) if node.op == "call_function" else ""


def _kernel_arguments(kernel: Node) -> Mapping[str, Any]:
    call = OpCall(kernel)
    return {a.name: call.get(a.name) for a in schema_of(kernel.target).arguments}


def _document_ends(args: Mapping[str, Any]) -> list[Any]:
    """Return the ends of query and key documents, or None; FlashAttention-3 has one kernel for both."""
    return [args.get(f"cu_seqlens_{x}") for x in "qk"]


def _kernel_refusal(kernel: Node) -> str | None:
    """Return the reason why the kernel is not supported, or None."""
    args = _kernel_arguments(kernel)
    if _document_ends(args).count(None) == 1:
        return "only one of queries and keys has documents"
    unsupported = [
        name for name, x in args.items() if name not in READ_ARGUMENTS | IGNORED_ARGUMENTS and x not in NEUTRAL_VALUES
    ]
    if unsupported:
        return f"its kernel has the arguments {', '.join(unsupported)}"
    slopes, ends = args.get("alibi_slopes"), _document_ends(args)
    if slopes is not None:
        q, k = (node_shape(args[name])[1] for name in "qk")
        same_length = ends[0] is ends[1] if ends[0] is not None else is_same_size(q, k)
        if len(node_shape(slopes)) != 1 or not same_length:
            return "its slopes differ between batch entries, or the numbers of keys and queries differ"
    return None


def _result_refusal(kernel: Node) -> str | None:
    """Return a reason if anything but the first result of the kernel is read."""
    return None if set(read_results(kernel)) == {0} else "its log-sum-exp is read"


def _function_refusal(kernels: Sequence[Node], bodies: Sequence[GraphModule], read: Collection[int]) -> str | None:
    """Return a reason if a Function is more than one kernel and its derivative."""
    forward, backward = bodies
    back = [n for n in backward.graph.nodes if _kernel_name(n) in FLASH_KERNELS.values()]
    if len(kernels) != 1 or [_kernel_name(n) for n in back] != [FLASH_KERNELS[_kernel_name(n)] for n in kernels]:
        return "it is not one forward kernel and one backward kernel"
    args, back_args = _kernel_arguments(kernels[0]), _kernel_arguments(back[0])
    other = [name for name in FLASH_OPTIONS & args.keys() & back_args.keys() if args[name] != back_args[name]]
    if other:
        return f"its backward has a different {', '.join(sorted(other))}"
    for body, kernel in ((forward, kernels[0]), (backward, back[0])):
        for node in body.graph.nodes:
            known = (
                node is kernel
                or node.target in (operator.getitem, set_grad_enabled)
                or node_packet(node) in MOVE_TARGETS
            )
            if node.op == "call_function" and not known:
                return f"it contains another op ({node.target})"
    results = [_result_at(forward.graph.output_node().args[0], index) for index in read]
    if len(results) != 1 or any(n.args[1] != 0 for n in _ancestors(results[0]) & set(kernels[0].users)):
        return "its log-sum-exp is read"
    gradients = zip(forward.graph.find_nodes(op="placeholder"), backward.graph.output_node().args[0])
    moved = _ancestors(args["q"]) | _ancestors(args["k"]) | _ancestors(args["v"])
    if any(x in moved and gradient is None for x, gradient in gradients):
        return "one of them has no gradient"
    return None


def _result_at(output: Any, index: int) -> Any:
    output = output[0]  # torch 2.11 returns all values of the body, the results last
    return output[index] if isinstance(output, tuple | list) else output


def _ancestors(node: Node) -> set[Node]:
    """Return the node and everything that it is computed from."""
    return reachable_set([node], lambda one: one.all_input_nodes)
