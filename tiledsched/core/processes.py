"""How this package starts other Python processes: none of them imports from the current directory because of how it is started.

`python -m` and `python -c` put the current directory before the standard library, so that a file `random.py` that lies there by
chance, or was put there, would run. `python -P` prevents that from Python 3.11 on; what is done here works in 3.10, too, and
keeps PYTHONPATH and editable installs.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker, util
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from tiledsched.core.files import OwnFolder

CUTILE_FOLDER = "CUDA_TILE_TEMP_DIR"
"""Names the folder that cuTile writes its temporary files to."""
SAFE_PATH = "import sys; sys.path[:] = filter(None, sys.path)"
"""The first statement of each process. The current directory is the only empty entry, since `site` makes those of PYTHONPATH
absolute; `sys` is built into the interpreter, so that nothing is imported before."""
QUIET = "sys.excepthook = lambda kind, *more: kind is EOFError or sys.__excepthook__(kind, *more)"
"""The second statement of a process of `multiprocessing`: whoever starts it may be told to end before it has sent all that the
process reads first.
"""
_launching = threading.RLock()


def python_command(module: str) -> tuple[str, ...]:
    """The command that calls `main` of a module with the words that are appended to it, and ends with the code it returns."""
    run = "from importlib import import_module; sys.exit(import_module(sys.argv[1]).main(*sys.argv[2:]))"
    return sys.executable, "-c", f"{SAFE_PATH}; {run}", module


def child_environment() -> dict[str, str]:
    """The environment for a process that this one starts: its own, with this process's module path, in which kernels may be
    declared.

    The current directory, which is on the path of a prompt and of `python -c`, comes last: a kernel may import files that lie
    there, but none of them takes the place of an installed module.
    """
    places = dict.fromkeys(os.path.abspath(place) for place in sys.path if place)
    if "" in sys.path:
        with suppress(FileNotFoundError):  # the folder is gone, and all that could be imported from it
            places.setdefault(os.getcwd())
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def give_cutile_folder() -> bool:
    """Have cuTile, once it is imported, write to a folder of this process that the next one removes where this one is killed, and
    whether that is so. By itself it makes a folder as it is imported, of which nobody can tell then whose it was.
    """
    if os.environ.get(CUTILE_FOLDER) or "cuda.tile" in sys.modules:
        return False
    try:
        folder = OwnFolder()
    except OSError:  # whoever compiles says so
        return False
    atexit.register(folder.close)
    os.environ[CUTILE_FOLDER] = folder.path
    return True


def import_cutile() -> None:
    """Import cuTile, where it is installed, with such a folder; processes that this one starts are not told of it."""
    if give_cutile_folder():
        with suppress(ImportError):  # whoever compiles finds out
            importlib.import_module("cuda.tile")
        del os.environ[CUTILE_FOLDER]


def end_with_parent(parent: int, folder: str = "") -> None:
    """End this process soon after the process that started it is gone, whatever its threads do then. A process that leads a group
    ends the whole group, and with it the compilers, for example, that it started.

    Args:
        parent: id of the process that started this one, as that process said it: by now it may be gone.
        folder: a folder for temporary files that is removed before; empty for none.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _safe_launches() -> Iterator[None]:
    """Have `multiprocessing` start its processes, and its resource tracker, with a safe path. What a terminal sends to all its
    processes, they do not heed: whoever starts them ends them.

    It has no setting for this. Each of them is started as `python [options] -c PROGRAM ...` by the one function that is replaced.
    """
    with _launching:
        usual = util.spawnv_passfds

        def launch(path: Any, words: Any, descriptors: Any) -> int:
            safe = list(words)
            program = safe.index("-c") + 1
            safe[program] = f"{SAFE_PATH}; {QUIET}; {safe[program]}"
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})  # inherited
            try:
                return usual(path, safe, descriptors)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        util.spawnv_passfds = launch  # type: ignore[assignment]
        try:
            yield
        finally:
            util.spawnv_passfds = usual


class _SafeProcess(SpawnProcess):
    """A process of `multiprocessing`, started with a safe path."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # its name in multiprocessing
        with _safe_launches():
            return SpawnProcess._Popen(process_obj)


class SafeSpawnContext(SpawnContext):
    """What `multiprocessing.get_context("spawn")` returns, for processes that start with a safe path."""

    Process = _SafeProcess

    def __init__(self) -> None:
        with _safe_launches():
            resource_tracker.ensure_running()  # the first lock would start it with the usual path
