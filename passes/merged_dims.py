"""Dims that are merged behind an exchange are merged before it.

all_to_all_permute(x [b, S, h, d], 1, 2).flatten(2)   ->   all_to_all_permute(x.flatten(2), 1, 2)

What arrives are n blocks of the dims that are gathered, [n, h * d, b * s]: transposed, the operand of a matmul. With h
and d apart they are [n, h, b, s, d], where n * h * d positions have no common stride, so that flatten copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from ..index_map import IndexMap
from ..shapes import product, same, sizes
from .exchanges import downstream, private
from .moves import Mover, value_of

if TYPE_CHECKING:
    from .permute_all_to_all import PermuteAllToAll

aten, sp = torch.ops.aten, torch.ops.sp
PERMUTE = sp.all_to_all_permute.default


def merge_first(rewrite: PermuteAllToAll, node: Node) -> bool:
    """Rewrite what follows one all_to_all_permute; whether that was done."""
    results = downstream(node)
    for result in results[::-1]:
        chain = private(node, result, results)
        returned = any(user.op == "output" for user in result.users)  # in its old layout, whatever that costs
        groups = _groups(node, result) if chain is not None and not returned else None
        if groups is not None and chain is not None and _rewritten(rewrite, node, result, groups):
            rewrite.erase_chain(frozenset(chain))
            return True
    return False


def _groups(node: Node, result: Node) -> list[list[int]] | None:
    """Which dims of the exchange's result are each dim of what is made of it, if gathered ones lead a merged dim."""
    index = IndexMap()
    given = index.tensor(sizes(value_of(node).shape))
    made = Mover(index, {node: given}).tensor(result)
    if made is None or made.fixed:
        return None
    whole = [index.resolve(dim) for dim in given.dims]
    place = {atoms[0]: d for d, atoms in enumerate(whole) if len(atoms) == 1}
    groups = [[place.get(atom, -1) for atom in index.resolve(dim)] for dim in made.dims]
    scatter, gather = (d % len(whole) for d in node.args[1:3])
    leads = {group[0] for group in groups if group}
    merged = any(group[0] == gather and len(group) > 1 for group in groups if group)
    complete = all(groups) and sorted(d for group in groups for d in group) == list(range(len(whole)))
    return groups if complete and merged and scatter in leads else None


def _rewritten(rewrite: PermuteAllToAll, node: Node, result: Node, groups: list[list[int]]) -> bool:
    x, scatter, gather, n, group = node.args
    shape, order = sizes(value_of(x).shape), [d for dims in groups for d in dims]
    if all(same(size, 1) for size in shape[: scatter % len(shape)]):
        return False  # x is sent as it lies, and copied on its arrival
    leads = [dims[0] for dims in groups]
    merged = [product(shape[d] for d in dims) for dims in groups]
    with rewrite.graph.inserting_before(node):
        try:
            if order != sorted(order):
                x = rewrite.compute(aten.permute.default, (x, order), node)
            x = rewrite.compute(aten.view.default, (x, rewrite.sizes.list(merged)), node)
        except (RuntimeError, ValueError):  # x would have to be copied for that
            rewrite.drop(x)
            return False
        dims = [leads.index(d % len(shape)) for d in (scatter, gather)]
        fresh = rewrite.compute(PERMUTE, (x, *dims, n, group), result)
    result.replace_all_uses_with(fresh)
    return True
