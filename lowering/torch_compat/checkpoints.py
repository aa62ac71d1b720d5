"""Apply selective checkpoint policies to each op that AOTAutograd traces, as torch does in eager mode."""

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
_POLICY, _SAVE_POLICIES = "checkpoint_policy", "keeps_attention"  # keys of meta["custom"], which tracers propagate
# torch 2.13 passes the output to policies, 2.11 does not.
_POLICY_TAKES_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters
RECOMPUTES_DRAWS = (run_with_rng_state, graphsafe_run_with_rng_state)
"""Random operators in the backward of a checkpoint, which repeat the draws of its forward."""
# Ops of checkpointed regions in Dynamo's graphs.
_CHECKPOINT_OPS = (tag_activation_checkpoint, wrap_activation_checkpoint)
SAVE_POLICY = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)  # answers of a policy that save a value


def policy_of(context_fn: Callable[[], Any]) -> Policy | None:
    """Return the policy of `create_selective_checkpoint_contexts`, or None for other contexts.

    A list of ops is returned as a function.
    """
    forward, _ = context_fn()
    policy: Policy | None = getattr(forward, "policy_fn", None)
    return policy


def recompute_tags(region: int, policy: Policy | None) -> dict[str, Any]:
    """Return the meta of the nodes of a checkpointed region.

    Args:
        region: Number of the region.
        policy: Its policy, if any.
    """
    custom = {} if policy is None else {"custom": {_POLICY: policy}}
    return {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": region, **custom}


def checkpoint_of(node: Node) -> tuple[Any, str]:
    """Return the checkpoint that contains a node, or whose body it is, and the name of its policy.

    The checkpoint is None outside of all checkpoints, and the name is "" without a policy.
    """
    if node.op == "get_attr":
        is_region_name = any(user.target in _CHECKPOINT_OPS for user in node.users)
        return (node, "") if is_region_name else (None, "")
    policy = node.meta.get("custom", {}).get(_POLICY)
    name = "" if policy is None else getattr(policy, "__qualname__", type(policy).__name__)
    return node.meta.get("ac_graph_id"), name


def is_in_checkpoint() -> bool:
    """Return True if the running code is checkpointed, so that its backward will run it again."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == CheckpointPolicy.__module__


def run_once(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Run a Dynamo graph without recomputation of its checkpointed regions.

    torch raises when it recomputes a region that has modified its inputs in place. Buffers are inputs of graphs that
    Dynamo traces, so that a BatchNorm in a checkpoint modifies one.
    """
    graph = gm.graph
    if not any(graph.find_nodes(op="call_function", target=target, sort=False) for target in _CHECKPOINT_OPS):
        return gm.forward(*inputs)
    return _RunOnce(gm).run(*inputs)


class _RunOnce(torch.fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run the body of a checkpoint inline."""
        return run_once(args[0], args[1:]) if target in _CHECKPOINT_OPS else super().call_function(target, args, kwargs)


def has_policy(node: Node) -> bool:
    """Return True if the node belongs to a region with a policy."""
    return _POLICY in node.meta.get("custom", {})


def mark_saved(node: Node) -> None:
    """Mark an attention whose results are saved, or a node traced from one."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _SAVE_POLICIES: True}


def is_saved(node: Node) -> bool:
    """Return True if `mark_saved` has marked the node."""
    return bool(node.meta.get("custom", {}).get(_SAVE_POLICIES))


def mark_must_save(node: Node) -> None:
    """Make a partitioner save the node's results; of several, those that a backward reads."""
    for one in (node, *(user for user in node.users if user.target is operator.getitem)):
        one.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def has_checkpoint_regions(gm: torch.fx.GraphModule) -> bool:
    """Return True if any node is in a checkpointed region."""
    return any("ac_graph_id" in node.meta for node in gm.graph.nodes)


@contextmanager
def apply_policies(attention: Sequence[Any], named_ops: Sequence[Any]) -> Iterator[None]:
    """Apply policies while AOTAutograd traces inside the block.

    The autograd cache is off inside, as its keys do not include policies.

    Args:
        attention: The package's attention ops.
        named_ops: Ops that policies may name in their place.
    """
    import torch._functorch.config as functorch_config

    with functorch_config.patch(enable_autograd_cache=False), PolicyMode(attention, named_ops):
        yield


class PolicyMode(TorchDispatchMode):
    """Tag the nodes that AOTAutograd traces under a policy with its answers.

    The policy is called for every op before it is decomposed, and the nodes traced for the op get its answer. Policies
    do not name the package's own attention ops. If a policy saves one of `named`, which they replace, or all ops except
    these, the nodes are marked as by `mark_saved`.

    Args:
        attention: The package's attention ops.
        named: Ops that policies may name in their place.
    """

    supports_higher_order_operators = True  # a partitioner infers RECOMPUTES_DRAWS under this mode

    def __init__(self, attention: Sequence[Any], named_ops: Sequence[Any]) -> None:
        super().__init__()
        self.attention, self.named = frozenset(attention), named_ops

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that the mode is not active while Dynamo compiles."""
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
        if func in self.attention and answer in SAVE_POLICY:  # the nodes that merge its blocks are marked, too
            meta = torch.fx.traceback.current_meta
            meta["custom"] = {**meta["custom"], _SAVE_POLICIES: True}
        return out

    def _tag_node(self, policy: Policy, func: Any, out: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        """Return the answer of a policy for an op.

        For an attention op of the package, the answer for an op that it replaces has priority if it differs from that
        for the op itself.
        """
        output_kwargs = {"op_output": out} if _POLICY_TAKES_OUTPUT else {}
        answers = list[CheckpointPolicy]()
        for op in (func, *self.named) if func in self.attention else (func,):
            answer = policy(SelectiveCheckpointContext(is_recompute=False, **output_kwargs), op, *args, **kwargs)
            if isinstance(answer, bool):
                answer = CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
            answers.append(answer)
        return next((answer for answer in answers if answer is not answers[0]), answers[0])
