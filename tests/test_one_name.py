"""Problems that are equal by definition are one problem, with one id and one entry; all others are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiledsched as ts
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.reference import attention_and_lse
from tiledsched.kernels.matmul import Matmul

MASKS = st.one_of(
    st.just({}),
    st.builds(
        dict,
        causal=st.just(True),
        alignment=st.sampled_from(("top_left", "bottom_right")),
        window=st.integers(0, 9),
        window_right=st.integers(0, 9),
    ),
)
FEATURES = st.fixed_dictionaries(
    {}, optional={"softcap": st.booleans(), "sinks": st.booleans(), "lengths": st.booleans(), "lse": st.booleans()}
)
SIZES = st.integers(1, 7)


def seen(rows: int, keys: int, mask: dict) -> np.ndarray:
    """Which keys each row sees, by the words of the declaration."""
    offset = keys - rows if mask.get("alignment") == "bottom_right" else 0
    i, j = np.arange(rows)[:, None] + offset, np.arange(keys)[None]
    visible = np.full((rows, keys), True) if not mask else j <= i + mask["window_right"]
    return visible & (j > i - mask["window"]) if mask.get("window") else visible


def output(rows: int, keys: int, mask: dict) -> np.ndarray:
    """The output of the reference under a mask, from the same inputs."""
    rng = np.random.default_rng(rows * 10 + keys)
    q, k, v = (rng.standard_normal((1, 1, length, 4)) for length in (rows, keys, keys))
    return attention_and_lse(np, q, k, v, scale=0.5, **({"causal": False} | mask))[0]


@settings(max_examples=150)
@given(rows=SIZES, keys=SIZES, one=MASKS, other=MASKS, more=FEATURES)
def test_masks_that_hide_the_same_are_one_problem(rows, keys, one, other, more) -> None:
    sizes = {"seq_q": rows, "seq_k": keys, "head_dim": 16, **more}
    first, second = (Attention.problem(**sizes, **mask) for mask in (one, other))
    same = bool((seen(rows, keys, one) == seen(rows, keys, other)).all())
    assert (first == second) is (first.id == second.id) is same
    stored = {name: first.values[name] for name in ("causal", "alignment", "window", "window_right")}
    said = stored if first.causal else {}
    assert (seen(rows, keys, said) == seen(rows, keys, one)).all()
    np.testing.assert_array_equal(output(rows, keys, stored), output(rows, keys, one))
    assert Attention.problem(**first.values) == first


@given(rows=SIZES, keys=SIZES, mask=MASKS, varlen=st.sampled_from(({"packed": 2}, {"lengths": True, "page": 16})))
def test_of_packed_sequences_and_pages_a_mask_goes_that_hides_nothing_of_any(rows, keys, mask, varlen) -> None:
    keys = 16 if "page" in varlen else keys
    problem = Attention.problem(seq_q=rows, seq_k=keys, head_dim=16, **varlen, **mask)
    shortest = {"page": (rows, range(1, keys + 1))}.get("page" if "page" in varlen else "", (None, range(1, keys + 1)))
    for its_rows in [rows] if shortest[0] else range(1, rows + 1):
        for its_keys in shortest[1]:
            said = (
                {name: problem.values[name] for name in ("alignment", "window", "window_right")}
                if problem.causal
                else {}
            )
            assert (seen(its_rows, its_keys, said) == seen(its_rows, its_keys, mask)).all()


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ({"value_dim": 64}, {}),
        ({"heads": 8, "kv_heads": 8, "softcap": False, "window": 0}, {"heads": 8, "kv_heads": 8}),
        ({"seq_q": 1, "causal": True, "alignment": "bottom_right"}, {"seq_q": 1}),
        ({"seq_q": 1, "causal": True, "alignment": "bottom_right", "lengths": True}, {"seq_q": 1, "lengths": True}),
        ({"seq_k": 1, "causal": True}, {"seq_k": 1}),
        ({"causal": True, "alignment": "bottom_right"}, {"causal": True}),
        ({"seq_q": 1, "packed": 1, "causal": True, "alignment": "bottom_right"}, {"seq_q": 1, "packed": 1}),
        (
            {"seq_q": 1, "page": 32, "lengths": True, "causal": True, "alignment": "bottom_right", "window": 96},
            {"seq_q": 1, "page": 32, "lengths": True},
        ),
    ],
    ids=str,
)
def test_each_restatement_is_one_problem(said, means) -> None:
    sizes = {"seq_q": 96, "seq_k": 96, "head_dim": 64}
    assert Attention.problem(**{**sizes, **said}) == Attention.problem(**{**sizes, **means})


@given(m=st.integers(1, 3), n=st.integers(1, 3), k=st.integers(1, 3))
def test_a_vector_has_one_layout(m, n, k) -> None:
    layouts = [(a, b) for a in ("row", "column") for b in ("row", "column")]
    problems = [Matmul.problem(m=m, n=n, k=k, a_layout=a, b_layout=b) for a, b in layouts]
    assert len(set(problems)) == (1 if 1 in (m, k) else 2) * (1 if 1 in (k, n) else 2)
    for problem in problems:
        for spec, (rows, columns) in zip(Matmul.arrays(problem), ((m, k), (k, n)), strict=False):
            assert spec.column is (columns == 1 < rows) or 1 not in (rows, columns)


def test_the_operator_launches_the_problem_of_a_vector_on_tensors_of_any_strides(launches) -> None:
    """A weight of one row, transposed, and a column: the same numbers in the same places of memory."""
    torch = pytest.importorskip("torch")
    matmul = ts.op("tiledsched_tests::vector", Matmul)
    a, b = torch.randn(70, 40).bfloat16(), torch.randn(40, 1).bfloat16()
    strided = torch.randn(40, 3).bfloat16()[:, :1]
    for each in (b, b.as_strided((40, 1), (1, 40)), strided):
        wanted = (a.float() @ each.float()).bfloat16()
        torch.testing.assert_close(matmul.own(a, each), wanted, rtol=2e-2, atol=2e-2)
    assert matmul.plan_for(a, b).problem == matmul.plan_for(a, strided).problem
    assert [arguments[1].stride() for _, _, _, arguments in launches] == [(1, 40), (1, 40), (3, 1)]


def test_what_only_the_device_knows_is_a_problem_of_its_own() -> None:
    """The length of one packed sequence, and which page holds a sequence's keys."""
    plain = Attention.problem(seq_q=96, seq_k=96, head_dim=64)
    assert plain.replace(packed=1) != plain
    assert plain.replace(lengths=True, page=96) != plain.replace(lengths=True)
