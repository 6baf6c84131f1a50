"""The study of batch invariance, on a CPU: what it computes, and that it notices bits that depend on the batch."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

import tiledsched as ts
from docs.studies.batch_invariance import PROBED, Case, Found, numbers_of, prove, rates, summary

ROWS = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))


def case(function, **more):
    return Case(
        name="rows", rows=100, function=function, tensors=lambda first, rows: (ROWS[first : first + rows],), **more
    )


def test_processes_share_out_all_numbers_of_rows():
    shared = [numbers_of(case(torch.exp), process, 7) for process in range(7)]
    assert set().union(*shared) == set(range(1, 101))
    assert set.intersection(*map(set, shared)) == {each for each in PROBED if each <= 100}
    assert numbers_of(case(torch.exp, least=2), 0, 1) == list(range(2, 101))


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (torch.exp, []),
        (lambda x: x + (len(x) == 17), [17]),
        (lambda x: torch.cat([x[:-1], x[-1:] * (1 if len(x) < 64 else 1 + 2**-23)]), [64, 65]),
    ],
    ids=["equal", "one number of rows", "the last row from 64 on"],
)
def test_rows_with_other_bits_are_found(function, wrong):
    whole = partial(case(function).part, torch.exp)
    found = list(prove(case(function), 0, 100, modes=("eager",)))
    assert [each.unequal for each in found] == [wrong]
    assert whole(3, 5).dtype == torch.uint8


def test_sdpa_serves_decoding_and_chunks_in_one_order_each(launches):
    """As on a GPU, but for the launch, which runs the kernel in the interpreter; 700 keys take two shares or more."""
    q, k, v = (torch.randn(4, heads, 700, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    decoding = Case(
        name="decoding",
        rows=4,
        function=ts.sdpa,
        tensors=lambda first, rows: (q[first : first + rows, :, :1], *(each[first : first + rows] for each in (k, v))),
    )
    chunks = Case(
        name="chunks",
        rows=40,
        least=2,
        function=partial(ts.sdpa, causal="bottom_right"),
        tensors=lambda first, rows: (q[:1, :, first : first + rows], *(each[:1, :, : first + rows] for each in (k, v))),
        rows_of=lambda out: out[0].transpose(0, 1),
    )
    with ts.batch_invariant():
        found = [each for case in (decoding, chunks) for each in prove(case, 0, 20, modes=("eager",))]
    assert [each.unequal for each in found] == [[], []]
    grids = {grid[0] for _, grid, _, _ in launches[:2]}
    assert max(grids) > 4 * 2  # more blocks than sequences and heads: keys are shared


def test_the_summary_counts_what_is_equal_and_tells_processes_apart():
    def of(process, unequal=(), digest="a", mode="eager"):
        return Found(
            case="c", mode=mode, process=process, digest=digest, numbers=[1, 2 + process], unequal=list(unequal)
        )

    lines, right = summary([of(0), of(1)])
    assert right
    assert "2 of 2 processes, 3 numbers of rows, 4 calls, 1 digest" in lines[0]
    assert not summary([of(0), of(1, unequal=[3])])[1]
    assert "unequal: [3]" in summary([of(1, unequal=[3])])[0][0]
    assert not summary([of(0), of(1, digest="b")])[1]
    assert not summary([])[1]


def test_rates_are_geometric_means_with_the_least():
    rows = [
        {"case": f"matmul {name}", "rows": 1, "of_any": ratio, "of_torch": ratio / 2}
        for name, ratio in (("a", 2.0), ("b", 0.5))
    ]
    assert rates(rows) == [
        "matmul against torch: 0.500 of its speed in 2 cases, least 0.250 (matmul b, 1)",
        "matmul against any: 1.000 of its speed in 2 cases, least 0.500 (matmul b, 1)",
    ]
