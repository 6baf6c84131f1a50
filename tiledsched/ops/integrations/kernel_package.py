"""Write a folder that Hugging Face `kernels` loads: `python -m tiledsched.ops.integrations.kernel_package DIR`.

The layout is that of Python-only ("noarch") kernels, as documented under "Kernel requirements" of kernels 0.17: a variant
for each backend, with the module, its metadata and digests. The
module hands on to the installed tiledsched. That is more than the Hub's rules allow a published kernel (it may import
nothing but torch and itself), so the folder is for loading from a path or one's own repository.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiledsched import __version__
from tiledsched.core.errors import ConfigError
from tiledsched.core.files import write_whole

NAME = "tiledsched-attention"
MODULE = NAME.replace("-", "_")
KERNEL_VERSION = 1
"""The version of the functions that the package offers, raised when one changes."""
BACKENDS = ("cuda", "cpu")
"""Variants written; on the CPU torch's attention answers."""

SOURCE = '''"""Attention on the tuned schedule. Needs tiledsched: pip install tiledsched."""

from typing import Optional

import torch

try:
    from tiledsched import sdpa as _sdpa
except ImportError as error:
    raise ImportError("this kernel needs tiledsched on the machine it runs on; run: pip install tiledsched") from error


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: Optional[float] = None):
    """Attention of q `[batch, heads, seq_q, head_dim]` with k, v `[batch, kv_heads, seq_k, head_dim]`.

    causal limits query row i to key columns 0..i; scale is 1 / sqrt(head_dim) unless given.
    """
    return _sdpa(q, k, v, causal=causal, scale=scale)


__all__ = ["sdpa"]
'''
CARD = f"""---
library_name: kernels
license: apache-2.0
---

# {NAME}

Flash attention in cuTile, forward and backward, on the schedules tuned for the GPU, served by tiledsched {__version__}.

```python
from pathlib import Path
from kernels import get_local_kernel

attention = get_local_kernel(Path("this folder"))
out = attention.sdpa(q, k, v, causal=True)
```
"""


def write_kernel_package(folder: Path) -> list[Path]:
    """Write the package into `folder`, made where needed; returns the files.

    Raises:
        ConfigError: it cannot be written.
    """
    texts = {"README.md": CARD}
    for backend in BACKENDS:
        variant = f"build/torch-{backend}"
        texts[f"{variant}/__init__.py"] = SOURCE
        texts[f"{variant}/metadata.json"] = json.dumps(_metadata(backend), indent=2, sort_keys=True) + "\n"
    for name, text in texts.items():
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, text)
        except OSError as error:
            raise ConfigError(f"cannot write {folder / name}: {error.strerror}; give another folder") from error
    return [folder / name for name in texts]


def _metadata(backend: str) -> dict[str, Any]:
    digest = hashlib.sha256(SOURCE.encode()).digest()
    return {
        "id": f"_{MODULE}_{backend}_{hashlib.sha256(digest).hexdigest()[:7]}",
        "name": NAME,
        "version": KERNEL_VERSION,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": {"__init__.py": base64.b64encode(digest).decode()}},
    }


def main(arguments: Sequence[str]) -> int:
    """Write the package and name its files."""
    if len(arguments) != 1:
        print("usage: python -m tiledsched.ops.integrations.kernel_package DIR", file=sys.stderr)
        return 2
    for path in write_kernel_package(Path(arguments[0])):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
