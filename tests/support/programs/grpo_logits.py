"""Steps of GRPO with a large vocabulary, of RL_VOCABULARY tokens: `python grpo_logits.py RESULT`.

Rank 0 saves the bytes of its logits of one step, those of a tile, and those of the largest allocation of each step, which
samples, computes log-probabilities of the policy and of the reference, and goes backward. Steps that compile are left out.
"""

import os
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models.generation.test_logits_of_ranks import largest_allocation
from rl import RANKS, make_trainer

from sp_compile.passes.localize.tiles import choose_tiles, run_in_tiles

COMPLETION, ROWS, TILES, STEPS = 48, 8, 8, 4
LOGITS = ROWS * COMPLETION // RANKS * int(os.environ["RL_VOCABULARY"]) * 4


def main(result: str) -> None:
    trainer = make_trainer("grpo", max_steps=STEPS, max_completion_length=COMPLETION, num_iterations=1)
    allocated: list[int] = []
    step = trainer.training_step

    def measured(*args: Any, **kwargs: Any) -> Any:
        losses: list[Any] = []
        allocated.append(largest_allocation(lambda: losses.append(step(*args, **kwargs))))
        return losses[0]

    trainer.training_step = measured
    of_small_tiles = [
        mock.patch.object(module, "TILE_BYTES", LOGITS // TILES) for module in (choose_tiles, run_in_tiles)
    ]
    with of_small_tiles[0], of_small_tiles[1]:
        trainer.train()
    lengths = [x.shape[1] for x in trainer.trained]
    if os.environ["RANK"] == "0":
        sizes = {"logits": LOGITS, "tile": LOGITS // TILES, "allocated": allocated[STEPS // 2 :], "lengths": lengths}
        torch.save(sizes, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
