"""`tiledsched profile` with a stand-in for Nsight Compute, whose raw page has the real one's form."""

from __future__ import annotations

import json
import sys

import pytest
from report_samples import check_golden

from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core.errors import ConfigError, MeasureError
from tiledsched.kernels.attention import Attention
from tiledsched.studies.profile import launch, pages
from tiledsched.studies.profile.metrics import METRICS, MethodProfile, ncu_metrics, over, read_raw
from tiledsched.studies.profile.run import find_ncu, profile, versions
from tiledsched.studies.profile.sass import find_nvdisasm

PROBLEM = Attention.standard(seq_len=4096, head_dim=128)
HEAD = (
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
    "Device",
    "CC",
)
VALUES = {
    "gpu__time_duration.sum": "800,000",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "54.799792",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "46.07",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "54.80",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "56.73",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "12.43",
    "launch__registers_per_thread": "168",
    "launch__block_size": "384",
    "launch__grid_size": "132",
    "launch__shared_mem_per_block": "230,560",
    "lts__t_sectors.sum": "34,089,136",
    "dram__bytes_read.sum": "100,663,296",
    "dram__bytes_write.sum": "33,554,432",
    "smsp__inst_executed.sum": "118,137,480",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum": "0",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum": "32,768",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "0.263684",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": "1.711404",
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": "(!) n/a",
}


def raw(*kernels):
    """A raw page: what ncu says first, the names, the units, and a row for each kernel."""
    names = list(VALUES)
    lines = [[*HEAD, *names], ["" for _ in (*HEAD, *names)]]
    for number, (name, changes) in enumerate(kernels):
        known = VALUES | changes
        lines.append(
            [
                str(number),
                "7",
                "python",
                "host",
                name,
                "1",
                "7",
                "(384, 1, 1)",
                "(132, 1, 1)",
                "0",
                "9.0",
                *(known[each] for each in names),
            ]
        )
    text = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    return f'==PROF== Connected to process 7 (/usr/bin/python)\n==PROF== Profiling "{kernels[0][0]}": 0%....100% - 9 passes\n{text}\n'


def test_a_raw_page_is_read():
    (kernel,) = read_raw(raw(("flash_fwd<128, 64>", {})))
    assert kernel.name == "flash_fwd<128, 64>"
    assert kernel.values["gpu__time_duration.sum"] == 800_000
    assert not any("gmma" in name for name in kernel.values)  # not available on this GPU
    one = MethodProfile(method="ours", kernels=(kernel,))
    assert list(one.stalls()) == ["wait", "long_scoreboard"]
    assert over(one, "l2", 0) is None


def test_a_call_of_several_kernels_is_one_row():
    """Times and bytes add up, shares are weighted by time, registers are the most."""
    page = raw(
        ("scores", {}),
        (
            "softmax",
            {
                "gpu__time_duration.sum": "200,000",
                "launch__registers_per_thread": "255",
                "sm__throughput.avg.pct_of_peak_sustained_elapsed": "4.8",
            },
        ),
    )
    found = MethodProfile(method="eager", kernels=tuple(read_raw(page))).to_csv(1)
    assert (found["duration_us"], found["dram_mib"], found["registers"], found["kernels"]) == (1000.0, 256, 255, 2)
    assert found["sm_throughput_pct"] == pytest.approx((54.799792 * 0.8 + 4.8 * 0.2), rel=1e-4)


@pytest.mark.parametrize("text", ["", "==ERROR== nothing", '"ID","Process ID"\n', raw(("k", {})).split('\n"0"')[0]])
def test_what_is_no_page_is_told(text):
    with pytest.raises(MeasureError, match="profiled n"):
        read_raw(text)


def test_what_is_asked_covers_every_figure():
    names = ncu_metrics().split(",")
    assert len(names) == len(set(names))
    assert {name for metric in METRICS for name in metric.names} <= set(names)


FAKE = """#!{python}
import sys
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1 (build 36398880) (public-release)")
    sys.exit(0)
log, method = arguments[arguments.index("--log-file") + 1], arguments[-1]
if method == "torch_math":
    print("warming up", file=sys.stderr)
    print("UnsupportedError: skipped: its score matrices would take 90 GiB", file=sys.stderr)
    sys.exit(3)
if method == "eager":
    open(log, "w").write("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters")
    sys.exit(1)
if method == "triton":
    print("Segmentation fault", file=sys.stderr)
    sys.exit(139)
open(log, "w").write({page!r})
"""


@pytest.fixture
def ncu(tmp_path):
    path = tmp_path / "ncu"
    path.write_text(FAKE.format(python=sys.executable, page=raw(("kernel_of_it", {}))))
    path.chmod(0o755)
    return str(path)


def test_methods_side_by_side(ncu):
    found = profile(Attention, PROBLEM, ["tiledsched", "torch_math"], ncu=ncu)
    assert [each.status for each in found] == ["ok", "UnsupportedError: skipped: its score matrices would take 90 GiB"]
    told = versions(ncu, "580.1")
    assert told.startswith(f"driver 580.1, tileiras {compiler_at_hand()}, Nsight Compute 2025.3.1, 20")
    assert told in pages.to_text(PROBLEM, found, device="NVIDIA Sample", versions=told)
    check_golden("studies/profile.csv", pages.to_csv(PROBLEM, found, versions="1"))


def test_what_to_do_about_it_is_told(ncu):
    with pytest.raises(ConfigError, match="NVreg_RestrictProfilingToAdminUsers=0"):
        profile(Attention, PROBLEM, ["eager"], ncu=ncu)
    with pytest.raises(MeasureError, match=r"triton: .*exit code 139: Segmentation fault"):
        profile(Attention, PROBLEM, ["triton"], ncu=ncu)
    with pytest.raises(ConfigError, match="install it from"):
        find_ncu("/nowhere/ncu")


def test_ncu_is_found_where_it_installs_itself(monkeypatch, tmp_path, ncu):
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_ncu(places=[str(tmp_path / "nc*")]) == ncu
    with pytest.raises(ConfigError, match="neither on PATH"):
        find_ncu(places=[])


def test_the_command(ncu, tmp_path, monkeypatch, cli):
    monkeypatch.setattr("tiledsched.report.document.drawings", lambda blocks: {})  # drawing takes seconds
    monkeypatch.chdir(tmp_path)
    words = ["study", "profile", "--problem", "S=4096,D=128,B=4,H=32,dtype=float16,causal=no", "--ncu", ncu]
    assert "| tiledsched | torch_auto |" in cli([*words, "--out", "profiles"]).out
    assert {path.suffix for path in (tmp_path / "profiles").iterdir()} >= {".md", ".csv", ".html"}
    rows = cli([*words, "--methods", "tiledsched,torch_math", "--json"]).json["rows"]
    assert [row["method"] for row in rows] == ["tiledsched", "torch_math"]
    assert rows[0]["registers"] == 168


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("study profile -p S=512:1024:2048:4096:8192,D=64:128", "name at most 8"),
        ("study profile --problem S=512,D=64 --methods nothing", "unknown method"),
        ("study profile --problem S=512,D=64 --ncu /nowhere/ncu", "there is no program"),
    ],
)
def test_wrong_use_is_told(ncu, cli, words, message):
    flags = [] if "--ncu" in words else ["--ncu", ncu]
    assert message in cli([*words.split(), *flags], code=2).err


def test_the_launcher_calls_once_under_the_profiler(monkeypatch):
    import types

    import tiledsched.serve.process  # noqa: F401  # before torch is replaced
    from tiledsched.core.rivals import Method
    from tiledsched.ops import bench
    from tiledsched.rivals import methods

    calls = []
    cuda = types.SimpleNamespace(
        get_device_properties=lambda index: types.SimpleNamespace(total_memory=1 << 40),
        synchronize=lambda: None,
        profiler=types.SimpleNamespace(start=lambda: calls.append("start"), stop=lambda: calls.append("stop")),
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace())
    made = Method(name="it", make=lambda arrays: lambda: calls.append("call"))
    monkeypatch.setattr(methods, "make_case", lambda torch, cupy, problem, own: types.SimpleNamespace(arrays=None))
    monkeypatch.setattr(bench, "choose_methods", lambda kernel, names, problems: [made])
    assert launch.main("attention", json.dumps(PROBLEM.to_json()), "it") == 0
    assert calls == ["call"] * launch.WARMUPS + ["start", "call", "stop"]


NVDISASM = """#!{python}
import hashlib, pathlib, sys
data = pathlib.Path(sys.argv[-1]).read_bytes()
print("        .text.kernel:")
for place in range(20):
    print(f"        /*{{16 * place:04x}}*/                   MOV R{{data[-1] % 9}}, 0x{{place}} ;")
print("        /*0150*/               @!P0 HGMMA.64x64 R24, gdesc[UR%d] ;" % (len(data) % 7))
print("        /*0160*/                   LDS.%s R4, [R2] ;" % hashlib.sha256(data).hexdigest()[:6])
"""


@pytest.mark.slow
@pytest.mark.compiler
def test_two_schedules_machine_code_side_by_side(tmp_path, monkeypatch, cli):
    program = tmp_path / "nvdisasm"
    program.write_text(NVDISASM.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    words = ["study", "profile", "softmax", "-p", "rows=64,columns=1000", "--arch", "sm_90", "--sass"]
    words += ["--nvdisasm", str(program), "--candidates"]
    cli([*words, '[{"num_worker_warps": 4}, {"num_worker_warps": 8}]'])
    (page,) = (tmp_path / "profiles").glob("*.md")
    text = page.read_text()
    for said in (
        "| `num_worker_warps` | 4 | 8 |",
        "1 of the second have no counterpart",
        "15 instructions that agree",
        "| `HGMMA` |",
    ):
        assert said in text, said
    assert len([*(tmp_path / "profiles").glob("*.sass")]) == 2
    three = '[{"occupancy": 1}, {"occupancy": 2}, {"occupancy": 4}]'
    assert "two schedules are compared" in cli([*words, three], code=2).err
    program.write_text("#!/bin/sh\necho unknown machine >&2\nexit 1\n")
    said = cli([*words, '[{"occupancy": 1}, {"occupancy": 2}]'], code=2).err
    assert "unknown machine; run `pip install -U nvidia-cuda-nvdisasm`" in said
    with pytest.raises(ConfigError, match="pip install nvidia-cuda-nvdisasm"):
        find_nvdisasm(places=[])
