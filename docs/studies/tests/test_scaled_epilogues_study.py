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


def test_the_products_are_those_of_three_layers():
    assert {layer for layer, _ in study.PRODUCTS} == set(study.LAYERS)
    assert len(set(study.PRODUCTS)) == len(study.PRODUCTS) == 8
