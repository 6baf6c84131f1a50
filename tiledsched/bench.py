"""`sdpa` beside torch's attention backends and the untuned kernel: interleaved, paced, checked against fp64.

Everything runs in this process on the current CUDA device. Each timed call is queued behind an L2 flush and a spin
kernel, so that the events never time the host (docs/measuring.md).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tiledsched.kernels import template_for
from tiledsched.kernels.reference import attention_reference, default_scale
from tiledsched.measure.nvml import ConditionsLog, current_device
from tiledsched.measure.runner import Conditions
from tiledsched.measure.statistics import median_interval
from tiledsched.measure.timing import sample_rounds
from tiledsched.problem import Problem
from tiledsched.schedule import KnobValue, Schedule

SPIN_CYCLES = 600_000
"""About 0.3 ms at 1.98 GHz."""
UNTUNED: dict[str, KnobValue] = {
    "tile_m": 64, "tile_n": 64, "occupancy": 0, "num_worker_warps": 0, "num_ctas": 0, "latency_k": 0, "latency_v": 0,
    "opt_level": 3, "accum_mode": "fp32", "loop_split": False, "block_order": "natural", "persistent": "no",
    "kv_direction": "forward", "q_subtiles": 1, "kv_subtiles": 1, "qk_ahead": False, "k_load": "order",
    "tma_loads": True, "tma_store": True, "check_bounds": True, "division": "approximate", "lazy_rescale": False,
}  # fmt: skip
"""The kernel as one would first write it: 64x64 tiles, every hint left to the compiler."""


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One method on one problem."""

    problem: Problem
    """What was computed."""
    method: str
    """tiledsched, untuned, torch_flash, torch_cudnn, torch_efficient, torch_math."""
    regime: str
    """burst or sustained."""
    status: str
    """ok, or why there is no time."""
    median_us: float | None = None
    """Median of the samples."""
    ci_low_us: float | None = None
    """Lower end of its 95% confidence interval."""
    ci_high_us: float | None = None
    """Upper end."""
    max_abs_err: float | None = None
    """Largest absolute difference from the fp64 reference."""
    rel_err: float | None = None
    """Relative Frobenius error of the whole output against fp64."""
    conditions: Conditions = field(default_factory=Conditions)
    """Clocks, power and throttling during the run of this problem."""
    schedule: Schedule | None = None
    """What sdpa launched."""
    provenance: str = ""
    """Where that schedule came from."""
    measured_program: bool | None = None
    """Whether the launched machine code is the measured artifact's; None where not checked."""

    def to_csv(self) -> dict[str, Any]:
        """A flat row."""
        p = self.problem
        tflops = None if self.median_us is None else round(p.tflops(self.median_us), 2)
        return {
            "regime": self.regime, "method": self.method, "dtype": p.dtype, "causal": p.causal, "batch": p.batch,
            "heads": p.heads, "kv_heads": p.kv_heads, "seq_q": p.seq_q, "seq_k": p.seq_k, "head_dim": p.head_dim,
            "median_us": self.median_us and round(self.median_us, 3),
            "ci_low_us": self.ci_low_us and round(self.ci_low_us, 3),
            "ci_high_us": self.ci_high_us and round(self.ci_high_us, 3), "tflops": tflops,
            "max_abs_err": self.max_abs_err and float(f"{self.max_abs_err:.4g}"),
            "rel_err": self.rel_err and float(f"{self.rel_err:.4g}"), "sm_clock_mhz": self.conditions.sm_clock_mhz,
            "power_w": round(self.conditions.power_w), "throttle": "+".join(self.conditions.throttle_reasons),
            "status": self.status, "provenance": self.provenance, "measured_program": self.measured_program,
            "schedule": self.schedule.short() if self.schedule else "",
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The same, for `--json`."""
        return self.to_csv()


def run_bench(problems: Sequence[Problem], *, rounds: int = 30, regime: str = "burst", verify: bool = False,
              progress: Callable[[str], None] = lambda text: None) -> list[BenchRow]:  # fmt: skip
    """Time every method on every problem.

    Args:
        problems: what to compute.
        rounds: samples per method; each round times every method once, in shuffled order.
        regime: burst (paced, L2 flushed) or sustained (no gaps, warmed up to the power cap).
        verify: also compare the machine code a launch runs with the measured artifact.
        progress: told a line per problem.

    Raises:
        MeasureError: there is no CUDA device, or no torch.
    """
    from tiledsched.errors import MeasureError

    try:
        import cupy  # noqa: F401  (conditions are read through it)
        import torch
    except ImportError as error:
        raise MeasureError(f"{error.name} is not installed; run: pip install 'tiledsched[gpu]'") from error
    if not torch.cuda.is_available():
        raise MeasureError("torch sees no CUDA device; run: tiledsched doctor")
    rows: list[BenchRow] = []
    for problem in problems:
        found = _bench_problem(torch, problem, rounds, regime, verify)
        rows.extend(found)
        times = ", ".join(f"{row.method} {row.median_us:.1f} us" if row.median_us else f"{row.method} {row.status}"
                          for row in found)  # fmt: skip
        progress(f"{problem}: {times}")
    return rows


def _bench_problem(torch: Any, problem: Problem, rounds: int, regime: str, verify: bool) -> list[BenchRow]:
    import cupy

    from tiledsched.serve.explain import explain
    from tiledsched.serve.sdpa import plan_for

    q, k, v = _inputs(torch, problem)
    reference = attention_reference(cupy, *(cupy.from_dlpack(x.float()) for x in (q, k, v)), causal=problem.causal,
                                    scale=default_scale(problem))  # fmt: skip
    plan = plan_for(q, k, v, causal=problem.causal)
    measured_program = explain(q, k, v, causal=problem.causal, verify=True).is_measured_program if verify else None
    statuses: dict[str, str] = {}
    errors: dict[str, tuple[float, float]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for name, call in _methods(torch, problem, q, k, v).items():
        try:
            out = call()
            torch.cuda.synchronize()
        except Exception as error:
            statuses[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            continue
        difference = cupy.from_dlpack(out.float()).astype("float64") - reference
        norm = float(cupy.linalg.norm(reference.ravel()))
        errors[name] = (float(cupy.abs(difference).max()), float(cupy.linalg.norm(difference.ravel())) / norm)
        calls[name] = call
        del out, difference
    samples, conditions = _interleaved(torch, calls, rounds, regime)
    rows = []
    for name in [*calls, *statuses]:
        row = BenchRow(
            problem=problem, method=name, regime=regime, status=statuses.get(name, "ok"), conditions=conditions
        )
        if name in samples:
            low, high = median_interval(samples[name], 0.95)
            row = replace(row, median_us=statistics.median(samples[name]), ci_low_us=low, ci_high_us=high,
                          max_abs_err=errors[name][0], rel_err=errors[name][1])  # fmt: skip
        if name == "tiledsched":
            row = replace(row, schedule=plan.served.schedule, provenance=plan.served.provenance,
                          measured_program=measured_program)  # fmt: skip
        rows.append(row)
    return rows


def _inputs(torch: Any, problem: Problem) -> tuple[Any, Any, Any]:
    dtype = getattr(torch, problem.dtype)
    query = (problem.batch, problem.heads, problem.seq_q, problem.head_dim)
    key = (problem.batch, problem.kv_heads, problem.seq_k, problem.head_dim)
    generator = torch.Generator(device="cuda").manual_seed(int(problem.id, 16) % 2**31)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)
               for shape in (query, key, key))  # fmt: skip
    return q, k, v


def _methods(torch: Any, problem: Problem, q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """Every method as a call without arguments."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from tiledsched.serve.sdpa import sdpa

    more = {"enable_gqa": True} if problem.group > 1 else {}

    def torch_backend(backend: Any) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, **more)

        return call

    return {
        "tiledsched": lambda: sdpa(q, k, v, causal=problem.causal),
        "untuned": _untuned(torch, problem, q, k, v),
        "torch_flash": torch_backend(SDPBackend.FLASH_ATTENTION),
        "torch_cudnn": torch_backend(SDPBackend.CUDNN_ATTENTION),
    }


def _untuned(torch: Any, problem: Problem, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    import cuda.tile as ct

    schedule = Schedule(UNTUNED)
    template = template_for("attention")
    properties = torch.cuda.get_device_properties(q.device)
    kernel = template.kernel({f"sm_{properties.major}{properties.minor}": schedule})
    grid = template.grid(schedule, problem, properties.multi_processor_count)
    constants = template.constants(schedule, problem)
    scalars = template.scalars(problem)

    def call() -> Any:
        out = torch.empty_like(q)
        ct.launch(torch.cuda.current_stream(), grid, kernel, (q, k, v, out, *scalars, *constants))
        return out

    return call


class Stopwatch:
    """Calls functions between torch events; see :class:`tiledsched.measure.timing.Stopwatch`."""

    def __init__(self, torch: Any, calls: Sequence[Callable[[], Any]]) -> None:
        self._torch, self._calls = torch, calls
        self._flush = torch.empty(max(2 * current_device().l2_bytes, 1 << 26), dtype=torch.uint8, device="cuda")

    def queue(self, index: int, *, paced: bool) -> Any:
        """Events around one call."""
        before, after = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        if paced:
            self._flush.zero_()
            self._torch.cuda._sleep(SPIN_CYCLES)
        before.record()
        self._calls[index]()
        after.record()
        return before, after

    def read(self, queued: Any) -> float:
        """Microseconds between them."""
        before, after = queued
        after.synchronize()
        return float(before.elapsed_time(after) * 1e3)


def _interleaved(torch: Any, calls: dict[str, Callable[[], Any]], rounds: int,
                 regime: str) -> tuple[dict[str, list[float]], Conditions]:  # fmt: skip
    watch, log = Stopwatch(torch, list(calls.values())), ConditionsLog()
    for index in range(len(calls)):
        for _ in range(3):
            watch.read(watch.queue(index, paced=True))
    samples = sample_rounds(watch, len(calls), rounds=rounds, regime=regime, rng=random.Random(0), log=log)
    return dict(zip(calls, samples, strict=True)), log.summary()
