"""Run contexts around the compilation and around the calls of the backwards that AOTAutograd compiles.

torch may compile the backward of a graph late: when it runs first, after the compilation of the forward has ended.
Autograd represents a compiled program as one node, whose class has the compiled backward in `_forward_cls`.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

_late_backwards: dict[str, Callable[[], AbstractContextManager[Any]]] = {}  # context of a backward, by compile id
_entered_backwards = contextlib.ExitStack()  # entered context of the backward that is compiled now, if any


def wrap_late_backward(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Register a context, such as a progress line, for the late compilation of this graph's backward.

    Called while the graph is compiled; without effect if torch compiles the backward together with the forward.
    """
    from torch._dynamo.callback import callback_handler
    from torch._guards import CompileContext

    _late_backwards[str(CompileContext.current_compile_id())] = context
    if _start_late_backward not in callback_handler.start_callbacks:  # a reset of Dynamo removes callbacks
        callback_handler.register_start_callback(_start_late_backward)
        callback_handler.register_end_callback(_finish_late_backward)


# Disabled, since Dynamo would trace it if a backward in eager code starts the compilation, while torch holds a lock.
@torch.compiler.disable
def _start_late_backward(event: Any) -> None:
    """Enter the registered context if a late backward is compiled.

    torch calls this before every compilation.
    """
    if event.callback_trigger.name == "LAZY_BACKWARD" and event.compile_id in _late_backwards:
        _entered_backwards.enter_context(_late_backwards.pop(event.compile_id)())


@torch.compiler.disable
def _finish_late_backward(event: Any) -> None:
    """Exit the context that `_start_late_backward` entered, if any.

    torch calls this after every compilation.
    """
    _entered_backwards.close()


def find_backward_nodes(
    outputs: Sequence[Any],
    selected: Collection[int],
    context: Callable[[], AbstractContextManager[Any]],
    refuse_backward: Callable[..., Any] | None = None,
) -> list[tuple[Any, frozenset[int]]]:
    """Return AOTAutograd's autograd nodes of outputs, and make their backwards run in `context()`.

    The caller registers hooks on the nodes, which run before their backwards. Hooks cannot run code around a backward;
    the context can, from the unpacking of saved tensors to the end of the compiled code.

    Args:
        outputs: Outputs of one call of a compiled function.
        selected: Indices of the outputs whose gradients the caller's hook handles in another way, such as those of
            which a rank has only its rows.
        context: Returns a new context, for each run of a backward.
        refuse_backward: Raises an error in place of torch's if gradients of a backward with create_graph=True are
            differentiated again, which compiled programs do not support. None for torch's error.

    Returns:
        Each node once, with the indices of its results that are, or compute, the selected outputs.
    """
    selected_results: dict[Any, set[int]] = {}  # indices of selected results, by autograd node
    for i, x in enumerate(outputs):
        node, result_index = _compiled_backward_of(x) if isinstance(x, torch.Tensor) else (None, 0)
        if node is None:
            continue
        indices = selected_results.setdefault(node, set())
        if i in selected:
            indices.add(result_index)
    for node in selected_results:
        function_class: Any = getattr(type(node), "_forward_cls", None)  # has the compiled backward
        if function_class is not None:
            backward = function_class.backward
            if isinstance(backward, _InContext):  # an earlier call of the program has replaced it: unwrap
                backward = backward.function
            function_class.backward = staticmethod(_InContext(backward, context, refuse_backward))
    return [(node, frozenset(indices)) for node, indices in selected_results.items()]


def _compiled_backward_of(x: torch.Tensor) -> tuple[Any, int]:
    """Return AOTAutograd's autograd node of a result and the result's index, or (None, 0) if it has none.

    A view of a result that was created after the program had run has own autograd nodes: they are followed to the node
    of the program, and the index is that of the viewed result.
    """
    node, result_index = x.grad_fn, x.output_nr
    # At most 8 nodes, for up to 7 views of a result. If x is an input, a long chain of earlier ops may follow.
    for _ in range(8):
        if node is None or type(node).__name__ == "CompiledFunctionBackward":
            return node, result_index
        if len(node.next_functions) != 1:
            break
        ((node, result_index),) = node.next_functions
    return None, 0


class _InContext:
    """Backward that runs inside a new context at each call; the class marks backwards as wrapped."""

    def __init__(
        self,
        function: Callable[..., Any],
        context: Callable[[], AbstractContextManager[Any]],
        refuse_backward: Callable[..., Any] | None,
    ) -> None:
        self.function, self.context, self.refuse_backward = function, context, refuse_backward

    @torch.compiler.disable
    def __call__(self, *args: Any) -> Any:
        """Run the function inside a new context."""
        with self.context():
            grads = self.function(*args)
        if self.refuse_backward is not None and torch.is_grad_enabled():  # create_graph=True
            found = grads if isinstance(grads, Sequence) else [grads]
            for node in {x.grad_fn for x in found if isinstance(x, torch.Tensor) and x.grad_fn is not None}:
                node.register_prehook(self.refuse_backward)
        return grads
