"""The command that turns a table into source."""

from __future__ import annotations

import difflib
import io
import os
import shlex
import sys
from pathlib import Path

from tiledsched.cli.app import FILE, Integer, Invocation, arch_option, command, kernel_argument, option, problem_options
from tiledsched.cli.output import print_table, print_wrapped
from tiledsched.cli.problems import named_problems
from tiledsched.core.errors import ConfigError
from tiledsched.core.files import write_whole
from tiledsched.core.problem import KernelClass

MOST_LEAVES = 32
"""So many are listed."""


@command("bake")
@kernel_argument
@problem_options
@arch_option("for which GPUs, e.g. sm_90 or sm_90,sm_100 (default: the GPU here)", many=True)
@option(
    "--max-leaves",
    type=Integer(1),
    metavar="N",
    help="at most N leaves, which may cost time (default: as many as it takes to choose what the table chooses)",
)
@option(
    "-o",
    "--output",
    type=FILE,
    metavar="FILE",
    help="FILE.py: a module; FILE.patch: a patch of the kernel's own file (default: print the module)",
)
@option(
    "--check",
    is_flag=True,
    help="write nothing; exit code 1 if the module, or without -o FILE.py the kernel's own file, is not what would be written",
)
def bake(
    run: Invocation,
    kernel: KernelClass,
    problem: tuple[str, ...],
    suite: str | None,
    arch: list[str] | None,
    max_leaves: int | None,
    output: str | None,
    check: bool,
) -> int:
    """Write what the table says as source that runs without tiledsched.

    It is a function from the sizes of a problem to its schedule, by a decision tree. As a patch, it goes into the file in
    which the kernel stands, where launches and calls of `exhaustive_search` then use it. Without -p and --suite, it is for all
    problems that were measured.

    \b
    tiledsched bake matmul --arch sm_90 --max-leaves 8 -o matmul_schedules.py
    tiledsched bake kernels.py:LayerNorm --arch sm_90 -o bake.patch
    tiledsched bake kernels.py:LayerNorm --arch sm_90 --check
    """
    from tiledsched.bake.baking import Baking, choices, mean_of
    from tiledsched.bake.patch import Patch
    from tiledsched.bake.text import BEGIN

    if output and not output.endswith((".py", ".patch", ".diff")):
        raise ConfigError(f"-o {output}: name a file that ends in .py for a module, or in .patch for a patch")
    archs, whole = run.archs(arch), output.endswith(".py") if output else not check
    flags = {"-p": problem, "--suite": [suite], "--arch": [",".join(archs)], "--max-leaves": [max_leaves]}
    words = [word for flag, given in flags.items() for each in given if each for word in (flag, str(each))]
    wanted = named_problems(kernel, problem, suite) if problem or suite else []
    cases = choices(kernel, archs, wanted, run.settings(), losses=max_leaves is not None)
    baking = Baking(kernel, cases, shlex.join(["tiledsched", "bake", run.kernel_word, *words]), max_leaves)
    if whole:
        path, after = Path(output or os.devnull).resolve(), baking.source()
        before = path.read_bytes().decode(errors="replace") if path.is_file() else ""
        if output and before and not before.startswith(BEGIN):
            raise ConfigError(f"-o {output}: this file holds something else than a baked module; name another")
    else:
        patch = Patch(baking, run.kernel_word)
        path, before, after = patch.path.resolve(), patch.before, patch.after
    root = next(each for each in (os.getcwd(), *filter(None, sys.path), "/") if path.is_relative_to(each))
    name = path.relative_to(root)
    lines = difflib.unified_diff([*io.StringIO(before)], [*io.StringIO(after)], f"a/{name}", f"b/{name}")
    diff = "".join(each if each.endswith("\n") else f"{each}\n\\ No newline at end of file\n" for each in lines)
    leaves = [
        (len(each.rows), mean_of(baking.losses(each)), baking.schedules[each.best]) for each in baking.tree.leaves()
    ]

    def say() -> None:
        if check:
            print(
                f"{name} is what the table says"
                if not diff
                else f"{diff}\n{name} is not what the table says; bake it again"
            )
        elif not output:
            print(after, end="")
        else:
            print_wrapped(f"{baking.said}.")
            rows = [(str(count), f"{longer:.1%}", schedule.short()) for count, longer, schedule in leaves]
            print_table(("problems", "longer by", "schedule"), rows[:MOST_LEAVES])
            print(f"\n{output}, for: patch -p1 -d {root}" if not whole else f"\n{output}")

    if output and not check:
        write_whole(output, after if whole else diff)
    run.print({"leaves": leaves, "regret": baking.said, "source": after, "changed": bool(diff)}, say)
    return int(check and bool(diff))
