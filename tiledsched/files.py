"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write beside the file, then rename: whoever reads sees the old contents or the new. Text becomes UTF-8.

    Raises:
        OSError: it cannot be written; what was there is still there, and nothing lies beside it.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.exists() and not target.is_file():
        target.write_bytes(data)  # a pipe or a terminal, whose place nothing can take; of a folder this raises
        return
    partial = target.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        partial.write_bytes(data)
        if target.exists():
            shutil.copymode(target, partial)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
