"""Ranks agree before they run: the same graph and the same sizes everywhere, or every rank raises and none hangs.

One small all-gather a call, in front of the compiled graph. A rank that could not compile takes part as well, so that
its error reaches the others instead of leaving them in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from sp_compile.config import Ranks
from sp_compile.errors import RemoteError, SpError, trace_of
from sp_compile.lowering.collectives.checksums import checksum

from .check_call import gather_objects, hashed
from .fingerprint import Program, TextLine, names_group

SMALL = 64  # values of a constant that are compared
SHOWN = 8  # inputs that differ between the ranks, in an error message


def fingerprint(gm: GraphModule) -> Program:
    """A graph's text: targets, arguments, dtypes, local shapes, bodies of region ops, small constants."""
    texts, lines = [], []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if _is_unused_symbol(node):
            continue
        kind = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        target = getattr(node.target, "__qualname__", str(node.target))  # an address differs from process to process
        text = f"{node.op} {node.name} {target} {_without_names(node)} {node.kwargs} {kind}"
        if node.op == "get_attr":
            text = f"{text}\n{_attribute(gm, str(node.target))}"
        texts.append(text)
        if node.op != "placeholder":  # of inputs that differ the ranks tell more
            lines.append(TextLine(text, text.partition(" ")[2], trace_of(node)))
    return Program(hashed("\n".join(texts)), tuple(lines))


def _without_names(node: Node) -> tuple[Any, ...]:
    """The arguments; of a user's collective without the names of groups, which ranks call as they like."""
    if getattr(node.target, "namespace", "") == "_c10d_functional":
        return tuple(a for a in node.args if not names_group(a))
    if node.target is torch.ops.sp.reduce_pair.default:
        return node.args[0], *([one.partition(" ")[0] for one in way] for way in node.args[1:])
    return node.args


def _attribute(gm: GraphModule, name: str) -> str:
    """The body of a region op, or the values of a constant of the program; parameters are known by their shape."""
    value = attrgetter(name)(gm)
    if isinstance(value, GraphModule):
        return str(fingerprint(value).digest)
    constant = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return str(value.tolist()) if constant and value.numel() <= SMALL else ""


def input_names(gm: GraphModule) -> list[str]:
    """Names of the inputs; "" for a symbol that only describes memory (strides, offsets): ranks need not share it."""
    return ["" if _is_unused_symbol(n) else n.name for n in gm.graph.find_nodes(op="placeholder")]


def _is_unused_symbol(node: Node) -> bool:
    value = node.meta.get("val", node.meta.get("example_value"))
    return node.op == "placeholder" and not node.users and isinstance(value, torch.SymInt)


RUNS, FAILED, COMPILES, STOPPED = range(4)  # what a rank is about to do: the first of the words that ranks exchange


def exchange_words(ranks: Ranks, words: Sequence[int]) -> list[list[int]]:
    """Every rank's five words. The only first exchange there is, so that whatever ranks are about to do, they meet."""
    group = ranks.process_group
    on_cpu = "gloo" in str(dist.get_backend(group)) or not torch.cuda.is_available()
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    sent = torch.tensor(words, dtype=torch.int64, device=device)
    received = [torch.empty_like(sent) for _ in range(ranks.n)]
    dist.all_gather(received, sent, group=group)
    return [words.tolist() for words in received]


def stop(ranks: Ranks) -> None:
    """Tell a group, in place of whatever it waits for, that this rank has met an error among others."""
    if ranks.n > 1:
        exchange_words(ranks, [STOPPED, 0, 0, 0, 0])


def of_two_minds(everyone: Sequence[Sequence[int]]) -> str:
    """Some ranks compile the program for this call and the others have compiled it before, or some have stopped."""
    stopped = [r for r, words in enumerate(everyone) if words[0] == STOPPED]
    if stopped:
        return (
            f"rank {', '.join(map(str, stopped))} of {len(everyone)} does not take part in this call: ranks of another "
            "of its groups disagree, and its own error says on what"
        )
    alone = [r for r, words in enumerate(everyone) if words[0] == COMPILES]
    return (
        f"rank {', '.join(map(str, alone))} of {len(everyone)} compiles the program anew for this call and the others "
        "do not: every rank of a group that a program exchanges over has to call it with the same sizes and numbers. "
        "Pad what has another size; pass a number that changes as a tensor; TORCH_LOGS=recompiles says why it compiles"
    )


@dataclass(eq=False)
class CheckedProgram:
    """Calls `run` once all ranks have shown the same fingerprint and the same input sizes.

    run: the compiled graph, or None with `error` where this rank could not compile. program: what has to be the same.
    names: as `input_names` gives them.
    equal: the inputs whose values must be the same on every rank; compared on the first call, as checksums. always: of
    those, the ones that are compared on every call.
    Raises SpError on every rank if a rank failed, compiled another graph, compiles one now while others run theirs, or
    was given other sizes or values.
    """

    run: Callable[..., Any] | None
    ranks: Ranks
    program: Program
    names: Sequence[str]
    error: Exception | None = None
    equal: frozenset[str] = frozenset()
    always: frozenset[str] = frozenset()
    first: bool = True

    def __call__(self, *args: Any) -> Any:
        if self.ranks.n > 1:
            self._agree(args)
        if self.error is not None:
            raise self.error
        assert self.run is not None
        return self.run(*args)

    def _agree(self, args: Sequence[Any]) -> None:
        given = {name: _size(a) for name, a in zip(self.names, args) if name}
        words = [RUNS if self.error is None else FAILED, self.program.digest, hashed(" ".join(given.values())), 0, 0]
        if self.error is None:
            compared = self.always | self.equal if self.first else self.always
            values = {name: checksum(a) for name, a in zip(self.names, args) if name in compared}
            words[3] = hashed(" ".join(v for name, v in values.items() if name in self.always))
            if self.first:  # a rank whose call is not its first says nothing of the others
                words[4] = hashed(" ".join(values.values()))
            given.update({name: f"{given[name]} with checksum {value}" for name, value in values.items() if value})
        self.first = False
        everyone = exchange_words(self.ranks, words)
        if any(theirs[0] in (COMPILES, STOPPED) for theirs in everyone):
            error = SpError(of_two_minds(everyone))
        elif not _agree_on(everyone):
            error = SpError(self._disagreement(everyone, given))
        else:
            return
        inner = self.run  # the groups that would be asked next hear of it: their other ranks are on their way
        while isinstance(inner, CheckedProgram):
            stop(inner.ranks)
            inner = inner.run
        raise error from self.error

    def _disagreement(self, everyone: list[list[int]], given: Mapping[str, str]) -> str:
        """Every rank is here, so more exchanges, of words this time, are safe."""
        told: list[tuple[str, dict[str, str]]] = gather_objects((_words(self.error), given), self.ranks.process_group)
        if isinstance(self.error, RemoteError) and not any(error for error, _ in told):
            return str(self.error)
        failed = failures([error for error, _ in told], range(self.ranks.n))
        if failed:
            return failed
        lines: list[str] = []
        if len({words[1] for words in everyone}) > 1:
            lines = self.program.first_difference(self.ranks)
        return explained(everyone, [one for _, one in told], lines)


def _agree_on(everyone: Sequence[Sequence[int]]) -> bool:
    alike = len({words[4] for words in everyone if words[4]}) <= 1
    return alike and all(words[:4] == everyone[0][:4] for words in everyone) and everyone[0][0] == RUNS


LATER = (
    "\nThey were equal when the program was compiled, and ranks that hold the same then share work. If they are meant "
    "to differ, compile it with values that do, or with sequence_parallel_linear='never'"
)


def explained(everyone: Sequence[Sequence[int]], inputs: Sequence[Mapping[str, str]], lines: Sequence[str]) -> str:
    """What is not the same on all ranks, in words. inputs: every rank's; lines: where their programs differ."""
    first = inputs[0]
    names = [name for name in {**first, **inputs[-1]} if len({one.get(name) for one in inputs}) > 1]
    names.sort(key=lambda name: "(" not in first.get(name, "("))  # tensors before symbols
    rows = [", ".join(f"{name} {one.get(name, 'missing')}" for name in names[:SHOWN]) for one in inputs]
    what, differs = "different programs", "What differs"
    if all(one.keys() == first.keys() for one in inputs):
        if any(words[2] != everyone[0][2] for words in everyone):
            numbers = bool(names) and "(" not in first[names[0]]
            what = "different numbers" if numbers else "inputs of different sizes"
        elif all(words[1] == everyone[0][1] for words in everyone):
            what = "different values"
        elif lines:
            differs = "What differs first"
            rows = [line + (f"; {row}" if row else "") for line, row in zip(lines, rows)]
    per_rank = [f"  rank {r}: {row or 'the same inputs as the others'}" for r, row in enumerate(rows)]
    later = what == "different values" and any(words[3] != everyone[0][3] for words in everyone)
    return (
        f"the {len(inputs)} ranks of this group were given {what}; every rank has to call the same model, with the "
        f"same weights, on the same arguments. {differs}:\n" + "\n".join(per_rank) + (LATER if later else "")
    )


def _size(a: Any) -> str:
    """The shape of a tensor; the value of a number (Dynamo passes a Python float as a tensor of no dims)."""
    if isinstance(a, torch.Tensor) and a.ndim == 0 and a.device.type == "cpu":
        return str(a.item())
    return str(tuple(a.shape)) if isinstance(a, torch.Tensor) else str(a)


def failures(errors: Sequence[str | None], ranks: Sequence[int]) -> str:
    """What failed, and on which of the ranks; "" if nothing did."""
    failed = {error: [str(r) for r, e in zip(ranks, errors) if e == error] for error in errors if error}
    each = "\n".join(f"rank {', '.join(who)}: {error}" for error, who in failed.items())
    return f"the model could not be compiled on {each}" if failed else ""


def _words(error: Exception | None) -> str:
    if isinstance(error, RemoteError):
        return ""  # the rank that failed says it
    if error is None or isinstance(error, SpError):
        return str(error or "")
    return f"{type(error).__name__}: {error}"
