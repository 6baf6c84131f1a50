"""The doctor, on machines made up by replacing what it looks at."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys

import pytest

from tiledsched import __version__, doctor
from tiledsched.build import toolchain
from tiledsched.cli.machine_commands import print_findings
from tiledsched.core.extras import installing
from tiledsched.measure.runner import Device
from tiledsched.store.db import TuningDB

H200 = Device(name="NVIDIA H200", arch="sm_90", sm_count=0, memory_bytes=139 << 30, driver="580.159.04")
PARTS = {"cuda-tile": "1.7.0", "nvidia-nvvm": "13.4.92", "tileiras": "13.4.92", "ptxas": "13.4.92"}


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Versions of the packages and tools of a whole compiler; tests change them."""
    versions = dict(PARTS)
    for name in ("CUDA_HOME", "CUDA_PATH", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "package_version", lambda name: versions.get(name, ""))
    monkeypatch.setattr(toolchain, "tool_version", lambda path: versions.get(path.name, ""))
    monkeypatch.setattr(toolchain, "compiler_folder", lambda: tmp_path / "bin")
    toolchain._installed_toolchain.cache_clear()
    yield versions
    toolchain._installed_toolchain.cache_clear()


@pytest.fixture
def machine(parts, tmp_path):
    """A machine without a GPU, with a whole compiler and nothing optional; tests change it."""
    return doctor.Machine(
        list_devices=list,
        version=lambda name: parts.get(name, ""),
        find_module=lambda name: None,
        find_driver=lambda: None,
        free_bytes=lambda folder: 1 << 40,
    )


@pytest.fixture
def whole(machine, parts):
    """A machine on which everything works."""
    parts |= {"cupy-cuda13x": "14.2.0", "torch": "2.11.0", "vl-convert-python": "1.9.0"}
    return dataclasses.replace(
        machine,
        list_devices=lambda: [H200],
        find_module=lambda name: importlib.util.find_spec("json"),
        cupy_devices=lambda: (1, ""),
        torch_cuda=lambda folder: "13.0",
    )


def found(machine, name):
    return next(finding for finding in doctor.examine(machine) if finding.name == name)


def works(machine, name):
    part = doctor.overall(doctor.examine(machine))[name]
    return part["detail"] if part["works"] else f"no: {part['detail']}"


def test_cpu_only_machine(machine, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    findings = {finding.name: finding for finding in doctor.examine(machine)}
    assert list(findings) == list(doctor.CHECKS)
    for name in ("python", "settings", "cuda-tile", "compiler", "targets", "environment", "database", "cache"):
        assert findings[name].status == "ok", findings[name]
        assert findings[name].remedy == ""
    for name in ("driver", "gpu", "arch", "cupy", "torch", "vl-convert"):
        assert findings[name].status == "missing"
    assert findings["targets"].detail.endswith("sm_121 on aarch64 hosts")
    assert "will be created" in findings["database"].detail
    assert works(machine, "building").startswith("for sm_80")
    assert works(machine, "reports").startswith("without charts")
    assert works(machine, "measuring").startswith("no: ")
    assert works(machine, "serving") == "no: needs driver, gpu, arch, torch"


def test_everything_works(whole, parts):
    parts |= dict.fromkeys(("tileiras", "ptxas", "nvidia-nvvm"), "13.5.37")  # of which all shipped tables have evidence
    findings = doctor.examine(whole)
    assert [finding.name for finding in findings if finding.status != "ok"] == []
    assert all(part["works"] for part in doctor.overall(findings).values())
    assert found(whole, "gpu").detail == "NVIDIA H200 (sm_90, 139 GiB)"
    assert works(whole, "measuring") == "on NVIDIA H200 (sm_90, 139 GiB)"


def test_no_compiler(machine, monkeypatch):
    monkeypatch.setattr(toolchain, "compiler_folder", lambda: None)
    assert found(machine, "compiler")[::2] == ("missing", toolchain.INSTALL)
    assert found(machine, "targets").status == "missing"
    assert works(machine, "building") == "no: needs compiler"
    assert works(machine, "reports").startswith("without charts")


def test_parts_of_different_releases(machine, parts):
    parts["ptxas"] = "13.2.50"
    finding = found(machine, "compiler")
    assert finding.status == "broken"
    assert "ptxas 13.2.50" in finding.detail
    assert "different releases" in finding.detail
    assert toolchain.INSTALL in finding.remedy


@pytest.mark.parametrize("tool", ["tileiras", "ptxas"])
def test_a_part_that_does_not_run(machine, parts, tool):
    parts[tool] = ""
    assert found(machine, "compiler").status == "broken"
    assert toolchain.INSTALL in found(machine, "compiler").remedy


def test_compiler_too_old_for_some_archs(whole, parts):
    parts |= dict.fromkeys(("tileiras", "ptxas", "nvidia-nvvm"), "13.2.10")
    finding = found(whole, "targets")
    assert finding.status == "warn"
    assert finding.detail.endswith("tileiras 13.2.10 is too old for sm_90, sm_110")
    assert found(whole, "arch").status == "broken"
    assert works(whole, "measuring") == "no: needs arch"


@pytest.mark.parametrize(("version", "status"), [("", "missing"), ("1.2.0", "broken"), ("2.0.0", "broken")])
def test_cuda_tile(machine, parts, version, status):
    parts["cuda-tile"] = version
    assert found(machine, "cuda-tile").status == status
    assert "cuda-tile>=1.7,<2" in found(machine, "cuda-tile").remedy


def test_cuda_home_is_pointed_out(machine, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda-12.4")
    finding = found(machine, "environment")
    assert finding.status == "warn"
    assert "CUDA_HOME=/usr/local/cuda-12.4" in finding.detail
    assert finding.remedy.endswith("unset CUDA_HOME")


def test_driver_without_nvml_binding(machine):
    machine.find_driver = lambda: "580.159.04"
    assert found(machine, "driver")[:2] == ("ok", "580.159.04")
    assert found(machine, "gpu")[::2] == ("missing", "pip install nvidia-ml-py")
    machine.find_module = importlib.util.find_spec
    assert found(machine, "gpu").status == ("broken" if importlib.util.find_spec("pynvml") else "missing")


@pytest.mark.parametrize(("version", "status"), [("550.54.15", "broken"), ("", "warn"), (None, "missing")])
def test_driver(machine, version, status):
    machine.find_driver = lambda: version
    assert found(machine, "driver").status == status
    assert status == "warn" or "580" in found(dataclasses.replace(machine), "driver").remedy


def test_a_gpu_that_tells_little(whole):
    """One that shares the host's memory, of a driver that does not tell its version."""
    whole.list_devices = lambda: [Device(name="NVIDIA GB10", arch="sm_121", sm_count=0)]
    whole.find_driver = lambda: ""
    assert found(whole, "gpu").detail == "NVIDIA GB10 (sm_121)"
    assert found(whole, "driver").status == "warn"
    assert works(whole, "measuring") == "on NVIDIA GB10 (sm_121)"


def test_gpu_without_a_search_space(whole):
    whole.list_devices = lambda: [Device(name="NVIDIA T4", arch="sm_75", sm_count=40, driver="580.1")]
    finding = found(whole, "arch")
    assert finding.status == "broken"
    assert "sm_75" in finding.detail
    assert finding.remedy.startswith("known are sm_80")


def test_cupy_that_sees_nothing_or_hangs(whole):
    def hang():
        raise subprocess.TimeoutExpired("python", 20)

    whole.cupy_devices = lambda: (0, "CUDARuntimeError: no CUDA-capable device")
    assert found(whole, "cupy").status == "broken"
    assert "no CUDA-capable device" in found(whole, "cupy").detail
    whole.cupy_devices = hang
    assert found(whole, "cupy").status == "broken"


def test_two_cupys_and_the_wrong_cupy(whole, parts):
    parts["cupy-cuda12x"] = "13.6.0"
    assert "pip uninstall cupy-cuda13x cupy-cuda12x" in found(whole, "cupy").remedy
    del parts["cupy-cuda13x"]
    assert found(whole, "cupy").status == "warn"


@pytest.mark.parametrize(
    ("code", "answer"), [("print(2)", (2, "")), ("raise RuntimeError('no driver')", (0, "RuntimeError: no driver"))]
)
def test_cupy_is_asked_in_its_own_process(monkeypatch, code, answer):
    real = subprocess.run
    monkeypatch.setattr(
        doctor.subprocess, "run", lambda command, **options: real([sys.executable, "-c", code], **options)
    )
    assert doctor.cupy_devices() == answer
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
    text = f"from typing import Optional\n__version__ = '2.11.0'\n{line}\ngit_version = 'x'\n"
    (tmp_path / "version.py").write_text(text)
    assert doctor.torch_cuda(tmp_path) == cuda
    assert doctor.torch_cuda(tmp_path / "absent") is None


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
def test_torch(whole, parts, version, cuda, status):
    parts["torch"] = version
    whole.torch_cuda = lambda folder: cuda
    assert found(whole, "torch").status == status


def test_database_in_order(machine, tmp_path):
    from report_samples import add_modelled, plain

    with TuningDB.open(tmp_path / "tuning.db") as db:
        add_modelled(db, plain(128, 64))
        revision = db.schema_revision
    finding = found(machine, "database")
    assert finding.status == "ok"
    assert f"schema {revision}, 1 entry (1 modelled)" in finding.detail


def test_broken_database(machine, tmp_path):
    (tmp_path / "tuning.db").write_bytes(b"this is no database, and long enough to tell" * 100)
    finding = found(machine, "database")
    assert finding.status == "broken"
    assert str(tmp_path / "tuning.db") in finding.detail
    assert "TILEDSCHED_DB" in finding.remedy
    assert works(machine, "reports") == "no: needs database"


def test_cache(machine, tmp_path):
    folder = tmp_path / "cache" / "artifacts"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"x" * 2048)
    assert found(machine, "cache").detail == f"{tmp_path / 'cache'}: 1 file, 2.0 kB; 1.1 TB free"
    for free, status in ((200 << 20, "warn"), (1 << 20, "broken")):
        machine.free_bytes = lambda folder, free=free: free
        assert found(machine, "cache").status == status


def test_cache_that_is_a_file(machine, tmp_path):
    (tmp_path / "cache").write_text("")
    assert found(machine, "cache").status == "broken"
    assert works(machine, "building") == "no: needs cache"


def test_a_wrong_setting_is_a_finding(machine, monkeypatch):
    monkeypatch.setenv("TILEDSCHED_REGIME", "lukewarm")
    assert found(machine, "settings").status == "broken"
    assert "TILEDSCHED_REGIME" in found(machine, "settings").detail
    assert found(machine, "database").status == "ok"


def test_a_check_that_crashes_hides_no_other(machine):
    machine.list_devices = lambda: 1 / 0
    findings = {finding.name: finding for finding in doctor.examine(machine)}
    assert list(findings) == list(doctor.CHECKS)
    assert findings["gpu"].status == "broken"
    assert "ZeroDivisionError" in findings["gpu"].detail
    assert findings["compiler"].status == "ok"


def test_json(machine):
    findings = doctor.examine(machine)
    data = json.loads(json.dumps(doctor.to_json(findings)))
    assert set(data) == {"tiledsched", "findings", "overall"}
    assert data["tiledsched"] == __version__
    for finding in data["findings"]:
        assert set(finding) == {"name", "status", "detail", "remedy"}
        assert finding["status"] in ("ok", "warn", "missing", "broken")
        assert finding["detail"]
    assert set(data["overall"]) == {"building", "measuring", "serving", "reports"}
    assert data["overall"]["building"]["works"] is True
    assert data["overall"]["measuring"] == {"works": False, "detail": "needs driver, gpu, arch, cupy"}


def test_text_is_aligned_and_as_wide_as_the_terminal(machine, capsys, monkeypatch):
    findings = doctor.examine(machine)
    print_findings(findings, doctor.overall(findings))
    text = capsys.readouterr().out
    lines = text.splitlines()
    starts = {
        line.index(finding.detail) for finding in findings for line in lines if line[9:].startswith(finding.name + " ")
    }
    assert len(starts) == 1
    assert f"-> {installing('gpu')}" in text
    assert lines[-4].startswith("building:   yes")
    monkeypatch.setenv("COLUMNS", "60")
    print_findings(findings, doctor.overall(findings))
    narrow = capsys.readouterr().out
    assert max(len(line) for line in narrow.splitlines() if "/" not in line) <= 60
    assert " ".join(narrow.split()) == " ".join(text.split())


def test_the_command_looks_at_the_database_that_is_named(parts, tmp_path, cli):
    TuningDB.open(tmp_path / "named.db").close()
    found = cli(["doctor", "--db", str(tmp_path / "named.db"), "--json"], devices=list).json
    assert found["schema_version"] == 1
    (database,) = [each for each in found["findings"] if each["name"] == "database"]
    assert database["detail"].startswith(str(tmp_path / "named.db"))
