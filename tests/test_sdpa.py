"""`sdpa` as its callers see it, with the kernel run by the interpreter where a GPU would run it."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import warnings
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from serve_on_cpu import TOLERANCE, capturing, expected, on_another_stream, tensors
from torch.autograd import forward_ad
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from tiledsched import configure
from tiledsched.core.errors import LaunchError, ProblemError, UnsupportedError
from tiledsched.measure.runner import Device
from tiledsched.ops import plans, sdpa as serve
from tiledsched.serve import plan as serve_plan, plan_cache, transfer as policy

pytestmark = pytest.mark.usefixtures("fresh")


# The signature


@pytest.mark.parametrize(
    ("given", "alignment"),
    [
        (((), {}), None),
        (((), {"causal": False}), None),
        (((), {"causal": True}), "top_left"),
        (((), {"causal": "top_left"}), "top_left"),
        (((), {"causal": "bottom_right"}), "bottom_right"),
        (((), {"is_causal": True}), "top_left"),
        (((True,), {}), "top_left"),
        (((False,), {}), None),
        (((None, 0.0, True), {}), "top_left"),
        (((causal_upper_left(24, 40),), {}), "top_left"),
        (((), {"attn_mask": causal_lower_right(24, 40)}), "bottom_right"),
        (((), {"enable_gqa": True}), None),
    ],
)
def test_every_way_to_ask_for_a_mask(launches, given, alignment) -> None:
    q, k, v = tensors(rows=24, keys=40, heads=4, kv_heads=2)
    for _ in range(2):  # through the operator, then the short way
        out = serve.sdpa(q, k, v, *given[0], **given[1])
        torch.testing.assert_close(out, expected(q, k, v, alignment), **TOLERANCE[q.dtype])
    assert len(launches) == 2


def test_a_kernel_outlives_a_reload(launches) -> None:
    """A CUDA graph that someone captured may launch its program, which cuTile unloads with the kernel."""
    serve.sdpa(*tensors())
    kernel = weakref.ref(launches.pop()[2])
    serve.reload()
    gc.collect()
    assert kernel() is not None


def test_torchs_names_are_taken(launches) -> None:
    q, k, v = tensors()
    want = serve.sdpa(q, k, v)
    assert torch.equal(serve.sdpa(query=q, key=k, value=v), want)
    assert torch.equal(serve.sdpa(q, k, value=v), want)
    with pytest.raises(ProblemError, match="k is given twice, also as key"):
        serve.sdpa(q, k, v, key=k)
    with pytest.raises(ProblemError, match="v is missing"):
        serve.sdpa(q, k)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"causal": "left"}, "causal = 'left'; allowed are False, True, 'top_left' and 'bottom_right'"),
        ({"is_causal": "yes"}, "is_causal = 'yes'; allowed"),
        ({"causal": [1]}, r"causal = \[1\]; allowed"),
        ({"causal": True, "is_causal": True}, "is_causal = True and causal = True are both given"),
        ({"attn_mask": True, "causal": True}, "given by name, too"),
        ({"attn_mask": torch.ones(24, 24, dtype=torch.bool), "is_causal": True}, "attn_mask and a causal mask"),
        ({"scale": [1.0]}, "scale must be a number or None, got list"),
        ({"attn_mask": "none"}, "attn_mask must be a tensor"),
        (
            {"attn_mask": causal_lower_right(24, 25)},
            "CausalBias for 24 query and 25 key rows, but q has 24 and k 24 rows",
        ),
    ],
)
def test_contradictions_are_refused(given, words) -> None:
    with pytest.raises(ProblemError, match=words):
        serve.sdpa(*tensors(), **given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q.numpy(), k, v), "q must be a torch.Tensor, got ndarray"),
        (
            lambda q, k, v: (q[0, 0, 0], k, v),
            r"q must be a torch.Tensor, got float16 \(16,\) on cpu; .* dense floating-point tensors \[batch, heads",
        ),
        (lambda q, k, v: (q, k.float(), v), "q, k and v must have one dtype, got torch.float16, torch.float32"),
        (lambda q, k, v: (q, k.to("meta"), v), "q, k and v must be on one device, got cpu, meta, cpu"),
        (lambda q, k, v: (q[..., :8], k, v), "q and k must agree in head_dim"),
        (lambda q, k, v: (q, k[:, :, :9], v), "k and v must agree in rows"),
        (lambda q, k, v: (q, k, v[:, :3]), "k and v must agree in heads"),
        (
            lambda q, k, v: (q, k[:, :2].repeat(1, 2, 1, 1)[:, :3], v[:, :2].repeat(1, 2, 1, 1)[:, :3]),
            "multiple of k's",
        ),
        (lambda q, k, v: (q, k.repeat(3, 1, 1, 1), v.repeat(3, 1, 1, 1)), "agree in batch"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, words) -> None:
    with pytest.raises(ProblemError, match=words):
        serve.sdpa(*change(*tensors(batch=2, heads=4)))


# What is served


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"batch": 2, "rows": 70, "keys": 33},
        {"heads": 6, "kv_heads": 2, "rows": 5, "keys": 70},
        {"columns": 40},
        {"columns": 24, "value_columns": 16},
        {"columns": 16, "value_columns": 33},
        {"rows": 1, "keys": 70},
    ],
)
@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
def test_it_equals_torch(launches, shape, causal, dtype) -> None:
    q, k, v = tensors(**shape, dtype=dtype)
    out = serve.sdpa(q, k, v, causal=causal)
    torch.testing.assert_close(out, expected(q, k, v, causal), **TOLERANCE[dtype])
    assert len(launches) == 1


@pytest.mark.parametrize("scale", [None, 0.5, 1])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_the_log_sum_exp_is_returned(launches, scale, causal) -> None:
    q, k, v = tensors(rows=24, keys=30, heads=4, kv_heads=2)
    for _ in range(2):
        out, lse = serve.sdpa(q, k, v, causal=causal, scale=scale, return_lse=True)
    torch.testing.assert_close(out, expected(q, k, v, causal or None, scale), **TOLERANCE[q.dtype])
    scores = q.float() @ k.float().repeat_interleave(2, dim=1).mT * (0.25 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(~torch.ones(24, 30, dtype=torch.bool).tril(6), float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-3, atol=1e-3)
    assert (lse.dtype, lse.shape) == (torch.float32, (1, 4, 24))
    _, other = serve.sdpa(q * 2, k, v, causal=causal, scale=scale, return_lse=True)
    assert other.data_ptr() != lse.data_ptr()  # each call has an output of its own


def test_three_axes_are_heads_without_a_batch(launches) -> None:
    q, k, v = tensors(heads=3)
    want = serve.sdpa(q, k, v, causal=True)
    assert torch.equal(serve.sdpa(q[0], k[0], v[0], causal=True), want[0])
    out, lse = serve.sdpa(q[0], k[0], v[0], return_lse=True)
    assert (out.shape, lse.shape) == ((3, 24, 16), (3, 24))


@pytest.mark.parametrize("value_columns", [16, 8])
def test_the_output_keeps_the_order_of_axes(launches, value_columns) -> None:
    q, k, v = tensors(batch=2, heads=3, value_columns=value_columns)
    rows_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = serve.sdpa(rows_first, k, v)
    assert out.transpose(1, 2).is_contiguous()
    assert serve.sdpa(q, k, v).is_contiguous()
    torch.testing.assert_close(out, serve.sdpa(q, k, v))


def test_views_are_read_where_they_lie(launches) -> None:
    q, k, v = tensors(heads=4, rows=20, keys=40, columns=32)
    views = (q[:, 1:3, :, :16], k[:, ::2, 5:30, 16:], v[:, ::2, 5:30, 8:24])
    assert not any(view.is_contiguous() for view in views)
    torch.testing.assert_close(serve.sdpa(*views, True), expected(*views, "top_left"), **TOLERANCE[q.dtype])
    assert [tuple(each.stride()) for each in launches[0][3][:3]] == [tuple(view.stride()) for view in views]


def test_workspace_of_split_keys(launches) -> None:
    """The counters of one stream are kept, those of operators on the default one alone; a capture gets its own."""
    q, k, v = tensors(rows=4, keys=200)
    want = expected(q, k, v)
    with configure(kv_splits=2, tile_m=16, tile_n=64, tma_loads=False):
        served = serve.plan_for(q, k, v).served
        assert served.schedule["kv_splits"] == 2
        for _ in range(3):
            torch.testing.assert_close(serve.sdpa(q, k, v), want, **TOLERANCE[q.dtype])
        torch.ops.tiledsched.sdpa(q, k, v)
        with on_another_stream():
            for _ in range(2):
                torch.ops.tiledsched.sdpa(q, k, v)
        for each in (serve.sdpa, torch.ops.tiledsched.sdpa):
            with capturing():
                each(q, k, v)
    counters = [launch[3][7] for launch in launches]
    assert counters[0].dtype == torch.int32
    places = [each.data_ptr() for each in counters]
    assert (len({*places[:4]}), len({*places})) == (1, 5)


def test_shares_that_a_second_launch_combines(launches) -> None:
    """Both get the arrays they name, whatever else the call has."""
    q, k, v = tensors(rows=4, keys=200)
    sinks = torch.randn(q.shape[1], dtype=q.dtype)
    with configure(kv_splits=2, kv_combine="launch", tile_m=16, tile_n=64):
        torch.testing.assert_close(serve.sdpa(q, k, v), expected(q, k, v), **TOLERANCE[q.dtype])
        assert [sum(map(torch.is_tensor, launch[3])) for launch in launches[-2:]] == [5, 4]
        share, combine = (launch[3] for launch in launches[-2:])
        assert share[3].data_ptr() == combine[2].data_ptr()
        out, lse = serve.sdpa(q, k, v, return_lse=True)
        assert lse.shape == q.shape[:3]
        torch.testing.assert_close(out, expected(q, k, v), **TOLERANCE[q.dtype])
        with_sinks, sunk_lse = serve.sdpa(q, k, v, sinks=sinks, return_lse=True)
        kept = torch.exp(lse - sunk_lse)[..., None].to(out.dtype)
        torch.testing.assert_close(with_sinks, out * kept, **TOLERANCE[q.dtype])


# Plans


def test_a_plan_is_made_once_and_found_again(launches) -> None:
    q, k, v = tensors()
    made = serve.plan_for(q, k, v, causal=True)
    for causal in (True, "top_left", True):
        serve.sdpa(q, k, v, causal=causal)
    serve.sdpa(q, k, v, True)
    torch.ops.tiledsched.sdpa(q, k, v, "top_left")
    assert [id(plan) for plan in plans.cache.plans.values()] == [id(made)]
    assert len(launches) == 5
    serve.sdpa(*tensors(rows=25), causal=True)
    assert len(plans.cache.plans) == 2
    assert len({id(launch[2]) for launch in launches}) == 1  # the hints are the same, and so is the kernel object


def comparable(plan):
    """A plan whose functions are compared by what they do, and whose rivals by what was offered."""
    rivals = {name: (each := getattr(plan, name)) and each.offer for name in ("rival", "in_graphs", "direct")}
    return replace(plan, steps=tuple((kernel, grid, repr(pick)) for kernel, grid, pick, _ in plan.steps), **rivals)


@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 32, 8), (8, 32, 8), (2, 8, 8)])
def test_a_model_that_decodes_gets_the_plans_it_would_get_anew(launches, batch, heads, kv_heads) -> None:
    """Of most lengths they are made from that of the length before."""
    q = torch.empty(batch, heads, 1, 128, dtype=torch.bfloat16)
    lengths = [*range(1, 140, 13), *range(1000, 1060, 3), 1088, 1089, 1152, 4095, 4096, 4097, 1001]
    found = []
    for keys in lengths:
        k, v = (torch.empty(batch, kv_heads, keys, 128, dtype=torch.bfloat16) for _ in range(2))
        found.append((serve.plan_for(q, k, v), k, v))
    assert len({id(plan.steps) for plan, _, _ in found}) < len(lengths) / 2
    for plan, k, v in found:
        plans.cache.forget()
        fresh = serve.plan_for(q, k, v)
        assert comparable(replace(plan, served=fresh.served)) == comparable(fresh)
        assert plan.problem.seq_k == k.shape[2]
        assert plan.served.schedule == fresh.served.schedule
    scaled = serve.plan_for(q, k, v, scale=0.5)
    assert scaled.tail != plan.tail


def test_plans_do_not_pile_up(launches, monkeypatch) -> None:
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 3)
    for rows in range(1, 8):
        serve.sdpa(*tensors(rows=rows))
        assert len(plans.cache.plans) <= 3
        assert plans.cache.ready.keys() <= plans.cache.plans.keys()


def test_a_failed_launch_names_the_call(launches) -> None:
    def fail(*given) -> None:
        raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")

    launches.runtime.launch = fail
    with pytest.raises(
        LaunchError, match=r"S=24 D=16 float16 .*CUDA_ERROR_LAUNCH_FAILED; run again with TILEDSCHED_SYNC=1"
    ):
        serve.sdpa(*tensors())


def refuse(launches, times, error) -> list:
    """So many launches fail; the kernels they were of."""
    refused: list = []

    def launch(stream, grid, kernel, arguments) -> None:
        if len(refused) < times:
            refused.append(kernel)
            raise error
        launches(stream, grid, kernel, arguments)

    launches.runtime.launch = launch
    return refused


def test_a_schedule_that_does_not_compile_for_a_layout_gives_way_to_the_default(launches, caplog) -> None:
    import cuda.tile

    failure = cuda.tile.TileError("Return code 5")
    refused = refuse(launches, 1 + policy.ALTERNATIVES, failure)
    q, k, v = tensors(rows=200, columns=64)
    assert serve.plan_for(q, k, v).served.provenance == "transferred"
    torch.testing.assert_close(serve.sdpa(q, k, v), expected(q, k, v), **TOLERANCE[torch.float16])
    served = serve.plan_for(q, k, v).served
    assert served.provenance == "default"
    assert "does not compile for arrays laid out like these" in served.reason
    assert "Return code 5" in caplog.text
    assert "the next choice is served instead" in caplog.text
    serve.sdpa(q, k, v)
    assert len(refused) == 1 + policy.ALTERNATIVES
    assert launches[0][2] is launches[1][2] is not refused[0]

    refuse(launches, 9, failure)
    with pytest.raises(LaunchError, match="default"):  # nor does the default
        serve.sdpa(*tensors(rows=201, columns=64))


def test_sync_waits_for_each_launch(launches) -> None:
    waited = []
    launches.runtime.synchronize = waited.append
    q, k, v = tensors()
    serve.sdpa(q, k, v)
    assert waited == []
    with configure(sync=True):
        serve.sdpa(q, k, v)
        serve.sdpa(q, k, v)
    assert waited == [-1, -1]


# What is left to torch


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attn_mask": torch.ones(24, 24, dtype=torch.bool).tril()}, "a mask tensor is given"),
        ({"attn_mask": torch.zeros(24, 24, dtype=torch.float16)}, "a mask tensor is given"),
        ({"dropout_p": 1e-9}, "dropout is asked for"),
        ({"scale": -1.0}, "the softmax scale must be positive"),
        ({"scale": 0.0}, "the softmax scale must be positive"),
    ],
)
def test_arguments_left_to_torch(launches, given, words) -> None:
    q, k, v = tensors()
    with configure(masks="torch"), pytest.raises(UnsupportedError, match=words):
        serve.sdpa(q, k, v, **given)
    with configure(fallback="torch", masks="torch"):
        with pytest.warns(UserWarning, match=words):
            out = serve.sdpa(q, k, v, **given)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            serve.sdpa(q, k, v, **given)
    torch.testing.assert_close(out, torch_sdpa(q, k, v, **given))
    assert launches == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.float(), "dtype torch.float32 is not served"),
        (lambda x: x.repeat(1, 1, 1, 20), "head_dim 320 is above 256"),
        (lambda x: x[:, :, :0], "a tensor is empty"),
        (lambda x: x[None], "q, k and v have 5, 5 and 5 axes"),
    ],
)
def test_tensors_left_to_torch(launches, change, words) -> None:
    q, k, v = (change(x) for x in tensors())
    with pytest.raises(UnsupportedError, match=words):
        serve.sdpa(q, k, v)
    with configure(fallback="torch"), pytest.warns(UserWarning, match=words):
        torch.testing.assert_close(serve.sdpa(q, k, v), torch_sdpa(q, k, v))


def test_a_batch_that_broadcasts_is_left_to_torch(launches, quiet) -> None:
    q, k, v = tensors(batch=2)
    with pytest.raises(UnsupportedError, match="torch broadcasts it"):
        serve.sdpa(q, k[:1], v[:1])


FAR = {"heads": 4, "rows": 8, "keys": 8}


def on_kernel(request, on: str) -> None:
    """Where CPU tensors count as a GPU's, or do not; what goes to torch may."""
    if on == "kernel":
        request.getfixturevalue("launches")
        configure(fallback="torch")
        request.addfinalizer(lambda: configure(fallback=None))


def torchs(q, k, v, scale=None, **flags):
    """torch's own, or the kind of its error."""
    try:
        return torch_sdpa(q, k, v, scale=scale, **flags)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("on", ["here", "kernel"])
@pytest.mark.parametrize(
    ("shapes", "lse_shape"),
    [
        (((2, 1, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)), (2, 4, 8)),
        (((2, 4, 8, 16), (2, 1, 8, 16), (2, 4, 8, 16)), (2, 4, 8)),
        (((2, 4, 8, 16), (2, 4, 8, 16), (2, 1, 8, 16)), (2, 4, 8)),
        (((2, 1, 8, 16), (2, 1, 8, 16), (2, 4, 8, 16)), (2, 4, 8)),
        (((1, 8, 16), (4, 8, 16), (4, 8, 16)), (4, 8)),
        (((2, 4, 8, 0), (2, 4, 8, 0), (2, 4, 8, 16)), (2, 4, 8)),
        (((2, 4, 8, 0), (2, 4, 8, 0), (2, 4, 8, 0)), (2, 4, 8)),
        (((2, 4, 8, 16), (2, 4, 0, 16), (2, 4, 0, 16)), (2, 4, 8)),
        (((2, 4, 8, 16), (2, 0, 8, 16), (2, 0, 8, 16)), (2, 4, 8)),
        (((2, 2, 4, 8, 16), (2, 2, 1, 8, 16), (2, 2, 1, 8, 16)), (2, 2, 4, 8)),
    ],
)
def test_heads_and_sizes_mean_what_they_do_in_torch(request, on, shapes, lse_shape) -> None:
    on_kernel(request, on)
    q, k, v = (torch.randn(shape, dtype=torch.float16) for shape in shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, lse = serve.sdpa(q, k, v, return_lse=True)
    torch.testing.assert_close(out, torchs(q, k, v), equal_nan=True, **TOLERANCE[torch.float16])
    assert lse.shape == lse_shape
    if q.shape[-1] == 0:  # every key weighs the same
        torch.testing.assert_close(lse, torch.full(lse_shape, math.log(8)))


@pytest.mark.parametrize("on", ["here", "kernel"])
@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize(
    "scale",
    [math.nan, math.inf, -0.5, 0.0, 0, True, torch.tensor(0.25), torch.tensor(2), np.float32(0.25), np.int64(2)],
)
def test_a_scale_means_what_it_does_in_torch(request, on, axes, scale) -> None:
    on_kernel(request, on)
    q, k, v = (x if axes == 4 else x[0] for x in tensors(**FAR))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):  # also from the plan
            found = serve.sdpa(q, k, v, scale=scale)
    torch.testing.assert_close(found, torchs(q, k, v, scale=float(scale)), equal_nan=True, **TOLERANCE[torch.float16])


@pytest.mark.parametrize("scale", [torch.tensor([0.3]), torch.tensor([0.3, 0.2]), torch.tensor(1j), "0.3", 1j, [0.5]])
def test_what_is_no_scale_is_refused(launches, scale) -> None:
    with pytest.raises(ProblemError, match="scale must be a number or None"):
        serve.sdpa(*tensors(**FAR), scale=scale)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("on", ["here", "kernel"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_left_to_torch(request, on, layout) -> None:
    on_kernel(request, on)
    parts = [torch.randn(rows, 4, 16) for rows in (8, 5)]
    q = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
    q = q.contiguous() if layout is torch.strided else q
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = serve.sdpa(q, q, q)
        for causal in ("bottom_right", "top_left"):
            with pytest.raises((UnsupportedError, RuntimeError)):
                serve.sdpa(q, q, q, causal=causal, return_lse=True)
    for one, part in zip(found.unbind(), parts, strict=True):
        alone = part.transpose(0, 1)
        torch.testing.assert_close(one, torch_sdpa(alone, alone, alone))


def test_a_view_beyond_32_bits_is_indexed_with_64(launches, monkeypatch) -> None:
    """Whatever the sizes say that are computed with."""
    q, k, v = tensors(keys=200)
    monkeypatch.setattr(serve_plan, "LARGEST_INT32", k[:, :, :100].numel() + 1)
    for given in ((q, k[:, :, :100], v[:, :, :100]), (q, k[:, :, :100].contiguous(), v[:, :, :100].contiguous())):
        torch.testing.assert_close(serve.sdpa(*given), expected(*given), **TOLERANCE[q.dtype])
    assert [kernel._pyfunc.__name__ for _, _, kernel, _ in launches] == ["attention_wide", "attention"]


def test_gpus_without_a_space_are_left_to_torch(launches) -> None:
    facts = Device(arch="sm_75", name="Tesla T4", sm_count=40)
    launches.runtime.read_device = lambda index: facts
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors())
    with configure(fallback="torch"), pytest.warns(UserWarning, match="no search space for sm_75"):
        out, lse = serve.sdpa(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out, expected(q, k, v, "top_left"), **TOLERANCE[q.dtype])
    assert out.stride() == q.stride()  # as the operator promised when it was traced
    assert lse.shape == (1, 2, 24)


@pytest.mark.parametrize(("rows", "keys"), [(12, 30), (30, 12), (16, 16)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_torch_understands_bottom_right_and_the_log_sum_exp(quiet, rows, keys, kv_heads) -> None:
    q, k, v = tensors(rows=rows, keys=keys, heads=4, kv_heads=kv_heads, dtype=torch.float32)
    out, lse = serve.sdpa(q, k, v, causal="bottom_right", return_lse=True)
    torch.testing.assert_close(out, expected(q, k, v, "bottom_right"))
    scores = q @ k.repeat_interleave(4 // kv_heads, dim=1).mT / 4
    scores = scores.masked_fill(~torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows), float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1))


SPECIAL = {
    "negated": torch._neg_view,
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "functional": torch._to_functional_tensor,
}
"""Tensors of the type `Tensor` that are not what lies in their memory, if they have any."""


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("window", [None, 8])
def test_tensors_are_what_torch_sees_in_them(launches, kind, place, lse, window) -> None:
    given = tensors()
    options = {"causal": True, "window": window, "return_lse": lse}
    special = [SPECIAL[kind](x) if at == place else x for at, x in enumerate(given)]
    plain = [
        (-x if kind == "negated" else x * 0 if kind == "zero" else x) if at == place else x
        for at, x in enumerate(given)
    ]
    for _ in range(4):  # by key, and by torch's comparison
        wanted = serve.sdpa(*plain, **options)
        for found, each in zip(*((x if lse else (x,)) for x in (serve.sdpa(*special, **options), wanted)), strict=True):
            found = torch._from_functional_tensor(found) if torch._is_functional_tensor(found) else found
            torch.testing.assert_close(found, each, rtol=0, atol=0)


def test_features_are_what_torch_sees_in_them(launches) -> None:
    q, k, v = tensors(batch=2)
    sinks, lengths = torch.tensor([0.5, -1.0]), torch.tensor([5, 9], dtype=torch.int32)
    wanted = serve.sdpa(q, k, v, sinks=-sinks, key_lengths=lengths)
    for _ in range(3):
        found = serve.sdpa(q, k, v, sinks=torch._neg_view(sinks), key_lengths=torch._neg_view(-lengths))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("place", range(3))
def test_forward_mode_derivatives_are_torchs(launches, quiet, place) -> None:
    given = tensors()
    serve.sdpa(*given)
    tangent = torch.ones_like(given[place])

    def attend(x):
        return serve.sdpa(*given[:place], x, *given[place + 1 :])

    def dual(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(attend(forward_ad.make_dual(x, tangent))).tangent

    ways = (dual, torch.func.jacfwd(attend), lambda x: torch.func.jvp(attend, (x,), (tangent,)))
    for way in ways:
        with pytest.raises(UnsupportedError, match="forward-mode derivatives"):
            way(given[place])
        with configure(fallback="torch"), pytest.raises(NotImplementedError, match="forward AD"):
            way(given[place])
    with configure(fallback="torch"), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert dual(given[place]).abs().max() > 0 or place == 1  # scores that all rise the same change nothing
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(serve.sdpa(*given)).tangent is None


def test_an_empty_batch_has_an_empty_result_and_gradients_whatever_torch_returns(fresh, monkeypatch):
    """On a GPU torch's own function returns None there."""
    monkeypatch.setattr("tiledsched.ops.fallback.torch_attention", lambda *given, **more: None)
    for shape in ((0, 2, 4, 64), (2, 2, 0, 64)):
        q = torch.ones(shape, dtype=torch.float16, requires_grad=True)
        k = torch.ones(shape[0], 1, 5, 64, dtype=torch.float16, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out, lse = serve.sdpa(q, k, k, return_lse=True)
        assert (out.shape, lse.shape) == (shape, shape[:3])
        assert [each.shape for each in torch.autograd.grad(out, (q, k), torch.ones_like(out))] == [q.shape, k.shape]


# Distributed tensors: what is split over ranks stays split, forward and backward


SPLIT = {"batch": "S(0)", "heads": "S(1)", "batch and features": "S(0)", "heads and features": "S(1)", "pages": "S(0)"}
"""How the outputs of cases are split. Those of the others are whole, because their inputs had to be gathered."""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.slow
def test_ranks_share_the_batch_or_the_heads_and_gather_anything_else(tmp_path) -> None:
    script = Path(__file__).with_name("sharded_attention.py")
    environment = os.environ | {"TILEDSCHED_DB": str(tmp_path / "none.db"), "TILEDSCHED_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for name, (placement, shape, errors) in found.items():
            assert placement == SPLIT.get(name, "R"), name
            assert shape == ([1, 6, 8, 16] if name == "three heads of keys" else [1, 2, 8, 16]), name
            assert max(errors.values()) < 5e-3, (name, errors)
            assert ("sinks" in errors) == ("features" in name)


def test_processes_without_distributed_tensors_do_not_import_them(monkeypatch) -> None:
    from tiledsched.ops import sharding

    monkeypatch.setattr(sharding, "_registered", [])
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)
    sharding.register()
    assert not sharding._registered
    assert "torch.distributed.tensor" not in sys.modules
