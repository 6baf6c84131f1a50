"""`tune` and `check` of a kernel somebody declared in a file, on a machine with no GPU; and what the tutorial says of them."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from test_search_tuner import LANDSCAPES, Recorded, tune as tune_recorded

import tiledsched as ts
from tiledsched.build.compiler import BuildTask, compile_task, prepare_process
from tiledsched.build.pool import BuildPool
from tiledsched.core.cases import shrunk
from tiledsched.core.config import load_settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import ConfigError, DeclarationError, MeasureError, ProblemError, SpaceError
from tiledsched.core.problem_lists import problems_of
from tiledsched.core.registry import load_kernel
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.gpu import GpuRunner
from tiledsched.measure.replay import ReplayRunner
from tiledsched.rivals.races import RivalRaces
from tiledsched.store.db import TuningDB
from tiledsched.tuning.options import TuneOptions
from tiledsched.tuning.prior import estimator
from tiledsched.tuning.resources import Tools, start_rival_timer
from tiledsched.tuning.results import TuneReport
from tiledsched.tuning.session import Session

ROOT = Path(__file__).parent.parent
SCALE = '''
import cuda.tile as ct
import tiledsched as ts


@ct.kernel
def scale(X, Out, factor, TILE: ct.Constant[int]):
    i = ct.bid(0)
    x = ct.load(X, (i, 0), (TILE, 64), padding_mode=ct.PaddingMode.ZERO)
    ct.store(Out, (i, 0), (x * factor).astype(Out.dtype))


class Scale(ts.Kernel):
    """Every element times a number."""

    function = scale
    rows = ts.dim()
    dtype = ts.dtype("float16", "bfloat16")
    X, Out = ts.array("rows 64"), ts.out("rows 64")
    factor = ts.scalar(0.5)
    knobs = {"TILE": [16, 32], "occupancy": [1, 2]}
    suites = {"even": [dict(rows=4096), dict(rows=1024)], "odd": [dict(rows=1000)]}

    def grid(p, s, device):
        return -(-p.rows // s["TILE"])

    def reference(xp, X, factor):
        return X * factor
'''
TUTORIAL = re.findall(
    r"```(?:python)?\n(.*?)```", (ROOT / "docs" / "tutorials" / "tune-my-kernel.md").read_text(), re.DOTALL
)
SOFTMAX = "\n\n".join(TUTORIAL[:2])
"""What the tutorial's reader has in softmax.py."""
PADDING = ", padding_mode=ct.PaddingMode.NEG_INF"
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("tilegym_*.py"))
TINY = {
    "tilegym_matmul": {"m": 100, "n": 72, "k": 64},
    "tilegym_rms_norm": {"rows": 5, "columns": 100},
    "tilegym_softmax": {"rows": 5, "columns": 100},
    "tilegym_rope": {"batch": 1, "seq": 3, "q_heads": 4, "k_heads": 2, "head_dim": 64},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with scale.py, whose database and cache are used by default."""
    path = tmp_path_factory.mktemp("tuning")
    (path / "scale.py").write_text(SCALE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TILEDSCHED_DB", str(path / "tuning.db"))
        patched.setenv("TILEDSCHED_CACHE", str(path / "cache"))
        yield path


@pytest.fixture(scope="module")
def kernel(folder):
    return load_kernel(f"{folder}/scale.py:Scale")


@pytest.fixture(scope="module")
def tuned(folder):
    """A suite, tuned by the name of the kernel's file."""
    return ts.tune(f"{folder}/scale.py:Scale", "even", arch="sm_90", runner="none", jobs=1)


@pytest.mark.compiler
def test_a_tune_returns_what_is_served_and_a_second_one_compiles_nothing(tuned, kernel) -> None:
    assert (tuned.kernel, tuned.arch, tuned.measured) == (kernel, "sm_90", False)
    assert list(tuned.winners) == kernel.suite("even")
    space = space_for("sm_90", kernel)
    assert all(space.violations(schedule, problem) == [] for problem, schedule in tuned.winners.items())
    first, second = tuned.results
    assert (first.schedules, first.compiled, second.compiled) == (4, 4, 0)  # another length, the same machine code
    assert {(entry.provenance, entry.run_id) for entry in tuned.entries} == {("modelled", tuned.run_id)}
    again = ts.tune(kernel, [{"rows": 4096}], arch="sm_90", runner="none", jobs=1)
    assert [result.compiled for result in again.results] == [0]
    assert again.winners == {kernel.problem(rows=4096): tuned.entries[0].schedule}
    assert again.run_id != tuned.run_id


def test_a_report_is_rows_prints_itself_and_is_a_table_in_a_notebook(tmp_path) -> None:
    recorded = Recorded(LANDSCAPES[4])
    with TuningDB.open(tmp_path / "x.db") as db:
        results = [tune_recorded(recorded, db, trials=8), tune_recorded(recorded, db, measure=False)]
        entries = [*db.entries(provenance="measured"), results[1].entry]
    report = TuneReport(kernel=Attention, arch="sm_90", run_id=1, results=results, entries=entries, measured=True)
    head, *lines = str(report).splitlines()
    html, rows = report._repr_html_(), json.loads(json.dumps(report.rows))
    assert (head, html.count("<tr>"), html.count("<th>"), len(rows)) == ("attention on sm_90", 3, 4, 2)
    assert html.startswith("<table>")
    for line, row, entry, result in zip(lines, rows, entries, results, strict=True):
        us = entry.median_us or entry.model_us
        for words in (str(entry.problem), entry.schedule.short(), f"{us:.1f} us", entry.provenance):
            assert words in line
            assert f"<td>{words}</td>" in html
        assert (row["kernel"], row["seq_q"], row["schedule"]) == ("attention", 1024, entry.schedule.to_json())
        assert (row["median_us"], row["model_us"], row["provenance"]) == (
            entry.median_us,
            entry.model_us,
            entry.provenance,
        )
        assert (row["programs"], row["measured_programs"], row["failed"]) == (
            result.programs,
            result.measured,
            result.failed,
        )
        assert row["runner_up"] != row["schedule"]


def test_rivals_are_timed_beside_a_gpu_where_the_kernel_names_some(kernel) -> None:
    with closing(GpuRunner(Attention, worker_command=["true"])) as gpu:
        assert start_rival_timer(kernel, gpu, "burst") is None
        assert (
            start_rival_timer(Attention, ReplayRunner(Attention, Recorded(LANDSCAPES[4]).measurements), "burst") is None
        )
        made = start_rival_timer(Attention, gpu, "burst")
        assert isinstance(made, RivalRaces) == (importlib.util.find_spec("torch") is not None)


@pytest.mark.compiler
def test_few_trials_without_a_gpu_build_the_default_and_the_models_favourite(kernel, tmp_path) -> None:
    built = []

    class Noted(BuildPool):
        def build(self, tasks, **more):
            built.extend(task.schedule for task in tasks)
            return super().build(tasks, **more)

    problem, space = kernel.problem(rows=4096), space_for("sm_90", kernel)
    default, estimate = space.default(problem), estimator(problem, arch_spec("sm_90"))
    others = [each for each in space.schedules(problem) if each != default]
    settings, tools = load_settings({"db": str(tmp_path / "few.db")}), Tools(pool=lambda jobs: Noted(1))
    with Session("sm_90", settings=settings, tools=tools) as session:
        session.tune(kernel, [problem], TuneOptions(runner="none", trials=2))
    assert built == [default, min(others, key=lambda schedule: (estimate(schedule, None), schedule.id))]


@pytest.mark.slow
@pytest.mark.compiler
def test_a_script_that_tunes_as_it_is_imported_is_told(tmp_path) -> None:
    script, db = tmp_path / "script.py", tmp_path / "script.db"
    script.write_text(f"""import tiledsched as ts
ts.tune("softmax", [dict(rows=64, columns=1024)], arch="sm_90", runner="none", db={str(db)!r}, trials=2)
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "if __name__ == '__main__':" in done.stderr.splitlines()[-1]
    with TuningDB.open(str(db), read_only=True) as kept:  # what was never compiled is no failure of a schedule
        assert not kept.failures("sm_90")


def test_problems_are_given_as_such_as_values_by_a_suite_or_not_at_all(kernel) -> None:
    even, odd = kernel.suite("even"), kernel.suite("odd")
    assert problems_of(kernel, "odd") == odd == [kernel.problem(rows=1000)]
    assert problems_of(kernel, [{"rows": 1000}, odd[0], {"rows": 7, "dtype": "bfloat16"}]) == [
        odd[0],
        kernel.problem(rows=7, dtype="bfloat16"),
    ]
    assert problems_of(kernel, None) == [*even, *odd]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"problems": "wide"}, ConfigError, "has no suite 'wide'; known are even, odd"),
        ({"problems": []}, ConfigError, "no problem of scale:Scale is named.*pass --problem"),
        ({"problems": [{"rows": 0}]}, ProblemError, "rows must be a positive integer, got 0"),
        ({"problems": [{"lines": 4}]}, ProblemError, "unknown problem keys.*rows"),
        ({"arch": "sm_42"}, SpaceError, "sm_42.*sm_90"),
        ({"arch": "sm_121", "space": "my.toml"}, ConfigError, "is for sm_90, not sm_121; pass --arch sm_90"),
        ({"runner": "gpu"}, MeasureError, "no sm_90 GPU here; run: tiledsched doctor, or use --runner none"),
        ({"candidates": "none.json"}, ConfigError, "cannot read candidates"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_said_before_anything_is_built(folder, kernel, monkeypatch, given, error, words) -> None:
    monkeypatch.chdir(folder)
    tools = Tools(devices=list, pool=lambda jobs: pytest.fail("something is to be built"))
    options = {"problems": "even", "arch": "sm_90", "runner": "none", **given}
    problems, arch = options.pop("problems"), options.pop("arch")
    Path("my.toml").write_text('kernel = "scale:Scale"\narch = "sm_90"\n[knobs.TILE]\nchoices = [16]\n')
    with pytest.raises(error, match=words), Session(arch, tools=tools) as session:
        session.tune(kernel, problems, TuneOptions(**options))


@pytest.mark.compiler
def test_every_listed_candidate_is_raced_refused_or_unknown(folder, home, cli) -> None:
    (home / "listed.csv").write_text(
        "\ufeffTILE,occupancy,time\n16,1,1\n32,2,2\n32,2,2\n64,1,1\n,,4\n", encoding="utf-8"
    )
    kernel = ["tune", f"{folder / 'scale.py'}:Scale", "--arch", "sm_90", "-p", "rows=64", "--runner", "none"]
    command = [*kernel, "--db", str(home / "listed.db"), "--candidates", "listed.csv"]
    said = " ".join(cli(command).out.split())
    assert (
        "5 listed candidates: 2 raced, 2 refused (1: listed before; 1: TILE = 64 is not one of [16, 32]), "
        "1 unknown (it names none of the knobs)" in said
    )
    (result,) = cli([*command, "--trials", "1", "--json"]).json["results"]
    assert sum(result["candidates"].values()) == 5


def test_a_kernel_without_suites_wants_problems_and_one_at_a_prompt_cannot_be_tuned(tmp_path) -> None:
    (tmp_path / "bare.py").write_text(re.sub(r"    suites = .*\n", "", SCALE))
    with pytest.raises(ConfigError, match="it declares no suites"):
        ts.tune(f"{tmp_path}/bare.py:Scale", arch="sm_90", runner="none")
    program = SCALE + "\nts.tune(Scale, 'even', arch='sm_90', runner='none')\n"
    run = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert f"{DeclarationError.__name__}: Scale was declared at a prompt; put it in a file" in run.stderr


# check, and the tutorial


@pytest.fixture
def home(home, monkeypatch):
    """An empty folder with the tutorial's softmax.py in it."""
    monkeypatch.chdir(home)
    Path("softmax.py").write_text(SOFTMAX)
    return home


def checked(source, *columns, schedules=1):
    """The rows of a check of the tutorial's kernel as `source` has it, on rows of so many columns."""
    Path("changed.py").write_text(source)
    problems = [{"rows": 3, "columns": each} for each in columns]
    return list(ts.check("changed.py:Softmax", problems, schedules=schedules))


def test_a_right_kernel_passes_its_check(home) -> None:
    rows = checked(SOFTMAX, 1000, 1024, schedules=2)
    assert [(row.problem.columns, row.passed, row.message) for row in rows] == [
        (columns, True, "") for columns in (1000, 1000, 1024, 1024)
    ]
    assert len({row.schedule for row in rows}) == 2
    assert all(0 < row.worst_error < 4e-3 for row in rows)
    assert json.loads(json.dumps(rows[0].to_json()))["problem"]["columns"] == 1000


def test_the_mistake_that_the_tutorial_plants_is_found(home, cli) -> None:
    mistaken = SOFTMAX.replace(PADDING, "")
    rows = checked(mistaken, 4000, 1024)
    assert mistaken != SOFTMAX
    assert [row.passed for row in rows] == [False, True]  # a tile that is full has nothing to pad
    assert rows[0].message
    assert rows[0].worst_error > 4e-3 or math.isnan(rows[0].worst_error)
    said = cli(["check", "changed.py:Softmax", "--problem", "rows=3,columns=4000", "--schedules", "1"], code=1).out
    assert "0 of 1 schedules right" in said


def test_a_wrong_result_says_where(home) -> None:
    (row,) = checked(SOFTMAX.replace("e / ct.sum(e,", "e / ct.sum(e * 2,"), 1024)
    assert (row.passed, row.worst_error) == (False, pytest.approx(0.5, abs=0.01))
    assert "Out" in row.message


# Kernels of others


@pytest.fixture
def example(request):
    """A declaration in docs/examples."""
    if importlib.util.find_spec("tilegym") is None:
        pytest.skip("needs TileGym: pip install --no-deps tilegym==1.5.1")
    (name,) = re.findall(r"^class (\w+)\(ts\.Kernel\):", request.param.read_text(), re.MULTILINE)
    return load_kernel(f"{request.param}:{name}")


every_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem, indirect=True)


def test_a_declaration_of_a_strangers_kernel_is_short() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(TINY)
    assert [path for path in EXAMPLES if len(path.read_text().splitlines()) > 40] == []


@every_example
def test_a_strangers_kernel_is_right_in_the_interpreter(example, request) -> None:
    tiny = TINY[request.node.callspec.id]
    rows = list(ts.check(example, [tiny], schedules=2))
    assert [(row.passed, row.message) for row in rows] == [(True, "")] * (
        1 if "rope" in str(example) else 2
    )  # only hints


@pytest.mark.slow
@pytest.mark.compiler
@every_example
def test_a_strangers_kernel_compiles(example) -> None:
    problem = shrunk(example, problems_of(example, None)[0])
    schedule = space_for("sm_90", example).default(problem)
    task = BuildTask(kernel=example.locator(), schedule=schedule, problem=problem, arch="sm_90")
    prepare_process()
    built = compile_task(task)  # in this process, which has imported what the kernel imports
    assert built.failure is None
    assert built.artifact.facts.registers > 16
