"""The harness with torch on the CPU in place of CUDA, and NumPy in place of CuPy: what it does around the calls."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import time
import types

import numpy
import pytest
from test_cli import SUM

import tiledsched.measure.timing as timing_module
from tiledsched.core.errors import MeasureError, UnsupportedError
from tiledsched.core.registry import kernel_named, load_kernel
from tiledsched.core.rivals import Arrays, called
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import Device
from tiledsched.ops import own_methods
from tiledsched.ops.bench import choose_methods, methods_of
from tiledsched.rivals.bench import BenchOptions, TorchHarness, bench_cell
from tiledsched.rivals.methods import OURS, SERVED, case_error, make_case, rival_methods
from tiledsched.rivals.rows import append_rows, read_rows
from tiledsched.rivals.sampling import Pace

torch = pytest.importorskip("torch")
pytest.importorskip("torch.nn.attention.bias")  # before anything of torch is replaced

METHODS = methods_of(Attention)
QUICK = Pace(gap_s=0.0, warmup_s=0.0)
PROBLEM = Attention.problem(seq_q=48, seq_k=48, head_dim=16, batch=2, heads=4, kv_heads=2, causal=True)


class Event:
    def __init__(self, *, enable_timing) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return False

    def elapsed_time(self, other) -> float:
        return (other.at - self.at) * 1e3


class Graph:
    """A CUDA graph that runs what was called while it was captured."""

    def __init__(self) -> None:
        self.replayed = 0

    def replay(self) -> None:
        self.replayed += 1
        time.sleep(20e-6)


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda as the harness uses it; `broken` raises at the next synchronisation."""
    state = types.SimpleNamespace(broken=None, capturing=False)
    monkeypatch.setattr(
        torch.backends.cudnn, "version", lambda: None
    )  # a CUDA build of torch asks the GPUs, of which there is none

    def synchronize(*given) -> None:
        if state.broken:
            raise RuntimeError(state.broken)

    @contextlib.contextmanager
    def capture(graph):
        state.capturing = True
        try:
            yield
        finally:
            state.capturing = False

    cupy = types.ModuleType("cupy")
    vars(cupy).update({name: value for name, value in vars(numpy).items() if not name.startswith("__")})
    cupy.from_dlpack = lambda tensor: tensor.numpy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for name, value in {
        "is_available": lambda: True,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "Event": Event,
        "_sleep": lambda cycles: None,
        "CUDAGraph": Graph,
        "graph": capture,
        "Stream": lambda: None,
        "stream": lambda stream: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("randn", "empty"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, device=None, generator=None, **k: real(*a, **k))
    monkeypatch.setattr(torch, "Generator", lambda device: types.SimpleNamespace(manual_seed=torch.manual_seed))
    sample = Device(
        name="NVIDIA Sample", arch="sm_90", sm_count=132, memory_bytes=1 << 37, l2_bytes=1 << 20, driver="580.1"
    )
    monkeypatch.setattr("tiledsched.rivals.bench.current_device", lambda: sample)
    monkeypatch.setattr("tiledsched.rivals.methods.MATMUL_SIZE", 64)
    return state


def harness():
    return TorchHarness(own=own_methods.own_outputs)


def made(make, name=OURS):
    return dataclasses.replace(METHODS[name], make=make)


def raising(error):
    def make(*arrays):
        raise error

    return make


def cell(methods, regime="burst", problem=PROBLEM):
    rows = bench_cell(harness(), (regime, problem), BenchOptions(methods=tuple(methods), rounds=6, pace=QUICK))
    return {row.method: row for row in rows}


def test_right_methods_have_times_errors_and_the_ceiling(cuda) -> None:
    eager, matmul = cell(METHODS[name] for name in ("eager", "matmul")).values()
    assert (eager.status, eager.compared, eager.device) == ("ok", "8/8", "NVIDIA Sample")
    assert (matmul.status, matmul.compared, matmul.rel_err) == ("ok", "", None)
    assert eager.ceiling_ratio == pytest.approx(eager.tflops / matmul.tflops)
    assert eager.versions.startswith("driver 580.1 CUDA ")
    assert f"torch {torch.__version__}" in eager.versions


CPU_PROBLEMS = [
    Attention.problem(seq_q=33, seq_k=33, head_dim=16, batch=2, heads=2, kv_heads=2, causal=True),
    Attention.problem(seq_q=20, seq_k=50, head_dim=32, heads=4, kv_heads=2, dtype="bfloat16"),
    Attention.problem(seq_q=20, seq_k=50, head_dim=32, heads=4, kv_heads=1, causal=True),
    Attention.problem(seq_q=20, seq_k=50, head_dim=32, heads=2, kv_heads=2, causal=True, alignment="bottom_right"),
    Attention.problem(seq_q=16, seq_k=16, head_dim=32, value_dim=16, heads=2, kv_heads=2, causal=True),
]


@pytest.mark.parametrize("problem", CPU_PROBLEMS, ids=str)
def test_what_torch_computes_is_the_problem(cuda, problem) -> None:
    for row in cell((METHODS[name] for name in ("eager", "torch_math", "torch_auto")), problem=problem).values():
        assert row.status == "ok"
        assert 0 < row.rel_err < (1e-3 if problem.dtype == "float16" else 8e-3)


def test_inputs_are_those_of_the_problem_every_time(cuda) -> None:
    seen = []

    def make(arrays):
        seen.append(arrays)
        return METHODS["eager"].make(arrays)

    problem = PROBLEM.replace(dtype="bfloat16", value_dim=8, seq_k=60, alignment="bottom_right")
    for _ in range(2):
        assert cell([made(make, "eager")], problem=problem)["eager"].status == "ok"
    first, second = (each.tensors for each in seen)
    assert [tuple(each.shape) for each in first] == [(2, 4, 48, 16), (2, 2, 60, 16), (2, 2, 60, 8)]
    assert {each.dtype for each in first} == {torch.bfloat16}
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_every_way_to_fail_is_a_status(cuda) -> None:
    def poisoned(arrays):
        return lambda: torch.full_like(arrays.tensors[0], float("nan"))

    def once(arrays):
        calls = iter([METHODS["eager"].make(arrays), raising(RuntimeError("only once"))])
        return lambda: next(calls)()

    rows = cell(
        [
            made(raising(UnsupportedError("head_dim 512 is above 256"))),
            made(lambda arrays: lambda: arrays.tensors[0], "untuned"),
            made(poisoned, "torch_flash"),
            made(raising(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried ...")), "torch_cudnn"),
            made(raising(RuntimeError("No available kernel.\nAborting")), "torch_efficient"),
            made(once, "eager"),
            METHODS["torch_auto"],
        ]
    )
    assert {name: re.sub(r"error [\d.]+", "error N", row.status) for name, row in rows.items()} == {
        OURS: "not served: head_dim 512 is above 256",
        "untuned": "wrong result: relative error N",
        "torch_flash": "wrong result: not every element is finite",
        "torch_cudnn": "out of memory",
        "torch_efficient": "RuntimeError: No available kernel.",
        "eager": "RuntimeError: only once",
        "torch_auto": "ok",
    }
    assert [name for name, row in rows.items() if row.median_us is not None] == ["torch_auto"]


def test_a_broken_context_ends_the_run_and_names_the_method(cuda) -> None:
    def breaking(arrays):
        cuda.broken = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(cuda.broken)

    bench = harness()
    bench.check()
    with pytest.raises(
        MeasureError, match=r"untuned broke the CUDA context .*illegal memory access.*run again, and without"
    ):
        cell([made(breaking, "untuned"), METHODS["torch_auto"]])
    for use in (lambda: cell([METHODS["torch_auto"]]), bench.check):
        with pytest.raises(MeasureError, match=r"the GPU cannot be used any more .*run again"):
            use()


def test_inputs_that_do_not_fit_are_a_status_of_every_method(cuda, monkeypatch) -> None:
    def too_large(*given, **more):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    bench = harness()
    monkeypatch.setattr(torch, "randn", too_large)
    rows = bench_cell(bench, ("burst", PROBLEM), BenchOptions(methods=(METHODS["eager"], METHODS["torch_auto"])))
    assert [row.status for row in rows] == ["out of memory: the inputs"] * 2


def test_short_calls_are_graphs_when_sustained_and_calls_that_cannot_be_captured_are_not(cuda, monkeypatch) -> None:
    monkeypatch.setattr("tiledsched.rivals.methods.GRAPH_BELOW_US", 1e9)

    def make(arrays):
        result = METHODS["torch_auto"].make(arrays)()

        def call():
            if cuda.capturing:
                raise RuntimeError("operation not permitted when stream is capturing")
            return result

        return call

    told = []
    monkeypatch.setattr("tiledsched.rivals.bench.details", lambda *given, captured, **more: told.append(captured) or {})
    methods = [METHODS["torch_auto"], made(make, "eager")]
    graph, call = harness().prepare(PROBLEM, methods, "sustained").ready
    assert (graph.launches, call.launches) == (20, 0)
    assert graph.trial.look_us > 20  # of all calls of a graph together
    auto, eager = cell(methods, "sustained").values()
    assert told == [True, False] * 2
    assert (auto.conditions.graph_launches, eager.conditions.graph_launches) == (20, 0)
    assert (auto.status, eager.status) == ("ok", "ok")
    assert cell([METHODS["torch_auto"]])["torch_auto"].conditions.graph_launches == 0  # burst


def test_a_row_says_why_its_schedule_is_not_known(cuda) -> None:
    """On the CPU there is no plan to explain."""
    row = cell([made(METHODS["torch_auto"].make, SERVED)])[SERVED]
    assert row.status == "ok"
    assert row.provenance.startswith("not known: UnsupportedError: q is on cpu")


def test_every_method_is_queued_behind_a_spin_twice_as_long_as_the_slowest_takes_the_host(cuda, monkeypatch) -> None:
    """FlashAttention-4 takes 0.4 ms to be launched: behind a spin of 0.3 ms its launch was timed, not its work."""
    spins = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: spins.append(cycles / timing_module.CYCLES_PER_US))

    def slow(arrays):
        call = METHODS["eager"].make(arrays)

        def later():
            time.sleep(2e-3)
            return call()

        return later

    rows = cell([METHODS["torch_auto"], made(slow, "eager")])
    assert {row.status for row in rows.values()} == {"ok"}
    sampled = spins[2 * timing_module.LOOKS :]
    assert sampled == [max(sampled[0], 4000)] * 12


def test_any_kernel_is_timed_beside_the_rivals_it_names(cuda, tmp_path, monkeypatch) -> None:
    (tmp_path / "sums.py").write_text(SUM.replace("FACTOR", "1"))
    kernel = load_kernel(f"{tmp_path}/sums.py:Add")
    problem = kernel.problem(rows=40, columns=70, dtype="float16")

    class Operator:
        """Its own kernel is wrong, and what is served in its place is not."""

        own = staticmethod(torch.sub)
        __call__ = staticmethod(torch.add)

        def explain(self, *given, verify):
            return types.SimpleNamespace(rival="torch")

    monkeypatch.setattr(own_methods, "operator_call", lambda arrays: (Operator(), list(arrays.tensors)))
    methods = choose_methods(kernel, None, [problem])
    assert [method.name for method in methods] == [OURS, SERVED, "torch", "torch_swapped"]
    rows = bench_cell(harness(), ("burst", problem), BenchOptions(methods=tuple(methods), rounds=6, pace=QUICK))
    assert [row.status.partition(":")[0] for row in rows] == ["wrong result", "ok", "ok", "ok"]
    assert (rows[1].schedule, rows[1].provenance) == ("torch", "rival")
    assert (rows[2].compared, rows[2].tflops) == ("all", 0.0)
    assert 0 < rows[2].rel_err < 1e-3
    assert rows[2].gbps == pytest.approx(3 * 40 * 70 * 2 / rows[2].median_us / 1e3)
    append_rows(rows, tmp_path / "rows.csv")
    assert [row.to_csv() for row in read_rows(tmp_path / "rows.csv")] == [row.to_csv() for row in rows]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("matmul", {"m": 20, "n": 30, "k": 40, "b_layout": "column"}),
        *(("scaled_matmul", {"m": 20, "n": 32, "k": 48, "scales": words, "bias": True}) for words in ("row", "tensor")),
        ("grouped_matmul", {"tokens": 40, "experts": 3, "n": 32, "k": 48, "b_layout": "column"}),
        ("rms_norm", {"rows": 5, "columns": 64}),
        ("rms_norm", {"rows": 5, "columns": 64, "residual": True}),
        ("softmax", {"rows": 5, "columns": 70}),
        *(("layer_norm", {"rows": 5, "columns": 70, "weighted": flag, "biased": flag}) for flag in (True, False)),
        *(("glu", {"rows": 5, "columns": 70, "activation": word}) for word in ("silu", "gelu", "gelu_tanh")),
        *(("rope", {"batch": 2, "seq": 5, "q_heads": 3, "k_heads": 1, "width": 16, "parts": n}) for n in (1, 2)),
        *(("cross_entropy", {"rows": 40, "columns": 70, "smoothed": flag}) for flag in (True, False)),
    ],
    ids=str,
)
def test_the_rivals_of_kernels_that_ship_compute_what_the_kernels_do(cuda, name, sizes) -> None:
    """On the CPU: torch's own operators, the second time into the same output."""
    problem, cupy = kernel_named(name).problem(**sizes), sys.modules["cupy"]
    found = {each.name: each for each in rival_methods(problem.declaration, [problem])}
    assert list(found)[:2] == ["torch", "torch_compile"]
    case = make_case(torch, cupy, problem)
    call = found["torch"].make(case.arrays)
    for _ in range(2):
        error = case_error(cupy, case, call())
        assert error.verdict("bfloat16") == ""
        assert error.relative < 8e-3


def test_of_several_variants_the_fastest_that_takes_the_arrays_is_called() -> None:
    problem = kernel_named("softmax").problem(rows=5, columns=70)
    refusing = {"refuses": lambda x: 1 / 0}
    variants = {**refusing, "slow": lambda x: (2.0, x), "quick": lambda x: (1.0, x)}
    arrays = Arrays(torch=torch, problem=problem, tensors=("X",), look_us=lambda call: call()[0])
    assert called(lambda p: variants)(arrays)() == (1.0, "X")
    with pytest.raises(ZeroDivisionError):
        called(lambda p: refusing)(arrays)


def test_what_torch_does_not_take_has_no_rival_of_torchs() -> None:
    refused = {"scaled_matmul": {"m": 16, "n": 32, "k": 48, "dtype": "float8_e5m2"}}
    refused["grouped_matmul"] = {"tokens": 40, "experts": 3, "n": 33, "k": 48}
    for name, sizes in refused.items():
        problem = kernel_named(name).problem(**sizes)
        assert (rival_methods(problem.declaration, [problem]), problem.declaration.rivals(problem)) == ([], {})
