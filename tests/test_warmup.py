"""Machine code made ahead: what a bundle holds, when a launch may use it, and that no compiler starts where it does."""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import cuda.tile as ct
import pytest
import served_entries
import store_samples
from cuda.tile._cext import default_tile_context
from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature

from tiledsched.build import store as store_module
from tiledsched.build.compiler import Built
from tiledsched.build.cubin import Artifact, read_artifact
from tiledsched.build.host_code import host_arch
from tiledsched.build.pool import BuildPool
from tiledsched.build.store import ProgramStore
from tiledsched.core import launches
from tiledsched.core.config import Settings, load_settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import CompilerError, ConfigError, Failure, FailureKind
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.matmul import Matmul
from tiledsched.serve import warmup
from tiledsched.serve.bundle import BundledProgram, named_bundle, read_bundle, write_bundle
from tiledsched.serve.entries import Layer, load_entries, load_table, table_of
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.prebuilt import find_program, make_kernel, serves, usable_bundle
from tiledsched.store.records import Entry

ARCH = "sm_90"
PROBLEM = Attention.standard(seq_len=1024, head_dim=64)
SCHEDULE = space_for(ARCH, Attention).default(PROBLEM)
HINTED = SCHEDULE.replace(occupancy=2, num_worker_warps=8)
SETTINGS = Settings()


def artifact(fingerprint: str, arch: str) -> Artifact:
    """Machine code that can be told from any other."""
    return replace(store_samples.artifact(fingerprint, arch), cubin=fingerprint.encode())


def told_by_its_name(cubin: bytes, arch: str) -> Artifact:
    """What is read of the machine code that `artifact` makes."""
    return artifact(cubin.decode(), arch)


def entry(problem=PROBLEM, schedule=SCHEDULE, provenance="modelled", **more) -> Entry:
    return served_entries.entry(problem, provenance, schedule=schedule, **more)


def program(problem=PROBLEM, schedule=SCHEDULE, fingerprint="ab" * 12) -> BundledProgram:
    return BundledProgram(
        kernel="attention",
        arch=ARCH,
        schedule=schedule,
        problem=problem,
        fingerprint=fingerprint,
        host_arch=host_arch(),
    )


def write(path: Path, programs=None, *, entries=(), source_hash=None, compiler="a compiler") -> Path:
    programs = [program()] if programs is None else programs
    made = {(each.arch, each.fingerprint): artifact(each.fingerprint, ARCH) for each in programs}
    write_bundle(path, programs, made, list(entries), {"attention": source_hash or Attention.source_hash()}, compiler)
    return path


@pytest.fixture(autouse=True)
def no_bundle(home, monkeypatch):
    monkeypatch.delenv("TILEDSCHED_BUNDLE", raising=False)


@pytest.fixture
def named_code(monkeypatch):
    """The machine code of these tests, which is no cubin, is read as what it was made of."""
    for each in (store_module, warmup):
        monkeypatch.setattr(each, "read_artifact", told_by_its_name)


# The file


def test_a_bundle_gives_back_what_was_put_in_and_the_same_bytes_each_time(tmp_path, named_code) -> None:
    other = program(PROBLEM.replace(causal=True), HINTED, "cd" * 12)
    path = write(tmp_path / "deep" / "one.zip", [program(), other], entries=[entry()])
    bundle = read_bundle(path)
    assert (bundle.programs, bundle.entries, bundle.compiler) == ((program(), other), (entry(),), "a compiler")
    assert bundle.artifact(other).cubin == artifact(other.fingerprint, ARCH).cubin
    again = write(tmp_path / "two.zip", [program(), other], entries=[entry()])
    assert again.read_bytes() == path.read_bytes()
    assert [each.name for each in path.parent.iterdir()] == ["one.zip"]


HALF = {"source_hashes": [], "compiler": "c", "entries": [], "programs": [{"kernel": "attention"}]}
NO_INDEX = {
    "a list": ("[]", "has schema_version None"),
    "empty": ("{}", "has schema_version None"),
    "deep": ("[" * 50_000, "is no bundle"),
    "newer": (json.dumps({"schema_version": 3}), "has schema_version 3, this tiledsched reads 2"),
    "no programs": (json.dumps({"schema_version": 2}), "is no bundle"),
    "half a program": (json.dumps({"schema_version": 2, **HALF}), "is no bundle"),
    "numbers": (json.dumps({"schema_version": 2, **HALF, "entries": 3, "programs": 5}), "is no bundle"),
}


@pytest.mark.parametrize(("text", "words"), NO_INDEX.values(), ids=NO_INDEX)
def test_a_file_with_another_index_is_no_bundle(tmp_path, text, words) -> None:
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as file:
        file.writestr("bundle.json", text)
    with pytest.raises(ConfigError, match=rf"bad\.zip {words}"):
        read_bundle(tmp_path / "bad.zip")


def test_what_is_no_bundle_is_refused_with_what_to_do(tmp_path, monkeypatch) -> None:
    assert named_bundle() is None
    monkeypatch.setenv("TILEDSCHED_BUNDLE", str(tmp_path / "gone.zip"))
    with pytest.raises(ConfigError, match=r"TILEDSCHED_BUNDLE = .*no such file"):
        named_bundle()
    with pytest.raises(ConfigError, match="tiledsched warmup --arch"):
        read_bundle(tmp_path / "missing.zip")
    (tmp_path / "text.zip").write_text("text")
    with pytest.raises(ConfigError, match=r"text\.zip is no bundle"):
        read_bundle(tmp_path / "text.zip")
    with pytest.raises(ConfigError, match="give another path"):
        write(tmp_path / "text.zip" / "out.zip")


def test_a_bundles_entries_are_served(tmp_path, monkeypatch) -> None:
    problem = Attention.problem(seq_q=3, seq_k=3, head_dim=32)
    tuned = entry(problem, space_for(ARCH, Attention).default(problem))
    assert tuned not in load_entries(load_settings())
    monkeypatch.setenv("TILEDSCHED_BUNDLE", str(write(tmp_path / "b.zip", entries=[tuned])))
    assert tuned.replace(layer="bundle") in load_entries(load_settings())


def test_what_another_version_of_the_kernel_was_built_into_is_left_out(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("TILEDSCHED_BUNDLE", str(write(tmp_path / "old.zip", source_hash="0" * 12)))
    assert usable_bundle(Attention) is None
    assert "make it again" in caplog.text
    write(tmp_path / "old.zip")  # made again, and read again
    assert usable_bundle(Attention).path.name == "old.zip"


def test_programs_for_other_hosts_are_left_out_and_their_evidence_is_served(
    tmp_path, monkeypatch, caplog, named_code
) -> None:
    """A bundle that names no hosts was made before others were told apart, for x86_64."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    foreign = replace(program(PROBLEM.replace(causal=True), fingerprint="cd" * 12), host_arch="aarch64")
    path = write(tmp_path / "b.zip", [program(), foreign], entries=[entry()])
    monkeypatch.setenv("TILEDSCHED_BUNDLE", str(path))
    usable = usable_bundle(Attention)
    assert usable.programs == (program(),)
    assert usable.entries == (entry(),)
    assert "programs for aarch64 hosts are left out, because this host is x86_64" in caplog.text
    assert "tiledsched warmup --arch ARCH --host-arch x86_64 -o FILE" in caplog.text
    assert read_bundle(path).artifact(foreign).fingerprint == foreign.fingerprint
    monkeypatch.setattr(
        store_module, "read_artifact", lambda code, arch: replace(told_by_its_name(code, arch), host_arch="aarch64")
    )
    with pytest.raises(ConfigError, match="is for aarch64 hosts"):
        read_bundle(path).artifact(program())
    with zipfile.ZipFile(path) as file:
        index = json.loads(file.read("bundle.json"))
    for row in index["programs"]:  # as older releases wrote them
        del row["host_arch"], row["problem"]["kernel"]
    with zipfile.ZipFile(tmp_path / "old.zip", "w") as file:
        file.writestr("bundle.json", json.dumps(index))
    assert {each.host_arch for each in read_bundle(tmp_path / "old.zip").programs} == {"x86_64"}


def changed(path: Path, change) -> None:
    """Write a bundle again with other machine code."""
    with zipfile.ZipFile(path) as file:
        held = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, data in held.items():
            file.writestr(name, data if name == "bundle.json" else change(data))


def test_other_machine_code_than_the_bundle_says_is_refused(tmp_path, monkeypatch) -> None:
    """Bits of a cubin that a launch reads and its fingerprint does not tell are in the hash of the whole file."""
    path = write(tmp_path / "b.zip")
    for fingerprint, change, words in (
        (None, bytes, "not a cubin"),
        ("ab" * 12, bytes, ""),
        ("cd" * 12, bytes, "is machine code cdcdcd"),
        ("ab" * 12, lambda data: data[:-1] + b"?", "has another hash"),
    ):
        changed(path, change)
        with monkeypatch.context() as patch:
            if fingerprint:
                patch.setattr(store_module, "read_artifact", lambda code, arch, made=fingerprint: artifact(made, arch))
            if words:
                with pytest.raises(ConfigError, match=rf"is damaged .*{words}"):
                    read_bundle(path).artifact(program())
            else:
                assert read_bundle(path).artifact(program()).fingerprint == fingerprint
    with pytest.raises(ConfigError, match="is damaged"):
        read_bundle(path).artifact(program(fingerprint="00" * 12))
    data = bytearray(write(path).read_bytes())
    data[data.index(b"cubins/") + len(program().cubin_name) + 4] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is damaged"):
        read_bundle(path).artifact(program())


BUILT = replace(served_entries.SUMMARY.toolchain, cuda_tile="1.7.0")
COMPILER = BUILT.compiler
BESIDE = PROBLEM.replace(seq_q=2048, seq_k=2048)
"""Another problem that the same machine code computes."""


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),
        ({"problem": BESIDE}, True),
        ({"fingerprint": "cd" * 12}, False),
        ({"problem": PROBLEM.replace(causal=True)}, False),
        ({"schedule": SCHEDULE.replace(occupancy=3)}, False),
        ({"toolchain": replace(BUILT, tileiras="13.5.37")}, False),
        ({"source_hash": "0" * 12}, False),
        ({"provenance": "modelled"}, False),
    ],
    ids=lambda given: next(iter(given), "its own problem") if isinstance(given, dict) else "",
)
def test_a_program_that_was_measured_is_the_one_that_was_measured(tmp_path, named_code, changes, refused) -> None:
    """A bundle whose programs are other machine code than its entries say, under another name, is damaged."""
    values = {"provenance": "measured", "measurement": None, "toolchain": BUILT} | changes
    measured = entry(**({"fingerprint": "ab" * 12, "source_hash": Attention.source_hash()} | values))
    path = write(tmp_path / "b.zip", [program(fingerprint="cd" * 12)], entries=[measured], compiler=COMPILER)
    bundle = read_bundle(path)
    if refused:
        with pytest.raises(ConfigError, match=r"is damaged .*is not machine code abab.*, which was measured"):
            bundle.artifact(bundle.programs[0])
    else:
        assert bundle.artifact(bundle.programs[0]).fingerprint == "cd" * 12


# Which launches may use a program


def built_for(problem=PROBLEM, schedule=SCHEDULE):
    """The signature that machine code is built for."""
    (step,) = launches.steps(Attention, problem, schedule, arch_spec(ARCH))
    return launches.signature(Attention, problem, schedule, step)


def asked(problem=PROBLEM, schedule=SCHEDULE, **changes):
    """The signature of a launch: as built, with what a launch infers of its tensors on top."""
    built = built_for(problem, schedule)
    inferred = {"shape_divisible_by": (1, 16, 16, 1)} | changes
    names = [*inspect.signature(ArrayConstraint.__init__).parameters][1:]
    parameters = [
        ArrayConstraint(**({name: getattr(each, name) for name in names} | inferred))
        if isinstance(each, ArrayConstraint)
        else each
        for each in built.parameters
    ]
    return KernelSignature(parameters, built.calling_convention)


@pytest.mark.parametrize(
    "changes",
    [
        {"base_addr_divisible_by": 4},
        {"stride_divisible_by": (8, 8, 1, 1)},
        {
            "stride_constant": (None, None, None, None),
            "stride_lower_bound_incl": 0,
            "stride_divisible_by": (8, 8, 8, 8),
        },
        {"stride_constant": (None, None, 64, 1)},  # a constant is not passed, so the arguments would be others
        {"shape_constant": (1, None, None, 64)},
        {"may_alias_internally": True},
        {"alias_groups": ("a",)},
        {"stride_lower_bound_incl": (None, 0, 0, None)},
        {"index_dtype": ct.int64},
        {"problem": PROBLEM.replace(causal=True)},
        {"problem": PROBLEM.replace(dtype="bfloat16")},
        {"problem": PROBLEM.replace(head_dim=128)},
        {"problem": PROBLEM.replace(kv_heads=8)},
        {"problem": PROBLEM.replace(seq_k=1000)},
        {"schedule": SCHEDULE.replace(tile_m=128)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_launch_may_use_a_program_unless_it_breaks_an_assumption(changes) -> None:
    assert not serves(built_for(), asked(**changes))
    assert serves(built_for(), built_for())
    assert serves(built_for(), asked())
    assert serves(built_for(), asked(stride_divisible_by=(64, 64, 8, 1), base_addr_divisible_by=256))


@pytest.mark.parametrize("layout", ["row", "column"])
def test_a_launch_without_constant_sizes_may_use_the_program_by_the_older_convention(layout) -> None:
    product = Matmul.problem(m=200, n=300, k=400, b_layout=layout)
    schedule = space_for(ARCH, Matmul).default(product)
    (step,) = launches.steps(Matmul, product, schedule, arch_spec(ARCH))
    built = launches.signature(Matmul, product, schedule, step)
    launched = KernelSignature(built.parameters, CallingConvention.cutile_python_v1())
    assert not serves(built, launched)
    assert serves(built, launches.assumed(Matmul, launched, step))


# Kernels that look into bundles


def test_a_kernel_takes_the_program_with_its_hints_and_signature(tmp_path, monkeypatch, caplog, named_code) -> None:
    causal = PROBLEM.replace(causal=True)
    held = [program(), program(causal, fingerprint="cd" * 12), program(schedule=HINTED, fingerprint="ef" * 12)]
    monkeypatch.setenv("TILEDSCHED_BUNDLE", str(write(tmp_path / "b.zip", held)))
    caplog.set_level(logging.INFO, logger="tiledsched")
    for schedule, problem, wanted in (
        (SCHEDULE, PROBLEM, held[0]),
        (SCHEDULE, causal, held[1]),
        (HINTED, PROBLEM, held[2]),
    ):
        (kernel,) = make_kernel(Attention, schedule, problem, SETTINGS, arch_spec(ARCH))
        cubin, symbol, *more = kernel._compile(asked(problem, schedule), None, (9, 0))
        assert cubin == artifact(wanted.fingerprint, ARCH).cubin
        assert f"{wanted.fingerprint} from {tmp_path / 'b.zip'}" in caplog.text
        assert (symbol, more) == ("attention", [None, ()])
        found = find_program(kernel.prebuilt, Attention, 0, kernel.step.function, asked(problem, schedule))
        assert found is not None
        assert found[1] == wanted
    (other,) = make_kernel(Attention, SCHEDULE.replace(occupancy=3), PROBLEM, SETTINGS, arch_spec(ARCH))
    assert not other.prebuilt


def test_where_no_bundle_holds_it_the_kernel_compiles_or_says_why_it_cannot(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("TILEDSCHED_BUNDLE", str(write(tmp_path / "b.zip")))
    (kernel,) = make_kernel(Attention, SCHEDULE, PROBLEM, SETTINGS, arch_spec(ARCH))
    other = asked(PROBLEM.replace(causal=True))
    monkeypatch.setattr(ct.kernel, "_compile", lambda self, *given: ("compiled", given))
    answer, (signature, *more) = kernel._compile(other, "context", (9, 0))
    assert (answer, more) == ("compiled", ["context", (9, 0)])
    assumed = built_for(PROBLEM.replace(causal=True)).parameters
    assert signature.parameters == assumed != other.parameters
    (elsewhere,) = make_kernel(Attention, SCHEDULE, PROBLEM, SETTINGS, arch_spec("sm_100"))
    assert elsewhere._compile(asked(), "context", (10, 0))[0] == "compiled"  # the bundle is for another arch
    assert caplog.text == ""
    assert kernel._compile(asked(), "context", (9, 0))[0] == "compiled"  # what the tests write is no cubin
    assert "is damaged" in caplog.text
    assert "compiled instead" in caplog.text

    def missing(self, *given):
        raise FileNotFoundError("'tileiras' compiler not found")

    monkeypatch.setattr(ct.kernel, "_compile", missing)
    with pytest.raises(CompilerError, match=r"no bundle holds this program for sm_90.*see its --also"):
        kernel._compile(other, None, (9, 0))


def test_what_cutile_asks_a_kernel_for_is_what_we_answer() -> None:
    asked_for = ["self", "signature", "context", "compute_capability"]
    assert list(inspect.signature(ct.kernel._compile).parameters) == asked_for


@pytest.mark.compiler
@pytest.mark.slow
def test_a_program_built_ahead_is_the_one_cutile_would_compile_and_no_compiler_starts(tmp_path) -> None:
    """In a new process whose compiler cannot be started: the machine code comes all the same."""
    problem = PROBLEM.replace(head_dim=32)
    schedule = SCHEDULE.replace(tile_m=64, tile_n=32)
    table = LookupTable([entry(problem, schedule)], Attention)
    with BuildPool(1) as pool:
        made = warmup.prepare(
            ARCH, None, [entry(problem, schedule)], table, Attention, ProgramStore(), pool, "a compiler", SETTINGS
        )
    assert (made.programs, made.compiled, made.reused, made.failures) == (1, 1, 0, ())
    signature = built_for(problem, schedule)
    (plain,) = launches.tile_kernels(Attention, {ARCH: schedule}, problem, arch_spec(ARCH))
    theirs = plain._compile(signature, default_tile_context, (9, 0))
    code = f"""
import subprocess, sys
def forbidden(*given, **more): raise AssertionError(f"started {{given}}")
subprocess.run = subprocess.Popen = forbidden
from tiledsched.cli import main
from tiledsched.core import launches
from tiledsched.core.config import load_settings
from tiledsched.core.device import arch_spec
from tiledsched.core.registry import problem_from_json
from tiledsched.core.registry import kernel_named
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.serve.prebuilt import make_kernel
schedule, problem = Schedule({schedule.to_json()!r}), problem_from_json({problem.to_json()!r})
declared = kernel_named("attention")
(kernel,) = make_kernel(declared, schedule, problem, load_settings(), arch_spec("sm_90"))
answer = kernel._compile(launches.signature(declared, problem, schedule, kernel.step), None, (9, 0))
assert "cuda.tile._compile" not in sys.modules
sys.stdout.buffer.write(answer[0])
assert answer[1:] == {theirs[1:]!r}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert read_artifact(done.stdout, ARCH).fingerprint == read_artifact(theirs[0], ARCH).fingerprint


# Preparing


class Pool:
    """Stands in for the compile processes; a tile of 128 rows does not build."""

    def __init__(self) -> None:
        self.tasks: list = []
        self.spilling: tuple[int, ...] = ()
        """Programs with these occupancies spill registers."""

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None: ...

    def build(self, tasks):
        self.tasks = list(tasks)
        for task in self.tasks:
            name = launches.problem_class(Attention, task.problem, task.schedule, arch_spec(ARCH)).id + task.schedule.id
            made, failure = artifact(name[:24].ljust(24, "0"), ARCH), None
            made = replace(
                made, facts=replace(made.facts, spill_bytes=128 * (task.schedule["occupancy"] in self.spilling))
            )
            if task.schedule["tile_m"] == 128:
                made, failure = None, Failure(kind=FailureKind.COMPILE_ERROR, message="too big")
            yield Built(task=task, artifact=made, failure=failure, seconds=1.0)

    def prepare(self, path, entries, arch=ARCH, store=None, **more):
        table = LookupTable(entries, Attention)
        store = store or ProgramStore()
        return warmup.prepare(arch, path, entries, table, Attention, store, self, "a compiler", SETTINGS, **more)


@pytest.fixture
def pool(monkeypatch, named_code):
    made = Pool()
    monkeypatch.setattr("tiledsched.build.pool.BuildPool", lambda jobs: made)
    return made


def counts(made) -> tuple[int, int, int]:
    """Programs, how many of them were built, and how many were there."""
    return made.programs, made.compiled, made.reused


def test_each_program_is_built_once_and_a_second_time_nothing_is(tmp_path, pool) -> None:
    entries = [entry(), entry(PROBLEM.replace(seq_q=2048, seq_k=2048)), entry(PROBLEM.replace(causal=True), HINTED)]
    made = pool.prepare(tmp_path / "b.zip", entries)
    assert (made.problems, counts(made)) == (3, (2, 2, 0))  # a length is no program of its own
    bundle = read_bundle(tmp_path / "b.zip")
    assert {(each.schedule, each.problem.causal) for each in bundle.programs} == {(SCHEDULE, False), (HINTED, True)}
    assert bundle.entries == tuple(entries)
    assert made.size_bytes == (tmp_path / "b.zip").stat().st_size
    assert counts(pool.prepare(tmp_path / "b.zip", entries)) == (2, 0, 2)


def test_the_program_that_a_captured_graph_holds_is_built_too(tmp_path, pool) -> None:
    entries = [entry(provenance="measured"), entry(schedule=HINTED, provenance="measured", regime="graph")]
    made = pool.prepare(tmp_path / "b.zip", entries)
    assert (made.problems, counts(made)) == (1, (2, 2, 0))


@pytest.mark.parametrize(("source_hash", "reused"), [(Attention.source_hash(), 1), ("0" * 12, 0)])
def test_machine_code_is_used_again_only_where_the_kernel_is_the_same(tmp_path, pool, source_hash, reused) -> None:
    store, known = ProgramStore(), artifact("ab" * 12, ARCH)
    store.get = lambda arch, fingerprint: known if fingerprint == known.fingerprint else None  # type: ignore[method-assign]
    tuned = entry(fingerprint=known.fingerprint, source_hash=source_hash)
    assert counts(pool.prepare(tmp_path / "b.zip", [tuned], store=store)) == (1, 1 - reused, reused)


def test_more_kinds_of_problem_are_prepared_on_request(tmp_path, pool) -> None:
    every = {"dtype": ["float16", "bfloat16"], "group": ["1", "4"], "any-length": []}
    found = Attention.likely(PROBLEM, every)
    assert len(found) == len(set(found)) == 8
    assert {(each.dtype, each.group, each.seq_k) for each in found} == {
        (dtype, group, rows) for dtype in ("float16", "bfloat16") for group in (1, 4) for rows in (1024, 1025)
    }
    assert Attention.likely(PROBLEM, {"group": ["3"]}) == []  # 32 heads are no multiple of 3
    decode = Attention.likely(PROBLEM.replace(causal=True), {"decode": []})
    assert [(each.seq_q, each.causal) for each in decode] == [(1024, True), (1, False)]
    made = pool.prepare(tmp_path / "b.zip", [entry()], likely=lambda problem: Attention.likely(problem, every))
    assert made.programs == made.problems == 8


def test_problems_that_are_given_are_prepared_measured_or_not_for_their_gpu(tmp_path, pool) -> None:
    mine = entry(schedule=HINTED, provenance="measured", device="NVIDIA H100")
    other = PROBLEM.replace(batch=3, head_dim=80)
    more = {"problems": [PROBLEM, other], "device": "NVIDIA H100"}
    assert pool.prepare(tmp_path / "b.zip", [entry(provenance="measured"), mine], **more).problems == 2
    by_problem = {each.problem: each.schedule for each in read_bundle(tmp_path / "b.zip").programs}
    assert by_problem.keys() == {PROBLEM, other}
    assert by_problem[PROBLEM] == HINTED
    assert pool.prepare(tmp_path / "c.zip", [], problems=[PROBLEM]).programs == 1  # by the default


def test_problems_that_nobody_tuned_are_prepared_by_the_schedules_that_they_are_served_with(pool) -> None:
    """What transfers serve; and in the cache folder, where the first launch finds it by its name."""
    near = PROBLEM.replace(seq_q=1100, seq_k=1100)
    made = pool.prepare(None, [entry(schedule=HINTED, provenance="measured")], problems=[near])
    assert (made.problems, made.programs, made.path) == (1, 1, ProgramStore().folder / ARCH)
    (task,) = pool.tasks
    assert (task.problem, task.schedule["occupancy"]) == (near, 2)
    (kernel,) = make_kernel(Attention, task.schedule, near, SETTINGS, arch_spec(ARCH))
    cubin, symbol, *more = kernel._compile(asked(near, task.schedule), None, (9, 0))
    assert (len(cubin), symbol, more) == (24, "attention", [None, ()])


def test_the_next_choice_of_what_does_not_build_is_prepared_too(tmp_path, pool) -> None:
    """After the last one it is the default."""
    too_big, second = SCHEDULE.replace(tile_m=128), SCHEDULE.replace(occupancy=3)
    made = pool.prepare(tmp_path / "a.zip", [entry(), entry(PROBLEM.replace(causal=True), too_big)])
    assert made.programs == 2
    assert made.to_json()["failures"][0]["message"] == "too big"
    assert "1 would not build (too big)" in str(made)
    made = pool.prepare(tmp_path / "b.zip", [entry(schedule=too_big, runner_up=second, margin=0.02)])
    assert [failure.message for _, failure in made.failures] == ["too big"]
    assert [each.schedule for each in read_bundle(tmp_path / "b.zip").programs] == [second]
    with pytest.raises(ConfigError, match="tiledsched tune attention --arch sm_121"):
        pool.prepare(tmp_path / "c.zip", [entry()], "sm_121")


def test_the_next_choice_of_what_spills_is_prepared_too(tmp_path, pool, monkeypatch) -> None:
    """Of what was not measured; what was is served whatever it keeps in memory."""
    first, second = SCHEDULE.replace(occupancy=2), SCHEDULE.replace(occupancy=3)
    tuned = entry(schedule=first, runner_up=second, margin=0.02, provenance="measured")
    other = PROBLEM.replace(seq_q=1025, seq_k=1025)
    pool.spilling = (2,)
    assert pool.prepare(tmp_path / "a.zip", [tuned]).programs == 1
    made = pool.prepare(tmp_path / "b.zip", [tuned], likely=lambda problem: [other])
    assert made.problems == 2
    bundle = read_bundle(tmp_path / "b.zip")
    held = [(each.problem, each.schedule["occupancy"]) for each in bundle.programs]
    assert sorted(held, key=str) == sorted([(PROBLEM, 2), (other, 2), (other, 3)], key=str)
    # What was found out is kept in the bundle, for machines without a compiler.
    (lost,) = made.lost
    assert (lost.task.problem, lost.task.schedule["occupancy"]) == (other, 2)
    program_class = launches.problem_class(Attention, other, lost.task.schedule, arch_spec(ARCH)).id
    assert bundle.spills == {"attention": {ARCH: {lost.task.schedule.id: {program_class: 128}}}}
    monkeypatch.setenv("TILEDSCHED_BUNDLE", str(tmp_path / "b.zip"))
    monkeypatch.setattr("tiledsched.serve.entries.compiler_at_hand", lambda: "")
    assert table_of([tuned], load_settings(), kernel=Attention).resolve(other, ARCH).schedule["occupancy"] == 3


# The commands


@pytest.fixture
def told(pool, monkeypatch, cli):
    """Calls the command with a table of one entry, and returns what it prints as JSON about the one bundle that it makes."""

    def call(*words, code=0, **tuned):
        if tuned:
            layer = Layer(name="user", where="", entries=[entry(**tuned)])
            monkeypatch.setattr("tiledsched.serve.entries.layers", lambda *given, **more: [layer])
        (said,) = cli(["warmup", *words, "--json"], code=code, devices=list).json["bundles"]
        return said

    return call


def test_warmup_builds_what_was_seen_of_every_kernel(tmp_path, told) -> None:
    words = {"place": "", "layout": "strided", "arch": ARCH, "device": "NVIDIA H200", "provenance": "", "rival": ""}
    sample = PROBLEM.replace(seq_q=4001, seq_k=4001)
    line = {"v": 1, "id": 0, "schedule": {}, "sample": sample.to_json(), **words}
    line["problem"] = Attention.similarity.bucketed(sample).to_json()
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "a.jsonl").write_text(json.dumps(line))
    made = told("--seen")
    assert (made["arch"], made["problems"], made["failures"]) == (ARCH, 2, [])


def test_warmup_stores_what_spills(told, pool) -> None:
    pool.spilling = (2,)
    tuned = {"schedule": SCHEDULE.replace(occupancy=2), "runner_up": SCHEDULE.replace(occupancy=3)}
    assert told("--arch", ARCH, **tuned)["programs"] == 2
    table = load_table(load_settings(), kernel=Attention)
    assert table.resolve(PROBLEM, ARCH).schedule["occupancy"] == 3
    again = told("--arch", ARCH)
    assert (again["programs"], again["compiled"]) == (1, 0)


def test_warmup_writes_to_the_cache_and_to_files(tmp_path, pool, told, cli, monkeypatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    said = told("--arch", ARCH, schedule=SCHEDULE)
    assert said["file"] == str(tmp_path / "cache" / "programs" / ARCH)
    assert (said["programs"], said["failures"], said["seconds"] >= 0) == (1, [], True)
    again = cli(["warmup", "--arch", ARCH, "--out", str(tmp_path / "out.zip")]).out
    assert pool.tasks == []  # warmup has built it
    assert "(1 had before, 0 built now)" in again
    assert told("--arch", ARCH, "--out", str(tmp_path / "out.zip"), "--also", "any-length")["problems"] == 2
    assert len(read_bundle(tmp_path / "out.zip").programs) == 2
    elsewhere = told("--arch", ARCH, "--out", str(tmp_path / "arm.zip"), "--host-arch", "aarch64")
    assert (elsewhere["compiled"], elsewhere["reused"]) == (1, 0)  # what is in the cache is for hosts like this one
    assert told("--arch", ARCH, code=1, schedule=SCHEDULE.replace(tile_m=128))["failures"]


@pytest.mark.parametrize(
    ("arch", "words", "host"),
    [
        ("sm_90", "", "x86_64"),
        ("sm_90", "-o b.zip", "x86_64"),
        ("sm_90", "-o b.zip --host-arch aarch64", "aarch64"),
        ("sm_121", "", "x86_64"),
        ("sm_121", "-o b.zip", "aarch64"),  # a GB10 has no other
        ("sm_121", "-o b.zip --host-arch x86_64", "x86_64"),
    ],
)
def test_a_bundle_is_for_the_hosts_that_load_it(arch, words, host, tmp_path, pool, told, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for tasks in (1, 0):  # the second time the bundle has it
        said = told("--arch", arch, *words.split(), arch=arch)
        assert said["host_arch"] == host
        assert [task.host_arch for task in pool.tasks] == [host] * tasks
    if words:
        assert {each.host_arch for each in read_bundle(Path(said["file"])).programs} == {host}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--seen --also decode", "leave out --also"),
        ("--arch sm_90 --host-arch aarch64", "--host-arch chooses what goes to a file; pass -o FILE, too"),
        ("", "pass --arch"),
    ],
)
def test_what_warmup_does_not_take_is_said(words, why, cli) -> None:
    assert why in cli(f"warmup {words}", code=2, devices=list).err
