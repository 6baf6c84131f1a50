"""The study of products with epilogues: its problems, that every method computes the same, and that what a tune found to be the
fastest serves. No GPU, and nothing is compiled."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fake_worker
import pytest

torch = pytest.importorskip("torch")

from fake_builds import FakeBuilds, print_of
from serve_on_cpu import changed
from store_samples import TOOLCHAIN

import tests
import tiledsched as ts
from docs.studies import epilogues, product_races
from docs.studies.batch_invariance import normal
from docs.studies.flex_variants import relative_error
from tiledsched.core.registry import kernel_named
from tiledsched.core.space_files import space_for
from tiledsched.measure.gpu import GpuRunner
from tiledsched.ops.front import operator
from tiledsched.rivals.races import RivalRaces
from tiledsched.store.db import TuningDB
from tiledsched.tuning.resources import Tools

pytestmark = pytest.mark.usefixtures("fresh")


def test_there_are_24_products_of_the_kernel():
    found = list(epilogues.cells([""], epilogues.TOKENS))
    assert len({name for name, _ in found}) == 24
    for _, values in found:
        kernel_named("matmul_epilogue").problem(**values)
    assert [name for name, _ in epilogues.cells(["qkv"], [64])] == ["qwen2_7b qkv 64"]


@pytest.mark.parametrize("layer", ["llama3_8b gate_up", "llama3_8b down", "qwen2_7b qkv"])
def test_every_method_computes_the_same(launches, monkeypatch, layer):
    monkeypatch.setattr(epilogues, "normal", partial(normal, device="cpu"))
    values = {"m": 24, "n": 40, "k": 64, "b_layout": "column", **epilogues.LAYERS[layer][2]}
    given = epilogues.tensors_of(values)
    exact = epilogues.in_torch(**{name: each.double() for name, each in given.items()})
    with ts.configure(compile="wait"):
        methods = epilogues.methods_of(values, given)
        for name in ("served", "own", "eager"):
            assert relative_error(methods[name](), exact) < 5e-3, name


def test_the_last_lines_name_the_mean_and_the_least():
    rows = [{"product": name, "over_served": each, "over_own": ""} for name, each in (("one", 1.0), ("other", 4.0))]
    assert epilogues.conclusion(rows) == ["over_served: 2 products, mean 2.000, least 1.000 (one)"]


# A tune on a made-up GPU, on which torch.mm takes 80 us and torch.addmm 60; see `fake_rival_worker`


MADE_UP = SimpleNamespace(name="Made-up GPU", arch="sm_90", sm_count=8)
SMALL = {"residual": (24, 40, {"residual": True}), "gated": (24, 40, {"gate": True, "activation": "silu"})}


class Compiler(FakeBuilds):
    """Programs of our kernel take so many microseconds, the default schedule's twice as long."""

    def __init__(self, us: float) -> None:
        super().__init__()
        self.us, self.left = us, []

    def outcome(self, schedule):
        us = self.us * (1 + (schedule == DEFAULT))
        self.made = {**getattr(self, "made", {}), print_of(schedule): us}
        return self.get("sm_90", print_of(schedule))

    def get(self, arch, fingerprint):
        return fake_worker.artifact(fake_worker.cubin(self.made[fingerprint]), fingerprint)

    def build(self, tasks, *, leave=0):
        self.left.append(leave)
        return super().build(tasks, leave=leave)

    @property
    def tools(self) -> Tools:
        def command(name):
            return (sys.executable, str(Path(tests.__path__[0], name)))

        return Tools(
            toolchain=lambda: TOOLCHAIN,
            artifacts=lambda folder: self,
            pool=lambda jobs: self,
            devices=lambda: [MADE_UP],
            lacking=lambda: "",
            runner=lambda kernel, seed: GpuRunner(kernel, worker_command=(*command("fake_worker.py"), "ready")),
            rivals=lambda kernel, runner, regime: RivalRaces(
                kernel, runner, regime=regime, command=command("fake_rival_worker.py"), rounds={regime: 8}
            ),
        )


KERNEL = kernel_named("matmul_epilogue")
DEFAULT = space_for("sm_90", KERNEL).default(KERNEL.problem(m=24, n=24, k=40, b_layout="column", residual=True))


@pytest.fixture
def tuned(monkeypatch, home):
    """Tune the small products with programs of ours that take so many microseconds; the rows by product, and the database."""
    monkeypatch.setattr(epilogues, "LAYERS", SMALL)

    def tune(us, seconds=600.0):
        compiler = Compiler(us)
        ends_s, database = time.monotonic() + seconds, str(home / "tuning.db")
        rows = {row["product"]: row for row in epilogues.tune([""], [24], ends_s, database, compiler.tools)}
        return rows, compiler

    return tune


@pytest.mark.parametrize(
    ("us", "serves"), [(40.0, ["own", "own"]), (70.0, ["cublas_fused", "own"]), (400.0, ["cublas_fused", "torch"])]
)
def test_the_fastest_of_our_kernel_and_torchs_serves(tuned, home, launches, monkeypatch, us, serves):
    rows, _ = tuned(us)
    assert [row["serves"] for row in rows.values()] == serves
    monkeypatch.setenv("TILEDSCHED_DB", str(home / "tuning.db"))
    ts.ops.sdpa.reload()
    with TuningDB.open(home / "tuning.db") as db:
        entries = {each.problem.gate: each for each in db.entries("sm_90")}
    products = {"torch": 160.0, "torch_compile": 160.0}
    for gate, times in ((False, {"torch": 80.0, "torch_compile": 80.0, "cublas_fused": 60.0}), (True, products)):
        assert {each.name: (each.median_us, each.ours_us) for each in entries[gate].rivals} == {
            name: pytest.approx((theirs, us)) for name, theirs in times.items()
        }
    monkeypatch.setattr(epilogues, "normal", partial(normal, device="cpu"))
    with ts.configure(compile="wait"), changed(read_device=lambda index: MADE_UP):
        for name, values in epilogues.cells([""], [24]):
            given, before = epilogues.tensors_of(values), len(launches)
            exact = epilogues.in_torch(**{key: each.double() for key, each in given.items()})
            for _ in range(2):
                assert relative_error(ts.matmul(**given, activation=values.get("activation")), exact) < 5e-3
            served = rows[name]["serves"]
            assert (len(launches) > before) == (served == "own")
            fields = {"activation": values.get("activation", "none"), "out_dtype": "bfloat16"}
            fields |= {each: bool(values.get(each)) for each in ("bias", "gate", "residual")}
            said = operator("matmul_epilogue", **fields).explain(*given.values())
            assert (said.rival or "own") == served


def test_programs_are_compiled_ahead_and_nothing_is_measured_twice(tuned):
    rows, compiler = tuned(40.0)
    assert [row["own_us"] for row in rows.values()] == [40.0, 40.0]
    ahead = compiler.left[: len(SMALL)]
    assert all(ahead)
    assert sum(ahead) == len(compiler.schedules)  # all are left to later calls, and none is compiled again
    assert tuned(40.0)[0] == {}


def test_nothing_is_begun_without_time(tuned, capsys):
    rows, _ = tuned(40.0, seconds=-1.0)
    assert rows == {}
    assert "no time left for" in capsys.readouterr().err


def test_a_part_ends_before_the_longest_step_so_far_would_end_too_late():
    for ends_s, done in ((17.0, "abcd"), (16.9, "abc"), (8.0, "a")):
        now = iter((0.0, 9.0, 9.0, 12.0, 12.0, 14.0, 14.0, 16.0))
        assert list(product_races.in_time("abcd", ends_s, lambda now=now: next(now))) == list(done)


def test_what_races_on_each_product_is_what_serves_and_shapes_that_won_on_plain_products_and_their_neighbours():
    from tiledsched.core.config import load_settings
    from tiledsched.serve.entries import lent_entries, load_table

    space, entries = space_for("sm_90", KERNEL), lent_entries(load_settings(), {"sm_90"}, KERNEL)
    table = load_table(load_settings(), kernel=KERNEL, archs={"sm_90"})
    for _, values in epilogues.cells(["llama3", "qkv"], [64, 8192]):
        problem = KERNEL.problem(**values)
        served = table.resolve(problem, "sm_90", "NVIDIA H200").schedule
        first, *others = product_races.promising(problem, served, entries, space, "NVIDIA H200")
        assert first == served
        assert 6 <= len(set(others)) == len(others) <= product_races.SHAPES + product_races.STORED_BOTH_WAYS
        assert not any(space.unworkable(each, problem) for each in others)
        if problem.gate:
            assert all(2 * each["TILE_M"] * each["TILE_N"] <= 32768 * each["num_ctas"] for each in others)
