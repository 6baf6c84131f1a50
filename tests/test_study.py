"""`tiledsched study`: the grid, columns, tables and figures of the TiledAttention paper, and the pages of all studies, without a GPU."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace

import pytest
from browser import browser, opened  # noqa: F401
from report_samples import SOURCE, TOOLCHAIN, check_golden, specs_of, taken
from test_ablation import LANDSCAPE
from test_bench import QUICK, Harness
from test_ladder import rows_of
from test_profile import PROBLEM, raw

from tiledsched.core.errors import MeasureError
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.estimate import Timing
from tiledsched.measure.runner import Conditions
from tiledsched.report.document import Block, Chart, Paragraph, Table, to_html, to_markdown
from tiledsched.report.records import TileTime
from tiledsched.rivals.rows import BenchRow, append_rows
from tiledsched.store.db import TuningDB
from tiledsched.studies.ablation import pages as ablation
from tiledsched.studies.ablation.ladder import AblationRow
from tiledsched.studies.ablation.run import replay_ablation
from tiledsched.studies.evaluation import pages as evaluation, run as tiles
from tiledsched.studies.evaluation.rows import COLUMNS, TILING_COLUMNS, TilingRow, problems, result_of
from tiledsched.studies.evaluation.run import run_evaluation, write_pages
from tiledsched.studies.ladder import pages as ladder
from tiledsched.studies.ladder.rungs import PROBLEM as THEIRS
from tiledsched.studies.profile import pages as profile
from tiledsched.studies.profile.metrics import MethodProfile, read_raw

PAPER = (
    "method,baseline_name,dtype,causal,B,H,S,D,flops_forward,median_ms,p95_ms,throughput_tokens_per_s,tflops_per_s,approx_bw_gbps,"
    "status,status_detail"
)
PAPER_TILES = "regime,S,D,best_TM,best_TN,best_median_ms,runner_TM,runner_TN,runner_median_ms,sensitivity_drop_percent"
FACTOR = {
    "tiledsched": 1.0,
    "torch_auto": 1.1,
    "torch_math": 12.0,
    "eager": 9.0,
    "torch_flash": 1.2,
    "torch_efficient": 1.6,
    "torch_cudnn": 0.95,
    "triton": 1.5,
}


def rows(**statuses):
    """A bench of the whole grid; `statuses` of methods that have no time."""
    found = []
    for problem in problems():
        for method, factor in FACTOR.items():
            us = problem.flops / 500e6 * factor
            timed = (
                {}
                if method in statuses
                else {
                    "timing": Timing(median_us=us, ci_low_us=us * 0.99, ci_high_us=us * 1.01),
                    "p95_us": us * 1.05,
                    "samples": 30,
                }
            )
            found.append(
                BenchRow(
                    problem=problem,
                    method=method,
                    regime="burst",
                    status=statuses.get(method, "ok"),
                    device="NVIDIA Sample",
                    versions="driver 1 torch 2",
                    conditions=Conditions(sm_clock_mhz=1980),
                    **timed,
                )
            )
    return found


def test_the_grid_is_the_papers():
    found = problems()
    assert len(found) == len(set(found)) == 80
    assert {p.seq_q for p in found} == {512, 1024, 2048, 4096, 8192}
    assert {p.head_dim for p in found} == {64, 96, 128, 160}
    assert {(p.batch, p.heads, p.kv_heads) for p in found} == {(1, 8, 8)}
    assert ",".join(COLUMNS) == PAPER
    assert ",".join(TILING_COLUMNS) == PAPER_TILES


@pytest.mark.parametrize(
    ("causal", "median_us", "flops", "tokens", "tflops", "gbps"),
    [
        (False, 35.32800078392029, 536870912.0, 115942026.41278003, 15.196753285975904, 59.36231752334338),
        (True, 30.208000913262367, 268959744.0, 135593216.2396656, 8.903592951161402, 69.42372671470879),
    ],
)
def test_a_row_of_the_paper_comes_out_the_same(causal, median_us, flops, tokens, tflops, gbps):
    """S=512, D=64, float16, of the paper's published results."""
    problem = next(p for p in problems() if (p.seq_q, p.head_dim, p.dtype, p.causal) == (512, 64, "float16", causal))
    timing = Timing.of([median_us] * 6)
    row = result_of(
        BenchRow(problem=problem, method="tiledsched", regime="burst", status="ok", timing=timing, p95_us=40.0)
    )
    assert row.flops_forward == flops
    assert row.throughput_tokens_per_s == pytest.approx(tokens)
    assert row.tflops_per_s == pytest.approx(tflops)
    assert row.approx_bw_gbps == pytest.approx(gbps)
    assert (row.median_ms, row.p95_ms, row.status) == (pytest.approx(median_us / 1e3), 0.04, "ok")


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("RuntimeError: No available kernel. Aborting execution.", "unsupported"),
        ("not installed: triton", "unsupported"),
        ("out of memory", "oom"),
        ("skipped: its score matrices would take 90 GiB", "oom"),
        ("not served: head_dim 160", "unsupported"),
        ("wrong: relative error 0.2", "wrong"),
        ("RuntimeError: something else", "runtime_error"),
    ],
)
def test_every_reason_is_a_status(said, status):
    row = result_of(BenchRow(problem=problems()[0], method="torch_cudnn", regime="burst", status=said))
    assert (row.method, row.status, row.status_detail, row.median_ms) == ("torch_sdpa_cudnn_forced", status, said, None)


def lines_of(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def test_tiles_are_tried_with_a_few_occupancies_and_warps():
    space = space_for("sm_90", Attention)
    regime, problem = tiles.tile_problems()[0]
    served = space.default(problem)
    found = tiles.candidates(space, problem, served)
    assert regime == "Short S"
    assert found[0] == served
    assert len(found) == len(set(found)) > 8
    assert {(each["tile_m"], each["tile_n"]) for each in found} <= {*tiles.TILES, (served["tile_m"], served["tile_n"])}
    assert not any(space.unworkable(each, problem) for each in found)


def test_the_tiles_table_is_of_what_was_raced(tmp_path):
    assert tiles.tiling_rows(tmp_path, Attention) == []
    problem = tiles.tile_problems()[0][1]
    space = space_for("sm_90", Attention)
    served = space.default(problem)
    with TuningDB.open(str(tmp_path / "tiles.db")) as db:
        for (tile_m, tile_n), us in {(64, 128): 122.75, (64, 64): 126.88, (128, 128): 150.0}.items():
            for extra, warps in ((0.0, 4), (20.0, 8)):  # a tile is judged by its best
                schedule = served.replace(tile_m=tile_m, tile_n=tile_n, num_worker_warps=warps)
                db.record_measurement(
                    None, "attention", SOURCE, TOOLCHAIN, taken(schedule, us + extra, problem=problem)
                )
    (row,) = tiles.tiling_rows(tmp_path, Attention)
    assert row.to_csv() == {
        "regime": "Short S",
        "S": 1024,
        "D": 64,
        "best_TM": 64,
        "best_TN": 128,
        "best_median_ms": 0.12275,
        "runner_TM": 64,
        "runner_TN": 64,
        "runner_median_ms": 0.12688,
        "sensitivity_drop_percent": pytest.approx(3.36456, abs=1e-4),
    }


class Stopping(Harness):
    """A bench without a GPU that is interrupted after so many cells."""

    def __init__(self, most) -> None:
        super().__init__()
        self.most = most

    def prepare(self, problem, methods, regime):
        if len(self.prepared) == self.most:
            raise MeasureError("interrupted")
        return super().prepare(problem, methods, regime)


@pytest.mark.slow
def test_a_study_goes_on_where_it_stopped(home, tmp_path, monkeypatch):
    monkeypatch.setattr("tiledsched.report.document.drawings", lambda blocks: {})  # drawing takes seconds
    tuned = []

    def tune(kernel, named, *, db, candidates, arch, **more):
        tuned.extend(named)
        with TuningDB.open(db) as opened:
            for place, schedule in enumerate(json.loads(candidates)):
                one = taken(Schedule(schedule), 100.0 + place, problem=named[0])
                opened.record_measurement(None, "attention", SOURCE, TOOLCHAIN, one)

    how = {"methods": ["tiledsched", "torch_auto"], "rounds": 6, "pace": QUICK, "arch": "sm_90", "tune": tune}
    first, second = Stopping(30), Stopping(100)
    with pytest.raises(MeasureError, match="interrupted"):
        run_evaluation(Attention, tmp_path, harness=first, **how)
    with (tmp_path / "bench.csv").open("a") as file:
        file.write("burst,tiledsched,flo")  # killed in the middle of a line
    run_evaluation(Attention, tmp_path, harness=second, **how)
    assert (len(first.prepared), len(second.prepared), len(tuned)) == (30, 50, 6)
    assert not (tmp_path / "tiles.json").exists()
    files, known, left = write_pages(Attention, tmp_path, "burst")
    assert (known, left) == (80, 0)
    assert len(lines_of(tmp_path / "benchmark_results.csv")) == 160
    assert [line["S"] for line in lines_of(tmp_path / "tuning_results.csv")] == ["1024", "4096", "8192"] * 2
    assert tmp_path / "study.html" in files


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("study paper --summary --out nowhere", "holds no study"),
        ("study paper matmul", "tiledsched bench matmul"),
        ("study paper --methods matmul", "the study knows"),
        ("study paper --methods nothing", "unknown method"),
    ],
)
def test_wrong_use_is_told(tmp_path, monkeypatch, cli, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in cli(words, code=2).err


def test_the_command_writes_what_a_folder_holds(tmp_path, cli, monkeypatch):
    monkeypatch.setattr("tiledsched.report.document.drawings", lambda blocks: {})  # drawing takes seconds
    append_rows(rows(triton="not installed: triton")[: len(FACTOR)], tmp_path / "bench.csv")
    said = cli(["study", "paper", "--summary", "--out", str(tmp_path), "--json"])
    assert "79 of 80 problems are left" in said.err
    assert (said.json["problems"], said.json["left"]) == (1, 79)
    assert str(tmp_path / "study_summary.md") in said.json["files"]
    for name in ("benchmark_results.csv", "tuning_results.csv", "table4_tiling_sensitivity.md"):
        check_golden(f"studies/{name}", (tmp_path / name).read_text(encoding="utf-8"))


def test_tiles_stop_with_the_budget(tmp_path):
    now, shares = [0.0], []

    def tune(*given, budget_s, **more):
        shares.append(budget_s)
        now[0] += 40.0

    fakes = {"tune": tune, "clock": lambda: now[0]}
    tiles.race_tiles("sm_90", tmp_path, Attention, budget_s=100.0, **fakes)
    assert shares == [100.0 / 6, 60.0 / 5, 20.0 / 4]
    tiles.race_tiles("sm_90", tmp_path, Attention, budget_s=0.0, **fakes)
    assert len(shares) == 3


# The pages of the studies, opened in a real browser at 400 pixels: no error, every chart drawn, nothing wider than the page


TILES = TilingRow(
    regime="Short S",
    problem=Attention.standard(seq_len=1024, head_dim=64),
    **{
        name: TileTime(tile=tile, us=us, relative=us / 122.75, schedule=Schedule(), programs=1, searched=True)
        for name, tile, us in (("best", (64, 128), 122.75), ("runner_up", (64, 64), 126.88))
    },
)
PLAYBOOK = Attention.problem(seq_q=2048, seq_k=2048, **THEIRS)


def failed(rows):
    """The same rows, without a time."""
    return [replace(row, timing=None, status="launch_failed: an illegal address") for row in rows]


def ablated() -> list[AblationRow]:
    return [row for rows in replay_ablation([LANDSCAPE], "sm_90", rounds=6) for row in rows]


def profiled(count):
    kernels = tuple(read_raw(raw(("flash_fwd<128, 64>", {}))))
    return [MethodProfile(method=f"method_{place}", kernels=kernels) for place in range(count)]


PAGES = {
    "ladder": lambda: ladder.document(rows_of()),
    "ladder of NVIDIA's problems": lambda: ladder.document(rows_of((1024, 2048), PLAYBOOK)),
    "ladder of one length": lambda: ladder.document(rows_of((2048,), PLAYBOOK)),
    "ladder of one rung": lambda: ladder.document(rows_of()[1:2]),
    "ladder without a time": lambda: ladder.document(failed(rows_of())),
    "study": lambda: evaluation.document(rows(triton="not installed: triton"), []),
    "study of two problems": lambda: evaluation.document(
        rows(triton="not installed: triton", torch_math="out of memory")[:16], [TILES]
    ),
    "study without a time": lambda: evaluation.document(failed(rows()[:8]), []),
    "profile": lambda: profile.document(PROBLEM, profiled(2), device="NVIDIA Sample"),
    "profile of many": lambda: profile.document(PROBLEM, profiled(7), device="NVIDIA Sample"),
    "profile of none": lambda: profile.document(PROBLEM, [MethodProfile(method="eager", status="it does not run")]),
    "ablation": lambda: ablation.document(ablated()),
    "ablation without a time": lambda: ablation.document(
        [replace(row, speedup_over_previous=None, speedup_over_plain=None) for row in failed(ablated())]
    ),
}


@pytest.fixture(scope="module")
def documents() -> dict[str, list[Block]]:
    return {name: make() for name, make in PAGES.items()}


@pytest.mark.parametrize("name", PAGES)
def test_the_first_line_says_what_was_measured_and_tables_are_narrow(documents, name):
    first = next(block for block in documents[name] if isinstance(block, Paragraph))
    none = name.endswith(("without a time", "of none"))
    assert (first.warning, first.measured) == (none, not none)
    assert first.text.startswith("Nothing was measured" if none else "Measured on NVIDIA")
    assert all(len(block.head) <= 6 for block in documents[name] if isinstance(block, Table))


@pytest.mark.parametrize("name", [name for name in PAGES if name != "study"])
def test_a_page_is_as_it_was(documents, name):
    """Sentences, tables, and what each chart draws."""
    charts = [f"{block.name}.svg" for block in documents[name] if isinstance(block, Chart)]
    text = to_markdown(documents[name], charts) + specs_of(documents[name])
    check_golden(
        f"studies/{re.sub(r'[^a-zA-Z]+', '_', name)}.txt",
        re.sub(r"tiledsched \| [0-9.a-z]+", "tiledsched | VERSION", text),
    )


@pytest.mark.slow
def test_every_page_is_drawn_within_400_pixels(browser, documents, tmp_path):  # noqa: F811
    """All pages in one: their headings and charts do not collide either, and the drawing code is read once."""
    blocks = [block for document in documents.values() for block in document]
    path = tmp_path / "page.html"
    path.write_text(to_html(blocks, title="studies"))
    with opened(browser, path, width=400, scheme="dark") as page:
        assert page.locator(".chart svg").count() == page.locator(".chart").count() > 15
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        wide = (
            "[...document.querySelectorAll('.scroll, .chart')].filter(each => each.scrollWidth > each.clientWidth + 1)"
        )
        assert page.evaluate(f"{wide}.map(each => each.innerText)") == []
