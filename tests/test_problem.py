"""Problems: canonical, hashable, round-tripping, one name for each, and what a kernel derives of them."""

from __future__ import annotations

import json
import pickle

import numpy
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import tiledsched as ts
from tiledsched.core.errors import ProblemError
from tiledsched.core.problem import Problem
from tiledsched.core.registry import problem_from_json
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.inputs import places
from tiledsched.kernels.attention.problem import two_parts
from tiledsched.kernels.attention.reference import attention_and_lse
from tiledsched.kernels.matmul import Matmul

PLAIN_ID = "2432e659d1c0"
"""Of a plain causal problem: fields that came later are left out at their defaults, so that it holds."""


def problems() -> st.SearchStrategy[Problem]:
    return st.builds(
        lambda kv, group, **rest: Attention.problem(heads=kv * group, kv_heads=kv, **rest),
        kv=st.integers(1, 8),
        group=st.integers(1, 8),
        seq_q=st.integers(1, 5000),
        seq_k=st.integers(1, 5000),
        head_dim=st.integers(1, 256),
        dtype=st.sampled_from(["float16", "bfloat16"]),
        causal=st.booleans(),
        batch=st.integers(1, 64),
    )


@given(problems())
@settings(derandomize=True, deadline=None)
def test_a_problem_round_trips_and_its_id_is_its_value(problem: Problem) -> None:
    again = problem_from_json(problem.to_json())
    assert again == problem
    assert hash(again) == hash(problem)
    assert again.id == problem.id
    assert problem.replace(batch=problem.batch + 1).id != problem.id


def test_ids_are_stable_across_versions() -> None:
    assert Attention.problem(seq_q=128, seq_k=128, head_dim=64).id == "a0df735db6da"


def test_flops_and_bytes() -> None:
    problem = Attention.problem(seq_q=1024, seq_k=1024, head_dim=64, batch=2, heads=4, kv_heads=2)
    assert problem.flops == 4 * 2 * 4 * 1024 * 1024 * 64
    assert problem.replace(causal=True).flops == problem.flops / 2
    assert problem.min_bytes == 2 * (2 * 2 * 4 * 1024 * 64 + 2 * 2 * 2 * 1024 * 64)
    assert problem.tflops(1.0) == pytest.approx(problem.flops / 1e6)


def test_causal_pairs_of_unequal_lengths() -> None:
    wide = Attention.problem(seq_q=100, seq_k=1000, head_dim=64, causal=True)
    tall = Attention.problem(seq_q=1000, seq_k=100, head_dim=64, causal=True)
    assert wide.visible_pairs == 100 * 100 / 2
    assert tall.visible_pairs == 100 * 100 / 2 + 900 * 100


def test_the_standard_problem_fills_16k_tokens() -> None:
    problem = Attention.standard(seq_len=4096, head_dim=128)
    assert (problem.batch, problem.heads, problem.kv_heads) == (4, 16, 16)
    assert Attention.standard(seq_len=32768, head_dim=256).batch == 1
    assert Attention.standard(seq_len=512, head_dim=64, heads=32, kv_heads=8).group == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_q": 0}, "seq_q must be a positive integer"),
        ({"head_dim": 257}, "at most 256"),
        ({"dtype": "float32"}, "float16, bfloat16"),
        ({"heads": 3, "kv_heads": 2}, "multiple of kv_heads"),
        ({"causal": 1}, "true or false"),
        ({"batch": True}, "positive integer"),
        ({"alignment": "middle"}, "alignment must be one of top_left, bottom_right"),
        ({"value_dim": 257}, "value_dim must be at most 256"),
        ({"value_dim": -1}, "value_dim must be an integer of 0 or more, got -1"),
        ({"value_dim": True}, "value_dim"),
        ({"lse": 1}, "lse must be true or false"),
        ({"window": 5}, "window = 5 needs causal"),
        ({"window_right": 5}, "window_right = 5 needs causal"),
        ({"window": -1}, "window must be an integer of 0 or more"),
        ({"packed": 5, "batch": 2}, "lie in a batch of 1"),
        ({"packed": 5, "starts": True}, "starts and lengths are not for"),
        ({"packed": 5, "lengths": True}, "starts and lengths are not for"),
        ({"packed": 5, "page": 16}, "needs lengths"),
        ({"page": 16}, "needs lengths"),
        ({"page": 40, "lengths": True}, "multiple of 16"),
        ({"page": 64, "lengths": True}, "whole pages of 64"),
        ({"page": 16, "lengths": True, "starts": True}, "nor starts for pages"),
    ],
)
def test_wrong_problems_are_refused(change: dict, words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        Attention.problem(**({"seq_q": 16, "seq_k": 16, "head_dim": 64} | change))


def test_fields_that_came_later_leave_ids_as_they_were() -> None:
    plain = Attention.problem(seq_q=128, seq_k=256, head_dim=64, causal=True)
    assert set(plain.to_json()) == {
        "kernel",
        "seq_q",
        "seq_k",
        "head_dim",
        "dtype",
        "causal",
        "batch",
        "heads",
        "kv_heads",
    }
    assert plain.id == PLAIN_ID
    other = plain.replace(alignment="bottom_right", value_dim=32, lse=True)
    assert other.to_json() == plain.to_json() | {"alignment": "bottom_right", "value_dim": 32, "lse": True}
    assert problem_from_json(other.to_json()) == other
    assert len({plain.id, other.id, plain.replace(lse=True).id}) == 3
    assert str(plain) == "B=1 H=1 Sq=128 Sk=256 D=64 float16 causal"
    assert str(other) == "B=1 H=1 Sq=128 Sk=256 D=64/32 float16 causal bottom-right +lse"


def test_one_problem_has_one_name() -> None:
    square = Attention.problem(seq_q=128, seq_k=128, head_dim=64, causal=True)
    assert square.replace(alignment="bottom_right") == square
    assert square.replace(value_dim=64) == square
    full = Attention.problem(seq_q=128, seq_k=256, head_dim=64)
    assert full.replace(alignment="bottom_right") == full
    assert full.replace(causal=True, alignment="bottom_right") != full.replace(causal=True)


def test_work_of_other_problems() -> None:
    """Counted pair by pair, but for the half of a pair that the usual count leaves out on the diagonal."""
    for seq_q, seq_k in ((7, 12), (12, 7), (1, 9), (9, 1), (5, 5)):
        for alignment in ("top_left", "bottom_right"):
            problem = Attention.problem(
                seq_q=seq_q, seq_k=seq_k, head_dim=64, causal=True, alignment=alignment, value_dim=32
            )
            offset = seq_k - seq_q if alignment == "bottom_right" else 0
            pairs = sum(column <= row + offset for row in range(seq_q) for column in range(seq_k))
            assert problem.visible_pairs == pairs - (min(seq_q, seq_k) / 2 if problem.causal else 0)
            assert problem.flops == 2 * problem.visible_pairs * (64 + 32)
    problem = Attention.problem(seq_q=100, seq_k=300, head_dim=64, value_dim=32, heads=4, kv_heads=2)
    assert problem.min_bytes == 2 * (4 * 100 * (64 + 32) + 2 * 300 * (64 + 32))
    assert problem.replace(lse=True).min_bytes == problem.min_bytes + 4 * 4 * 100


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        (1, (16, 0)),
        (16, (16, 0)),
        (17, (32, 0)),
        (40, (32, 16)),
        (64, (64, 0)),
        (72, (64, 16)),
        (80, (64, 16)),
        (96, (64, 32)),
        (120, (128, 0)),
        (128, (128, 0)),
        (160, (128, 32)),
        (192, (128, 64)),
        (256, (256, 0)),
    ],
)
def test_columns_in_two_parts(columns: int, parts: tuple[int, int]) -> None:
    assert two_parts(columns) == parts
    problem = Attention.problem(seq_q=1, seq_k=1, head_dim=columns)
    assert columns <= problem.split_d <= problem.tile_d
    assert problem.split_d == sum(parts)
    assert parts[1] == 0 or parts[0] % parts[1] == 0  # so that the second part starts at a tile's edge


def test_what_32_bits_do_not_reach_is_wide() -> None:
    problem = Attention.problem(seq_q=1 << 15, seq_k=1, head_dim=64, heads=1 << 10)
    assert not problem.replace(heads=(1 << 10) - 1).wide
    assert problem.wide  # 2**31 elements
    assert Attention.problem(seq_q=1, seq_k=1 << 15, head_dim=32, value_dim=64, heads=1 << 10, kv_heads=1 << 10).wide


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"kernel": "attention", "seq_q": 1, "seq_k": 1, "head_dim": 1, "sequence": 3},
            r"unknown problem keys \['sequence'\]; known are \['alignment'",
        ),
        ({"kernel": "attention", "seq_q": 1, "seq_k": 1}, r"attention needs D \(head_dim\)"),
        ({"seq_q": 1, "seq_k": 1, "head_dim": 1}, 'add "kernel"'),
    ],
    ids=["unknown", "missing", "no kernel"],
)
def test_a_problem_from_json_names_the_wrong_key(values, words) -> None:
    with pytest.raises(ProblemError, match=words):
        problem_from_json(values)


def test_a_problem_of_an_unknown_kernel_is_read_as_it_stands() -> None:
    stored = {"kernel": "elsewhere.module:Sort", "rows": 5, "dtype": "int32", "experts": [1, 2]}
    problem = problem_from_json(stored)
    assert not problem.known
    assert (problem.rows, problem.experts, problem.flops, problem.min_bytes) == (5, (1, 2), 0.0, 0)
    assert problem.to_json() == stored
    assert str(problem) == "int32 experts=1,2 rows=5"
    assert problem_from_json(json.loads(json.dumps(stored))) == problem


def test_a_problem_cannot_be_changed_and_says_what_it_has() -> None:
    problem = Attention.problem(seq_q=1, seq_k=1, head_dim=40)
    assert (problem.values["head_dim"], problem.head_dim, problem.tile_d) == (40, 40, 64)
    with pytest.raises(AttributeError, match=r"use problem.replace\(batch=...\)"):
        problem.batch = 2
    with pytest.raises(AttributeError, match="attention has no field 'rows'; it has seq_q"):
        _ = problem.rows
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert sorted([problem.replace(batch=3), problem]) == [problem, problem.replace(batch=3)]


def test_bytes_of_a_padded_batch_are_those_of_what_inputs_draw() -> None:
    p = Attention.problem(seq_q=1, seq_k=400, head_dim=16, heads=2, kv_heads=2, batch=8, lengths=True)
    rng = numpy.random.default_rng(0)
    padding = numpy.mean([p.seq_k - places(rng, p)["Lengths"].mean() for _ in range(1000)])
    whole = sum(each.bytes for each in Attention.arrays(p))
    assert p.min_bytes == pytest.approx(whole - padding * 8 * 2 * 32 * 2, rel=0.005)
    paged = p.replace(page=16, alignment="bottom_right")
    assert whole - p.min_bytes == pytest.approx(
        sum(each.bytes for each in Attention.arrays(paged)) - paged.min_bytes, abs=2
    )
    assert p.replace(batch=1).min_bytes == sum(each.bytes for each in Attention.arrays(p.replace(batch=1)))


# Problems that are equal by definition are one problem, with one id and one entry; all others are not


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
