"""The options of tuning, recording, refreshing and checking: the only place of their names, defaults and help texts.

The flags of the command line, the keywords of `tiledsched.tune` and the JSON options of a fleet's campaign are all made
from these classes: :func:`options_of` describes each field, and :meth:`Options.from_mapping` reads keywords or JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tiledsched.build.compiler import DEFAULT_TIMEOUT_S
from tiledsched.core.config import SETTINGS
from tiledsched.core.errors import ConfigError, did_you_mean
from tiledsched.core.files import real_path
from tiledsched.tuning.samplers import OURS, SAMPLERS


@dataclass(frozen=True, kw_only=True)
class Effort:
    """One level of effort."""

    programs: int
    """Distinct programs to measure per problem, at most; those measured before count. 0 for no search."""
    batch: int
    """Programs measured before the search uses what they showed."""
    builds: int
    """Schedules built for each program that is measured: their machine code shows which are worth measuring."""
    finalists: int
    """Programs in the deciding race, beside what is served today and the default; 0 to time only what is served."""
    both_regimes: bool
    """Whether programs nearly as fast as the burst winner race in the sustained regime, too."""
    least_gain: float
    """The search ends when no candidate is expected to be faster than the best by this part of its time."""
    modelled: int | None = None
    """Schedules built per problem where there is no GPU, the model's favourites first; None for all."""


EFFORTS: Mapping[str, Effort] = {
    "served": Effort(programs=0, batch=8, builds=2, finalists=0, both_regimes=False, least_gain=0.0),
    "race": Effort(programs=0, batch=8, builds=2, finalists=2, both_regimes=False, least_gain=0.0, modelled=2),
    "quick": Effort(programs=16, batch=8, builds=2, finalists=8, both_regimes=False, least_gain=2e-3, modelled=16),
    "default": Effort(programs=64, batch=8, builds=2, finalists=16, both_regimes=True, least_gain=5e-4, modelled=64),
    "thorough": Effort(programs=192, batch=8, builds=2, finalists=24, both_regimes=True, least_gain=0.0, modelled=None),
}
"""The levels by name, the one that does least first. `served` only measures what is served today, anew in each run, as a
regression check needs it. `race` searches nothing: what is served today races the default schedule, and rivals are timed next
to the winner."""


CHECK_ARCH, OTHER_CHECK_ARCH = "sm_90", "sm_121"
"""Whose search space `check` draws schedules from where no arch is given, and where that has not all types of the problems: the
interpreter is the same for every arch."""
Chosen = TypeVar("Chosen", bound="Options")


@dataclass(frozen=True, kw_only=True)
class OptionSpec:
    """One option as the command line and a check of values need to know it."""

    name: str
    """Its keyword in Python and its key in JSON, e.g. `budget_s`."""
    default: Any
    """Its value where none is given."""
    help: str
    """What it does, in lower case and without its default, e.g. "seed of the sampler"."""
    type: type
    """bool (a flag without a value), int, float or str. None is allowed, too, where it is the default."""
    choices: tuple[str, ...] = ()
    """The values that are allowed; empty where any value of the type is."""
    minimum: int | None = None
    """The least value that is allowed; None for no limit."""
    metavar: str = ""
    """What stands for its value in a usage line, e.g. SECONDS; empty for flags and choices."""
    default_help: str = ""
    """What happens without it, where the default itself does not say that, e.g. "no limit"."""
    is_file: bool = False
    """Whether it names a file, which every host of a fleet must have in the same place."""

    @property
    def flag(self) -> str:
        """The command line's flag, e.g. `--budget` for `budget_s`: a unit is named by the metavar there."""
        return "--" + self.name.removesuffix("_s").removesuffix("_gib").replace("_", "-")

    def check(self, value: Any) -> None:
        """Make sure that a value is allowed.

        Raises:
            ConfigError: it is not.
        """
        if value is None and self.default is None:
            return
        accepted = (int, float) if self.type is float else self.type
        right = isinstance(value, accepted) and (self.type is bool or not isinstance(value, bool))
        if self.choices:
            right, wanted = right and value in self.choices, f"one of {', '.join(self.choices)}"
        elif self.minimum is not None:
            right, wanted = right and value >= self.minimum, f"a number of {self.minimum} or more"
        else:
            wanted = {bool: "True or False", int: "an integer", float: "a number", str: "text"}[self.type]
        if not right:
            raise ConfigError(f"{self.name} must be {wanted}, not {value!r}")


def option(default: Any, *, help: str, **described: Any) -> Any:
    """A field of an options class. `described` are the other fields of :class:`OptionSpec`; without a `type`, the type of the
    default is meant, or str where that is None.
    """
    usual = str if default is None else type(default)
    return dataclasses.field(default=default, metadata={"help": help, "type": usual, **described})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all options have in common: wrong values are refused when they are made."""

    def __post_init__(self) -> None:
        for each in options_of(self.__class__):
            each.check(getattr(self, each.name))

    @classmethod
    def from_mapping(cls: type[Chosen], values: Mapping[str, Any], of: str) -> Chosen:
        """Options of keywords (paths as `Path` or text) or of JSON; `of` names the command that takes them, for the message.

        Raises:
            ConfigError: a name is unknown, or a value is not allowed.
        """
        known = [each.name for each in options_of(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            meant = did_you_mean(unknown[0], known)
            raise ConfigError(f"{of} has no option {', '.join(unknown)}; its options are {', '.join(known)}{meant}")
        return cls(**{name: str(value) if isinstance(value, Path) else value for name, value in values.items()})

    def to_json(self) -> dict[str, Any]:
        """The options that have a value, by name; files with their whole paths."""
        found = {}
        for each in options_of(self.__class__):
            value = getattr(self, each.name)
            if value is not None:
                found[each.name] = real_path(value) if each.is_file and not is_list(value) else value
        return found


def is_list(text: str) -> bool:
    """Whether a text that may name a file is a JSON list itself."""
    return text.lstrip().startswith("[")


def options_of(cls: type[Options]) -> tuple[OptionSpec, ...]:
    """The options of an options class, its own first."""
    ordered = sorted(dataclasses.fields(cls), key=lambda each: each.name not in vars(cls).get("__annotations__", {}))
    return tuple(OptionSpec(name=each.name, default=each.default, **each.metadata) for each in ordered)


# What several options classes have in common: arguments of `option`.
ACCUM_MODE: Mapping[str, Any] = {
    "default": None,
    "choices": SETTINGS["accum_mode"],
    "help": "accuracy class, of kernels that have several",
    "default_help": "as the settings say: fp32",
}
NUMERICS = ("any", "same", "invariant")
"""Which results a schedule may give to win: any right ones; bit for bit those of what is served; or those of one order of sums,
which serves every batch."""

SAME_NUMERICS: Mapping[str, Any] = {
    "default": "any",
    "choices": NUMERICS[:2],
    "help": "which results may win: any that are right, or the same, bit for bit, as those of what is served today, on every "
    "checked input (which needs a GPU, and times no rivals)",
}
SPACE: Mapping[str, Any] = {
    "default": None,
    "metavar": "FILE",
    "is_file": True,
    "help": "your own search space (TOML)",
    "default_help": "the kernel's own",
}
NEIGHBOURS: Mapping[str, Any] = {
    "default": False,
    "help": "also try schedules one or two knobs away from the fastest, beyond what the space explores",
}
SEED: Mapping[str, Any] = {"default": 0, "metavar": "N", "help": "seed of all that is drawn at random"}


@dataclass(frozen=True, kw_only=True)
class BuildOptions(Options):
    """What commands that build programs have in common."""

    budget_s: float | None = option(
        None,
        type=float,
        minimum=0,
        metavar="SECONDS",
        help="stop after this long, all problems together",
        default_help="no limit",
    )
    seed: int = option(**SEED)
    compile_timeout_s: float = option(DEFAULT_TIMEOUT_S, metavar="SECONDS", help="how long one schedule may compile")


@dataclass(frozen=True, kw_only=True)
class TuneOptions(BuildOptions):
    """How a tune searches, how much it does, and what decides."""

    effort: str = option("default", choices=tuple(EFFORTS), help="how much is measured, or without a GPU built")
    trials: int | None = option(
        None,
        type=int,
        minimum=1,
        metavar="N",
        help="measure at most so many programs per problem, earlier ones included; without a GPU, build so many schedules",
        default_help="as the effort says",
    )
    regime: str | None = option(
        None,
        choices=SETTINGS["regime"],
        help="what decides: times at full clocks (burst), at the GPU's power cap (sustained), or in replayed CUDA graphs (graph, "
        "graph-cold: see --deploy)",
        default_help="as the settings say: burst",
    )
    deploy: str = option(
        "eager",
        choices=("eager", "graph"),
        help="how the calls will run: one by one (eager), or in CUDA graphs (graph), whose replays are timed then; the winner "
        "serves the calls that a graph captures",
    )
    cold: bool = option(False, help="with --deploy graph: empty the L2 cache before each replay")
    beside_gib: float | None = option(
        None,
        type=float,
        minimum=0,
        metavar="GIB",
        help="take so many GiB of device memory first, as a served model would, and search in the rest",
        default_help="the search may take all that is free",
    )
    accum_mode: str | None = option(**ACCUM_MODE)
    rivals: str | None = option(
        None,
        choices=SETTINGS["rivals"],
        help="time other implementations beside each winner, and let faster ones serve (serve) or not (record); or neither (off)",
        default_help="as the settings say: serve",
    )
    numerics: str = option(
        "any",
        choices=NUMERICS,
        help=f"{SAME_NUMERICS['help']}; or invariant: those of one order of sums for all sizes of the kernel's batch dims, so "
        "that a row's bits do not depend on the number of rows; of a batch dim that is not named several sizes race",
    )
    sampler: str = option(
        OURS,
        metavar="NAME",
        help=f"what proposes schedules: {', '.join(SAMPLERS)}, or module:Class of any Optuna sampler",
    )
    neighbours: bool = option(**NEIGHBOURS)
    candidates: str | None = option(
        None,
        metavar="FILE",
        is_file=True,
        help="search only these schedules, the default and what is served: a JSON list, or a file of JSON, CSV, T4 results or a "
        "Kernel Tuner cache",
        default_help="the whole space",
    )
    space: str | None = option(**SPACE)
    runner: str = option(
        "auto",
        choices=("auto", "gpu", "none"),
        help="measure on the GPU (gpu), let the model rank (none), or measure if a GPU of the arch is here (auto)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cold and self.deploy != "graph":
            raise ConfigError(
                "cold is for replayed graphs: an eager call is timed behind a flush of the L2 cache in any case (regime burst); "
                "leave out --cold, or add --deploy graph"
            )
        if self.deploy == "graph":
            wanted = "graph-cold" if self.cold else "graph"
            if self.regime not in (None, wanted):
                raise ConfigError(
                    f"--deploy graph times replayed graphs, which is the regime {wanted}, not {self.regime}; leave out --regime"
                )
            object.__setattr__(self, "regime", wanted)


@dataclass(frozen=True, kw_only=True)
class RecordOptions(BuildOptions):
    """How much of a landscape is recorded."""

    programs: int = option(300, minimum=1, metavar="N", help="distinct programs per problem")
    sustained_leaders: int = option(
        24, minimum=0, metavar="N", help="so many of the fastest are measured in the sustained regime, too"
    )
    build_only: bool = option(False, help="build the programs and stop; needs no GPU")
    accum_mode: str | None = option(**ACCUM_MODE)
    space: str | None = option(**SPACE)


@dataclass(frozen=True, kw_only=True)
class RefreshOptions(BuildOptions):
    """How much is done for entries whose machine code is no longer what was measured."""

    effort: str = option("quick", choices=tuple(EFFORTS), help="how much the races of a refresh do")
    neighbours: bool = option(**NEIGHBOURS)
    runner: str = option(
        "auto",
        choices=("auto", "none"),
        help="race if a GPU of the arch is here (auto), or only say what would be raced (none)",
    )
    numerics: str = option(**SAME_NUMERICS)


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Options):
    """What a check on the CPU computes."""

    schedules: int = option(
        20, minimum=1, metavar="N", help="schedules of each problem: the default, and others drawn from the space"
    )
    space: str | None = option(**SPACE)
    seed: int = option(**SEED)
