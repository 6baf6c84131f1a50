"""The Triton kernel against float64, in Triton's own interpreter on the CPU; and what its autotuner tries."""

from __future__ import annotations

import importlib.util
import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

CHECK = """
import json, sys
import torch
from tiledsched.kernels.attention.triton import attention_forward, triton_attention

def expected(q, k, v, causal, bottom_right):
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).double() for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        offset = k.shape[2] - q.shape[2] if bottom_right else 0
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(offset + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.nan_to_num(torch.softmax(scores, -1)) @ v  # a row that sees nothing is zero

def interpreted(*given, **named):
    try:
        return triton_attention(*given, **named)
    except Exception as error:
        if "only 0-dimensional arrays can be converted" not in str(error) + str(error.__cause__):
            raise
        print(json.dumps(None))
        sys.exit()

torch.manual_seed(0)
errors = []
for batch, heads, kv_heads, seq_q, seq_k, dim, value_dim in json.loads(sys.argv[1]):
    q = torch.randn(batch, heads, seq_q, dim).half()
    k = torch.randn(batch, kv_heads, seq_k, dim).half()
    v = torch.randn(batch, kv_heads, seq_k, value_dim).half()
    for causal, bottom_right in ((False, False), (True, False), (True, True)):
        for tile_m, tile_n in ((32, 32), (64, 16)):
            out = interpreted(q, k, v, causal=causal, bottom_right=bottom_right, kernel=attention_forward,
                                   TILE_M=tile_m, TILE_N=tile_n).double()
            reference = expected(q, k, v, causal, bottom_right)
            assert out.shape == reference.shape
            errors.append(float((out - reference).norm() / reference.norm()))
print(json.dumps(errors))
"""
SHAPES = [
    # batch, heads, kv_heads, seq_q, seq_k, head_dim, value_dim
    (2, 4, 2, 70, 70, 64, 64),
    (1, 2, 2, 33, 100, 40, 40),
    (1, 2, 1, 100, 33, 80, 48),
    (1, 4, 1, 1, 77, 16, 16),
    (1, 1, 1, 128, 128, 33, 33),
]


def test_it_is_right_in_triton_s_interpreter(python) -> None:
    """Tails, grouped heads, both alignments, padded head dimensions. fp16: Triton interprets no bfloat16 product."""
    errors = python(CHECK, json.dumps(SHAPES), TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="").json
    if errors is None:
        pytest.skip("this Triton's interpreter does not know this NumPy")
    assert len(errors) == len(SHAPES) * 6
    assert max(errors) < 1e-3


def test_few_rows_are_tried_with_small_tiles_and_many_rows_with_large_ones() -> None:
    from tiledsched.kernels.attention.triton import CONFIGS, _worth_trying

    few, many = (_worth_trying(CONFIGS, {"seq_q": rows}) for rows in (8, 512))
    assert {config.kwargs["TILE_M"] for config in few} == {16}
    assert {config.kwargs["TILE_M"] for config in many} == {64, 128}
    assert len(few) + len(many) == len(CONFIGS)


def test_nothing_of_triton_is_imported_before_it_is_used(python) -> None:
    """The rest of the bench imports without it."""
    assert importlib.util.find_spec("tiledsched.kernels.attention.triton") is not None
    code = (
        "import sys, tiledsched.kernels.attention.rivals, tiledsched.rivals.bench; assert 'triton' not in sys.modules"
    )
    python(code)
