"""The registry of error codes: what each means, and what to do about it.

One file because it is the registry. `docs/errors.md` is generated from it by `python -m sp_compile.error_codes`.

Sections: SP1xx options, SP2xx capture, SP3xx sequence and sharding, SP4xx attention, SP5xx scans and collectives,
SP6xx ranks, SP7xx memory and cost, SP8xx data and integrations, SP9xx passes and rules of a contributor.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorInfo:
    """One kind of error."""

    title: str  # what is wrong, without the values of one case
    fix: str  # what to do, as one or two sentences; it ends every message of this code


SECTIONS = {
    "1": "Options",
    "2": "Capture of the program",
    "3": "Sequence and sharding",
    "4": "Attention",
    "5": "Scans and collectives",
    "6": "Ranks and process groups",
    "7": "Memory and cost",
    "8": "Data and integrations",
    "9": "Passes and rules of a contributor",
}
"""Titles of the sections, by the first digit of a code."""

ERRORS: dict[str, ErrorInfo] = {
    # SP1xx: options
    "SP101": ErrorInfo(
        "An option of torch.compile among the options of the backend", "Pass it to torch.compile itself."
    ),
    "SP102": ErrorInfo(
        "An unknown option", "Use one of the names that the message lists; docs/options.md describes them."
    ),
    "SP103": ErrorInfo(
        "A value that an option does not take",
        "Pass a value of the kind that the message names; docs/options.md lists the values of each option.",
    ),
    "SP104": ErrorInfo(
        "An unknown compiler", "Pass a name that torch.compiler.list_backends() returns, or a callable."
    ),
    "SP105": ErrorInfo(
        "An option that the compiler has no place for",
        "Set compiler='inductor' or compiler='aot_eager', or leave the option out.",
    ),
    "SP106": ErrorInfo(
        "An option that the attention strategy does not use", "Leave the option out, or pass attention='auto'."
    ),
    "SP107": ErrorInfo("A mode of Inductor with another compiler", "Pass either mode or compiler."),
    "SP108": ErrorInfo("A mode that records CUDA graphs", "Use mode='max-autotune-no-cudagraphs' or mode='default'."),
    "SP109": ErrorInfo("An option without effect at this entry", "Leave the option out."),
    "SP111": ErrorInfo(
        "A mesh of the wrong type", "Pass a mesh that torch.distributed.device_mesh.init_device_mesh returns."
    ),
    "SP112": ErrorInfo(
        "A rank outside the mesh or the process group",
        "Call the program on the ranks of the mesh only, or pass a mesh of all ranks.",
    ),
    "SP113": ErrorInfo(
        "A mesh of several axes, none of them named as the axis of the sequence",
        "Pass mesh_dim='<name of the axis that splits the sequence>', or slice the mesh: mesh['sp'].",
    ),
    "SP114": ErrorInfo("An axis that the mesh does not have", "Use one of the axes that the message lists."),
    "SP115": ErrorInfo(
        "Axes of a hybrid in the wrong order",
        "Order the axes so that ranks of the inner axis are neighbours: mesh_dim_names=('ring', 'ulysses').",
    ),
    "SP116": ErrorInfo("An axis without a mesh", "Pass mesh=... as well."),
    "SP117": ErrorInfo(
        "Tensors of a GPU exchanged by Gloo",
        'Initialize the group with NCCL for tensors of a GPU: init_process_group("cpu:gloo,cuda:nccl"), or name '
        "no backend.",
    ),
    # SP2xx: capture of the program
    "SP201": ErrorInfo(
        "A model in which torch.compile finds nothing to compile",
        "Remove torch.compiler.disable, TORCHDYNAMO_DISABLE or the stance that compiles nothing, or pass a model "
        "that calls an operator.",
    ),
    "SP202": ErrorInfo(
        "A constant tensor made on the meta device",
        "Make that tensor with torch.zeros or torch.full. In models of transformers it belongs to the cache: set "
        "use_cache=False in their config.",
    ),
    "SP203": ErrorInfo("capture outside a backend of torch.compile", "Use capture_export for an exported program."),
    "SP204": ErrorInfo(
        "A graph that calls modules or Python functions",
        "Export the model with torch.export or make_fx first; a graph of Dynamo is captured in a backend of "
        "torch.compile.",
    ),
    "SP205": ErrorInfo("A graph with several fake modes", "Trace the program with make_fx(..., tracing_mode='fake')."),
    "SP206": ErrorInfo(
        "A graph that is not functional", "Pass a graph that sp_compile.capture_export(program) returns."
    ),
    "SP211": ErrorInfo(
        "An op that cannot be captured",
        "Keep this call out of the compiled region with torch.compiler.disable, or write it with tensor ops "
        "whose shapes do not depend on data, such as torch.where.",
    ),
    "SP212": ErrorInfo(
        "A program that torch cannot trace",
        "Replace shapes that depend on data by torch.where and masks; indexing the first dims, x[mask] = rows, "
        "is supported.",
    ),
    "SP213": ErrorInfo("A failure inside the package while it compiles a program", "Report this with the program."),
    "SP214": ErrorInfo(
        "An operator without a derivative inside a transform of torch.func",
        "Call the operator outside the transform, or register a derivative with torch.library.register_autograd.",
    ),
    "SP215": ErrorInfo(
        "A value of torch.func that leaves its region", "Keep the call of torch.func out of the compiled region."
    ),
    "SP216": ErrorInfo("A region whose body is not a sub-graph", "Leave the region out, or compile its inside."),
    "SP217": ErrorInfo(
        "A region that is called with keyword arguments", "Pass the arguments of the region by position."
    ),
    "SP218": ErrorInfo(
        "A hook that is registered too late",
        "Register the hook right after the tensor is computed, before its first use.",
    ),
    "SP219": ErrorInfo(
        "A size that cannot be computed on a rank",
        "Pass the size as an argument of the model, or compute it from sizes of inputs by +, *, // and %.",
    ),
    "SP221": ErrorInfo("A change in place of memory that two values share", "Pass a clone of one of them."),
    "SP222": ErrorInfo("A view that is read after its memory has changed", "Clone the view before the change."),
    "SP223": ErrorInfo("A change in place of an input's shape", "Use the variant of the op without an underscore."),
    "SP224": ErrorInfo(
        "A change in place that autograd does not record", "Make a new tensor instead, for example x = x.clone()."
    ),
    "SP225": ErrorInfo(
        "A change in place through a view without a known inverse", "Clone the view before changing it."
    ),
    "SP226": ErrorInfo("An op that changes several tensors in place", "Use the variant without out=."),
    "SP227": ErrorInfo(
        "A change in place of complex numbers whose gradient torch computes wrongly",
        "Use the expression without inplace=True.",
    ),
    "SP231": ErrorInfo(
        "Shards at the edges of a model with graph breaks",
        "Use outputs='lazy', which keeps values that cross a break in shards, or remove the breaks that "
        "TORCH_LOGS=graph_breaks shows.",
    ),
    "SP232": ErrorInfo(
        "A local sequence whose length is compiled as a constant",
        "Pass shards of more than one row, and do not read the length as a Python number.",
    ),
    "SP233": ErrorInfo(
        "A dim that is as long as the local sequence",
        "Pass inputs whose other dims have other sizes, or name the sequence in seq_dims.",
    ),
    "SP234": ErrorInfo(
        "Shards of one sequence with different numbers of rows", "Name the inputs that come in shards in seq_dims."
    ),
    "SP235": ErrorInfo("A program that depends on the length of a shard", "Pass whole inputs: inputs='global'."),
    "SP236": ErrorInfo(
        "An input that the program does not have",
        "Use a name that the message lists; an input that is passed twice has its first name.",
    ),
    "SP237": ErrorInfo(
        "A result that the program does not have", "Use a name that the message lists, or the place of the result."
    ),
    "SP241": ErrorInfo(
        "DTensor parameters on a mesh with an axis of the sequence",
        "Write the tensor-parallel linears with functional collectives, or pass a mesh without the axis of the "
        "sequence.",
    ),
    "SP242": ErrorInfo(
        "A program of DTensors whose lengths change",
        "Compile one graph for each length with torch.compile(..., dynamic=False), or pad to one length.",
    ),
    # SP3xx: sequence and sharding
    # SP4xx: attention
    "SP451": ErrorInfo(
        "Key heads that do not divide the query heads",
        "Pass a number of query heads that is a multiple of the number of key heads.",
    ),
    "SP452": ErrorInfo(
        "A hybrid without its number of ranks that share heads",
        "Pass ulysses=..., or a mesh with axes ('ring', 'ulysses').",
    ),
    "SP453": ErrorInfo(
        "Ranks that share heads and divide neither the ranks nor the heads",
        "Use ring_attention, gathered_attention, or a hybrid with another number of ranks.",
    ),
    "SP454": ErrorInfo(
        "Shards of odd length in a layout of two chunks", "Pad the shards to an even length, and pass length=..."
    ),
    "SP455": ErrorInfo("A mask of large finite numbers", "Use -inf for pairs that may not attend, or a bool mask."),
    # SP5xx: scans and collectives
    "SP501": ErrorInfo("An unknown name of an option or an operation", "Use one of the names that the message lists."),
    "SP502": ErrorInfo("An argument of the wrong type", "Pass a value of the type that the message names."),
    "SP503": ErrorInfo("A dim out of range", "Pass a dim of the tensor."),
    "SP504": ErrorInfo("A tensor of the wrong shape", "Pass a tensor of the shape that the message names."),
    "SP505": ErrorInfo("A tensor of the wrong dtype", "Cast the tensor to a dtype that the message names."),
    "SP506": ErrorInfo("Tensors on different devices", "Move the tensors to one device."),
    "SP507": ErrorInfo("An argument out of range", "Pass a value of the range that the message names."),
    "SP508": ErrorInfo(
        "Calls that differ between ranks",
        "Make the same call on every rank: shards of equal length, padded if necessary with length=..., and the "
        "same options.",
    ),
    "SP511": ErrorInfo("Options of shards without a group", "Pass group= as well."),
    "SP512": ErrorInfo("A tensor of no dims with a group", "Pass a tensor with at least one dim, or leave group= out."),
    "SP513": ErrorInfo(
        "An exchange that the layout does not support",
        "Pass exchange='gather' or exchange='auto', or layout='contiguous'.",
    ),
    "SP521": ErrorInfo("An operation without indices", "Pass op='max' or op='min', or leave indices=True out."),
    "SP522": ErrorInfo("A dtype that scans do not support", "Cast x, or pass dtype= with a supported dtype."),
    "SP523": ErrorInfo("A result in integers that needs a gradient", "Detach x, or pass a floating-point dtype."),
    "SP524": ErrorInfo("Complex numbers in a scan", "Scan the real and the imaginary part separately."),
    "SP525": ErrorInfo("A sum or product in torch.bool", "Pass op='max' for any and op='min' for all."),
    "SP526": ErrorInfo(
        "A dtype to accumulate in that does not fit the result",
        "Pass the dtype that the message names, or leave accumulate_dtype out.",
    ),
    "SP527": ErrorInfo(
        "Segments that are not grouped",
        "Sort x by the ids or, if every run of equal ids is a segment of its own, pass runs=True.",
    ),
    "SP528": ErrorInfo("An integer that overflows", "Pass a wider dtype=, or check=False to let it wrap around."),
    "SP541": ErrorInfo("A DTensor in an exchange of shards", "Use x.redistribute(...), or pass x.to_local()."),
    "SP542": ErrorInfo(
        "An exchange of one dim with itself",
        "Pass two different dims, or exchange the blocks of one dim with torch.distributed.all_to_all_single.",
    ),
    "SP543": ErrorInfo(
        "A dim that the ranks do not divide",
        "Pad the dim to the size that the message names, or use a number of ranks that divides it.",
    ),
    "SP544": ErrorInfo(
        "An out tensor whose elements overlap", "Pass an out tensor that has its own place for each element."
    ),
    "SP545": ErrorInfo(
        "An out tensor that needs a gradient", "Leave out= out, detach x and out, or call under torch.no_grad()."
    ),
    "SP546": ErrorInfo("Rows without their dim", "Pass the dim of the rows: in_shards(rows, dim)."),
    "SP547": ErrorInfo(
        "A DTensor of another placement", "Redistribute the DTensor to Shard(dim) on a mesh of one axis."
    ),
    # SP6xx: ranks and process groups
    "SP681": ErrorInfo(
        "The default process group changed",
        "Call torch.compiler.reset() after init_process_group and destroy_process_group, then call the model again.",
    ),
    "SP682": ErrorInfo(
        "A forked process uses the rank's process group",
        "Call the model in the rank, not in a worker of a DataLoader or another forked process.",
    ),
    # SP7xx: memory and cost
    "SP701": ErrorInfo(
        "No strategy that can split the attention",
        "Pass a number of heads or ranks that one of the strategies supports.",
    ),
    "SP702": ErrorInfo(
        "A constant of the cost model out of range",
        "Pass a number in the range that the message names; sp_compile.cost.machine.Machine describes the constants.",
    ),
    "SP703": ErrorInfo(
        "An unknown constant of the cost model",
        "Use one of the names that the message lists; sp_compile.cost.machine.Machine describes them.",
    ),
    "SP704": ErrorInfo(
        "An optimizer that makes no step on a small matrix",
        "Pass its class or a function of parameters that makes it, or leave it out for AdamW.",
    ),
    "SP711": ErrorInfo("A number of ranks that is not positive", "Pass 1 or more ranks."),
    "SP712": ErrorInfo("A number of ranks beside a mesh of another size", "Pass sp or mesh, not both."),
    "SP713": ErrorInfo(
        "A size of memory for explain", "Pass memory=True, and the size of a device as cost={'memory': 80e9}."
    ),
    "SP714": ErrorInfo("An optimizer without a prediction of memory", "Pass memory=True as well."),
    "SP715": ErrorInfo(
        "verify on the meta device", "Build a smaller model on a CPU, or use explain, which needs no numbers."
    ),
    "SP716": ErrorInfo("Nothing to compare in verify", "Use explain, which shows why nothing is split."),
    "SP721": ErrorInfo(
        "plan of something that is not a module", "Pass the nn.Module itself, not a function or a compiled model."
    ),
    "SP722": ErrorInfo("A size of memory that cannot be read", "Pass bytes or a size such as '80GB' or '75GiB'."),
    "SP723": ErrorInfo(
        "A plan in which nothing fits",
        "Change what the message names: more ranks, more memory, checkpointed blocks or a sharded state.",
    ),
    "SP731": ErrorInfo(
        "An unknown argument of the command line", "Pass options of the backend as --option NAME=VALUE."
    ),
    "SP732": ErrorInfo(
        "An argument of the command passed as an option of the backend", "Pass it as an argument of the command."
    ),
    "SP733": ErrorInfo("A file that cannot be written", "Name a file in an existing folder that you can write to."),
    "SP734": ErrorInfo(
        "A model that cannot be imported",
        "Pass module:function, where the module can be imported from the current folder.",
    ),
    "SP735": ErrorInfo(
        "A function of the command line that does not return a model",
        "Return (model, args) or (model, args, kwargs), where args is a tuple.",
    ),
    # SP8xx: data and integrations
    "SP801": ErrorInfo(
        "A rank without a loader",
        "Pass a loader on every rank, or reads='first' and a loader on the first rank of each sequence.",
    ),
    "SP802": ErrorInfo(
        "A loader with a DistributedSampler",
        "Make the loader as for one device (shuffle=True), or give it a SequenceSampler of this mesh.",
    ),
    "SP803": ErrorInfo(
        "A loader's state of another number of replicas",
        "Resume on as many replicas, or with a DataLoader, which has no state of its own.",
    ),
    "SP804": ErrorInfo(
        "A sampler's state that this number of replicas cannot have",
        "Save at a multiple of the samples that all replicas take at once, or resume on as many replicas.",
    ),
    "SP805": ErrorInfo(
        "A batch with an object that cannot be sent",
        "Convert the object in collate_fn, or let every rank read: reads='all'.",
    ),
    "SP806": ErrorInfo("A rank that could not read its data", "Fix the error of that rank."),
    "SP807": ErrorInfo(
        "Ranks that read different data",
        "Make the same loader over the same dataset on every rank, and set the same epoch.",
    ),
    "SP811": ErrorInfo(
        "data_dims without a mesh of several axes",
        "Pass a mesh of several axes, such as one with mesh_dim_names=('dp', 'sp').",
    ),
    "SP812": ErrorInfo("A mesh without names of its axes", "Pass mesh_dim_names=('dp', 'sp') to init_device_mesh."),
    "SP813": ErrorInfo(
        "data_dims with the axis of the sequence",
        "Leave the axis of the sequence out of data_dims: its ranks take the same batches.",
    ),
    "SP814": ErrorInfo("A mesh without an axis of the sequence", "Name the axis of the sequence with mesh_dim."),
    "SP815": ErrorInfo(
        "Groups that do not split all ranks evenly",
        "Pass a DeviceMesh of all ranks, such as one with mesh_dim_names=('dp', 'sp').",
    ),
    "SP821": ErrorInfo(
        "Another backend in accelerate's settings",
        "Leave the backend out or set it to 'sp', and pass the compiler in sp_options={'compiler': ...}.",
    ),
    "SP822": ErrorInfo("An option that the Accelerator sets itself", "Leave the option out."),
    "SP823": ErrorInfo(
        "A distributed type of accelerate other than DDP", "Use DDP, or FSDP2 in a training loop without accelerate."
    ),
    "SP824": ErrorInfo(
        "dispatch_batches with ranks that share sequences",
        "Leave dispatch_batches out, or pass a sp_compile.data.SequenceLoader(loader, mesh=accelerator.mesh, "
        "reads='first').",
    ),
    "SP825": ErrorInfo(
        "Processes that accelerate does not use",
        "On CPUs pass TrainingArguments(use_cpu=True), or Accelerator(cpu=True).",
    ),
    "SP826": ErrorInfo(
        "Sizes of ParallelismConfig that do not multiply to the number of processes",
        "Pass sizes whose product is the number of processes, or leave one of them out.",
    ),
    "SP827": ErrorInfo(
        "A kind of parallelism that is not supported with accelerate",
        "Leave it out, and set dp_replicate_size and sp_size only.",
    ),
    "SP828": ErrorInfo(
        "A sum of integers that differ between ranks of one sequence",
        "Use torch.distributed.all_reduce for numbers that each rank counts by itself.",
    ),
    "SP829": ErrorInfo(
        "Replicas that pass different values to gather_for_metrics",
        "Pass tensors of the same shapes and dtypes, padded by accelerator.pad_across_processes, or set "
        "use_gather_object=True.",
    ),
    "SP831": ErrorInfo(
        "A model that is compiled before DDP", "Pass the model itself, and the options to compile_under_ddp."
    ),
    "SP832": ErrorInfo(
        "A model that is compiled for DDP and called without it",
        "Wrap the model by DistributedDataParallel(model), or compile it with torch.compile(model, "
        "backend='sp'). To evaluate, call model.eval() or use torch.no_grad().",
    ),
    # SP9xx: passes and rules of a contributor
    "SP981": ErrorInfo(
        "A strategy of attention that does not declare its bytes", "Pass sends=, the bytes that a rank sends in the op."
    ),
    "SP999": ErrorInfo("An error that has no code yet", ""),  # TODO: remove with the last call that passes a text alone
}
"""Every code of an `SpError`. A code keeps its meaning; the code of an error that is removed is not used again."""


def errors_page() -> str:
    """Return the text of `docs/errors.md`."""
    lines = [
        "# Errors",
        "",
        "Every error of this package is an `SpError`, a `ValueError` with a `code`. Its message is the code, the cause",
        "and the fix. This page is generated from `sp_compile/error_codes.py`.",
    ]
    for digit, section in SECTIONS.items():
        rows = [(code, info) for code, info in sorted(ERRORS.items()) if code[2] == digit]
        if rows:
            lines += ["", f"## {section}", "", "| code | error | fix |", "|---|---|---|"]
            lines += [f"| `{code}` | {_cell(info.title)} | {_cell(info.fix)} |" for code, info in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(errors_page())
