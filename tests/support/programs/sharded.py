"""Ten steps of a Trainer or of an accelerate loop with FSDP2, and a checkpoint: `python sharded.py RESULT KIND [CHECKPOINT]`.

Kinds: "loop", and those of `rl.make_trainer`. Training continues from CHECKPOINT where one is given. Rank 0 saves the
losses, the norms of gradients, the weights, and the part of weights and moments that it stores.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from rl import FSDP, RANKS, SHARE, make_trainer, model, rows, weights_of
from trainer import parts_of

from sp_compile.integrations.accelerate import SequenceParallelAccelerator

STEPS, SAVED = 10, 4  # GRPO samples for two steps: the fifth one does not depend on earlier completions
KEPT = {
    "trainer FSDP": "FULL_STATE_DICT",
    "sft LoRA FSDP": "FULL_STATE_DICT",
}  # other kinds of state dicts than the shards


def run_trainer(name: str, checkpoint: str | None) -> dict[str, Any]:
    fsdp = {**FSDP["fsdp_config"], "state_dict_type": KEPT.get(name, "SHARDED_STATE_DICT")}
    options = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED}
    trainer = make_trainer(name, **options, **({"fsdp": True, "fsdp_config": fsdp} if RANKS > 1 else {}))
    trainer.train(resume_from_checkpoint=checkpoint)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    found = {word: [line[word] for line in lines] for word in ("loss", "grad_norm")}
    return {**found, "weights": weights_of(trainer.model), "parts": parts_of(trainer.model, trainer.optimizer)}


def make_accelerator() -> Accelerator:
    if RANKS == 1:
        return Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    return SequenceParallelAccelerator(
        cpu=True,
        step_scheduler_with_optimizer=False,  # or it is stepped once for each replica, as accelerate does
        parallelism_config=ParallelismConfig(dp_shard_size=RANKS // SHARE) if RANKS > SHARE else None,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP"),
        sp_options={"compiler": "aot_eager"},
    )


def run_loop(checkpoint: str | None) -> dict[str, Any]:
    """The state is also saved after some steps, and its norms are those before clipping."""
    accelerator, network = make_accelerator(), model("trainer")
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    data = [torch.tensor(ids) for ids in rows("trainer")["input_ids"]] * 2
    loader = torch.utils.data.DataLoader(data, 8 * SHARE // RANKS)
    network, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, loader, scheduler)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    first = 0
    if checkpoint:
        accelerator.load_state(checkpoint)
        first = SAVED
    for step, ids in enumerate(accelerator.skip_first_batches(loader, first), first):
        if step == STEPS:
            break
        loss = network(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found["loss"].append(accelerator.gather_for_metrics(loss.detach()).mean().item())
        found["grad_norm"].append(getattr(norm, "full_tensor", lambda norm=norm: norm)().item())
        if step == SAVED - 1:
            accelerator.save_state("out-loop/checkpoint-4")
    return {**found, "weights": weights_of(accelerator.unwrap_model(network)), "parts": parts_of(network, optimizer)}


def main(result: str, kind: str, checkpoint: str | None = None) -> None:
    found = run_loop(checkpoint) if kind == "loop" else run_trainer(kind, checkpoint)
    if os.environ["RANK"] == "0":
        torch.save({**found, "files": {path.name for path in Path().glob("out-*/checkpoint-4/*")}}, result)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
