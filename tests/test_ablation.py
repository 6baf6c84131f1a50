"""The ladder from the plain schedule to the tuned one, on made-up GPUs and over recorded landscapes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from fake_builds import FakeBuilds, print_of
from store_samples import DEVICE, TOOLCHAIN, artifact

from tiledsched.bench.rivals.attention import untuned_schedule
from tiledsched.build.compiler import Built
from tiledsched.checking.accuracy import Accuracy
from tiledsched.cli import main
from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.registry import kernel_named
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.replay import ReplayRunner
from tiledsched.measure.runner import Batch, Candidate, Checked, Conditions
from tiledsched.report.document import to_markdown
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import TableFile, read_table
from tiledsched.studies.ablation import pages
from tiledsched.studies.ablation.ladder import Ladder, groups_between, refusals
from tiledsched.studies.ablation.sources import CompiledPrograms, RecordedPrograms
from tiledsched.tuning.builder import Builder
from tiledsched.tuning.resources import Tools

ROOT = Path(__file__).parent.parent
LANDSCAPE = ROOT / "tuning_db" / "landscapes" / "attention" / "h200_burst_s16384_d128_float16_full_b1_h16.json.xz"
SPACE = space_for("sm_90", Attention)
TEMPLATE = kernel_named("attention")
PROBLEM = Attention.standard(seq_len=1024, head_dim=64, causal=True)
PLAIN = untuned_schedule("sm_90").replace(num_ctas=1)
TUNED = PLAIN.replace(tile_m=128, num_worker_warps=8, occupancy=2, loop_split=True)
RIGHT = Checked(
    accuracy=Accuracy(max_abs_error=1e-3, worst_tile_error=1e-3, worst_tile=(0, 0, 0), repeatable=True),
    first_look_us=1.0,
)


def us(schedule) -> float:
    """Eight warps cost without large tiles and pay with them; occupancy pays always; the split loop, a little."""
    time = 100.0 * (0.6 if schedule["tile_m"] == 128 and schedule["num_worker_warps"] == 8 else 1.0)
    time *= 1.3 if schedule["tile_m"] == 64 and schedule["num_worker_warps"] == 8 else 1.0
    time *= 0.9 if schedule["tile_m"] == 128 else 1.0
    time *= 0.8 if schedule["occupancy"] == 2 else 1.0
    return time * (0.98 if schedule["loop_split"] else 1.0)


class Gpu:
    """A GPU on which a schedule takes `us`; `wrong` ones fail the check, `crash` ones when launched."""

    name = "gpu"
    device = DEVICE

    def __init__(self, wrong=(), crash=()) -> None:
        self.wrong, self.crash, self.runs, self.begun = set(wrong), set(crash), [], []

    def begin(self, problem) -> None:
        self.begun.append(problem)

    def probe(self, candidate):
        if candidate.schedule in self.crash:
            return Failure(kind=FailureKind.ILLEGAL_ADDRESS, message="an illegal address")
        return us(candidate.schedule)

    def check(self, candidate):
        if candidate.schedule in self.wrong:
            return Failure(kind=FailureKind.WRONG_RESULT, message="worst tile 0.5")
        seen = self.probe(candidate)
        return seen if isinstance(seen, Failure) else RIGHT

    def sample(self, candidates, *, rounds, regime):
        self.runs.append([candidate.schedule for candidate in candidates])
        return [
            Batch(samples_us=tuple(us(c.schedule) + 0.001 * (i % 3) for i in range(rounds)), conditions=Conditions())
            for c in candidates
        ]

    def close(self) -> None:
        pass


class AllThere:
    """Every schedule is a program of its own; `missing` ones are not there, `same` ones are one program."""

    def __init__(self, missing=(), same=()) -> None:
        self.missing, self.same = set(missing), set(same)

    def find(self, schedules, problem):
        return {
            each: "compile_error: out of registers"
            if each in self.missing
            else Candidate(schedule=each, artifact=artifact("5" * 24 if each in self.same else print_of(each)))
            for each in schedules
        }


def climb(gpu=None, source=None, tuned=TUNED, **more):
    ladder = Ladder(gpu or Gpu(), source or AllThere(), SPACE, TEMPLATE, PROBLEM, rounds=12, **more)
    rows = ladder.climb(PLAIN, tuned)
    return [[row for row in rows if row.view == view] for view in ("ladder", "without", "tried")]


def test_knobs_that_belong_together_are_turned_together_and_only_those_that_differ() -> None:
    tuned = TUNED.replace(tile_n=128, latency_k=2, latency_v=4)
    assert set(groups_between(PLAIN, tuned)) == {
        ("tile_m", "tile_n"),
        ("latency_k", "latency_v"),
        ("occupancy",),
        ("num_worker_warps",),
        ("loop_split",),
    }
    assert ("tile_m",) in groups_between(PLAIN, TUNED)
    assert groups_between(PLAIN, PLAIN) == []


def test_the_largest_gain_comes_first_and_the_last_rung_is_the_tuned_schedule() -> None:
    said = []
    ladder, _, tried = climb(progress=said.append)
    assert [row.knob for row in ladder] == ["", "occupancy", "tile_m", "num_worker_warps", "loop_split"]
    assert [(row.before, row.after) for row in ladder[1:]] == [("0", "2"), ("64", "128"), ("0", "8"), ("False", "True")]
    assert [row.rung for row in ladder] == [0, 1, 2, 3, 4]
    assert ladder[-1].schedule_id == TUNED.id
    assert [row.speedup_over_previous for row in ladder] == [
        None,
        pytest.approx(1 / 0.8, rel=1e-3),
        pytest.approx(1 / 0.9, rel=1e-3),
        pytest.approx(1 / 0.6, rel=1e-3),
        pytest.approx(1 / 0.98, rel=1e-3),
    ]
    assert ladder[0].speedup_over_plain == 1.0
    assert ladder[-1].speedup_over_plain == pytest.approx(us(PLAIN) / us(TUNED), rel=1e-3)
    assert all(row.timing.ci_low_us <= row.timing.median_us <= row.timing.ci_high_us for row in ladder)
    assert [(row.rung, row.knob) for row in tried[:5]] == [
        (1, "loop_split"),
        (1, "num_worker_warps"),
        (1, "occupancy"),
        (1, "tile_m"),
        (2, "loop_split"),
    ]
    warps = next(row for row in tried if (row.rung, row.knob) == (1, "num_worker_warps"))
    assert warps.speedup_over_previous == pytest.approx(1 / 1.3, rel=1e-3)  # alone it loses
    assert len(said) == 4


def test_each_knob_is_turned_back_beside_the_tuned_schedule_in_the_same_run_as_the_ladder() -> None:
    gpu = Gpu()
    ladder, without, _ = climb(gpu)
    assert {row.knob: row.speedup_over_previous for row in without} == {
        "tile_m": pytest.approx(us(TUNED) / us(TUNED.replace(tile_m=64)), rel=1e-3),
        "num_worker_warps": pytest.approx(0.6, rel=1e-3),
        "occupancy": pytest.approx(0.8, rel=1e-3),
        "loop_split": pytest.approx(0.98, rel=1e-3),
    }
    assert {(row.before, row.after) for row in without if row.knob == "occupancy"} == {("2", "0")}
    ids = {row.schedule_id for row in (*ladder, *without)}
    assert {schedule.id for schedule in gpu.runs[-1]} == ids
    assert gpu.begun == [PROBLEM]


def test_what_cannot_be_built_is_a_row_and_the_ladder_goes_round_it() -> None:
    first = PLAIN.replace(occupancy=2)
    ladder, _, tried = climb(source=AllThere(missing={first}))
    assert [row.knob for row in ladder][1] == "tile_m"
    assert ladder[-1].schedule_id == TUNED.id
    assert [row.status for row in tried if row.schedule_id == first.id] == ["compile_error: out of registers"]


def test_what_crashes_or_is_wrong_is_no_rung() -> None:
    first, second = PLAIN.replace(occupancy=2), PLAIN.replace(tile_m=128)
    ladder, without, tried = climb(Gpu(crash={first}, wrong={second, TUNED.replace(loop_split=False)}))
    assert [row.knob for row in ladder][1] == "loop_split"
    assert [row.status for row in tried if row.schedule_id == first.id] == ["illegal_address: an illegal address"]
    broken = next(row for row in without if row.knob == "loop_split")
    assert (broken.status, broken.timing) == ("wrong_result: worst tile 0.5", None)
    assert broken.speedup_over_previous is None


def test_a_broken_constraint_is_named_and_what_is_left_is_turned_at_once() -> None:
    tuned = PLAIN.replace(accum_mode="fp16", lazy_rescale=False, block_order="reversed")
    assert refusals(SPACE, tuned, PROBLEM) == []
    assert "bfloat16" in refusals(SPACE, tuned, PROBLEM.replace(dtype="bfloat16"))[0]
    small_search = PLAIN.replace(opt_level=1, block_order="reversed")  # what only keeps the search small does not count
    assert refusals(SPACE, small_search, PROBLEM) == []
    groups = groups_between(PLAIN, TUNED)
    alone = {PLAIN.replace(**{name: TUNED[name] for name in group}) for group in groups}
    ladder, _, tried = climb(source=AllThere(missing=alone))
    assert [row.knob for row in ladder] == ["", "+".join(name for group in groups for name in group)]
    assert ladder[1].speedup_over_previous == pytest.approx(us(PLAIN) / us(TUNED), rel=1e-3)
    assert len(tried) == 4
    uneven = PROBLEM.replace(seq_q=1000, seq_k=1000)
    ladder = Ladder(Gpu(), AllThere(), SPACE, TEMPLATE, uneven, rounds=12)
    rows = ladder.climb(PLAIN, PLAIN.replace(check_bounds=False))
    assert rows[1].status.startswith("not valid: bounds may go unchecked only where")


def test_schedules_that_are_one_program_are_timed_once() -> None:
    gpu, same = Gpu(), {PLAIN, PLAIN.replace(loop_split=True)}
    ladder, _, _ = climb(gpu, AllThere(same=same), tuned=PLAIN.replace(loop_split=True))
    assert len(gpu.runs[-1]) == 1
    assert ladder[1].speedup_over_previous == 1.0


def test_a_tuned_schedule_that_is_the_plain_one_is_one_rung() -> None:
    ladder, without, tried = climb(tuned=PLAIN)
    assert [row.speedup_over_plain for row in ladder] == [1.0]
    assert without == tried == []


def test_the_compiler_is_asked_once_for_each_schedule(tmp_path) -> None:
    class Compiler(FakeBuilds):
        def start(self):
            pass

        def build(self, tasks, *, leave=0):
            for built in super().build(tasks):
                bad = built.task.schedule["tile_m"] == 128
                failure = Failure(kind=FailureKind.COMPILE_TIMEOUT, message="no end in 1 s") if bad else None
                yield Built(task=built.task, artifact=None if bad else built.artifact, failure=failure, seconds=0.1)

    made = Compiler()
    with TuningDB.open(tmp_path / "tuning.db") as db:
        source = CompiledPrograms(Builder(db, made, TEMPLATE, "sm_90", TOOLCHAIN, made))
        found = source.find([PLAIN, TUNED], PROBLEM)
        assert found[PLAIN].artifact.fingerprint == print_of(PLAIN)
        assert found[TUNED] == "compile_timeout: no end in 1 s"
        assert source.find([PLAIN, TUNED], PROBLEM) == found
        assert made.compiled == 2


# Over a record


def test_a_recorded_ladder_takes_a_way_that_is_wholly_recorded() -> None:
    recorded = RecordedPrograms(read_table(LANDSCAPE), SPACE)
    runner = ReplayRunner(TEMPLATE, recorded.measurements)
    ladder = Ladder(runner, recorded, SPACE, TEMPLATE, recorded.problem, recorded=recorded.holds)
    rows = ladder.climb(SPACE.default(recorded.problem, pinned={"accum_mode": "fp32"}), recorded.best.schedule)
    rungs = [row for row in rows if row.view == "ladder"]
    assert len(rungs) == 6
    assert {row.status for row in rungs} == {"ok"}
    assert rungs[-1].schedule_id == recorded.best.schedule.id
    assert rungs[-1].timing.median_us == pytest.approx(recorded.best.median_us, rel=5e-3)
    assert rungs[-1].speedup_over_plain > 1.7
    product = 1.0
    for row in rungs[1:]:
        product *= row.speedup_over_previous
    assert product == pytest.approx(rungs[-1].speedup_over_plain)
    missing = [row for row in rows if row.status == "not recorded"]
    assert missing
    assert all(row.timing is None for row in missing)
    assert {row.runner for row in rows} == {"replay"}


def test_the_page_says_what_the_rows_say() -> None:
    rows = [row for view in climb() for row in view]
    text = pages.answer(rows)
    plain, tuned = us(PLAIN), us(TUNED)
    assert (
        f"takes {tuned:.4g} µs and is {plain / tuned:.2f} times as fast as the plain one, which takes {plain:.4g} µs"
        in text
    )
    back = {name: us(TUNED.replace(**{name: PLAIN[name]})) / tuned - 1 for name in TUNED if TUNED[name] != PLAIN[name]}
    most = max(back, key=lambda name: back[name])
    assert f"Of 4 knobs of the tuned schedule that were turned back alone, `{most}` costs most" in text
    drawn = {row["what"].split()[0]: row["percent"] for row in pages.without_rows(rows)}
    assert drawn == {name: pytest.approx(cost * 100, abs=0.02) for name, cost in back.items()}
    assert [row["us"] for row in pages.ladder_rows(rows)] == [
        round(row.timing.median_us, 2) for row in rows if row.view == "ladder"
    ]


def test_what_failed_is_not_drawn_and_concludes_nothing() -> None:
    crash = TUNED.replace(occupancy=PLAIN["occupancy"])
    rows = [row for view in climb(Gpu(crash=[crash])) for row in view]
    assert "occupancy" not in {row["what"].split()[0] for row in pages.without_rows(rows)}
    assert "Of 3 knobs of the tuned schedule" in pages.answer(rows)
    text = to_markdown(pages.document(rows))
    assert "turned back: `occupancy` 2 to 0 | illegal_address: an illegal address |" in text


def test_an_empty_record_is_refused() -> None:
    with pytest.raises(MeasureError, match="holds no measurement"):
        RecordedPrograms(TableFile(entries=(), measurements=(), artifacts=()), SPACE)


def test_the_command_replays_prints_and_writes(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tiledsched.report.document.drawings", lambda blocks: {})  # drawing takes seconds
    ablate = ["study", "ablation", "--arch", "sm_90", "--replay", str(LANDSCAPE), "--rounds", "12"]
    assert main([*ablate, "--out", "out", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    with open("out/ablation.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["knob"] for row in written] == [row["knob"] for row in rows]
    assert {row["taken"] for row in written} == {"2026-11-20"}
    assert "Measured on NVIDIA H200, 2026-11-20: 9 times of 1 problem." in Path("out/ablation.html").read_text()
    assert {
        "regime",
        "seq_q",
        "rung",
        "knob",
        "from",
        "to",
        "median_us",
        "ci_low_us",
        "speedup_over_previous",
        "speedup_over_plain",
        "status",
    } < set(rows[0])
    assert main(ablate) == 0
    out = capsys.readouterr().out
    assert "from the plain schedule to the tuned one" in out
    assert "persistent" in out
    assert main([*ablate, "--arch", "sm_100"]) == 2
    assert "pass --arch sm_90" in capsys.readouterr().err


def test_the_command_climbs_on_a_gpu(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "tuning.db"))
    gpu, made = Gpu(), FakeBuilds()
    tools = Tools(
        runner=lambda kernel, seed: gpu,
        pool=lambda jobs: made,
        artifacts=lambda folder: made,
        devices=lambda: [gpu.device],
    )
    ablate = ["study", "ablation", "--arch", "sm_90", "-p", "B=16,H=32,S=1024,D=64,causal", "--json"]
    assert main(ablate, tools=tools) == 0
    said = capsys.readouterr()
    rows = [row for row in json.loads(said.out)["rows"] if row["view"] == "ladder"]
    assert rows[0]["schedule_id"] == PLAIN.id
    assert len(rows) > 2
    assert all(row["status"] == "ok" for row in rows)
    assert "transferred schedule 64x64" in said.err  # measured on another device than the made-up one


def test_what_ends_the_command_early_loses_only_the_problem_under_way(tmp_path, monkeypatch, capsys) -> None:
    climb, climbed = Ladder.climb, []

    def once(self, *given):
        if climbed:
            raise KeyboardInterrupt
        climbed.append(self)
        return climb(self, *given)

    monkeypatch.setattr(Ladder, "climb", once)
    file = tmp_path / "ablation.csv"
    assert (
        main(
            [
                "study",
                "ablation",
                "--arch",
                "sm_90",
                "--replay",
                str(LANDSCAPE),
                "--replay",
                str(LANDSCAPE),
                "--out",
                str(tmp_path),
            ]
        )
        == 130
    )
    assert "from the plain schedule to the tuned one" in capsys.readouterr().out
    with file.open(newline="") as rows:
        assert len(list(csv.DictReader(rows))) > 3


def test_without_a_gpu_and_without_a_record_it_says_what_to_do(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "tuning.db"))
    assert main(["study", "ablation", "--arch", "sm_90"], tools=Tools(devices=list)) == 2
    assert "no sm_90 GPU here; run: tiledsched doctor, or use --replay FILE" in capsys.readouterr().err


def test_what_is_timed_beside_others_is_no_rung() -> None:
    class Disturbed(Gpu):
        def sample(self, candidates, *, rounds, regime):
            batches = super().sample(candidates, rounds=rounds, regime=regime)
            last = rounds == 12
            return [
                Batch(samples_us=each.samples_us, conditions=Conditions(concurrent_pids=(4711,) if last else ()))
                for each in batches
            ]

    ladder, _, tried = climb(Disturbed())
    assert {row.status for row in ladder} == {"timed beside process 4711 on the GPU"}
    assert {row.timing for row in ladder} == {None}
    assert all(row.timing for row in tried)
