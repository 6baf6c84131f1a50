"""The study of products with epilogues: its problems, and that every method computes the same."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

import tiledsched as ts
from docs.studies import epilogues
from docs.studies.batch_invariance import normal
from docs.studies.flex_variants import relative_error
from tiledsched.core.registry import kernel_named

pytestmark = pytest.mark.usefixtures("fresh")


def test_there_are_24_products_of_the_kernel():
    found = list(epilogues.cells([""], epilogues.TOKENS))
    assert len({name for name, _ in found}) == 24
    for _, values in found:
        kernel_named("matmul_epilogue").problem(**values)
    assert [name for name, _ in epilogues.cells(["qkv"], [64])] == ["qwen2_7b qkv 64"]


@pytest.mark.parametrize("layer", ["llama3_8b gate_up", "llama3_8b down", "qwen2_7b qkv"])
def test_every_method_computes_the_same(launches, monkeypatch, layer):
    monkeypatch.setattr(epilogues, "normal", partial(normal, device="cpu"))
    values = {"m": 24, "n": 40, "k": 64, "b_layout": "column", **epilogues.LAYERS[layer][2]}
    given = epilogues.tensors_of(values)
    exact = epilogues.in_torch(**{name: each.double() for name, each in given.items()})
    with ts.configure(compile="wait"):
        methods = epilogues.methods_of(values, given)
        for name in ("served", "own", "eager"):
            assert relative_error(methods[name](), exact) < 5e-3, name


def test_the_last_lines_name_the_mean_and_the_least():
    rows = [{"product": name, "over_served": each, "over_own": ""} for name, each in (("one", 1.0), ("other", 4.0))]
    assert epilogues.conclusion(rows) == ["over_served: 2 products, mean 2.000, least 1.000 (one)"]
