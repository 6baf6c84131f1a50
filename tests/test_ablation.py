"""The ladder from the plain schedule to the tuned one, on made-up GPUs and over recorded landscapes."""

from __future__ import annotations

import csv
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_builds import FakeBuilds, print_of
from report_samples import check_golden
from store_samples import DEVICE, TOOLCHAIN, artifact

from tiledsched.checking.accuracy import Accuracy
from tiledsched.cli import main
from tiledsched.core.errors import ConfigError, Failure, FailureKind
from tiledsched.core.registry import kernel_named
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import Batch, Checked, Conditions
from tiledsched.ops.own_methods import untuned_schedule
from tiledsched.store.db import TuningDB
from tiledsched.studies.ablation.ladder import Ladder, groups_between, refusals
from tiledsched.studies.ablation.run import replay_ablation
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


class AllThere(FakeBuilds):
    """Every schedule is a program of its own; `missing` ones do not build, `same` ones are one program."""

    def __init__(self, missing=(), same=()) -> None:
        super().__init__()
        self.missing, self.same = set(missing), set(same)

    def outcome(self, schedule):
        if schedule in self.missing:
            return Failure(kind=FailureKind.COMPILE_ERROR, message="out of registers")
        return artifact("5" * 24 if schedule in self.same else print_of(schedule))


@contextmanager
def ladder_of(gpu, builds, problem=PROBLEM, **more):
    with TuningDB.open(":memory:") as db:
        builder = Builder(db, builds, TEMPLATE, "sm_90", TOOLCHAIN, builds)
        yield Ladder(gpu, builder, SPACE, problem, rounds=12, **more)


def climb(gpu=None, builds=None, tuned=TUNED, **more):
    with ladder_of(gpu or Gpu(), builds or AllThere(), **more) as ladder:
        rows = ladder.climb(PLAIN, tuned)
    return [[row for row in rows if row.view == view] for view in ("ladder", "without", "tried")]


class Disturbed(Gpu):
    """Other processes use the GPU in the final run."""

    def sample(self, candidates, *, rounds, regime):
        conditions = Conditions(concurrent_pids=(4711,) if rounds == 12 else ())
        return [
            replace(each, conditions=conditions) for each in super().sample(candidates, rounds=rounds, regime=regime)
        ]


ALONE = {PLAIN.replace(**{name: TUNED[name] for name in group}) for group in groups_between(PLAIN, TUNED)}
OCCUPIED, TALL, UNSPLIT = PLAIN.replace(occupancy=2), PLAIN.replace(tile_m=128), TUNED.replace(loop_split=False)
SPLIT = PLAIN.replace(loop_split=True)
CLIMBS = {
    "the largest gain first": {},
    "a rung that cannot be built": {"builds": AllThere(missing={OCCUPIED})},
    "rungs that crash or are wrong": {"gpu": Gpu(crash={OCCUPIED}, wrong={TALL, UNSPLIT})},
    "no change works alone": {"builds": AllThere(missing=ALONE)},
    "two schedules are one program": {"builds": AllThere(same={PLAIN, SPLIT}), "tuned": SPLIT},
    "the tuned schedule is the plain one": {"tuned": PLAIN},
    "knobs that belong together": {
        "tuned": PLAIN.replace(tile_m=128, tile_n=128, latency_k=2, latency_v=4, occupancy=2)
    },
    "another process on the GPU": {"gpu": Disturbed()},
}


def test_ladders_are_as_they_were() -> None:
    """Rung by rung: what changed, its time, its speedups, and why it has none."""
    lines = []
    for name, how in CLIMBS.items():
        said = []
        rows = [row for view in climb(**how, progress=said.append) for row in view]
        lines += [f"== {name}", *said]
        for row in rows:
            cells = row.to_csv()
            columns = ("view", "rung", "knob", "from", "to", "median_us", "ci_low_us", "ci_high_us")
            lines.append(", ".join(str(cells[each]) for each in columns))
            lines[-1] += f" | {row.speedup_over_previous} {row.speedup_over_plain} {row.status} {row.schedule_id}"
    check_golden("studies/climbs.txt", "\n".join(lines) + "\n")


def test_ladder_and_knobs_turned_back_are_timed_in_one_run() -> None:
    gpu = Gpu()
    ladder, without, _ = climb(gpu)
    assert {schedule.id for schedule in gpu.runs[-1]} == {row.schedule_id for row in (*ladder, *without)}
    assert gpu.begun == [PROBLEM]
    climb(gpu, AllThere(same={PLAIN, SPLIT}), tuned=SPLIT)
    assert len(gpu.runs[-1]) == 1


def test_a_broken_constraint_is_named() -> None:
    tuned = PLAIN.replace(accum_mode="fp16", lazy_rescale=False, block_order="reversed")
    assert refusals(SPACE, tuned, PROBLEM) == []
    assert "bfloat16" in refusals(SPACE, tuned, PROBLEM.replace(dtype="bfloat16"))[0]
    small_search = PLAIN.replace(opt_level=1, block_order="reversed")  # what only keeps the search small does not count
    assert refusals(SPACE, small_search, PROBLEM) == []
    uneven = PROBLEM.replace(seq_q=1000, seq_k=1000)
    with ladder_of(Gpu(), AllThere(), uneven) as ladder:
        rows = ladder.climb(PLAIN, PLAIN.replace(check_bounds=False))
    assert rows[1].status.startswith("not valid: bounds may go unchecked only where")


def test_each_schedule_is_compiled_once() -> None:
    builds = AllThere()
    climb(builds=builds)
    assert len(builds.schedules) == len(set(builds.schedules)) > 5


# Over a record


def test_an_empty_record_is_refused(tmp_path) -> None:
    path = tmp_path / "empty.json"
    path.write_text('{"schema_version": 2, "entries": [], "measurements": [], "artifacts": []}', encoding="utf-8")
    with pytest.raises(ConfigError, match="needs recorded landscapes"):
        next(replay_ablation([str(path)], "sm_90"))


@pytest.mark.slow
def test_the_command_replays_prints_and_writes(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tiledsched.report.document.drawings", lambda blocks: {})  # drawing takes seconds
    ablate = ["study", "ablation", "--arch", "sm_90", "--replay", str(LANDSCAPE), "--rounds", "12"]
    assert main([*ablate, "--out", "out", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert main(ablate) == 0
    check_golden("studies/ablation.csv", Path("out/ablation.csv").read_text() + capsys.readouterr().out)
    assert (rows[-1]["view"], rows[-1]["taken"]) == ("tried", "2026-11-20")
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
