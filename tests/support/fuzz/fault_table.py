"""Table of faults on one rank of a training loop, and of the errors that the other ranks must raise."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from support.fuzz import fault_parallel as parallel
from support.fuzz import fault_replicas as replicas
from support.fuzz import fault_training as training
from support.fuzz.fault_acts import (
    Acts,
    a_child_calls,
    backward_twice,
    barrier,
    buffer_as_float,
    calls_once_more,
    changed,
    checkpoints,
    compiles_for_long,
    connects_late,
    copies,
    deterministic,
    evaluates,
    exchanged,
    fails_after_backward,
    fails_at_op,
    fails_before_backward,
    fails_in_forward,
    fails_to_recompile,
    force_eager,
    forks,
    freezes,
    in_a_thread,
    input_requires_grad,
    interrupts_another,
    kill,
    leaves,
    loads,
    memory_budget,
    other_batch_size,
    other_default_device,
    other_dtype,
    other_input,
    other_length,
    other_number,
    other_numbers,
    other_scale,
    other_strides,
    recompiles_too_often,
    renumbered,
    replaced,
    seeds,
    skip_backward,
    skip_batch,
    skip_step,
    slow,
    two_models,
    under,
    under_func,
    without_memory,
    without_sync,
    writes_before_backward,
)
from support.fuzz.loop import TIMEOUT, Loop
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from sp_compile.integrations.ddp import compile_under_ddp
from sp_compile.passes.cost import measure


@dataclass(frozen=True)
class Fault:
    """A fault of the odd rank in one step of a training loop."""

    error: str  # regular expression of the ranks' SpError; "" if the loop continues with right values
    acts: Acts | None = None  # the step of the fault on the odd rank
    everyone: Acts | None = None  # the step of the fault on every rank
    begins: Callable[[Loop], None] | None = None  # before compilation, on the odd rank
    prepares: Callable[[Loop], None] | None = None  # before compilation, on every rank
    options: Mapping[str, Any] = field(default_factory=dict)  # of every rank's backend
    own: tuple[type[BaseException], ...] = ()  # errors of the fault itself, which the loop catches
    ends: bool = False  # the odd rank reports nothing after the fault
    unaware: bool = False  # the odd rank runs no compiled program that could raise the error
    recompiles: bool = False  # the fault occurs when a program is compiled again
    late: bool = False  # only on a later step, after the values of all ranks were compared
    connected: bool = True  # with a process group from the start
    ranks: int | None = None  # number of ranks; None: two or three


# Before the first step.


def option(**given: Any) -> Callable[[Loop], None]:
    def begin(loop: Loop) -> None:
        loop.options.update(given)

    return begin


def budget_from_the_start(loop: Loop) -> None:
    functorch_config.activation_memory_budget = 0.5


def views_from_the_start(loop: Loop) -> None:
    functorch_config.recompute_views = True


def branches(loop: Loop) -> None:
    """Change the model on one rank."""
    forward = loop.net.forward
    loop.net.forward = lambda ids, labels, noise: forward(ids, labels, noise.sin())


def frozen(loop: Loop) -> None:
    loop.net.head.weight.requires_grad_(False)


def weight_from_the_start(loop: Loop) -> None:
    loop.honest = False
    with torch.no_grad():
        loop.net.head.weight.add_(1)


def buffer_from_the_start(loop: Loop) -> None:
    loop.honest = False
    loop.net.scale.add_(1)


def another_mode(loop: Loop) -> None:
    """Compile with a mode of Inductor on the odd rank only."""
    mode = "max-autotune-no-cudagraphs" if loop.is_odd else None
    loop.run = torch.compile(loop.net, backend="sp", mode=mode)


def two_meshes(loop: Loop) -> None:
    """Use another mesh on the odd rank; every rank creates both, a collective call."""
    loop.options["mesh"] = init_device_mesh("cpu", (loop.scene.world,), mesh_dim_names=("sp",))
    other = init_device_mesh("cpu", (loop.scene.world, 1), mesh_dim_names=("sp", "x"))
    if loop.is_odd:
        loop.options["mesh"] = other


def disabled(loop: Loop) -> None:
    loop.run = torch.compiler.disable(loop.net)


def other_backend(loop: Loop) -> None:
    loop.run = torch.compile(loop.net, backend="eager")


def changing_lengths(loop: Loop) -> None:
    """Compile for symbolic lengths; other ranks compile for one length."""
    loop.run = torch.compile(loop.net, backend="sp", dynamic=True, options=loop.options)


def checkpointed_part(loop: Loop) -> None:
    forward = loop.net.inner.forward
    loop.net.inner.forward = lambda x: checkpoint(forward, x, use_reentrant=False)


def under_ddp(loop: Loop) -> None:
    """Use DDP over the same ranks that split the sequence."""
    compile_under_ddp(loop.net, **loop.options)
    loop.run = DistributedDataParallel(loop.net)


def broken_constants(loop: Loop) -> None:
    path = measure._cache_path(dist.group.WORLD, torch.device("cpu"))
    Path(path).write_text("[" * 100_000)


def homeless(loop: Loop) -> None:
    for name in ("HOME", "SP_COMPILE_CACHE_DIR"):
        os.environ.pop(name, None)


def fails_to_compile(error: type[BaseException]) -> Callable[[Loop], None]:
    def begin(loop: Loop) -> None:
        loop.compile_raises = error("of the fault")
        parallel.rests(loop, 1, TIMEOUT / 2)

    return begin


def compiles_for_long_at_first(loop: Loop) -> None:
    loop.compile_takes = 2 * TIMEOUT


VALUES = "SP6(3[34568]|42)"
ASTRAY = "SP60[15]"
WAITS = "SP62[12]"
RAISED = r"rank \d raised"
STOPPED = f"{WAITS}|SP623|{RAISED}"
MEASURED = {"cost": None}
TRAINS: Any = {"prepares": training.trains}
REPLICAS: Any = {"prepares": replicas.of_replicas(), "ranks": replicas.RANKS}
UNUSED: Any = {"prepares": replicas.of_replicas(find_unused_parameters=True), "ranks": replicas.RANKS}
RECOMPILED = f"{VALUES}|different|SP602|{ASTRAY}"
PARALLEL: Any = {"prepares": parallel.tensor_parallel}
GRID: Any = {"prepares": parallel.grid, "ranks": parallel.GRID}
NOT_COMPILED = "could not be compiled.*of the fault"
INTERRUPTED = "stopped: KeyboardInterrupt when it compiles"
CAUGHT = (MemoryError, KeyboardInterrupt)
AT_OP: Any = {"own": (IndexError, RuntimeError)}

FAULTS: dict[str, Fault] = {
    "a skipped batch": Fault(VALUES, skip_batch),
    "nothing, tensor-parallel": Fault("", slow, **PARALLEL),
    "a skipped batch, tensor-parallel": Fault(VALUES, skip_batch, late=True, **PARALLEL),
    "a skipped call, tensor-parallel": Fault(f"{VALUES}|{ASTRAY}|{STOPPED}", skip_step, late=True, **PARALLEL),
    "a skipped backward, tensor-parallel": Fault(f"{ASTRAY}|{STOPPED}", skip_backward, **PARALLEL),
    "a second backward, tensor-parallel": Fault(f"{ASTRAY}|{STOPPED}", backward_twice, **PARALLEL),
    "a weight that differs, tensor-parallel": Fault(f"{VALUES}.*weight", changed("norm.weight"), late=True, **PARALLEL),
    "no_grad, tensor-parallel": Fault("mode", under(torch.no_grad), **PARALLEL),
    "another scale of the loss, tensor-parallel": Fault("SP671|SP637", other_scale, **PARALLEL),
    "a number that differs, tensor-parallel": Fault("different|SP602", other_number, **PARALLEL),
    "other options, tensor-parallel": Fault(
        "option activation_memory_budget", begins=option(activation_memory_budget=0.5), **PARALLEL
    ),
    "MemoryError before backward, tensor-parallel": Fault(
        f"{ASTRAY}|{STOPPED}", fails_before_backward(MemoryError), own=CAUGHT, **PARALLEL
    ),
    "SIGKILL, tensor-parallel": Fault(STOPPED, kill(signal.SIGKILL), ends=True, **PARALLEL),
    "a skipped call": Fault(f"{VALUES}|{ASTRAY}|{STOPPED}", skip_step),
    "a skipped backward": Fault(f"{ASTRAY}|{STOPPED}", skip_backward),
    "a second backward": Fault(f"{ASTRAY}|{STOPPED}", backward_twice),
    "another scale of the loss": Fault("SP637", other_scale),
    "other tokens": Fault(f"{VALUES}.*ids", other_input(0)),
    "other labels": Fault(f"{VALUES}.*labels", other_input(1)),
    "other floats": Fault(f"{VALUES}.*noise", other_input(2)),
    "another length": Fault("SP632|SP602", other_length),
    "another batch size": Fault("SP632|SP602", other_batch_size),
    "other strides": Fault("", other_strides),
    "another dtype": Fault("different|SP602", other_dtype),
    "an input that requires grad": Fault("different|SP602", input_requires_grad),
    "a weight that differs": Fault(f"{VALUES}.*weight", changed("head.weight")),
    "a number that differs": Fault("different|SP602", other_number),
    "numbers that differ": Fault("different", everyone=other_numbers, late=True),
    "a weight that changes before backward": Fault(STOPPED, writes_before_backward, own=(RuntimeError,), late=True),
    "a flop counter": Fault(f"{ASTRAY}|{STOPPED}", under(partial(FlopCounterMode, display=False)), unaware=True),
    "a buffer that differs": Fault(f"{VALUES}.*scale", changed("scale")),
    "no_grad": Fault("mode", under(torch.no_grad)),
    "a call more": Fault(f"{VALUES}|{ASTRAY}|{STOPPED}", calls_once_more(nullcontext)),
    "an evaluation on one rank": Fault("mode", calls_once_more(torch.no_grad)),
    "inference_mode": Fault("mode", under(torch.inference_mode)),
    "autocast": Fault("mode", under(lambda: torch.autocast("cpu", torch.bfloat16))),
    "two models in another order": Fault(f"{VALUES}|{ASTRAY}", everyone=two_models),
    "a later memory budget": Fault("", memory_budget, late=True),
    "eval": Fault("", evaluates),
    "a barrier": Fault(f"{VALUES}|{STOPPED}", barrier, own=(RuntimeError,)),
    "a slow rank": Fault("", slow),
    "MemoryError in forward": Fault(STOPPED, fails_in_forward(MemoryError), own=CAUGHT),
    "KeyboardInterrupt in forward": Fault(STOPPED, fails_in_forward(KeyboardInterrupt), own=CAUGHT),
    **{
        f"IndexError in {half}{where}": Fault(
            f"{RAISED} IndexError: injected", fails_at_op(half, IndexError), **AT_OP, **how
        )
        for where, how in {"": {}, ", tensor-parallel": PARALLEL, ", grid": GRID}.items()
        for half in ("forward", "backward")
    },
    "MemoryError before backward": Fault(f"{ASTRAY}|{STOPPED}", fails_before_backward(MemoryError), own=CAUGHT),
    "KeyboardInterrupt before backward": Fault(
        f"{ASTRAY}|{STOPPED}", fails_before_backward(KeyboardInterrupt), own=CAUGHT
    ),
    "MemoryError after backward": Fault("", fails_after_backward(MemoryError), own=CAUGHT),
    "SIGKILL": Fault(STOPPED, kill(signal.SIGKILL), ends=True),
    "SIGSTOP": Fault(STOPPED, kill(signal.SIGSTOP), ends=True),
    "SIGINT while waiting": Fault(f"{ASTRAY}|{STOPPED}", interrupts_another, own=CAUGHT),
    "a second thread": Fault(f"SP624|{ASTRAY}|{STOPPED}", in_a_thread),
    "force_eager": Fault(f"{VALUES}|{ASTRAY}|{STOPPED}", force_eager),
    "the recompile limit": Fault(
        f"{VALUES}|{ASTRAY}|{STOPPED}", everyone=recompiles_too_often, unaware=True, recompiles=True
    ),
    "MemoryError while compiling again": Fault("SP607", everyone=fails_to_recompile(MemoryError), recompiles=True),
    "compiling again for long": Fault("", everyone=compiles_for_long, recompiles=True),
    "a rank that leaves": Fault("", everyone=leaves),
    "ranks renumbered": Fault("", everyone=renumbered),
    "a group that comes late": Fault("", everyone=connects_late, connected=False),
    "another memory budget": Fault("activation_memory_budget", begins=budget_from_the_start),
    "another setting of functorch": Fault("recompute_views", begins=views_from_the_start),
    "other param_grads": Fault("option param_grads", begins=option(param_grads="partial")),
    "another cost": Fault("option cost", begins=option(cost={"all_reduce_latency": 1.0})),
    "other inputs": Fault("different", begins=option(inputs="local")),
    "a branch by rank": Fault(f"SP631|{ASTRAY}", begins=branches),
    "another fallback": Fault("option fallback", begins=option(fallback="error")),
    "another attention": Fault("different", begins=option(attention="gather")),
    "another layout": Fault("different", begins=option(layout="zigzag")),
    "another compiler": Fault("different", begins=option(compiler="aot_eager")),
    "other outputs": Fault("different", begins=option(outputs="local")),
    "other seq_dims": Fault("different", begins=option(seq_dims={"ids": 1})),
    "an unknown option": Fault("SP102", begins=option(atention="ring")),
    "frozen parameters": Fault("different|SP639", begins=frozen),
    "other weights": Fault(f"{VALUES}.*weight", begins=weight_from_the_start),
    "another buffer": Fault(f"{VALUES}.*scale", begins=buffer_from_the_start),
    "a mesh of two axes": Fault("", prepares=two_meshes),
    "a mesh axis that is none": Fault(f"SP11[456]|{ASTRAY}|{STOPPED}", begins=option(mesh_dim="sq")),
    "a mesh that is none": Fault(f"SP111|{ASTRAY}|{STOPPED}", begins=option(mesh="sp")),
    "compiling is disabled": Fault(f"{ASTRAY}|{STOPPED}", begins=disabled, unaware=True),
    "another backend": Fault(f"{ASTRAY}|{STOPPED}", begins=other_backend, unaware=True),
    "a forked child": Fault("", forks),
    "a deep copy": Fault("", everyone=copies),
    "a checkpoint": Fault("", everyone=loads),
    "no HOME": Fault("", begins=homeless, options=MEASURED),
    "broken constants": Fault("", begins=broken_constants, options=MEASURED),
    "MemoryError while compiling": Fault("SP607", begins=fails_to_compile(MemoryError)),
    "KeyboardInterrupt while compiling": Fault(INTERRUPTED, begins=fails_to_compile(KeyboardInterrupt), own=CAUGHT),
    "compiling for long": Fault("", begins=compiles_for_long_at_first),
    "other values of a weight": Fault(f"{VALUES}.*weight", exchanged),
    "another weight": Fault("SP605", replaced, late=True),
    "a weight that is frozen": Fault("different", freezes),
    "another seed": Fault("", seeds),
    "deterministic algorithms": Fault("deterministic algorithms", under(deterministic)),
    "a forked child that calls the model": Fault("", a_child_calls),
    "a checkpoint around the model": Fault("mode.*checkpoint", checkpoints),
    "a checkpointed part": Fault("SP631.*in checkpoint 0", begins=checkpointed_part),
    "torch.func": Fault(f"{ASTRAY}|{STOPPED}", under_func, unaware=True),
    "a buffer of another dtype": Fault("SP640: rank .*scale float32", buffer_as_float, late=True),
    "a weight without memory": Fault(f"{VALUES}.*head.weight.*its memory was freed", without_memory, late=True),
    "lengths as symbols": Fault("SP631.*dynamic=True", begins=changing_lengths),
    "nothing, under DDP": Fault("", slow, prepares=under_ddp),
    "no_sync": Fault("mode.*no_sync", without_sync, prepares=under_ddp),
    "another default device": Fault("", other_default_device),
    # Around the steps of a training loop.
    "clipped gradients": Fault(f"{VALUES}.*weight", training.between(training.clips), late=True, **TRAINS),
    "gradients that are none": Fault(
        f"{VALUES}.*weight", training.between(training.nan_gradients), late=True, **TRAINS
    ),
    "another learning rate": Fault(f"{VALUES}.*weight", training.between(training.other_rate), **TRAINS),
    "weight decay": Fault(f"{VALUES}.*weight", training.between(training.decays), **TRAINS),
    "a lost momentum": Fault(f"{VALUES}.*weight", training.between(training.forgets_momentum), late=True, **TRAINS),
    "a step that a scaler skips": Fault(f"{VALUES}.*weight", training.scaler_skips, **TRAINS),
    "gradients that are kept": Fault(f"{VALUES}.*weight", training.keeps_gradients, late=True, **TRAINS),
    "an error in the optimizer": Fault(
        f"{VALUES}.*weight", training.fails_in_optimizer(ZeroDivisionError), own=(ZeroDivisionError,), **TRAINS
    ),
    "an interrupt in the optimizer": Fault(
        f"{VALUES}.*weight", training.fails_in_optimizer(KeyboardInterrupt), own=CAUGHT, **TRAINS
    ),
    "averages that stay": Fault(f"{VALUES}.*weight", training.averages, late=True),
    "averages and back": Fault("", training.averages_and_back),
    "another checkpoint": Fault(f"{VALUES}.*weight", training.loads_other, late=True),
    "a checkpoint whose tensors become weights": Fault("SP605", training.assigns, late=True),
    "tied weights": Fault(RECOMPILED, training.ties, late=True),
    "a model in float32": Fault(RECOMPILED, training.casts(torch.float32), late=True),
    "a model in bfloat16": Fault(RECOMPILED, training.casts(torch.bfloat16), late=True),
    "a cast to what it is": Fault("", training.casts(torch.float64)),
    "a token more": Fault(RECOMPILED, training.adds_a_token, late=True),
    "an adapter that is merged": Fault(RECOMPILED, training.merges, prepares=training.adapted, late=True),
    "an adapter that is added": Fault(RECOMPILED, training.adapts, late=True),
    "tokens in int32": Fault(RECOMPILED, training.narrow_tokens, late=True),
    "an input that is a parameter": Fault(RECOMPILED, training.as_parameter, late=True),
    "arguments by name": Fault("", training.by_name),
    "a length that is marked": Fault(RECOMPILED, training.marks_dynamic, late=True),
    "NaN in an input": Fault(f"{VALUES}.*noise", training.nan_input),
    "NaN in an input of all ranks": Fault("", everyone=training.nan_input),
    "NaN in a loss": Fault("SP637", training.nan_loss),
    "NaN in a weight": Fault(f"{VALUES}.*weight", training.nan_weight),
    "a buffer that is replaced": Fault(f"{VALUES}.*scale", training.other_buffer),
    "another default dtype": Fault(
        RECOMPILED,
        training.sets(partial(torch.set_default_dtype, torch.float64)),
        prepares=training.makes_numbers,
        late=True,
    ),
    "more threads": Fault("", training.sets(partial(torch.set_num_threads, 2)), late=True),
    "another precision of products": Fault(
        "", training.sets(partial(torch.set_float32_matmul_precision, "medium")), late=True
    ),
    "logs": Fault("", training.sets(partial(torch._logging.set_logs, recompiles=True)), late=True),
    "the environment": Fault("", training.sets(training.of_environment)),
    "a profiler": Fault("", training.profiles),
    "warnings that are errors": Fault("", training.warnings_are_errors),
    "no more files": Fault("", training.few_files, late=True),
    "a shallow stack": Fault("", training.shallow, late=True),
    "anomaly detection": Fault("", under(partial(torch.autograd.detect_anomaly, check_nan=False))),
    "activations on the CPU": Fault("", under(torch.autograd.graph.save_on_cpu)),
    "another mode": Fault("mode", begins=lambda loop: None, prepares=another_mode, options=MEASURED),
    "another compiler for a model that is compiled again": Fault(
        "option compiler", everyone=training.compiles_again(compiler="aot_eager"), late=True
    ),
    "other param_grads for a model that is compiled again": Fault(
        "option param_grads", everyone=training.compiles_again(param_grads="partial"), late=True
    ),
    "a closed cache of Inductor": Fault(
        "SP607", everyone=training.closes_cache, prepares=training.by_inductor, late=True
    ),
    "a damaged cache of Inductor": Fault("", everyone=training.damages_cache, prepares=training.by_inductor, late=True),
    "a hook on a module": Fault("", training.hooks_module, late=True),
    "a hook on a weight": Fault(f"{VALUES}.*weight", training.hooks_weight, **TRAINS),
    "two calls before their backwards": Fault(f"{ASTRAY}|{STOPPED}", training.both_then_backwards),
    "a backward in a thread": Fault("", training.backward_in_a_thread),
    "a sum of its own": Fault(f"{ASTRAY}|{STOPPED}", training.reduces, own=(RuntimeError,)),
    "a sum of its own, asynchronous": Fault(STOPPED, training.reduces_asynchronously),
    "tensors from rank to rank": Fault("", everyone=training.sends),
    "a rank that destroys its group": Fault(STOPPED, training.destroys, unaware=True),
    "gradients that are forgotten": Fault("mode", training.forgets_gradients),
    "os._exit": Fault(STOPPED, training.exits, ends=True),
    "SIGTERM": Fault(STOPPED, kill(signal.SIGTERM), ends=True),
    "an error in the loss": Fault(
        f"{ASTRAY}|{STOPPED}", training.fails_in_loss(ZeroDivisionError), own=(ZeroDivisionError,)
    ),
    "KeyboardInterrupt in the loss": Fault(
        f"{ASTRAY}|{STOPPED}", training.fails_in_loss(KeyboardInterrupt), own=CAUGHT
    ),
    "SystemExit that is caught": Fault(
        f"{VALUES}|{ASTRAY}|{STOPPED}", training.fails_before(SystemExit), own=(SystemExit,)
    ),
    "a copy of what is compiled": Fault("", everyone=training.copied_by(copy.deepcopy)),
    "a copy of what is compiled, on one rank": Fault("SP605", training.copied_by(copy.deepcopy), late=True),
    "a pickle of what is compiled": Fault("", everyone=training.copied_by(training.pickled)),
    "a file of what is compiled": Fault("", everyone=training.copied_by(training.saved)),
    # Two replicas of two ranks each, under DDP.
    "nothing, replicas": Fault("", slow, **REPLICAS),
    "an evaluation of one replica": Fault(
        "", everyone=replicas.by_replica(replicas.evaluates_alone(lambda loop: loop.net), replicas.trained), **REPLICAS
    ),
    "one more batch in no_sync, of one replica": Fault(
        "", everyone=replicas.by_replica(replicas.accumulates, replicas.trained), **REPLICAS
    ),
    "one more batch and join": Fault("", everyone=replicas.joins, **REPLICAS),
    "nothing, replicas that look for unused parameters": Fault("", slow, **UNUSED),
    # During compilation of a tensor-parallel program, and of one on a grid with the sequence on a second axis.
    "nothing, grid": Fault("", slow, **GRID),
    **{
        f"{name}, {where}": Fault(error, begins=begins, **more, **given)
        for where, given in (("tensor-parallel", PARALLEL), ("grid", GRID))
        for name, error, begins, more in (
            ("another option of layers", "SP610.*linear", option(sequence_parallel_linear="never"), {}),
            ("MemoryError while compiling", NOT_COMPILED, parallel.while_compiling(parallel.raises(MemoryError)), {}),
            (
                "KeyboardInterrupt while compiling",
                INTERRUPTED,
                parallel.while_compiling(parallel.raises(KeyboardInterrupt)),
                {"own": CAUGHT},
            ),
            ("SIGKILL while compiling", STOPPED, parallel.while_compiling(parallel.is_killed), {"ends": True}),
            ("a rank that does not come to compile", WAITS, parallel.comes_late, {}),
        )
    },
    "a mesh axis that is none, grid": Fault("SP113", begins=option(mesh_dim="sq"), **GRID),
}
