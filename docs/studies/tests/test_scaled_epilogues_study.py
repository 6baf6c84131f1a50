"""The study of products of 8-bit floats with epilogues: that its methods compute the same. No GPU, and nothing is compiled."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

import tiledsched as ts
from docs.studies import scaled_epilogues as study
from docs.studies.batch_invariance import normal
from docs.studies.flex_variants import relative_error

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize("layer", study.LAYERS)
def test_every_method_computes_the_same(launches, monkeypatch, layer):
    monkeypatch.setattr(study, "normal", partial(normal, device="cpu"))
    monkeypatch.setattr(study, "LAYERS", {layer: (48, 64)})
    given = study.tensors_of(layer, 24)
    right = study.exact(**given)
    assert 0.1 < right.std() < 10
    with ts.configure(compile="wait"):
        methods = study.methods_of(given)
        assert set(methods) == set(study.METHODS)
        for name in ("served", "own"):
            assert relative_error(methods[name](), right) < 5e-3, name
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda a, b, one, other, **words: ((a.float() @ b.float()) * one * other).bfloat16()
    )
    assert relative_error(methods["eager"](), right) < 1e-2
    assert launches


def test_each_product_is_raced_with_what_follows_it(monkeypatch):
    asked = []
    monkeypatch.setattr(study, "races", lambda kernel, cells, **where: asked.append((kernel.name, cells, where)) or ())
    layers = ("llama3_8b gate_up", "qwen3_8b down")
    assert study.tune([(layer, 16) for layer in layers], 9.0, "some.db") == ()
    ((kernel, ((gated_name, gated), (_, added)), where),) = asked
    assert (kernel, gated_name, where["database"]) == ("scaled_matmul_epilogue", "llama3_8b gate_up 16", "some.db")
    assert (gated.m, gated.n, gated.k, gated.gate, gated.activation) == (16, 14336, 4096, True, "silu")
    assert (added.residual, added.gate, added.scales, added.fast_accum) == (True, False, "row", True)
