"""Apply selective checkpoint policies to each op that AOTAutograd traces, as torch does in eager mode.

A policy is the function of `create_selective_checkpoint_contexts`: it returns for each op whether the results are saved
or recomputed. Capture inlines the checkpointed regions and records the policy in the metadata of their nodes
(`recompute_tags`). `PolicyMode` calls it while AOTAutograd traces, and sets meta["recompute"], which the partitioner
reads. A region is one call of torch.utils.checkpoint in the user's code. In Dynamo's graph it is one node with a
sub-graph, its body; in a captured graph it is the nodes with the same meta["ac_graph_id"], the number of the region.
"""

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
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _StopRecomputationError,
)

Policy = Callable[..., CheckpointPolicy | bool]
_POLICY_KEY, _SAVED_KEY = "checkpoint_policy", "keeps_attention"  # keys of meta["custom"], which tracers propagate
# torch 2.13 passes the output to policies, 2.11 does not.
_POLICY_TAKES_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters
# Random operators in the backward of a checkpoint, which repeat the draws of its forward.
RECOMPUTES_DRAWS = (run_with_rng_state, graphsafe_run_with_rng_state)
# Ops of checkpointed regions in Dynamo's graphs.
_CHECKPOINT_OPS = (tag_activation_checkpoint, wrap_activation_checkpoint)
SAVE_POLICY = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)  # decisions of a policy that save a value


def is_checkpoint_stop(error: BaseException) -> bool:
    """Return True if the exception ends a recomputation, after the last value that the backward needs; no failure."""
    return isinstance(error, _StopRecomputationError)


def policy_of(context_fn: Callable[[], Any]) -> Policy | None:
    """Return the policy of a checkpoint's `context_fn`, or None if it has none.

    Only functions of `create_selective_checkpoint_contexts` have one. torch converts a list of ops to a policy.
    """
    forward_context, _ = context_fn()
    return getattr(forward_context, "policy_fn", None)


def recompute_tags(region: int, policy: Policy | None) -> dict[str, Any]:
    """Return metadata that marks nodes of a checkpointed region for the partitioner and `PolicyMode`.

    Args:
        region: Number of the region.
        policy: Its policy, if any.
    """
    custom = {} if policy is None else {"custom": {_POLICY_KEY: policy}}
    return {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": region, **custom}


def checkpoint_of(node: Node) -> tuple[Any, str]:
    """Return the checkpoint of a node and the name of its policy, to compare the programs of ranks.

    In a captured graph the checkpoint is the number of the region that contains the node. In a Dynamo graph it is the
    node itself if it is the get_attr node of a region's body. It is None in other cases. The name is "" without a
    policy.
    """
    if node.op == "get_attr":
        is_checkpoint_body = any(user.target in _CHECKPOINT_OPS for user in node.users)
        return (node if is_checkpoint_body else None), ""
    policy = node.meta.get("custom", {}).get(_POLICY_KEY)
    name = "" if policy is None else getattr(policy, "__qualname__", type(policy).__name__)
    return node.meta.get("ac_graph_id"), name


def is_in_checkpoint() -> bool:
    """Return True if this thread runs inside torch.utils.checkpoint, whose backward runs the code again.

    A checkpoint pushes a pair of hooks on saved tensors, functions of torch.utils.checkpoint. The innermost pair is
    examined.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)  # False: None while torch traces
    if hooks is None:
        return False
    pack_hook, _ = hooks
    return pack_hook.__module__ == CheckpointPolicy.__module__


def run_once(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Run a Dynamo graph eagerly, with checkpointed regions as ordinary code that recomputes nothing.

    Used for the single-device results that compiled ones are compared with. torch raises when it recomputes a region
    that has modified its inputs in place. Buffers are inputs of graphs that Dynamo traces, so that a BatchNorm in a
    checkpoint modifies one.
    """
    graph = gm.graph
    if not any(graph.find_nodes(op="call_function", target=target, sort=False) for target in _CHECKPOINT_OPS):
        return gm.forward(*inputs)
    return _RunOnce(gm).run(*inputs)


class _RunOnce(torch.fx.Interpreter):
    """Interpreter that runs the bodies of checkpoints as ordinary calls."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run the graph of a checkpoint, its first argument, on the others; run other calls unchanged."""
        return run_once(args[0], args[1:]) if target in _CHECKPOINT_OPS else super().call_function(target, args, kwargs)


def has_policy(node: Node) -> bool:
    """Return True if the node of a captured graph belongs to a checkpointed region with a policy."""
    return _POLICY_KEY in node.meta.get("custom", {})


def mark_saved(node: Node) -> None:
    """Mark an attention whose results are saved, or a node traced from one, for a pass on joint graphs."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _SAVED_KEY: True}


def is_saved(node: Node) -> bool:
    """Return True if `mark_saved` has marked the node."""
    return bool(node.meta.get("custom", {}).get(_SAVED_KEY))


def mark_must_save(node: Node) -> None:
    """Make the partitioner of a joint graph save the results of a node and never recompute them.

    Of several results only those that the backward reads are saved.
    """
    results = [user for user in node.users if user.target is operator.getitem]
    for saved in (node, *results):
        saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def has_checkpoint_regions(gm: torch.fx.GraphModule) -> bool:
    """Return True if any node of a captured graph is in a checkpointed region."""
    return any("ac_graph_id" in node.meta for node in gm.graph.nodes)


@contextmanager
def apply_policies(attention: Sequence[Any], named_ops: Sequence[Any]) -> Iterator[None]:
    """Apply policies of checkpointed regions to ops that AOTAutograd traces inside the block.

    AOTAutograd's cache is off inside, as its keys do not include policies.

    Args:
        attention: The package's attention ops.
        named_ops: The torch ops that policies name in their place.
    """
    import torch._functorch.config as functorch_config

    with functorch_config.patch(enable_autograd_cache=False), PolicyMode(attention, named_ops):
        yield


class PolicyMode(TorchDispatchMode):
    """Dispatch mode that sets meta["recompute"] of nodes that AOTAutograd traces, as a policy decides.

    The policy is called for every op before it is decomposed; all nodes traced for the op get its decision. Policies
    do not name the package's own attention ops, but the torch ops that these replace. The nodes of an attention op
    that the policy saves are marked as by `mark_saved`: a later pass selects the results to save.

    Args:
        attention: The package's attention ops.
        named_ops: The torch ops that policies name in their place.
    """

    supports_higher_order_operators = True  # a partitioner infers RECOMPUTES_DRAWS under this mode

    def __init__(self, attention: Sequence[Any], named_ops: Sequence[Any]) -> None:
        super().__init__()
        self.attention, self.named_ops = frozenset(attention), named_ops

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that the mode is not active while Dynamo compiles."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and set the policy's decision on the nodes that the trace records for it.

        Ops of a backward, ops without a policy, and ops that torch excludes from policies run unchanged.
        """
        kwargs = kwargs or {}
        current_meta, proxy_mode = torch.fx.traceback.current_meta, get_proxy_mode()
        policy = current_meta.get("custom", {}).get(_POLICY_KEY)
        is_backward = torch._C._current_autograd_node() is not None
        if policy is None or proxy_mode is None or is_backward or func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        nodes = proxy_mode.tracer.graph.nodes
        n_nodes_before = len(nodes)
        out = func(*args, **kwargs)
        decision = self._apply_policy(policy, func, out, args, kwargs)
        is_attention, is_saved_op = func in self.attention, decision in SAVE_POLICY
        for node in islice(reversed(nodes), len(nodes) - n_nodes_before):  # the nodes traced for this op
            if not is_attention:
                node.meta["recompute"] = decision
            elif is_saved_op:
                mark_saved(node)
        if is_attention and is_saved_op:  # the nodes that merge its blocks are traced next, and inherit this mark
            current_meta["custom"] = {**current_meta["custom"], _SAVED_KEY: True}
        return out

    def _apply_policy(self, policy: Policy, func: Any, out: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        """Return the decision of a policy for an op.

        For an attention op of the package, the decision for an op that it replaces has priority if it differs from
        that for the op itself.
        """
        output_kwargs = {"op_output": out} if _POLICY_TAKES_OUTPUT else {}
        decisions = list[CheckpointPolicy]()
        for op in (func, *self.named_ops) if func in self.attention else (func,):
            decision = policy(SelectiveCheckpointContext(is_recompute=False, **output_kwargs), op, *args, **kwargs)
            if isinstance(decision, bool):
                decision = CheckpointPolicy.MUST_SAVE if decision else CheckpointPolicy.PREFER_RECOMPUTE
            decisions.append(decision)
        return next((decision for decision in decisions if decision is not decisions[0]), decisions[0])


def wrap_in_checkpoint(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module that recomputes `module` in the backward, and has its state_dict and parameter names."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module)
