"""Programs built ahead are those that launches look for: by cuTile's own launcher, on a driver that launches nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("cc") and sys.platform == "linux"), reason="needs a C compiler")
def test_what_a_launch_looks_for_is_what_was_built_ahead(tmp_path) -> None:
    """Of kernels without constant sizes a launch takes an older calling convention than a build; and of scratch memory with one
    element it takes each stride for a constant."""
    source, driver = HERE / "fake_driver.c", tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", str(driver), str(source)], check=True)
    settings = {"COMPILE": "wait", "RIVALS": "off", "FALLBACK": "error", "DB": tmp_path / "none.db", "CACHE": tmp_path}
    environment = os.environ | {f"TILEDSCHED_{name}": str(value) for name, value in settings.items()}
    environment |= {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(HERE / "launched_programs.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    launched = json.loads(done.stdout.splitlines()[-1])
    assert {name for name, _, _ in launched} >= {
        "attention",
        "attention_backward",
        "matmul",
        "grouped_matmul",
        "rms_norm",
    }
    assert [(name, place) for name, place, same in launched if not same] == []
