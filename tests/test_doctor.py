"""The doctor, on machines made up by replacing what it looks at; and the install lines that it and other messages give."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import subprocess
import sys

import pytest
from golden import lacking

from tiledsched import __version__, doctor
from tiledsched.build import toolchain
from tiledsched.cli.machine_commands import print_findings
from tiledsched.core.errors import MissingPackageError
from tiledsched.core.extras import installing, missing, required
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
    statuses = dict.fromkeys(doctor.CHECKS, "ok")
    statuses |= dict.fromkeys(("driver", "gpu", "arch", "cupy", "torch", "vl-convert"), "missing") | {
        "evidence": "warn"
    }
    assert {name: finding.status for name, finding in findings.items()} == statuses
    assert [name for name, finding in findings.items() if finding.status == "ok" and finding.remedy] == []
    assert findings["targets"].detail.endswith("sm_121 on aarch64 hosts")
    assert "will be created" in findings["database"].detail
    parts = {"building": "for sm_80", "reports": "without charts", "measuring": "no: "}
    for name, begins in {**parts, "serving": "no: needs driver, gpu, arch, torch"}.items():
        assert works(machine, name).startswith(begins), name


def test_everything_works(whole, parts):
    parts |= dict.fromkeys(("tileiras", "ptxas", "nvidia-nvvm"), "13.5.37")  # of which all shipped tables have evidence
    findings = doctor.examine(whole)
    assert [finding.name for finding in findings if finding.status != "ok"] == []
    assert all(part["works"] for part in doctor.overall(findings).values())
    assert found(whole, "gpu").detail == "NVIDIA H200 (sm_90, 139 GiB)"
    assert works(whole, "measuring") == "on NVIDIA H200 (sm_90, 139 GiB)"


def hang():
    raise subprocess.TimeoutExpired("python", 20)


T4 = Device(name="NVIDIA T4", arch="sm_75", sm_count=40, driver="580.1")
GB10 = Device(name="NVIDIA GB10", arch="sm_121", sm_count=0)
OLD = dict.fromkeys(("tileiras", "ptxas", "nvidia-nvvm"), "13.2.10")
CUPY_12 = {"cupy-cuda12x": "13.6.0"}
WRONG = [
    ("compiler", {"ptxas": "13.2.50"}, {}, "broken", ["ptxas 13.2.50", "different releases", toolchain.INSTALL]),
    ("compiler", {"ptxas": ""}, {}, "broken", [toolchain.INSTALL]),
    ("compiler", {"tileiras": ""}, {}, "broken", [toolchain.INSTALL]),
    ("targets", OLD, {}, "warn", ["tileiras 13.2.10 is too old for sm_90, sm_110"]),
    ("arch", OLD, {"list_devices": lambda: [H200]}, "broken", []),
    ("cuda-tile", {"cuda-tile": ""}, {}, "missing", ["cuda-tile>=1.7,<2"]),
    ("cuda-tile", {"cuda-tile": "1.2.0"}, {}, "broken", ["cuda-tile>=1.7,<2"]),
    ("cuda-tile", {"cuda-tile": "2.0.0"}, {}, "broken", ["cuda-tile>=1.7,<2"]),
    ("driver", {}, {"find_driver": lambda: "550.54.15"}, "broken", ["580"]),
    ("driver", {}, {"find_driver": lambda: ""}, "warn", []),
    ("driver", {}, {"find_driver": lambda: None}, "missing", ["580"]),
    ("driver", {}, {"find_driver": lambda: "580.159.04"}, "ok", ["580.159.04"]),
    ("gpu", {}, {"find_driver": lambda: "580.1", "find_module": lambda name: None}, "missing", ["nvidia-ml-py"]),
    ("gpu", {}, {"find_driver": lambda: "580.1"}, "broken", ["NVML lists no GPU"]),
    ("gpu", {}, {"list_devices": lambda: [GB10], "find_driver": lambda: ""}, "ok", ["NVIDIA GB10 (sm_121)"]),
    ("driver", {}, {"list_devices": lambda: [GB10], "find_driver": lambda: ""}, "warn", []),
    ("arch", {}, {"list_devices": lambda: [T4]}, "broken", ["sm_75", "known are sm_80"]),
    ("gpu", {}, {"list_devices": lambda: 1 / 0}, "broken", ["ZeroDivisionError"]),
    ("compiler", {}, {"list_devices": lambda: 1 / 0}, "ok", []),
    ("cupy", {}, {"list_devices": lambda: [H200], "cupy_devices": lambda: (0, "no CUDA")}, "broken", ["no CUDA"]),
    ("cupy", {}, {"list_devices": lambda: [H200], "cupy_devices": hang}, "broken", ["no answer"]),
    ("cupy", CUPY_12, {"list_devices": lambda: [H200]}, "broken", ["uninstall cupy-cuda13x cupy-cuda12x"]),
    ("cupy", CUPY_12 | {"cupy-cuda13x": ""}, {"list_devices": lambda: [H200]}, "warn", ["not built for CUDA 13"]),
    ("torch", {"torch": "2.11.0+cu130"}, {"torch_cuda": lambda folder: "13.0"}, "ok", ["built for CUDA 13.0"]),
    ("torch", {}, {"list_devices": lambda: [H200], "torch_cuda": lambda folder: ""}, "broken", ["without CUDA"]),
    ("torch", {}, {"torch_cuda": lambda folder: "12.8"}, "warn", ["CUDA 12.8, not 13"]),
    ("torch", {"torch": "2.8.1"}, {"torch_cuda": lambda folder: "13.0"}, "broken", ["2.9 or newer"]),
    ("torch", {"torch": "2.9.0"}, {"torch_cuda": lambda folder: None}, "warn", ["cannot be read"]),
    ("cache", {}, {"free_bytes": lambda folder: 200 << 20}, "warn", ["free some space"]),
    ("cache", {}, {"free_bytes": lambda folder: 1 << 20}, "broken", ["free some space"]),
]
"""Finding, changed versions, changed fields of a machine without a GPU, status, and words of the detail or the remedy."""


@pytest.mark.parametrize(("name", "versions", "fields", "status", "words"), WRONG)
def test_what_is_wrong_is_found(whole, parts, name, versions, fields, status, words):
    parts |= versions
    machine = dataclasses.replace(whole, **{"list_devices": list, **fields})
    finding = found(machine, name)
    assert (finding.status, lacking(f"{finding.detail} {finding.remedy}", *words)) == (status, [])
    assert [each.name for each in doctor.examine(machine)] == list(doctor.CHECKS)


def test_what_does_not_work_needs_what_is_not_there(whole, parts):
    parts |= OLD
    assert works(dataclasses.replace(whole), "measuring") == "no: needs arch"
    whole.list_devices, whole.find_driver = lambda: [GB10], lambda: ""
    assert works(whole, "measuring") == "on NVIDIA GB10 (sm_121)"


@pytest.mark.parametrize(
    ("variable", "value", "name", "status", "words"),
    [
        (
            "CUDA_HOME",
            "/usr/local/cuda-12.4",
            "environment",
            "warn",
            ["CUDA_HOME=/usr/local/cuda-12.4", "unset CUDA_HOME"],
        ),
        ("TILEDSCHED_REGIME", "lukewarm", "settings", "broken", ["TILEDSCHED_REGIME"]),
        ("TILEDSCHED_REGIME", "lukewarm", "database", "ok", []),
    ],
)
def test_what_is_wrong_in_the_environment_is_found(machine, monkeypatch, variable, value, name, status, words):
    monkeypatch.setenv(variable, value)
    finding = found(machine, name)
    assert (finding.status, lacking(f"{finding.detail} {finding.remedy}", *words)) == (status, [])


def test_without_a_compiler_reports_can_be_written(machine, monkeypatch):
    monkeypatch.setattr(toolchain, "compiler_folder", lambda: None)
    assert found(machine, "compiler")[::2] == ("missing", toolchain.INSTALL)
    assert (found(machine, "targets").status, works(machine, "building")) == ("missing", "no: needs compiler")
    assert works(machine, "reports").startswith("without charts")


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


def test_database_in_order(machine, tmp_path):
    from report_samples import add_modelled, plain

    with TuningDB.open(tmp_path / "tuning.db") as db:
        add_modelled(db, plain(128, 64))
        revision = db.schema_revision
    finding = found(machine, "database")
    assert (finding.status, f"schema {revision}, 1 entry (1 modelled)" in finding.detail) == ("ok", True)


@pytest.mark.parametrize(
    ("file", "name", "words", "part"),
    [("tuning.db", "database", ["tuning.db", "TILEDSCHED_DB"], "reports"), ("cache", "cache", [], "building")],
)
def test_a_file_that_is_no_database_or_no_folder_is_found(machine, tmp_path, file, name, words, part):
    (tmp_path / file).write_bytes(b"this is no database, and long enough to tell" * 100)
    finding = found(machine, name)
    assert (finding.status, lacking(f"{finding.detail} {finding.remedy}", *words)) == ("broken", [])
    assert works(machine, part) == f"no: needs {name}"


def test_cache(machine, tmp_path):
    (tmp_path / "cache" / "artifacts").mkdir(parents=True)
    (tmp_path / "cache" / "artifacts" / "a").write_bytes(b"x" * 2048)
    assert found(machine, "cache").detail == f"{tmp_path / 'cache'}: 1 file, 2.0 kB; 1.1 TB free"


def test_json(machine):
    findings = doctor.examine(machine)
    data = json.loads(json.dumps(doctor.to_json(findings)))
    assert data == {
        "tiledsched": __version__,
        "findings": [
            {name: getattr(each, name) for name in ("name", "status", "detail", "remedy")} for each in findings
        ],
        "overall": doctor.overall(findings),
    }
    assert {name: part["works"] for name, part in data["overall"].items()} == {
        "building": True,
        "measuring": False,
        "serving": False,
        "reports": True,
    }
    assert data["overall"]["measuring"]["detail"] == "needs driver, gpu, arch, cupy"
    assert all(each.detail for each in findings)


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


# The install lines that messages give work as written, wherever the package came from


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (None, "pip install 'tiledsched[gpu,report]'"),
        ({"url": "file:///home/me/a%20b", "dir_info": {"editable": True}}, "pip install -e '/home/me/a b[gpu,report]'"),
        ({"url": "file:///home/me/tiledsched", "dir_info": {}}, "pip install '/home/me/tiledsched[gpu,report]'"),
        (
            {"url": "file:///tmp/tiledsched-1-py3-none-any.whl", "archive_info": {}},
            "pip install 'tiledsched[gpu,report] @ file:///tmp/tiledsched-1-py3-none-any.whl'",
        ),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "0"}},
            "pip install 'tiledsched[gpu,report] @ git+https://host/a.git'",
        ),
        ([], "pip install 'tiledsched[gpu,report]'"),
    ],
)
def test_the_line_names_where_the_package_came_from(monkeypatch, source, line):
    class Distribution:
        def read_text(self, name):
            assert name == "direct_url.json"
            return None if source is None else json.dumps(source)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    assert installing("gpu", "report") == line


def test_a_checkout_that_was_never_installed(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert installing() == "pip install 'tiledsched'"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"), "torch.nn is not installed; run: {gpu}"),
        (
            ImportError("libc10.so is missing", name="torch._C"),
            "torch._C cannot be imported (libc10.so is missing); run: {gpu}",
        ),
        (ModuleNotFoundError("", name="vl_convert"), "vl_convert is not installed; run: {report}"),
        (ModuleNotFoundError("", name="ray"), "ray is not installed; run: {fleet}"),
        (ModuleNotFoundError("", name="cuda.tile"), "cuda.tile is not installed; run: {}"),
        (ModuleNotFoundError("", name="numpy"), "numpy is not installed; run: {}"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(error, said):
    lines = {extra: installing(extra) for extra in ("gpu", "report", "fleet")}
    assert str(missing(error)) == said.replace("{}", installing()).format(**lines)
    with pytest.raises(MissingPackageError) as found, required():
        raise error
    assert str(found.value) == str(missing(error))


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import tiledsched as ts
from tiledsched.cli import main

for line in sys.stdin.read().splitlines():
    print(line, main(line.split()), file=sys.stderr)
for name in ts.__all__:
    try:
        getattr(ts, name)
    except ts.TiledschedError as error:
        print(name, error, file=sys.stderr)
try:
    ts.op("a::b", ts.load_kernel("softmax"))([1.0])
except ts.TiledschedError as error:
    print("op", error, file=sys.stderr)
except RuntimeError:  # of torch, which takes no list
    pass
"""
COMMANDS = """
tune softmax -p rows=8,columns=64 --arch sm_121 --budget 0 --db x.db
check softmax -p rows=8,columns=64 --schedules 1
record softmax -p rows=8,columns=64 --arch sm_121 -o land
refresh softmax --arch sm_121
show
explain -p S=1024,D=64 --arch sm_90
report softmax --arch sm_121
compare shipped shipped --kernel softmax --arch sm_90
bench -p S=1024,D=64
study paper
study ladder
study ablation -p S=1024,D=64 --arch sm_90
study profile -p S=1024,D=64
warmup softmax --arch sm_121 -p rows=8,columns=64 --jobs 1
fleet run tune softmax
fleet work
fleet status
db check
db query
doctor
""".strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packages", "said"),
    [
        ("torch", ["\nsdpa torch is not installed; run: pip", "\nop torch is not installed; run: pip"]),
        ("cuda", ["tiledsched: cuda is not installed; run: pip", "\nop cuda is not installed; run: pip"]),
        ("cupy,vl_convert,ray", ["tiledsched: cupy is not installed; run: pip"]),
    ],
)
def test_without_a_package_every_command_and_name_ends_in_a_line(packages, said, tmp_path, monkeypatch, python):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    printed = python(WITHOUT, packages, given=COMMANDS).err
    assert "Traceback" not in printed
    assert lacking(printed, *said) == []
