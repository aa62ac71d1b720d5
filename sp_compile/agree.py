"""Ranks agree before they run: the same graph and the same sizes everywhere, or every rank raises and none hangs.

One small all-gather a call, in front of the compiled graph. A rank that could not compile takes part as well, so that
its error reaches the others instead of leaving them in a collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from .errors import SpError, Told
from .mesh import Ranks

SMALL = 64  # values of a constant that are compared
SHOWN = 8  # inputs that differ between the ranks, in an error message


def fingerprint(gm: GraphModule) -> int:
    """63 bits of a graph's text: targets, arguments, dtypes, local shapes, bodies of region ops, small constants."""
    lines = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if _is_unused_symbol(node):
            continue
        kind = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        args = _without_names(node)
        lines.append(f"{node.op} {node.name} {_name(node.target)} {args} {node.kwargs} {kind}")
        if node.op == "get_attr":
            lines.append(_attribute(gm, str(node.target)))
    return _hash("\n".join(lines))


def _without_names(node: Node) -> tuple[Any, ...]:
    """The arguments; of a user's collective without the names of groups, which ranks call as they like."""
    if getattr(node.target, "namespace", "") == "_c10d_functional":
        return tuple(a for a in node.args if not isinstance(a, str))
    if node.target is torch.ops.sp.reduce_pair.default:
        return node.args[0], *([one.partition(" ")[0] for one in way] for way in node.args[1:])
    return node.args


def _attribute(gm: GraphModule, name: str) -> str:
    """The body of a region op, or the values of a constant of the program; parameters are known by their shape."""
    value: Any = gm
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, GraphModule):
        return str(fingerprint(value))
    constant = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return str(value.tolist()) if constant and value.numel() <= SMALL else ""


def input_names(gm: GraphModule) -> list[str]:
    """Names of the inputs; "" for a symbol that only describes memory (strides, offsets): ranks need not share it."""
    return ["" if _is_unused_symbol(n) else n.name for n in gm.graph.find_nodes(op="placeholder")]


def _is_unused_symbol(node: Node) -> bool:
    value = node.meta.get("val", node.meta.get("example_value"))
    return node.op == "placeholder" and not node.users and isinstance(value, torch.SymInt)


def _name(target: Any) -> str:
    """A target without its address, which differs from process to process."""
    return getattr(target, "__qualname__", str(target))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


RUNS, FAILED, COMPILES = range(3)  # what a rank is about to do: the first of the words that ranks exchange


def exchange_words(ranks: Ranks, words: Sequence[int]) -> list[list[int]]:
    """Every rank's five words. The only first exchange there is, so that whatever ranks are about to do, they meet."""
    group = ranks.process_group
    on_cpu = "gloo" in str(dist.get_backend(group)) or not torch.cuda.is_available()
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    sent = torch.tensor(words, dtype=torch.int64, device=device)
    received = [torch.empty_like(sent) for _ in range(ranks.n)]
    dist.all_gather(received, sent, group=group)
    return [words.tolist() for words in received]


def compiling_alone(everyone: Sequence[Sequence[int]]) -> str:
    """Some ranks compile the program for this call, the others have compiled it before."""
    alone = [r for r, words in enumerate(everyone) if words[0] == COMPILES]
    return (
        f"rank {', '.join(map(str, alone))} of {len(everyone)} compiles the program anew for this call and the others "
        "do not: every rank of a group that a program exchanges over has to call it with the same sizes and numbers. "
        "Pad what has another size; pass a number that changes as a tensor; TORCH_LOGS=recompiles says why it compiles"
    )


class Agreed:
    """Calls `run` once all ranks have shown the same fingerprint and the same input sizes.

    run: the compiled graph, or None with `error` where this rank could not compile; names: as `input_names` gives them.
    equal: the inputs whose values must be the same on every rank; compared on the first call, as checksums. always: of
    those, the ones that are compared on every call.
    Raises SpError on every rank if a rank failed, compiled another graph, compiles one now while others run theirs, or
    was given other sizes or values.
    """

    def __init__(
        self,
        run: Callable[..., Any] | None,
        ranks: Ranks,
        graph: int,
        names: Sequence[str],
        error: Exception | None = None,
        equal: Collection[str] = (),
        always: Collection[str] = (),
    ) -> None:
        self.run, self.ranks, self.graph, self.names, self.error = run, ranks, graph, names, error
        self.equal, self.always = frozenset(equal), frozenset(always)
        self.first = True

    def __call__(self, *args: Any) -> Any:
        if self.ranks.n > 1:
            self._agree(args)
        if self.error is not None:
            raise self.error
        assert self.run is not None
        return self.run(*args)

    def _agree(self, args: Sequence[Any]) -> None:
        given = {name: _size(a) for name, a in zip(self.names, args) if name}
        words = [
            FAILED if self.error is not None else RUNS,
            self.graph,
            _hash(" ".join(given.values())),
            0,
            0,
        ]
        if self.error is None:
            values = {name: checksum(a) for name, a in zip(self.names, args) if self._compares(name)}
            words[3] = _hash(" ".join(v for name, v in values.items() if name in self.always))
            if self.first:  # a rank whose call is not its first says nothing of the others
                words[4] = _hash(" ".join(values.values()))
            given.update(
                {name: f"{given[name]} with checksum {value}" for name, value in values.items() if value}
            )
        self.first = False
        everyone = exchange_words(self.ranks, words)
        if any(theirs[0] == COMPILES for theirs in everyone):
            raise SpError(compiling_alone(everyone))
        alike = len({theirs[4] for theirs in everyone if theirs[4]}) <= 1
        if alike and all(theirs[:4] == everyone[0][:4] for theirs in everyone) and everyone[0][0] == RUNS:
            return
        raise SpError(self._disagreement(everyone, given)) from self.error

    def _compares(self, name: str) -> bool:
        return name in self.always or (self.first and name in self.equal)

    def _disagreement(self, everyone: list[list[int]], given: Mapping[str, str]) -> str:
        """Every rank is here, so a second exchange, of words this time, is safe."""
        told: list[Any] = [None] * self.ranks.n
        mine = (_words(self.error), given)
        dist.all_gather_object(told, mine, group=self.ranks.process_group)
        if isinstance(self.error, Told) and not any(error for error, _ in told):
            return str(self.error)
        failed = {error: [r for r, (e, _) in enumerate(told) if e == error] for error, _ in told if error}
        if failed:
            each = [f"rank {', '.join(map(str, ranks))}: {error}" for error, ranks in failed.items()]
            return "the model could not be compiled on " + "\n".join(each)
        inputs = [one for _, one in told]
        names = [name for name in {**inputs[0], **inputs[-1]} if len({one.get(name) for one in inputs}) > 1]
        names.sort(key=lambda name: "(" not in inputs[0].get(name, "("))  # tensors before symbols
        rows = [", ".join(f"{name} {one.get(name, 'missing')}" for name in names[:SHOWN]) for one in inputs]
        per_rank = [f"  rank {r}: {row or 'the same inputs as the others'}" for r, row in enumerate(rows)]
        same_names = all(one.keys() == inputs[0].keys() for one in inputs)
        resized = same_names and any(w[2] != everyone[0][2] for w in everyone)
        revalued = same_names and all(w[1] == everyone[0][1] for w in everyone)
        what = (
            "inputs of different sizes"
            if resized
            else "different values"
            if revalued
            else "different programs"
        )
        return (
            f"the {self.ranks.n} ranks of this sequence-parallel group were given {what}; every rank has to call the "
            "same model, with the same weights, on the same arguments. What differs:\n" + "\n".join(per_rank)
        )


def _size(a: Any) -> str:
    """The shape of a tensor; the value of a number (Dynamo passes a Python float as a tensor of no dims)."""
    if isinstance(a, torch.Tensor) and a.ndim == 0 and a.device.type == "cpu":
        return str(a.item())
    return str(tuple(a.shape)) if isinstance(a, torch.Tensor) else str(a)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(a: Any) -> str:
    """A checksum of a tensor's bits and of their order: integer arithmetic, so exact whatever the order of summing."""
    if not isinstance(a, torch.Tensor) or a.numel() == 0 or a.ndim == 0:
        return ""
    plain = (torch.view_as_real(a.detach()) if a.is_complex() else a.detach()).contiguous().reshape(-1)
    bits = plain.view(_BITS[plain.element_size()]).long()
    return str((bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum().item())


def _words(error: Exception | None) -> str:
    if isinstance(error, Told):
        return ""  # the rank that failed says it
    if error is None or isinstance(error, SpError):
        return str(error or "")
    return f"{type(error).__name__}: {error}"
