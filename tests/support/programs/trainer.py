"""All that a Trainer does beside training: `python trainer.py RESULT [CHECKPOINT]`.

Six steps with evaluations and checkpoints between, from CHECKPOINT where one is given, then a prediction. Rank 0 saves the
log, the metrics, what was predicted, the weights, its part of the weights and moments, and the folders of the checkpoint.
On several ranks, TRAINER_FSDP names how FSDP2, which shards each layer, saves: SHARDED_STATE_DICT or FULL_STATE_DICT.
With TRAINER_DDP, the Trainer is that of transformers, under DDP, without this package.
"""

import os
import sys
from typing import Any, ClassVar

import torch
from accelerate import ParallelismConfig
from torch.distributed.tensor import DTensor
from transformers import EvalPrediction, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from sp_compile.integrations.transformers import SequenceParallel

LENGTH, VOCABULARY = 41, 64


class SequenceTrainer(SequenceParallel, Trainer):
    sp_options: ClassVar[dict[str, str]] = {"compiler": "aot_eager"}


def metrics(found: EvalPrediction) -> dict[str, float]:
    """Return the numbers of rows and of right tokens, and the norm of the logits."""
    logits, labels = torch.from_numpy(found.predictions), torch.from_numpy(found.label_ids)
    right = logits[:, :-1].argmax(-1) == labels[:, 1:]
    return {"rows": len(labels), "right": right.sum().item(), "size": logits.double().norm().item()}


def part_of(tensors: list[torch.Tensor]) -> float:
    """Return the part of the elements that this rank stores."""
    stored = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum(x.numel() for x in stored) / sum(x.numel() for x in tensors)


def parts_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the part of the weights and of the optimizer's moments that this rank stores."""
    moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    return [part_of([*model.parameters()]), part_of(moments)]


def main(result: str, checkpoint: str | None = None) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
    ids, lengths = torch.randint(VOCABULARY, (48, LENGTH)), torch.randint(4, LENGTH, (48, 1))
    labels = ids.masked_fill(torch.arange(LENGTH) > lengths, -100)
    rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    is_plain = "TRAINER_DDP" in os.environ
    share = 1 if is_plain else min(2, int(os.environ["WORLD_SIZE"]))
    kind = os.environ.get("TRAINER_FSDP") if share > 1 else None
    fsdp = {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "state_dict_type": kind}
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=8 // (int(os.environ["WORLD_SIZE"]) // share),
        per_device_eval_batch_size=4,
        max_steps=6,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        use_cpu=True,
        report_to=[],
        fsdp=kind is not None,
        fsdp_config=fsdp if kind else None,
        parallelism_config=None if is_plain else ParallelismConfig(sp_size=share),
    )
    given: dict[str, Any] = {"model": model, "args": arguments, "compute_metrics": metrics}
    made = Trainer if is_plain else SequenceTrainer
    trainer = made(train_dataset=rows, eval_dataset=rows[:7], **given)  # which no number of ranks divides
    trainer.train(resume_from_checkpoint=checkpoint)
    predicted = trainer.predict(rows[:5])
    trainer.save_model("saved")  # where FSDP saves full weights
    weights = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in trainer.model.named_parameters()}
    if os.environ["RANK"] == "0":
        found = {"log": trainer.state.log_history, "predictions": torch.from_numpy(predicted.predictions)}
        found["weights"] = {name: p.detach() for name, p in weights.items()}
        found["parts"] = parts_of(trainer.model, trainer.optimizer)
        files = {*os.listdir("out/checkpoint-6"), *os.listdir("saved")}
        torch.save({**found, "metrics": predicted.metrics, "files": files}, result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
