"""Functions of the flash_attn package become attention: an autograd.Function around one of its kernels.

    flash_attn_func(q, k, v, causal=True, window_size=(31, 0), softcap=30.0)             q: (B, S, H, D)
        ->  sp.masked_attention(q, k, v, predicate="(k <= q) & (q - k <= 31)", score="30.0*tanh(s/30.0)")

around transposes to (B, H, S, D); its varlen functions as torch's `varlen_attn`. Kernels are known by their names,
`_flash_attn_forward` and `_flash_attn_varlen_forward` of any namespace, as the package and its builds on hubs register
them, and their arguments by theirs: FlashAttention-3 gives the first one the ends of documents, too. The Function's
forward is written into the graph, with attention in the place of its kernel: what else it does is move, pad and cut,
and its backward is one kernel, the derivative. Causal masks and windows count from the last query and the last key.
Bytes moved: none. Leaves alone, and says so: other Functions around these kernels (rings by hand, log-sum-exps that are
read), and arguments that have no place here, as keys in pages.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import autograd_function_apply, schema_of, set_grad_enabled
from sp_compile.passes.base import register
from sp_compile.passes.context import Job
from sp_compile.passes.graph.call import Call, packet_of, results_read, shape_of
from sp_compile.passes.graph.closure import closure
from sp_compile.passes.graph.sizes import same

from .varlen import VarlenAttention, sees

aten, sp = torch.ops.aten, torch.ops.sp
KERNELS = {"_flash_attn_forward": "_flash_attn_backward", "_flash_attn_varlen_forward": "_flash_attn_varlen_backward"}
"""Names of kernels, and of those of their gradients."""
OPTIONS = frozenset("dropout_p softmax_scale causal window_size_left window_size_right softcap".split())
READ = OPTIONS | frozenset("q k v alibi_slopes cu_seqlens_q cu_seqlens_k".split())
"""Arguments that say what is computed."""
WITHOUT_EFFECT = frozenset(
    "return_softmax deterministic max_seqlen_q max_seqlen_k num_splits pack_gqa sm_margin scheduler_metadata "
    "rotary_interleaved is_rotary_interleaved zero_tensors".split()
)
"""Arguments by which a kernel is scheduled, or which say nothing without others."""
NOTHING = (None, False, 0, -1)
"""Values of other arguments by which they are not in use."""
MOVES = frozenset(
    getattr(aten, name)
    for name in "alias detach clone contiguous slice select narrow transpose permute view reshape flatten unflatten "
    "unsqueeze squeeze constant_pad_nd pad stack cat empty empty_like zeros_like new_empty unbind copy select_scatter "
    "slice_scatter".split()
)
"""Ops of which a Function may have as many as it likes: their derivative is what autograd knows."""
WITHOUT_GRADIENT = (aten.alias.default, aten.detach.default)
"""What a Function's forward may cut off from autograd, which does not look into it: in the graph it must go on."""


@register
class FlashFunctions(VarlenAttention):
    """Rewrites the calls of one graph: in Functions and, where nothing has a gradient, kernels by themselves."""

    provides = frozenset({"canonical", "masks are predicates"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        found = [n for n in gm.graph.nodes if n.target is autograd_function_apply or _kernel(n) in KERNELS]
        return sum([self._respell(node) for node in found])

    def _respell(self, node: Node) -> bool:
        bodies = _bodies(node)
        if not bodies:
            kernel, why = node, _why_not_alone(node)
        elif kernels := [n for n in bodies[0].graph.nodes if _kernel(n) in KERNELS]:
            kernel, why = kernels[0], _why_not_function(kernels, bodies, results_read(node))
        else:
            return False
        why = why or _why_not(kernel)
        if why is not None:
            self.refused(node, f"what it reads is gathered: {why}")
            return False
        (index,) = results_read(node)
        with self.graph.inserting_before(node):
            if kernel is node:
                fresh = self._attention(node, lambda x: x, node)
            else:
                fresh = self._written(bodies[0], node.args[2:], kernel, index, node)
        self.replace(node, {index: fresh})
        return True

    def _written(self, body: GraphModule, operands: Sequence[Any], kernel: Node, index: int, like: Node) -> Node:
        """The forward of a Function, in the outer graph: its result of this number."""
        placed: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
        wanted = _needs(_result(body, index))
        for node in body.graph.nodes:
            if node in placed or node not in wanted or node is kernel:
                continue
            if node.target is operator.getitem and node.args[0] is kernel:
                placed[node] = self._attention(kernel, placed.__getitem__, like)
            elif node.target in WITHOUT_GRADIENT:
                placed[node] = placed[node.args[0]]
            else:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), placed.__getitem__)
                placed[node] = self.emit(node.target, args, node.meta["val"], like, kwargs)
        return placed[_result(body, index)]

    def _attention(self, kernel: Node, placed: Callable[[Node], Any], like: Node) -> Node:
        """Attention with the kernel's arguments, whose result is laid out as the kernel's."""
        given = _arguments(kernel)
        q, k, v = (placed(given[name]) for name in "qkv")
        left, right = (given.get(f"window_size_{side}", -1) for side in ("left", "right"))
        window = left, 0 if given.get("causal") else right
        scale, dropout_p, cap = given["softmax_scale"], given.get("dropout_p", 0.0), given.get("softcap", 0.0)
        score = f"{cap}*tanh(s/{cap})" if cap else "s"
        more: dict[str, Any] = {}
        if given.get("alibi_slopes") is not None:
            score, more["heads"] = f"{score} - head0*Abs(q - k)", [placed(given["alibi_slopes"])]
        if score != "s":
            more["score"] = score
        if _ends(given)[0] is not None:
            ends = placed(given["cu_seqlens_q"]), placed(given["cu_seqlens_k"])
            return self.of_documents((q, k, v), ends, window, scale, like, dropout_p, **more)
        queries, keys = shape_of(q)[1], shape_of(k)[1]
        place, sizes = ("q", []) if same(queries, keys) else ("(n0 + q)", [self.sizes(keys - queries)])
        predicate, grouped = " & ".join(sees(place, *window)), not same(shape_of(q)[2], shape_of(k)[2])
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


def _bodies(node: Node) -> list[GraphModule]:
    """The forward and the backward of a Function; none of an operator."""
    refs = node.args[:2] if node.target is autograd_function_apply else ()
    named = [node.graph.owning_module.get_submodule(str(ref.target)) for ref in refs if isinstance(ref, Node)]
    return [body for body in named if isinstance(body, GraphModule)]


def _kernel(node: Node) -> str:
    """The name of the operator that a node calls, without its namespace."""
    return str(getattr(packet_of(node), "__name__", "")) if node.op == "call_function" else ""


def _arguments(kernel: Node) -> Mapping[str, Any]:
    call = Call(kernel)
    return {a.name: call.get(a.name) for a in schema_of(kernel.target).arguments}


def _ends(given: Mapping[str, Any]) -> list[Any]:
    """Where documents of queries and of keys end, or None. FlashAttention-3 has one kernel with and without them."""
    return [given.get(f"cu_seqlens_{x}") for x in "qk"]


def _why_not(kernel: Node) -> str | None:
    """Why the kernel is no attention that is known here."""
    given = _arguments(kernel)
    if _ends(given).count(None) == 1:
        return "documents end on one side only"
    strange = [name for name, x in given.items() if name not in READ | WITHOUT_EFFECT and x not in NOTHING]
    if strange:
        return f"its kernel is given {', '.join(strange)}"
    slopes, ends = given.get("alibi_slopes"), _ends(given)
    if slopes is not None:
        q, k = (shape_of(given[name])[1] for name in "qk")
        alike = ends[0] is ends[1] if ends[0] is not None else same(q, k)
        if len(shape_of(slopes)) != 1 or not alike:
            return "its slopes differ between batch entries, or its keys are not as many as its queries"
    return None


def _why_not_alone(kernel: Node) -> str | None:
    """Why something else than a kernel's result is read of it."""
    return None if set(results_read(kernel)) == {0} else "its log-sum-exp is read"


def _why_not_function(kernels: Sequence[Node], bodies: Sequence[GraphModule], read: Collection[int]) -> str | None:
    """Why a Function is more than one kernel and its derivative."""
    forward, backward = bodies
    back = [n for n in backward.graph.nodes if _kernel(n) in KERNELS.values()]
    if len(kernels) != 1 or [_kernel(n) for n in back] != [KERNELS[_kernel(n)] for n in kernels]:
        return "it is not one kernel forward, and that of its gradients backward"
    given, again = _arguments(kernels[0]), _arguments(back[0])
    other = [name for name in OPTIONS & given.keys() & again.keys() if given[name] != again[name]]
    if other:
        return f"its backward has another {', '.join(sorted(other))}"
    for body, kernel in ((forward, kernels[0]), (backward, back[0])):
        for node in body.graph.nodes:
            known = node is kernel or node.target in (operator.getitem, set_grad_enabled) or packet_of(node) in MOVES
            if node.op == "call_function" and not known:
                return f"it computes besides ({node.target})"
    results = [_result(forward, index) for index in read]
    if len(results) != 1 or any(n.args[1] != 0 for n in _needs(results[0]) & set(kernels[0].users)):
        return "its log-sum-exp is read"
    gradients = zip(forward.graph.find_nodes(op="placeholder"), backward.graph.output_node().args[0])
    moved = _needs(given["q"]) | _needs(given["k"]) | _needs(given["v"])
    if any(x in moved and gradient is None for x, gradient in gradients):
        return "it gives one of them no gradient"
    return None


def _result(body: GraphModule, index: int) -> Any:
    made = body.graph.output_node().args[0][0]  # torch 2.11 returns all values of the body, the results behind them
    return made[index] if isinstance(made, tuple | list) else made


def _needs(node: Node) -> set[Node]:
    """The node, and all that it is made of."""
    return closure([node], lambda one: one.all_input_nodes)
