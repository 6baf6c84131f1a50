"""Tuning as deployed: replayed graphs as regimes of their own, memory that is full, and the lookup of calls that a graph captures."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import fake_worker
import op_kernels as kernels
import served_entries
from cuda.tile import TileError
from fake_builds import FakeBuilds, print_of
from fake_worker import cubin
from serve_on_cpu import capturing, changed
from store_samples import TOOLCHAIN
from test_measure_gpu import PROBLEM, candidate, command, make_runner  # noqa: F401  # a fixture
from test_seen import seen_problem
from test_serve import CAUSAL, known, table_of

import tiledsched as ts
from tiledsched.core.config import Settings
from tiledsched.core.errors import ConfigError, FailureKind, LaunchError, MeasureError
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.fleet.running import plan
from tiledsched.measure.gpu import GpuRunner
from tiledsched.measure.runner import GIB, Device
from tiledsched.serve import process
from tiledsched.serve.entries import load_table
from tiledsched.serve.explain import explain_problem
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.stored import MANY
from tiledsched.tuning.options import TuneOptions
from tiledsched.tuning.resources import Tools
from tiledsched.tuning.session import Session
from tiledsched.tuning.worth import ASSUMED_LOSSES, worth_of

total = ts.op("tiledsched_tests::deployed_total", kernels.Total)
scale_ = ts.op("tiledsched_tests::deployed_scale_", kernels.Scale)


def test_graphs_are_replayed_out_of_a_warm_cache_or_an_empty_one(make_runner):  # noqa: F811
    runner, short, long = make_runner(), candidate(100.0, cold_us=40.0), candidate(200.0, cold_us=40.0)
    for regime, one, took_us, launches in (
        ("burst", short, 140.0, 0),
        ("graph", short, 100.0, 2),
        ("graph-cold", short, 140.0, 1),
    ):
        runner.probe(one)
        (batch,) = runner.sample([one], rounds=3, regime=regime)
        assert batch.samples_us == pytest.approx((took_us,) * 3)
        assert (batch.conditions.graph_launches, batch.conditions.gap_ms > 0) == (launches, True)
    runner.begin(PROBLEM)
    runner.probe(long)
    (batch,) = runner.sample([long], rounds=2, regime="graph")
    assert (batch.samples_us, batch.conditions.graph_launches) == (pytest.approx((200.0, 200.0)), 1)


def test_a_search_beside_a_full_memory_takes_no_more_than_the_rest(make_runner):  # noqa: F811
    runner, whole = make_runner(), candidate()
    split = replace(whole, schedule=whole.schedule.replace(kv_splits=2, combine="later"))

    def begun(gib):
        runner.beside_gib = gib
        runner.begin(PROBLEM)
        return runner.sample([whole], rounds=1, regime="burst")[0].conditions

    assert (begun(None).memory_cap_bytes, begun(None).memory_peak_bytes) == (0, 0)
    assert not hasattr(runner.probe(split), "kind")
    free_gib, reserve_gib = 1.0, 0.25  # of the made-up GPU
    for left in (1 << 27, 30_000):
        seen = begun(free_gib - reserve_gib - left / GIB)
        assert seen.memory_cap_bytes == pytest.approx(left, abs=200)
        assert 5_000 < seen.memory_peak_bytes <= left
    failed = runner.probe(split)
    assert (failed.kind, failed.message.partition("MiB")[0]) == (FailureKind.OUT_OF_MEMORY, "its workspace takes 0 ")
    for gib, words in (
        (free_gib - reserve_gib - 3_000 / GIB, "Out of memory allocating"),
        (2.0, "2 GiB cannot be taken"),
    ):
        with pytest.raises(MeasureError, match=f"{words}.*take less beside it"):
            begun(gib)
    assert begun(None).memory_cap_bytes == 0  # what was taken is given back


class Built(FakeBuilds):
    """Programs of the made-up GPU: more resident blocks are slower, and slower still out of an empty cache with few."""

    def outcome(self, schedule):
        resident, wrong = schedule["occupancy"], "wrong" * (schedule["TILE"] == 1024)
        code = cubin(60.0 + 10 * resident, cold_us=80.0 if resident == 1 else 10.0, check=wrong)
        return vars(self).setdefault(print_of(schedule), fake_worker.artifact(code, print_of(schedule)))

    def get(self, arch, fingerprint):
        return vars(self)[fingerprint]


@pytest.fixture
def session(tmp_path):
    builds, gpu = Built(), Device(name="Made-up GPU", arch="sm_90", sm_count=8)
    tools = Tools(
        toolchain=lambda: TOOLCHAIN,
        artifacts=lambda folder: builds,
        pool=lambda jobs: builds,
        devices=lambda: [gpu],
        lacking=lambda: "",
        runner=lambda kernel, seed: GpuRunner(kernel, seed=seed, gap_ms=0.0, worker_command=command()),
        rivals=lambda kernel, runner, regime: None,
    )
    with Session("sm_90", settings=Settings(db=str(tmp_path / "x.db")), tools=tools) as session:
        yield session


def test_a_tune_for_graphs_finds_another_winner_and_both_are_served(session, monkeypatch):
    problem = kernels.RmsNorm.problem(rows=8, columns=100)

    def winner(**options):
        (result,) = session.tune(kernels.RmsNorm, [problem], TuneOptions(effort="quick", **options)).results
        return result

    eager, cold, warm = winner(), winner(deploy="graph", cold=True), winner(deploy="graph", beside_gib=0.25)
    found = [each.entry for each in (eager, cold, warm)]
    assert [each.regime for each in found] == ["burst", "graph-cold", "graph"]
    assert [each.schedule["occupancy"] for each in found] == [2, 2, 1]
    assert [each.memory for each in (eager, cold)] == ["", ""]
    assert "beside 0.25 GiB: took at most 0.00 of 0.50 GiB" in warm.memory
    assert found[2].source.endswith(warm.memory)
    of, wanted = (problem, "sm_90", "Made-up GPU"), (found[0].schedule, found[2].schedule)
    for many in (MANY, 0):  # in a large database
        monkeypatch.setattr("tiledsched.serve.stored.MANY", many)
        table = load_table(session.settings, kernel=kernels.RmsNorm)
        assert (table.resolve(*of).schedule, table.resolve_captured(*of).schedule) == wanted
        assert load_table(session.settings, kernel=kernels.Total)._of_graphs is None
    stored = session.db.measurements(problem, regime="graph", fingerprint=found[2].fingerprint)[0]
    assert 0 < stored.measurement.conditions.memory_peak_bytes < stored.measurement.conditions.memory_cap_bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cold": True}, "timed behind a flush of the L2 cache in any case"),
        ({"deploy": "graph", "regime": "sustained"}, "is the regime graph, not sustained; leave out --regime"),
        ({"deploy": "graph", "cold": True, "regime": "graph"}, "is the regime graph-cold, not graph"),
        ({"beside_gib": -1.0}, "beside_gib must be a number of 0 or more"),
        ({"deploy": "graphs"}, "deploy must be one of eager, graph"),
    ],
)
def test_what_does_not_go_together_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        TuneOptions(**options)


def test_deploying_in_graphs_is_a_regime():
    found = [TuneOptions(deploy="graph", cold=cold) for cold in (False, True)]
    assert [each.regime for each in found] == ["graph", "graph-cold"]
    assert [TuneOptions.from_mapping(each.to_json(), "tune") for each in found] == found
    assert TuneOptions().regime is None
    planned = plan("tune", kernels.RmsNorm, [{"rows": 8, "columns": 100}], ["sm_90"], options={"deploy": "graph"})
    assert planned.options["regime"] == "graph"


@pytest.mark.parametrize(("deploy", "gib", "words"), [("graph", None, "deploy graph"), ("eager", 1.0, "beside")])
def test_without_a_gpu_nothing_is_deployed(deploy, gib, words, tmp_path):
    with (
        pytest.raises(ConfigError, match=f"no GPU of sm_90 is used here; leave out --{words}"),
        Session("sm_90", settings=Settings(db=str(tmp_path / "x.db"))) as session,
    ):
        session.tune(kernels.Total, [{"size": 100}], TuneOptions(deploy=deploy, beside_gib=gib, runner="none"))


BURST, GRAPH, COLD, SUSTAINED = (
    known(of={"regime": regime}, occupancy=place + 1)
    for place, regime in enumerate(("burst", "graph", "graph-cold", "sustained"))
)


@pytest.mark.parametrize(
    ("entries", "eager", "captured"),
    [
        ([SUSTAINED, BURST, COLD, GRAPH], BURST, GRAPH),
        ([BURST, COLD], BURST, COLD),
        ([BURST, SUSTAINED], BURST, None),
        ([COLD, SUSTAINED], SUSTAINED, COLD),
        ([COLD, GRAPH], GRAPH, GRAPH),
    ],
)
def test_a_captured_call_goes_by_graphs_first_and_an_eager_one_last(entries, eager, captured):
    of = BURST.problem, "sm_90", "NVIDIA H200"
    for some in (entries, entries[::-1]):
        table = table_of(some)
        assert table.resolve(*of).entry.regime == eager.regime
        found = table.resolve_captured(*of)
        assert (found and found.entry.regime) == (captured and captured.regime)
        assert table.without(BURST.problem, "sm_90").resolve_captured(*of) is None
    elsewhere = known(CAUSAL, of={"regime": "graph"})
    assert table_of([BURST, elsewhere]).resolve_captured(*of) is None


def test_what_was_tuned_eagerly_is_still_to_be_tuned_for_graphs():
    for regime, loss in (("burst", 0.0), ("graph", ASSUMED_LOSSES["measured"])):
        assert worth_of(seen_problem(BURST.problem, 5), table_of([BURST], regime=regime)).loss == loss


def test_explain_tells_what_a_graph_holds():
    found = explain_problem(table_of([BURST, GRAPH]), BURST.problem, "sm_90", "NVIDIA H200")
    words = f"a CUDA graph holds {GRAPH.schedule.short()} (measured, 300.0 us in the graph regime"
    assert words in str(found)
    assert found.to_json()["captured"]["schedule"] == GRAPH.schedule.to_json()
    alone = explain_problem(table_of([BURST]), BURST.problem, "sm_90", "NVIDIA H200")
    assert ("in graphs" in str(alone), "captured" in alone.to_json()) == (False, False)
    assert "in the graph regime; nothing was in the burst one" in str(
        explain_problem(table_of([GRAPH]), BURST.problem, "sm_90")
    )


def serving(runtime, kernel, p, **tiles):
    """Serve entries of a problem in a runtime: a tile by regime."""
    space = space_for("sm_90", kernel)
    entries = [
        BURST.replace(
            problem=p,
            kernel=kernel.name,
            regime=regime.replace("_", "-"),
            schedule=space.complete(Schedule(TILE=tile)),
            measurement=replace(served_entries.SUMMARY, median_us=float(tile)),
        )
        for regime, tile in tiles.items()
    ]
    runtime.load_table = lambda settings, **more: LookupTable(entries, kernel, regime=settings.regime)
    process.forget_plans()


def grids(launches):
    """The first grid of each call, of which there is one for every two launches, and none of them again."""
    found = [grid[0] for _, grid, _, _ in launches]
    launches.clear()
    return found


def test_a_capture_holds_the_winner_in_graphs(launches):
    x = torch.arange(100.0)
    serving(launches.runtime, kernels.Total, kernels.Total.problem(size=100), burst=32, graph=64)
    with capturing(), pytest.raises(LaunchError, match="once with these shapes"):
        total(x)
    assert grids(launches) == []
    want = total(x)
    assert grids(launches) == [2, 1, 4, 1]  # the graph's once, so that a capture finds it loaded
    for context, first in ((changed(), 4), (capturing(), 2), (changed(), 4)):
        with context:
            assert torch.equal(total(x)[0], want[0])
            assert torch.equal(total.own(x)[0], want[0])
        assert grids(launches) == [first, 1, 4, 1]
    assert "a CUDA graph holds TILE=64" in str(total.explain(x))


def test_without_times_in_graphs_calls_look_for_nothing(launches):
    x = torch.arange(100.0)
    for more, elsewhere in (({}, False), ({"graph": 32}, False), ({"graph_cold": 64}, True)):
        serving(launches.runtime, kernels.Total, kernels.Total.problem(size=100), burst=32, **more)
        plan = total.plan_for(x)
        assert (plan.launch_on != plan.device, plan.captured is not None) == (elsewhere, elsewhere)


def test_what_works_in_place_works_once(launches):
    x = torch.ones(40)
    serving(launches.runtime, kernels.Scale, kernels.Scale.problem(size=40), burst=32, graph=16)
    scale_(x)
    assert (grids(launches), bool((x == 2).all())) == ([3, 2], True)
    with capturing():
        scale_(x)
    assert (grids(launches), bool((x == 4).all())) == ([3], True)


def test_a_schedule_of_graphs_that_fails_costs_the_graphs_alone(launches, caplog):
    x, real = torch.arange(100.0), launches.runtime.launch
    serving(launches.runtime, kernels.Total, kernels.Total.problem(size=100), burst=32, graph=64)

    def launch(stream, grid, kernel, arguments):
        if grid == (2, 1, 1):
            raise TileError("no such layout")
        return real(stream, grid, kernel, arguments)

    with changed(launch=launch):
        total(x)
        assert "captured graphs hold the schedule of eager calls instead" in caplog.text
        with capturing():
            total(x)
    assert grids(launches) == [4, 1, 4, 1]
