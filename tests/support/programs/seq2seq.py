"""A Seq2SeqTrainer that generates when it evaluates: `python seq2seq.py RESULT`.

Two steps, an evaluation of 5 rows and a prediction of 3, in batches of 2. Rank 0 saves the metrics, what was predicted
and the weights. SEQ2SEQ_SHARE ranks share a sequence. With SEQ2SEQ_LENGTHS=changing, rows have other lengths, labels are
padded with -100, an evaluation follows each step, and the learning rate is small: the loss of a replica is the mean of
its own labels, as under DDP, so that updates are those of a single device only if all rows have equally many.
"""

import os
import sys
from typing import ClassVar

import torch
from accelerate import ParallelismConfig
from transformers import EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

from sp_compile.integrations.transformers import SequenceParallel

VOCABULARY, SOURCE, TARGET = 32, 11, 5
RANKS = int(os.environ["WORLD_SIZE"])
SHARE = int(os.environ.get("SEQ2SEQ_SHARE", RANKS))
CHANGES = os.environ.get("SEQ2SEQ_LENGTHS") == "changing"


class SequenceTrainer(SequenceParallel, Seq2SeqTrainer):
    sp_options: ClassVar[dict[str, str]] = {"compiler": "aot_eager"}


def metrics(found: EvalPrediction) -> dict[str, float]:
    """Return the number of rows, and the sum of the generated tokens."""
    return {"rows": len(found.label_ids), "sum": float(found.predictions.clip(0).sum())}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad sources with 0, and labels with -100."""
    sources, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    ids = torch.nn.utils.rnn.pad_sequence(sources, batch_first=True)
    padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": padded}


def main(result: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = T5ForConditionalGeneration(T5Config(dropout_rate=0.0, **sizes, **tokens))
    sources, targets = (torch.randint(3, VOCABULARY, (8, length)) for length in (SOURCE, TARGET))
    rows = [{"input_ids": source, "labels": target} for source, target in zip(sources, targets)]
    if CHANGES:
        for i, row in enumerate(rows):
            row["input_ids"], row["labels"] = row["input_ids"][: SOURCE - i % 5], row["labels"][: TARGET - i % 3]
    arguments = Seq2SeqTrainingArguments(
        "out",
        per_device_train_batch_size=4 * SHARE // RANKS,
        per_device_eval_batch_size=2,
        max_steps=2,
        learning_rate=1e-6 if CHANGES else 1e-2,
        eval_strategy="steps" if CHANGES else "no",
        eval_steps=1,
        predict_with_generate=True,
        generation_max_length=3,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        parallelism_config=ParallelismConfig(sp_size=SHARE),
    )
    given = {"eval_dataset": rows[:5], "data_collator": collate} if CHANGES else {}
    made = SequenceTrainer if RANKS > 1 else Seq2SeqTrainer
    trainer = made(model=model, args=arguments, compute_metrics=metrics, train_dataset=rows, **given)
    trainer.train()
    evaluated, predicted = trainer.evaluate(rows[:5]), trainer.predict(rows[:3])
    if os.environ["RANK"] == "0":
        said = {**evaluated, **predicted.metrics}
        weights = {name: p.detach() for name, p in model.named_parameters()}
        predictions = torch.from_numpy(predicted.predictions)
        log = [line for line in trainer.state.log_history if "eval_rows" in line]
        torch.save({"metrics": said, "log": [*log, said], "predictions": predictions, "weights": weights}, result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
