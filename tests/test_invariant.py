"""Batch-invariant numerics: groups by digests, the race over sizes, the proof, what is stored and served, and plans in turn."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy
import pytest

torch = pytest.importorskip("torch")

from fake_builds import FakeBuilds
from fake_machine import toolchain
from store_samples import DEVICE
from tile_checks import make_inputs, run_schedule

import tiledsched as ts
from tiledsched.checking.accuracy import Accuracy
from tiledsched.cli import main
from tiledsched.core.canonical import stable_id
from tiledsched.core.config import ConfigError, load_settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import DeclarationError, MeasureError, UnsupportedError
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem_lists import problems_of
from tiledsched.kernels.grouped_matmul import GroupedMatmul
from tiledsched.kernels.matmul import Matmul
from tiledsched.measure.arrays import first_rows
from tiledsched.measure.runner import Batch, Checked, Conditions, RowRunner
from tiledsched.ops.front import operator
from tiledsched.report import build_report
from tiledsched.serve import process
from tiledsched.serve.entries import load_table
from tiledsched.serve.execute import launch_first
from tiledsched.serve.explain import explain_problem
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.plan_cache import PlanCache
from tiledsched.store.db import TuningDB
from tiledsched.tuning.options import TuneOptions
from tiledsched.tuning.prior import estimator
from tiledsched.tuning.resources import Tools
from tiledsched.tuning.session import Session

H200 = dataclasses.replace(DEVICE, name="NVIDIA H200")
ACCURACY = Accuracy(max_abs_error=1e-3, worst_tile_error=5e-4, worst_tile=(0, 0, 0), repeatable=True)
WEIGHT = {"n": 4096, "k": 4096, "b_layout": "column"}
SIZES = (1, 64, 2048)


class Gpu:
    """A GPU whose times are the model's, and whose bits follow from the shares of k alone: the instruction makes no difference.

    Args:
        liars: says of a problem and a schedule whether it computes other bits.
    """

    name, device, device_name, regimes = "gpu", H200, H200.name, frozenset({"burst"})

    def __init__(self, liars=lambda p, s: False) -> None:
        self.liars, self.compared = liars, []

    def begin(self, problem) -> None:
        self.problem = problem

    def probe(self, candidate) -> float:
        return estimator(self.problem, arch_spec("sm_90"))(candidate.schedule, None)

    def check(self, candidate) -> Checked:
        return Checked(accuracy=ACCURACY, first_look_us=self.probe(candidate))

    def sample(self, candidates, *, rounds, regime):
        conditions = Conditions(sm_clock_mhz=1980)
        return [Batch(samples_us=(self.probe(each),) * rounds, conditions=conditions) for each in candidates]

    def rows(self, candidate, problem, largest, sizes) -> list[int]:
        self.compared += [problem] if [problem] == [*sizes] else []
        shares, _ = Matmul.reduction_order(problem, candidate.schedule)
        lies = self.liars(problem, candidate.schedule)
        return [int(stable_id([shares, each.to_json(), lies], 16), 16) for each in sizes]

    def close(self) -> None: ...


@pytest.fixture
def tune(tmp_path):
    """A tune on a made-up GPU; its report."""
    sessions = []

    def tuned(cases=WEIGHT, gpu=None, sizes=SIZES, **options):
        tools = Tools(
            toolchain=toolchain,
            artifacts=lambda cache: FakeBuilds(),
            pool=lambda jobs: FakeBuilds(),
            devices=lambda: [H200],
            lacking=str,
            runner=lambda kernel, seed: gpu or Gpu(),
        )
        settings = load_settings({"db": str(tmp_path / "tuning.db"), "rivals": "off"})
        sessions.append(Session("sm_90", settings=settings, tools=tools))
        problems = [{**cases, "m": size} for size in sizes] if sizes else [cases]
        return sessions[-1].tune(Matmul, problems, TuneOptions(numerics="invariant", effort="quick", **options))

    yield tuned
    for each in sessions:
        each.close()


def table(tmp_path, numerics="invariant") -> LookupTable:
    settings = load_settings({"db": str(tmp_path / "tuning.db"), "numerics": numerics})
    return load_table(settings, kernel=Matmul, archs={"sm_90"})


def order(m, served):
    return Matmul.reduction_order(Matmul.problem(m=m, **WEIGHT), served.schedule)[0]


def test_one_group_is_stored_and_serves_every_size(tune, tmp_path) -> None:
    report = tune()
    assert {entry.accum_mode for entry in report.entries} == {"invariant"}
    (group,) = {entry.group for entry in report.entries}
    assert group
    known = table(tmp_path)
    served = {
        m: known.resolve(Matmul.problem(m=m, **WEIGHT), "sm_90", H200.name) for m in (1, 2, 5, 64, 100, 2048, 9999)
    }
    assert len({order(m, each) for m, each in served.items()}) == 1
    assert len({each.schedule for each in served.values()}) > 1
    assert served[64].provenance == "measured"
    assert served[5].schedule == served[64].schedule  # a tile for one row would do too little
    assert not any(each.rivals or each.alternatives for each in served.values())
    said = str(explain_problem(known, Matmul.problem(m=64, **WEIGHT), "sm_90", H200.name))
    assert f"batch-invariant group {group}: equal bits at" in said
    assert "slower over m = 1..2048" in said
    assert "unverified" not in said
    with TuningDB.open(tmp_path / "tuning.db") as db:
        assert [entry.group for entry in build_report(db, "sm_90", Matmul).invariant] == [group] * len(SIZES)
    free = table(tmp_path, "any").resolve(Matmul.problem(m=64, **WEIGHT), "sm_90", H200.name)
    assert free.entry is None or free.entry.accum_mode == "fp32"


def test_sizes_between_those_that_race_are_proven(tune) -> None:
    gpu = Gpu()
    tune(gpu=gpu)
    assert {p.m for p in gpu.compared} >= {1, 2, 3, 16, 17, 63, 64, 65, 128, 512, 2048}


def test_a_schedule_that_breaks_its_claim_fails_and_another_serves(tune, tmp_path) -> None:
    asked = []

    def first_at_2(p, s) -> bool:
        asked.extend([s] if p.m == 2 else [])
        return p.m == 2 and s == asked[0]

    entry = next(each for each in tune(gpu=Gpu(first_at_2), sizes=(1, 64)).entries if each.problem.m == 64)
    with TuningDB.open(tmp_path / "tuning.db") as db:
        (failed,) = db.failures("sm_90", entry.problem)
    assert (failed.schedule, str(failed.failure.kind)) == (asked[0], "other_numbers")
    assert "computes other bits for m=2" in failed.failure.message
    assert entry.schedule == asked[1]


def test_nothing_is_stored_where_no_group_holds_at_all_sizes(tune, tmp_path) -> None:
    with pytest.raises(MeasureError, match="no group of schedules"):
        tune(gpu=Gpu(lambda p, s: p.m == 63))
    with TuningDB.open(tmp_path / "tuning.db") as db:
        assert not db.entries("sm_90", "matmul")


def test_a_weight_that_was_never_tuned_has_one_schedule_for_every_batch(tmp_path) -> None:
    known = table(tmp_path)
    served = [known.resolve(Matmul.problem(m=m, **WEIGHT), "sm_90", H200.name) for m in (1, 16, 17, 512, 4096)]
    assert len({each.schedule for each in served}) == 1
    assert all("not proven by digests" in each.reason and not each.rivals for each in served)
    free, p = table(tmp_path, "any"), Matmul.problem(m=512, **WEIGHT)
    assert known.fallback_for(served[3], p, "sm_90") is None is not free.fallback_for(served[3], p, "sm_90")
    assert len({free.resolve(Matmul.problem(m=m, **WEIGHT), "sm_90", H200.name).schedule for m in (1, 512, 4096)}) > 1


def test_a_batch_that_is_not_named_races_at_the_sizes_of_the_kernel() -> None:
    assert [each.m for each in problems_of(Matmul, [WEIGHT], every_batch=True)] == list(Matmul.batch_sizes)
    assert [each.m for each in problems_of(Matmul, [{**WEIGHT, "m": 7}], every_batch=True)] == [7]
    with pytest.raises(ConfigError, match="declares no batch_dims"):
        problems_of(ts.load_kernel("rope"), [{}], every_batch=True)


def test_it_takes_a_gpu_that_tells_bits(tune, capsys, tmp_path) -> None:
    recording = SimpleNamespace(**{name: getattr(Gpu(), name) for name in ("name", "device", "device_name", "close")})
    with pytest.raises(ConfigError, match="no digests of rows"):
        tune(gpu=recording)
    assert isinstance(Gpu(), RowRunner)
    words = ["tune", "matmul", "-p", "n=64,k=64", "--arch", "sm_90", "--numerics", "invariant", "--runner", "none"]
    assert main([*words, "--db", str(tmp_path / "none.db")]) == 2
    assert "leave out --numerics invariant" in " ".join(capsys.readouterr().err.split())


def test_explain_takes_the_numerics(capsys, tmp_path) -> None:
    words = ["explain", "matmul", "-p", "m=3,n=4096,k=4096", "--arch", "sm_90", "--db", str(tmp_path / "none.db")]
    assert main([*words, "--numerics", "invariant"]) == 0
    assert "one schedule for every batch" in " ".join(capsys.readouterr().out.split())


def test_rows_of_a_smaller_problem_are_the_first_rows_of_a_larger_one() -> None:
    small, large = (GroupedMatmul.problem(tokens=tokens, experts=3, n=8, k=8) for tokens in (5, 9))
    specs = [each for each in GroupedMatmul.arrays(small) if each.role == "in"]
    arrays = {"A": numpy.arange(72.0).reshape(9, 8), "B": numpy.ones((3, 8, 8)), "Offsets": numpy.array([4, 6, 9])}
    found = first_rows(numpy, arrays, specs, {"Offsets": numpy.array([1, 2, 5])})
    assert found["Offsets"].tolist() == [4, 5, 5]
    assert (found["A"] == arrays["A"][:5]).all()
    assert large.tokens == 9


def test_shares_of_one_block_have_the_bits_of_shares_of_several() -> None:
    p = Matmul.problem(m=70, n=64, k=256)
    s = ts.space_for("sm_90", Matmul).default(p).replace(TILE_M=64, TILE_N=64, TILE_K=32, num_worker_warps=4)
    inputs = {name: numpy.zeros_like(array) for name, array in make_inputs(Matmul, p).items()}
    # 2**24 + 1 + 1 - 2**24 in steps of their own, where the second and third are of one share.
    for step, one, other in ((0, 4096, 4096), (2, 1, 1), (3, 1, 1), (6, -4096, 4096)):
        inputs["A"][:, 32 * step], inputs["B"][32 * step] = one, other
    found = [run_schedule(Matmul, p, s.replace(SPLIT_K=shares), inputs)["C"] for shares in (4, -4, 1)]
    assert [set(each.astype(float).ravel()) for each in found] == [{2.0}, {2.0}, {0.0}]
    assert Matmul.reduction_order(p, s.replace(SPLIT_K=4)) == Matmul.reduction_order(p, s.replace(SPLIT_K=-4))


def products(weight, *sizes):
    """The rows of products of the first rows of one matrix, by torch's bits."""
    x = torch.randn(max(sizes), weight.shape[0], generator=torch.Generator().manual_seed(1)).half()
    return [ts.matmul(x[:size], weight).view(torch.int16) for size in sizes]


def test_within_a_block_plans_are_those_of_every_batch(launches) -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).half()
    plan = operator("matmul").plan_for
    x = weight.t().contiguous()
    before = plan(x, weight)
    with ts.batch_invariant():
        assert process.is_invariant()
        inside = plan(x, weight)
        assert "one schedule for every batch" in inside.served.reason
        assert plan(x[:1].contiguous(), weight).served.schedule == inside.served.schedule
        with ts.batch_invariant():
            assert plan(x, weight) is inside
        assert plan(x, weight) is inside
        one, several = products(weight, 1, 70)
        assert (several[:1] == one).all()
    assert not process.is_invariant()
    assert plan(x, weight) is before
    assert ts.batch_invariant()(lambda: process.is_invariant())()
    with ts.configure(numerics="invariant"):
        assert "one schedule for every batch" in plan(x, weight).served.reason
    with pytest.raises(ConfigError, match="is called first"), ts.batch_invariant:
        pass


def test_a_next_choice_found_before_the_block_is_none_of_its_plans(monkeypatch) -> None:
    monkeypatch.setattr(PlanCache, "every", [])
    cache: PlanCache = PlanCache(lambda *call: call)
    cache.plans["key"] = "refused by the compiler"
    with ts.batch_invariant():
        cache.exchange("key", "refused by the compiler", "of other bits")
        assert not cache.plans
    cache.exchange("key", "refused by the compiler", "the next choice")
    assert cache.plans == {"key": "the next choice"}


def test_a_first_call_waits_for_its_program(launches, monkeypatch) -> None:
    for name, value in (("COMPILE", "background"), ("FALLBACK", "torch"), ("RIVALS", "serve")):
        monkeypatch.setenv(f"TILEDSCHED_{name}", value)
    process.forget_plans()
    made = operator("matmul")
    plan = made.plan_for(torch.ones(16, 32).half(), torch.ones(32, 16).half()).own

    def first() -> str:
        made.cache.building["key"] = [SimpleNamespace(is_done=False)]
        return launch_first(made.cache, "key", plan, lambda plan: "ours", None, lambda plan: "torch")

    assert first() == "torch"
    with ts.batch_invariant():
        assert first() == "ours"


def test_calls_that_only_torch_computes_are_refused(launches, monkeypatch) -> None:
    monkeypatch.setenv("TILEDSCHED_FALLBACK", "torch")
    q = torch.randn(1, 2, 8, 16).half()
    mask = torch.rand(8, 8) > 0.5
    ts.sdpa(q, q, q, attn_mask=mask | torch.eye(8, dtype=torch.bool))
    with ts.batch_invariant(), pytest.raises(UnsupportedError, match="bits that depend on the batch"):
        ts.sdpa(q, q, q, attn_mask=mask)


def test_batch_dims_need_an_order() -> None:
    with pytest.raises(DeclarationError, match="reduction_order"):
        type("Odd", (Matmul,), {"reduction_order": Kernel.reduction_order, "__module__": __name__, "name": "odd"})
