"""What checkpointed regions keep: a selective policy is asked of each op while AOTAutograd traces it, as torch does."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch.fx.traceback
from torch._higher_order_ops.wrap import tag_activation_checkpoint, wrap_activation_checkpoint
from torch._prims.rng_prims import graphsafe_run_with_rng_state, run_with_rng_state
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

Policy = Callable[..., CheckpointPolicy | bool]
_POLICY, _SAVE_POLICIES = "checkpoint_policy", "keeps_attention"  # keys of meta["custom"], which tracers hand on
_POLICY_TAKES_OUTPUT = (
    "op_output" in inspect.signature(SelectiveCheckpointContext).parameters
)  # 2.13 does, 2.11 does not
RECOMPUTES_DRAWS = (run_with_rng_state, graphsafe_run_with_rng_state)
"""Random operators in the backward of a checkpoint: what they draw is what its forward drew."""
_CHECKPOINT_OPS = (tag_activation_checkpoint, wrap_activation_checkpoint)
SAVE_POLICY = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def policy_of(context_fn: Callable[[], Any]) -> Policy | None:
    """What `create_selective_checkpoint_contexts` was given, a list of ops as a function; None of other contexts."""
    forward, _ = context_fn()
    policy: Policy | None = getattr(forward, "policy_fn", None)
    return policy


def recompute_tags(region: int, policy: Policy | None) -> dict[str, Any]:
    """Meta of the nodes of a checkpointed region."""
    custom = {} if policy is None else {"custom": {_POLICY: policy}}
    return {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": region, **custom}


def checkpoint_of(node: Node) -> tuple[Any, str]:
    """The checkpoint that a node is in, or whose body it names, and the name of its policy; None if there is none."""
    if node.op == "get_attr":
        named = any(user.target in _CHECKPOINT_OPS for user in node.users)
        return (node, "") if named else (None, "")
    policy = node.meta.get("custom", {}).get(_POLICY)
    name = "" if policy is None else getattr(policy, "__qualname__", type(policy).__name__)
    return node.meta.get("ac_graph_id"), name


def is_in_checkpoint() -> bool:
    """Does what runs now run under a checkpoint, which will run it again in its backward?"""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == CheckpointPolicy.__module__


def run_once(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Run a graph of Dynamo's; what is checkpointed in it is kept, and not run again by a backward.

    torch refuses to run again what has written its inputs in place. A buffer is an input where Dynamo has traced it, so
    that is what a BatchNorm does in a checkpoint.
    """
    graph = gm.graph
    if not any(graph.find_nodes(op="call_function", target=target, sort=False) for target in _CHECKPOINT_OPS):
        return gm.forward(*inputs)
    return _RunOnce(gm).run(*inputs)


class _RunOnce(torch.fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return run_once(args[0], args[1:]) if target in _CHECKPOINT_OPS else super().call_function(target, args, kwargs)


def has_policy(node: Node) -> bool:
    """Is it of a region whose policy says what stays?"""
    return _POLICY in node.meta.get("custom", {})


def mark_saved(node: Node) -> None:
    """Mark an attention whose results stay, or what is traced of one."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _SAVE_POLICIES: True}


def is_saved(node: Node) -> bool:
    return bool(node.meta.get("custom", {}).get(_SAVE_POLICIES))


def mark_must_save(node: Node) -> None:
    """Have a partitioner keep the node's results; of several, those that a backward reads."""
    for one in (node, *(user for user in node.users if user.target is operator.getitem)):
        one.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def has_checkpoint_regions(gm: torch.fx.GraphModule) -> bool:
    """Is anything of it in a checkpointed region?"""
    return any("ac_graph_id" in node.meta for node in gm.graph.nodes)


@contextmanager
def apply_policies(attention: Sequence[Any], named: Sequence[Any]) -> Iterator[None]:
    """While AOTAutograd traces; its cache of compiled code knows graphs, and no policies."""
    import torch._functorch.config as functorch_config

    with functorch_config.patch(enable_autograd_cache=False), PolicyMode(attention, named):
        yield


class PolicyMode(TorchDispatchMode):
    """Tags what AOTAutograd traces of nodes that have a policy.

    Every op that a node's trace comes to is asked about before it is decomposed, and what is written for it into the
    joint graph takes the answer. attention: ops of ours that no policy knows. Where a policy saves one of `named`, for
    which they stand, or all but these, they are marked as `mark_saved` does.
    """

    supports_higher_order_operators = True  # a partitioner infers what draws again (DRAWS_AGAIN), still under this

    def __init__(self, attention: Sequence[Any], named: Sequence[Any]) -> None:
        super().__init__()
        self.attention, self.named = frozenset(attention), named

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        policy, proxies = torch.fx.traceback.current_meta.get("custom", {}).get(_POLICY), get_proxy_mode()
        backward = torch._C._current_autograd_node() is not None
        if policy is None or proxies is None or backward or func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        nodes = proxies.tracer.graph.nodes
        before = len(nodes)
        out = func(*args, **kwargs)
        answer = self._tag_node(policy, func, out, args, kwargs)
        for node in islice(reversed(nodes), len(nodes) - before):
            if func not in self.attention:
                node.meta["recompute"] = answer
            elif answer in SAVE_POLICY:
                mark_saved(node)
        if func in self.attention and answer in SAVE_POLICY:  # what merges its blocks is marked, too
            meta = torch.fx.traceback.current_meta
            meta["custom"] = {**meta["custom"], _SAVE_POLICIES: True}
        return out

    def _tag_node(self, policy: Policy, func: Any, out: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        """Of attention of ours: what is said of a kernel that it stands for, if that is not what is said of any op."""
        given = {"op_output": out} if _POLICY_TAKES_OUTPUT else {}
        answers = list[CheckpointPolicy]()
        for op in (func, *self.named) if func in self.attention else (func,):
            answer = policy(SelectiveCheckpointContext(is_recompute=False, **given), op, *args, **kwargs)
            if isinstance(answer, bool):
                answer = CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
            answers.append(answer)
        return next((answer for answer in answers if answer is not answers[0]), answers[0])
