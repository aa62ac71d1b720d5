"""The registry of error codes: what each means, and what to do about it.

One file because it is the registry. `docs/errors.md` is generated from it:
`python -m sp_compile.lowering.base.error_codes`.

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
        "An unsupported value of an option",
        "Pass a value of the kind that the message names; docs/options.md lists the values of each option.",
    ),
    "SP104": ErrorInfo(
        "An unknown compiler", "Pass a name that torch.compiler.list_backends() returns, or a callable."
    ),
    "SP105": ErrorInfo(
        "An option that the compiler does not support",
        "Set compiler='inductor' or compiler='aot_eager', or omit the option.",
    ),
    "SP106": ErrorInfo(
        "An option that the attention strategy does not use", "Omit the option, or pass attention='auto'."
    ),
    "SP107": ErrorInfo("A mode of Inductor with another compiler", "Pass either mode or compiler."),
    "SP108": ErrorInfo("A mode that records CUDA graphs", "Use mode='max-autotune-no-cudagraphs' or mode='default'."),
    "SP109": ErrorInfo("An option without effect at this entry point", "Omit the option."),
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
        "Order the axes so that ranks of the inner axis are neighbors: mesh_dim_names=('ring', 'ulysses').",
    ),
    "SP116": ErrorInfo("An axis without a mesh", "Pass mesh=... as well."),
    "SP117": ErrorInfo(
        "GPU tensors exchanged by Gloo",
        'Initialize the group with NCCL for GPU tensors: init_process_group("cpu:gloo,cuda:nccl"), or without a '
        "backend.",
    ),
    # SP2xx: capture of the program
    "SP201": ErrorInfo(
        "A model in which torch.compile finds nothing to compile",
        "Remove torch.compiler.disable, TORCHDYNAMO_DISABLE or the stance that compiles nothing, or pass a model "
        "that calls an operator.",
    ),
    "SP202": ErrorInfo(
        "A constant tensor created on the meta device",
        "Create the tensor with torch.zeros or torch.full. In models of transformers it belongs to the cache: set "
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
        "A value of torch.func that is read outside its region",
        "Keep the call of torch.func out of the compiled region.",
    ),
    "SP216": ErrorInfo("A region whose body is not a sub-graph", "Remove the region, or compile its body only."),
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
        "A change in place that autograd does not record", "Create a new tensor instead, for example x = x.clone()."
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
        "Local inputs or outputs of a model with graph breaks",
        "Use outputs='lazy', which keeps values sharded between graphs, or remove the breaks that "
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
        "Shards of one sequence with different numbers of rows", "Name the inputs that are sharded in seq_dims."
    ),
    "SP235": ErrorInfo("A program that depends on the length of a shard", "Pass the full inputs with inputs='global'."),
    "SP236": ErrorInfo(
        "An input that the program does not have",
        "Use a name that the message lists; an input that is passed twice has its first name.",
    ),
    "SP237": ErrorInfo(
        "A result that the program does not have", "Use a name that the message lists, or the index of the result."
    ),
    "SP241": ErrorInfo(
        "DTensor parameters on a mesh with an axis of the sequence",
        "Write the tensor-parallel linears with functional collectives, or pass a mesh without the axis of the "
        "sequence.",
    ),
    "SP242": ErrorInfo(
        "A program of DTensors with dynamic lengths",
        "Compile one graph for each length with torch.compile(..., dynamic=False), or pad to one length.",
    ),
    # SP3xx: sequence and sharding
    "SP301": ErrorInfo(
        "A model in which no sequence is found", "Name the sequence: options={'seq_dims': {'<input>': <dim>}}."
    ),
    "SP303": ErrorInfo(
        "A dim in seq_dims that does not exist", "Count dims from 0, or from the last one with negative numbers."
    ),
    "SP304": ErrorInfo(
        "A program without sharded operations, with fallback='error'",
        "Name the sequence with seq_dims, or use fallback='gather'.",
    ),
    "SP305": ErrorInfo(
        "An operator that does not support shards, with fallback='error'",
        "Use fallback='gather', or register a rule for the operator with sp_compile.sharding_rule.",
    ),
    "SP306": ErrorInfo(
        "Sharded inputs of a program with one step per position",
        "Pass the full inputs with inputs='global', or use one operator for the scan (cumsum, sp_compile.functional).",
    ),
    "SP307": ErrorInfo("Sharded inputs whose sequence is not found", "Name all inputs that are sharded in seq_dims."),
    "SP308": ErrorInfo(
        "Sharded results of unequal length", "Use a length that the number of ranks divides, or outputs='gather'."
    ),
    "SP309": ErrorInfo(
        "Rows in the order of a sort that are read by position",
        "Restore the order of the sequence first, for example with y[inverse] or index_add.",
    ),
    "SP321": ErrorInfo(
        "A result that can no longer be computed when it is read",
        "Read it before the weights change, or use outputs='gather' or tiles='never'.",
    ),
    "SP322": ErrorInfo(
        "An assignment of other data to a sharded tensor",
        "Assign data of the same shape, dtype and device, or bind the name to the new tensor (x = new).",
    ),
    "SP323": ErrorInfo(
        "A transform of torch.func over a compiled program",
        "Call the transform inside the compiled function, request one gradient at a time (torch.autograd.grad in a "
        "loop), or do not compile this part.",
    ),
    # SP4xx: attention
    "SP401": ErrorInfo(
        "Heads that the strategy cannot split over the ranks",
        "Use attention='auto' or another strategy, or another mesh.",
    ),
    "SP402": ErrorInfo("Attention that Ulysses does not support", "Use attention='auto' or another strategy."),
    "SP403": ErrorInfo(
        "A layout that differs from the layout of an earlier graph",
        "Use layout='auto', or one layout for all compiled parts.",
    ),
    "SP411": ErrorInfo("A program that does not support the balanced layout", "Use layout='auto'."),
    "SP412": ErrorInfo(
        "The balanced layout with sharded inputs", "Use inputs='global' and one graph, or layout='auto'."
    ),
    "SP413": ErrorInfo("The balanced layout with outputs='local'", "Use outputs='gather', or layout='auto'."),
    "SP414": ErrorInfo("A balanced layout that differs from the one of an earlier graph", "Use layout='auto'."),
    "SP431": ErrorInfo(
        "Attention with dropout and without a seed", "Pass a seed, an int64 tensor of shape (), the same on every rank."
    ),
    "SP432": ErrorInfo(
        "flex_attention that cannot be compiled", "Install Triton and a C compiler, as Inductor needs them."
    ),
    "SP441": ErrorInfo(
        "A malformed mask predicate", "Compile the program again if a saved program has it, or correct the predicate."
    ),
    "SP442": ErrorInfo(
        "An unsupported function in a mask predicate",
        "Use comparisons, and, or, not, sums, products, Mod, Min, Max, Abs and floor.",
    ),
    "SP443": ErrorInfo("A symbol of a mask predicate without a value", "Pass the vector or the size that it names."),
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
    "SP501": ErrorInfo("An unknown name of an operation", "Use one of the names that the message lists."),
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
    "SP511": ErrorInfo("Options for shards without a group", "Pass group= as well."),
    "SP512": ErrorInfo("A tensor of no dims with a group", "Pass a tensor with at least one dim, or omit group=."),
    "SP513": ErrorInfo(
        "An exchange that the layout does not support",
        "Pass exchange='gather' or exchange='auto', or layout='contiguous'.",
    ),
    "SP521": ErrorInfo("An operation without indices", "Pass op='max' or op='min', or omit indices=True."),
    "SP522": ErrorInfo("A dtype that scans do not support", "Cast x, or pass dtype= with a supported dtype."),
    "SP523": ErrorInfo("An integer result that needs a gradient", "Detach x, or pass a floating-point dtype."),
    "SP524": ErrorInfo("Complex numbers in a scan", "Scan the real and the imaginary part separately."),
    "SP525": ErrorInfo("A sum or product in torch.bool", "Pass op='max' for any and op='min' for all."),
    "SP526": ErrorInfo(
        "An accumulation dtype that does not match the result",
        "Pass the dtype that the message names, or omit accumulate_dtype.",
    ),
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
        "An out tensor whose elements overlap",
        "Pass an out tensor without overlapping elements, such as a contiguous one.",
    ),
    "SP545": ErrorInfo(
        "An out tensor that needs a gradient", "Omit out=, detach x and out, or call under torch.no_grad()."
    ),
    "SP546": ErrorInfo("Rows without their dim", "Pass the dim of the rows: in_shards(rows, dim)."),
    "SP547": ErrorInfo(
        "A DTensor of another placement", "Redistribute the DTensor to Shard(dim) on a mesh of one axis."
    ),
    "SP551": ErrorInfo("An unknown scan kernel", "Use one of the names that the message lists."),
    "SP561": ErrorInfo("An unknown reduction of a collective", "Use one of the reductions that the message lists."),
    "SP571": ErrorInfo(
        "Simulated ranks whose collectives differ",
        "Run the same operators in the same order on every rank. Report this if backend='sp' compiled the program.",
    ),
    # SP6xx: ranks and process groups
    "SP601": ErrorInfo(
        "Ranks that run different operations", "Run the same models and backwards in the same order on every rank."
    ),
    "SP602": ErrorInfo(
        "A program that only some ranks recompile",
        "Call it with the same sizes, numbers and mode on every rank: pad other sizes, and pass a number that changes "
        "as a tensor. TORCH_LOGS=recompiles shows the reason.",
    ),
    "SP603": ErrorInfo(
        "A rank that stops after a mismatch in another of its groups", "Correct the error of that rank."
    ),
    "SP604": ErrorInfo(
        "A sharded tensor that only some ranks read",
        "Read it on every rank (.full() does), not under `if rank == 0`, or compile with outputs='gather', or "
        "outputs={'<result>': 'gather'}, which returns it gathered.",
    ),
    "SP605": ErrorInfo(
        "New weights on some ranks only",
        "Replace weights on every rank. Causes are load_state_dict(assign=True), a copy of the model, and a weight "
        "that is set, tied or added on some ranks only.",
    ),
    "SP607": ErrorInfo(
        "A model that could not be compiled on a rank",
        "Correct the error of that rank. If it contains `Failed to import`, `No space left` or `Read-only`, Inductor's "
        "cache on that rank is damaged, full or not writable: remove it, or set TORCHINDUCTOR_CACHE_DIR.",
    ),
    "SP608": ErrorInfo("An exception on another rank", "Correct the error of that rank."),
    "SP609": ErrorInfo(
        "A program that only some ranks can split", "Use the same model, inputs and versions on every rank."
    ),
    "SP610": ErrorInfo(
        "Options or modes that differ between ranks",
        "Pass the same options on every rank, in the same mode (no_grad, autocast, a checkpoint, no_sync of DDP).",
    ),
    "SP611": ErrorInfo(
        "A process group that was not declared",
        "Call sp_compile.declare_groups(mesh) with the mesh of the group on every rank, before the model is compiled.",
    ),
    "SP612": ErrorInfo(
        "A process group that this rank does not have",
        "Create the group on every rank with torch.distributed.new_group.",
    ),
    "SP614": ErrorInfo("declare_groups without process groups", "Call torch.distributed.init_process_group() first."),
    "SP615": ErrorInfo(
        "A mesh that declare_groups does not support", "Pass a DeviceMesh, or a list of process groups."
    ),
    "SP617": ErrorInfo("Arguments of declare_groups that differ between ranks", "Pass equal arguments on every rank."),
    "SP618": ErrorInfo(
        "Groups that do not form an axis",
        "Pass on every rank the group of the axis that it is in; the groups of an axis do not overlap.",
    ),
    "SP619": ErrorInfo(
        "A sequence axis that the program's own collectives use", "Name another axis of the mesh with mesh_dim."
    ),
    "SP621": ErrorInfo(
        "A timeout in a collective of the ranks",
        "Correct the first error in the output of that rank. Set the timeout of the group with "
        "init_process_group(timeout=...).",
    ),
    "SP622": ErrorInfo(
        "A timeout in the read of a sharded tensor",
        "Correct the first error in the output of the rank that is missing. Without an error, that rank does not read "
        "the tensor: call .full() on every rank, or compile with outputs='gather'.",
    ),
    "SP623": ErrorInfo(
        "A process group that is unusable after an error",
        "Correct the first error, and restart the processes or create a new process group.",
    ),
    "SP624": ErrorInfo(
        "Two threads with one process group",
        "Call the programs from one thread, or pass each thread's model a mesh with its own groups.",
    ),
    "SP631": ErrorInfo(
        "Programs that differ between ranks",
        "Use the same code, sizes, numbers and modes (model.eval(), also of a submodule) on every rank.",
    ),
    "SP632": ErrorInfo(
        "Sizes or numbers that differ between ranks",
        "Call the same model, with the same weights, on arguments of the same sizes and numbers on every rank.",
    ),
    "SP633": ErrorInfo(
        "Values that differ between ranks",
        "Call the same model, with the same weights, on the same arguments on every rank.",
    ),
    "SP634": ErrorInfo(
        "Batches that differ between ranks, with equal programs and weights",
        "Pass the same batch to the ranks that share a sequence. A DistributedSampler over all ranks does not: use "
        "sp_compile.data.SequenceSampler(dataset, mesh); for transformers and accelerate use "
        "sp_compile.integrations.",
    ),
    "SP635": ErrorInfo(
        "Weights that were equal at an earlier call",
        "Train in the same way on every rank. Causes are an optimizer step, a schedule, a scaler, zero_grad, clipping "
        "or a change of weights on some ranks only (under `if rank == 0`), and torch.autograd.grad for backward.",
    ),
    "SP636": ErrorInfo(
        "Inputs that differ between ranks and are not detected as shards, with inputs='local'",
        "Pass the full input on every rank. If it is a shard, name its dim and those of all sharded inputs: "
        "options={'seq_dims': {'<input>': <dim>}}.",
    ),
    "SP637": ErrorInfo(
        "Gradients of results that differ between ranks",
        "Compute the same loss on every rank, from the same targets, weights and random numbers.",
    ),
    "SP638": ErrorInfo(
        "Values that differed between ranks at an earlier call",
        "Restore the state before that call, and call the same model, with the same weights, on the same arguments "
        "on every rank.",
    ),
    "SP639": ErrorInfo("Gradients that only some ranks require", "Set requires_grad to the same value on every rank."),
    "SP651": ErrorInfo(
        "Weights that differ between ranks",
        "Initialize and update the weights in the same way on every rank. Causes are a seed, a checkpoint, an "
        "optimizer step or a change of a weight on some ranks only.",
    ),
    "SP652": ErrorInfo(
        "A model without weights that the ranks share", "Compare the model before FSDP or tensor parallelism splits it."
    ),
    "SP661": ErrorInfo(
        "An exception of a rank in a compiled program",
        "Correct the error of that rank, and restart the processes, or call destroy_process_group and "
        "init_process_group.",
    ),
    "SP671": ErrorInfo(
        "Gradients of a shared result that differ between tensor-parallel ranks",
        "Compute the same loss on every rank, or sum the gradient over the group first, or compile with "
        "sequence_parallel_linear='never', which does not change the gradients of autograd.",
    ),
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
        "Pass a number in the range that the message names; sp_compile.passes.cost.machine.Machine describes the "
        "constants.",
    ),
    "SP703": ErrorInfo(
        "An unknown constant of the cost model",
        "Use one of the names that the message lists; sp_compile.passes.cost.machine.Machine describes them.",
    ),
    "SP704": ErrorInfo(
        "An optimizer that fails in a trial step on a small matrix",
        "Pass an optimizer class or a function that returns an optimizer for parameters, or omit it for AdamW.",
    ),
    "SP711": ErrorInfo("A number of ranks that is not positive", "Pass 1 or more ranks."),
    "SP712": ErrorInfo("A number of ranks that differs from the mesh", "Pass sp or mesh, not both."),
    "SP713": ErrorInfo(
        "A memory size passed as memory= of explain",
        "Pass memory=True, and the size of a device as cost={'memory': 80e9}.",
    ),
    "SP714": ErrorInfo("An optimizer without memory=True", "Pass memory=True as well."),
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
        "Use more ranks, more memory, checkpointed blocks or a sharded optimizer state, as the message proposes.",
    ),
    "SP731": ErrorInfo(
        "An unknown argument of the command line", "Pass options of the backend as --option NAME=VALUE."
    ),
    "SP732": ErrorInfo(
        "An argument of the command passed as an option of the backend", "Pass it as an argument of the command."
    ),
    "SP733": ErrorInfo("A file that cannot be written", "Pass a file name in an existing, writable folder."),
    "SP734": ErrorInfo(
        "A model that cannot be imported",
        "Pass module:function, where the module can be imported from the current folder.",
    ),
    "SP735": ErrorInfo(
        "A function of the command line that does not return a model",
        "Return (model, args) or (model, args, kwargs), where args is a tuple.",
    ),
    # SP8xx: data and integrations
    "SP804": ErrorInfo(
        "A sampler state that this number of replicas cannot resume",
        "Save after a number of samples that the replicas divide, or resume on the same number of replicas.",
    ),
    "SP811": ErrorInfo(
        "data_dims without a mesh of several axes",
        "Pass a mesh of several axes, such as one with mesh_dim_names=('dp', 'sp').",
    ),
    "SP812": ErrorInfo("A mesh without names of its axes", "Pass mesh_dim_names=('dp', 'sp') to init_device_mesh."),
    "SP813": ErrorInfo(
        "data_dims with the axis of the sequence",
        "Remove the sequence axis from data_dims: its ranks read the same batches.",
    ),
    "SP814": ErrorInfo("A mesh without an axis of the sequence", "Name the axis of the sequence with mesh_dim."),
    "SP815": ErrorInfo(
        "Groups that do not split all ranks evenly",
        "Pass a DeviceMesh of all ranks, such as one with mesh_dim_names=('dp', 'sp').",
    ),
    "SP821": ErrorInfo(
        "Another backend in accelerate's settings",
        "Omit the backend or set it to 'sp', and pass the compiler in sp_options={'compiler': ...}.",
    ),
    "SP822": ErrorInfo("An option that the Accelerator sets itself", "Omit the option."),
    "SP823": ErrorInfo(
        "A distributed type of accelerate other than DDP", "Use DDP, or FSDP2 in a training loop without accelerate."
    ),
    "SP824": ErrorInfo(
        "dispatch_batches with ranks that share sequences",
        "Omit dispatch_batches, so that every rank reads the batches of its sequence.",
    ),
    "SP825": ErrorInfo(
        "Processes that accelerate does not use",
        "On CPUs pass TrainingArguments(use_cpu=True), or Accelerator(cpu=True).",
    ),
    "SP826": ErrorInfo(
        "Sizes of ParallelismConfig that do not multiply to the number of processes",
        "Pass sizes whose product is the number of processes, or omit one of them.",
    ),
    "SP827": ErrorInfo(
        "A kind of parallelism that is not supported with accelerate",
        "Remove it, and set dp_replicate_size and sp_size only.",
    ),
    "SP828": ErrorInfo(
        "A sum of integers that differ between ranks of one sequence",
        "Use torch.distributed.all_reduce for numbers that each rank counts independently.",
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
        "Wrap the model with DistributedDataParallel(model), or compile it with torch.compile(model, "
        "backend='sp'). To evaluate, call model.eval() or use torch.no_grad().",
    ),
    # SP9xx: passes and rules of a contributor
    "SP901": ErrorInfo(
        "A name that is already registered",
        "Use another name, or register the first one in a with block, which removes it at its end.",
    ),
    "SP902": ErrorInfo("An unknown name in a table", "Use one of the names that the message lists."),
    "SP903": ErrorInfo("A row of a table that does not support the call", "Select another row, or change the call."),
    "SP904": ErrorInfo("A strategy whose pass has another name", "Set both names to the same value."),
    "SP905": ErrorInfo("An unknown policy of a pass on reductions", "Use one of the policies that the message lists."),
    "SP906": ErrorInfo("A graph without shapes", "Run torch.fx.passes.fake_tensor_prop.FakeTensorProp on it first."),
    "SP907": ErrorInfo("A pass with another number of ranks than its group has", "Pass the size of the group."),
    "SP908": ErrorInfo(
        "A graph with the name of a program that the process does not have",
        "Compile the model in this process: a saved graph has the names of score functions and tiles, not their code.",
    ),
    "SP912": ErrorInfo(
        "A demand that no strategy claims",
        "Report this with the program, or correct your own pass that records the demand: explain(passes=True) shows "
        "which passes ran.",
    ),
    "SP913": ErrorInfo(
        "Localize on a graph with unclaimed demands", "Run a pass that claims the demand first, such as passes.Gather."
    ),
    "SP921": ErrorInfo("A node that is not an operator", "Use ATen or sp:: operators in graphs."),
    "SP922": ErrorInfo(
        "A result of a collective that is read before wait_tensor", "Insert wait_tensor before the reader."
    ),
    "SP923": ErrorInfo(
        "An operator that does not declare its padded rows",
        "Register it with padded='nearest', 'finite' or 'as given' (lowering/base/library.py).",
    ),
    "SP924": ErrorInfo(
        "An operator that reads padded rows", "Report this with the program: sp::window has to restore them first."
    ),
    "SP925": ErrorInfo(
        "An operator that fails on a rank's shapes",
        "Correct the rule of the operator if it is yours. Otherwise report this with the program.",
    ),
    "SP926": ErrorInfo(
        "An operator whose local shape does not match its placement",
        "Correct the rule of the operator if it is yours. Otherwise report this with the program.",
    ),
    "SP931": ErrorInfo(
        "Malformed dims of a rule", "Write the dims as 'b (h d), d e -> b h e': docs/api.md describes the notation."
    ),
    "SP932": ErrorInfo("An unknown option of a rule", "Use one of the options that the message lists."),
    "SP933": ErrorInfo(
        "An option of a rule whose value is not a constant", "Write a Python constant, such as 1 or 0.0."
    ),
    "SP934": ErrorInfo(
        "A classified factor that is in no operand", "Name a factor of an operand, or remove it from the options."
    ),
    "SP935": ErrorInfo(
        "An unclassified factor that is in no result",
        "Classify it with one of the options that sp_compile.passes.sharding.rule describes, such as sum= or whole=.",
    ),
    "SP936": ErrorInfo("A factor of unknown size", "Pass the sizes with sizes=."),
    "SP981": ErrorInfo(
        "A strategy of attention that does not declare its bytes", "Pass sends=, the bytes that a rank sends in the op."
    ),
}
"""Every code of an `SpError`. A code keeps its meaning; the code of an error that is removed is not used again."""


def errors_page() -> str:
    """Return the text of `docs/errors.md`."""
    lines = [
        "# Errors",
        "",
        "Every error of this package is an `SpError`, a `ValueError` with a `code`. Its message is the code, the cause",
        "and the fix. This page is generated from `lowering/base/error_codes.py`.",
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
