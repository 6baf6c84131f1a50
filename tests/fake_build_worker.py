"""The process that compiles programs in the background, with a compiler that does what the request's schedule says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

from tiledsched.build.store import StoredProgram
from tiledsched.serve import background

OUTCOMES = {"refuse": StoredProgram(error="no such tile"), "fail": "OSError: no space"}


def build(request: background.BuildRequest) -> StoredProgram | str:
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
    return OUTCOMES.get(what, StoredProgram(cubin=str(os.getpid()).encode(), symbol="made"))


if __name__ == "__main__":
    background.build = build
    pool = SimpleNamespace(start_process=lambda folder, parent: os.setpgrp())
    sys.modules["tiledsched.build.pool"] = pool  # which takes half a second to import
    background.main(*sys.argv[1:])
