"""Problems that a process calls are noted, in a file of its own, and read back from the files of all processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import op_kernels as kernels
from cuda.tile import TileError
from serve_on_cpu import changed, tensors

import tiledsched as ts
from tiledsched.core import registry
from tiledsched.core.config import configure, load_settings
from tiledsched.core.errors import ConfigError
from tiledsched.ops.sdpa import sdpa
from tiledsched.ops.varlen import sdpa_varlen
from tiledsched.rivals.offers import Offer, Rival
from tiledsched.serve import capture as capturing_module
from tiledsched.store.captured_calls import clear_seen, read_seen, seen_folder

pytestmark = pytest.mark.usefixtures("launches")
norm = ts.op("tiledsched_tests::seen_rms_norm", kernels.RmsNorm)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "notes"


def only(folder):
    (found,) = read_seen(folder).problems
    return found


def test_a_problem_is_on_disk_once_its_plan_is_made_and_its_calls_follow(folder):
    q, k, v = tensors(rows=24)
    sdpa(q, k, v)
    assert not folder.exists()
    with ts.capture(folder):
        sdpa(q, k, v)  # by a plan made anew
        first = only(folder)
        assert (first.calls, first.layouts, first.device, first.arch) == (0, ("contiguous",), "NVIDIA H200", "sm_90")
        assert (first.place.rpartition(":")[2], first.sample.seq_q) == ("Attention", 24)
        assert first.provenance
        assert first.schedule
        for _ in range(4):
            sdpa(q, k, v)
    assert only(folder).calls == 5
    sdpa(q, k, v)
    assert only(folder).calls == 5  # not captured any more


@pytest.mark.parametrize(
    ("value", "database", "found"),
    [
        *((value, "beside/tuning.db", None) for value in ("", "0", "off", False)),
        *((value, "beside/tuning.db", "beside/seen") for value in ("1", "yes", True)),
        (Path("/there"), None, "/there"),
        ("~/there", None, "home/there"),
        ("1", "postgresql://host/name", "data/tiledsched/seen"),
        ("1", "sqlite:////there/x.db", "/there/seen"),
    ],
)
def test_where_the_notes_go(value, database, found, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with configure(capture=value):
        settings = load_settings()
    url = database if database is None or "://" in database else str(tmp_path / database)
    assert seen_folder(settings.capture, url) == (found and tmp_path / found)


def test_lengths_of_decoding_are_one_problem(folder):
    with ts.capture(folder):
        for keys in range(1031, 1050):
            sdpa(*tensors(rows=1, keys=keys))
    found = only(folder)
    assert (found.calls, found.sample.seq_k) == (19, 1031)
    assert found.problem == found.problem.declaration.similarity.bucketed(found.sample)


def test_packed_sequences_operators_and_functional_kernels_are_seen(folder):

    with ts.capture(folder):
        x, w = torch.ones(5, 100, dtype=torch.float16), torch.ones(100, dtype=torch.float16)
        for _ in range(3):
            norm(x, w)
        ts.softmax(torch.ones(4, 64, dtype=torch.float16))
        q, k, v = (torch.ones(20, 2, 16, dtype=torch.float16) for _ in range(3))
        ends = torch.tensor([0, 8, 20], dtype=torch.int32)
        sdpa_varlen(q, k, v, ends)
    found = {each.problem.kernel: each for each in read_seen(folder).problems}
    assert found.keys() == {kernels.RmsNorm.name, "attention", "softmax"}
    mine = found[kernels.RmsNorm.name]
    assert (mine.calls, Path(mine.place.partition(":")[0]).name) == (3, "op_kernels.py")
    assert found["attention"].layouts == ("strided",)


def test_a_kernel_declared_at_a_prompt_is_noted_without_a_place(folder, monkeypatch):
    monkeypatch.setattr(kernels.RmsNorm, "__module__", "prompt")
    monkeypatch.setattr(registry, "_places", {})
    with ts.capture(folder):
        norm(torch.ones(5, 64, dtype=torch.float16), torch.ones(64, dtype=torch.float16))
    assert only(folder).place == ""


def test_layouts_are_told(folder):
    q, k, v = tensors(rows=24)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    for each in (q, q.transpose(1, 2).contiguous().transpose(1, 2), shifted):
        with ts.capture(folder):  # plans anew: a plan is made for any layout of contiguous tensors
            sdpa(each, k, v)
    assert only(folder).layouts == ("contiguous", "strided", "unaligned")


def test_a_rival_that_serves_is_told_and_counted_once(folder, monkeypatch):
    def rivals(served, make):
        offer = Offer(name="other", ratio=0.5, capturable=False, reason="it is faster")
        rival = Rival(offer=offer, call=lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v))
        return rival, None

    monkeypatch.setattr("tiledsched.serve.plan.choose_rivals", rivals)
    q, k, v = tensors()
    with ts.capture(folder):
        for _ in range(3):
            sdpa(q, k, v)
    assert (only(folder).rival, only(folder).calls) == ("other", 3)


def test_a_choice_that_gives_way_is_noted_once_and_still_counted(folder):
    q, k, v = tensors(rows=256, columns=64)
    refusals = iter([TileError("this layout does not compile")])

    def launch(stream, grid, kernel, args):
        for refusal in refusals:
            raise refusal

    with changed(launch=launch), ts.capture(folder):
        for _ in range(3):
            sdpa(q, k, v)
    assert not [*refusals]
    assert 3 <= only(folder).calls <= 4
    (file,) = folder.iterdir()
    assert sum('"problem"' in line for line in file.read_text().splitlines()) == 1


def test_threads_lose_no_call(folder):
    given = [tensors(rows=rows) for rows in (8, 40, 300)]

    def work(number):
        for _ in range(20):
            for each in given:
                sdpa(*each)

    with changed(launch=lambda *given: None), ts.capture(folder), ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [None] * 4
    assert [each.calls for each in read_seen(folder).problems] == [80, 80, 80]


def test_a_forked_process_writes_to_a_file_of_its_own(folder):
    q, k, v = tensors()
    with changed(launch=lambda *given: None), ts.capture(folder):
        for _ in range(5):
            sdpa(q, k, v)
        child = os.fork()
        if not child:
            for _ in range(2):
                sdpa(q, k, v)
            capturing_module._write_all()
            os._exit(0)
        os.waitpid(child, 0)
    assert (only(folder).calls, only(folder).processes) == (7, 2)
    assert len(list(folder.iterdir())) == 2


PROGRAM = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import torch
    from serve_on_cpu import runtime_on_cpu, tensors
    from tiledsched import sdpa
    from tiledsched.serve import process
    process.use_runtime(runtime_on_cpu(lambda *given: None))
    for _ in range(3):
        sdpa(*tensors(rows=int(sys.argv[1])))
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    assert "sqlalchemy" not in sys.modules
"""


@pytest.mark.slow
def test_processes_share_a_folder_and_a_killed_one_loses_only_counts(folder, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(tests=str(Path(__file__).parent))))
    environment = os.environ | {"TILEDSCHED_CAPTURE": str(folder), "TILEDSCHED_FALLBACK": "error"}
    runs = [
        subprocess.Popen([sys.executable, str(program), *words], env=environment)
        for words in (("24", "ends"), ("24", "killed"))
    ]
    assert [run.wait() for run in runs] == [0, -signal.SIGKILL]
    found = only(folder)
    assert (found.calls, found.processes) == (3, 2)


def denied(*given, **how):
    raise PermissionError(13, "denied")


UNWRITABLE = {
    "a file in its place": lambda folder, patch: folder.write_text(""),
    "read only": lambda folder, patch: patch.setattr(Path, "mkdir", denied),
    "full": lambda folder, patch: patch.setattr(os, "write", lambda file, data: 3),
}


@pytest.mark.parametrize("what", UNWRITABLE)
def test_what_cannot_be_written_costs_one_warning_and_no_call(what, folder, monkeypatch, caplog):
    UNWRITABLE[what](folder, monkeypatch)
    with ts.capture(folder):
        for rows in (24, 300):
            assert sdpa(*tensors(rows=rows)).shape[2] == rows
    (warning,) = (record.message for record in caplog.records if "captured" in record.message)
    assert f"no longer captured in {folder}" in warning


def test_a_process_notes_so_many_problems_and_no_more(folder, monkeypatch, caplog):
    monkeypatch.setattr(capturing_module, "MOST_NOTED", 2)
    with ts.capture(folder):
        for columns in (16, 32, 64, 128):
            norm(torch.ones(5, columns, dtype=torch.float16), torch.ones(columns, dtype=torch.float16))
    assert len(read_seen(folder).problems) == 2
    assert sum("2 problems were noted" in record.message for record in caplog.records) == 1


def test_counts_are_written_now_and_then_while_plans_are_made(folder, monkeypatch):
    q, k, v = tensors()
    with ts.capture(folder):
        sdpa(q, k, v)
        monkeypatch.setattr(capturing_module, "COUNTS_S", 0.0)
        sdpa(*tensors(rows=300))
        assert sum(each.calls for each in read_seen(folder).problems) == 1


GOOD = {
    "v": 1,
    "id": 0,
    "place": "",
    "problem": {"kernel": "somebodys", "rows": 4},
    "sample": {"kernel": "somebodys", "rows": 3},
    "layout": "contiguous",
    "arch": "sm_90",
    "device": "NVIDIA H200",
    "provenance": "default",
    "schedule": {},
    "rival": "",
}


def without(name):
    return json.dumps({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "",
        "[]",
        "7",
        "\x00\xff",
        "[" * 100_000,
        *map(without, GOOD),
        *(
            json.dumps(GOOD | {name: value})
            for name, value in {
                "v": 2,
                "id": "0",
                "place": 3,
                "problem": {"kernel": "attention", "head_dim": -1},
                "sample": {"kernel": "others"},
                "schedule": [],
                "device": None,
            }.items()
        ),
        json.dumps(GOOD | {"problem": {"kernel": "somebodys", "rows": {}}}),
        json.dumps({"v": 1, "calls": {"0": -1}}),
        json.dumps({"v": 1, "calls": {"0": True}}),
        json.dumps({"v": 1, "calls": {"5": 1}}),
        json.dumps({"v": 1, "calls": [1]}),
    ],
)
def test_damaged_and_foreign_lines_are_skipped_and_counted(line, folder):
    folder.mkdir()
    (folder / "a.jsonl").write_text(f"{json.dumps(GOOD)}\n{line}\n" + json.dumps({"v": 1, "calls": {"0": 3}}))
    (folder / "other.txt").write_text("nothing of ours")
    found = read_seen(folder)
    assert (found.skipped, [each.calls for each in found.problems]) == (1, [3])


def test_what_is_read_chooses_no_code(folder, tmp_path):
    folder.mkdir()
    (tmp_path / "bad.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    line = GOOD | {"place": f"{tmp_path / 'bad.py'}:Bad", "problem": {"kernel": f"{tmp_path / 'bad.py'}:Bad"}}
    (folder / "a.jsonl").write_text(json.dumps(line | {"sample": line["problem"]}))
    assert not only(folder).problem.known
    assert not (tmp_path / "ran").exists()


def test_a_folder_is_cleared_of_our_files_only(folder):
    assert clear_seen(folder) == 0
    with ts.capture(folder):
        sdpa(*tensors())
    (folder / "other.txt").write_text("")
    assert clear_seen(folder) == 1
    assert [path.name for path in folder.iterdir()] == ["other.txt"]


def test_a_folder_that_cannot_be_read_is_an_error_that_says_what_to_do(folder):
    folder.write_text("")
    with pytest.raises(ConfigError, match=r"cannot read .* name another folder"):
        read_seen(folder)
