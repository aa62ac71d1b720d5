"""Runs the first program of a page of docs/ and keeps what came of it: `python recipe.py PAGE RESULT [OLD NEW]...`.

OLD is replaced by NEW in the code first. The result holds `losses` and the weights of `model`, saved by rank 0.
"""

import os
import re
import runpy
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from sp_compile import SPConfig


def main(page: str, result: str, *changes: str) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", Path(page).read_text(), re.DOTALL)
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in code, old
        code = code.replace(old, new)
    # What each rank compiles is not the matter, and Inductor takes a minute longer.
    SPConfig.__init__.__kwdefaults__["compiler"] = "aot_eager"
    script = Path(f"{Path(page).stem}.py")
    script.write_text(code)
    names = runpy.run_path(str(script), run_name="__main__")
    weights = {name: p.detach() for name, p in names["model"].named_parameters()}
    weights = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in weights.items()}
    if os.environ.get("RANK", "0") == "0":
        torch.save({"losses": [float(one) for one in names["losses"]], "weights": weights}, result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
