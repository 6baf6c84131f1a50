"""All searches of FlashInfer's own cuTile files, unedited, are answered by `tiledsched.remember()`: `pip install flashinfer-python`.

The times are made up, and nothing is launched: no GPU is needed.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
flashinfer = pytest.importorskip("flashinfer")
import cuda.tile as ct
from fake_machine import FakeMachine

import tiledsched
from tiledsched.remember import machine as machines


def bf(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def f8(*shape):
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


floats, STREAM = torch.zeros, SimpleNamespace(cuda_stream=0)
RAGGED = (STREAM, bf(128, 128), bf(2, 256, 128), bf(128, 256), ints(3), 2, 64, ints(1), 256, 128, False, True)
LENGTHS = (ints(2, 1, 1, 1), ints(2, 1, 1, 1), ints(3))
PAGED = (bf(64, 8, 128), bf(16, 16, 2, 128), bf(16, 16, 2, 128), *LENGTHS, ints(2, 8), 1.0, 1.0, 2, 32)
PACKED = (bf(64, 8, 128), bf(64, 2, 128), bf(64, 2, 128), *LENGTHS, None, 1.0, 1.0, 2, 32)
ROPE = [each(8, heads, 64) for each in (bf, f8) for heads in (4, 1, 4, 1)]
PAGES = (ints(2), ints(16))
SPLITS = (4, 4, 64, True, 8, False)
GEMM, ATTENTION = "gemm.kernels.cutile.", "attention.kernels.cutile.fmha_"
PREFILL = f"{ATTENTION}prefill_bsr_cutile"
SITES = {
    (f"{GEMM}mm_bf16_cutile", "_gemm_alpha_beta_cutile"): (bf(256, 512), bf(384, 512), bf(256, 384)),
    (f"{GEMM}gemm_alpha_beta_cutile", "gemm_alpha_beta"): (bf(256, 512), bf(384, 512), bf(256, 384)),
    (f"{GEMM}bmm_bf16_cutile", "_bmm_bf16_autotune_and_launch"): (
        *(STREAM, bf(128, 128), bf(2, 256, 128), bf(128, 256), ints(3), 2, 64, 256, 128, 0, 1),
    ),
    (f"{GEMM}gemm_fp8_nt_groupwise_cutile", "gemm_fp8_nt_groupwise_cutile"): (
        *(f8(256, 512), f8(384, 512), floats(256, 4), floats(3, 4), bf(256, 384)),
    ),
    (f"{GEMM}masked_bmm_cutile", "_masked_bmm_autotune"): (
        *(STREAM, bf(2, 64, 128), bf(2, 256, 128), bf(2, 64, 256), ints(2), 2, 64, 256, False, True),
    ),
    (f"{GEMM}masked_scaled_bmm_cutile", "_masked_scaled_bmm_autotune_launch"): (
        *(STREAM, f8(2, 128, 256), f8(2, 256, 256), f8(2, 1, 2, 2, 256), f8(2, 2, 2, 2, 256), ints(2)),
        *(bf(2, 128, 256), ints(1), 2, 128, 256, 256, 256, 1, 32, False),
    ),
    (f"{GEMM}ragged_bmm_cutile", "_ragged_bmm_autotune_standard"): RAGGED,
    (f"{GEMM}ragged_bmm_cutile", "_ragged_bmm_autotune_swap_ab"): RAGGED,
    (f"{GEMM}ragged_scaled_bmm_cutile", "_ragged_scaled_bmm_launch"): (
        *(STREAM, f8(128, 256), f8(2, 256, 256), f8(1, 2, 2, 256), f8(2, 2, 2, 2, 256), floats(1), floats(1)),
        *(ints(3), bf(128, 256), 2, 64, ints(1), 256, 256, 256, 1, 1, 32, False, False, False),
    ),
    ("quantization.kernels.cutile.rope_quantize_fp8_cutile", "_cutile_autotune_rope_quantize_fp8"): (
        *(STREAM, *ROPE[:4], floats(128, 64), ints(8), *ROPE[4:], 1.0, 1.0, 8, 4, 1, 64, 64, 10),
    ),
    (PREFILL, "prefill_attention_kv_paged_cutile"): PAGED,
    (PREFILL, "prefill_attention_kv_paged_cutile", "in order"): (*PAGED, True, None, None, False),
    (PREFILL, "prefill_attention_kv_ragged_cutile"): PACKED,
    (PREFILL, "prefill_attention_kv_ragged_cutile", "in order"): (*PACKED, True, None, None, False),
    (f"{ATTENTION}decode_bsr_cutile", "_gqa_decode_autotune_base"): (
        *(STREAM, bf(2, 8, 128), bf(16, 16, 2, 128), bf(16, 16, 2, 128), *PAGES, bf(2, 8, 4, 128), floats(2, 8, 4)),
        *(2, 8, 2, 16, 1.0, 1.0, 16, 128, *SPLITS),
    ),
    (f"{ATTENTION}decode_bsr_cutile", "_mla_decode_autotune_base"): (
        *(STREAM, bf(2, 16, 512), bf(2, 16, 64), bf(16, 16, 512), bf(16, 16, 64), *PAGES, bf(2, 16, 4, 512)),
        *(floats(2, 16, 4), 2, 16, 16, 1.0, 1.0, 16, 512, 64, *SPLITS),
    ),
}
"""Module, function, and which of its searches -> arguments for which it searches."""


def test_there_are_no_other_searches():
    calls = 0
    for path in Path(flashinfer.__file__).parent.rglob("*_cutile.py"):
        calls += sum(
            ast.unparse(each.func) == "exhaustive_search"
            for each in ast.walk(ast.parse(path.read_text()))
            if isinstance(each, ast.Call)
        )
    assert calls == len(SITES) == 16


@pytest.mark.parametrize("site", SITES, ids=".".join)
def test_a_search_is_stored_and_answered(site, monkeypatch, tmp_path):
    gpu = SimpleNamespace(multi_processor_count=132, name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: gpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: STREAM)
    machine, launched = FakeMachine(lambda program: 100 - len(str(program.config)) % 7), []
    monkeypatch.setattr(ct, "launch", lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(machines, "machine", machine)
    module = import_module(f"flashinfer.{site[0]}")
    caches = [
        each for name, each in vars(module).items() if isinstance(each, dict) and name.lower().endswith("_tune_cache")
    ]
    compiled = []
    with tiledsched.remember():
        for _ in range(2):
            for cache in caches:
                cache.clear()
            getattr(module, site[1])(*SITES[site])
            compiled.append(machine.done["compiles"])
    assert compiled[0] == compiled[1] >= 2
    assert launched
