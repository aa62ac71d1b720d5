"""Python's numbers in a program that exchanges by itself: ranks may have others, but not where all had the same before.

`ids - 12` on one rank is `ids - 24` on the next, and slopes of a rank's heads are its own: from the first compilation
on. A scale, a rate or a size that a schedule changes on some ranks only was the same until then.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile._compat import pytree
from sp_compile.config import Ranks
from sp_compile.errors import SpError, at

from .agree import SHOWN, answers, what_differs
from .fingerprint import subject_of, unlike
from .inputs import InputDigests
from .wire import wire_of

OTHER_NUMBERS = (
    "the ranks of this group compile this program anew with different numbers of Python's, which were the same on all "
    "of them before"
)
SAME_NUMBERS = (
    "every rank changes a number of the model alike: look for a schedule or a setting under `if rank == 0`. Numbers "
    "that are meant to differ do so from the first call on, or are tensors"
)


@dataclass
class Known:
    """What ranks know of the programs that they have compiled, each by its name and model.

    written: by the shape of the graph, too: were the numbers written in it the same on all of them every time?
    varied: the types of those that were not; of a program that was not compiled yet there is no entry.
    """

    written: dict[tuple[str, int, int], bool] = field(default_factory=dict)
    varied: defaultdict[tuple[str, int], set[type]] = field(default_factory=lambda: defaultdict(set))


_known: weakref.WeakKeyDictionary[Any, Known] = weakref.WeakKeyDictionary()


def check_numbers(
    ranks: Ranks, gm: GraphModule, inputs: Sequence[Any], mine: InputDigests, everyone: Sequence[InputDigests | None]
) -> None:
    """Raises SpError, on every rank, where ranks have changed a number of Python's since the program was compiled last.

    Where they are given other sizes numbers may come of these, and nothing is said; nor of another graph, unless a
    number became an input of it, as Dynamo makes those that change: it was written in the graph before.
    """
    wire, all_of = wire_of(ranks), [one for one in everyone if one is not None]
    forms = {(one.text.shape, one.cut, *one.numbers) for one in all_of}
    if wire is None or len(all_of) < len(everyone) or len(forms) > 1:
        return
    program = subject_of(gm), wire.model([x for x in inputs if isinstance(x, torch.nn.Parameter)])
    seen, shape = _known.setdefault(wire, Known()), (*program, mine.text.shape)
    given = {name: x for name, x in mine.numbers.items() if any(one.numbers[name] != x for one in all_of)}
    differ = unlike(gm, [one.text for one in all_of]) or frozenset()
    nodes = [node for node in gm.graph.nodes if node.name in differ]
    problems = [
        f"{name} {x}" for name, x in given.items() if program in seen.varied and type(x) not in seen.varied[program]
    ]
    if seen.written.get(shape):
        problems += [f"{', '.join(map(repr, _numbers(node)))} at {at(node)}" for node in nodes]
    if problems:
        rows = answers(ranks, "compares", "numbers", "; ".join(problems[:SHOWN]))
        raise SpError(what_differs(OTHER_NUMBERS, SAME_NUMBERS, rows))
    seen.written[shape] = seen.written.get(shape, True) and not nodes
    seen.varied[program].update(map(type, [*given.values(), *(x for node in nodes for x in _numbers(node))]))


def _numbers(node: Node) -> list[int | float]:
    return [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, (int, float))]
