"""References of an author's own attention on a GPU: the float64 scores that a tile kernel changes there, here in the interpreter."""

from __future__ import annotations

import io
from types import SimpleNamespace

import cuda.tile as ct
import numpy as np
import pytest

import tiledsched as ts
from docs.examples import attention_variants as variants
from tiledsched.interpreter import launches_on_cpu
from tiledsched.kernels.attention import applied
from tiledsched.kernels.attention.variants import drawn_arrays, flex_attention, list_blocks

SLOPED = flex_attention(
    score_mod=variants.alibi, mask_mod=variants.causal, arrays={"slopes": ts.array("heads", dtype="float32")}
)
DOCUMENTS = flex_attention(
    mask_mod=variants.same_document, arrays={"ids": ts.array("batch seq_k", dtype="int32", below=3, sorted=True)}
)
SIZES = {"head_dim": 32, "heads": 2, "batch": 2}


class Module:
    """NumPy under another name, as CuPy is one, with a stream."""

    cuda = SimpleNamespace(get_current_stream=lambda: None)

    def __getattr__(self, name):
        return getattr(np, name)


@pytest.mark.parametrize("kernel", [SLOPED, DOCUMENTS], ids=["sloped", "documents"])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (63, 65), (130, 200)])
def test_the_reference_on_a_gpu_is_the_one_in_numpy(kernel, rows, keys):
    p = kernel.problem(seq_q=rows, seq_k=keys, **SIZES)
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal((2, 2, size, 32)) for name, size in (("Q", rows), ("K", keys), ("V", keys))}
    given |= dict.fromkeys(("Sinks", "Starts", "Lengths"))
    arrays = drawn_arrays(np, rng, p)[1]
    wanted = kernel.reference(np, **given, p=p, **arrays)
    with launches_on_cpu() as launched:
        found = kernel.reference(Module(), **given, p=p, **arrays)
        inputs = kernel.inputs(Module(), np.random.default_rng(1), p)
    assert set(launched) == {"apply_mods"}
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    if p.listed:
        np.testing.assert_array_equal(inputs["Blocks"], kernel.inputs(np, np.random.default_rng(1), p)["Blocks"])


def test_a_mistake_in_its_place_would_be_seen(monkeypatch):
    """A kernel that counts rows from 0 in every chunk gives another result."""
    monkeypatch.setattr("tiledsched.kernels.attention.variants.rows_at_once", lambda keys: 64)
    monkeypatch.setattr(applied, "SOURCE", applied.SOURCE.replace("Scores, b, h, first)", "Scores, b, h, 0 * first)"))
    applied._entry_of.cache_clear()
    with pytest.raises(AssertionError):
        test_the_reference_on_a_gpu_is_the_one_in_numpy(SLOPED, 130, 200)
    applied._entry_of.cache_clear()


@pytest.mark.compiler
def test_it_compiles():
    from cuda.tile.compilation import (
        ArrayConstraint,
        CallingConvention,
        KernelSignature,
        ScalarConstraint,
        export_kernel,
    )

    def array(dtype, ndim):
        plain = {"stride_lower_bound_incl": 0, "alias_groups": (), "may_alias_internally": False}
        return ArrayConstraint(dtype, ndim, index_dtype=ct.int32, base_addr_divisible_by=16, **plain)

    integer = ScalarConstraint(ct.int32)
    arguments = [array(ct.float64, 1), array(ct.float64, 2), integer, integer, integer]
    signature = KernelSignature(arguments, CallingConvention.cutile_python_v2(), symbol="apply_mods")
    for scored in (False, True):
        output = io.BytesIO()
        export_kernel(applied._entry_of(SLOPED, scored), [signature], output, gpu_code="sm_90", output_format="cubin")
        assert output.getvalue().startswith(b"\x7fELF")


def test_lists_of_a_mask():
    visible = np.tril(np.ones((300, 300), bool))[None, None]
    assert list_blocks(np, visible)[0, 0].tolist() == [[1, 1, 0, 0, 0], [1, 2, 1, 0, 0], [1, 3, 2, 1, 0]]
