"""Files that nobody else may write to: what a shared object must be before it is loaded."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def open_to_others(path: str | os.PathLike[str]) -> Path | None:
    """The first folder on the way to `path`, or the file itself, that belongs to or may be written by someone else.

    Else None: all of them are this user's or root's. In a sticky folder, as /tmp is one, others cannot replace what is
    ours; a folder that only its owner may enter hides all that lies below. Links are followed first.
    """
    real = Path(os.path.realpath(path))
    owners = {os.geteuid(), 0, os.stat("/").st_uid}  # in a sandbox the root of all may have another number
    for part in [*reversed(real.parents), real]:
        found = os.lstat(part)
        folder = stat.S_ISDIR(found.st_mode)
        shared = found.st_mode & 0o022 and not (folder and found.st_mode & stat.S_ISVTX)
        if found.st_uid not in owners or shared:
            return part
        if folder and not found.st_mode & 0o011:
            return None
    return None


def require_trusted(path: str) -> None:
    """Raise PermissionError for a file that may be another's."""
    if theirs := open_to_others(path):
        raise PermissionError(f"others may write to {theirs}: {path} is not loaded")
