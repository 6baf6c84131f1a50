"""The first day of a DGX Spark: the command line and its measuring process on a GB10 that is not there (`fake_gb10`)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from golden import lacking
from test_tuning import SCALE

from tiledsched.build.pool import BuildPool
from tiledsched.cli import main
from tiledsched.core import extras, registry
from tiledsched.measure import nvml
from tiledsched.tuning.resources import Tools

ROOT = Path(__file__).parent.parent
FAKES = ROOT / "tests" / "fake_gb10"
WORDS = ["-p", "rows=4096", "--jobs", "1"]
WINNER = (
    "rows=N floatN on NVIDIA GBN TILE=N warps=N N us measured, N GB/s; the compiler defaults take N% longer; the runner-up takes "
    "N% longer N schedules built, N distinct programs; N compiled now, N measured, N failed, N s"
)
THROTTLED = WINNER.replace("us measured,", "us measured with the clock held down,") + (
    " clock held down in N of N measurements, at N MHz, where its maker gives N MHz for NVIDIA GBN (software thermal, "
    "hardware thermal) Times at a low clock decide little: let the GPU cool, or check its power supply (nvidia-smi -q -d "
    "PERFORMANCE), and tune again: what is measured at its clock replaces what was not"
)
MODELLED = (
    "Nothing was measured: this run used no sm_N GPU. Every schedule was built, and the performance model ranked the "
    "programs. On a machine with that GPU, tune measures, unless --runner none is given. rows=N floatN on sm_N TILE=N"
)
NEEDED = f"this machine has an NVIDIA driver, but not the packages that measure; run: {extras.installing('gpu')}, or use --runner none"
UNTOLD = "this machine has an NVIDIA driver, but NVML lists no GPU that can compute; run: tiledsched doctor, or use --runner none"


class Kept(BuildPool):
    """Compile processes that stay from one tune to the next."""

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a kernel, and a database and a cache that hold its machine code for sm_121."""
    folder = tmp_path_factory.mktemp("spark")
    (folder / "scale.py").write_text(
        SCALE.replace('"TILE": [16, 32], "occupancy"', '"TILE": [16], "num_worker_warps"').replace("[1, 2]}", "[4, 8]}")
    )
    pool = Kept(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TILEDSCHED_CACHE", str(folder / "cache"))
        database, kernel = str(folder / "built.db"), f"{folder}/scale.py:Scale"
        words = ["tune", kernel, "--arch", "sm_121", "--runner", "none", "--db", database, *WORDS]
        assert main(words, tools=Tools(pool=lambda jobs: pool)) == 0
        yield folder, kernel, Tools(pool=lambda jobs: pool)
    BuildPool.close(pool)


def forget_fakes() -> None:
    for name in ("gb10", "pynvml", "cupy"):
        sys.modules.pop(name, None)


@pytest.fixture
def spark(built, tmp_path, monkeypatch, capsys):
    """Runs a command on a machine whose GPU, or lack of one, some words tell; gives exit code, stdout and stderr."""
    folder, kernel, tools = built
    monkeypatch.setattr(nvml, "DRIVER_FILE", tmp_path / "no-driver")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("tiledsched.measure.lock.FOLDER", tmp_path)
    shutil.copy(folder / "built.db", tmp_path / "spark.db")
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "spark.db"))

    def run(gpu, *words, lacking=()):
        forget_fakes()
        if gpu is not None:
            monkeypatch.setenv("FAKE_GB10", gpu)
            monkeypatch.syspath_prepend(FAKES)
        for name in lacking:
            monkeypatch.setitem(sys.modules, name, None)
        code = main([each.replace("SCALE", kernel) for each in words], tools=tools)
        told = capsys.readouterr()
        return code, told.out, told.err

    yield run
    forget_fakes()


def masked(text):
    """What was printed before the commands to go on with, at most 80 columns wide, with N for every number."""
    lines = text.split("\nNext:")[0].splitlines()
    assert max(map(len, lines)) <= 80
    return re.sub(r"\d[\d.]*", "N", " ".join(" ".join(lines).split()))


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("gpu", "said", "warned"),
    [
        ("", WINNER, ""),
        ("throttled", THROTTLED, ""),
        pytest.param("desktop", WINNER, "", marks=pytest.mark.slow),
        ("desktop,training", WINNER, "4711 has the GPU open, and NVML does not tell here whether it runs"),
        pytest.param("silent", WINNER, "", marks=pytest.mark.slow),
        pytest.param("no-uuid", WINNER, "", marks=pytest.mark.slow),
        pytest.param("mig", WINNER.replace("GBN", "GBN MIG Ng.Ngb"), "", marks=pytest.mark.slow),
        pytest.param("two", WINNER, "", marks=pytest.mark.slow),
    ],
)
def test_a_tune_measures_and_says_so(spark, caplog, gpu, said, warned) -> None:
    words = [*WORDS, *(["--effort", "quick"] if gpu else [])]
    code, out, _ = spark(gpu, "tune", "SCALE", *words)
    assert (code, masked(out)) == (0, said)
    assert [warned in each for each in caplog.messages] == [True] * bool(warned)
    told = spark(gpu, "explain", "SCALE", "-p", "rows=4096")[1]
    assert "measured on " + ("this device" if gpu != "silent" else "NVIDIA GB10") in told
    if gpu in ("", "silent", "mig"):  # by the name under which it was stored, all is known of this GPU
        assert " 0 measured" in " ".join(spark(gpu, "tune", "SCALE", *words)[1].split())


@pytest.mark.compiler
def test_what_a_program_called_is_tuned_by_one_command(spark, built, tmp_path) -> None:
    _, kernel, _ = built
    case = {"kernel": registry.load_kernel(kernel).name, "rows": 4096, "dtype": "float16"}
    words = dict.fromkeys(("place", "rival"), "") | {"layout": "contiguous", "provenance": "default", "schedule": {}}
    line = {"v": 1, "id": 0, "problem": case, "sample": case, "arch": "sm_121", "device": "NVIDIA GB10", **words}
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "one.jsonl").write_text(json.dumps(line))
    code, out, err = spark("", "tune", "SCALE", "--seen", "--budget", "60", "--jobs", "1")
    assert (code, masked(out)) == (0, f"{WINNER} N problem done.")
    assert "deciding" in err
    code, out, _ = spark("", "show", "SCALE", "--seen")
    assert lacking(out, "measured", " 0.0%", "0 us ") == []
    assert masked(spark("", "tune", "SCALE", "--seen")[1]) == "N problems done, N tuned before."


@pytest.fixture
def smi(spark, tmp_path):
    """The program that comes with a driver, on the path."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize("driver", [False, True])
def test_make_tune_installs_what_measures_where_there_is_a_driver(tmp_path, driver) -> None:
    """Then it measures: `tiledsched tune` is told nothing that keeps it from that."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    for name in ("venv/bin/python", "venv/bin/tiledsched", *(["nvidia-smi"] if driver else [])):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name[9:]} $@ >> {tmp_path}/told\n")
        (tmp_path / name).chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["make", "-f", str(ROOT / "Makefile"), "tune", "VENV=venv", "TUNE_ARGS=softmax"]
    for _ in range(2):  # what is installed is not installed again
        subprocess.run(words, cwd=tmp_path, env=os.environ | path, check=True, capture_output=True)
    install, *tunes = (tmp_path / "told").read_text().splitlines()
    assert install.endswith(" --editable .[gpu,report]" if driver else " --editable .[report]")
    assert tunes == ["tiledsched tune softmax --report report"] * 2


@pytest.mark.compiler
def test_without_a_driver_a_tune_says_that_it_models(spark) -> None:
    code, out, _ = spark(None, "tune", "SCALE", *WORDS)
    assert code == 0
    assert masked(out).startswith(MODELLED)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("gpu", "lacking", "words"), [(None, [], NEEDED), ("", ["cupy"], NEEDED), ("no-arch", [], UNTOLD)]
)
def test_with_a_driver_that_cannot_be_used_a_tune_stops(spark, smi, tmp_path, gpu, lacking, words) -> None:
    code, out, err = spark(gpu, "tune", "SCALE", "--arch", "sm_121", *WORDS, lacking=lacking)
    assert (code, out, err) == (2, "", f"tiledsched: {words}\n")
    assert spark(gpu, "refresh", "SCALE", "--arch", "sm_121", lacking=lacking)[2] == err
    err = spark(gpu, "record", "SCALE", "--arch", "sm_121", *WORDS, "-o", str(tmp_path), lacking=lacking)[2]
    assert "or use --build-only" in err
    if gpu != "":
        assert words.partition(", or use")[0] in spark(gpu, "warmup", "SCALE", lacking=lacking)[2]
