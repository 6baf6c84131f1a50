"""What tuning works with on one host, for one arch: settings, database, compiler, machine code, compile processes and GPU.

Each is opened when it is first needed, stays from one call to the next, and is closed with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tiledsched.build.compiler import DEFAULT_TIMEOUT_S, prepare_process
from tiledsched.build.pool import BuildPool
from tiledsched.build.store import ProgramStore
from tiledsched.build.toolchain import Toolchain, check_arch, installed_toolchain
from tiledsched.core import config
from tiledsched.core.config import Settings, load_settings
from tiledsched.core.errors import ConfigError, DatabaseError, MeasureError
from tiledsched.core.files import plain_text, read_bounded
from tiledsched.core.problem import KernelClass
from tiledsched.core.schedule import KnobValue
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import chosen_space
from tiledsched.measure import nvml
from tiledsched.measure.runner import Runner
from tiledsched.tuning.options import is_list

if TYPE_CHECKING:
    from typing_extensions import Self

    from tiledsched.rivals.races import RivalRaces
    from tiledsched.store.db import TuningDB
    from tiledsched.tuning.builder import Builder

Opened = TypeVar("Opened")
MAX_CANDIDATES_BYTES = 1 << 26
"""Largest file of candidates that is read: another tuner's results may be long."""


@contextmanager
def serving_anew() -> Iterator[None]:
    """After the block the operators of this process look anew at what they serve."""
    try:
        yield
    finally:
        for forget in config.watchers:
            forget()


def ready_artifacts(folder: Path | None) -> ProgramStore:
    """The store of machine code in `folder`, which is made where it is missing.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    artifacts = ProgramStore(folder)
    artifacts.ready()
    return artifacts


def start_runner(kernel: KernelClass, seed: int) -> Runner:
    """A process that measures the kernel on this machine's GPU.

    Raises:
        MeasureError: another process holds the GPU, and is not waited for.
    """
    from tiledsched.measure.gpu import GpuRunner

    return GpuRunner(kernel, seed=seed, gpu=nvml.only_gpu())


def start_rival_timer(kernel: KernelClass, runner: Runner, regime: str) -> RivalRaces | None:
    """A process that times the kernel's rivals on the runner's GPU; None where it has none, or torch is missing."""
    from tiledsched.measure.gpu import GpuRunner
    from tiledsched.rivals.races import RivalRaces, can_race

    if not isinstance(runner, GpuRunner) or not can_race(kernel):
        return None
    return RivalRaces(kernel, runner, regime=regime)


@dataclass(frozen=True, kw_only=True)
class Tools:
    """How each resource is made. A fleet hands in builds that its workers share; tests hand in stand-ins."""

    toolchain: Callable[[], Toolchain] = installed_toolchain
    """The compiler."""
    artifacts: Callable[[Path | None], ProgramStore] = ready_artifacts
    """The store of machine code, by the cache folder of the settings."""
    pool: Callable[[int | None], BuildPool] = BuildPool
    """Compile processes, by how many are wanted; one per CPU where that is None."""
    devices: Callable[[], Sequence[Any]] = lambda: nvml.devices()
    """The GPUs of this machine, each with `name` and `arch`."""
    lacking: Callable[[], str] = lambda: nvml.why_unusable()
    """What keeps them from being measured on, and what to do; empty where nothing does."""
    runner: Callable[[KernelClass, int], Runner] = start_runner
    """The process that measures, by kernel and seed."""
    rivals: Callable[[KernelClass, Runner, str], RivalRaces | None] = start_rival_timer
    """What times a kernel's rivals, by kernel, runner and regime."""
    space: Callable[[str, KernelClass, str | None], SearchSpace] = chosen_space
    """The search space, by arch, kernel and a file of the caller's."""


class Resources:
    """Opens what is needed when it is needed, keeps it for the next call, and closes all of it.

    Args:
        arch: target, e.g. sm_90.
        settings: the database, the cache folder and what decides; None for what the environment and the files say.
        jobs: compile processes; None for one per CPU.
        tools: how each resource is made.
    """

    def __init__(
        self, arch: str, *, settings: Settings | None = None, jobs: int | None = None, tools: Tools | None = None
    ) -> None:
        self.arch, self.jobs = arch, jobs
        self.settings = settings or load_settings()
        self._tools = tools or Tools()
        self._opened: dict[str, tuple[Any, Any]] = {}
        """What is open, by name: what it was opened for, and the thing itself."""

    def _open(self, name: str, of: object, make: Callable[[], Opened]) -> Opened:
        """What is open under a name, made where nothing is; what was made for something else is closed first."""
        if name in self._opened and self._opened[name][0] != of:
            self._close(name)
        if name not in self._opened:
            self._opened[name] = of, make()
        return self._opened[name][1]

    def _close(self, name: str) -> None:
        """Close what is open under a name. The rivals' process, which runs under the runner's hold of the GPU, ends before it."""
        if name == "runner":
            self._close("rivals")
        _, opened = self._opened.pop(name, (None, None))
        if opened is not None:
            opened.close()

    @cached_property
    def toolchain(self) -> Toolchain:
        """The compiler.

        Raises:
            CompilerError: it is missing, or too old for the arch.
        """
        prepare_process()
        found = self._tools.toolchain()
        check_arch(found, self.arch)
        return found

    @cached_property
    def artifacts(self) -> ProgramStore:
        """The store of machine code.

        Raises:
            ConfigError: its folder cannot be written to.
        """
        return self._tools.artifacts(Path(self.settings.cache) if self.settings.cache else None)

    @property
    def db(self) -> TuningDB:
        """The database."""
        from tiledsched.store.db import TuningDB

        return self._open("database", self.settings.db, lambda: TuningDB.open(self.settings.db))

    @property
    def pool(self) -> BuildPool:
        """The compile processes."""
        return self._open("pool", self.jobs, lambda: self._tools.pool(self.jobs))

    def device_names(self, without: str = "--runner none") -> set[str]:
        """Names of the GPUs of the arch that this machine has. `without` says for the message what to do without them.

        Raises:
            MeasureError: there is a driver, and something is missing to measure on its GPUs.
        """
        devices = self._tools.devices()
        names = {device.name for device in devices if device.arch == self.arch}
        if (names or not devices) and (why := self._tools.lacking()):
            raise MeasureError(f"{why}, or use {without}")
        return names

    @property
    def device_here(self) -> str:
        """Name of the first GPU of the arch that this machine has, whether or not it is measured on; empty where it has none."""
        try:
            return next((device.name for device in self._tools.devices() if device.arch == self.arch), "")
        except MeasureError:
            return ""

    def space(self, kernel: KernelClass, file: str | None = None, candidates: str | None = None) -> SearchSpace:
        """The search space of a kernel: its own or that of a file, limited to the schedules of another file where one is given.

        Raises:
            SpaceError, ConfigError: a file cannot be used.
        """
        found = self._tools.space(self.arch, kernel, file)
        return found if candidates is None else found.limited_to(*read_candidates(candidates, found))

    def builder(self, kernel: KernelClass, timeout_s: float = DEFAULT_TIMEOUT_S) -> Builder:
        """What builds schedules of a kernel and keeps what came of it in the database."""
        from tiledsched.tuning.builder import Builder

        return Builder(self.db, self.artifacts, kernel, self.arch, self.toolchain, self.pool, timeout_s=timeout_s)

    def open_runner(
        self, kernel: KernelClass, runner: str = "auto", *, seed: int = 0, without: str = "--runner none"
    ) -> Runner | None:
        """What measures a kernel on the GPU; None where that is not wanted, or no GPU of the arch is here.

        Args:
            kernel: whose candidates are measured.
            runner: auto, gpu (there must be one) or none.
            seed: of inputs and orders.
            without: what to do where there is no GPU, for the message.

        Raises:
            MeasureError: there must be a GPU of the arch and there is none, another process holds it and is not waited for, or
                there is a driver and something is missing to measure.
        """
        if runner == "none":
            return None
        if not self.device_names(without):
            if runner == "gpu":
                raise MeasureError(f"no {self.arch} GPU here; run: tiledsched doctor, or use {without}")
            return None
        return self._open("runner", (kernel, seed), lambda: self._tools.runner(kernel, seed))

    def open_rivals(self, kernel: KernelClass, regime: str) -> RivalRaces | None:
        """What times a kernel's rivals on the GPU of the open runner; None where there is no runner, or nothing to time."""
        if "runner" not in self._opened:
            return None
        _, runner = self._opened["runner"]
        return self._open("rivals", (kernel, regime), lambda: self._tools.rivals(kernel, runner, regime))

    @contextmanager
    def noted_run(self, command: Mapping[str, Any]) -> Iterator[int]:
        """A run, noted in the database from its start to its end; its number. Builds that it leaves unfinished are given up."""
        run_id = self.db.start_run(dict(command), self.arch)
        status = "failed"
        try:
            yield run_id
            status = "done"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            self.db.finish_run(run_id, status)
            if "pool" in self._opened:
                self.pool.cancel()

    @contextmanager
    def using_database(self, url: str) -> Iterator[None]:
        """In the block another database is read and written; it is closed at the end."""
        before = self.settings
        self._close("database")
        self.settings = replace(before, db=url)
        try:
            yield
        finally:
            self._close("database")
            self.settings = before

    def close(self) -> None:
        """Close all that is open. Safe to call twice; what is needed afterwards is opened anew."""
        with ExitStack() as last_first:
            for name in ("database", "pool", "runner"):
                last_first.callback(self._close, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_candidates(
    source: str | Path, space: SearchSpace
) -> tuple[list[dict[str, KnobValue]], str, Mapping[str, int]]:
    """The schedules that a file lists, or a JSON list that is given in its place, as values by knob; its name; and why other
    rows of it are none.

    Raises:
        ConfigError: it cannot be read, or lists none.
    """
    from tiledsched.store.foreign import configurations

    inline = is_list(str(source))
    path = Path("the list" if inline else source)
    try:
        text = str(source) if inline else plain_text(path, read_bounded(path, MAX_CANDIDATES_BYTES))
        listed, left_out = configurations(text, path.name, space.knobs)
    except (OSError, ValueError, RecursionError, DatabaseError) as error:
        raise ConfigError(f"cannot read candidates from {path}: {error}") from error
    if not (listed and all(isinstance(each, dict) and each for each in listed)):
        why = "".join(f"; of {rows} rows: {reason}" for reason, rows in left_out.items())
        raise ConfigError(
            f"{path} must hold a list of schedules: JSON objects of knob names and values, T4 results, a Kernel "
            f"Tuner cache, or CSV with a column for each knob{why}"
        )
    return listed, path.name, left_out
