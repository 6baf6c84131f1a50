"""Puts `exhaustive_search` of this package in the place of cuTile's, and answers FlashInfer's tuner of mixtures of experts.

That tuner, `AutoTuner`, looks for a tactic (`search_cache`). If it finds none and may tune, it times tactics and keeps the
fastest (`_cache_profile_result`). What it keeps is stored, and put where it has what it read from files of its own. A tactic
gives the tiles of several kernels and says nothing of their code: it holds for one release and source of them, one compiler and
one GPU.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from tiledsched.core.canonical import stable_id
from tiledsched.core.config import CalledFirst, load_settings, take_off, warn_once
from tiledsched.core.errors import ConfigError, TiledschedError
from tiledsched.core.extras import required
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Conditions, Measurement
from tiledsched.remember import machine as machines
from tiledsched.remember.description import MARK
from tiledsched.remember.search import exhaustive_search
from tiledsched.store.location import database_exists

TUNER = "flashinfer:AutoTuner"
"""The kernel under which FlashInfer's choices are stored."""


_holding: list[remember] = []
"""Those that are not undone, the latest last."""
_attached: list[Callable[[], None]] = []
"""What puts back the methods of FlashInfer's tuner; empty where it has its own."""


class remember(metaclass=CalledFirst):  # noqa: N801
    """Have `cuda.tile.tune.exhaustive_search` remember, from now on, also where modules imported it before. So does
    the tuner of FlashInfer's mixtures of experts, if FlashInfer was imported before.

    `tiledsched.remember()` stays until `undo()`; `with tiledsched.remember(): ...` is undone at the end of the block. Of several
    the latest holds, and they may be undone in any order.

    Args:
        check: whether the arrays that configurations change are compared; see :func:`tiledsched.exhaustive_search`.
    """

    def __init__(self, *wrong: object, check: bool = False) -> None:
        if wrong:
            raise ConfigError(
                f"remember takes no {wrong[0]!r:.80}: tiledsched.remember() holds for the whole program; a script that cannot be "
                "edited is run as: python -m tiledsched.remember SCRIPT"
            )
        with required():
            from cuda.tile import tune
        self._before: Callable[..., Any] = tune.exhaustive_search
        self._ours = functools.wraps(self._before)(functools.partial(exhaustive_search, check=check))
        _replace(self._before, self._ours)
        _holding.append(self)
        _attach(getattr(sys.modules.get("flashinfer.autotuner"), "AutoTuner", None))

    def undo(self) -> None:
        """Put back what was there before; cuTile's own function once all are undone. Safe to call twice."""
        if self in _holding and take_off(_holding, self):
            _replace(self._ours, self._before)
        while _attached and not _holding:
            _attached.pop()()

    def __enter__(self) -> remember:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def _replace(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Put `other` wherever a module holds `one` under any name, and as an attribute of the classes of these modules."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] == "tiledsched":
            continue
        for name, value in list(vars(module).items()):
            if value is one:
                setattr(module, name, other)
            elif type(value) is type and value.__module__ == module.__name__:
                for inner, attribute in list(vars(value).items()):
                    if attribute is one or (isinstance(attribute, staticmethod) and attribute.__func__ is one):
                        setattr(value, inner, staticmethod(other))


def _attach(tuner: Any) -> None:
    """Have FlashInfer's tuner remember, if it does not yet and has the methods that it has in release 0.7.4."""
    search, keep = (getattr(tuner, name, None) for name in ("search_cache", "_cache_profile_result"))
    if search is None or keep is None or _attached:
        return
    read: list[None] = []

    def search_cache(self: Any, *given: Any, **named: Any) -> Any:
        if not read:  # not before, since it asks for the GPU
            read.append(None)
            _guarded(_read_choices, self)
        return search(self, *given, **named)

    def cache_profile_result(self: Any, key: Any, profile: Any, config: Any, tactic: Any, selection: Any) -> None:
        keep(self, key, profile, config, tactic, selection)
        if key.runner_class_name.startswith("CuTile") and load_settings().remember != "off":
            _guarded(_store_choice, key, (key.runner_class_name, tactic, self._profiling_policy(config)), selection)

    def put(*methods: Any) -> None:
        tuner.search_cache, tuner._cache_profile_result = methods

    put(search_cache, cache_profile_result)
    _attached.append(functools.partial(put, search, keep))


def _guarded(function: Callable[..., None], *given: Any) -> None:
    """Call a function. What goes wrong in it is a warning: FlashInfer goes on as without us."""
    try:
        function(*given)
    except (TiledschedError, ValueError) as error:
        warn_once(f"choices of FlashInfer's tuner are not remembered: {error}")


def _source() -> str:
    """The hash of FlashInfer's release and of its cuTile code for mixtures of experts."""
    package: Any = sys.modules["flashinfer"]
    files = Path(package.__file__).parent.glob("fused_moe/cutile/*.py")
    return stable_id([package.__version__, *sorted(each.read_text(encoding="utf-8") for each in files)])


def _read_choices(tuner: Any) -> None:
    """Put what is stored for the current GPU where a tuner has what it read from its own files."""
    settings, machine = load_settings(), machines.machine
    if settings.remember == "on" and database_exists(settings.db) and (gpu := machine.gpu()):
        from tiledsched.store.db import TuningDB  # imports SQLAlchemy, which takes half a second

        with TuningDB.open(settings.db, read_only=True) as db:
            for entry in db.entries(gpu[0], TUNER, device_name=gpu[1]):
                if (entry.compiler, entry.source_hash) == (machine.compiler(), _source()):
                    runner, tactic, policy = ast.literal_eval(str(entry.schedule["choice"]))
                    tuner._file_configs.setdefault(entry.problem.values["key"], (runner, tactic))
                    tuner._file_config_policies.setdefault(entry.problem.values["key"], policy)


def _store_choice(key: Any, choice: tuple[Any, ...], selection: Any) -> None:
    """Store a runner, its tactic, and how tactics were timed, with the time that FlashInfer measured."""
    from tiledsched.store.db import TuningDB
    from tiledsched.store.records import Entry

    source, device, toolchain = _source(), machines.machine.device(), machines.machine.toolchain()
    time_us, schedule = 1e3 * selection["time_ms"], Schedule(choice=repr(choice))
    same: dict[str, Any] = {
        "problem": Problem(TUNER, {"key": key.file_key, MARK: stable_id(key.file_key)}),
        "schedule": schedule,
        "fingerprint": stable_id([source, schedule.id]),  # of several programs, which FlashInfer does not name
        "regime": "graph",
    }
    taken = Measurement(
        **same,
        device=device,
        samples_us=(time_us,),
        median_us=time_us,
        ci_low_us=time_us,
        ci_high_us=time_us,
        accuracy=None,
        conditions=Conditions(),
        runner="gpu",
    )
    with TuningDB.open(load_settings().db) as db:
        db.put_entry(
            Entry(
                **same,
                kernel=TUNER,
                arch=device.arch,
                device_name=device.name,
                provenance="measured",
                measurement_id=db.record_measurement(None, TUNER, source, toolchain, taken),
                candidates=selection["candidates"],
                source="FlashInfer's tuner",
                toolchain=toolchain,
                source_hash=source,
            )
        )
