"""The search bench: the field, the scores, and every method on a landscape, as far as its packages are installed."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from docs.studies.search import ours
from docs.studies.search.__main__ import main
from docs.studies.search.bench import shipped_landscapes
from docs.studies.search.field import read_field
from docs.studies.search.methods import METHODS
from docs.studies.search.scores import DEPTHS, Run, Trace, read_runs, score, summarise
from tiledsched.core.errors import ConfigError
from tiledsched.tuning.options import EFFORTS

NEEDS = {"optuna-gp": "torch", "optuna-cma-es": "cmaes", "kernel-tuner": "kernel_tuner"}
SLOW = ("optuna-gp", "optuna-brute-force", "kernel-tuner-pso", "tiledsched-thorough", "tiledsched-thorough-warm")


@pytest.fixture(scope="module")
def fields():
    return tuple(read_field(path) for path in shipped_landscapes()[:4])


def test_a_field_holds_every_recorded_program_once(fields) -> None:
    for field in fields:
        assert len(set(field.schedules)) == len(field.schedules) == len(field.times_us) >= 300
        assert field.codes.shape == (len(field.schedules), len(field.knobs))
        assert len({tuple(row) for row in field.codes}) == len(field.schedules)
        assert field.best_us == min(stored.measurement.median_us for stored in field.evidence)
        assert set(field.space.schedules(field.problem)) == set(field.schedules)
        assert (field.device_s > field.times_us / 1e6 * 0.99).all()


@pytest.mark.parametrize("name", [name for name in METHODS if name not in SLOW])
def test_a_method_measures_each_program_once_and_again_the_same(fields, name) -> None:
    for prefix, package in NEEDS.items():
        if name.startswith(prefix) and importlib.util.find_spec(package) is None:
            with pytest.raises(ConfigError, match="pip install"):
                METHODS[name].search(fields[0], fields, 3)
            pytest.skip(f"needs {package}")
    trace = METHODS[name].search(fields[0], fields, 3)
    assert len(set(trace.measured)) == len(trace.measured) == len(trace.compiled)
    assert set(trace.measured) <= set(range(len(fields[0].schedules)))
    assert list(trace.compiled) == sorted(trace.compiled)
    assert all(compiled >= place for place, compiled in enumerate(trace.compiled, start=1))
    if name != "kernel-tuner-bayes-opt":  # it draws from a generator of its own
        assert METHODS[name].search(fields[0], fields, 3) == trace


def test_scores_by_hand(fields) -> None:
    field = fields[0]
    order = np.argsort(field.times_us)
    worst, best = int(order[-1]), int(order[0])
    run = score("x", field, 7, Trace(measured=(worst, best), compiled=(2, 5)))
    assert (run.measurements_to_1pct, run.compiles_to_1pct, run.measurements) == (2, 5, 2)
    assert run.device_s_to_1pct == pytest.approx(field.device_s[[worst, best]].sum(), abs=1e-4)
    assert [getattr(run, f"regret_{depth}") for depth in DEPTHS] == [0.0] * 4
    never = score("x", field, 7, Trace(measured=(worst,), compiled=(1,)))
    assert never.measurements_to_1pct is never.compiles_to_5pct is never.device_s_to_1pct is None
    assert never.regret_10 == pytest.approx(field.times_us[worst] / field.best_us - 1, abs=1e-5)


def made(landscape: str, seed: int, to_1pct: int | None, regret: float = 0.1) -> Run:
    return Run(
        sampler="x",
        landscape=landscape,
        seed=seed,
        measurements=50,
        measurements_to_1pct=to_1pct,
        measurements_to_5pct=3,
        compiles_to_1pct=to_1pct,
        compiles_to_5pct=3,
        device_s_to_1pct=None,
        device_s_to_5pct=0.5,
        regret_10=regret,
        regret_25=regret,
        regret_50=regret,
        regret_100=0.0,
    )


def test_a_run_that_never_came_near_counts_as_infinite() -> None:
    (line,) = summarise([made("a", 0, 10), made("a", 1, None), made("b", 0, 20, 0.3), made("b", 1, 30)])
    assert line.measurements_to_1pct == 25.0
    assert line.reached == 0.75
    assert line.device_s_to_1pct is None
    assert line.regret_25 == pytest.approx(0.15)
    assert line.worst_regret_50 == 0.3
    assert (line.landscapes, line.seeds) == (2, 2)
    low, _ = line.measurements_to_1pct_interval
    assert low <= 25.0
    (never,) = summarise([made("a", 0, None), made("b", 0, None), made("c", 0, 5)])
    assert never.measurements_to_1pct is None


def test_nothing_of_the_problem_or_its_siblings_is_learnt_from(fields) -> None:
    same = [field for field in fields if field.problem.head_dim == 64 and field.problem.causal]
    assert len(same) == 2  # S=1024, D=64, causal, with 512 and with 8 heads in all
    assert ours.siblings(*same)
    known = ours.neighbours(same[0], fields)
    assert known
    assert not {each.task for each in known} & {field.problem for field in same}


def test_the_search_meets_its_target(fields) -> None:
    """Within 1% after at most 20 measurements in the median, and all within 2% at the end: four landscapes, cold."""
    runs = [score("x", field, 0, ours.search(field, EFFORTS["default"], 0)) for field in fields]
    assert np.median([run.measurements_to_1pct or np.inf for run in runs]) <= 20
    assert max(run.regret_100 for run in runs) <= 0.02


def test_the_command(tmp_path, capsys) -> None:
    files = [str(path) for path in shipped_landscapes()[:2]]
    arguments = ["--landscapes", *files, "--jobs", "1", "--csv", str(tmp_path / "runs.csv")]
    assert main([*arguments, "--samplers", "random,grid", "--seeds", "3"]) == 0
    seeds = {run.sampler: run.seed for run in read_runs(tmp_path / "runs.csv")}
    assert seeds == {"random": 2, "grid": 0}
    figure = tmp_path / "search.png"
    assert main([*arguments, "--samplers", "tiledsched-quick", "--seeds", "1", "--figure", str(figure)]) == 0
    out = capsys.readouterr().out
    assert "random" in out  # kept from before
    assert "tiledsched-quick" in out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert {run.sampler for run in read_runs(tmp_path / "runs.csv")} == {"random", "grid", "tiledsched-quick"}
