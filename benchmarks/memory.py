"""Peak activation memory of a step of the demo's model, on one device and on ranks of this machine.

Takes the flags of examples/train_lm.py.
"""

import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from compare import memory_table, run_alone, run_ranks
from train_lm import parse_args


def main() -> None:
    args = parse_args()
    args.steps = 1  # the measured step comes after it
    console = Console()
    console.print(memory_table(run_alone(args, console), run_ranks(args, console)))


if __name__ == "__main__":
    main()
