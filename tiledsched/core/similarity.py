"""How much one problem of a kernel says about another: for the search, and for problems that nobody measured.

A kernel that knows more than the defaults subclasses :class:`Similarity` and declares `similarity = MySimilarity()`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tiledsched.core.cost import Cost
from tiledsched.core.errors import ProblemError
from tiledsched.core.fields import Choice, Dim, Flag, total
from tiledsched.core.schedule import Schedule

SHORT = 64
"""Sizes up to which each stands for itself."""
FAR = 10.0
"""The distance from which on the timing features of two problems say that times on one say nothing of the other."""
MOST_JUDGED = 512
"""Schedules whose time the model estimates for a problem about which nothing was measured."""


class Similarity:
    """How a kernel's problems compare. `p` and `q` are problems of the kernel."""

    own_first: ClassVar[bool] = False
    """Whether schedules of the kernel whose search space this one has are served only where no problem of its own is alike."""

    def weight(self, p: Any, q: Any) -> float:
        """How much the measurements of `q` count for the search on `p`: 1 for equal problems, less for each difference."""
        return math.exp(-0.1 * octaves(p, q) - 0.1 * differences(p, q))

    def kind(self, p: Any) -> tuple[Any, ...]:
        """What two problems must share so that the winner of one says much about the other. The default: flags and choices."""
        return tuple(p.values[name] for name in _words(p))

    def rival_kind(self, p: Any) -> tuple[Any, ...]:
        """What two problems of one kind must also share so that the time of a rival on one says something about the other."""
        return ()

    def distance(self, p: Any, q: Any) -> float:
        """How far apart two problems of one kind are.

        The default adds one for each octave between two sizes, and another one for sizes that are compile-time constants.
        """
        constant = [name for name, each in p.declaration.fields.items() if isinstance(each, Dim) and each.constant]
        return octaves(p, q) + octaves(p, q, constant) + 0.3 * differences(p, q)

    def timing_features(self, p: Any) -> tuple[float, ...]:
        """Numbers that place a problem among those on which rivals were timed.

        A distance of 1 between two problems means that their ratios of times have about half in common. Empty, the default, where
        times of other problems say nothing about `p`.
        """
        return ()

    def bucketed(self, p: Any) -> Any:
        """The problem that stands for all problems of about the size of `p`, so that one answer serves them all.

        The default rounds every size that a call may choose at run time, as :func:`about` does. Sizes that are compile-time
        constants, flags and choices stay, so that a program for the one serves the others.
        """
        names = [name for name, each in p.declaration.fields.items() if isinstance(each, Dim) and not each.constant]
        try:
            return p.replace(**{name: about(p.values[name]) for name in names})
        except ProblemError:  # such as a size that other sizes or the declaration bound
            return p

    def share_knobs(self, p: Any) -> Sequence[str]:
        """Names of the knobs that say how many blocks share a work tile, and how, if the model may choose them anew for `p` where
        a schedule won on another problem."""
        return ()

    def requires_same_kind(self, p: Any) -> bool:
        """Whether the winners of problems of other kinds are useless for `p`."""
        return False

    def carried(self, p: Any, q: Any, s: Schedule) -> Schedule:
        """What serves `q` where `s` won on `p`: the same, unless other values of some knobs are known to be faster on `q`."""
        return s

    def equivalents(self, p: Any, q: Any, s: Schedule) -> Sequence[Schedule]:
        """Schedules that make the same machine code as `s` on `p`, but other machine code on `q`, where they may be faster."""
        return ()

    def loss_group(self, p: Any) -> str:
        """Name of the group of problems for which the loss of a transferred schedule was measured; empty for none."""
        return ""

    def cold_start(
        self, p: Any, default: Schedule, space: Any, estimate: Callable[[Schedule], float]
    ) -> Schedule | None:
        """The schedule that serves `p` where no similar problem was measured; None for the default schedule.

        The default asks the kernel's own model, if it has one, for the fastest of the first :data:`MOST_JUDGED` schedules.

        Args:
            p: the problem.
            default: its default schedule.
            space: the search space.
            estimate: the modelled time of a schedule in microseconds, or a logarithm of that time.
        """
        if type(p.declaration.cost).model is Cost.model:
            return None
        plain = itertools.islice(space.schedules(p, pinned=space.modelled_pins()), MOST_JUDGED)
        return min([default, *plain], key=lambda schedule: (estimate(schedule), schedule.id))


def about(size: int) -> int:
    """A size at most an eighth larger that stands for all such sizes; divisible by 16 where `size` is, and nowhere else.

    Sizes up to :data:`SHORT` and round ones stand for themselves. Those that are not round are stood for by an odd size, because
    what is valid for that one is valid for sizes that divide nothing.
    """
    if size <= SHORT:
        return size
    step = 1 << ((size - 1).bit_length() - 4)
    whole = max(16, step)
    return -(-size // whole) * whole if size % 16 == 0 else -(-size // step) * step - 1 if size % step else size


def octaves(p: Any, q: Any, names: Sequence[str] | None = None) -> float:
    """Octaves between the sizes of two problems, added up over all sizes or over those in `names`."""
    pairs = ((p.values[name], q.values[name]) for name in (p.values if names is None else names))
    return sum(
        abs(math.log2(max(1, total(one)) / max(1, total(other))))
        for one, other in pairs
        if isinstance(one, (int, tuple)) and not isinstance(one, bool)
    )


def batch_distance(p: Any, q: Any) -> tuple[Any, ...]:
    """How little a schedule for the batch of `q` suits that of `p`, as a sort key: tiles for more rows hold fewer as well, not
    the other way round."""
    dims = p.declaration.batch_dims
    return sum(q.values[dim] < p.values[dim] for dim in dims), octaves(p, q, dims), q


def differences(p: Any, q: Any) -> int:
    """How many flags and choices differ between two problems."""
    return sum(p.values[name] != q.values[name] for name in _words(p))


def _words(p: Any) -> list[str]:
    """The fields of a problem that are flags or choices."""
    return [name for name, each in p.declaration.fields.items() if isinstance(each, (Choice, Flag))]
