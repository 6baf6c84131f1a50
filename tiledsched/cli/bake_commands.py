"""The command that turns a table into source."""

from __future__ import annotations

import difflib
import os
import shlex
from pathlib import Path
from typing import Any

import click

from tiledsched.cli.app import FILE, Invocation, arch_option, command, kernel_argument, option, problem_options
from tiledsched.cli.output import print_table
from tiledsched.cli.problems import named_problems
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass

PATCHES = (".patch", ".diff")
MOST_LEAVES = 32
"""Of more leaves, no list is printed."""


@command("bake")
@kernel_argument
@problem_options
@arch_option("for which GPUs, e.g. sm_90 or sm_90,sm_100 (default: the GPU here)", many=True)
@option(
    "--max-leaves",
    type=click.IntRange(1),
    metavar="N",
    help="at most N leaves, which may lose some time (default: as many as it takes to choose what the table chooses)",
)
@option(
    "-o",
    "output",
    type=FILE,
    metavar="FILE",
    help="FILE.py: a module; FILE.patch: a patch of the kernel's own file (default: the module, to the terminal)",
)
@option(
    "--check",
    is_flag=True,
    help="write nothing, and exit with 1 where the module, or without -o FILE.py the kernel's own file, is not what would be written",
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

    The source is a function that takes the sizes of a problem and returns its schedule, by a decision tree. As a patch,
    it goes into the file in which the kernel stands, and the launches and calls of `exhaustive_search` there use it; hints that are
    always the same go into the decorator, as `ct.ByTarget`. Without -p and --suite, all problems that were measured count.

    \b
    tiledsched bake matmul --arch sm_90 -o matmul_schedules.py
    tiledsched bake kernels.py:LayerNorm --max-leaves 8 -o bake.patch
    tiledsched bake kernels.py:LayerNorm --max-leaves 8 --check
    """
    from tiledsched.bake.baking import Baking, mean_of
    from tiledsched.bake.choices import choices
    from tiledsched.bake.patch import Patch

    if output and not output.endswith((".py", *PATCHES)):
        raise ConfigError(f"-o {output}: name a file that ends in .py for a module, or in .patch for a patch")
    archs = run.archs(arch)
    wanted = named_problems(kernel, problem, suite) if problem or suite else []
    chosen = {"-p": problem, "--suite": [suite], "--arch": [",".join(archs)], "--max-leaves": [max_leaves]}
    words = [
        str(word) for flag, values in chosen.items() for each in values if each is not None for word in (flag, each)
    ]
    cases = choices(kernel, archs, wanted, run.settings(), losses=max_leaves is not None)
    baking = Baking(kernel, cases, f"tiledsched bake {shlex.join([run.kernel_word, *words])}", max_leaves)
    whole = (output or ".py").endswith(".py") and not (check and not output)
    if whole:
        path, after = Path(output or os.devnull), baking.source()
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
    else:
        patch = Patch(baking, run.kernel_word)
        path, before, after = patch.path, patch.before, patch.after
    name = os.path.relpath(path)
    parts = [text.splitlines(keepends=True) for text in (before, after)]
    diff = "".join(difflib.unified_diff(*parts, f"a/{name}", f"b/{name}"))
    if output and not check:
        Path(output).write_text(after if whole else diff, encoding="utf-8")
    leaves = [
        {"problems": len(each.rows), "loses": mean_of(baking.losses(each)), "schedule": baking.schedules[each.best]}
        for each in baking.tree.leaves()
    ]
    found = {"kernel": kernel.name, "said": baking.said, "leaves": leaves, "source": after, "changed": bool(diff)}
    run.print(found, lambda: _print(baking.said, leaves, after, diff, output, check, name))
    return int(check and bool(diff))


def _print(
    said: str, leaves: list[dict[str, Any]], after: str, diff: str, output: str | None, check: bool, name: str
) -> None:
    """Print what was written or checked."""
    if check:
        print(
            f"{name} is what the table says"
            if not diff
            else f"{name} is not what the table says; run this without --check\n\n{diff}"
        )
        return
    if not output:
        print(after, end="")
        return
    print(f"{said}.\n")
    if len(leaves) <= MOST_LEAVES:
        print_table(
            ("problems", "longer by", "schedule"),
            [(str(each["problems"]), f"{each['loses']:.1%}", each["schedule"].short()) for each in leaves],
        )
    lines = sum(line.startswith("+") for line in diff.splitlines()[2:])
    print(f"\n{output}: {lines} lines" + f"; apply it with: git apply {output}" * output.endswith(PATCHES))
