"""What the server imports that forks ranks: a model is compiled once, so that ranks find all modules that this needs."""

from __future__ import annotations

import torch
from support.fuzz.loop import Loop, Scene

torch.set_num_threads(1)
_loop = Loop(Scene("", world=1, odd=0, step=0, tcp=False, folder=""), 0, {})
_loop.compile()
_loop.train(0)
torch._dynamo.reset()
