"""Stands in for the process that compiles programs: does what the request's schedule says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection

from tiledsched.build.store import StoredProgram
from tiledsched.serve.background import BuildRequest


def answer(request: BuildRequest) -> StoredProgram | str:
    """`do` is fine, refuse, fail, die, die_once or hang."""
    what = request.task.schedule["do"]
    tried = request.path.with_suffix(".tried")
    if what == "die" or (what == "die_once" and not tried.exists()):
        tried.touch()
        os._exit(7)
    if what == "hang":
        compiler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        tried.write_text(f"{os.getpid()} {compiler.pid}")
        time.sleep(600)
    if what == "refuse":
        return StoredProgram(error="no such tile")
    if what == "fail":
        return "OSError: no space"
    return StoredProgram(cubin=str(os.getpid()).encode(), symbol="made")


def main(descriptor: str, folder: str, parent: str) -> None:
    """Answer requests as `tiledsched.serve.background.main` does."""
    os.setpgrp()
    with Connection(int(descriptor)) as connection:
        connection.send((None, False))
        try:
            while True:
                connection.send((answer(connection.recv()[1]), False))
        except (EOFError, ConnectionError):
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
