"""Machine code for hosts of several architectures, known as one program; and that launches look for what was built ahead."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cuda.tile as ct
import pytest
from cubins import ARCH, CUBINS, HOSTS, MADE, REFERENCE
from cuda.tile import _compile

from tiledsched.build.compiler import compile_schedule
from tiledsched.build.cubin import host_instructions, is_whole, join, parts, read_artifact
from tiledsched.build.host_code import check_host, for_host, host_arch, host_of
from tiledsched.build.toolchain import installed_toolchain
from tiledsched.core.config import Settings, load_settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import CompilerError
from tiledsched.core.launches import signature, steps
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.softmax import Softmax
from tiledsched.serve.entries import load_entries
from tiledsched.serve.prebuilt import make_kernel


def test_a_program_has_one_fingerprint_on_all_hosts() -> None:
    """It is the one that x86_64 hosts always gave it, and it stays with the file."""
    for host, made in MADE.items():
        assert (made.fingerprint, made.host_arch) == ("7da78644a740baf7e57afd46", host)
        assert read_artifact(made.cubin, ARCH) == made
        assert [host_of(each) for each in parts(made.cubin)] == [host]
    both = [join([made, made]) for made in MADE.values()]
    assert both[0].fingerprint == both[1].fingerprint
    for host, made in zip(HOSTS, both, strict=True):
        assert read_artifact(made.cubin, ARCH) == made
        assert made.host_arch == host
        assert all(is_whole(each) and host_of(each) == host for each in parts(made.cubin))


def test_what_the_host_code_writes_is_part_of_the_program() -> None:
    code = host_instructions(REFERENCE)
    other = REFERENCE.replace(code, bytes([code[0] ^ 1]) + code[1:])
    changed = {
        read_artifact(CUBINS["x86_64"].replace(REFERENCE, other), ARCH).fingerprint,
        read_artifact(CUBINS["aarch64"], ARCH, other).fingerprint,
    }
    assert len(changed) == 1
    assert changed != {MADE["x86_64"].fingerprint}


@pytest.mark.parametrize(
    ("machine", "here"), [("x86_64", "x86_64"), ("AMD64", "x86_64"), ("aarch64", "aarch64"), ("arm64", "aarch64")]
)
def test_only_machine_code_for_this_host_is_loaded(machine, here, monkeypatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert host_arch() == here
    for host, cubin in CUBINS.items():
        if host == here:
            check_host(cubin)
            continue
        with pytest.raises(CompilerError, match=f"for {host} hosts and this host is {here}.*TILEDSCHED_CACHE"):
            check_host(cubin)


TILEIRAS = """#!/bin/sh
echo "$@" >> "$0.log"
host={default}
for each; do case "$each" in
    --host-arch=*) {knows} || exit 1; host=${{each#*=}};;
    --version) exit 0;;
esac; done
cp "${{0%/*}}/$host" "$3"
"""


@pytest.fixture
def tileiras(tmp_path, monkeypatch):
    """Puts a stand-in for tileiras in its place, and returns the file that it notes its arguments in."""

    def put(*, knows: bool = True, default: str = "x86_64") -> Path:
        path = tmp_path / "bin" / "tileiras"
        path.parent.mkdir()
        path.write_text(TILEIRAS.format(default=default, knows="true" if knows else "false"))
        path.chmod(0o755)
        for host, cubin in CUBINS.items():
            (path.parent / host).write_bytes(cubin)
        binary = _compile._CompilerBinary(str(path), "/usr/bin:/bin", "", pass_cuda_home_var=False)
        monkeypatch.setattr(_compile, "_find_compiler_bin", lambda: binary)
        return Path(f"{path}.log")

    return put


def run_for(host: str, folder: Path) -> tuple[bytes, list[bytes]]:
    """What tileiras writes for hosts of an architecture, and the host code of the reference that was made beside."""
    with for_host(host, folder / "known") as references:
        _compile._find_compiler_bin().run(["in", "-o", str(folder / "out")], ["--gpu-name", ARCH])
    return (folder / "out").read_bytes(), references


def test_tileiras_is_told_the_host(tileiras, tmp_path) -> None:
    """For other hosts than those of x86_64 it is asked for their host code as well, once for all programs that share it."""
    log = tileiras()
    assert run_for("x86_64", tmp_path) == (CUBINS["x86_64"], [])
    asked = [line for line in log.read_text().splitlines() if line.startswith("in")]
    assert asked == [f"in -o {tmp_path}/out --gpu-name {ARCH} --host-arch=x86_64"]
    for more in (["aarch64", "x86_64"], ["aarch64"]):
        log.write_text("")
        assert run_for("aarch64", tmp_path) == (CUBINS["aarch64"], [REFERENCE])
        assert [line.rpartition("=")[2] for line in log.read_text().splitlines() if line.startswith("in")] == more
    (tmp_path / "known").rename(tmp_path / "elsewhere")
    (tmp_path / "known").write_text("no folder")  # where nothing can be kept, it is asked each time
    assert run_for("aarch64", tmp_path) == (CUBINS["aarch64"], [REFERENCE])


def test_a_compiler_that_cannot_be_told_builds_for_its_own_host(tileiras, tmp_path, monkeypatch) -> None:
    log = tileiras(knows=False, default="aarch64")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert run_for("aarch64", tmp_path) == (CUBINS["aarch64"], [])
    assert log.read_text().splitlines()[-1] == f"in -o {tmp_path}/out --gpu-name {ARCH}"
    with pytest.raises(CompilerError, match=r"makes no code for x86_64 hosts; install a tileiras of 13\.4"):
        run_for("x86_64", tmp_path)


def test_what_cutiles_cache_has_for_other_hosts_is_compiled_anew(monkeypatch, tmp_path) -> None:
    """The cache is left out meanwhile; what still is for another host is not launched."""
    from cuda.tile._cext import default_tile_context as context

    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path / "cache"))
    problem, device = Softmax.problem(rows=4096, columns=512), arch_spec(ARCH)
    schedule = space_for(ARCH, Softmax).default(problem)
    (step,) = steps(Softmax, problem, schedule, device)
    (served,) = make_kernel(Softmax, schedule, problem, load_settings(), device)
    before, asked = context.config.cache_dir, []
    monkeypatch.setattr(context.config, "cache_dir", "shared")

    def compiled(self, *arguments):
        asked.append(context.config.cache_dir)
        return CUBINS["aarch64" if len(asked) in (1, 3, 4) else "x86_64"], "softmax", None, ()

    monkeypatch.setattr(ct.kernel, "_compile", compiled)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    wanted = signature(Softmax, problem, schedule, step)
    assert served._compile(wanted, context, (9, 0))[0] == CUBINS["x86_64"]
    assert asked == ["shared", None]
    assert context.config.cache_dir == "shared" != before
    shutil.rmtree(tmp_path / "cache")  # where it is found now
    with pytest.raises(CompilerError, match="for aarch64 hosts"):
        served._compile(wanted, context, (9, 0))


@pytest.mark.compiler
@pytest.mark.slow
def test_evidence_of_x86_64_hosts_holds_on_aarch64(tmp_path, monkeypatch) -> None:
    """Both values of `--host-arch` give the machine code that the shipped table names."""
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path))
    problem = Softmax.problem(rows=4096, columns=512)
    schedule = space_for(ARCH, Softmax).default(problem)
    made = {host: compile_schedule(Softmax, problem, schedule, ARCH, host) for host in HOSTS}
    assert len([*(tmp_path / "host_code").iterdir()]) == 1
    assert [each.host_arch for each in made.values()] == [*HOSTS]
    assert made["x86_64"] == replace(made["aarch64"], cubin=made["x86_64"].cubin, host_arch="x86_64")
    here = installed_toolchain().compiler
    entry = min(
        (
            each
            for each in load_entries(Settings(db="/nonexistent/x.db"), {ARCH}, "attention")
            if each.provenance == "measured" and each.fingerprint and each.toolchain.compiler == here
        ),
        key=lambda each: (each.schedule["kv_splits"], each.problem.causal, each.problem.head_dim, each.key),
    )  # among those that take the least time to build
    for host in HOSTS:
        assert compile_schedule(Attention, entry.problem, entry.schedule, ARCH, host).fingerprint == entry.fingerprint


# Programs built ahead are those that launches look for: by cuTile's own launcher, on a driver that launches nothing


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("cc") and sys.platform == "linux"), reason="needs a C compiler")
def test_what_a_launch_looks_for_is_what_was_built_ahead(tmp_path) -> None:
    """Of kernels without constant sizes a launch takes an older calling convention than a build; and of scratch memory with one
    element it takes each stride for a constant."""
    pytest.importorskip("torch")
    here, driver = Path(__file__).parent, tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", str(driver), str(here / "fake_driver.c")], check=True)
    settings = {"COMPILE": "wait", "RIVALS": "off", "FALLBACK": "error", "DB": tmp_path / "none.db", "CACHE": tmp_path}
    environment = os.environ | {f"TILEDSCHED_{name}": str(value) for name, value in settings.items()}
    environment |= {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(here / "launched_programs.py")]
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
