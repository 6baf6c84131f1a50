"""Operators made of declarations, on a real GPU: `pytest -s tests/test_gpu_op.py` prints what a call costs the host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("forgotten"),
]

import op_kernels as kernels
from on_gpu import captured
from serve_on_cpu import changed
from test_deploy import serving

import tiledsched as ts
from tiledsched.core.errors import ProblemError
from tiledsched.serve import process

norm = ts.op("tiledsched_gpu_tests::rms_norm", kernels.RmsNorm)
product = ts.op("tiledsched_gpu_tests::product", kernels.Product)
scale_ = ts.op("tiledsched_gpu_tests::scale_", kernels.Scale)
total = ts.op("tiledsched_gpu_tests::total", kernels.Total)
add_groups = ts.op("tiledsched_gpu_tests::add_groups", kernels.AddGroups)
CLOSE = {"rtol": 2e-2, "atol": 2e-2}


def made(rows=64, columns=1000, dtype=torch.float16):
    generator = torch.Generator(device="cuda").manual_seed(rows)
    return (
        torch.randn(rows, columns, generator=generator, device="cuda").to(dtype),
        torch.randn(columns, generator=generator, device="cuda").to(dtype),
    )


def normed(x, w, residual=None, eps=1e-5):
    x = x.float() if residual is None else x.float() + residual.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.float()).to(w.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_computes_what_is_declared(dtype) -> None:
    for rows, columns in ((64, 1000), (1, 1024), (3, 1), (4097, 64)):
        x, w = made(rows, columns, dtype)
        for _ in range(4):
            torch.testing.assert_close(norm(x, w), normed(x, w), **CLOSE)
        torch.testing.assert_close(norm(x, w, x, 0.5), normed(x, w, x, 0.5), **CLOSE)
    with pytest.raises(ProblemError, match="W, axis 0"):
        norm(x, w[:7])


def test_layouts_lists_in_place_and_launches_in_a_row() -> None:
    a, b = made(100, 72)[0], made(72, 90)[0]
    for given in (b, b.t().contiguous().t(), b[:, ::2]):
        torch.testing.assert_close(product(a, given), a.float() @ given.float(), **CLOSE)
    x = torch.randn(1000, device="cuda")
    want = x * 3
    scale_(x, 3.0)
    torch.testing.assert_close(x, want)
    for _ in range(3):
        found, blocks = total(x, 4)
        torch.testing.assert_close(found, x.sum()[None] * 4, rtol=1e-4, atol=1e-3)
        assert int(blocks) == -(-1000 // total.plan_for(x, 4).served.schedule.number("TILE"))
    xs, ys = ([torch.randn(size, device="cuda") for size in (5, 700, 32)] for _ in range(2))
    for out, left, right in zip(add_groups(xs, ys, [5, 700, 32]), xs, ys, strict=True):
        torch.testing.assert_close(out, left + right)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_whole_it_is_the_same(mode) -> None:
    x, w = made()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: norm(x * 2, w) + 1, fullgraph=True, mode=mode)
    for _ in range(4):
        torch.testing.assert_close(compiled(x, w).clone(), normed(x * 2, w) + 1, **CLOSE)
    many = torch.compile(lambda x: total(x, 2)[0], fullgraph=True, mode=mode)
    values = torch.randn(1000, device="cuda")
    for _ in range(4):  # its counters are zeroed in each graph
        torch.testing.assert_close(many(values).clone(), values.sum()[None] * 2, rtol=1e-4, atol=1e-3)


def test_a_graph_replays_what_was_captured() -> None:
    x, w = made(columns=900)
    norm(x, w)
    total(x.flatten()[:1000].float())
    values = torch.randn(1000, device="cuda")
    graph, (out, (found, _)) = captured(lambda: (norm(x, w), total(values)))
    for _ in range(3):
        x.normal_()
        values.normal_()
        graph.replay()
        torch.testing.assert_close(out, normed(x, w), **CLOSE)
        torch.testing.assert_close(found, values.sum()[None], rtol=1e-4, atol=1e-3)


def test_threads_on_streams_of_their_own_share_no_workspace() -> None:
    def call(seed) -> None:
        values = torch.arange(1000.0, device="cuda") + seed
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                found, blocks = total(values)
            torch.testing.assert_close(found, values.sum()[None], rtol=1e-4, atol=1.0)
            assert int(blocks) == -(-1000 // total.plan_for(values).served.schedule.number("TILE"))

    total(torch.randn(1000, device="cuda"))
    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(call, range(4))) == [None] * 4


@pytest.mark.compiler
def test_what_is_launched_is_what_is_built() -> None:
    """The same machine code as that of the build, and so of what is measured."""
    from tiledsched.build.compiler import compile_schedule

    for operator, given in (
        (norm, made()),
        (total, (torch.randn(1000, device="cuda"),)),
        (product, (made(64, 64)[0],) * 2),
    ):
        plan = operator.plan_for(*given)
        arch = f"sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
        built = compile_schedule(operator.kernel, plan.problem, plan.served.schedule, arch)
        assert operator.explain(*given, verify=True).launched_fingerprint == built.fingerprint


def test_what_a_call_costs_the_host() -> None:
    from docs.studies.host_cost import HostMethod, measure_host_costs

    x, w = made()
    stream = torch.cuda.current_stream().cuda_stream
    with torch.inference_mode():
        for _ in range(4):
            norm(x, w)
        plan = norm.plan_for(x, w)
        kernel, grid, pick, _ = plan.steps[0]
        row = (x, w, norm(x, w), torch.empty((1, 1), dtype=x.dtype, device="cuda"), *plan.tail)
        arguments, launch = row if pick is None else pick(row), process.runtime.launch
        methods = {
            "op": HostMethod(call=lambda: norm(x, w)),
            "op, every argument": HostMethod(call=lambda: norm(x, w, None, 1e-5)),
            "registered operator": HostMethod(call=lambda: norm._overload(x, w)),
            "torch rms_norm": HostMethod(call=lambda: torch.nn.functional.rms_norm(x, (1000,), w)),
            "bare launch": HostMethod(call=lambda: launch(stream, grid, kernel, arguments)),
        }
        costs = {
            each.method: each for each in measure_host_costs(methods, rounds=100, synchronize=torch.cuda.synchronize)
        }
    for each in costs.values():
        print(f"\n{each.method:20} {each.median_us:7.2f} us median {each.p90_us:7.2f} us p90", end="")
    assert costs["op"].median_us < 3 * costs["bare launch"].median_us + 10


def test_a_graph_holds_the_winner_in_graphs() -> None:
    x, grids, runtime = torch.arange(100.0, device="cuda"), [], process.runtime

    def launch(stream, grid, kernel, arguments, real=runtime.launch):
        grids.append(grid[0])
        return real(stream, grid, kernel, arguments)

    with changed(launch=launch, load_table=runtime.load_table):
        serving(runtime, kernels.Total, kernels.Total.problem(size=100), burst=32, graph=64)
        want = total(x)[0].clone()
        assert grids == [2, 1, 4, 1]
        graph, out = captured(lambda: total(x))
        assert grids[-2:] == [2, 1]
        for _ in range(3):
            x.add_(1)
            want += 100
            graph.replay()
            torch.testing.assert_close(out[0], want)
        assert torch.equal(total(x)[0], out[0])
        assert grids[-2:] == [4, 1]
    process.forget_kernels()
