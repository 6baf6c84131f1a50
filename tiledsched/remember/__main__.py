"""`python -m tiledsched.remember prog.py [args]` runs a program whose `exhaustive_search` remembers."""

from __future__ import annotations

import os
import runpy
import sys

from tiledsched.core.errors import ConfigError, TiledschedError
from tiledsched.remember.replacing import remember

USAGE = """usage: python -m tiledsched.remember [--check] PROGRAM.py [ARGUMENTS]
       python -m tiledsched.remember [--check] -m MODULE [ARGUMENTS]

Runs a program in which cuda.tile.tune.exhaustive_search answers from the tuning database what was measured before.
--check compares the outputs of all configurations with those of the first."""


def main(words: list[str]) -> int:
    """Run the program that the words of the command line name."""
    check = words[:1] == ["--check"]
    words = words[1:] if check else words
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        return 0 if words else ConfigError.exit_code
    remember(check=check)
    if words[0] == "-m":
        if len(words) < 2:
            raise ConfigError("-m needs the name of a module, as in: python -m tiledsched.remember -m package.module")
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return 0
    if not os.path.exists(words[0]):
        raise ConfigError(f"there is no program {words[0]}; name a Python file, or a module with -m")
    sys.argv = words
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(
            os.path.abspath(words[0])
        )  # in place of the current folder, as `python PROGRAM.py` has it
    runpy.run_path(words[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TiledschedError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
