"""On a real GPU: the kernels for other problems, against float64 and against the CPU interpreter's idea of them."""

from __future__ import annotations

import numpy
import pytest

from tiledsched.core import launches
from tiledsched.core.config import load_settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import Failure
from tiledsched.core.space_files import space_for
from tiledsched.interpreter import SmallDevice
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.declaration import LARGEST_ERROR, LARGEST_LSE_ERROR
from tiledsched.kernels.attention.reference import attention_and_lse
from tiledsched.measure.runner import Candidate
from tiledsched.serve.prebuilt import make_kernel

torch = pytest.importorskip("torch")
cupy = pytest.importorskip("cupy")
from on_gpu import arch, captured

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RIGHT = Attention.problem(
    seq_q=200, seq_k=700, head_dim=64, causal=True, alignment="bottom_right", batch=2, heads=4, kv_heads=2, lse=True
)
DECODE = RIGHT.replace(seq_q=1, seq_k=5000, heads=16, kv_heads=2)
LONG = Attention.problem(seq_q=8, seq_k=8192, head_dim=128, dtype="bfloat16", heads=16, kv_heads=4)
CASES = [
    (RIGHT, {}),
    (RIGHT.replace(seq_q=700, seq_k=200), {"loop_split": True}),
    (RIGHT.replace(seq_q=700, seq_k=200), {"persistent": "snake", "block_order": "swizzled"}),
    (RIGHT.replace(seq_q=700, seq_k=200), {"qk_ahead": True, "loop_split": True}),
    (RIGHT, {"kv_direction": "backward", "loop_split": True}),
    (RIGHT.replace(dtype="bfloat16"), {"kv_splits": 4, "tma_loads": False}),
    (RIGHT.replace(head_dim=192, value_dim=128), {"tile_n": 32}),
    (RIGHT.replace(head_dim=192, value_dim=128), {"tile_n": 32, "column_parts": 2}),
    (RIGHT.replace(head_dim=80), {"column_parts": 2}),
    (RIGHT.replace(head_dim=96, lse=False), {"column_parts": 2, "q_subtiles": 2}),
    (RIGHT.replace(head_dim=160), {"column_parts": 2, "tile_n": 32}),
    (DECODE, {}),
    (DECODE, {"tile_m": 16, "pack_gqa": True}),
    (DECODE, {"tile_m": 16, "pack_gqa": True, "kv_splits": 16, "tma_loads": False}),
    (DECODE.replace(seq_q=4), {"tile_m": 16, "pack_gqa": True, "kv_splits": 8, "tma_loads": False, "loop_split": True}),
    (DECODE.replace(seq_q=7, head_dim=96, causal=False), {"kv_splits": 32, "tile_n": 32, "tma_loads": False}),
    (DECODE.replace(lse=False, dtype="bfloat16"), {"kv_splits": 8, "tma_loads": False}),
    (LONG, {"tile_m": 16, "tile_n": 128, "pack_gqa": True, "kv_splits": 32}),
    (LONG, {"tile_m": 16, "tile_n": 128, "pack_gqa": True, "kv_splits": 4, "tma_loads": False}),
    (LONG, {"tile_m": 16, "tile_n": 64, "pack_gqa": True, "kv_splits": 8, "tma_loads": False, "occupancy": 2}),
    (DECODE, {"tile_m": 16, "pack_gqa": True, "kv_splits": 32, "kv_combine": "launch"}),
    (DECODE.replace(heads=14, seq_q=3), {"pack_gqa": True, "kv_splits": 8, "kv_combine": "launch", "occupancy": 2}),
    (DECODE.replace(head_dim=96, heads=2), {"tile_m": 16, "kv_splits": 64, "kv_combine": "launch", "column_parts": 2}),
    (RIGHT, {"kv_splits": 4, "kv_combine": "launch", "q_subtiles": 2}),
    (LONG, {"tile_n": 128, "pack_gqa": True, "kv_splits": 16, "kv_combine": "launch", "latency_k": 4}),
    (LONG, {"tile_n": 64, "pack_gqa": True, "kv_splits": 8, "kv_combine": "launch", "occupancy": 2}),
    (LONG, {"tile_n": 128, "pack_gqa": True, "kv_splits": 2, "kv_combine": "in_order", "occupancy": 2}),
    (DECODE.replace(head_dim=96, heads=2), {"kv_splits": 4, "kv_combine": "in_order"}),
]


def schedule_for(problem, knobs):
    schedule = space_for(arch(), Attention).default(problem)
    return schedule.replace(**{"tile_m": 64, "tile_n": 64, "occupancy": 1, "num_ctas": 1, **knobs})


class Launcher:
    """One kernel with its arrays, launched as `sdpa` launches it."""

    def __init__(self, problem, schedule, q, k, v) -> None:
        self.out = torch.full((*q.shape[:3], problem.value_columns), float("nan"), dtype=q.dtype, device="cuda")
        properties = torch.cuda.get_device_properties(0)
        device = SmallDevice(sm_count=properties.multi_processor_count, arch=arch())
        steps = launches.steps(Attention, problem, schedule, device)
        self.extras = {}
        for extra in launches.scratch(Attention, problem, schedule, steps):
            self.extras[extra.name] = torch.zeros(extra.shape, dtype=getattr(torch, extra.dtype), device="cuda")
        if problem.lse:
            self.extras["Lse"] = torch.zeros((*q.shape[:3], 1), dtype=torch.float32, device="cuda")
        kernels = make_kernel(Attention, schedule, problem, load_settings(), arch_spec(arch()))
        arrays = {"Q": q, "K": k, "V": v, "Out": self.out, **self.extras}
        self.launches = [
            (step.grid, kernel, tuple(arrays.get(each.name, each.value) for each in step.arguments))
            for step, kernel in zip(steps, kernels, strict=True)
        ]

    def launch(self):
        import cuda.tile as ct

        for grid, kernel, arguments in self.launches:
            ct.launch(torch.cuda.current_stream(), grid, kernel, arguments)
        return self.out


def tensors(problem, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    keys = (problem.batch, problem.kv_heads, problem.seq_k)
    shapes = (
        (problem.batch, problem.heads, problem.seq_q, problem.head_dim),
        (*keys, problem.head_dim),
        (*keys, problem.value_columns),
    )
    return [
        torch.randn(shape, generator=generator, device="cuda", dtype=getattr(torch, problem.dtype)) for shape in shapes
    ]


def assert_right(problem, launcher, inputs) -> None:
    arrays = [tensor.double().cpu().numpy() for tensor in inputs]
    exact, lse = attention_and_lse(
        numpy, *arrays, causal=problem.causal, scale=problem.head_dim**-0.5, alignment=problem.alignment
    )
    out = launcher.out.double().cpu().numpy()
    assert numpy.isfinite(out).all()
    error = numpy.linalg.norm(out - exact, axis=(2, 3)) / numpy.linalg.norm(exact, axis=(2, 3))
    assert error.max() < LARGEST_ERROR[problem.dtype, "fp32"] / 2
    if problem.lse:
        found = launcher.extras["Lse"].squeeze(-1).double().cpu().numpy()
        numpy.testing.assert_array_equal(numpy.isneginf(found), numpy.isneginf(lse))
        seen = numpy.isfinite(lse)
        assert numpy.abs(found[seen] - lse[seen]).max() < LARGEST_LSE_ERROR["fp32"] / 2


@pytest.mark.parametrize(("problem", "knobs"), CASES, ids=str)
def test_launched_as_sdpa_does(problem, knobs) -> None:
    inputs = tensors(problem)
    launcher = Launcher(problem, schedule_for(problem, knobs), *inputs)
    first = launcher.launch().clone()
    assert_right(problem, launcher, inputs)
    for _ in range(20):  # the counters are back at zero, and the last block to arrive is another one each time
        launcher.out.fill_(float("nan"))
        assert torch.equal(launcher.launch(), first)


@pytest.fixture(scope="module")
def runner():
    from tiledsched.measure.gpu import GpuRunner

    runner = GpuRunner(Attention)
    yield runner
    runner.close()


def test_shares_stay_whole_under_load() -> None:
    """Many pieces, many shares, thousands of launches: one share read before it was written would show."""
    problem = Attention.problem(seq_q=16, seq_k=4096, head_dim=128, batch=4, heads=32, kv_heads=8)
    inputs = tensors(problem)
    launcher = Launcher(
        problem, schedule_for(problem, {"kv_splits": 16, "tma_loads": False, "tile_m": 64, "pack_gqa": True}), *inputs
    )
    first = launcher.launch().clone()
    assert_right(problem, launcher, inputs)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(3000):
        launcher.extras["Partial"].fill_(float("nan")) if turn % 100 == 0 else None
        wrong += (launcher.launch() != first).sum()
    assert int(wrong) == 0
    assert not launcher.extras["Counters"].any()


def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    """With shares of the keys of a fixed size."""
    several = LONG.replace(seq_q=1, batch=5, seq_k=5000)
    schedule = schedule_for(several, {"pack_gqa": True, "kv_splits": 4, "kv_combine": "in_order"})
    inputs = tensors(several)
    together = Launcher(several, schedule, *inputs).launch().clone()
    for first, batch in ((0, 1), (3, 1), (1, 3)):
        part = [each[first : first + batch].contiguous() for each in inputs]
        alone = Launcher(several.replace(batch=batch), schedule, *part).launch()
        assert torch.equal(alone, together[first : first + batch])


def test_a_graph_replays_a_split_launch() -> None:
    inputs = tensors(DECODE)
    launcher = Launcher(
        DECODE, schedule_for(DECODE, {"kv_splits": 8, "tma_loads": False, "tile_m": 16, "pack_gqa": True}), *inputs
    )
    first = launcher.launch().clone()
    graph, _ = captured(launcher.launch)
    for _ in range(5):
        launcher.out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(launcher.out, first)
    del graph  # before the kernel, which takes its program with it when it goes


def test_arrays_of_more_than_two_thousand_million_elements() -> None:
    """Queries of 2**31 elements and more, of which the last rows are checked."""
    problem = Attention.problem(seq_q=(1 << 18) + 8, seq_k=256, head_dim=128, batch=16, heads=4, kv_heads=4)
    assert problem.wide
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free memory")
    inputs = tensors(problem)
    for knobs in ({}, {"persistent": "strided"}):
        launcher = Launcher(problem, schedule_for(problem, {"tile_m": 128, "num_worker_warps": 8, **knobs}), *inputs)
        launcher.launch()
        q, k, v = inputs
        for batch, rows in ((0, slice(0, 300)), (15, slice(-300, None))):
            part = (q[batch : batch + 1, :, rows], k[batch : batch + 1], v[batch : batch + 1])
            exact, _ = attention_and_lse(
                numpy, *(tensor.double().cpu().numpy() for tensor in part), causal=False, scale=128**-0.5
            )
            found = launcher.out[batch : batch + 1, :, rows].double().cpu().numpy()
            assert numpy.linalg.norm(found - exact) < LARGEST_ERROR["float16", "fp32"] * numpy.linalg.norm(exact)
        assert not launcher.out.isnan().any()


def test_a_kernel_of_another_mask_is_refused(runner) -> None:
    from tiledsched.build.compiler import BuildTask, compile_task

    schedule, other = schedule_for(RIGHT, {}), RIGHT.replace(alignment="top_left")
    built = compile_task(BuildTask(kernel="attention", schedule=schedule, problem=other, arch=arch()))
    runner.begin(RIGHT)
    failure = runner.check(Candidate(schedule=schedule, artifact=built.artifact))
    assert isinstance(failure, Failure)
    assert "random inputs" in failure.message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "more", [{}, {"causal": True}, {"causal": True, "window": 100, "softcap": 20.0}, {"window": (80, 60)}], ids=str
)
def test_packed_sequences_and_pages(dtype, more) -> None:
    """As float64 has it, with empty sequences, short ones and a long one; pages in disorder, some of them named by nobody."""
    from tiledsched import configure, sdpa_paged, sdpa_varlen

    numbers = torch.Generator(device="cuda").manual_seed(0)
    sides = {"window": 81, "window_right": 60, "causal": True} if "causal" not in more and more else {}
    named = {
        "causal": bool(more.get("causal")),
        "alignment": "bottom_right",
        "window": more.get("window", 0),
        "cap": more.get("softcap", 0.0),
        "scale": 128**-0.5,
        **sides,
    }

    def draw(*shape):
        return torch.randn(shape, generator=numbers, device="cuda").to(dtype)

    def agrees(out, exact) -> None:
        found = out.double().cpu().numpy()
        limit = LARGEST_ERROR[str(dtype).removeprefix("torch."), "fp32"]
        assert numpy.linalg.norm(found - exact) < limit * numpy.linalg.norm(exact)

    def host(*arrays):
        return [each.double().cpu().numpy() for each in arrays]

    rows, keys = numpy.array([0, 1, 1, 130, 1500, 1564]), numpy.array([0, 17, 30, 130, 1700, 1764])
    q, k, v = draw(1564, 8, 128), draw(1764, 2, 128), draw(1764, 2, 128)
    cu_q, cu_k = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in (rows, keys))
    table = torch.randperm(300, generator=numbers, device="cuda")[:256].reshape(4, 64).int()
    lengths = torch.tensor([1000, 1, 0, 517], dtype=torch.int32, device="cuda")
    one, k_pool, v_pool = draw(4, 2, 8, 128), draw(300, 16, 2, 128), draw(300, 16, 2, 128)
    used = torch.cat([row[: -(-int(length) // 16)] for row, length in zip(table, lengths, strict=True)]).long()
    for pool in (k_pool, v_pool):  # what nobody's keys are in is not finite
        pool[~torch.isin(torch.arange(300, device="cuda"), used)] = float("nan")
    with configure(fallback="error"):
        packed = sdpa_varlen(q, k, v, cu_q, cu_k, 1370, 1570, **more)
    paged = []
    for knobs in ({}, {"tile_n": 16}, {"tile_n": 64}, {"tile_n": 128, "page_lookup": "scalar"}):
        with configure(fallback="error", rivals="off", **knobs):
            paged.append(sdpa_paged(one, k_pool, v_pool, table, lengths, **{"causal": False, **more}))
    exact, _ = attention_and_lse(
        numpy, *host(*(each.transpose(0, 1)[None] for each in (q, k, v))), **named, cu_q=rows, cu_k=keys
    )
    agrees(packed.transpose(0, 1)[None], exact)
    exact, _ = attention_and_lse(
        numpy,
        *host(*(each.transpose(1, 2) for each in (one, k_pool, v_pool))),
        **named,
        table=table.cpu().numpy(),
        lengths=lengths.cpu().numpy(),
    )
    for each in paged:
        agrees(each.transpose(1, 2), exact)
