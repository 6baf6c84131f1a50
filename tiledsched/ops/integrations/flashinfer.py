"""Kernels for FlashInfer's Trace Apply, which calls a registered function in the place of FlashInfer's own.

Functions are registered by definition: a function of FlashInfer with the sizes that do not vary, such as `rmsnorm_h4096`.

    from flashinfer.trace_apply import enable_apply
    from tiledsched.ops.integrations.flashinfer import solution

    enable_apply({name: solution(name, eps=1e-5) for name in ("rmsnorm_h4096", "silu_and_mul_h28672")})

`python -m tiledsched.ops.integrations.flashinfer FOLDER --eps 1e-5` writes such solutions as files, for the definitions that
FlashInfer wrote into the folder with `FLASHINFER_TRACE_DUMP=1`.

FlashInfer 0.7.4 hands a registered function only the inputs that the definition has, and copies what it returns where the caller
wants it. Therefore:

- The definitions of norms have no `eps`, so that it must be given here.
- Those of attention have no mask, window or soft cap: no function could answer them rightly.
- `fused_add_rmsnorm` works in place. Two copies would cost more than a kernel can gain, and there is no solution of it.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiledsched.core.config import warn_once
from tiledsched.core.device import ARCHS
from tiledsched.core.errors import ConfigError, TiledschedError
from tiledsched.core.files import read_bounded, write_whole
from tiledsched.kernels.glu.front import geglu, swiglu
from tiledsched.kernels.rms_norm.front import rms_norm
from tiledsched.ops.front import are_served

SOURCE = '''"""Needs tiledsched: pip install tiledsched."""

from tiledsched.ops.integrations.flashinfer import solution

run = solution({name!r}, eps={eps!r})
'''


DEFINITIONS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "silu_and_mul": (("input",), swiglu),
    "gelu_and_mul": (("input",), geglu),
    "gelu_tanh_and_mul": (("input",), functools.partial(geglu, approximate="tanh")),
    "rmsnorm": (("hidden_states", "weight"), rms_norm),
}
"""Function of FlashInfer -> the inputs of its definitions, in the order in which that function and ours take them, and ours."""


def solution(name: str, eps: float | None = None) -> Callable[..., Any]:
    """The function that computes a definition of FlashInfer. Calls with tensors that our kernels do not take go on to
    FlashInfer's own function, with a warning.

    Args:
        name: e.g. `rmsnorm_h4096`.
        eps: what the model's norms add to the mean of squares; needed for norms.

    Raises:
        ConfigError: there is no kernel for this definition, a norm comes without eps, or FlashInfer is missing.
    """
    word, _, width = name.rpartition("_h")
    if word not in DEFINITIONS or not width.isdecimal():
        raise ConfigError(
            f"there is no kernel for the definition {name!r}; there are those for {', '.join(DEFINITIONS)}, each with the width "
            "of its input, such as rmsnorm_h4096"
        )
    inputs, ours = DEFINITIONS[word]
    numbers = [eps] if "weight" in inputs else []
    if None in numbers:
        raise ConfigError(f"{name} does not say which eps the model's norms have; give eps, such as 1e-5")
    try:
        import flashinfer
        from flashinfer import trace_apply  # noqa: F401  which old releases do not have
    except ImportError as error:
        raise ConfigError(
            f"FlashInfer with trace_apply is needed ({error}); install flashinfer-python 0.7.4"
        ) from error
    theirs = inspect.unwrap(getattr(flashinfer, word))  # beneath what Trace Apply may have put there

    def run(**given: Any) -> Any:
        tensors = [given[each] for each in inputs]
        if are_served(*tensors):
            return ours(*tensors, *numbers)
        warn_once(f"FlashInfer's own {word} serves a call of {name}, with tensors that tiledsched does not take")
        return theirs(*tensors, *numbers)

    return run


def write_solutions(folder: Path, eps: float | None = None) -> list[Path]:
    """Write a solution for each definition in a folder that there is a kernel for; returns the files, which lie in `solutions`.

    Args:
        folder: where FlashInfer wrote definitions. Of each file only the name in it is read.
        eps: see :func:`solution`.

    Raises:
        ConfigError: no definition has a kernel, a norm comes without eps, or a file cannot be read.
        OSError: the folder cannot be written.
    """
    written = []
    for path in sorted(each for each in folder.rglob("*.json") if "solutions" not in each.relative_to(folder).parts):
        try:
            name = str(json.loads(read_bounded(path))["name"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no definition of FlashInfer ({error!r}); move it elsewhere") from error
        if name.rpartition("_h")[0] in DEFINITIONS:
            solution(name, eps)  # raises where it could not be loaded later
            written.append(folder / "solutions" / f"tiledsched_{name}.json")
            written[-1].parent.mkdir(exist_ok=True)
            write_whole(written[-1], json.dumps(_described(name, eps), indent=2) + "\n")
    if not written:
        raise ConfigError(
            f"{folder} holds no definition of {', '.join(DEFINITIONS)}; first run the program with FLASHINFER_TRACE_DUMP=1 and "
            f"FLASHINFER_TRACE_DUMP_DIR={folder}"
        )
    return written


def _described(name: str, eps: float | None) -> dict[str, Any]:
    """A solution as FlashInfer reads it from a file."""
    return {
        "name": f"tiledsched_{name}",
        "definition": name,
        "author": "tiledsched",
        "spec": {
            "language": "python",
            "target_hardware": [arch.replace("_", "") for arch in ARCHS],
            "entry_point": "solution.py::run",
            "dependencies": ["tiledsched"],
        },
        "sources": [{"path": "solution.py", "content": SOURCE.format(name=name, eps=eps)}],
    }


def main(arguments: Sequence[str]) -> int:
    """Write the solutions and name their files."""
    parser = argparse.ArgumentParser(
        prog="python -m tiledsched.ops.integrations.flashinfer",
        description="Write solutions for FlashInfer's Trace Apply, for the definitions in a folder.",
    )
    parser.add_argument("folder", type=Path, help="what FLASHINFER_TRACE_DUMP_DIR named")
    parser.add_argument("--eps", type=float, help="what the model's norms add to the mean of squares, such as 1e-5")
    given = parser.parse_args(arguments)
    print(*write_solutions(given.folder, given.eps), sep="\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (TiledschedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))
