"""Serving without a GPU: everything as on one, except that the launch runs the kernel in the interpreter."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from tiledsched.core import data_files
from tiledsched.core.config import Settings
from tiledsched.measure.runner import Device
from tiledsched.serve import entries, process
from tiledsched.serve.process import Runtime

TOLERANCE: dict[Any, dict[str, float]] = {
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
"""Of outputs against `expected`, by dtype."""
H200 = Device(arch="sm_90", name="NVIDIA H200", sm_count=132)


@functools.cache
def shipped_table(kernel: Any, archs: Any, knobs: Any, beside: Any, **options: str) -> Any:
    """The table of a kernel over what ships. It is kept for later tests, most of which take less long than sorting its entries.
    `beside` is what else it depends on.
    """
    return entries.load_table(Settings(db="/nonexistent", knobs=dict(knobs), **options), kernel=kernel, archs=archs)


def load_table(settings: Any, *, kernel: Any, archs: Any) -> Any:
    """The table that serves with these settings. It finds its answers anew."""
    if entries.database_exists(settings.db) or entries.site_location(settings.site) or entries.named_bundle():
        return entries.load_table(settings, kernel=kernel, archs=archs)
    folders = data_files.tuning_db(), data_files.search_spaces()
    return shipped_table(
        kernel,
        archs and frozenset(archs),
        tuple(settings.knobs.items()),
        (entries.layers, entries.compiler_at_hand(), folders, repr(settings.knobs)),
        **{name: getattr(settings, name) for name in ("regime", "accum_mode", "numerics", "rivals")},
    )._with()


class Launches(list):
    """What was launched: (stream, grid, kernel, arguments) each."""

    def __init__(self) -> None:
        self.runtime = runtime_on_cpu(self)

    def __call__(
        self,
        stream: int,
        grid: tuple[int, int, int],
        kernel: Any,
        args: tuple[Any, ...],
        programmatic_dependent_launch: bool = False,
    ) -> None:
        from tiledsched.interpreter.launch import run
        from tiledsched.interpreter.programs import as_numpy

        self.append((stream, grid, kernel, args))
        run(kernel, grid, [as_numpy(each) for each in args])


def runtime_on_cpu(launch: Any) -> Runtime:
    """A runtime for which CPU tensors are tensors on an H200."""
    return Runtime(
        device_type="cpu",
        current_device=lambda: -1,
        current_stream=lambda index: 0,
        empty=torch._C._dynamo.guards._empty_strided_cpu,
        is_capturing=lambda: False,
        synchronize=lambda index: None,
        launch=launch,
        read_device=lambda index: H200,
        load_table=load_table,
    )


@contextlib.contextmanager
def using(runtime: Runtime) -> Iterator[Runtime]:
    """Serve with `runtime` within the block."""
    before = process.use_runtime(runtime)
    try:
        yield runtime
    finally:
        process.use_runtime(before)


@contextlib.contextmanager
def changed(**functions: Any) -> Iterator[None]:
    """The runtime with other functions within the block."""
    runtime = process.runtime
    before = {name: getattr(runtime, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(runtime, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(runtime, name, function)


def on_another_stream() -> Any:
    """As if the default stream were not the current one: so torch has a capture warmed up."""
    return changed(current_stream=lambda index: 1)


def capturing() -> Any:
    """As if a CUDA graph were being captured."""
    return changed(is_capturing=lambda: True)


def tensors(
    *, batch=1, heads=2, kv_heads=None, rows=24, keys=None, columns=16, value_columns=None, dtype=torch.float16
):
    generator = torch.Generator().manual_seed(rows)
    kv = (batch, kv_heads or heads, keys or rows)
    shapes = ((batch, heads, rows, columns), (*kv, columns), (*kv, value_columns or columns))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def rows_first(x):
    """The same tensor, its rows before its heads in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def expected(q, k, v, alignment=None, scale=None, dtype=None):
    """In float32 through torch's math, with a mask spelled out."""
    rows, keys = q.shape[-2], k.shape[-2]
    mask = None
    if alignment:
        diagonal = keys - rows if alignment == "bottom_right" else 0
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(diagonal)
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.float().repeat_interleave(group, dim=-3) for x in (k, v))
    out = torch_sdpa(q.float(), k, v, attn_mask=mask, scale=scale)
    if mask is not None:
        out = torch.where(mask.any(-1)[:, None], out, 0.0)
    return out.to(dtype or q.dtype)
