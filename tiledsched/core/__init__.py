"""What an author declares of a kernel, and what every other part of the package knows.

Other rooms import the names below from here. Each is looked up in its module when it is first imported, so that what needs no
NumPy starts without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiledsched.core.arrays import RELATIVE_ERRORS, ArraySpec, Tolerance
    from tiledsched.core.blame import did_you_mean, first_line
    from tiledsched.core.canonical import canonical_json, stable_id
    from tiledsched.core.cases import Case, input_specs, output_specs
    from tiledsched.core.config import Settings, load_settings, log
    from tiledsched.core.device import ARCHS, ArchSpec, arch_named, arch_spec
    from tiledsched.core.errors import (
        CompilerError,
        ConfigError,
        DatabaseError,
        DeclarationError,
        Failure,
        FailureKind,
        LaunchError,
        MeasureError,
        NoRoomError,
        NoValidScheduleError,
        ProblemError,
        RivalError,
        SpaceError,
        TiledschedError,
        UnsupportedError,
    )
    from tiledsched.core.extras import installing, package_version, required
    from tiledsched.core.kernel import Kernel
    from tiledsched.core.problem import KernelClass, Problem, ProblemClass, rate_of, rate_text, unit_of
    from tiledsched.core.registry import SHIPPED, kernel_named, load_kernel, problem_from_json
    from tiledsched.core.resources import ResourceFacts, ctas_per_sm, grid_blocks, spilled
    from tiledsched.core.schedule import HINT_KNOBS, KnobValue, Schedule, named_tile
    from tiledsched.core.similarity import Similarity, about
    from tiledsched.core.space import SearchSpace, accuracy_class
else:
    _HOMES = {
        name: module
        for module, names in {
            "arrays": "RELATIVE_ERRORS ArraySpec Tolerance",
            "blame": "did_you_mean first_line",
            "canonical": "canonical_json stable_id",
            "cases": "Case input_specs output_specs",
            "config": "Settings load_settings log",
            "device": "ARCHS ArchSpec arch_named arch_spec",
            "errors": (
                "CompilerError ConfigError DatabaseError DeclarationError Failure FailureKind LaunchError "
                "MeasureError NoRoomError NoValidScheduleError ProblemError RivalError SpaceError "
                "TiledschedError UnsupportedError"
            ),
            "extras": "installing package_version required",
            "kernel": "Kernel",
            "problem": "KernelClass Problem ProblemClass rate_of rate_text unit_of",
            "registry": "SHIPPED kernel_named load_kernel problem_from_json",
            "resources": "ResourceFacts ctas_per_sm grid_blocks spilled",
            "schedule": "HINT_KNOBS KnobValue Schedule named_tile",
            "similarity": "Similarity about",
            "space": "SearchSpace accuracy_class",
        }.items()
        for name in names.split()
    }

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        return found
