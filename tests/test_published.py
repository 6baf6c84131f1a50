"""Rivals by published times: where nothing was measured, a backend of torch may serve that others found to be faster."""

from __future__ import annotations

import pytest
from test_rivals import a_rival, an_entry

from tiledsched.core import data_files
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.published import expected_us, published_device
from tiledsched.serve.explain import explain_problem
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.exchange import read_table
from tiledsched.store.manifest import published_figures

GB10 = "NVIDIA GB10"
H100 = "NVIDIA H100 80GB HBM3"


def a_problem(seq_len=4096, head_dim=64, **more):
    given = {"batch": 1, "heads": 8, "kv_heads": 8, "seq_q": seq_len, "seq_k": seq_len, "head_dim": head_dim}
    return Attention.problem(**{**given, **more})


def shipped(arch):
    return read_table(data_files.tuning_db() / "tables" / "attention" / f"{arch}.json").entries


@pytest.fixture(scope="module")
def table():
    return LookupTable(shipped("sm_121"), Attention, rivals=True)


def offered(table, problem, arch="sm_121", name=GB10):
    return [each.name for each in table.resolve(problem, arch, name).rivals]


def test_an_untuned_problem_goes_to_the_backend_that_published_times_let_expect(table):
    served = table.resolve(a_problem(), "sm_121", GB10)
    (offer,) = served.rivals
    assert (served.provenance, offer.name, offer.only_captured) == ("modelled", "torch_flash", False)
    assert offer.ratio < 1 / 1.1
    said = str(explain_problem(table, a_problem(), "sm_121", GB10)).splitlines()
    (line,) = (line for line in said if line.startswith("  rival "))
    assert "by published times" in line
    assert "ours is modelled at" in line
    assert "TiledAttention" in line
    assert offered(table, a_problem(), name="") == ["torch_flash"]  # an arch stands for its GPU


def test_rivals_that_are_off_are_not_expected_either():
    assert offered(LookupTable(shipped("sm_121"), Attention), a_problem()) == []


@pytest.mark.parametrize(("heads", "rival"), [(128, ["torch_cudnn"]), (32, [])], ids=["gains 1 ms", "gains less"])
def test_what_plans_each_problem_anew_must_gain_enough_in_each_call(heads, rival):
    table = LookupTable(shipped("sm_103"), Attention, rivals=True)
    problem = a_problem(8192, 128, heads=2 * heads, kv_heads=8, causal=True, dtype="bfloat16")
    assert offered(table, problem, "sm_103", "NVIDIA GB300") == rival


@pytest.mark.parametrize(
    ("problem", "arch", "name"),
    [
        (a_problem(head_dim=128), "sm_121", GB10),  # level: within the margin
        (a_problem(512), "sm_121", GB10),  # half of each published time is the host's
        (a_problem(head_dim=256), "sm_121", GB10),  # nothing was published
        (a_problem(seq_q=1), "sm_121", GB10),
        (a_problem(causal=True, window=128), "sm_121", GB10),
        (a_problem(lse=True), "sm_121", GB10),  # no rival returns it
        (a_problem(), "sm_121", "NVIDIA GB20"),
        (a_problem(seq_len=16384, head_dim=128), "sm_120", "NVIDIA GeForce RTX 5090 Laptop GPU"),
    ],
    ids=str,
)
def test_what_was_not_published_or_is_not_faster_beyond_the_margin_is_not_offered(table, problem, arch, name):
    tables = {"sm_121": table}
    assert offered(tables.get(arch) or LookupTable(shipped(arch), Attention, rivals=True), problem, arch, name) == []


@pytest.mark.parametrize("rivals", [(a_rival(1.5),), ()], ids=["timed and slower", "none timed"])
def test_where_something_near_was_measured_that_decides(rivals):
    known = an_entry(a_problem(seq_len=4032), rivals).replace(arch="sm_121", device_name=GB10)
    served = LookupTable([*shipped("sm_121"), known], Attention, rivals=True).resolve(a_problem(), "sm_121", GB10)
    assert (served.provenance, served.rivals) == ("transferred", ())


def test_nothing_changes_where_measured_evidence_serves():
    measured = LookupTable(shipped("sm_90"), Attention, rivals=True)
    for head_dim in (64, 128, 256):
        for seq_len in (512, 3000, 16384):
            problem = a_problem(seq_len, head_dim, heads=2048 // head_dim)
            assert published_device(problem, H100, published_figures("attention")) is not None
            served = measured.resolve(problem, "sm_90", H100)
            assert served.provenance in ("measured", "transferred")
            assert all("published" not in each.reason for each in served.rivals)


CELLS = [
    ["torch_flash", "full", 64, 1024, 8, 100.0],
    ["torch_flash", "full", 64, 4096, 8, 800.0],
    ["torch_flash", "full", 128, 4096, 8, 1500.0],
]


@pytest.mark.parametrize(
    ("problem", "us"),
    [
        (a_problem(1024), 100),
        (a_problem(2048), 800 / 3),  # at the mean of the two rates, of which one is twice the other
        (a_problem(8192), 4 * 800),  # at the rate of the longest
        (a_problem(4096, heads=32, kv_heads=8), 4 * 800),
        (a_problem(4096, heads=6, kv_heads=6), 600),  # 48 SMs are full of 24,576 rows
        (a_problem(4096, heads=2, kv_heads=2), 600),  # and no faster with fewer
        (a_problem(4096, heads=1, kv_heads=1), 600),
        (a_problem(1024, heads=1, kv_heads=1), 100),
        (a_problem(4096, head_dim=72), 1500),  # padded
        (a_problem(512), None),
        (a_problem(4096, head_dim=160), None),
        (a_problem(4096, causal=True), None),
    ],
    ids=str,
)
def test_expected_times_follow_the_published_ones(problem, us):
    assert expected_us(problem, "torch_flash", CELLS, 48) == (us and pytest.approx(us))


def test_every_gpu_names_its_source_and_its_times_are_times():
    for device in published_figures("attention").values():
        assert device["source"]
        assert 0 < device["margin"] < 1
        assert all(
            us > 3 * device["host_us"] and mask in ("full", "causal") for _, mask, _, _, _, us in device["times"]
        )
    assert {"GB10", "B200", "H100", "RTX PRO 6000"} <= set(published_figures("attention"))
