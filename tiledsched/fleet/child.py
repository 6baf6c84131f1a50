"""The process that does one problem after another for a worker, which watches it and may kill it at any moment.

Its arguments are PIPE, an inherited descriptor over which requests come and answers go, and PARENT, the id of the worker's
process: when that is gone, this process ends with all it started.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tiledsched import __version__
from tiledsched.build import store, toolchain
from tiledsched.core import config, errors, processes, registry
from tiledsched.core.errors import (
    ConfigError,
    DeclarationError,
    NoValidScheduleError,
    ProblemError,
    SpaceError,
    TiledschedError,
    UnsupportedError,
)
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.fleet.builds import SharedBuilds
from tiledsched.fleet.campaign import Answer, Campaign, Lease, Outcome, Setup
from tiledsched.fleet.clock import RETRY_S, is_full, retry_while_unavailable
from tiledsched.fleet.jobs import Job, find_job
from tiledsched.fleet.leases import Leases
from tiledsched.fleet.local_store import LocalStore, remove, whole
from tiledsched.store.db import TuningDB
from tiledsched.tuning import resources, samplers
from tiledsched.tuning.session import Session

THE_PROBLEMS_FAULT = (NoValidScheduleError, ProblemError, SpaceError, DeclarationError, UnsupportedError)
"""Errors that every other worker would meet, too."""
STOPPING_S = 4.0
"""How long a database that does not answer is waited for once the worker said stop."""


class StoppedError(KeyboardInterrupt):
    """The worker says stop: jobs end as they do after Ctrl-C."""


class Child:
    """Serves one worker until it is told to end.

    Args:
        pipe: requests come from it, answers go to it.
        setup: the campaign, and how to work on it.
        stop: set, it ends the waiting for a database that does not answer; and no problem is begun.
        local_store: makes the databases of this host, given the cache folder and the URL of the campaign's database.

    Raises:
        ConfigError: the campaign names code that is not there, or that the user did not allow.
    """

    def __init__(
        self,
        pipe: Connection,
        setup: Setup,
        *,
        stop: threading.Event | None = None,
        local_store: Callable[[Path, str], LocalStore] = LocalStore,
    ) -> None:
        self._pipe, self._setup, self._make_local_store = pipe, setup, local_store
        self._stop, self._working = stop or threading.Event(), False
        registry.allow(*setup.allowed)
        self._job = find_job(setup.campaign.job)
        self._kernel = registry.kernel_of_data(setup.campaign.kernel, "the campaign")
        samplers.check_sampler(setup.campaign.options.get("sampler"), "the campaign")
        self._local: LocalStore | None = None
        self._cache = store.default_cache_folder(config.load_settings().cache)
        self._session: Session | None = None

    def interrupt(self, *_: object) -> None:
        """Stop what is going on, as a handler of the worker's signal.

        Raises:
            StoppedError: a job is running: it ends as after Ctrl-C.
        """
        self._stop.set()
        if self._working:
            self._working = False
            raise StoppedError

    def serve(self) -> None:
        """Answer requests until the pipe closes or the worker says stop."""
        self._pipe.send(("ready", why_not(self._setup.campaign, self._kernel, self._job) or self._no_cache()))
        while not self._stop.is_set():
            verb, *arguments = self._pipe.recv()
            if verb == "end":
                break
            answer = self.work(*arguments) if verb == "work" else self.control(*arguments)
            self._pipe.send(("answer", *answer))
            if answer[0] is not Outcome.DONE:  # who knows in what state its processes are: the next problem starts anew
                self._close_session()
        self._close_session()
        if self._local is not None:
            self._local.close()

    def _no_cache(self) -> str:
        """Why nothing can be stored here, whatever is waited for; empty where it can. A full disk may have room again."""
        try:
            store.ProgramStore(self._cache).ready()
        except ConfigError as error:
            return "" if is_full(error) else str(error)
        return ""

    def _session_for(self, arch: str) -> Session:
        """The session of this process, which stays from one problem to the next of the same arch."""
        if self._session is None or self._session.arch != arch:
            self._close_session()
            tools = resources.Tools(pool=lambda jobs: SharedBuilds(jobs, self._cache))
            self._session = Session(arch, jobs=self._setup.jobs, tools=tools)
        return self._session

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    @functools.cached_property
    def _home(self) -> TuningDB:
        return retry_while_unavailable(lambda: TuningDB.open(self._setup.db), stop=self._stop)

    def _local_store(self) -> LocalStore:
        """The databases of this process; what a killed one left behind is brought home first."""
        if self._local is None:
            self._local = self._make_local_store(self._cache, self._setup.db)
        for path in self._local.left_behind():
            if whole(path):
                bring = functools.partial(self._local.bring_home, path, self._home, replaces=False)
                retry_while_unavailable(bring, stop=self._stop)
            else:
                remove(path)
        return self._local

    def _copy_of(self, problem: Problem, arch: str, name: str) -> Path:
        """A database of this host that knows what the campaign's does of a problem."""
        return retry_while_unavailable(
            lambda: self._local_store().database(self._home, problem, arch, name), stop=self._stop
        )

    def _run(
        self, function: Callable[..., dict[str, Any]], arch: str, path: Path, *arguments: Any, **options: Any
    ) -> Any:
        """Call a job's function with a session on a local database; the worker may stop it meanwhile."""
        session = self._session_for(arch)
        with session.using_database(str(path)):
            try:
                self._working = True
                if self._stop.is_set():  # told before there was anything to stop
                    raise StoppedError
                return function(session, self._kernel, *arguments, **options)
            finally:
                self._working = False

    def work(self, lease: Lease, budget_s: float | None) -> Answer:
        """Do one problem and bring home what was found, however it ended: outcome, result and message."""
        options = dict(self._setup.campaign.options)
        if budget_s is not None:
            options["budget_s"] = budget_s
        try:
            path = self._copy_of(lease.problem, lease.arch, f"{lease.campaign_id}-{lease.id}-{lease.attempt}")
        except Exception as error:
            return self._ended_by(error)
        try:
            result = self._run(self._job.run, lease.arch, path, lease.problem, self._say, **options)
            answer: Answer = Outcome.DONE, result, ""
        except (Exception, StoppedError) as error:
            answer = self._ended_by(error)
        try:
            leases = Leases(self._home, retry_s=STOPPING_S if self._stop.is_set() else RETRY_S, stop=self._stop)
            holds = leases.holds(lease)
            leases.retry(lambda: self._local_store().bring_home(path, self._home, replaces=holds))
        except Exception as error:  # the file stays, for the next process here
            return self._ended_by(error) if answer[0] is Outcome.DONE else answer
        return answer

    def _ended_by(self, error: BaseException) -> Answer:
        """The answer after an error."""
        text = (str(error) if isinstance(error, TiledschedError) else f"{type(error).__name__}: {error}")[
            : errors.LONGEST
        ]
        if isinstance(error, THE_PROBLEMS_FAULT):
            return Outcome.FAILED, None, text
        if self._stop.is_set():  # there was no time left for it: that is no attempt
            return Outcome.RELEASED, None, "told to stop"
        # Whatever else it is costs this attempt; another GPU or host may do better.
        return Outcome.FULL if is_full(error) else Outcome.ERROR, None, text

    def _say(self, text: str) -> None:
        self._pipe.send(("say", text))

    def control(self, problem: Problem, arch: str) -> Answer:
        """Time the control program."""
        try:
            path = self._copy_of(problem, arch, f"control-{problem.id}")
            try:
                timed = self._run(self._job.control, arch, path, problem, **self._setup.campaign.options)
            finally:
                remove(path)
        except (Exception, StoppedError) as error:
            return self._ended_by(error)
        return Outcome.DONE, timed, ""


def why_not(wanted: Campaign, kernel: KernelClass, job: Job) -> str:
    """Why this host must not work on a campaign; empty where it may."""
    here = toolchain.compiler_at_hand()
    if wanted.compiler and wanted.compiler != here:
        return (
            f"the campaign is for compiler {wanted.compiler}, and here is {here or 'none'}: entries of both would be mixed; "
            f"install tileiras {wanted.compiler} here"
        )
    if wanted.source_hash and wanted.source_hash != kernel.source_hash():
        return f"the source of {wanted.kernel} here is not the one the campaign was opened with; bring it up to date"
    unknown = job.unknown(wanted.options)
    if unknown:
        return (
            f"the campaign was opened by another version of tiledsched: {wanted.job} of {__version__} does not know "
            f"{', '.join(unknown)}; bring this host up to date, or open the campaign again with this version"
        )
    return ""


def main(descriptor: str, parent: str) -> None:
    """Serve; see the module."""
    pipe = Connection(int(descriptor))
    processes.end_with_parent(int(parent))
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    with contextlib.suppress(EOFError, BrokenPipeError, StoppedError):
        try:
            child = Child(pipe, pipe.recv())
        except (ConfigError, DeclarationError) as error:
            pipe.send(("ready", str(error)))
            return
        signal.signal(signal.SIGTERM, child.interrupt)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the worker, which tells us
        child.serve()
