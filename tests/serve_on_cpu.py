"""Serving without a GPU: everything as on one, except that the launch runs the kernel in the interpreter."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from tiledsched.serve import launch as launching
from tiledsched.serve import process

TOLERANCE: dict[Any, dict[str, float]] = {
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
"""Of outputs against `expected`, by dtype."""


class Launches(list):
    """What was launched: (stream, grid, kernel, arguments) each."""

    def __call__(self, stream: int, grid: tuple[int, int, int], kernel: Any, args: tuple[Any, ...]) -> None:
        from tiledsched.interpreter.host_arrays import as_numpy
        from tiledsched.interpreter.launch import run

        self.append((stream, grid, kernel, args))
        run(kernel, grid, [as_numpy(each) for each in args])


def serve_on_cpu(monkeypatch: Any, tmp_path: Any) -> Launches:
    """CPU tensors count as tensors on an H200 from now on; returns the list of launches to come."""
    import cuda.tile

    launches = Launches()
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "none.db"))
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path / "cache"))
    facts = process.DeviceFacts(arch="sm_90", name="NVIDIA H200", sm_count=132)
    monkeypatch.setattr(process, "device_facts", lambda index: facts)
    monkeypatch.setattr(launching, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(launching, "current_device", lambda: -1)
    monkeypatch.setattr(launching, "current_stream", lambda index: 0)
    monkeypatch.setattr(launching, "_launched", set())
    monkeypatch.setattr(launching, "_refused", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(cuda.tile, "launch", launches)
    return launches


@contextlib.contextmanager
def on_another_stream(monkeypatch: Any) -> Any:
    """As if the default stream were not the current one: so torch has a capture warmed up."""
    with monkeypatch.context() as patch:
        patch.setattr(launching, "current_stream", lambda index: 1)
        yield


@contextlib.contextmanager
def capturing(monkeypatch: Any) -> Any:
    """As if a CUDA graph were being captured."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


def tensors(
    *, batch=1, heads=2, kv_heads=None, rows=24, keys=None, columns=16, value_columns=None, dtype=torch.float16
):
    generator = torch.Generator().manual_seed(rows)
    kv = (batch, kv_heads or heads, keys or rows)
    shapes = ((batch, heads, rows, columns), (*kv, columns), (*kv, value_columns or columns))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


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
