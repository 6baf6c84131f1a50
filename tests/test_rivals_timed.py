"""How rivals are timed: behind enough work that their host is not timed, beside our winner, checked, and never in its place."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import types
from functools import partial
from pathlib import Path

import numpy
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo.utils")  # before anything of torch is replaced
from fake_rivals import attend, flash, install_flash_4, older, older_varlen
from test_bench import Harness, options
from test_bench_harness import cell, cuda  # noqa: F401
from test_measure_gpu import PROBLEM, candidate

from tiledsched.checking.inputs import make_cases
from tiledsched.core.errors import MeasureError, UnsupportedError
from tiledsched.kernels.attention import Attention, backends as attention_rivals
from tiledsched.measure.arrays import ProblemArrays
from tiledsched.measure.timing import CYCLES_PER_US, TorchStopwatch, host_cost_us
from tiledsched.ops.bench import methods_of
from tiledsched.rivals.bench import bench_cell
from tiledsched.rivals.methods import OURS
from tiledsched.rivals.races import RivalRaces, rival_time
from tiledsched.rivals.worker import TimedRivals

METHODS = methods_of(Attention)
HERE = Path(__file__).parent

# A GPU and a host on a clock of their own


class Machine:
    """What of torch the stopwatch uses. The host queues, the GPU works off; both tell the time by `host_us` and `free_us`."""

    def __init__(self) -> None:
        self.host_us = self.free_us = 0.0
        self.spins: list[float] = []
        machine = self

        class Event:
            def __init__(self, *, enable_timing) -> None: ...

            def record(self) -> None:
                self.at_us = machine.free_us = max(machine.free_us, machine.host_us)

            def query(self) -> bool:
                return machine.host_us >= self.at_us

            def synchronize(self) -> None:
                machine.host_us = max(machine.host_us, self.at_us)

            def elapsed_time(self, other) -> float:
                return (other.at_us - self.at_us) / 1e3

        def sleep(cycles) -> None:
            self.spins.append(cycles / CYCLES_PER_US)
            self.work(1.0, cycles / CYCLES_PER_US)

        self.cuda = types.SimpleNamespace(Event=Event, _sleep=sleep, synchronize=self.wait)

    def work(self, host_us, gpu_us) -> None:
        self.host_us += host_us
        self.free_us = max(self.free_us, self.host_us) + gpu_us

    def wait(self) -> None:
        self.host_us = max(self.host_us, self.free_us)

    def zero_(self) -> None:
        self.work(5.0, 20.0)


def watch_of(machine, *calls, **more):
    return TorchStopwatch(machine, [lambda call=call: machine.work(*call) for call in calls], machine, **more)


FA4, OWN = (400.0, 100.0), (10.0, 104.0)
"""(host, GPU) microseconds of a call."""


@pytest.mark.parametrize(
    ("told_us", "spins"),
    [(FA4[0], [800.0, 800.0]), (0.0, [300.0, 600.0, 600.0])],  # both alike; with 0.3 ms it would be 200
    ids=["told", "noticed, and its sample taken again"],
)
def test_a_slow_host_is_not_timed(told_us, spins) -> None:
    machine = Machine()
    watch = watch_of(machine, FA4, OWN, host_us=told_us)
    assert [watch.read(watch.queue(index, paced=True)) for index in (0, 1)] == pytest.approx([100.0, 104.0])
    assert machine.spins == spins


def test_a_call_that_waits_for_the_gpu_is_not_timed() -> None:
    with pytest.raises(MeasureError, match="leave it out with --methods"):
        watch_of(Machine(), (1e6, 1.0)).queue(0, paced=True)


def test_back_to_back_a_sample_is_marked_where_the_gpu_had_nothing_left_to_do() -> None:
    machine = Machine()
    watch = watch_of(machine, FA4, OWN)
    queued = [watch.queue(1, paced=False) for _ in range(6)] + [watch.queue(0, paced=False) for _ in range(3)]
    times = [watch.read(each) for each in queued]
    assert math.isnan(times[0])  # the first finds an idle GPU
    assert times[1:6] == pytest.approx([104.0] * 5)
    assert [math.isnan(each) for each in times[6:]] == [
        False,
        True,
        True,
    ]  # the first of the slow ones was ahead of the GPU


def test_a_method_whose_host_is_too_slow_has_a_status_and_no_time() -> None:
    how = options(names=(OURS, "torch_flash"))
    ours, slow = bench_cell(Harness(late={"torch_flash"}), ("sustained", COMPUTED[0]), how)
    assert (ours.status, slow.median_us) == ("ok", None)
    assert slow.status.startswith("host too slow: in ")


def test_the_hosts_cost_is_that_of_a_call_alone() -> None:
    machine = Machine()
    assert 0 <= host_cost_us(machine, lambda: None) < 1e4


# What a race tells


def test_times_are_paired_by_round_and_late_rounds_left_out() -> None:
    ours = tuple(100.0 + number for number in range(12))
    theirs = tuple(0.9 * each for each in ours)
    how = {"host_us": 20.04, "capturable": True, "version": "1"}
    time = rival_time("one", (math.nan, *theirs[1:]), ours, **how)
    assert (time.samples, time.host_us, time.capturable, time.failure) == (11, 20.0, True, "")
    assert (time.ratio, time.ratio_low, time.ratio_high) == pytest.approx((0.9, 0.9, 0.9))
    assert time.median_us == pytest.approx(0.9 * time.ours_us)
    none = rival_time("one", (math.nan,) * 12, ours, **how)
    assert (none.failure, none.ratio) == ("host too slow: the GPU waited for it nearly every time", None)
    assert rival_time("one", theirs, ours, **how, failure="no").failure == "no"


CUDA_NAMES = ("Event", "_sleep", "synchronize", "empty_cache", "stream", "CUDAGraph", "graph")


@pytest.fixture
def process(cuda, monkeypatch, tmp_path):  # noqa: F811
    """The process of the rivals, with torch on the CPU and NumPy for CuPy; `launched` are our winner's launches."""
    from test_cli import SUM

    from tiledsched.core.registry import load_kernel

    monkeypatch.setattr("tiledsched.measure.timing.SUSTAINED_WARMUP_S", 0.0)
    stand_in = types.ModuleType("torch")
    vars(stand_in).update(vars(torch))
    own_stream = {"Stream": lambda: None, "current_stream": lambda: types.SimpleNamespace(cuda_stream=7)}
    stand_in.cuda = types.SimpleNamespace(**{name: getattr(torch.cuda, name) for name in CUDA_NAMES}, **own_stream)
    streams: list[int] = []
    cupy = types.ModuleType("cupy")
    vars(cupy).update(vars(numpy))
    cupy.cuda = types.SimpleNamespace(ExternalStream=lambda each: streams.append(each) or contextlib.nullcontext())
    (tmp_path / "sums.py").write_text(SUM.replace("FACTOR", "1"))
    kernel = load_kernel(f"{tmp_path}/sums.py:Add")
    problem = kernel.problem(rows=8, columns=16, dtype="float16")
    cases = list(make_cases(kernel, numpy, numpy.random.default_rng(0), problem, "float64"))
    arrays, launched = ProblemArrays(kernel, numpy, problem, cases), []
    state = types.SimpleNamespace(
        arrays=arrays, flush=numpy.zeros(64, numpy.uint8), ours=(), run=lambda *given: launched.append(given)
    )
    launch = types.SimpleNamespace(scratch=(), steps=(), tolerance=kernel.tolerance(problem, None), tile=(8, 16))
    rivals = TimedRivals(stand_in, cupy)

    def race(named, regime="burst", rounds=8):
        arrays.kernel = types.SimpleNamespace(rivals=lambda p: named)
        return rivals.race(state, rounds, regime, 0, 0.0, launch)

    def versions():
        return rivals.versions(state, kernel.locator(), problem)

    return types.SimpleNamespace(
        race=race, versions=versions, launched=launched, streams=streams, cuda=cuda, state=state
    )


def test_every_rival_is_checked_and_timed_beside_our_winner(process) -> None:
    def refuses(X, Y):
        raise RuntimeError("No available kernel.\nAborting")

    def versioned(X, Y):
        return Y + X

    versioned.version = "mine 1"
    named = {"torch": torch.add, "wrong": torch.sub, "refuses": refuses, "mine": versioned}
    named |= {"few": lambda X, Y: (), "shape": lambda X, Y: X[:1] + Y[:1]}
    found = process.race(named)
    assert {each.name: (each.samples, each.capturable, each.failure.partition(" error")[0]) for each in found} == {
        "torch": (8, True, ""),
        "wrong": (0, False, "wrong result: random inputs: relative"),
        "refuses": (0, False, "RuntimeError: No available kernel."),
        "mine": (8, True, ""),
        "few": (0, False, "it returns 0 arrays; the outputs are Out"),
        "shape": (0, False, "its Out has shape (1, 16), not (8, 16)"),
    }
    assert [each.version for each in found if each.samples] == [f"torch {torch.__version__}", "mine 1"]
    assert len(process.launched) == 1 + 8  # of ours, on torch's stream
    assert set(process.streams) == {7}


def test_what_is_here_is_told_with_its_version(process) -> None:
    assert process.versions() == dict.fromkeys(("torch", "torch_swapped"), f"torch {torch.__version__}")
    assert process.launched == []


def test_what_cannot_be_captured_is_told(process) -> None:
    def add(X, Y):
        if process.cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return X + Y

    (found,) = process.race({"torch": add}, "sustained", rounds=6)
    assert (found.failure, found.capturable) == ("", False)
    for regime in ("graph", "graph-cold"):  # where it would have to be
        mine, other = process.race({"torch": add, "other": lambda X, Y: X + Y}, regime, rounds=6)
        assert (mine.failure, mine.ratio, other.failure) == ("a CUDA graph cannot hold it", None, "")
        assert (other.samples, other.capturable) == (6, True)


def test_rivals_of_what_works_in_place_work_on_copies(process) -> None:
    arrays = process.state.arrays
    arrays.changed = [arrays.specs["X"]]
    before = arrays.cases[0].inputs["X"].copy()
    (found,) = process.race({"torch": lambda X, Y: X.add_(Y)})
    assert (found.failure, found.samples) == ("", 8)
    assert (arrays.cases[0].inputs["X"] == before).all()


@pytest.fixture
def races():
    """Start two processes on a made-up GPU: one that measures, and one, by a script and its arguments, that times rivals."""
    from tiledsched.measure.gpu import GpuRunner

    with contextlib.ExitStack() as stack:

        def start(*rivals):
            runner = GpuRunner(Attention, worker_command=(sys.executable, f"{HERE}/fake_worker.py", "ready"))
            stack.callback(runner.close)
            command = (sys.executable, f"{HERE}/{rivals[0]}", *rivals[1:])
            made = RivalRaces(Attention, runner, regime="burst", command=command, rounds={"burst": 6})
            stack.callback(made.close)
            runner.begin(PROBLEM)
            return runner, made

        yield start


def test_the_process_is_started_once_and_failures_cost_one_problem(races, caplog) -> None:
    runner, timer = races("fake_worker.py", "rivals")
    runner.beside_gib = 0.25
    assert [each.ratio for each in timer.race(PROBLEM, candidate(100.0))] == [0.9]
    assert timer._rivals.beside_gib == 0.0  # ours holds what is taken
    timer.race(PROBLEM, candidate(100.0))
    assert timer.versions(PROBLEM) == {"one": "start begin meet load rivals meet rivals versions"}
    odd = PROBLEM.replace(seq_q=41)
    assert timer.versions(odd) == {}
    assert timer.race(odd, candidate(100.0)) is None
    assert "its rivals were not timed: no such rival" in caplog.text
    assert timer.race(PROBLEM.replace(head_dim=250), candidate(100.0)) is None  # which the GPU cannot hold
    assert "its rivals were not timed: cannot prepare" in caplog.text
    assert timer.race(PROBLEM, candidate(100.0)) is not None


def test_a_process_that_cannot_be_started_is_told_once(races, caplog) -> None:
    _, timer = races("fake_worker.py", "no-gpu")
    assert timer.race(PROBLEM, candidate(100.0)) is timer.race(PROBLEM, candidate(100.0)) is None
    assert timer.versions(PROBLEM) == {}
    assert caplog.text.count("rivals are not timed: the GPU cannot be used: ") == 1


@pytest.mark.slow
def test_two_processes_on_a_made_up_gpu_race_our_winner_and_its_rivals(races) -> None:
    runner, timer = races("fake_rival_worker.py")
    found = {each.name: each for each in timer.race(PROBLEM, candidate(100.0))}
    assert found["torch_cudnn"].failure == "RuntimeError: cuDNN is not here"
    flash = found["torch_flash"]
    assert (flash.failure, flash.samples, flash.capturable) == ("", 6, True)
    assert (flash.median_us, flash.ours_us, flash.ratio) == pytest.approx((80.0, 100.0, 0.8))
    assert flash.version == f"torch {torch.__version__}"
    assert runner.sample([candidate(100.0)], rounds=2, regime="burst")[0].samples_us == pytest.approx((100.0, 100.0))


# FlashAttention-4


@pytest.fixture(params=["inner", "outer"])
def flash_4(request, monkeypatch):
    """A FlashAttention-4 of one beta or another."""
    inner = {"_flash_attn_fwd": flash} if request.param == "inner" else {}
    package = install_flash_4(monkeypatch, **inner)
    package.flash_attn_func, package.flash_attn_varlen_func = older, older_varlen
    return request.param


def problem(**more):
    values = {"seq_q": 24, "seq_k": 24, "head_dim": 16, "batch": 2, "heads": 4, "kv_heads": 2, "dtype": "float16"}
    return Attention.problem(**{**values, **more})


COMPUTED = [
    problem(),
    problem(causal=True),
    problem(causal=True, window=5),
    problem(causal=True, softcap=True, sinks=True, window=7),
    problem(seq_q=6, seq_k=40, causal=True, alignment="bottom_right"),
    problem(seq_q=1, seq_k=40, causal=True, alignment="bottom_right", lengths=True),
    problem(lengths=True, seq_k=40),
]
REFUSED = [
    problem(causal=True, lengths=True),
    problem(starts=True),
    problem(seq_q=6, seq_k=40, causal=True),
    problem(seq_q=40, seq_k=6, causal=True, alignment="bottom_right"),
]
ONLY_FLEX = [problem(causal=True, lengths=True, window=9), problem(causal=True, starts=True, softcap=True, sinks=True)]


@pytest.mark.parametrize("p", [*COMPUTED, *REFUSED], ids=str)
def test_flash_attention_4_computes_what_it_can_and_refuses_the_rest_as_a_status(cuda, flash_4, p) -> None:  # noqa: F811
    row = cell([METHODS["flash_attention_4"]], problem=p)["flash_attention_4"]
    computes = p in COMPUTED
    assert row.status.startswith("ok" if computes else "not served: FlashAttention-4 ")
    assert ("flash_attention_4" in attention_rivals.raced(p)) is (row.median_us is not None) is computes
    assert not computes or 0 < row.rel_err < 1e-3


@pytest.mark.parametrize("columns", [16, 8])
def test_as_a_rival_it_reads_any_strides_and_answers_in_those_of_q(flash_4, columns, monkeypatch) -> None:
    """Into an output of ours, which lies so, where it takes one: a copy of the output may take as long as attention."""
    p = problem(causal=True, value_dim=columns if columns < 16 else 0)
    call = attention_rivals.raced(p, 0.3)["flash_attention_4"]
    q, k = (torch.randn(2, heads, 24, 16, dtype=torch.float16) for heads in (4, 2))
    v = torch.randn(2, 2, 24, columns, dtype=torch.float16)
    copies = []
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda to, made, copy=torch.Tensor.copy_: copies.append(made) or copy(to, made)
    )
    want = attend(*(each.transpose(1, 2) for each in (q, k, v)), 0.3, True)[0].transpose(1, 2)
    for given in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        out = call(given, k, v)
        torch.testing.assert_close(out.float(), want, rtol=2e-3, atol=2e-3)
        assert out.stride() == attention_rivals.empty_output(given, columns).stride()
        assert (out.stride() == given.stride()) == (columns == 16)
    assert len(copies) == (2 if flash_4 == "inner" else 1)  # of the former one is the stand-in's own


def test_it_gives_the_log_sum_exp_where_it_writes_it_for_us(flash_4) -> None:
    found = attention_rivals.raced(problem(causal=True, lse=True), 0.3)
    assert ("flash_attention_4" in found) == (flash_4 == "inner")
    assert "torch_efficient" not in found
    q, k, v = (torch.randn(2, heads, 24, 16, dtype=torch.float16) for heads in (4, 2, 2))
    right, sums = attend(*(each.transpose(1, 2) for each in (q, k, v)), 0.3, True)
    for _ in range(2 if flash_4 == "inner" else 0):
        out, lse = found["flash_attention_4"](q, k, v)
        torch.testing.assert_close((out.float(), lse), (right.transpose(1, 2), sums[..., None]), rtol=2e-3, atol=2e-3)
    for other in (problem(causal=True, window=5, lse=True), problem(sinks=True, lse=True)):
        assert attention_rivals.raced(other) == {}


def test_its_times_are_of_its_own_version(flash_4, monkeypatch) -> None:
    monkeypatch.setattr(attention_rivals, "package_version", lambda name: f"of {name}")
    assert attention_rivals.raced(problem())["flash_attention_4"].version == "flash-attn-4 of flash-attn-4"


def test_what_serves_imports_it_at_its_first_call(flash_4, monkeypatch) -> None:
    made, real = [], attention_rivals.flash_attention_4
    monkeypatch.setattr(attention_rivals, "flash_attention_4", lambda *given: made.append(given) or real(*given))
    call = attention_rivals.raced(problem(), 0.3, late=True)["flash_attention_4"]
    assert made == []
    q = torch.randn(2, 4, 24, 16, dtype=torch.float16)
    k, v = (torch.randn(2, 4, 24, 16, dtype=torch.float16) for _ in range(2))
    want = attend(*(each.transpose(1, 2) for each in (q, k, v)), 0.3, False)[0].transpose(1, 2)
    for _ in range(2):
        torch.testing.assert_close(call(q, k, v).float(), want, rtol=2e-3, atol=2e-3)
    assert len(made) == 1
    assert "flash_attention_4" not in attention_rivals.raced(REFUSED[0], late=True)


def test_without_it_it_is_no_rival(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "flash_attention_4" not in attention_rivals.raced(problem())
    with pytest.raises(UnsupportedError, match="cannot be imported"):
        attention_rivals.flash_4_function(problem())
    assert METHODS["flash_attention_4"].refusal(problem(), 1 << 30) == "not installed: flash_attn.cute"


# torch


@pytest.mark.parametrize("name", attention_rivals.BACKENDS)
def test_a_backend_of_torchs_is_called_by_its_own_operator(monkeypatch, name) -> None:
    """They run on GPUs only: here the arguments must be what torch's schema says."""
    schema = [each.name for each in attention_rivals.torch_operator(attention_rivals.BACKENDS[name])._schema.arguments]
    called = []
    monkeypatch.setattr(
        attention_rivals, "torch_operator", lambda word: lambda *a, **k: called.append((a, k)) or ["out"]
    )
    q = torch.zeros(1)
    assert attention_rivals.torch_backend(problem(causal=True, kv_heads=4), name, 0.3)(q, q, q) == "out"
    ((given, named),) = called
    said = dict(zip(schema, given, strict=False)) | named
    assert said["is_causal"] is True
    assert (said["scale"], said["dropout_p"]) == (0.3, 0.0)
    assert said.get("attn_bias") is None
    assert not said.get("compute_log_sumexp")


LOWER, EVERY = {"causal": True, "alignment": "bottom_right"}, set(attention_rivals.BACKENDS)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({}, EVERY),
        ({"causal": True}, EVERY),
        ({"seq_k": 40}, EVERY),
        ({"seq_k": 40, "causal": True}, EVERY - {"torch_flash"}),  # which aligns at the bottom right
        ({"seq_k": 40, **LOWER}, {"torch_flash"}),
        ({"seq_q": 1, **LOWER}, EVERY),  # the mask hides nothing
        ({"seq_q": 40, **LOWER}, set()),
        ({"lse": True}, {"torch_cudnn", "torch_flash"}),
        ({"causal": True, "window": 4}, set()),
        ({"lengths": True}, set()),
        ({"kv_heads": 2}, EVERY - {"torch_efficient"}),
    ],
    ids=lambda each: str(each if isinstance(each, dict) else sorted(each)),
)
def test_torchs_backends_are_rivals_where_their_masks_are_ours(more, named) -> None:
    assert set(attention_rivals.raced(problem(**{"kv_heads": 4, **more}))) & EVERY == named


@pytest.mark.parametrize("p", [COMPUTED[0], *COMPUTED[2:4], COMPUTED[-1], *ONLY_FLEX], ids=str)
def test_flex_attention_and_masks_compute_what_is_asked_for(cuda, monkeypatch, p) -> None:  # noqa: F811
    from torch.nn.attention import flex_attention as flex

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(flex, "create_block_mask", partial(flex.create_block_mask, _compile=False))
    flex_here = dataclasses.replace(METHODS["torch_flex"], package="")  # Triton is not needed where nothing is compiled
    rows = cell([flex_here, METHODS["torch_auto"], METHODS["eager"]], problem=p)
    said = {name: row.status if row.median_us is None or row.rel_err < 1e-3 else "wrong" for name, row in rows.items()}
    plain = p is COMPUTED[0]
    assert said["torch_flex"].startswith("not served: it is compiled for windows" if plain else "ok")
    assert said["torch_auto"].startswith("not served: it knows no softcap, sinks" if p.sinks else "ok")
    assert said["eager"].startswith("ok" if plain else "not served: it knows no ")
