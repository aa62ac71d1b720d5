"""What the frames of a call say of what torch.compile was given."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch._dynamo import eval_frame, external_utils

COMPILED_CALL = eval_frame.__file__, "compile_wrapper"


def called(fn: Any) -> tuple[Any, CodeType | None]:
    """The module, or the name of the function, that a call of `fn` runs, and its code."""
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return owner, getattr(owner.forward, "__code__", None)
    return getattr(fn, "__qualname__", ""), getattr(fn, "__code__", None)


def compiled_module() -> torch.nn.Module | None:
    """The module that was given to torch.compile and whose call has come to what is compiled now; None: a function."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != COMPILED_CALL:
        frame = frame.f_back
    what, _ = called(frame.f_locals.get("fn")) if frame is not None else (None, None)
    return what if isinstance(what, torch.nn.Module) else None


def entered(code: CodeType, caller: FrameType | None) -> Any:
    """What was given to torch.compile, if this is its code and no code of a user is around it; None otherwise.

    caller: the innermost frame around the one that runs the code.
    """
    module = None
    while caller is not None and caller.f_code.co_filename == torch.nn.modules.module.__file__:
        module, caller = caller.f_locals.get("self"), caller.f_back
    if caller is None or (caller.f_code.co_filename, caller.f_code.co_name) != COMPILED_CALL:
        return None
    if module is None:
        torchs = code.co_filename == torch.nn.modules.module.__file__ or code.co_filename == external_utils.__file__
        return None if torchs else code.co_qualname
    return module if getattr(module.forward, "__code__", None) is code else None
