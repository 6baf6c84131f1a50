"""Rivals that serve: what evidence it takes, measured or published, and what is called, kept and said."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import threading

import pytest
import store_samples
from store_samples import PROBLEM, RIVALS, entry, stored

from tiledsched import configure
from tiledsched.core import data_files
from tiledsched.core.errors import LaunchError
from tiledsched.core.rivals import Arrays
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.published import expected_us, published_device
from tiledsched.measure.runner import RivalTime
from tiledsched.ops import own_methods
from tiledsched.ops.bench import methods_of
from tiledsched.rivals.bench import details
from tiledsched.rivals.methods import LEFT_OUT, OURS, SERVED
from tiledsched.rivals.offers import expected_offers, measured_offers, pays
from tiledsched.serve.explain import explain_problem
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import export_table, read_table
from tiledsched.store.manifest import published_figures

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


NEAR, WANTED = of(1024), of(1280)
PACKED = of(1024).replace(batch=1, packed=8, seq_q=8192, seq_k=8192)
SLOW_HOST = {"host_us": 500.0}


@pytest.mark.parametrize(
    ("wanted", "known", "loss", "names"),
    [
        (WANTED, [(NEAR, a_rival(0.97))], 0.0, ["torch_flash"]),
        (WANTED, [(NEAR, a_rival(1.0))], 0.0, []),
        (WANTED, [(NEAR, a_rival(1.0))], 0.04, ["torch_flash"]),
        (WANTED, [(NEAR, a_rival(failure="RuntimeError: no"))], 0.5, []),  # all must have been computed
        (WANTED, [(NEAR, a_rival(0.5, name="torch_cudnn"))], 0.5, []),  # which plans every new problem
        (WANTED, [(NEAR, a_rival(**SLOW_HOST, capturable=False))], 0.5, []),
        (of(16384), [(NEAR, a_rival(0.5))], 0.5, []),  # too far to say anything
        (WANTED, [(NEAR, None)], 0.5, []),
        (PACKED, [(NEAR, a_rival(0.5))], 0.5, []),  # rivals have functions of their own for packed sequences
        (PACKED.replace(packed=7), [(PACKED, a_rival(0.5))], 0.0, ["torch_flash"]),
        (WANTED.replace(value_dim=32), [(WANTED, a_rival(0.5))], 0.5, []),  # and programs of their own for each width
        # Nearer problems that did not race a rival say nothing about it.
        (
            WANTED,
            [*((of(1024 + 128 * i), a_rival(1.3, name="torch_efficient")) for i in range(5)), (of(2048), a_rival(0.9))],
            0.0,
            ["torch_flash"],
        ),
    ],
)
def test_of_a_problem_that_was_not_measured_near_ones_and_the_expected_loss_decide(wanted, known, loss, names) -> None:
    entries = [an_entry(problem, (rival,) if rival else None) for problem, rival in known]
    assert [each.name for each in expected_offers(wanted, entries, loss)] == names


def test_the_ratio_that_is_expected_is_that_of_near_problems_less_our_own_loss() -> None:
    assert expected_offers(WANTED, [an_entry(NEAR, (a_rival(0.97),))], 0.0)[0].ratio == pytest.approx(0.975)
    (offer,) = expected_offers(WANTED, [an_entry(NEAR, (a_rival(1.0),))], 0.04)
    assert (offer.ratio, offer.only_captured) == (pytest.approx(1.005 / 1.04), False)
    assert "by its times on 1 similar problem " in offer.reason
    assert "the 4.0% that our untuned choice is expected to lose" in offer.reason
    both = [an_entry(NEAR, (a_rival(0.9),)), an_entry(of(2048), (a_rival(1.3),))]
    assert expected_offers(of(1040), both, 0.5)[0].ratio < expected_offers(of(1900), both, 0.5)[0].ratio
    assert expected_offers(WANTED, [an_entry(NEAR, (a_rival(**SLOW_HOST),))], 0.5)[0].only_captured


OTHER_TYPE = PROBLEM.replace(dtype="bfloat16" if PROBLEM.dtype == "float16" else "float16")


@pytest.mark.parametrize(
    ("more", "problem", "device", "provenance", "named"),
    [
        ([], PROBLEM, GPU, "measured", True),
        ([], PROBLEM, "Another GPU", "transferred", True),
        ([], PROBLEM.replace(batch=PROBLEM.batch + 1), GPU, "transferred", True),
        ([an_entry(OTHER_TYPE, None)], OTHER_TYPE, GPU, "measured", True),
        (
            [an_entry(OTHER_TYPE, (a_rival(1.1),))],
            OTHER_TYPE,
            GPU,
            "measured",
            True,
        ),  # tuned where it was not installed
        # Its own evidence goes before that of its like.
        ([an_entry(OTHER_TYPE, (a_rival(1.2, name="flash_attention_4"),))], OTHER_TYPE, GPU, "measured", False),
    ],
)
def test_the_table_offers_rivals_where_they_may_serve(more, problem, device, provenance, named) -> None:
    served = LookupTable([an_entry(), *more], Attention, rivals=True).resolve(problem, "sm_90", device)
    assert served.provenance == provenance
    assert [each.name for each in served.rivals] == (["flash_attention_4"] if named else [])


def test_the_table_offers_none_where_settings_say_so_and_explains_those_that_it_offers() -> None:
    known = [an_entry()]
    for settings in ({}, {"rivals": True, "forced": {"tile_n": 32}}):  # who forces knobs wants to see them
        assert LookupTable(known, Attention, **settings).resolve(PROBLEM, "sm_90", GPU).rivals == ()
    text = str(explain_problem(LookupTable(known, Attention, rivals=True), PROBLEM, "sm_90", GPU))
    assert "rival       flash_attention_4, where it is installed: 1.11x faster than our kernel on this problem" in text
    raced = "raced       flash_attention_4 90.0 us (0.90x ours, host 340 us); torch_flash RuntimeError: No available kernel."
    assert raced in str(explain_problem(LookupTable([an_entry(rivals=RIVALS)], Attention), PROBLEM, "sm_90", GPU))


# The store


def test_rivals_come_through_files_and_those_that_cannot_be_read_are_told(tmp_path) -> None:
    with TuningDB.open(tmp_path / "one.db") as db:
        store_samples.fill(db)
        export_table(db, tmp_path / "table.json")
    table = read_table(tmp_path / "table.json")
    assert {each.provenance: each.rivals for each in table.entries} == {"measured": RIVALS, "modelled": None}
    assert (tmp_path / "table.json").read_text().count('"rivals"') == 1  # not said where there are none
    with contextlib.closing(sqlite3.connect(tmp_path / "one.db")) as connection, connection:
        connection.execute('UPDATE entries SET rivals = \'[{"name": "x y"}]\' WHERE rivals IS NOT NULL')
    with TuningDB.open(tmp_path / "one.db") as db:
        assert any("its rivals[0].name: 'x y' is not allowed here" in line for line in db.check())
        assert [each.provenance for each in db.entries()] == ["modelled"]


# sdpa

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo.utils")  # before anything of torch is replaced
import op_kernels
from cuda.tile import TileError
from serve_on_cpu import capturing, expected, on_another_stream, tensors

from tiledsched import explain
from tiledsched.ops import plans, sdpa as serve
from tiledsched.serve import process
from tiledsched.serve.op import op

MODES = {"eager": contextlib.nullcontext, "stream": on_another_stream, "graph": capturing}
"""How sdpa is called: as in a loop, while torch warms up for a capture, and in a capture."""
LATE = {"name": "flash_attention_4", "host_us": 500.0}
"""Of a rival whose host is too slow for eager calls."""


class Served:
    """sdpa on a table whose evidence is that a rival is faster; `calls` say of each call of the rival whether it was captured."""

    def __init__(self, launches) -> None:
        self.launches, self.calls, self.given = launches, [], tensors(heads=2, rows=24)
        self.want, self.make_rivals = expected(*self.given), lambda: self.rivals
        self.problem = plans.AttentionCall(*self.given, None, None, False).problem()
        self.rivals = dict.fromkeys(("torch_flash", "flash_attention_4"), self.rival)
        self.known()

    def rival(self, q, k, v):
        """Another implementation, whose output has axes in an order of its own."""
        self.calls.append(self.launches.runtime.is_capturing())
        return self.want.transpose(1, 2).contiguous().transpose(1, 2)

    def known(self, *times, **more) -> None:
        """Have the table know these times, or that of one rival."""
        entry = an_entry(self.problem, times or (a_rival(**more),)).replace(device_name="NVIDIA H200")
        self.launches.runtime.load_table = lambda settings, **given: LookupTable(
            [entry], Attention, rivals=settings.rivals == "serve"
        )
        serve.reload()

    def run(self, *modes, **more):
        """Call sdpa in each of the modes; (how often the rival has computed, how often our kernel was launched)."""
        for mode in modes or ("eager",):
            with MODES[mode]():
                out = serve.sdpa(*self.given, **more)
            assert out.stride() == self.given[0].stride()
            if not more:
                torch.testing.assert_close(out, self.want, rtol=2e-3, atol=2e-3)
        return len(self.calls), len(self.launches)

    @property
    def plan(self):
        """What serves."""
        return serve.plan_for(*self.given)


@pytest.fixture
def attention(launches, monkeypatch):
    served = Served(launches)
    monkeypatch.setattr(plans, "raced", lambda p, scale, cap, late: served.make_rivals())
    return served


def test_the_rival_is_called_and_our_kernel_is_not(attention) -> None:
    assert attention.run("eager", "eager", "eager") == (3, 0)  # the operator, then the short way
    plan = attention.plan
    assert plans.find_ready(*attention.given, None, None, False) is plan
    assert (plan.rival.name, plan.own.rival, plan.own.launch_on) == ("torch_flash", None, plan.device)


def test_a_rival_is_called_on_the_device_of_the_tensors_and_at_once_where_that_is_current(
    attention, monkeypatch
) -> None:
    attention.run("eager", "eager")
    with monkeypatch.context() as patch:
        patch.setattr("tiledsched.serve.execute._launch_elsewhere", None)
        attention.run()
    runtime, entered = attention.launches.runtime, []

    @contextlib.contextmanager
    def on_device(index):
        entered.append(index)
        runtime.current_device = lambda: index
        yield

    runtime.on_device, runtime.current_device = on_device, lambda: 3
    assert (attention.run(), entered) == ((4, 0), [-1])


def test_a_rival_that_compiles_itself_does_so_in_a_thread_while_torch_serves(attention, monkeypatch) -> None:
    for name, value in (("COMPILE", "background"), ("FALLBACK", "torch"), ("RIVALS", "serve")):
        monkeypatch.setenv(f"TILEDSCHED_{name}", value)
    may_end, threads, first = threading.Event(), [], attention.given[0]

    def call(q, k, v):
        threads.append(threading.current_thread())
        if threads[-1] is not threading.main_thread():
            assert may_end.wait(60)
            assert (q.shape, q.stride(), q.dtype) == (first.shape, first.stride(), first.dtype)
        return attention.want

    attention.rivals = {"flash_attention_4": call}
    attention.known(name="flash_attention_4")
    attention.run("eager", "eager")
    (builds,) = plans.cache.building.values()
    (each,) = [each for each in threading.enumerate() if each.name == "tiledsched-rival"]
    may_end.set()
    each.join(60)
    assert (threads, [build.is_done for build in builds]) == ([each], [True])
    attention.run("eager", "eager")
    assert (threads[1:], attention.launches) == ([threading.main_thread()] * 2, [])


@pytest.mark.parametrize("setting", ["record", "off"])
@pytest.mark.parametrize("times", [{}, LATE], ids=["fast host", "slow host"])
def test_a_setting_keeps_our_kernel(attention, setting, times) -> None:
    attention.known(**times)
    with configure(rivals=setting):
        assert attention.run("eager", "stream", "graph") == (0, 3)
        assert (attention.plan.rival, attention.plan.launch_on) == (None, attention.plan.device)


def test_it_is_explained_and_logged(attention, caplog) -> None:
    caplog.set_level("INFO", "tiledsched")
    found = explain(*attention.given)
    assert (found.rival, found.to_json()["rival"]) == ("torch_flash", "torch_flash")
    assert "  rival       torch_flash is called instead: 1.11x faster than our kernel" in str(found)
    assert "torch_flash is served instead" in caplog.text


def test_a_rival_that_is_not_installed_or_cannot_be_made_serves_nothing(attention, caplog) -> None:
    for attention.make_rivals in (dict, lambda: 1 / 0):
        serve.reload()
        attention.run()
    assert (attention.calls, len(attention.launches)) == ([], 2)
    assert "no rival can be made, our own kernel is served: ZeroDivisionError" in caplog.text


def test_a_rival_that_refuses_its_first_call_gives_way_to_our_kernel(attention, caplog) -> None:
    def refuse(q, k, v):
        attention.calls.append(q)
        raise RuntimeError("No available kernel.")

    attention.rivals = {"torch_flash": refuse}
    assert attention.run("eager", "eager", "eager") == (1, 3)
    assert "torch_flash, which was measured to be faster, failed: RuntimeError: No available kernel." in caplog.text
    assert "our own kernel is served instead" in caplog.text


def test_a_later_failure_gives_way_for_that_call_and_says_what_to_do(attention, monkeypatch, caplog) -> None:
    attention.run()
    monkeypatch.setitem(vars(attention.plan.rival), "call", lambda *given: 1 / 0)
    assert attention.run("eager", "eager") == (1, 2)
    assert caplog.text.count("TILEDSCHED_RIVALS=off serves our own kernel; our own kernel is served instead") == 1


def test_a_graph_holds_the_rival_only_if_it_can(attention) -> None:
    with pytest.raises(LaunchError, match="call sdpa once"):
        attention.run("graph")
    serve.reload()
    assert attention.run("eager", "graph") == (2, 0)
    attention.known(capturable=False)
    assert attention.run("eager") == (3, 1)  # and our own program is loaded on the way
    assert attention.run("graph") == (3, 2)


def test_a_rival_whose_host_is_slow_serves_in_graphs_alone(attention) -> None:
    attention.known(**LATE)
    assert attention.run() == (0, 1)  # its first call takes seconds, and no capture may ever come
    assert attention.run("stream", "stream") == (1, 3)  # once, to be compiled where a capture finds it
    assert attention.run("graph", "eager") == (2, 4)
    assert attention.calls == [False, True]
    found = explain(*attention.given)
    assert (found.rival, found.in_graphs) == ("", "flash_attention_4")
    assert "in a captured graph flash_attention_4 is served: 1.11x faster" in str(found)
    assert "its eager calls would wait for the host" in str(found)
    attention.known(**LATE, capturable=False)
    assert attention.run() == (2, 5)
    assert (attention.plan.in_graphs, attention.plan.launch_on) == (None, attention.plan.device)  # calls ask nothing


@pytest.mark.parametrize("times", [{"host_us": 500.0}, {"capturable": False}], ids=["in graphs", "eager calls"])
def test_our_own_choice_that_does_not_compile_gives_way_beside_a_rival_too(attention, times) -> None:
    """A rival that serves graphs alone leaves eager calls to our kernel, and one that no graph holds leaves graphs to it."""
    attention.known(name="flash_attention_4", **times)
    runtime, second = attention.launches.runtime, attention.plan.served.schedule.replace(occupancy=3)
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
    serve.reload()
    attention.run("eager", "eager")
    plan = attention.plan
    assert (len(refused), plan.served.schedule) == (1, second)
    assert {each.name for each in (plan.rival, plan.in_graphs) if each} == {"flash_attention_4"}


def test_what_was_never_called_before_a_capture_does_not_serve_in_it(attention) -> None:
    attention.known(**LATE)
    with configure(rivals="off"):
        attention.run()  # our program is loaded
    assert attention.run("graph") == (0, 2)
    assert attention.run("stream", "graph") == (2, 3)  # the first eager call is still to come then
    assert attention.run("graph", scale=0.5) == (2, 4)  # numbers that it may not be compiled for
    assert attention.calls == [False, True]


@pytest.mark.parametrize("first", [True, False])
def test_one_that_fails_to_be_made_ready_costs_nothing_but_itself(attention, caplog, first) -> None:
    attention.known(**LATE)
    attention.rivals = {"flash_attention_4": lambda *given: 1 / 0}
    modes = ("stream", "stream", "graph")
    assert attention.run(*modes if first else ("eager", *modes)) == (0, 4 - first)
    if first:
        assert (attention.plan.in_graphs, attention.plan.launch_on) == (None, attention.plan.device)
    assert caplog.text.count("failed: ZeroDivisionError") == 1


def test_one_rival_may_serve_eagerly_and_another_in_graphs(attention) -> None:
    eager, late = [], a_rival(0.8, **LATE)
    attention.rivals["torch_flash"] = lambda *given: eager.append(1) or attention.want.clone()
    for capturable in (True, False):
        attention.known(a_rival(capturable=capturable), late)
        attention.launches.runtime.loaded.clear()
        attention.run("stream", "graph")
    assert (len(eager), attention.calls, attention.launches) == (2, [False, True] * 2, [])
    attention.rivals["flash_attention_4"] = lambda *given: 1 / 0
    attention.known(a_rival(), late)
    attention.launches.runtime.loaded.clear()
    attention.run("stream", "graph")  # the rival of graphs makes way for the other
    assert (len(eager), attention.launches) == (4, [])


def test_it_is_called_in_compiled_code(attention) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: serve.sdpa(q, k, v) * 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*attention.given), attention.want)
    assert (len(attention.calls), attention.launches) == (1, [])


@pytest.fixture
def benched(attention):
    """The methods of a bench, and the inputs of the problem of :func:`attention`."""
    return methods_of(Attention), Arrays(torch=torch, problem=attention.plan.problem, tensors=attention.given)


def test_the_bench_tells_our_kernel_from_what_is_served(attention, benched) -> None:
    methods, arrays = benched
    methods[OURS].make(arrays)()
    assert (len(attention.calls), len(attention.launches)) == (0, 2)  # once to be ready
    methods[SERVED].make(arrays)()
    assert (len(attention.calls), len(attention.launches)) == (1, 2)
    assert details(methods[OURS], arrays, verify=False, captured=False)["provenance"] == "measured"
    rival = {"schedule": "torch_flash", "provenance": "rival", "measured_program": None}
    for captured in (False, True):
        assert details(methods[SERVED], arrays, verify=False, captured=captured) == rival
    attention.known(capturable=False)
    assert details(methods[SERVED], arrays, verify=False, captured=True)["provenance"] == "measured"


def test_the_bench_asks_what_would_serve_had_nobody_tuned_the_suite(attention, benched, monkeypatch) -> None:
    """Of a stranger's problem only itself is left out; of a suite's, the suite, and not the union of suites. Entries are read
    again under other settings: a process of a fleet benches from one database after the other.
    """
    methods, arrays = benched
    loads, entry = [], attention.plan.served.entry
    monkeypatch.setattr(own_methods, "load_entries", lambda *given: loads.append(given) or [entry])
    own_methods._entries.cache_clear()
    methods[LEFT_OUT].make(arrays)()
    assert (attention.calls, len(attention.launches)) == ([], 2)
    assert details(methods[LEFT_OUT], arrays, verify=False, captured=False)["provenance"] == "default"
    assert len(loads) == 1
    with configure(rivals="off"):
        own_methods._entries("sm_90")
    assert len(loads) == 2
    assert own_methods.left_out(arrays.problem) == {arrays.problem}
    assert own_methods.left_out(Attention.suite("bert")[0]) == set(Attention.suite("bert"))
    own_methods._entries.cache_clear()


def test_any_operator_is_handed_over_too_unless_its_numbers_are_not_those_declared(launches, monkeypatch) -> None:
    x, w = torch.randn(4, 64, dtype=torch.float16), torch.randn(64, dtype=torch.float16)
    calls, norm = [], op("testrivals::norm", op_kernels.RmsNorm)

    def normalise(X, W):
        calls.append(X)
        return torch.nn.functional.rms_norm(X, (64,), W, 1e-5).t().contiguous().t()

    monkeypatch.setattr(op_kernels.RmsNorm, "rivals", staticmethod(lambda p: {"torch": normalise}))
    (offer,) = measured_offers(an_entry(rivals=(a_rival(name="torch"),)), "here")

    class WithRivals(LookupTable):
        def resolve(self, *given):
            return dataclasses.replace(super().resolve(*given), rivals=(offer,))

    def run(mode="eager", call=norm, **numbers):
        with MODES[mode]():
            out = call(x, w, **numbers)
        if not numbers:
            torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (64,), w, 1e-5), rtol=2e-3, atol=2e-3)
        assert out.is_contiguous()
        return len(calls), len(launches)

    launches.runtime.load_table = lambda settings, *, kernel, archs: WithRivals([], kernel)
    process.forget_plans()
    assert [run() for _ in range(3)] == [(1, 0), (2, 0), (3, 0)]
    assert norm.explain(x, w).rival == "torch"
    with pytest.raises(LaunchError, match="has not run in this process yet"):  # the calls so far were the rival's
        run("graph", eps=0.5)
    assert (run(eps=0.5), run(call=norm.own)) == ((3, 1), (3, 2))
    offer = dataclasses.replace(offer, only_captured=True)
    process.forget_plans()
    launches.runtime.loaded.clear()
    assert (run(), run("stream"), run("graph"), run("graph", eps=0.5)) == ((3, 3), (4, 4), (5, 4), (5, 5))
    assert (norm.explain(x, w).rival, norm.explain(x, w).in_graphs) == ("", "torch")


# Published times: where nothing was measured, a backend of torch may serve that others found to be faster


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
