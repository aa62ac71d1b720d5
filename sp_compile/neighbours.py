"""What one process group of a program decides, its ranks' neighbours over the other groups have to decide as well.

Tensor-parallel groups of one grid look at values of their own. Where one scatters a layer and the next does not, what
both exchange over a third group, as data-parallel ranks do, would have two sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from .alike import is_exchange
from .call import is_tensor
from .lockstep import Lockstep
from .mesh import Ranks
from .shapes import same, sizes
from .weights import named_groups


def rounds(groups: Sequence[Ranks], question: str) -> list[tuple[Ranks, str]]:
    """What `connected` asks, in order; of a single group nothing."""
    if len(groups) == 1:
        return []
    return [(ranks, f"{question}.{i}") for i in range(len(groups)) for ranks in groups]


def connected(talk: Lockstep, groups: Sequence[Ranks], question: str, said: Sequence[str]) -> bool:
    """Do all ranks that any of the groups connect say the same over each group? They all get the same answer.

    said: by this rank over each of the groups. What one group finds its neighbours hear, and theirs: hence the rounds.
    """
    alike, words = True, dict(zip(groups, said))
    for ranks, one in rounds(groups, question):
        answers = talk.ask(ranks, one, (alike, words[ranks]))
        alike = all(answer == (True, words[ranks]) for answer in answers)
    return alike


def cut_exchanges(gm: GraphModule, local: GraphModule, group: str) -> str:
    """Which dims of what goes over a group have another size in `local`; the sizes where these are other exchanges."""
    before, after = (_operands(graph_module, group) for graph_module in (gm, local))
    if [list(map(len, one)) for one in before] != [list(map(len, one)) for one in after]:
        return str(after)
    pairs = [pair for old, new in zip(before, after) for pair in zip(old, new)]
    return str([[i for i, (a, b) in enumerate(zip(*pair)) if not same(a, b)] for pair in pairs])


def _operands(gm: GraphModule, group: str) -> list[list[tuple[Any, ...]]]:
    """The shapes of what each exchange over the group sends."""
    found = [node for node in gm.graph.nodes if is_exchange(node) and group in named_groups(node)]
    return [
        [tuple(sizes(x.meta["val"].shape)) for x in node.all_input_nodes if is_tensor(x)] for node in found
    ]
