"""Runs a graph of functional collectives on all ranks of a mesh at once, without processes: a list of values a node."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, map_arg

from sp_compile.passes.cost.known_groups import KnownGroups, Partition

c10d = torch.ops._c10d_functional


def run(gm: GraphModule, groups: KnownGroups, inputs: Sequence[Sequence[Tensor]]) -> list:
    """The results of the ranks; `inputs`: of each rank, its arguments. All groups have to hold all the ranks."""
    world = range(len(inputs))
    values: dict = {}
    arguments = iter(zip(*inputs))
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = [x.clone() for x in next(arguments)]
        elif node.op == "output":
            return [map_arg(node.args[0], lambda n, r=r: values[n][r]) for r in world]
        elif node.op == "get_attr":
            values[node] = [getattr(gm, node.target)] * len(inputs)
        else:
            args = [map_arg(node.args, lambda n, r=r: values[n][r]) for r in world]
            kwargs = [map_arg(node.kwargs, lambda n, r=r: values[n][r]) for r in world]
            if node.target in COLLECTIVES:
                values[node] = COLLECTIVES[node.target](groups[args[0][-1]], args)
            elif node.target is c10d.wait_tensor.default:
                values[node] = [a[0] for a in args]
            else:
                values[node] = [node.target(*a, **k) for a, k in zip(args, kwargs)]
    raise AssertionError("the graph returns nothing")


def _all_reduce(partition: Partition, args: list) -> list[Tensor]:
    return [_combined([args[m][0] for m in _group(partition, r)], a[1]) for r, a in enumerate(args)]


def _reduce_scatter(partition: Partition, args: list) -> list[Tensor]:
    out = []
    for rank, (_, op, size, _) in enumerate(args):
        group = _group(partition, rank)
        assert len(group) == size
        whole = _combined([args[m][0] for m in group], op)
        rows, odd = divmod(whole.shape[0], size)
        assert not odd
        out.append(whole.narrow(0, group.index(rank) * rows, rows).clone())
    return out


def _all_gather(partition: Partition, args: list) -> list[Tensor]:
    assert all(len(_group(partition, r)) == a[1] for r, a in enumerate(args))
    return [torch.cat([args[m][0] for m in _group(partition, r)]) for r in range(len(args))]


COLLECTIVES = {
    c10d.all_reduce.default: _all_reduce,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_gather_into_tensor.default: _all_gather,
}


def _group(partition: Partition, rank: int) -> tuple[int, ...]:
    (group,) = (g for g in partition if rank in g)
    return group


def _combined(xs: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(xs)
    if op == "product":
        return stacked.prod(0, dtype=stacked.dtype)
    total = {"sum": stacked.sum, "avg": stacked.sum, "max": stacked.amax, "min": stacked.amin}[op](0)
    return (total / len(xs) if op == "avg" else total).to(stacked.dtype)
