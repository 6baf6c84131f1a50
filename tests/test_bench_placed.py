"""Packed sequences and keys in pages beside rivals, without a GPU: every method, what is raced, and what serves."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from functools import partial

import numpy
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo.utils")  # before anything of torch is replaced
from fake_rivals import FLASH_CALLS, OUT, flash, install_flash_4
from serve_on_cpu import TOLERANCE, capturing
from test_bench_harness import cell, cuda  # noqa: F401
from test_rivals import a_rival, an_entry
from test_rivals_timed import process  # noqa: F401

from tiledsched.checking.inputs import make_cases
from tiledsched.core.errors import LaunchError, UnsupportedError
from tiledsched.core.rivals import call_on
from tiledsched.kernels.attention import Attention, backends
from tiledsched.kernels.attention.inputs import places
from tiledsched.measure.arrays import ProblemArrays
from tiledsched.ops import plans, sdpa
from tiledsched.ops.bench import methods_of
from tiledsched.ops.varlen import sdpa_paged, sdpa_varlen
from tiledsched.rivals.bench import details
from tiledsched.rivals.methods import OURS, SERVED, as_tensors, case_error, make_case
from tiledsched.serve.lookup import LookupTable

METHODS = methods_of(Attention)
FLASH_4, VARLEN = backends.FLASH_4, backends.TORCH_VARLEN


def problem(**more):
    values = {"seq_q": 60, "seq_k": 60, "head_dim": 16, "heads": 4, "kv_heads": 2, "dtype": "float16"}
    return Attention.problem(**{**values, **more})


def paged(**more):
    return problem(
        **{
            "seq_q": 1,
            "seq_k": 96,
            "batch": 3,
            "page": 16,
            "lengths": True,
            "causal": True,
            "alignment": "bottom_right",
            **more,
        }
    )


PACKED = [
    problem(packed=4),
    problem(packed=4, causal=True),
    problem(packed=3, seq_k=90, causal=True, alignment="bottom_right", window=9),
]
ODD = problem(packed=3, seq_k=90, causal=True, alignment="bottom_right", window=20, sinks=True, softcap=True)
PAGED = [paged(), paged(seq_q=40, batch=1, page=32), paged(seq_q=5, causal=False, alignment="top_left", sinks=True)]
MIXED = paged(seq_q=48, batch=1, packed=3)
TOP_LEFT = problem(packed=3, seq_k=90, causal=True)
EVERY = [*PACKED, ODD, *PAGED, MIXED]


def varlen(
    q, k, v, cu_q, cu_k, most_q, most_k, dropout, causal, mask, *, scale, window_size_left=None, window_size_right=None
):
    """torch's operator."""
    assert (dropout, mask) == (0.0, False)
    return flash(
        q, k, v, cu_q, cu_k, None, most_q, most_k, None, scale, causal, None, window_size_left, window_size_right
    )


@pytest.fixture
def others(monkeypatch):
    """FlashAttention-4, torch's operator, and flex attention as they would be on a GPU."""
    from torch.nn.attention import flex_attention as flex

    install_flash_4(monkeypatch, _flash_attn_fwd=flash)
    monkeypatch.setattr(backends, "torch_operator", lambda name: varlen)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *given: None)
    monkeypatch.setattr(flex, "create_block_mask", partial(flex.create_block_mask, _compile=False))


def ran(p, names):
    """What each method says of itself, called once: its error over all of its output, or why it takes no part."""
    cupy, said = sys.modules["cupy"], {}
    case = make_case(torch, cupy, p)
    assert case.compared == f"{p.sequences * 4}/{p.sequences * 4}"
    for name in names:
        try:
            said[name] = case_error(cupy, case, METHODS[name].make(case.arrays)()).relative
        except UnsupportedError as error:
            said[name] = str(error)
    return said, case


@pytest.mark.parametrize("p", EVERY, ids=str)
def test_every_method_computes_it_or_refuses_in_a_line(cuda, launches, others, p) -> None:  # noqa: F811
    said, case = ran(p, [name for name in METHODS if name != "matmul"])
    right = {name: said.pop(name) for name in (OURS, SERVED, FLASH_4)}
    if p in PACKED:
        right[VARLEN] = said.pop(VARLEN)
    if not p.page:
        right["torch_flex"] = said.pop("torch_flex")
    assert all(0 < error < 2e-3 for error in right.values()), right
    assert said.pop("torch_flex", "").startswith("it reads no pages" if p.page else "")
    assert said.pop(VARLEN, "torch's varlen").startswith("torch's varlen")
    assert set(said.values()) == {"it knows no packed sequences, and no pages"}
    assert len(launches) == 3  # ours is launched once to be ready
    assert len(plans.cache.plans) == 1  # what is served is the plan that is called ours
    said = details(METHODS[OURS], case.arrays, verify=False, captured=False)
    assert said["schedule"]
    assert said["provenance"] in ("default", "modelled", "transferred")


@pytest.mark.parametrize("p", [PACKED[1], PAGED[0]], ids=str)
def test_rows_lie_before_heads_and_nothing_is_copied(cuda, others, p) -> None:  # noqa: F811
    arrays = make_case(torch, sys.modules["cupy"], p).arrays
    METHODS[FLASH_4].make(arrays)()
    q, k = arrays.tensors[:2]
    assert q[0].transpose(0, 1).is_contiguous()
    assert k.transpose(1, 2).is_contiguous()
    longest = int(arrays.tensors[3].diff().max()) if p.packed else None
    assert FLASH_CALLS[0] == (longest, longest, q.data_ptr(), k.data_ptr())


def test_masks_at_the_top_left_of_what_is_packed_apart_are_ours_and_flex_attention_s(cuda, launches, others) -> None:  # noqa: F811
    said, _ = ran(TOP_LEFT, (OURS, SERVED, "torch_flex", FLASH_4, VARLEN))
    assert all(said[name] < 1e-3 for name in (OURS, SERVED, "torch_flex"))
    assert said[FLASH_4] == "FlashAttention-4 aligns the mask at the bottom right"
    assert said[VARLEN] == "torch's varlen attention aligns the mask at the bottom right"


def test_what_was_wrong_in_one_sequence_is_seen(cuda, launches, others, monkeypatch) -> None:  # noqa: F811
    def unaware(q, k, v, cu_q, *more, **named):
        whole = torch.tensor([0, len(q)], dtype=torch.int32)
        return varlen(q, k, v, whole, whole, *more[1:], **named)

    monkeypatch.setattr(backends, "torch_operator", lambda name: unaware)
    rows = cell([METHODS[VARLEN]], problem=PACKED[1])
    assert rows[VARLEN].status.startswith("wrong result: relative error")


# What is raced


def test_rivals_are_those_that_know_it(others) -> None:
    assert [set(backends.raced(each)) for each in PACKED] == [{VARLEN, FLASH_4}] * 3
    assert [set(backends.raced(each)) for each in (ODD, *PAGED, MIXED)] == [{FLASH_4}] * 5
    for each in (TOP_LEFT, PACKED[0].replace(lse=True), paged(seq_q=40, alignment="top_left")):
        assert not backends.raced(each), each


def test_an_older_flash_attention_4_that_knows_no_pages_refuses_them(others, monkeypatch) -> None:
    def older(q, k, v, seqused_k=None, softmax_scale=None, causal=False, cu_seqlens_q=None, cu_seqlens_k=None): ...

    monkeypatch.delattr(sys.modules["flash_attn.cute.interface"], "_flash_attn_fwd")
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", older, raising=False)
    with pytest.raises(UnsupportedError, match="does not take page_table"):
        backends.flash_attention_4(PAGED[0])
    assert FLASH_4 in backends.raced(PACKED[0])


def test_torchs_operator_is_called_by_its_schema(monkeypatch) -> None:
    """It runs on GPUs only: here the arguments must be what torch's schema says."""
    schema = [each.name for each in backends.torch_operator("_flash_attention_forward")._schema.arguments]
    called = []
    monkeypatch.setattr(
        backends, "torch_operator", lambda name: lambda *a, **k: called.append((a, k)) or [torch.zeros(60, 4, 16)]
    )
    q, offsets = torch.zeros(1, 4, 60, 16), torch.tensor([0, 20, 60])
    for p in (PACKED[1].replace(packed=2), PACKED[1].replace(packed=2, window=5, window_right=2)):
        backends.torch_varlen(p, 0.3).bind(q, q, q, offsets, offsets)()
    plain, window = ({**dict(zip(schema, given, strict=False)), **named} for given, named in called)
    assert set(plain) | set(window) <= set(schema)
    assert (plain["max_q"], plain["max_k"], plain["is_causal"], plain["scale"]) == (40, 40, True, 0.3)
    assert (window["is_causal"], window["window_size_left"], window["window_size_right"]) == (False, 4, 2)
    assert (plain["dropout_p"], plain["return_debug_mask"]) == (0.0, False)
    assert plain["cum_seq_q"] is offsets


@pytest.mark.parametrize("p", [PACKED[1], PACKED[2].replace(packed=5), PAGED[0], MIXED], ids=str)
def test_the_inputs_that_bring_out_mistakes_hold_empty_sequences_and_rivals_are_right_on_them(others, p) -> None:
    cases = ProblemArrays(Attention, numpy, p, list(make_cases(Attention, numpy, numpy.random.default_rng(0), p))).cases
    odd = cases[1].inputs
    assert 0 in (odd["Lengths"] if p.page else numpy.diff(odd["CuQ"]))
    for name, function in backends.raced(p).items():
        for case in cases:
            out = call_on(function, as_tensors(torch, p, case.inputs))()
            torch.testing.assert_close(out.double().numpy(), case.expected[0], rtol=1e-2, atol=0.05, msg=name)


def test_rows_and_keys_are_packed_apart_where_that_can_be() -> None:
    both = [
        places(numpy.random.default_rng(0), each, uneven=True)
        for each in (problem(packed=4, causal=True), problem(packed=4, causal=True, alignment="bottom_right"))
    ]
    assert [(each["CuQ"] == each["CuK"]).all() for each in both] == [True, False]
    for batch, last in ((1, [96]), (2, [96, 0]), (4, [1, 0])):
        lengths = places(numpy.random.default_rng(0), paged(batch=batch), uneven=True)["Lengths"]
        assert lengths.tolist()[-2:] == last


def test_a_rival_that_looks_at_values_is_bound_before_it_is_timed_and_checked_on_every_case(process) -> None:  # noqa: F811
    class Bound:
        def __init__(self, wrong_at=-1) -> None:
            self.bound, self.wrong_at = 0, wrong_at

        def __call__(self, *given):
            raise AssertionError("it is called as bound")

        def bind(self, X, Y):
            self.bound += 1
            return lambda turn=self.bound: X - Y if turn == self.wrong_at else X + Y

    right, wrong = Bound(), Bound(wrong_at=2)
    times = {each.name: each for each in process.race({"right": right, "wrong": wrong})}
    assert (times["right"].failure, right.bound) == ("", len(process.state.arrays.cases))
    assert len(process.state.arrays.cases) > 1
    assert times["wrong"].failure.startswith("wrong result: ")


# What serves


@pytest.fixture
def faster():
    """The rival that was."""
    return FLASH_4


@pytest.fixture
def served(launches, others, faster):
    """The public functions where a rival was measured to be faster on whatever problem."""

    class WithRival(LookupTable):
        def resolve(self, problem, *given):
            measured = an_entry(problem, (a_rival(name=faster),)).replace(device_name="NVIDIA H200")
            offers = LookupTable([measured], Attention, rivals=True).resolve(problem, *given).rivals
            return dataclasses.replace(super().resolve(problem, *given), rivals=offers)

    launches.runtime.load_table = lambda settings, **given: WithRival([], Attention, rivals=True)
    sdpa.reload()
    return launches


def tensors(rows=60, keys=60):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(count, heads, 16, generator=generator).half() for count, heads in ((rows, 4), (keys, 2), (keys, 2))
    ]


OFFSETS = torch.tensor([0, 17, 17, 60])


@pytest.mark.parametrize("faster", [FLASH_4, VARLEN])
def test_packed_calls_are_handed_on_with_the_longest_that_the_caller_names(served) -> None:
    q, k, v = tensors()
    for offsets in (OFFSETS.int(), OFFSETS):
        out = sdpa_varlen(q, k, v, offsets, None, 43, causal=True)
        assert FLASH_CALLS[-1] == (43, 43, q.data_ptr(), k.data_ptr())
        assert out.is_contiguous()
        assert out.data_ptr() == OUT[-1]  # no copy
    assert served == []
    own = sdpa_varlen(q, k, v, OFFSETS.int(), causal=True)  # nobody says how long: ours
    assert (len(served), len(FLASH_CALLS)) == (1, 2)
    torch.testing.assert_close(out, own, **TOLERANCE[torch.float16])
    assert len(plans.cache.plans) == 1


def test_whoever_packs_rows_and_keys_apart_gets_the_mask_that_is_asked_for(served) -> None:
    q, k, v = tensors()
    apart = torch.tensor([0, 30, 40, 60]).int()
    sdpa_varlen(q, k, v, OFFSETS.int(), apart, 43, 30, causal="top_left")
    assert (len(served), len(FLASH_CALLS)) == (1, 0)  # FlashAttention-4's diagonal ends at each sequence's last key
    out = sdpa_varlen(q, k, v, OFFSETS.int(), apart, 43, 30, causal=True)
    assert len(FLASH_CALLS) == 1
    own = sdpa_varlen(q, k, v, OFFSETS.int(), apart, causal=True)
    torch.testing.assert_close(out, own, **TOLERANCE[torch.float16])
    sdpa_varlen(q, k, v, OFFSETS.int(), OFFSETS.int()[:], 43, 43, causal="top_left")
    assert len(FLASH_CALLS) == 1  # equal, but who knows


def test_pages_are_handed_on(served) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, 2, 4, 16, generator=generator).half()
    k, v = (torch.randn(20, 16, 2, 16, generator=generator).half() for _ in range(2))
    table, lengths = torch.randperm(20, generator=generator)[:18].reshape(3, 6), torch.tensor([90, 0, 17])
    out = sdpa_paged(q, k, v, table, lengths)
    assert [(None, None, q.data_ptr(), k.data_ptr())] == FLASH_CALLS
    assert served == []
    assert out.is_contiguous()
    assert not out[1].any()
    mixed = sdpa_varlen(
        q.flatten(0, 1), k, v, torch.tensor([0, 2, 4, 6]), None, 2, causal=True, block_table=table, seqused_k=lengths
    )
    assert FLASH_CALLS[1][:2] == (2, 96)
    torch.testing.assert_close(mixed.reshape(out.shape), out, **TOLERANCE[torch.float16])


def test_a_graph_holds_a_rival_only_once_it_has_run(served) -> None:
    """Its first call compiles; that may come long after the first call of the plan, which nobody told how long sequences are."""
    q, k, v = tensors()
    calls = [
        (contextlib.nullcontext, (), (1, 0)),
        (capturing, (None, 43), (2, 0)),
        (contextlib.nullcontext, (None, 43), (2, 1)),
        (capturing, (None, 43), (2, 2)),
    ]
    for where, longest, ours_and_theirs in calls:
        with where():
            sdpa_varlen(q, k, v, OFFSETS.int(), *longest, causal=True)
        assert (len(served), len(FLASH_CALLS)) == ours_and_theirs
    sdpa.reload()
    with capturing(), pytest.raises(LaunchError, match="call sdpa once"):
        sdpa_varlen(q, k, v, OFFSETS.int(), causal="top_left", window=9)  # none has run


def test_the_suite_is_posed_as_the_public_functions_pose_it() -> None:
    suite = Attention.suite("serving")
    assert all(each.is_varlen for each in suite)
    assert {each.page for each in suite} == {0, 16, 64}
    for each in suite:
        assert each.page == 0 or each.causal is (each.seq_q > 1)  # a single row at the end of its keys sees all of them
        assert each.alignment == ("bottom_right" if each.page and each.causal else "top_left")
