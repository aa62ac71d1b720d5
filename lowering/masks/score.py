"""Register, run and differentiate score functions, which modify attention scores before the softmax.

    def forward(self, s, q, k, head0):            ALiBi: head0 is a slope per query head
        sub = torch.ops.aten.sub.Tensor(k, q)
        mul = torch.ops.aten.mul.Tensor(head0, sub)
        return torch.ops.aten.add.Tensor(s, mul)

A score function is a graph. Operators take its name, a digest of its code; "" does not change scores. The names of its
inputs are their values: ``s``, the score; ``b``, ``q`` and ``k``, the indices of the batch entry, the query and the
key; ``head<i>``, ``row<i>`` and ``col<i>``, a vector's value at the query head, the query and the key; ``table<i>``, a
tensor that is indexed by any of these, or one number. Values are elements of all pairs at once, or of one pair; every
operation is pointwise or indexes a table, and rounds as on a single device.

Results may be fills, large and finite in place of -inf (`sharding/attention_axes.py`). The log-sum-exp of a row of
fills does not encode the number of its keys, so each row of such a function is computed with all keys at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from sp_compile.lowering.base.registry import ProgramTable, graph_code
from sp_compile.lowering.torch_compat import enable_autograd

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class ScoreFunction:
    """A modification of scores, as a graph of pointwise operations and table lookups."""

    graph: GraphModule  # graph from the named inputs to the modified score
    fills: bool  # whether results may be fills


SCORES: ProgramTable[ScoreFunction] = ProgramTable("score functions")  # score functions by name


def register_score(graph: Graph, fills: bool = False, names: Mapping[str, str] = {}) -> str:
    """Register a copy of the graph as a score function, and return its name, a digest of its code.

    Args:
        graph: Graph from the named inputs to the modified score.
        fills: Whether results may be fills, large finite scores in place of -inf.
        names: New names of inputs, by their names in the graph.
    """
    graph.eliminate_dead_code()
    fresh, copies = Graph(), dict[Node, Node]()
    # Inputs first, since some may be in the middle of the graph; without those that have no user.
    for node in sorted(graph.nodes, key=lambda node: node.op != "placeholder"):
        if node.op != "placeholder":
            copies[node] = fresh.node_copy(node, copies.__getitem__)
        elif node.users:
            copies[node] = fresh.placeholder(names.get(node.target, node.target))
    module = GraphModule(torch.nn.Module(), fresh)
    return SCORES.register((graph_code(module), fills), lambda name: ScoreFunction(module, fills))


def score_symbols(name: str) -> frozenset[str]:
    """Return the names of a score function's inputs, except the score "s"; empty for "", no function."""
    return frozenset(str(node.target) for node in _score_inputs(name)) - {"s"} if name else frozenset()


def _score_inputs(name: str) -> list[Node]:
    """Return the placeholders of a score function, whose targets are the names of its inputs."""
    return SCORES[name].graph.graph.find_nodes(op="placeholder")


def may_have_fills(name: str) -> bool:
    """Return True if results of the score function may be fills: large finite scores in place of -inf.

    All keys of a query must then be computed at once, as the log-sum-exp of fills does not contain their number.
    """
    return bool(name) and SCORES[name].fills


def num_saved_tensors(name: str) -> int:
    """Estimate the number of tensors of the size of the scores that the backward of a score function needs at a time.

    Attention computes fewer queries at a time by this factor, which is 1 without a score function. About one operation
    in four saves a tensor; casts save none.
    """
    if not name:
        return 1
    calls = [node for node in SCORES[name].graph.graph.nodes if node.op == "call_function"]
    return max(1, sum(node.target is not aten.type_as.default for node in calls) // 4)


def rename_score(name: str, names: Mapping[str, str]) -> str:
    """Register the same score function with renamed inputs, and return its name.

    In a balanced layout, for example, the input ``q`` becomes ``row0``, a vector of the positions of reordered rows.
    """
    if names.keys().isdisjoint(score_symbols(name)):
        return name
    return register_score(SCORES[name].graph.graph, SCORES[name].fills, names)


class _ScoreInterpreter(Interpreter):
    """Interpreter of a score function for scores of one shape."""

    def __init__(self, name: str, score: Tensor, replacements: Mapping[Any, Callable[..., Any]]) -> None:
        """Interpret the score function `name` for these scores; `replacements` run in place of operators."""
        super().__init__(SCORES[name].graph)
        self.score, self.replacements = score, replacements

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, or the function that replaces it.

        A constant (aten.full) is created on the device of the scores with their number of dims: it then broadcasts, and
        promotes dtypes as any tensor with dims does.
        """
        if target is aten.full.default:
            fill_value = args[1]
            return torch.full((1,) * self.score.ndim, fill_value, dtype=kwargs["dtype"], device=self.score.device)
        return self.replacements.get(target, target)(*args, **kwargs)


def evaluate_score(
    name: str, score: Tensor, values: Mapping[str, Tensor], replacements: Mapping[Any, Callable[..., Any]] = {}
) -> Tensor:
    """Run a score function on the scores of all pairs of a block.

    Args:
        name: The score function.
        score: The scaled scores, any floating dtype.
        values: Values of the other inputs, which broadcast to the scores.
        replacements: Functions that run in place of operators.

    Returns:
        The modified scores, in the dtype and shape of ``score``.

    Raises:
        SpError: This process has not registered the function.
    """
    # For one pair, all values are 0-dim and promote each other's dtype. A 0-dim tensor would not promote a tensor of
    # all scores, so give it the number of dims of the scores.
    inputs = {key: x if x.ndim else x.reshape((1,) * score.ndim) for key, x in values.items()} | {"s": score}
    operands = [inputs[str(node.target)] for node in _score_inputs(name)]
    modified: Tensor = _ScoreInterpreter(name, score, replacements).run(*operands)
    return modified.to(score.dtype).expand(score.shape)


class _Lookup(NamedTuple):
    """One indexing of a table by a score function; its gradient is added at these indices."""

    table: str  # name of the table
    indices: list[Tensor]  # one for each dim of the table
    result: Tensor  # the elements, a leaf of the autograd graph


def score_vjp(
    name: str, score: Tensor, values: Mapping[str, Tensor], grad: Tensor, totals: Mapping[str, Tensor]
) -> Tensor:
    """Return the gradient of the scaled scores, and add the gradients of tables to ``totals``.

    The result of each lookup `table[indices]` is a leaf of the autograd graph, whose gradient is added to the elements
    at these indices. Autograd's own backward would create a tensor of the size of the table for each block.

    Args:
        name: The score function.
        score: The scaled scores, any floating dtype.
        values: Values of the other inputs.
        grad: The gradient of the modified scores.
        totals: Tensors to which the gradients of tables are added, by name.
    """
    lookups: list[_Lookup] = []
    with enable_autograd():
        leaves = {table: values[table].detach().requires_grad_() for table in totals}
        table_names = {id(x): table for table, x in leaves.items()}

        def record_lookup(table: Tensor, indices: list[Tensor]) -> Tensor:
            """Look up a table, and record the lookup if the table needs a gradient."""
            result = aten.index.Tensor(table.detach(), indices)
            if id(table) in table_names:
                lookups.append(_Lookup(table_names[id(table)], indices, result.requires_grad_()))
            return result

        scaled = score.detach().requires_grad_()
        out = evaluate_score(name, scaled, {**values, **leaves}, {aten.index.Tensor: record_lookup})
        if not out.requires_grad:
            return torch.zeros_like(score)
        # Tables themselves are leaves, too, as a function may read one without indices.
        inputs = [scaled, *(lookup.result for lookup in lookups), *leaves.values()]
        # None for an input on which the result does not depend, such as a table that is only looked up.
        score_grad, *grads = torch.autograd.grad(out, inputs, grad, allow_unused=True)
    for lookup, lookup_grad in zip(lookups, grads):
        if lookup_grad is not None:
            total = totals[lookup.table]
            total.index_put_(lookup.indices, lookup_grad.to(total.dtype), accumulate=True)
    for table, table_grad in zip(leaves, grads[len(lookups) :]):
        if table_grad is not None:
            totals[table].add_(table_grad)
    return torch.zeros_like(score) if score_grad is None else score_grad
