"""The doctor, on machines made up by replacing what it looks at."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tiledsched import __version__, doctor
from tiledsched.build import toolchain
from tiledsched.core.extras import installing
from tiledsched.measure.runner import Device
from tiledsched.store.db import TuningDB

H200 = Device(name="NVIDIA H200", arch="sm_90", sm_count=0, memory_bytes=139 << 30, driver="580.159.04")
PARTS = {"cuda-tile": "1.7.0", "nvidia-nvvm": "13.4.92"}


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A CPU-only machine with a whole compiler and nothing optional; tests change it through the object returned."""

    here = SimpleNamespace(
        packages=dict(PARTS),
        tools={"tileiras": "13.4.92", "ptxas": "13.4.92"},
        compiler=tmp_path / "bin",
        devices=[],
        importable=set(),
    )
    for name in ("CUDA_HOME", "CUDA_PATH", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path / "cache"))
    for module in (doctor, toolchain):
        monkeypatch.setattr(module, "package_version", lambda name: here.packages.get(name, ""))
    monkeypatch.setattr(toolchain, "tool_version", lambda path: here.tools.get(path.name, ""))
    monkeypatch.setattr(toolchain, "compiler_folder", lambda: here.compiler)
    monkeypatch.setattr(doctor.nvml, "devices", lambda: here.devices)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "DRIVER_FILE", tmp_path / "no-driver")
    spec = doctor.importlib.util.find_spec
    optional = ("cupy", "torch", "vl-convert", "pynvml")

    def find_spec(name):
        if name not in optional:
            return spec(name)
        return spec("json") if name in here.importable else None

    monkeypatch.setattr(doctor.importlib.util, "find_spec", find_spec)
    toolchain._installed_toolchain.cache_clear()
    yield here
    toolchain._installed_toolchain.cache_clear()


def found(name):
    return next(finding for finding in doctor.examine() if finding.name == name)


def works(name):
    return next(part for part in doctor.overall(doctor.examine()) if part.name == name)


def with_gpu(machine, monkeypatch, tmp_path, *, device=H200):
    """A machine on which everything works."""
    machine.devices = [device]
    machine.packages |= {"cupy-cuda13x": "14.2.0", "torch": "2.11.0", "vl-convert-python": "1.9.0"}
    machine.importable |= {"cupy", "torch", "vl_convert", "pynvml"}
    monkeypatch.setattr(doctor, "_cupy_devices", lambda: (1, ""))
    monkeypatch.setattr(doctor, "_torch_cuda", lambda folders: "13.0")


def test_cpu_only_machine():
    findings = {finding.name: finding for finding in doctor.examine()}
    assert list(findings) == list(doctor.CHECKS)
    for name in ("python", "settings", "cuda-tile", "compiler", "targets", "environment", "database", "cache"):
        assert findings[name].status == "ok", findings[name]
        assert findings[name].remedy == ""
    for name in ("driver", "gpu", "arch", "cupy", "torch", "vl-convert"):
        assert findings[name].status == "missing"
    assert "sm_121" in findings["targets"].detail
    assert "will be created" in findings["database"].detail
    assert works("building").works
    assert works("reports").works
    assert not works("measuring").works
    assert works("serving").detail == "needs driver, gpu, arch, torch"


def test_everything_works(machine, monkeypatch, tmp_path):
    with_gpu(machine, monkeypatch, tmp_path)
    machine.tools = dict.fromkeys(machine.tools, "13.5.37")  # of which every problem of the shipped tables has evidence
    machine.packages["nvidia-nvvm"] = "13.5.37"
    findings = doctor.examine()
    assert [finding.name for finding in findings if finding.status != "ok"] == []
    assert all(part.works for part in doctor.overall(findings))
    assert found("gpu").detail == "NVIDIA H200 (sm_90, 139 GiB)"
    assert works("measuring").detail == "on NVIDIA H200 (sm_90, 139 GiB)"


def test_no_compiler(machine):
    machine.compiler = None
    assert (found("compiler").status, found("compiler").remedy) == ("missing", toolchain.INSTALL)
    assert found("targets").status == "missing"
    assert works("building").detail == "needs compiler"
    assert works("reports").works


def test_parts_of_different_releases(machine):
    machine.tools["ptxas"] = "13.2.50"
    finding = found("compiler")
    assert finding.status == "broken"
    assert "ptxas 13.2.50" in finding.detail
    assert "different releases" in finding.detail
    assert toolchain.INSTALL in finding.remedy


@pytest.mark.parametrize("tool", ["tileiras", "ptxas"])
def test_a_part_that_does_not_run(machine, tool):
    machine.tools[tool] = ""
    assert found("compiler").status == "broken"
    assert toolchain.INSTALL in found("compiler").remedy


def test_compiler_too_old_for_some_archs(machine, monkeypatch, tmp_path):
    machine.tools = dict.fromkeys(machine.tools, "13.2.10")
    machine.packages["nvidia-nvvm"] = "13.2.10"
    finding = found("targets")
    assert finding.status == "warn"
    assert finding.detail.endswith("tileiras 13.2.10 is too old for sm_90, sm_110")
    with_gpu(machine, monkeypatch, tmp_path)
    assert found("arch").status == "broken"
    assert works("measuring").detail == "needs arch"


@pytest.mark.parametrize(("version", "status"), [("", "missing"), ("1.2.0", "broken"), ("2.0.0", "broken")])
def test_cuda_tile(machine, version, status):
    machine.packages["cuda-tile"] = version
    assert found("cuda-tile").status == status
    assert "cuda-tile>=1.7,<2" in found("cuda-tile").remedy


def test_cuda_home_is_pointed_out(monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda-12.4")
    finding = found("environment")
    assert finding.status == "warn"
    assert "CUDA_HOME=/usr/local/cuda-12.4" in finding.detail
    assert finding.remedy.endswith("unset CUDA_HOME")


def test_driver_without_nvml_binding(machine, tmp_path):
    (tmp_path / "no-driver").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Fri\nGCC version 12.3.0"
    )
    assert (found("driver").status, found("driver").detail) == ("ok", "580.159.04")
    assert (found("gpu").status, found("gpu").remedy) == ("missing", "pip install nvidia-ml-py")
    machine.importable.add("pynvml")
    assert found("gpu").status == "broken"


def test_old_driver(tmp_path):
    (tmp_path / "no-driver").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Fri")
    assert found("driver").status == "broken"
    assert "580" in found("driver").remedy


def test_gpu_without_a_search_space(machine, monkeypatch, tmp_path):
    with_gpu(machine, monkeypatch, tmp_path, device=Device(name="NVIDIA T4", arch="sm_75", sm_count=40, driver="580.1"))
    finding = found("arch")
    assert finding.status == "broken"
    assert "sm_75" in finding.detail
    assert finding.remedy.startswith("known are sm_80")


def test_cupy_that_sees_nothing(machine, monkeypatch, tmp_path):
    with_gpu(machine, monkeypatch, tmp_path)
    monkeypatch.setattr(doctor, "_cupy_devices", lambda: (0, "CUDARuntimeError: no CUDA-capable device"))
    assert found("cupy").status == "broken"
    assert "no CUDA-capable device" in found("cupy").detail


def test_cupy_that_hangs(machine, monkeypatch, tmp_path):
    with_gpu(machine, monkeypatch, tmp_path)

    def hang():
        raise subprocess.TimeoutExpired("python", 20)

    monkeypatch.setattr(doctor, "_cupy_devices", hang)
    assert found("cupy").status == "broken"


def test_two_cupys_and_the_wrong_cupy(machine, monkeypatch, tmp_path):
    with_gpu(machine, monkeypatch, tmp_path)
    machine.packages["cupy-cuda12x"] = "13.6.0"
    assert "pip uninstall cupy-cuda13x cupy-cuda12x" in found("cupy").remedy
    del machine.packages["cupy-cuda13x"]
    assert found("cupy").status == "warn"


def test_cupy_is_asked_in_its_own_process(monkeypatch):
    real = subprocess.run

    def run(command, **options):
        return real([sys.executable, "-c", "print(2)" if works else "raise RuntimeError('no driver')"], **options)

    monkeypatch.setattr(doctor.subprocess, "run", run)
    works = True
    assert doctor._cupy_devices() == (2, "")
    works = False
    assert doctor._cupy_devices() == (0, "RuntimeError: no driver")
    assert "cupy" not in sys.modules


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ('cuda = "12.8"', "12.8"),
        ("cuda: Optional[str] = None", ""),
        ("hip = None", None),
    ],
)
def test_torch_cuda_is_read_from_its_file(tmp_path, line, cuda):
    (tmp_path / "version.py").write_text(f"__version__ = '2.11.0'\n{line}\ngit_version = 'x'\n")
    assert doctor._torch_cuda([tmp_path / "absent", tmp_path]) == cuda


@pytest.mark.parametrize(
    ("version", "cuda", "status"),
    [
        ("2.11.0+cu130", "13.0", "ok"),
        ("2.11.0", "", "broken"),
        ("2.11.0", "12.8", "warn"),
        ("2.8.1", "13.0", "broken"),
        ("2.9.0", None, "warn"),
    ],
)
def test_torch(machine, monkeypatch, version, cuda, status):
    machine.packages["torch"] = version
    machine.importable.add("torch")
    monkeypatch.setattr(doctor, "_torch_cuda", lambda folders: cuda)
    assert found("torch").status == status


def test_database_in_order(tmp_path):
    from report_samples import add_modelled, plain

    with TuningDB.open(tmp_path / "tuning.db") as db:
        add_modelled(db, plain(128, 64))
    finding = found("database")
    assert finding.status == "ok"
    assert "schema 0007, 1 entry (1 modelled)" in finding.detail


def test_broken_database(tmp_path):
    (tmp_path / "tuning.db").write_bytes(b"this is no database, and long enough to tell" * 100)
    finding = found("database")
    assert finding.status == "broken"
    assert str(tmp_path / "tuning.db") in finding.detail
    assert "TILEDSCHED_DB" in finding.remedy
    assert works("reports").detail == "needs database"


def test_cache(tmp_path):
    folder = tmp_path / "cache" / "artifacts"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"x" * 2048)
    assert found("cache").detail == f"{tmp_path / 'cache'}: 1 file, 2.0 KiB"


def test_cache_that_is_a_file(tmp_path):
    (tmp_path / "cache").write_text("")
    assert found("cache").status == "broken"
    assert not works("building").works


def test_little_space(monkeypatch):
    usage = type("Usage", (), {"free": 200 << 20})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert (found("disk").status, found("disk").detail) == ("warn", "200.0 MiB free for the cache")
    usage.free = 1 << 20
    assert found("disk").status == "broken"


def test_a_wrong_setting_is_a_finding(monkeypatch):
    monkeypatch.setenv("TILEDSCHED_REGIME", "lukewarm")
    assert found("settings").status == "broken"
    assert "TILEDSCHED_REGIME" in found("settings").detail


def test_a_check_that_crashes_hides_no_other(monkeypatch):
    def crash():
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor.nvml, "devices", crash)
    findings = {finding.name: finding for finding in doctor.examine()}
    assert list(findings) == list(doctor.CHECKS)
    assert findings["gpu"].status == "broken"
    assert "RuntimeError: boom" in findings["gpu"].detail
    assert findings["compiler"].status == "ok"


def test_json():
    findings = doctor.examine()
    data = json.loads(json.dumps(doctor.to_json(findings)))
    assert set(data) == {"schema_version", "tiledsched", "findings", "overall"}
    assert (data["schema_version"], data["tiledsched"]) == (1, __version__)
    for finding in data["findings"]:
        assert set(finding) == {"name", "status", "detail", "remedy"}
        assert finding["status"] in doctor.COLOURS
        assert finding["detail"]
    assert set(data["overall"]) == {"building", "measuring", "serving", "reports"}
    assert data["overall"]["building"]["works"] is True
    assert data["overall"]["measuring"] == {"works": False, "detail": "needs driver, gpu, arch, cupy"}


def test_text_is_aligned_and_plain_off_a_terminal():
    findings = doctor.examine()
    text = doctor.to_text(findings)
    assert "\033" not in text
    lines = text.splitlines()
    starts = {
        line.index(finding.detail) for finding in findings for line in lines if line[9:].startswith(finding.name + " ")
    }
    assert len(starts) == 1
    assert "         cupy" not in text
    assert f"-> {installing('gpu')}" in text
    assert lines[-4].startswith("building:   yes")


def test_colour(monkeypatch):
    findings = doctor.examine()
    assert "\033[32m" in doctor.to_text(findings, colour=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "\033" in doctor.to_text(findings)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in doctor.to_text(findings)
