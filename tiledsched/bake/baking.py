"""From what the table says of a kernel to source."""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
from collections.abc import Sequence

import numpy

from tiledsched.bake.choices import Case
from tiledsched.bake.text import left_open, names_in, source
from tiledsched.bake.tree import NEVER, Tree, grow
from tiledsched.core.problem import KernelClass
from tiledsched.core.space_files import space_for
from tiledsched.core.text import joined, plural


class Baking:
    """What is baked of a kernel.

    Args:
        kernel: the kernel.
        cases: the problems, with what schedules lose there.
        command: the words that bake it again.
        max_leaves: None for the table's choice in every case.
    """

    def __init__(self, kernel: KernelClass, cases: Sequence[Case], command: str, max_leaves: int | None = None) -> None:
        self.kernel, self.cases, self._command, self._exact = kernel, cases, command, max_leaves is None
        self.archs = sorted({each.arch for each in cases})
        self.names = [each.names(with_arch=len(self.archs) > 1) for each in cases]
        """By an expression, what is known of each problem before a launch."""
        self.facts = names_in(*self.names[0])
        """The variables of these expressions."""
        served = {each.served.schedule for each in cases}
        self.schedules = sorted(
            served.union(*(each.losses for each in cases if not self._exact)), key=lambda each: each.id
        )
        chosen = [[float(one != each.served.schedule) for one in self.schedules] for each in cases]
        lost = [[max(0.0, each.losses.get(one, NEVER)) for one in self.schedules] for each in cases]
        self.tree: Tree = grow(self.names, numpy.array(chosen if self._exact else lost), max_leaves)
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kernel.name.rpartition(":")[2])
        self.name = re.sub(r"\W", "_", words).lower().strip("_")
        """What the names of the source begin with."""

    def losses(self, leaf: Tree) -> list[float]:
        """By how much longer each problem of a leaf takes than with the table's choice, as a share."""
        schedule = self.schedules[leaf.best]
        return [math.expm1(max(0.0, self.cases[row].losses.get(schedule, NEVER))) for row in leaf.rows]

    @property
    def said(self) -> str:
        """How large it is and what it costs, in words."""
        leaves = self.tree.leaves()
        size = f"{plural(len(leaves), 'leaf', 'leaves')}, {plural(len({each.best for each in leaves}), 'schedule')}"
        size += f", {plural(len(self.cases), 'problem')}"
        if self._exact:
            return f"{size}: for each of them what the table chooses"
        lost = [each for leaf in leaves for each in self.losses(leaf)]
        timed = sum(self.schedules[leaf.best] in self.cases[row].measured for leaf in leaves for row in leaf.rows)
        return (
            f"{size}. Than with the table's choices, a problem takes {mean_of(lost):.1%} longer in the geometric mean, at worst "
            f"{max(lost):.1%}; {timed / len(lost):.0%} of these ratios are measured, the others estimated"
        )

    @functools.cached_property
    def _needs(self) -> dict[str, set[int]]:
        """What schedules need of a problem: a condition, and the numbers of the schedules that need it."""
        found: dict[str, set[int]] = {}
        for leaf, arch in itertools.product(self.tree.leaves(), self.archs):
            space = space_for(arch, self.kernel)
            for each in space.needed:
                known = {**space.limits, **self.schedules[leaf.best]}
                left = left_open(ast.parse(each.require, mode="eval").body, known)
                if left is not True:
                    found.setdefault(str(left), set()).add(leaf.best)
        return found

    @functools.cached_property
    def checked(self) -> dict[str, set[int]]:
        """Those of the conditions that a launch can check."""
        return {text: of for text, of in self._needs.items() if names_in(text) <= self.facts}

    @property
    def asked(self) -> set[str]:
        """The facts of a problem on which the choice depends."""
        return names_in(*(each.question for each in self.tree.nodes()), *self.checked)

    def source(self, kernel: str = "") -> str:
        """The source by itself; see :func:`tiledsched.bake.text.source`."""
        entries = [each.served.entry for each in self.cases if each.served.entry and each.served.entry.measurement]
        days = sorted(f"{each.measurement.created_at:%Y-%m-%d}" for each in entries if each.measurement)
        where = {f"{each.device_name} ({each.arch}), tileiras {each.compiler}, {each.regime}" for each in entries}
        same = [
            f"{name}={value}"
            for name, value in self.names[0].items()
            if all(each.get(name) == value for each in self.names)
        ]
        unchecked = len(self._needs) - len(self.checked)
        comment = [
            self._command,
            f"Measured on {joined(sorted(where))}, {' to '.join(sorted({*days[:1], *days[-1:]}))}."
            if days
            else "Nothing was measured.",
            f"{self.said}.",
            f"All of these problems have {joined(same)}." if same else "",
            f"For other problems {plural(unchecked, 'condition')} of the kernel cannot be checked here."
            if unchecked
            else "",
            "Do not edit this: run the command again. With --check it says whether this is what the table says today.",
        ]
        return source(self.name, self.tree, self.schedules, self.checked, self.facts, comment, kernel)


def mean_of(shares: Sequence[float]) -> float:
    """The geometric mean of ratios, all given and returned as what they are above 1."""
    return math.expm1(sum(map(math.log1p, shares)) / len(shares))
