"""A Seq2SeqTrainer that generates when it evaluates: `python seq2seq.py RESULT`.

Two steps, an evaluation of 5 rows and a prediction of 3, in batches of 2. Rank 0 saves the metrics, what was predicted
and the weights.
"""

import os
import sys
from typing import ClassVar

import torch
from accelerate import ParallelismConfig
from transformers import EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

from sp_compile.integrations.transformers import SequenceParallel

VOCABULARY, SOURCE, TARGET = 32, 11, 5


class SequenceTrainer(SequenceParallel, Seq2SeqTrainer):
    sp_options: ClassVar[dict[str, str]] = {"compiler": "aot_eager"}


def metrics(found: EvalPrediction) -> dict[str, float]:
    """Return the number of rows, and the sum of the generated tokens."""
    return {"rows": len(found.label_ids), "sum": float(found.predictions.clip(0).sum())}


def main(result: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = T5ForConditionalGeneration(T5Config(dropout_rate=0.0, **sizes, **tokens))
    sources, targets = (torch.randint(3, VOCABULARY, (8, length)) for length in (SOURCE, TARGET))
    rows = [{"input_ids": source, "labels": target} for source, target in zip(sources, targets)]
    arguments = Seq2SeqTrainingArguments(
        "out",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        max_steps=2,
        learning_rate=1e-2,
        predict_with_generate=True,
        generation_max_length=3,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        parallelism_config=ParallelismConfig(sp_size=int(os.environ["WORLD_SIZE"])),
    )
    trainer = SequenceTrainer(model=model, args=arguments, compute_metrics=metrics, train_dataset=rows)
    trainer.train()
    evaluated, predicted = trainer.evaluate(rows[:5]), trainer.predict(rows[:3])
    if os.environ["RANK"] == "0":
        said = {**evaluated, **predicted.metrics}
        weights = {name: p.detach() for name, p in model.named_parameters()}
        predictions = torch.from_numpy(predicted.predictions)
        torch.save({"metrics": said, "predictions": predictions, "weights": weights}, result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
