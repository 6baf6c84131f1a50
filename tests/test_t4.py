"""Landscapes as T4 results and as Kernel Tuner caches."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from golden import check_golden
from report_samples import DEVICE, PROBLEM, SOURCE, TOOLCHAIN, add_builds, add_times, build_of, plain, taken

from tiledsched import __version__
from tiledsched.core.errors import ConfigError, DatabaseError, Failure, FailureKind
from tiledsched.core.fields import knob
from tiledsched.core.registry import problem_from_json
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import export_landscape, read_table
from tiledsched.store.t4 import export_foreign, kernel_tuner_cache, recorded, t4_metadata, t4_results
from tiledsched.tuning.resources import Resources, Tools, read_candidates

TEXT, NUMBER = {"type": "string"}, {"type": "number"}
VERSION = {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"}
# Written from the T4 documents' description (docs/database.md); stricter than the published schema where we can be.
RESULTS_SCHEMA = {
    "type": "object",
    "required": ["schema_version", "results"],
    "properties": {
        "schema_version": VERSION,
        "results": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["configuration", "times", "invalidity", "correctness", "measurements", "objectives"],
                "properties": {
                    "timestamp": TEXT,
                    "configuration": {
                        "type": "object",
                        "additionalProperties": {"type": ["integer", "boolean", "string"]},
                    },
                    "objectives": {"type": "array", "items": TEXT},
                    "times": {
                        "type": "object",
                        "properties": {
                            "compilation_time": NUMBER,
                            "compilation": NUMBER,
                            "runtimes": {"type": "array", "items": NUMBER},
                        },
                        "additionalProperties": False,
                    },
                    "invalidity": {"enum": ["timeout", "compile", "runtime", "correctness", "constraints", "correct"]},
                    "correctness": NUMBER,
                    "measurements": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["name", "value", "unit"],
                            "properties": {
                                "name": TEXT,
                                "value": {"type": ["number", "string", "array"]},
                                "unit": TEXT,
                            },
                        },
                    },
                },
                "additionalProperties": False,
            },
        },
    },
}
METADATA_SCHEMA = {
    "type": "object",
    "required": ["schema_version", "metadata"],
    "properties": {
        "schema_version": VERSION,
        "metadata": {
            "type": "object",
            "properties": {
                "hardware": {"type": "object", "properties": {"hardware_description": {"type": "array"}}},
                "environment": {
                    "type": "object",
                    "properties": {
                        "device_query": {"type": "object"},
                        "requirements": {"type": "array", "items": TEXT},
                    },
                },
            },
        },
    },
}
FASTEST, SLOWER = plain(128, 64), plain(64, 64, loop_split=True)


def failed(db, schedule, kind, fingerprint="", device="NVIDIA H200") -> None:
    """A failure in the store: of the build, or, where a fingerprint is given, on a GPU."""
    failure = Failure(kind=kind, message="planted")
    add_builds(db, [build_of(schedule, fingerprint or failure)])
    if fingerprint:
        gpu = taken(schedule, 1.0, device=device).device
        kernel = ("attention", "sm_90", "measure")
        db.record_failure(None, *kernel, schedule, failure, problem=PROBLEM, fingerprint=fingerprint, device=gpu)


def fail_each(db, kinds) -> None:
    """A failure of each kind, with its number as a knob: compilers fail before there is machine code."""
    for number, kind in enumerate(kinds):
        built = "" if kind in (FailureKind.COMPILE_ERROR, FailureKind.COMPILE_TIMEOUT) else f"{number:024x}"
        failed(db, plain(128, 32, latency_k=number), kind, built)


@pytest.fixture
def db(tmp_path):
    with TuningDB.open(tmp_path / "tuning.db") as opened:
        add_builds(opened, [build_of(FASTEST, "a" * 24)])
        add_times(opened, {FASTEST: 100.0, SLOWER: 150.0}, fingerprints={FASTEST: "a" * 24})
        yield opened


@pytest.fixture
def landscape(db):
    return lambda: recorded(db, PROBLEM, DEVICE.name, "burst")


def test_results_follow_the_schema(db, landscape) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    fail_each(db, FailureKind)
    for document, schema in ((t4_results(landscape()), RESULTS_SCHEMA), (t4_metadata(landscape()), METADATA_SCHEMA)):
        jsonschema.validate(json.loads(json.dumps(document)), schema)
    kinds = set(FailureKind) - {FailureKind.OTHER_NUMBERS}  # that is no failure of the program
    assert len(t4_results(landscape())["results"]) == 2 + len(kinds)


KINDS = (
    FailureKind.COMPILE_ERROR,
    FailureKind.COMPILE_TIMEOUT,
    FailureKind.HANG,
    FailureKind.WRONG_RESULT,
    FailureKind.ILLEGAL_ADDRESS,
)
"""One of each that the formats tell apart."""
FORMS = {"results": t4_results, "metadata": t4_metadata, "kernel_tuner_cache": kernel_tuner_cache}


@pytest.mark.parametrize("form", FORMS)
def test_a_landscape_is_written_as_it_was(form, db, landscape) -> None:
    """Times in milliseconds; failures by their kind; keys of the cache as Kernel Tuner looks them up."""
    fail_each(db, KINDS)
    text = json.dumps(FORMS[form](landscape()), indent=1) + "\n"
    text = re.sub(r"\d{4}-\d\d-\d\d[T ][\d:.+]*", "TIME", text.replace(__version__, "VERSION"))
    check_golden(f"t4/{form}.json", re.sub(r'("uid\W+)\w+', r"\1UID", text))


def test_failures_that_were_overcome_or_are_of_other_programs_or_devices_are_left_out(db, landscape) -> None:
    failed(db, FASTEST, FailureKind.OUT_OF_MEMORY, "a" * 24)
    failed(db, plain(128, 32), FailureKind.HANG, "b" * 24)
    add_builds(db, [build_of(plain(128, 32), "c" * 24)])  # compiled anew since
    failed(db, plain(64, 32), FailureKind.HANG, "d" * 24, device="NVIDIA Other")
    assert landscape().failures == ()
    assert {result["invalidity"] for result in t4_results(landscape())["results"]} == {"correct"}


def test_a_configuration_stands_once(db, landscape) -> None:
    """A source that moved loses nothing; of a schedule that became other machine code since, the newer counts, faster or not."""

    def found():
        return [
            (each.source_hash, each.measurement.fingerprint, each.measurement.median_us)
            for each in landscape().measurements
        ]

    db.record_measurement(None, "attention", "b" * 12, TOOLCHAIN, taken(SLOWER, 140.0))
    assert found() == [(SOURCE, "a" * 24, 100.0), ("b" * 12, SLOWER.id * 2, 140.0)]
    assert t4_metadata(landscape())["metadata"]["tiledsched"]["source_hash"] == "b" * 12
    add_times(db, {FASTEST: 110.0}, fingerprints={FASTEST: "b" * 24})
    assert found() == [(SOURCE, "b" * 24, 110.0), ("b" * 12, SLOWER.id * 2, 140.0)]


def test_a_kernel_that_is_not_known_here_is_exported(tmp_path) -> None:
    problem = problem_from_json(
        {"kernel": "elsewhere:Norm", "rows": 7, "columns": 9, "dtype": "float16", "biased": True}
    )
    with TuningDB.open(tmp_path / "theirs.db") as db:
        for us in (50.0, 40.0):
            db.record_measurement(None, problem.kernel, "abc", TOOLCHAIN, taken(SLOWER, us, problem=problem))
        found = recorded(db, problem, DEVICE.name, "burst")
    assert [one.measurement.median_us for one in found.measurements] == [40.0]
    assert found.file_stem == "h200_burst_elsewhere-Norm_biased_columns9_float16_rows7"
    assert kernel_tuner_cache(found)["problem_size"] == [9, 7]
    told = {line["name"]: line["value"] for line in t4_results(found)["results"][0]["measurements"]}
    assert (told["time"], told["TFLOP/s"]) == (0.04, 0.0)


def test_what_cannot_be_exported_is_said(db, landscape, tmp_path) -> None:
    with pytest.raises(DatabaseError, match="another folder"):
        export_foreign(landscape(), tmp_path / "missing", "t4")
    with pytest.raises(DatabaseError, match="tiledsched record"):
        recorded(db, PROBLEM, "NVIDIA Other", "burst")
    add_times(db, {plain(128, 128, one_more=1): 120.0})
    with pytest.raises(DatabaseError, match=r"one_more.*older space"):
        kernel_tuner_cache(landscape())


def test_the_command_writes_them(db, tmp_path, cli) -> None:
    where = ["--db", str(tmp_path / "tuning.db"), "--landscapes", str(tmp_path / "out")]
    for form in ("tiledsched", "t4", "kernel-tuner-cache"):
        said = cli(["db", "export", *where, "--format", form])
    stem = "h200_burst_s4096_d64_float16_full_b4_h32"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"{stem}.json.xz",
        f"{stem}.t4.json",
        f"{stem}.t4.metadata.json",
        f"{stem}.cache.json",
    }
    cache = (tmp_path / "out" / f"{stem}.cache.json").read_text()
    assert cache.endswith("}\n}")  # else Kernel Tuner's dashboard closes the file once more, and cannot read it
    assert json.loads(cache)["kernel_name"] == "attention"
    assert f"{stem}.cache.json" in said.out
    assert "--landscapes" in cli(["db", "export", "--db", str(tmp_path / "tuning.db"), "--format", "t4"], code=2).err


# And back


@pytest.mark.parametrize("form", ["t4", "tiledsched"])
def test_what_was_written_is_read_again_without_loss(form, db, tmp_path, cli) -> None:
    failed(db, plain(32, 32), FailureKind.COMPILE_ERROR)
    out = tmp_path / "out"
    cli(["db", "export", "--db", db.url.removeprefix("sqlite:///"), "--landscapes", str(out), "--format", form])
    files = sorted(map(str, out.iterdir()))
    for _ in range(2):  # the second time everything is known
        cli(["db", "import", *files, "--db", str(tmp_path / "other.db")])
    with TuningDB.open(tmp_path / "other.db") as other:
        for each, path in ((db, tmp_path / "one.json"), (other, tmp_path / "other.json")):
            export_landscape(each, path, PROBLEM, DEVICE.name, "burst", full=True)
        assert (tmp_path / "other.json").read_bytes() == (tmp_path / "one.json").read_bytes()
        assert len(other.artifacts()) == len(db.artifacts())
        assert other.check() == []


def test_a_full_landscape_holds_what_was_measured_before(db, tmp_path, cli) -> None:
    add_times(db, {FASTEST: 104.0}, fingerprints={FASTEST: "a" * 24})
    for name, more, rows in (("newest", [], 2), ("all", ["--full"], 3)):
        command = ["db", "export", "--db", db.url.removeprefix("sqlite:///"), "--landscapes", str(tmp_path / name)]
        cli([*command, *more])
        (file,) = (tmp_path / name).iterdir()
        assert len(read_table(file).measurements) == rows
    cli(["db", "export", "--full"], code=2)
    cli(["db", "export", "--landscapes", str(tmp_path / "x"), "--full", "--format", "t4"], code=2)


def test_times_without_machine_code_are_no_evidence(landscape, tmp_path, cli) -> None:
    without, changed = t4_results(landscape()), t4_results(landscape())
    for each in without["results"]:
        each["measurements"] = [one for one in each["measurements"] if one["name"] != "tiledsched"]
    changed["results"][0]["configuration"]["tile_m"] = 256
    evidence = ("without which a time is no evidence", "tune --candidates")
    for name, text, words in (
        ("foreign.t4.json", json.dumps(without), evidence),
        ("cache.json", json.dumps(kernel_tuner_cache(landscape())), evidence),
        ("x.t4.json", json.dumps(changed), ("results[0].configuration: is not that of the measurement it carries",)),
        ("x.csv", "uid,fingerprint,schedule.tile_m,median_us\n1,2,128,3.5\n", ("is not JSON", "tune --candidates")),
    ):
        (tmp_path / name).write_text(text)
        said = cli(["db", "import", str(tmp_path / name), "--db", str(tmp_path / "other.db")], code=2).err
        assert all(each in said for each in (name, *words))
    gone = cli(["db", "export", "--landscapes", str(tmp_path), "--format", "csv"], code=2).err
    assert "--format csv is gone; use --format tiledsched" in gone


KNOBS = {
    "TILE": knob([1024, 2048]),
    "occupancy": knob([1, 2]),
    "loads": knob(["tma", "gather"]),
    "fast": knob([False, True]),
}
CACHE = {"schema_version": "1.1.0", "tune_params_keys": [*KNOBS], "cache": {}}


def cache_text(*rows, **more):
    """A Kernel Tuner cache as it lies while the tuner runs: a row on each line, and no end."""
    head = json.dumps({**CACHE, **more})[:-2]
    return head + "\n" + "".join(f'"{place}": {json.dumps(row)},\n' for place, row in enumerate(rows))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '[{"TILE": "2048", "occupancy": "2", "loads": "TMA", "fast": "True"}]'),
        ("a.json", '[{"TILE": 2048.0, "occupancy": 2, "loads": "tma", "fast": 1}]'),
        ("a.json", '\ufeff[{"TILE": 2048, "occupancy": 2, "loads": "tma", "fast": true}]'),
        ("a.csv", "\ufeffTILE,occupancy,loads,fast\n2048,2,tma,1\n"),
        ("a.csv", "TILE, occupancy, loads, fast\n 2048, 2.0, tma, True\n"),
        ("a.csv", '\ufeff"TILE","occupancy","loads","fast"\n"2048","2","tma","TRUE"\n'),
        ("a.csv", "device.arch,schedule.TILE,schedule.occupancy,schedule.loads,schedule.fast\nsm_90,2048,2,tma,true\n"),
        ("a.csv", 'schedule,median_us\n"{""TILE"": 2048, ""occupancy"": 2, ""loads"": ""tma"", ""fast"": true}",3.5\n'),
        ("a.json", cache_text({"TILE": "2048", "occupancy": 2, "loads": "tma", "fast": 1, "time": 1.5})),
        ("a.json", cache_text({"TILE": 2048, "occupancy": 2, "loads": "tma", "fast": True, "time": 1.5})[:-2]),
        (
            "a.json",
            '{"results": [{"configuration": {"TILE": "2048", "occupancy": 2, "loads": "tma", "fast": "true"}}]}',
        ),
    ],
)
def test_a_value_that_says_a_choice_is_that_choice(tmp_path, name, text) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode())
    space = replace(space_for("sm_90", Attention), knobs=KNOBS)
    (found,), *_ = read_candidates(path, space)
    assert Schedule(found) == Schedule(TILE=2048, occupancy=2, loads="tma", fast=True)


WHY = "failed in the tuner that wrote the file: "


@pytest.mark.parametrize(
    ("name", "text", "raced", "left_out"),
    [
        (
            "cut.json",
            cache_text({"TILE": 1024, "time": 1.0}, {"TILE": 2048, "time": 1.0})[:-9],
            [1024],
            {"the file ends in the middle of it": 1},
        ),
        (
            "failed.json",
            cache_text(
                {"TILE": 1024, "time": 1.0},
                {"TILE": 2048, "time": "InvalidConfig"},
                {"TILE": 2048, "time": 1e20},
                {"TILE": 2048},
                {"block_size_x": 1, "time": 1.0},
                5,
            ),
            [1024],
            {WHY + "InvalidConfig": 1, WHY + "no time": 2, "it names none of the knobs": 2},
        ),
        (
            "t4.json",
            json.dumps(
                {
                    "results": [
                        {"configuration": {"TILE": 1024}, "invalidity": "correct"},
                        {"configuration": {"TILE": 2048}, "invalidity": "runtime"},
                        {"configuration": {"TILE": 1.5}},
                        {"configuration": [1]},
                        3,
                    ]
                }
            ),
            [1024],
            {WHY + "runtime": 1, "TILE = 1.5 is not one of [1024, 2048]": 1, "it names none of the knobs": 2},
        ),
        (
            "list.json",
            '[{"TILE": 1024}, {"TILE": 1.5}, {"TILE": null}]',
            [1024],
            {f"TILE = {value} is not one of [1024, 2048]": 1 for value in (1.5, None)},
        ),
        (
            "rows.csv",
            "TILE,time\n1024,1\n1024,2\n4096,1\n,3\n",
            [1024, 4096],
            {"listed before": 1, "it names none of the knobs": 1},
        ),
    ],
)
def test_every_row_of_a_file_is_a_candidate_or_counted(tmp_path, name, text, raced, left_out) -> None:
    (tmp_path / name).write_text(text)
    space = replace(space_for("sm_90", Attention), knobs=KNOBS)
    with Resources("sm_90", tools=Tools(space=lambda *given: space)) as resources:
        limited = resources.space(Attention, candidates=str(tmp_path / name))
    assert [each["TILE"] for each in limited.candidates] == raced
    assert limited.left_out == left_out


def test_candidates_are_read_from_whatever_tuners_write(db, tmp_path) -> None:
    landscape, space = recorded(db, PROBLEM, DEVICE.name, "burst"), space_for("sm_90", Attention)
    files = {
        "t4.json": json.dumps(t4_results(landscape)),
        "cache.json": json.dumps(kernel_tuner_cache(landscape)),
        "list.json": json.dumps([dict(FASTEST), dict(SLOWER)]),
        "rows.csv": "tile_m,tile_n,loop_split,time\n128,64,false,1\n64,64,true,2\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        listed = space.limited_to(*read_candidates(tmp_path / name, space)).candidates
        assert {(each["tile_m"], each["tile_n"], each["loop_split"]) for each in listed} == {
            (128, 64, False),
            (64, 64, True),
        }
    for name, text in {
        "a.json": "{}",
        "b.json": "[]",
        "c.csv": "time\n1\n",
        "f.csv": "tile_m\n1,2\n",
        "g.csv": "",
        "h.csv": '"',
        "d.json": '{"results": [1]}',
        "e.json": "[",
    }.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=name):
            read_candidates(tmp_path / name, space)
