"""`tiledsched compare`: two databases, tables, reports, compilers, dates or devices."""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone

import pytest
from report_samples import DEVICE, PROBLEM, SOURCE, TOOLCHAIN, check_golden, plain, taken

from tiledsched.cli import main
from tiledsched.kernels.attention import Attention
from tiledsched.measure.estimate import Timing
from tiledsched.measure.runner import Conditions, Device
from tiledsched.report import comparison_page, write_report
from tiledsched.report.compare import (
    THRESHOLD,
    ComparisonTerms,
    KnownTime,
    compare_parts,
    joined_parts,
    judged,
    side_of,
)
from tiledsched.report.comparison_page import comparison_blocks, slopes
from tiledsched.report.comparison_sources import Wanted, compare_sources
from tiledsched.report.comparison_text import conditions_of, unlike_in_a, verdict_of
from tiledsched.report.document import Chart, Heading, Table, to_html, to_markdown
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import export_table
from tiledsched.store.records import Entry, Toolchain

NEWER = Toolchain(cuda_tile="1.7.0", tileiras="13.5.37", ptxas="13.5.37", nvvm="13.5.37")
MOVED = {
    # What the shipped programs took under 13.4.92 and 13.5.37 on one H200, in microseconds.
    (1, 16, 16384, 128): (3056, 3459),
    (4, 16, 4096, 128): (804, 906),
    (1, 8, 4096, 128): (112, 127),
    (1, 16, 16384, 64): (4194, 4476),
    (16, 16, 1024, 128): (228, 224),
    (8, 16, 2048, 128): (400, 400.5),
    (2, 16, 8192, 128): (872, 874),
}


@pytest.fixture(autouse=True)
def home(new_home):
    return new_home


def problem_of(batch, heads, seq_len, head_dim):
    return Attention.standard(seq_len=seq_len, head_dim=head_dim).replace(batch=batch, heads=heads, kv_heads=heads)


def put(
    db,
    us,
    *,
    problem=PROBLEM,
    schedule=None,
    toolchain=TOOLCHAIN,
    served=True,
    fingerprint=None,
    device=DEVICE.name,
    **more,
):
    """A measurement, and the entry that serves it."""
    schedule = schedule or plain(128, 64)
    code = fingerprint or f"{schedule.id}{toolchain.tileiras.replace('.', '')[:4]}".ljust(24, "0")
    number = db.record_measurement(
        None,
        "attention",
        SOURCE,
        toolchain,
        taken(schedule, us, problem=problem, fingerprint=code, device=device, **more),
    )
    if served:
        db.put_entry(
            Entry(
                kernel="attention",
                arch="sm_90",
                problem=problem,
                provenance="measured",
                schedule=schedule,
                fingerprint=code,
                device_name=device,
                regime=more.get("regime", "burst"),
                toolchain=toolchain,
                measurement_id=number,
            )
        )
    return number


def known(us, half=0.005, **changes):
    return KnownTime(
        **{
            "kernel": "k",
            "arch": "sm_90",
            "device": "GPU",
            "regime": "burst",
            "accum_mode": "fp32",
            "problem_id": "p",
            "problem": "P",
            "words": "",
            "schedule_id": "s",
            "schedule": "s",
            "fingerprint": "f",
            "timing": Timing(median_us=us, ci_low_us=us * (1 - half), ci_high_us=us * (1 + half)),
            "uid": "",
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("ratio", "half", "verdict"),
    [
        (1.10, 0.005, "slower"),
        (0.90, 0.005, "faster"),
        (1.005, 0.005, "same"),
        (1.10, 0.2, "tied"),
        (1.005, 0.05, "tied"),
        (1.019, 0.005, "tied"),
        (1.03, 0.005, "slower"),
        (1.0, 0.001, "same"),
        (1.03, 0.018, "tied"),  # the ratio's interval leaves 1 out, and yet the two intervals overlap
    ],
)
def test_verdicts_follow_from_the_intervals(ratio, half, verdict):
    found = judged(known(100.0, half, fingerprint="a"), known(100.0 * ratio, half), 0.02)
    assert found.verdict == verdict
    assert found.low < found.ratio < found.high
    assert math.log(found.high / found.ratio) == pytest.approx(half * math.sqrt(2), rel=0.03)


def test_what_is_served_stands_before_the_fastest_and_else_the_fastest():
    first, second = known(100.0, fingerprint="a", schedule_id="a"), known(90.0, fingerprint="b", schedule_id="b")
    assert side_of("x", [first], [second, first]).best == {("p", "fp32", "burst", "", "sm_90", "GPU"): first}
    assert list(side_of("x", [], [first, second]).best.values()) == [second]
    newer = known(120.0, fingerprint="b", schedule_id="b")
    assert list(side_of("x", [], [newer, first, second]).best.values()) == [first]  # of a program the newest counts


def test_two_compilers_of_one_database(home, capsys):
    """What is known to have moved is found, and nothing else."""
    with TuningDB.open("both.db") as db:
        for case, (before, after) in MOVED.items():
            put(db, before, problem=problem_of(*case))
            put(db, after, problem=problem_of(*case), toolchain=NEWER)
    assert main(["compare", "both.db@13.4", "both.db@13.5", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["schema_version"] >= 1
    verdicts = {row["problem"]: row["verdict"] for row in found["rows"]}
    slower = {str(problem_of(*case)) for case, (before, after) in MOVED.items() if after / before > 1.02}
    assert len(slower) == 4
    assert verdicts == {str(problem_of(*case)): "same" for case in MOVED} | dict.fromkeys(slower, "slower") | {
        str(problem_of(16, 16, 1024, 128)): "tied"
    }  # 1.8% faster, give or take 0.7
    assert found["regressed"]


def test_a_selector_alone_is_of_ones_own_database_over_what_ships(home, capsys):
    problem = problem_of(4, 16, 4096, 128)
    with TuningDB.open("mine.db") as db:
        put(db, 906.0, problem=problem, toolchain=NEWER)
    assert main(["compare", "13.4.92", "13.5", "--db", "mine.db", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    # Attention, matmul, rms_norm and softmax: all that ships under either compiler, except six problems that were timed in
    # CUDA graphs under the older one.
    assert len(found["rows"]) == 167 + 125 + 14 + 7
    (row,) = (row for row in found["rows"] if row["problem"] == str(problem))
    assert row["b_us"] == 906.0
    assert len(found["only_a"]) == 6


CAUSAL = PROBLEM.replace(causal=True)
COMPARED = {
    "slower and tied": (
        [{"us": 100.0}, {"us": 50.0, "problem": CAUSAL}],
        [
            {"us": 113.0, "schedule": plain(64, 64)},
            {"us": 50.9, "problem": CAUSAL, "fingerprint": "c" * 24},
            {"us": 70.0, "problem": PROBLEM.replace(batch=1)},
        ],
    ),
    "the same machine code": tuple(
        [{"us": (100.0 + place) * drift, "schedule": plain(64, 32 << place), "served": False} for place in range(3)]
        for drift in (1.0, 1.05)
    ),
    "two rows of one problem": tuple(
        [{"us": us, "regime": regime, "schedule": schedule} for regime in ("burst", "sustained")]
        for us, schedule in ((100.0, plain(128, 64)), (120.0, plain(64, 64)))
    ),
    "two GPUs": ([{"us": 100.0}], [{"us": 140.0, "device": "NVIDIA H100 80GB HBM3"}]),
}


@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_is_as_it_was(home, capsys, monkeypatch, name):
    """What is printed for people and for programs, and the files of the page; the line for CI stands last."""
    monkeypatch.setattr("tiledsched.report.document.drawings", lambda blocks: {})
    for side, puts in zip("ab", COMPARED[name], strict=True):
        with TuningDB.open(f"{side}.db") as db:
            for each in puts:
                put(db, **each)
    assert main(["compare", "a.db", "b.db", "-o", "page"]) == 1
    parts = [capsys.readouterr().out.replace(str(home), "HOME")]
    assert main(["compare", "b.db", "a.db", "--threshold", "60", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    uids = {row[key] for row in found["rows"] for key in ("a_uid", "b_uid")}
    parts.append(json.dumps({name: found[name] for name in found if name != "schema_version"}, indent=1))
    parts += [path.read_text(encoding="utf-8") for path in sorted((home / "page").iterdir()) if path.suffix != ".html"]
    text = "\n".join(parts)
    for uid in uids:
        text = text.replace(uid, "UID")
    check_golden(f"compare/{name.replace(' ', '_')}.txt", text)


def test_a_measurement_that_both_hold_is_the_same(home, monkeypatch):
    monkeypatch.setattr("tiledsched.report.document.drawings", lambda blocks: {})
    with TuningDB.open("a.db") as a:
        put(a, 100.0)
        export_table(a, "a.json", "sm_90")
        from tiledsched.report import build_report

        write_report(build_report(a, "sm_90", Attention), "report")
    for word in ("a.db", "a.json", "report", "report/schedules.csv"):
        found = compare_sources("a.db", word, None, Wanted())
        assert [row.verdict for row in found.rows] == ["same"]
        assert found.rows[0].ratio == 1.0
        assert found.drift == ()
        assert not found.rows[0].winner_changed


def test_dates_are_what_was_known_then(home, capsys, monkeypatch):
    with TuningDB.open("mine.db") as db:
        for day, us in ((1, 100.0), (5, 90.0)):
            put(db, us, schedule=plain(64, 32 * day % 96 or 64), served=False)
        rows = db.measurements()
        assert len(rows) == 2
    import sqlite3

    with sqlite3.connect("mine.db") as raw:
        for row, day in ((rows[1], 1), (rows[0], 5)):
            at = datetime(2026, 11, day, 12, tzinfo=timezone.utc)
            raw.execute(
                "update measurements set created_at = ? where id = ?", (at.strftime("%Y-%m-%d %H:%M:%S.%f"), row.id)
            )
    monkeypatch.setenv("TILEDSCHED_DB", "mine.db")
    assert main(["compare", "2026-11-04", "2026-11-05", "--json"]) == 0
    row = next(row for row in json.loads(capsys.readouterr().out)["rows"] if row["problem"] == str(PROBLEM))
    assert row["verdict"] == "faster"
    assert row["ratio"] == pytest.approx(0.9)


def test_shipped_against_itself(home, capsys):
    assert main(["compare", "shipped", "shipped", "--kernel", "matmul", "--arch", "h200"]) == 0
    assert "0 slower, 0 tied, 0 faster" in capsys.readouterr().out


GPU = Device(name="GPU", arch="sm_90", sm_count=132)


def compared(a, b):
    """The comparison of all that two sides know."""
    terms = ComparisonTerms.of([a.best, b.best], [a.estimates, b.estimates])
    return joined_parts([compare_parts(a, b, terms, THRESHOLD)], a.name, b.name, THRESHOLD)


def sides(*pairs, a="old", b="new"):
    """A comparison of problems, each given as the changes of its two times from 100 us."""
    both = []
    for place in (0, 1):
        taken = [
            known(
                **{
                    "us": 100.0,
                    "problem_id": str(number),
                    "problem": f"P{number}",
                    "fingerprint": "ab"[place],
                    **pair[place],
                }
            )
            for number, pair in enumerate(pairs)
            if pair[place] is not None
        ]
        both.append(
            side_of((a, b)[place], [], [one for one in taken if not one.modelled], [o for o in taken if o.modelled])
        )
    return compared(*both)


UNCHANGED = ({}, {"us": 100.2})
SLOWER, MUCH_SLOWER, FASTER = (({}, {"us": us, "schedule": "t"}) for us in (110.0, 250.0, 80.0))
ESTIMATE = {"modelled": True, "device": "", "regime": ""}


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        (
            [
                SLOWER,
                ({}, {"us": 104.0}),
                ({}, {"us": 120.0}),
                FASTER,
                UNCHANGED,
                ({}, {"us": 101.9}),
                ({"uid": "u"}, {"uid": "u"}),
            ],
            "On GPU, new is slower than old for 3 of 7 problems (by 10% at the median of those) and faster for 1 (by 25%); "
            "1 is the same within 2%, 1 is tied, 1 holds the very same measurement on both sides and 2 have another winner.",
        ),
        (
            [MUCH_SLOWER],
            "On GPU, new is slower than old for 1 of 1 problem (by a factor of 2.5); 1 has another winner.",
        ),
        (
            [FASTER, UNCHANGED],
            "On GPU, new is faster than old for 1 of 2 problems (by 25%); 1 is the same within 2% and 1 has another winner.",
        ),
        (
            [UNCHANGED] * 2,
            "On GPU, new is neither slower nor faster than old for any of 2 problems; 2 are the same within 2% and none have another winner.",
        ),
        (
            [({"uid": "u"}, {"uid": "u"})],
            "old and new hold the very same measurements: none of 1 problem was timed anew.",
        ),
        (
            [({}, {"device": "Other", "us": 200.0})],
            "new is slower than old for 1 of 1 problem (by a factor of 2); none have another winner.",
        ),
        (
            [(ESTIMATE, {"us": 120.0}), (ESTIMATE, {"us": 90.0}), (ESTIMATE, {"us": 150.0})],
            "This compares estimates, not two measurements (the times of old are the performance model's), so nothing is called "
            "faster or slower: over 3 problems, new takes 1.20 times the time of old at the median, from 0.90 to 1.50 times.",
        ),
    ],
)
def test_the_verdict_is_one_sentence(pairs, sentence):
    found = sides(*pairs)
    assert verdict_of(found) == sentence
    assert not ("estimates" in sentence and found.regressed)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({}, {}, []),
        (
            {"gpu": GPU, "conditions": Conditions(sm_clock_mhz=1980)},
            {"gpu": GPU, "conditions": Conditions(sm_clock_mhz=1900)},
            [],
        ),
        (
            {},
            {"device": "Other"},
            ["A was measured on GPU and B on Other: for 1 problem this is a comparison of GPUs."],
        ),
        (
            {"gpu": GPU},
            {"gpu": Device(name="GPU", arch="sm_90", sm_count=66)},
            ["In 1 problem the two GPUs have one name and are not alike: 132 SMs and 66 SMs."],
        ),
        (
            {"gpu": GPU, "conditions": Conditions(sm_clock_mhz=1980)},
            {"gpu": GPU, "conditions": Conditions(sm_clock_mhz=800)},
            ["In 1 problem the clock of B's GPU was held down, at 800 MHz"],
        ),
    ],
)
def test_unlike_conditions_are_said(a, b, said):
    found = conditions_of(sides((a, {"us": 120.0, **b})))
    assert len(found) == len(said)
    assert all(one.startswith(words) for one, words in zip(found, said, strict=True))


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        ({"conditions": Conditions(graph_launches=20), "gpu": GPU}, {}, "B has this problem only timed launch by launch; here it is timed in CUDA graphs"),
        ({}, {"regime": "sustained"}, "B has this problem only in the sustained regime; here it is in the burst regime"),
        ({}, {"accum_mode": "fp16"}, "B has this problem only with fp16 accumulators; here it is with fp32 accumulators"),
        ({}, None, "B has no time of this problem"),
        ({}, ESTIMATE, "B has an estimate of this problem only, and no measurement"),
    ],
)  # fmt: skip
def test_what_is_not_compared_says_why(a, b, why):
    found = sides(UNCHANGED, (a, b))
    assert [row.b.problem for row in found.rows] == ["P0"]
    assert [(one.problem, reason) for side, one, reason in found.unpaired if side == "A"] == [("P1", why)]
    (table,) = [block for block in comparison_blocks(found) if isinstance(block, Table) and block.head[0] == "only in"]
    assert (f"{why}.", "P1") in [(row[2], row[3].partition(" (")[0]) for row in table.rows]


@pytest.mark.parametrize("count", [1, 500])
def test_the_chart_holds_every_row_and_is_no_taller_for_many(count):
    pairs = [({}, {"us": 100.0 * 1.001 ** (number - count // 2)}) for number in range(count)]
    found = sides(*pairs, ({"uid": "u"}, {"uid": "u"}))
    spec = slopes(found)
    values = spec["data"]["values"]
    assert len(values) == count  # what was not timed anew is not drawn
    for one in values:
        (row,) = [row for row in found.rows if row.b.problem == one["problem"]]
        assert one["ratio"] == pytest.approx(row.b.us / row.a.us, rel=1e-4)
        assert (
            one["b"] == f"{row.b.us:,.1f} µs [{row.b.timing.ci_low_us:,.1f}, {row.b.timing.ci_high_us:,.1f}]"
            or row.b.us < 101
        )
    assert spec["height"] == 380
    folded = any(isinstance(block, Heading) and block.folded for block in comparison_blocks(found))
    assert folded == (count > 12)


def test_a_page_of_one_side_twice_and_strange_names():
    same = sides(({"uid": "u"}, {"uid": "u"}), a="x", b="x")
    blocks = comparison_blocks(same)
    assert not any(isinstance(block, Chart) for block in blocks)
    assert verdict_of(same).startswith("A and B hold the very same measurements")
    name = "<script>alert('`|`')</script> \x1b[31m"
    odd = sides(({}, {"us": 130.0, "problem": name, "schedule": name, "schedule_id": "t"}), a=f"{name}a", b=f"{name}b")
    for text in (to_html(comparison_blocks(odd), title=name), to_markdown(comparison_blocks(odd))):
        assert "<script>alert" not in text
        assert "\x1b" not in text


def test_estimates_of_what_ships_are_compared_and_told_as_estimates(home, capsys):
    assert main(["compare", "shipped@gb10", "shipped@sm_120", "--kernel", "softmax"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(
        "This compares estimates, not two measurements (the times of shipped@gb10 and of shipped@sm_120 are"
    )
    assert "compare: 0 slower, 0 tied, 0 faster, 0 same, 7 estimated" in said
    with TuningDB.open("mine.db") as db:
        put(
            db,
            7000.0,
            problem=Attention.standard(seq_len=2048, head_dim=128, dtype="float16").replace(
                batch=8, heads=16, kv_heads=16
            ),
        )
    assert main(["compare", "shipped@gb10", "mine.db", "--json"]) == 0
    assert [row["verdict"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["estimated"]
    assert main(["compare", "shipped", "shipped", "--arch", "gb10", "--kernel", "softmax"]) == 0


OLD, NEW = (
    {"schedule_id": "o", "schedule": "64x64 occ=2 no_peel", "fingerprint": "o"},
    {"schedule": "128x64 latK=1", "fingerprint": "n"},
)


@pytest.mark.parametrize(
    ("changes", "old_in_b", "new_in_a", "found"),
    [
        ({}, 108.0, None, "changed"),
        ({}, 90.3, None, "tied"),
        ({}, None, None, "changed"),
        ({}, 108.0, 100.4, "tied"),  # A cannot tell the two apart
        ({"ties": frozenset("o")}, None, None, "tied"),  # nor could the tune
        ({"fingerprint": "o"}, None, None, "the same"),  # one program
        ({"schedule": OLD["schedule"]}, None, None, "the same"),  # equal schedules, of which one lacks a knob of today
    ],
)
def test_equal_winners_are_no_other_winner_and_ties_are_called_ties(changes, old_in_b, new_in_a, found):
    new = {**NEW, "schedule_id": "n", **changes}
    first = [known(100.0, **OLD), *([known(new_in_a, **new)] if new_in_a else [])]
    second = [known(90.0, **new), *([known(old_in_b, **OLD)] if old_in_b else [])]
    (row,) = compared(side_of("a", first[:1], first), side_of("b", second[:1], second)).rows
    assert (row.winner_changed, row.winner_tied) == (found == "changed", found == "tied")
    assert found == "the same" or (row.old_winner and row.old_winner.us) == old_in_b
    assert unlike_in_a(row) == ("" if "schedule" in changes else "64x64 occ=2 no_peel, without latK")


def test_before_and_after_the_last_tune(home, capsys):
    with TuningDB.open("mine.db") as db:
        for us, tile in ((100.0, 64), (90.0, 128)):
            run = db.start_run({}, "sm_90")
            db.record_measurement(
                run, "attention", SOURCE, TOOLCHAIN, taken(plain(tile, 64), us, fingerprint=f"{tile}".ljust(24, "0"))
            )
    assert main(["compare", "mine.db@before", "mine.db@after", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["a_us"], row["b_us"], row["verdict"]) for row in found["rows"]] == [(100.0, 90.0, "faster")]
    assert found["sentence"].startswith(
        "On NVIDIA H200, mine.db@after is faster than mine.db@before for 1 of 1 problem"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nothing.db shipped", "there is no nothing.db"),
        ("shipped 99.9", "nothing of '99.9' is measured there; it has the compilers"),
        ("shipped@13.9 shipped", "has the compilers"),
        ("2026-13-45 shipped", "is no date"),
        ("empty shipped", "holds no table"),
        ("notes.csv shipped", "notes.csv"),
        ("shipped shipped --threshold 0", "--threshold"),
        ("shipped shipped --regime sustained --kernel softmax --arch sm_90", "nothing is measured"),
        ("shipped@before shipped", "no tune has measured anything there"),
        ("2026-11-22T99:00 shipped", "is no date"),
        ("2026-01-01 shipped", "nothing of '2026-01-01' is measured there"),
        ("bad/schedules.csv shipped", "schedules.csv"),
    ],
)
def test_what_cannot_be_compared_is_told(home, capsys, words, message):
    (home / "empty").mkdir()
    (home / "notes.csv").write_text("a,b\n1,2\n")
    (home / "bad").mkdir()
    (home / "bad" / "schedules.csv").write_text("arch,device\n1,2\n")
    try:
        code = main(["compare", *words.split()])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_page_of_many_problems_draws_some_and_says_so(monkeypatch):
    monkeypatch.setattr(comparison_page, "MOST_DRAWN", 5)
    found = sides(*(({}, {"us": 100.0 + us}) for us in range(10, 30)))
    blocks = comparison_page.comparison_blocks(found)
    drawn = comparison_page.drawn_rows(found)
    assert len(drawn) == 5
    assert {drawn[0].b.us, drawn[-1].b.us} == {129.0, 110.0}  # both ends
    (table,) = (each for each in blocks if isinstance(each, comparison_page.Table))
    assert len(table.rows) == 5
    texts = " ".join(getattr(each, "text", "") for each in blocks)
    assert "15 more problems are not drawn" in texts
    assert "the first 5 of 20 problems; comparison.csv has all" in texts
