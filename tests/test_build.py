"""Building: what a cubin tells, what the compiler gives, and that what is built is what a launch would build."""

from __future__ import annotations

import dataclasses
import io
import os
from functools import lru_cache
from pathlib import Path

import bad_kernels
import pytest
from cuda.tile import _ir2bytecode
from cuda.tile._cext import default_tile_context
from cuda.tile.compilation import ArrayConstraint, KernelSignature, export_kernel

from tiledsched.build import toolchain as toolchain_module
from tiledsched.build.compiler import BuildTask, Built, compile_task, pass_on_worker_warps
from tiledsched.build.cubin import Artifact, is_whole, read_artifact, strip_debug
from tiledsched.build.toolchain import Toolchain, check_arch, installed_toolchain, release
from tiledsched.core.config import load_settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import CompilerError, FailureKind
from tiledsched.core.launches import assumed, problem_class, signature, steps, tile_kernels
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import HINT_KNOBS, Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.serve.prebuilt import make_kernel

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
REPRODUCIBLE = ("sm_90", "sm_121")
PROBLEM = Attention.standard(seq_len=1024, head_dim=64)
NEW_KNOBS = ("kv_splits", "pack_gqa", "column_parts")


@lru_cache
def built(schedule: Schedule, problem: Problem, arch: str) -> Built:
    """What the compiler makes of it, asked once."""
    return compile_task(BuildTask(kernel="attention", schedule=schedule, problem=problem, arch=arch))


def artifact(schedule: Schedule, problem: Problem, arch: str = "sm_90") -> Artifact:
    """Its machine code; what the compiler refuses is an error."""
    found = built(schedule, problem, arch)
    assert found.artifact is not None, (problem, schedule, found.failure)
    return found.artifact


def small_tiles(problem: Problem, knobs: dict, arch: str) -> Schedule:
    """The default schedule with small tiles, one block on an SM, and `knobs`."""
    knobs = {"tile_m": 64, "tile_n": 64, "occupancy": 1, **knobs}
    return space_for(arch, Attention).default(problem).replace(**knobs)


def distinct(cases: dict[str, tuple[Problem, dict]], arch: str) -> None:
    """Every one builds, with small tiles, and none is the program of another."""
    found = {}
    for name, (problem, knobs) in cases.items():
        found[artifact(small_tiles(problem, knobs, arch), problem, arch).fingerprint] = name
    assert len(found) == len(cases)


@lru_cache
def export(
    schedule: Schedule, problem: Problem, arch: str, *, axes: tuple[int, ...] = (1, 1, 1), name: str = "attention"
):
    """The raw cubin, with `axes` of the first three array axes assumed to be multiples."""
    asked, step = signature_of(schedule, problem, arch)
    arrays = []
    for array in asked.parameters[:4]:
        fields = {field.name: getattr(array, field.name) for field in dataclasses.fields(array)}
        dtype, ndim = fields.pop("dtype"), fields.pop("ndim")
        arrays.append(type(array)(dtype, ndim, **(fields | {"shape_divisible_by": (*axes, 1)})))
    parameters = [*arrays, *asked.parameters[4:]]
    assert len(parameters) == len(step.arguments)
    output = io.BytesIO()
    (tile_kernel,) = tile_kernels(Attention, {arch: schedule}, problem, arch_spec(arch))
    export_kernel(
        tile_kernel,
        [KernelSignature(parameters, asked.calling_convention, name)],
        output,
        gpu_code=arch,
        output_format="cubin",
    )
    return output.getvalue()


def signature_of(schedule: Schedule, problem: Problem, arch: str = "sm_90"):
    """What is assumed of the parameters of a schedule's only step, and the step."""
    (step,) = steps(Attention, problem, schedule, arch_spec(arch))
    return signature(Attention, problem, schedule, step), step


def class_of(problem: Problem, schedule: Schedule):
    return problem_class(Attention, problem, schedule, arch_spec("sm_90"))


@pytest.mark.compiler
@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch in REPRODUCIBLE else pytest.mark.slow) for arch in ARCHS]
)
def test_the_default_schedule_builds_for_every_arch(arch: str) -> None:
    schedule = space_for(arch, Attention).default(PROBLEM)
    facts = artifact(schedule, PROBLEM, arch).facts
    assert 32 <= facts.threads <= 1024
    assert (facts.threads % 32, 16 <= facts.registers <= 255) == (0, True)
    assert min(facts.ctas_per_sm, facts.code_bytes - 1000) >= 1


STRUCTURE = [
    {"persistent": "snake"},
    {"block_order": "swizzled"},
    {"kv_direction": "backward"},
    {"kv_direction": "sawtooth"},
    {"q_subtiles": 2},
    {"kv_subtiles": 2},
    {"qk_ahead": True},
    {"tma_loads": False},
    {"tma_store": False},
    {"check_bounds": False},
    {"division": "ieee"},
    {"lazy_rescale": True},
    {"qk_ahead": True, "loop_split": True},
    {"qk_ahead": True, "q_subtiles": 2},
    {"q_subtiles": 2, "kv_subtiles": 2},
    {"kv_direction": "backward", "loop_split": True},
    {"lazy_rescale": True, "kv_subtiles": 2},
    {"flat_steps": 2, "persistent": "strided"},
    {"flat_steps": 1, "reload_q": True, "loop_split": True, "persistent": "snake"},
    {"flat_steps": 1, "q_ahead": True, "loop_split": True, "persistent": "snake"},
    {"q_in_registers": True},
    {"unroll": 2},
    {"store_late": True, "q_in_registers": True, "persistent": "strided"},
    {"store_late": True, "persistent": "strided"},
    {"store_late": True, "loop_split": True, "persistent": "snake"},
    {"store_late": True, "peel_first": False, "persistent": "strided"},
    {"kv_direction": "wide_sawtooth"},
    {"q_subtiles": 2, "q_in_registers": True, "persistent": "strided"},
]
INERT = {"sm_80": ("tma_store",), "sm_90": ("check_bounds",), "sm_121": ("check_bounds",)}
"""Knobs that left the machine code of the plain causal kernel as it was, with the compiler of cuda-tile 1.7."""


def in_turn(cases: list) -> list:
    """Every second one: `make test` and `make newest` build with compilers of two releases, and share what there is."""
    return cases[release(installed_toolchain().tileiras)[1] % 2 :: 2]


def structures(arch: str) -> list[dict]:
    """Those that `arch` builds: sm_80 and sm_121 every eighth one each. What is inert is built wherever it is.

    For sm_90, each value of each knob and each combination above is in a program of `ELSEWHERE` or `ASKED`.
    """
    own = {"sm_80": STRUCTURE[2::8], "sm_121": STRUCTURE[6::8], "sm_90": []}
    return [each for each in STRUCTURE if each in own[arch] or (len(each) == 1 and set(each) <= {*INERT[arch]})]


@pytest.mark.compiler
@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch == "sm_90" else pytest.mark.slow) for arch in INERT]
)
def test_every_structure_builds(arch: str) -> None:
    """Each value of each structural knob compiles, and makes another program unless it is known not to."""
    problem = PROBLEM.replace(causal=True)
    plain = space_for(arch, Attention).default(problem).replace(tile_m=64, tile_n=64, occupancy=1, num_worker_warps=4)
    fingerprints = {}
    for changes in ({}, *in_turn(structures(arch))):
        fingerprints[tuple(changes)] = artifact(plain.replace(**changes), problem, arch).fingerprint
        same = fingerprints[tuple(changes)] == fingerprints[()]
        assert same == (not changes or tuple(changes) in {(name,) for name in INERT[arch]}), changes


DECODE = Attention.problem(
    seq_q=2, seq_k=4096, head_dim=96, causal=True, alignment="bottom_right", heads=8, kv_heads=2, lse=True
)
ELSEWHERE = {
    "lse": (
        PROBLEM.replace(lse=True),
        {
            "q_subtiles": 2,
            "kv_subtiles": 2,
            "qk_ahead": True,
            "q_in_registers": True,
            "persistent": "strided",
            "division": "ieee",
        },
    ),
    "bottom right": (
        PROBLEM.replace(seq_q=300, causal=True, alignment="bottom_right"),
        {"tile_m": 128, "tile_n": 128, "num_worker_warps": 8, "qk_ahead": True, "loop_split": True, "opt_level": 1},
    ),
    "bottom right, persistent": (
        PROBLEM.replace(seq_q=300, causal=True, alignment="bottom_right"),
        {"flat_steps": 1, "reload_q": True, "loop_split": True, "persistent": "snake", "block_order": "swizzled"},
    ),
    "value_dim": (
        PROBLEM.replace(head_dim=192, value_dim=128, causal=True),
        {
            "tile_n": 32,
            "column_parts": 2,
            "store_late": True,
            "peel_first": False,
            "q_in_registers": True,
            "persistent": "strided",
        },
    ),
    "two parts": (PROBLEM.replace(head_dim=96), {"column_parts": 2, "flat_steps": 2, "persistent": "strided"}),
    "packed": (DECODE, {"tile_m": 16, "pack_gqa": True, "kv_direction": "wide_sawtooth", "latency_k": 2}),
    "split": (DECODE, {"kv_splits": 64}),
    "packed and split": (
        DECODE,
        {"tile_m": 16, "tile_n": 32, "pack_gqa": True, "kv_splits": 8, "column_parts": 2, "loop_split": True},
    ),
    "packed sevens": (
        DECODE.replace(heads=14),
        {"tile_m": 16, "tile_n": 32, "pack_gqa": True, "num_ctas": 2, "num_worker_warps": 8},
    ),
    "packed sevens, split": (DECODE.replace(heads=14), {"tile_m": 16, "tile_n": 32, "pack_gqa": True, "kv_splits": 32}),
    "split, combined later": (
        DECODE.replace(heads=14),
        {"tile_m": 16, "pack_gqa": True, "kv_splits": 16, "kv_combine": "launch", "column_parts": 2, "pdl": 2},
    ),
    "split, combined in order": (
        DECODE.replace(heads=14),
        {"tile_m": 16, "pack_gqa": True, "kv_splits": 2, "kv_combine": "in_order"},
    ),
    "wide": (PROBLEM.replace(seq_k=1 << 20, seq_q=1 << 20, batch=64), {}),
    "wide, lse": (
        PROBLEM.replace(seq_k=1 << 20, seq_q=1 << 20, batch=64, lse=True),
        {"block_order": "swizzled", "lazy_rescale": True, "kv_subtiles": 2},
    ),
}


SQUARE, CACHE = PROBLEM.replace(causal=True), DECODE.replace(lse=False)
POOL = CACHE.replace(seq_q=1, seq_k=1 << 20, batch=64, lengths=True, page=16)
ASKED = {
    "window": (
        SQUARE.replace(window=128, window_right=64),
        {"kv_direction": "sawtooth", "tma_store": False, "block_order": "heads_fastest"},
    ),
    "window, in three loops": (
        SQUARE.replace(window=128, dtype="bfloat16", sinks=True),
        {"loop_split": True, "tile_m": 32, "latency_k": 1, "latency_v": 1},
    ),
    "softcap": (
        SQUARE.replace(softcap=True, head_dim=128),
        {
            "kv_direction": "backward",
            "loop_split": True,
            "block_order": "reversed",
            "occupancy": 2,
            "accum_mode": "fp16",
        },
    ),
    "window, flat": (
        SQUARE.replace(window=256, softcap=True),
        {"flat_steps": 1, "q_ahead": True, "persistent": "snake", "loop_split": True},
    ),
    "lengths": (PROBLEM.replace(lengths=True), {"persistent": "strided", "latency_v": 4}),
    "starts": (
        SQUARE.replace(starts=True),
        {"tile_n": 32, "store_late": True, "loop_split": True, "persistent": "snake"},
    ),
    "all": (
        SQUARE.replace(window=256, softcap=True, sinks=True, starts=True, lengths=True, lse=True),
        {"loop_split": True, "num_worker_warps": 8},
    ),
    "decoding in a window": (
        CACHE.replace(seq_q=1, window=512, sinks=True, lengths=True),
        {"tile_m": 16, "pack_gqa": True, "kv_splits": 4, "tma_loads": False, "occupancy": 3},
    ),
    "decoding over pages of 16": (
        CACHE.replace(seq_q=1, lengths=True, page=16),
        {"pack_gqa": True, "kv_splits": 2, "kv_combine": "launch", "pdl": 1},
    ),
    "a chunk over pages of 16, one by one": (
        CACHE.replace(seq_q=512, lengths=True, page=16),
        {"loop_split": True, "page_lookup": "scalar"},
    ),
    "a pool of more than 2**31 elements, by gather": (POOL, {}),
    "a pool of more than 2**31 elements, one by one": (POOL, {"tile_n": 32, "page_lookup": "scalar"}),
    "pages that no power of two divides": (
        CACHE.replace(seq_k=4224, lengths=True, page=48),
        {"tile_n": 32, "unroll": 2},
    ),
}
"""Optional features of attention that some models use."""


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "sm_100", "sm_120", "sm_121"])
def test_other_problems_build(arch: str) -> None:
    """Each for sm_90, and some for each other arch."""
    others = ("sm_80", "sm_100", "sm_120")
    cases = [*ELSEWHERE.items(), *ASKED.items()] if arch == "sm_90" else [*ASKED.items()][::4]
    if arch in others:
        cases = [*ELSEWHERE.items()][others.index(arch) :: 2 * len(others)]
    distinct(dict(in_turn(cases)), arch)


@pytest.mark.compiler
@pytest.mark.slow
def test_the_space_knows_what_the_compiler_refuses_of_pages() -> None:
    """TMA loads of several pages in a kernel that counts."""
    problem, space = CACHE.replace(seq_q=2, lengths=True, page=16), space_for("sm_90", Attention)
    schedule = space.default(problem).replace(tile_m=16, tile_n=32, pack_gqa=True, kv_splits=64, occupancy=1)
    assert "several pages" in " ".join(space.violations(schedule, problem))
    assert not space.violations(schedule.replace(tma_loads=False), problem)
    assert built(schedule, problem, "sm_90").failure is not None, "the compiler takes it now: the constraint may go"


@pytest.mark.compiler
def test_sixteen_worker_warps_reach_a_compiler_that_takes_them(monkeypatch, tmp_path) -> None:
    """Four of them load; the compiler of 13.4 would build another program than was asked for, so there it is a failure."""
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path))  # nothing is there
    schedule = space_for("sm_90", Attention).default(PROBLEM).replace(tile_m=256, num_worker_warps=16)
    monkeypatch.setattr(_ir2bytecode, "_resolve_num_worker_warps", _ir2bytecode._resolve_num_worker_warps)
    pass_on_worker_warps.cache_clear()  # as in a process that has built nothing
    (step,) = steps(Attention, PROBLEM, schedule, arch_spec("sm_90"))
    (served,) = make_kernel(Attention, schedule, PROBLEM, load_settings(), arch_spec("sm_90"))
    asked = signature(Attention, PROBLEM, schedule, step)
    if release(installed_toolchain().tileiras) >= (13, 5):
        launched = served._compile(asked, default_tile_context, (9, 0))[0]
        assert read_artifact(launched, "sm_90").facts.threads == 32 * (16 + 4)
    made = built(schedule, PROBLEM, "sm_90")
    if release(installed_toolchain().tileiras) >= (13, 5):
        assert made.artifact is not None
        assert made.artifact.facts.threads == 32 * (16 + 4)
    else:
        assert made.failure is not None
        assert "requires tileiras 13.5" in made.failure.message


@pytest.mark.parametrize("knobs", [{}, {"persistent": "strided"}, {"loop_split": True, "block_order": "reversed"}])
def test_what_a_problem_does_without_is_not_in_its_code(knobs: dict) -> None:
    """Constants for other problems leave no trace: two plain problems share their code whatever those are."""
    plain = PROBLEM.replace(causal=True)
    schedule = space_for("sm_90", Attention).default(plain).replace(**knobs)
    other = plain.replace(seq_q=2048, batch=3)
    assert class_of(plain, schedule) == class_of(other, schedule)
    without = Schedule({name: value for name, value in schedule.items() if name not in NEW_KNOBS})
    assert Attention.constants(plain, without) == Attention.constants(plain, schedule)
    assert signature_of(without, plain) == signature_of(schedule, plain)
    assert not {*NEW_KNOBS} & {*HINT_KNOBS}  # of the schedule, a compile takes nothing else


@pytest.mark.compiler
@pytest.mark.slow
def test_split_keys_whose_tiles_share_a_place_are_refused() -> None:
    """Compilers up to 13.4 load a tile over one that is still read; without TMA loads, or keys in one share, they do not."""
    problem = DECODE.replace(head_dim=128, causal=False, alignment="top_left")
    crowded = space_for("sm_90", Attention).default(problem).replace(tile_m=16, tile_n=128, occupancy=2, kv_splits=8)
    for knobs, right in (({}, False), ({"tma_loads": False}, True), ({"kv_splits": 1}, True), ({"occupancy": 1}, True)):
        found = built(crowded.replace(**knobs), problem, "sm_90")
        assert (found.artifact is not None) == right, (knobs, found.failure)
        if not right:
            assert found.failure.kind is FailureKind.COMPILE_ERROR
            assert "overwrites them while they are read" in found.failure.message


@pytest.mark.slow
@pytest.mark.compiler
def test_shares_are_ordered_by_the_counter() -> None:
    """Stores of the shares come before an atomic that releases and acquires on the device; nothing bypasses it by TMA."""
    schedule = space_for("sm_90", Attention).default(DECODE).replace(tile_m=16, pack_gqa=True, kv_splits=4)
    text = export(schedule, DECODE, "sm_90")
    assert text.count(b"atom.global.acq_rel.add.u32") == 1
    before, after = text.split(b"atom.global.acq_rel.add.u32")
    assert b"st.global" in before
    assert b"cp.async.bulk.tensor.2d.global.shared" not in before
    assert b"ld.global" in after


def test_every_knob_value_and_combination_is_in_a_program_built_for_hopper() -> None:
    """Few programs take several values each; `distinct` and `test_every_structure_builds` compile them."""
    space = space_for("sm_90", Attention)
    schedules = [small_tiles(*each, "sm_90") for each in (*ELSEWHERE.values(), *ASKED.values())]
    schedules += [small_tiles(SQUARE, each, "sm_90") for each in structures("sm_90")]
    taken = {item for schedule in schedules for item in schedule.items()}
    assert [
        (name, choice) for name, knob in space.knobs.items() for choice in knob.choices if (name, choice) not in taken
    ] == []
    assert [
        each for each in STRUCTURE if not any(each.items() <= dict(schedule).items() for schedule in schedules)
    ] == []


@pytest.mark.compiler
@pytest.mark.parametrize("arch", [pytest.param("sm_90", marks=pytest.mark.slow), "sm_121"])
def test_what_a_launch_infers_of_axes_does_not_change_the_code(arch: str) -> None:
    """A launch assumes multiples of 16 of whichever axes are; artifacts are built with no such assumption."""
    schedule = space_for(arch, Attention).default(PROBLEM).replace(persistent="strided")
    plain = read_artifact(export(schedule, PROBLEM, arch), arch).fingerprint
    axes = {"sm_90": (16, 1, 16), "sm_121": (1, 16, 1)}[arch]
    assert read_artifact(export(schedule, PROBLEM, arch, axes=axes), arch).fingerprint == plain


def test_only_the_shares_of_split_keys_lie_at_constant_places() -> None:
    """They are loaded sixteen bytes at a time for it. Of their maxima the compiler would load four at the address of one."""
    schedule = space_for("sm_90", Attention).default(DECODE).replace(kv_splits=16, tile_m=16, tma_loads=False)
    asked, step = signature_of(schedule, DECODE)
    named = {argument.name: each for argument, each in zip(step.arguments, asked.parameters, strict=True)}
    slots, rows, columns = Attention.array_spec("Partial", DECODE, schedule).shape
    assert slots > 1
    assert tuple(named["Partial"].stride_constant) == (rows * columns, columns, 1)
    assert tuple(named["State"].stride_constant) == (None, None, 1)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("knobs", "asked"),
    [
        ({}, {"window": 700, "sinks": True, "starts": True, "lengths": True}),
        ({"kv_splits": 16, "tile_m": 16, "tma_loads": False}, {}),
    ],
    ids=["features", "split keys"],
)
@pytest.mark.slow
def test_a_launch_runs_what_was_built(knobs: dict, asked: dict, monkeypatch, tmp_path) -> None:
    """It could assume more: that the strides of the arrays of split keys are multiples of 16 bytes. The code would be wrong."""
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path))  # nothing is there
    problem = DECODE.replace(**asked)
    schedule = space_for("sm_90", Attention).default(problem).replace(**knobs)
    asked_for, step = signature_of(schedule, problem)
    inferred = [
        dataclasses.replace(
            each,
            shape_divisible_by=[1 if size is not None else 16 for size in each.shape_constant],
            stride_divisible_by=[1 if stride is not None else 16 for stride in each.stride_constant],
        )
        if isinstance(each, ArrayConstraint)
        else each
        for each in asked_for.parameters
    ]
    for place, each in enumerate(asked_for.parameters[:4]):
        inferred[place] = dataclasses.replace(inferred[place], stride_divisible_by=each.stride_divisible_by)
    launch = KernelSignature(inferred, asked_for.calling_convention, asked_for.symbol)
    assert launch != asked_for
    assert assumed(Attention, launch, step) == asked_for
    (served,) = make_kernel(Attention, schedule, problem, load_settings(), arch_spec("sm_90"))
    launched = served._compile(launch, default_tile_context, (9, 0))[0]
    assert read_artifact(launched, "sm_90").fingerprint == artifact(schedule, problem).fingerprint


@pytest.mark.compiler
def test_the_kernels_name_is_not_part_of_the_fingerprint() -> None:
    schedule = space_for("sm_90", Attention).default(PROBLEM)
    names = ("attention", "another_name_altogether")
    found = {read_artifact(export(schedule, PROBLEM, "sm_90", name=name), "sm_90").fingerprint for name in names}
    assert len(found) == 1


@pytest.mark.compiler
def test_the_kernels_that_misbehave_build() -> None:
    """Only a GPU test launches them, so that nothing else would notice."""
    for function in (bad_kernels.stray, bad_kernels.slow):
        assert bad_kernels.build(function, PROBLEM, "sm_90").facts.code_bytes > 0


@pytest.mark.compiler
def test_one_artifact_serves_every_sequence_length_of_its_class() -> None:
    schedule = space_for("sm_90", Attention).default(PROBLEM)
    long = Attention.standard(seq_len=8192, head_dim=64, batch=3, heads=5)
    assert class_of(PROBLEM, schedule) == class_of(long, schedule)
    ragged = PROBLEM.replace(seq_k=1000)
    assert Attention.constants(PROBLEM, schedule) != Attention.constants(ragged, schedule)
    assert class_of(PROBLEM, schedule) != class_of(ragged, schedule)
    assert class_of(PROBLEM, schedule) != class_of(PROBLEM.replace(head_dim=80), schedule)


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_90", "sm_121"])
def test_stripping_keeps_the_program_and_drops_the_text(arch: str) -> None:
    raw = export(space_for(arch, Attention).default(PROBLEM), PROBLEM, arch)
    stripped = read_artifact(raw, arch)
    again = read_artifact(stripped.cubin, arch)
    assert (again.fingerprint, again.facts) == (stripped.fingerprint, stripped.facts)
    assert len(stripped.cubin) < len(raw) / 2
    assert strip_debug(stripped.cubin) == stripped.cubin
    for cubin in (raw, stripped.cubin):
        assert is_whole(cubin)
        assert not any(is_whole(cubin[:length]) for length in (0, 10, 64, 2000, len(cubin) // 2, len(cubin) - 400))
    assert b".reqntid" in raw
    assert b".reqntid" not in stripped.cubin


@pytest.mark.compiler
@pytest.mark.slow
def test_hints_reach_the_compiler_by_target() -> None:
    """One kernel object carries every arch's hints, and each arch builds with its own."""
    schedules = {arch: space_for(arch, Attention).default(PROBLEM) for arch in ("sm_90", "sm_121")}
    schedules["sm_90"] = schedules["sm_90"].replace(num_worker_warps=8)
    (kernel,) = tile_kernels(Attention, schedules, PROBLEM, arch_spec("sm_90"))
    for arch, schedule in schedules.items():
        output = io.BytesIO()
        export_kernel(kernel, [signature_of(schedule, PROBLEM, arch)[0]], output, gpu_code=arch, output_format="cubin")
        assert read_artifact(output.getvalue(), arch).fingerprint == artifact(schedule, PROBLEM, arch).fingerprint
    assert artifact(schedules["sm_90"], PROBLEM).facts.threads > 256


def test_what_is_not_a_cubin_is_refused() -> None:
    with pytest.raises(CompilerError, match="not a cubin"):
        read_artifact(b"hello", "sm_90")
    with pytest.raises(CompilerError, match="expected one kernel"):
        read_artifact(Path(os.path.realpath("/proc/self/exe")).read_bytes(), "sm_90")


def test_a_toolchain_is_of_one_release_and_new_enough_for_the_arch(monkeypatch) -> None:
    found = installed_toolchain()
    assert found.id == Toolchain(**dataclasses.asdict(found)).id
    check_arch(found, "sm_90")
    old = dataclasses.replace(found, tileiras="13.2.78")
    check_arch(old, "sm_121")
    with pytest.raises(CompilerError, match=r"too old for sm_90, which needs 13\.4"):
        check_arch(old, "sm_90")
    monkeypatch.setattr(toolchain_module, "tool_version", lambda path: "13.2.1" if path.name == "ptxas" else "13.4.92")
    with pytest.raises(CompilerError, match=r"different releases.*install one release"):
        toolchain_module._installed_toolchain.__wrapped__("")
