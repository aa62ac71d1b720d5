"""All that a Trainer does beside training: `python trainer.py RESULT [CHECKPOINT]`.

Six steps with evaluations and checkpoints between, from CHECKPOINT where one is given, then a prediction. Rank 0 saves the
log, the metrics, what was predicted and the weights.
"""

import os
import sys
from typing import Any, ClassVar

import torch
from accelerate import ParallelismConfig
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


def main(result: str, checkpoint: str | None = None) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(VOCABULARY, (48, LENGTH))]
    share = min(2, int(os.environ["WORLD_SIZE"]))
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
        parallelism_config=ParallelismConfig(sp_size=share),
    )
    given: dict[str, Any] = {"model": model, "args": arguments, "compute_metrics": metrics}
    trainer = SequenceTrainer(train_dataset=rows, eval_dataset=rows[:7], **given)  # which no number of ranks divides
    trainer.train(resume_from_checkpoint=checkpoint)
    predicted = trainer.predict(rows[:5])
    if os.environ["RANK"] == "0":
        found = {"log": trainer.state.log_history, "predictions": torch.from_numpy(predicted.predictions)}
        weights = {name: p.detach() for name, p in model.named_parameters()}
        torch.save({**found, "metrics": predicted.metrics, "weights": weights}, result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
