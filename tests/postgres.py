"""A PostgreSQL server for the tests of this process: started when first asked for, gone when the process ends."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
import time
from functools import lru_cache
from pathlib import Path

import pytest

WITHOUT = "no PostgreSQL server: install its binaries (postgresql), or set TILEDSCHED_TEST_POSTGRESQL to a URL"


def binaries() -> Path | None:
    """The folder of initdb and postgres; Debian keeps it off the path."""
    found = shutil.which("initdb")
    places = (
        [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    )
    return next((place for place in places if (place / "postgres").exists()), None)


@lru_cache(maxsize=1)
def server() -> str:
    """The URL of a database that tests may fill; the test is skipped where there is no server."""
    given = os.environ.get("TILEDSCHED_TEST_POSTGRESQL")
    if given:
        return given
    pytest.importorskip("psycopg")
    bin_folder = binaries()
    if bin_folder is None:
        pytest.skip(WITHOUT)
    folder = Path(tempfile.mkdtemp(prefix="tiledsched-postgresql-"))
    who: dict[str, str | int] = {}
    if os.geteuid() == 0:  # it refuses to be root
        shutil.chown(folder, "nobody")
        who = {"user": "nobody"}
    data = folder / "data"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, **who}
    subprocess.run(
        [bin_folder / "initdb", "-D", data, "-U", "tests", "-A", "trust", "--no-sync", "-E", "UTF8"],
        check=True,
        **quiet,
    )
    running = subprocess.Popen(
        [bin_folder / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"], **quiet
    )

    def stop() -> None:
        running.terminate()  # ends when the last connection has; a second signal would not wait
        try:
            running.wait(timeout=5)
        except subprocess.TimeoutExpired:
            running.kill()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    waiting = [bin_folder / "pg_isready", "-h", folder, "-t", "1"]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if subprocess.run(waiting, **quiet).returncode == 0:
            return f"postgresql://tests@/postgres?host={folder}"
        if running.poll() is not None:
            break
        time.sleep(0.2)
    raise RuntimeError(f"PostgreSQL of {bin_folder} does not start in {folder}")
