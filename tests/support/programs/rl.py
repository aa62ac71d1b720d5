"""TRL's Trainers that compare or sample completions: `python rl.py RESULT KIND...`.

Kinds: grpo, rloo, distillation, dpo, reward, and with a word "fixed" those whose completions follow from the prompts, so that
replicas have those of a single device. A word "FSDP" shards weights over all ranks, "HSDP" over the ranks of a sequence, and "cached"
shares the cache of generation. `make_trainer` also makes the kinds "trainer" and "sft", for sharded.py. Rank 0 saves the
log and the final weights of each kind, and for each rank the tokens, log-probabilities and rewards of each step. One
process runs the Trainer of TRL as it is.
"""

import os
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from sp_compile.integrations.shard_cache import CacheSharing
from sp_compile.integrations.transformers import SequenceParallel

VOCABULARY, GENERATIONS, LENGTH = 40, 4, 24
STEPS = int(os.environ.get("RL_STEPS", "4"))
RANKS = int(os.environ["WORLD_SIZE"])
SHARE = int(os.environ.get("RL_SHARE", RANKS))  # ranks of a sequence
TRAINERS = {
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
    "distillation": (DistillationTrainer, DistillationConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "reward": (RewardTrainer, RewardConfig),
    "sft": (SFTTrainer, SFTConfig),
    "trainer": (Trainer, TrainingArguments),
}
SAMPLED = {"num_generations": GENERATIONS, "max_completion_length": 9, "beta": 0.1, "num_iterations": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": SAMPLED,
    "rloo": SAMPLED,
    "distillation": {"max_completion_length": 9, "gradient_accumulation_steps": 2},
    "dpo": {"max_length": LENGTH},
    "reward": {"max_length": LENGTH},
    "sft": {"max_length": LENGTH, "packing": True},
    "trainer": {},
}
DOCUMENTS = (24,), (16, 8), (18, 6), (12, 12)  # lengths of the documents of a row, which packing finds again
TASKS = {"reward": "SEQ_CLS"}
FSDP = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}


class FixedCompletions:
    """A Trainer whose completions follow from the prompts."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        def complete(ids: list[int], i: int) -> list[int]:
            length = 3 + (sum(ids) + 5 * i) % 7
            return [3 + (7 * ids[-1] + j * (i + 2)) % (VOCABULARY - 3) for j in range(length)]

        found = [complete(ids, i % GENERATIONS) for i, ids in enumerate(prompt_ids)]
        return (found, None) if isinstance(self, GRPOTrainer) else found


class Recorder:
    """A Trainer that records what each step trains on, and its log-probabilities and rewards."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.trained: list[torch.Tensor] = []
        self.log_probs: list[torch.Tensor] = []
        self.rewards: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            names = [name for name in ("prompt_ids", "completion_ids", "input_ids") if name in inputs]
            self.trained.append(torch.cat([inputs[name] for name in names], 1).clone())
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        self.log_probs.append((found[0] if isinstance(found, tuple) else found).detach().clone())
        return found

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        self.rewards.append(found.clone())
        return found


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 3))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **tokens)


def sentence(length: int) -> str:
    return " ".join(f"w{i}" for i in torch.randint(VOCABULARY - 3, (length,)).tolist())


def rows(kind: str) -> Dataset:
    torch.manual_seed(3)
    if kind in ("grpo", "rloo", "distillation"):
        return Dataset.from_list([{"prompt": sentence(3 + i % 6)} for i in range(16)])
    if kind == "trainer":
        ids = torch.randint(3, VOCABULARY, (48, 13)).tolist()  # a length that no number of ranks divides
        return Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
    if kind == "sft":
        lengths = [length for row in DOCUMENTS for length in row] * 12
        return Dataset.from_list([{"input_ids": torch.randint(3, VOCABULARY, (n,)).tolist()} for n in lengths])
    pairs = [(sentence(3 + i % 5), sentence(2 + i % 4), sentence(2 + i % 7)) for i in range(32)]
    if kind == "reward":
        return Dataset.from_list([{"chosen": f"{a} {b}", "rejected": f"{a} {c}"} for a, b, c in pairs])
    return Dataset.from_list([{"prompt": a, "chosen": f" {b}", "rejected": f" {c}"} for a, b, c in pairs])


def model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": int(os.environ.get("RL_VOCABULARY", VOCABULARY)),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
    }
    tokens = {"pad_token_id": 0, "eos_token_id": 1}
    config = LlamaConfig(num_hidden_layers=int(os.environ.get("RL_LAYERS", "1")), num_labels=1, **sizes, **tokens)
    kind_of_model = LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM
    folder = f"start-{kind}"  # from which a Trainer loads the reference
    if not dist.is_initialized():  # each process saves
        folder += f"-{os.environ.get('RANK', '0')}"
    kind_of_model(config).save_pretrained(folder)  # with a process group, transformers saves on rank 0
    if dist.is_initialized():
        dist.barrier()
    return kind_of_model.from_pretrained(folder)


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(int(word[1:]) for word in text.split() if word[0] == "w") / 100 for text in completions]


def make_trainer(name: str, **options: Any) -> Any:
    """Return the Trainer of a kind. options: of its configuration, instead of those of RL_STEPS and without checkpoints."""
    kind = name.split()[0]
    base, config = TRAINERS[kind]
    trained = model(kind)
    is_sampled = kind in ("grpo", "rloo")
    # Configurations of GRPO and RLOO refuse sp_size, which is derived from the number of replicas.
    axis = "dp_shard_size" if "FSDP" in name else "dp_replicate_size"
    share = ParallelismConfig(**{axis: RANKS // SHARE}) if RANKS > SHARE else None
    given: dict[str, Any] = {"processing_class": tokenizer(), "train_dataset": rows(kind)}
    if is_sampled:
        given["reward_funcs"] = reward
    if kind == "distillation":
        torch.manual_seed(1)
        given["teacher_model"] = LlamaForCausalLM(trained.config)
    if "evaluated" in name:
        given["eval_dataset"] = rows(kind).select(range(4))
    if "LoRA" in name:
        given["peft_config"] = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type=TASKS.get(kind, "CAUSAL_LM")
        )
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8 * SHARE // RANKS,
        # min_reward is that of all rows
        "per_device_eval_batch_size": 4 if is_sampled else 4 * SHARE // RANKS,
        "max_steps": STEPS,
        "save_strategy": "no",
        **OPTIONS[kind],
        **(FSDP if "SDP" in name and RANKS > 1 else {}),
        **options,
    }
    arguments = config(
        f"out-{name.replace(' ', '-')}",
        learning_rate=float(os.environ.get("RL_RATE", "1e-2")),
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        parallelism_config=share,
        disable_tqdm=True,
        **settings,
    )
    of_ranks = [SequenceParallel] if RANKS > 1 else []
    bases = (Recorder, *of_ranks, *([FixedCompletions] if "fixed" in name else []), base)
    fields = {"sp_options": {"compiler": "aot_eager"}, "shard_generation": "cached" in name}
    return type("Trainer", bases, fields)(trained, args=arguments, **given)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the full weights."""
    weights = {key: p.full_tensor() if isinstance(p, DTensor) else p for key, p in model.named_parameters()}
    return {key: p.detach().clone() for key, p in weights.items()}


def train(name: str) -> dict[str, Any]:
    trainer = make_trainer(name)
    before = [trainer.evaluate()] if "evaluated" in name else []
    step = CacheSharing._run_step  # of a token, with the shared cache
    with mock.patch.object(CacheSharing, "_run_step", autospec=True, side_effect=step) as steps:
        trainer.train()
    assert bool(steps.call_count) == ("cached" in name and RANKS > 1)
    log = [*before, *trainer.state.log_history]
    recorded = {"trained": trainer.trained, "log_probs": trainer.log_probs, "rewards": trainer.rewards}
    ranks: list[Any] = [recorded] * RANKS
    if dist.is_initialized():
        dist.all_gather_object(ranks, recorded)
    return {"log": log, "ranks": ranks, "weights": weights_of(trainer.model)}


def main(result: str, *kinds: str) -> None:
    found = {kind: train(kind) for kind in kinds}
    if os.environ["RANK"] == "0":
        torch.save(found, result)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
