"""Rivals that serve: what evidence it takes, and what is called, kept and said."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import threading
from contextlib import contextmanager

import pytest
import store_samples
from store_samples import PROBLEM, RIVALS, entry, stored
from test_search_tuner import LANDSCAPES, Recorded, tune

from tiledsched import configure
from tiledsched.core.errors import DatabaseError, LaunchError
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import RivalTime
from tiledsched.serve import rivals as rivals_module
from tiledsched.serve.explain import explain_problem
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.rivals import expected_offers, measured_offers, pays
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import export_table, read_table

GPU = "NVIDIA Sample"
FASTER = RIVALS[0]
SPACE = space_for("sm_90", Attention)


def a_rival(ratio=0.9, **more) -> RivalTime:
    values = {
        "name": "torch_flash",
        "median_us": 100 * ratio,
        "ours_us": 100.0,
        "ratio": ratio,
        "ratio_low": ratio - 0.005,
        "ratio_high": ratio + 0.005,
        "samples": 30,
        "host_us": 20.0,
        "capturable": True,
        "version": "torch 2",
    }
    return RivalTime(**{**values, **more})


def an_entry(problem=PROBLEM, rivals=(FASTER,), **more):
    summary = stored(problem=problem).summary
    return entry(
        "measured",
        problem=problem,
        device_name=GPU,
        regime="burst",
        measurement=summary,
        model_us=None,
        schedule=SPACE.default(problem),
        rivals=rivals,
        **more,
    )


def of(seq_len, **more):
    return Attention.standard(seq_len=seq_len, head_dim=64, batch=8, heads=16, **more)


# Evidence


@pytest.mark.parametrize(
    ("change", "paid"),
    [
        ({}, True),
        ({"ratio_high": 0.9971}, False),  # within what does not matter
        ({"ratio_high": 0.9969}, True),
        ({"ratio_high": 1.02}, False),  # noise
        ({"failure": "RuntimeError: no"}, False),
        ({"median_us": None, "ratio_high": None}, False),
        ({"host_us": 361.0}, False),  # four times its 90 us: calls in a row wait for the host
        ({"host_us": 359.0}, True),
        ({"host_us": 900.0, "ours_us": 901.0}, True),  # ours would take longer still
        ({"name": "flash_attention_4"}, True),
        (
            {"name": "flash_attention_4", "ours_us": 9.9, "median_us": 8.91},
            False,
        ),  # not worth the seconds of its first call
        ({"ours_us": 9.9, "median_us": 8.91}, True),  # torch has its programs
    ],
)
def test_a_rival_pays_where_it_is_faster_beyond_noise_and_its_host_keeps_up(change, paid) -> None:
    assert pays(a_rival(**change), Attention) is paid


def test_the_fastest_is_offered_first_with_what_was_measured() -> None:
    found = measured_offers(
        an_entry(rivals=(a_rival(0.95), a_rival(0.9, name="torch_cudnn"), a_rival(1.1, name="slow"))), "here"
    )
    assert [each.name for each in found] == ["torch_cudnn", "torch_flash"]
    assert (
        found[0].reason
        == "1.11x faster than our kernel on this problem, measured on here (90.0 against 100.0 us, torch 2)"
    )
    assert measured_offers(an_entry(rivals=None), "here") == ()
    late = {"host_us": 500.0, "name": "late"}
    assert measured_offers(an_entry(rivals=(a_rival(0.8, **late, capturable=False),)), "here") == ()
    found = measured_offers(an_entry(rivals=(a_rival(0.9), a_rival(0.8, **late))), "here")
    assert [(each.name, each.only_captured) for each in found] == [("late", True), ("torch_flash", False)]


def test_of_a_problem_that_was_not_measured_near_ones_and_the_expected_loss_decide() -> None:
    equal, near = a_rival(1.0), of(1024)
    asked = of(1280)
    assert expected_offers(asked, [an_entry(near, (a_rival(0.97),))], 0.0)[0].ratio == pytest.approx(0.975)
    assert expected_offers(asked, [an_entry(near, (equal,))], 0.0) == ()
    (offer,) = expected_offers(asked, [an_entry(near, (equal,))], 0.04)
    assert offer.ratio == pytest.approx(1.005 / 1.04)
    assert "by its times on 1 similar problem " in offer.reason
    assert "the 4.0% that our untuned choice is expected to lose" in offer.reason
    # Nearer problems count for more, and all must have been computed.
    both = [an_entry(near, (a_rival(0.9),)), an_entry(of(2048), (a_rival(1.3),))]
    nearer = expected_offers(of(1040), both, 0.5)[0].ratio
    assert nearer < expected_offers(of(1900), both, 0.5)[0].ratio
    assert expected_offers(asked, [an_entry(near, (a_rival(failure="RuntimeError: no"),))], 0.5) == ()
    # Nearer ones that did not race it say nothing, and what plans every new problem serves none.
    others = [an_entry(of(1024 + 128 * step), (a_rival(1.3, name="torch_efficient"),)) for step in range(5)]
    assert [each.name for each in expected_offers(asked, [*others, an_entry(of(2048), (a_rival(0.9),))], 0.0)] == [
        "torch_flash"
    ]
    assert expected_offers(asked, [an_entry(near, (a_rival(0.5, name="torch_cudnn"),))], 0.5) == ()
    late = {"host_us": 500.0}
    assert expected_offers(asked, [an_entry(near, (a_rival(**late, capturable=False),))], 0.5) == ()
    assert expected_offers(asked, [an_entry(near, (a_rival(**late),))], 0.5)[0].only_captured
    assert not offer.only_captured
    assert expected_offers(of(16384), [an_entry(near, (a_rival(0.5),))], 0.5) == ()  # too far to say anything
    assert expected_offers(asked, [an_entry(near, None)], 0.5) == ()
    packed = of(1024).replace(batch=1, packed=8, seq_q=8192, seq_k=8192)  # rivals have functions of their own for these
    assert Attention.similarity.distance(packed, near) < 1
    assert expected_offers(packed, [an_entry(near, (a_rival(0.5),))], 0.5) == ()
    assert expected_offers(packed.replace(packed=7), [an_entry(packed, (a_rival(0.5),))], 0.0)
    narrow = asked.replace(value_dim=asked.head_dim // 2)  # and programs of their own for each width
    assert Attention.similarity.distance(narrow, asked) == 1
    assert expected_offers(narrow, [an_entry(asked, (a_rival(0.5),))], 0.5) == ()


def test_the_table_offers_rivals_only_where_they_may_serve() -> None:
    known = [an_entry()]
    here = LookupTable(known, Attention, rivals=True).resolve(PROBLEM, "sm_90", GPU)
    assert [each.name for each in here.rivals] == ["flash_attention_4"]
    assert here.provenance == "measured"
    assert LookupTable(known, Attention).resolve(PROBLEM, "sm_90", GPU).rivals == ()
    elsewhere = LookupTable(known, Attention, rivals=True).resolve(PROBLEM, "sm_90", "Another GPU")
    assert "expected to be 1.10x faster" in elsewhere.rivals[0].reason
    untuned = LookupTable(known, Attention, rivals=True).resolve(PROBLEM.replace(batch=PROBLEM.batch + 1), "sm_90", GPU)
    assert untuned.provenance == "transferred"
    assert [each.name for each in untuned.rivals] == ["flash_attention_4"]
    beside = PROBLEM.replace(dtype="bfloat16" if PROBLEM.dtype == "float16" else "float16")
    unraced = LookupTable([*known, an_entry(beside, None)], Attention, rivals=True).resolve(beside, "sm_90", GPU)
    assert (unraced.provenance, [each.name for each in unraced.rivals]) == ("measured", ["flash_attention_4"])
    torch_alone = an_entry(beside, (a_rival(1.1),))  # tuned where that one was not installed
    partly = LookupTable([*known, torch_alone], Attention, rivals=True).resolve(beside, "sm_90", GPU)
    assert [each.name for each in partly.rivals] == ["flash_attention_4"]
    assert "by its times on 1 similar problem " in unraced.rivals[0].reason
    lost = an_entry(beside, (a_rival(1.2, name="flash_attention_4"),))  # its own evidence goes before that of its like
    assert LookupTable([*known, lost], Attention, rivals=True).resolve(beside, "sm_90", GPU).rivals == ()
    forced = LookupTable(known, Attention, rivals=True, forced={"tile_n": 32}).resolve(PROBLEM, "sm_90", GPU)
    assert forced.rivals == ()  # who forces knobs wants to see them
    text = str(explain_problem(LookupTable(known, Attention, rivals=True), PROBLEM, "sm_90", GPU))
    assert "rival       flash_attention_4, where it is installed: 1.11x faster than our kernel on this problem" in text
    raced = "raced       flash_attention_4 90.0 us (0.90x ours, host 340 us); torch_flash RuntimeError: No available kernel."
    assert raced in str(explain_problem(LookupTable([an_entry(rivals=RIVALS)], Attention), PROBLEM, "sm_90", GPU))


# The store


def test_rivals_come_through_files_merges_and_checks(tmp_path) -> None:
    with TuningDB.open(tmp_path / "one.db") as db:
        store_samples.fill(db)
        export_table(db, tmp_path / "table.json")
        (measured,) = db.entries(provenance="measured")
        assert measured.rivals == RIVALS
        (other,) = db.entries(provenance="modelled")
        assert other.rivals is None
    table = read_table(tmp_path / "table.json")
    assert {each.rivals for each in table.entries} == {RIVALS, None}
    text = json.loads((tmp_path / "table.json").read_text())
    assert sum("rivals" in each for each in text["entries"]) == 1  # not said where there are none
    with TuningDB.open(tmp_path / "two.db") as db:
        db.merge(table.measurements, table.entries, table.artifacts)
        assert db.check() == []
        assert db.entries(provenance="measured")[0].rivals == RIVALS
        export_table(db, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "table.json").read_bytes()
    connection = sqlite3.connect(tmp_path / "two.db")
    connection.execute('UPDATE entries SET rivals = \'[{"name": "x y"}]\' WHERE rivals IS NOT NULL')
    connection.commit()
    connection.close()
    with TuningDB.open(tmp_path / "two.db") as db:
        assert any("its rivals cannot be read" in line for line in db.check())
        with pytest.raises(DatabaseError, match="rivals"):
            db.entries()


# A tune


def test_a_tune_keeps_what_rivals_took_beside_the_winner(tmp_path) -> None:
    recorded, raced = Recorded(LANDSCAPES[4]), []

    def race(problem, candidate):
        raced.append((problem, candidate))
        return [FASTER]

    with TuningDB.open(tmp_path / "tuning.db") as db:
        result = tune(recorded, db, effort="quick", rivals=race)
        ((problem, candidate),) = raced
        assert problem == recorded.problem
        assert (candidate.schedule, candidate.artifact.fingerprint) == (result.entry.schedule, result.entry.fingerprint)
        assert db.entries(problem=problem)[0].rivals == (FASTER,)
        again = tune(recorded, db, effort="quick", rivals=lambda problem, candidate: None)  # which could time none
        assert again.entry.fingerprint == result.entry.fingerprint
        assert db.entries(problem=problem)[0].rivals == (FASTER,)


# sdpa

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo.utils")  # before anything of torch is replaced


@pytest.fixture
def attention(launches, monkeypatch):
    """sdpa on a table whose evidence is that a rival is faster; `calls` are the rival's."""
    from serve_on_cpu import expected, tensors

    from tiledsched.ops import plans
    from tiledsched.ops import sdpa as serve

    q, k, v = tensors(heads=2, rows=24)
    problem = plans.AttentionCall(q, k, v, None, None, False).problem()
    offer = a_rival()
    calls = []

    class Served:
        def __init__(self) -> None:
            self.q, self.k, self.v, self.calls, self.launches = q, k, v, calls, launches
            self.sdpa, self.plans, self.serve, self.offer = serve.sdpa, plans, serve, offer
            self.want = expected(q, k, v)

        def make_rivals(self):
            """The rivals that are installed, by name."""
            return self.rivals

        def known(self, **more) -> None:
            self.known_times((a_rival(**more),))

        def known_times(self, times) -> None:
            entry = an_entry(problem, times).replace(device_name="NVIDIA H200")
            launches.runtime.load_table = lambda settings, **given: LookupTable(
                [entry], Attention, rivals=settings.rivals == "serve"
            )
            serve.reload()

    def call(q, k, v):
        calls.append((q, k, v))
        return expected(q, k, v).transpose(1, 2).contiguous().transpose(1, 2)  # in an order of its own

    served = Served()
    served.rivals = {"torch_flash": call}
    monkeypatch.setattr(plans, "late_rivals", lambda p, scale, cap: served.make_rivals())
    served.known()
    return served


def test_the_rival_is_called_and_our_kernel_is_not(attention) -> None:
    q, k, v = attention.q, attention.k, attention.v
    for _ in range(3):  # the operator, then the short way
        out = attention.sdpa(q, k, v)
        assert torch.equal(out, attention.want)
        assert out.stride() == q.stride()
    assert len(attention.calls) == 3
    assert attention.launches == []
    plan = attention.serve.plan_for(q, k, v)
    assert attention.plans.find_ready(q, k, v, None, None, False) is plan
    assert (plan.rival.name, plan.own.rival, plan.own.launch_on) == ("torch_flash", None, plan.device)


def test_a_rival_is_called_on_the_device_of_the_tensors_and_at_once_where_that_is_current(
    attention, monkeypatch
) -> None:
    from tiledsched.serve import execute as launching

    q, k, v = attention.q, attention.k, attention.v
    for _ in range(2):
        attention.sdpa(q, k, v)
    with monkeypatch.context() as patch:
        patch.setattr(launching, "_launch_elsewhere", None)
        attention.sdpa(q, k, v)
    runtime, entered = attention.launches.runtime, []

    @contextmanager
    def on_device(index):
        entered.append(index)
        runtime.current_device = lambda: index
        yield

    runtime.on_device, runtime.current_device = on_device, lambda: 3
    assert torch.equal(attention.sdpa(q, k, v), attention.want)
    assert (entered, len(attention.calls), attention.launches) == ([-1], 4, [])


def test_a_rival_that_compiles_itself_does_so_in_a_thread_while_torch_serves(attention, monkeypatch) -> None:
    for name, value in (("COMPILE", "background"), ("FALLBACK", "torch"), ("RIVALS", "serve")):
        monkeypatch.setenv(f"TILEDSCHED_{name}", value)
    may_end, threads = threading.Event(), []

    def call(q, k, v):
        threads.append(threading.current_thread())
        if threads[-1] is not threading.main_thread():
            assert may_end.wait(60)
            assert (q.shape, q.stride(), q.dtype) == (attention.q.shape, attention.q.stride(), attention.q.dtype)
        return attention.want

    attention.rivals = {"flash_attention_4": call}
    attention.known(name="flash_attention_4")
    for _ in range(2):
        torch.testing.assert_close(
            attention.sdpa(attention.q, attention.k, attention.v), attention.want, rtol=2e-3, atol=2e-3
        )
    (builds,) = attention.plans.cache.building.values()
    (each,) = [each for each in threading.enumerate() if each.name == "tiledsched-rival"]
    may_end.set()
    each.join(60)
    assert (threads, [build.is_done for build in builds]) == ([each], [True])
    for count in (2, 3):
        assert attention.sdpa(attention.q, attention.k, attention.v) is attention.want
        assert (len(threads), threads[-1]) == (count, threading.main_thread())
    assert attention.launches == []


@pytest.mark.parametrize("setting", ["record", "off"])
def test_a_setting_keeps_our_kernel(attention, setting) -> None:
    with configure(rivals=setting):
        attention.sdpa(attention.q, attention.k, attention.v)
        plan = attention.serve.plan_for(attention.q, attention.k, attention.v)
    assert attention.calls == []
    assert len(attention.launches) == 1
    assert (plan.rival, plan.launch_on) == (None, plan.device)


def test_it_is_explained_and_logged(attention, caplog) -> None:
    from tiledsched import explain

    caplog.set_level("INFO", "tiledsched")
    found = explain(attention.q, attention.k, attention.v)
    assert found.rival == "torch_flash"
    assert "  rival       torch_flash is called instead: 1.11x faster than our kernel" in str(found)
    assert found.to_json()["rival"] == "torch_flash"
    assert "torch_flash is served instead" in caplog.text


def test_a_rival_that_is_not_installed_or_cannot_be_made_serves_nothing(attention, caplog) -> None:
    attention.rivals = {}
    attention.sdpa(attention.q, attention.k, attention.v)
    attention.make_rivals = lambda: 1 / 0
    attention.serve.reload()
    attention.sdpa(attention.q, attention.k, attention.v)
    assert len(attention.launches) == 2
    assert "no rival can be made, our own kernel is served: ZeroDivisionError" in caplog.text


def test_a_rival_that_refuses_its_first_call_gives_way_to_our_kernel(attention, caplog) -> None:
    def refuse(q, k, v):
        attention.calls.append(q)
        raise RuntimeError("No available kernel.")

    attention.rivals = {"torch_flash": refuse}
    for _ in range(3):
        torch.testing.assert_close(
            attention.sdpa(attention.q, attention.k, attention.v), attention.want, rtol=2e-3, atol=2e-3
        )
    assert (len(attention.calls), len(attention.launches)) == (1, 3)
    assert "torch_flash, which was measured to be faster, failed: RuntimeError: No available kernel." in caplog.text
    assert "our own kernel is served instead" in caplog.text


def test_a_later_failure_gives_way_for_that_call_and_says_what_to_do(attention, monkeypatch, caplog) -> None:
    attention.sdpa(attention.q, attention.k, attention.v)
    plan = attention.serve.plan_for(attention.q, attention.k, attention.v)
    monkeypatch.setitem(vars(plan.rival), "call", lambda *given: 1 / 0)
    for _ in range(2):
        out = attention.sdpa(attention.q, attention.k, attention.v)
        torch.testing.assert_close(out, attention.want, rtol=2e-3, atol=2e-3)
    assert (len(attention.calls), len(attention.launches)) == (1, 2)
    assert caplog.text.count("TILEDSCHED_RIVALS=off serves our own kernel; our own kernel is served instead") == 1


def test_a_graph_holds_the_rival_only_if_it_can(attention) -> None:
    from serve_on_cpu import capturing

    q, k, v = attention.q, attention.k, attention.v
    with capturing(), pytest.raises(LaunchError, match="call sdpa once"):
        attention.sdpa(q, k, v)
    attention.serve.reload()
    attention.sdpa(q, k, v)
    with capturing():
        attention.sdpa(q, k, v)
    assert (len(attention.calls), len(attention.launches)) == (2, 0)
    attention.known(capturable=False)
    attention.sdpa(q, k, v)  # and our own program is loaded on the way
    assert (len(attention.calls), len(attention.launches)) == (3, 1)
    with capturing():
        torch.testing.assert_close(attention.sdpa(q, k, v), attention.want, rtol=2e-3, atol=2e-3)
    assert (len(attention.calls), len(attention.launches)) == (3, 2)


class Late:
    """A rival whose host is too slow for eager calls, and what it was called in: captures, or not."""

    def __init__(self, attention, **more) -> None:
        self.attention, self.captured = attention, []
        attention.known(name="flash_attention_4", host_us=500.0, **more)

    def __call__(self, *given):
        self.captured.append(self.attention.launches.runtime.is_capturing())
        return self.attention.want.clone()


@pytest.fixture
def late(attention):
    made = Late(attention)
    attention.rivals = {"flash_attention_4": made}
    return made


def test_a_rival_whose_host_is_slow_serves_in_graphs_alone(attention, late) -> None:
    from serve_on_cpu import capturing, on_another_stream

    from tiledsched import explain

    q, k, v = attention.q, attention.k, attention.v
    attention.sdpa(q, k, v)
    # Its first call takes seconds, and no capture may ever come.
    assert (late.captured, len(attention.launches)) == ([], 1)
    with on_another_stream():
        for _ in range(2):
            attention.sdpa(q, k, v)
    assert (late.captured, len(attention.launches)) == ([False], 3)  # once, to be compiled where a capture finds it
    with capturing():
        assert torch.equal(attention.sdpa(q, k, v), attention.want)
    attention.sdpa(q, k, v)
    assert (late.captured, len(attention.launches)) == ([False, True], 4)
    found = explain(q, k, v)
    assert (found.rival, found.in_graphs) == ("", "flash_attention_4")
    assert "in a captured graph flash_attention_4 is served: 1.11x faster" in str(found)
    assert "its eager calls would wait for the host" in str(found)
    for setting in ("record", "off"):
        with configure(rivals=setting):
            attention.sdpa(q, k, v)
            with capturing():
                attention.sdpa(q, k, v)
    assert (len(late.captured), len(attention.launches)) == (2, 8)
    attention.known(name="flash_attention_4", host_us=500.0, capturable=False)
    attention.sdpa(q, k, v)
    plan = attention.serve.plan_for(q, k, v)
    assert (len(late.captured), plan.in_graphs, plan.launch_on) == (2, None, plan.device)  # eager calls ask nothing


@pytest.mark.parametrize("times", [{"host_us": 500.0}, {"capturable": False}], ids=["in graphs", "eager calls"])
def test_our_own_choice_that_does_not_compile_gives_way_beside_a_rival_too(attention, late, times) -> None:
    """A rival that serves graphs alone leaves eager calls to our kernel, and one that no graph holds leaves graphs to it."""
    from cuda.tile import TileError

    attention.known(name="flash_attention_4", **times)
    runtime, q, k, v = attention.launches.runtime, attention.q, attention.k, attention.v
    second = attention.serve.plan_for(q, k, v).served.schedule.replace(occupancy=3)
    load, refused = runtime.load_table, []

    class WithAlternatives(LookupTable):
        def resolve(self, *given):
            return dataclasses.replace(super().resolve(*given), alternatives=(second,))

    def load_table(*given, **named):
        table = load(*given, **named)
        table.__class__ = WithAlternatives
        return table

    def launch(*given) -> None:
        if not refused:
            refused.append(given)
            raise TileError("Return code 5")
        attention.launches(*given)

    runtime.load_table, runtime.launch = load_table, launch
    attention.serve.reload()
    for _ in range(2):
        torch.testing.assert_close(attention.sdpa(q, k, v), attention.want, rtol=2e-3, atol=2e-3)
    plan = attention.serve.plan_for(q, k, v)
    assert (len(refused), plan.served.schedule) == (1, second)
    assert {each.name for each in (plan.rival, plan.in_graphs) if each} == {"flash_attention_4"}


def test_what_was_never_called_before_a_capture_does_not_serve_in_it(attention, late) -> None:
    from serve_on_cpu import capturing, on_another_stream

    q, k, v = attention.q, attention.k, attention.v
    with configure(rivals="off"):
        attention.sdpa(q, k, v)  # our program is loaded
    with capturing():
        attention.sdpa(q, k, v)
    assert (late.captured, len(attention.launches)) == ([], 2)
    with on_another_stream():  # the first eager call is still to come then
        attention.sdpa(q, k, v)
    with capturing():
        attention.sdpa(q, k, v)
    assert (late.captured, len(attention.launches)) == ([False, True], 3)
    with capturing():  # numbers that it may not be compiled for
        attention.sdpa(q, k, v, scale=0.5)
    assert (late.captured, len(attention.launches)) == ([False, True], 4)


@pytest.mark.parametrize("first", [True, False])
def test_one_that_fails_to_be_made_ready_costs_nothing_but_itself(attention, caplog, first) -> None:
    from serve_on_cpu import capturing, on_another_stream

    attention.known(name="flash_attention_4", host_us=500.0)
    attention.rivals = {"flash_attention_4": lambda *given: 1 / 0}
    q, k, v = attention.q, attention.k, attention.v
    if not first:
        attention.sdpa(q, k, v)
    with on_another_stream():
        for _ in range(2):
            torch.testing.assert_close(attention.sdpa(q, k, v), attention.want, rtol=2e-3, atol=2e-3)
    with capturing():
        attention.sdpa(q, k, v)
    assert len(attention.launches) == 4 - first
    if first:
        plan = attention.serve.plan_for(q, k, v)
        assert (plan.in_graphs, plan.launch_on) == (None, plan.device)
    assert caplog.text.count("failed: ZeroDivisionError") == 1


def test_one_rival_may_serve_eagerly_and_another_in_graphs(attention, late) -> None:
    from serve_on_cpu import capturing, on_another_stream

    eager = []
    offers = {"torch_flash": lambda *given: eager.append(1) or attention.want.clone(), "flash_attention_4": late}
    attention.rivals = offers
    for capturable in (True, False):
        times = (a_rival(capturable=capturable), a_rival(0.8, name="flash_attention_4", host_us=500.0))
        attention.known_times(times)
        eager.clear()
        late.captured.clear()
        attention.launches.runtime.loaded.clear()
        with on_another_stream():
            attention.sdpa(attention.q, attention.k, attention.v)
        with capturing():
            attention.sdpa(attention.q, attention.k, attention.v)
        assert (eager, late.captured, len(attention.launches)) == ([1], [False, True], 0)
    offers["flash_attention_4"] = lambda *given: 1 / 0
    attention.known_times((a_rival(), times[1]))
    attention.launches.runtime.loaded.clear()
    with on_another_stream():
        attention.sdpa(attention.q, attention.k, attention.v)  # which makes way for the other
    with capturing():
        attention.sdpa(attention.q, attention.k, attention.v)
    assert (len(eager), len(attention.launches)) == (3, 0)


def test_it_is_called_in_compiled_code(attention) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention.sdpa(q, k, v) * 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(attention.q, attention.k, attention.v), attention.want)
    assert (len(attention.calls), attention.launches) == (1, [])


def test_the_bench_tells_our_kernel_from_what_is_served(attention) -> None:
    from tiledsched.bench.methods import OURS, SERVED
    from tiledsched.bench.rivals.attention import METHODS
    from tiledsched.bench.rivals.attention_case import AttentionArrays, PairCase

    plan = attention.serve.plan_for(attention.q, attention.k, attention.v)
    arrays = AttentionArrays(torch=torch, problem=plan.problem, tensors=(attention.q, attention.k, attention.v))
    METHODS[OURS].make(arrays)()
    assert (len(attention.calls), len(attention.launches)) == (0, 2)  # once to be ready
    METHODS[SERVED].make(arrays)()
    assert (len(attention.calls), len(attention.launches)) == (1, 2)
    case = PairCase(arrays, [], None, [], {})
    assert case.details(OURS, verify=False)["provenance"] == "measured"
    for captured in (False, True):
        assert case.details(SERVED, verify=False, captured=captured) == {
            "schedule": "torch_flash",
            "provenance": "rival",
            "measured_program": None,
        }
    attention.known(capturable=False)
    assert case.details(SERVED, verify=False, captured=True)["provenance"] == "measured"


def test_the_bench_asks_what_would_serve_had_nobody_tuned_the_suite(attention, monkeypatch) -> None:
    """Of a stranger's problem only itself is left out; of a suite's, the suite, and not the union of suites."""
    from tiledsched.bench.methods import LEFT_OUT
    from tiledsched.bench.rivals import attention_plans
    from tiledsched.bench.rivals.attention import METHODS
    from tiledsched.bench.rivals.attention_case import AttentionArrays, PairCase
    from tiledsched.kernels.attention import Attention

    plan = attention.serve.plan_for(attention.q, attention.k, attention.v)
    monkeypatch.setattr(attention_plans, "_entries", lambda arch: [plan.served.entry])
    arrays = AttentionArrays(torch=torch, problem=plan.problem, tensors=(attention.q, attention.k, attention.v))
    METHODS[LEFT_OUT].make(arrays)()
    assert (attention.calls, len(attention.launches)) == ([], 2)
    assert PairCase(arrays, [], None, [], {}).details(LEFT_OUT, verify=False)["provenance"] == "default"
    assert attention_plans.left_out(plan.problem) == {plan.problem}
    assert attention_plans.left_out(Attention.suite("bert")[0]) == set(Attention.suite("bert"))


def test_what_is_left_out_is_read_again_under_other_settings(monkeypatch) -> None:
    """A process of a fleet benches from one database after the other."""
    from tiledsched.bench.rivals import attention_plans

    loads = []
    monkeypatch.setattr(attention_plans, "load_entries", lambda *given: loads.append(given) or [])
    attention_plans._entries.cache_clear()
    for _ in range(2):
        attention_plans._entries("sm_90")
    assert len(loads) == 1
    with configure(rivals="off"):
        attention_plans._entries("sm_90")
    attention_plans._entries("sm_90")
    assert len(loads) == 3
    attention_plans._entries.cache_clear()


def test_any_operator_is_handed_over_too_unless_its_numbers_are_not_those_declared(launches, monkeypatch) -> None:
    import op_kernels
    from serve_on_cpu import capturing, on_another_stream

    from tiledsched.serve import process
    from tiledsched.serve.op import op

    x, w = torch.randn(4, 64, dtype=torch.float16), torch.randn(64, dtype=torch.float16)
    calls = []

    def normalise(X, W):
        calls.append(X)
        return torch.nn.functional.rms_norm(X, (64,), W, 1e-5).t().contiguous().t()

    monkeypatch.setattr(op_kernels.RmsNorm, "rivals", staticmethod(lambda p: {"torch": normalise}))
    norm = op("testrivals::norm", op_kernels.RmsNorm)
    p = norm.schema.problem((x, w, None, 1e-5))
    offers = measured_offers(an_entry(rivals=(a_rival(name="torch"),)), "here")

    class WithRivals(LookupTable):
        def resolve(self, *given):
            return dataclasses.replace(super().resolve(*given), rivals=offers)

    launches.runtime.load_table = lambda settings, *, kernel, archs: WithRivals([], kernel)
    process.forget_plans()
    for _ in range(3):
        out = norm(x, w)
        torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (64,), w, 1e-5), rtol=2e-3, atol=2e-3)
        assert out.is_contiguous()
    assert (len(calls), launches) == (3, [])
    assert norm.explain(x, w).rival == "torch"
    norm(x, w, eps=0.5)
    norm.own(x, w)
    assert (len(calls), len(launches)) == (3, 2)
    offers = (dataclasses.replace(offers[0], only_captured=True),)
    process.forget_plans()
    launches.runtime.loaded.clear()
    norm(x, w)
    assert (len(calls), len(launches)) == (3, 3)
    with on_another_stream():
        norm(x, w)
    assert (len(calls), len(launches)) == (4, 4)
    with capturing():
        norm(x, w)
        norm(x, w, eps=0.5)
    assert (len(calls), len(launches)) == (5, 5)
    assert (norm.explain(x, w).rival, norm.explain(x, w).in_graphs) == ("", "torch")
    assert p.columns == 64
    assert rivals_module.ELSEWHERE not in (-1, 0)
