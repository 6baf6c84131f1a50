"""What every kernel that ships must do, found by its folder: right on its small problems and on sizes that nobody tuned, gradients
of its reference, a declaration that would be accepted from a stranger, a space that can be searched, and code that compiles.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from tile_checks import sample, searched

import tiledsched as ts
from tiledsched.build.compiler import compile_schedule
from tiledsched.checking.interpreted import check_schedule
from tiledsched.checking.sizes import neighbours
from tiledsched.core.cases import call_reference, expected_outputs, own_inputs, random_inputs
from tiledsched.core.device import ARCHS, ResourceFacts
from tiledsched.core.launches import steps
from tiledsched.core.registry import SHIPPED, kernel_named, problem_from_json, shipped_functions
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.row_schedules import RowSimilarity

KERNELS = [kernel_named(name) for name in SHIPPED]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=SHIPPED)


def assert_right(p, s):
    """On random and on adversarial inputs, in every arithmetic and in several orders of blocks."""
    passed, _, message = check_schedule(p.declaration, p, s)
    assert passed, f"{message}: {p} with {dict(s)}"


def drawn(kernel):
    """Small problems, and for each a schedule or two that work, searched or not; and more until every value of each knob occurs."""
    few = 2 if len(kernel.small()) <= 10 else 1
    found = [(p, s) for p in kernel.small() for s in sample(kernel, p, few, seed=str(p))]
    for name, knob in space_for("sm_90", kernel).knobs.items():
        for value in set(knob.choices) - {s[name] for _, s in found}:
            others = ((p, s) for p in kernel.small() for s in sample(kernel, p, 40, seed=name))
            found.append(next((p, s) for p, s in others if s[name] == value))
    return found


@each_kernel
def test_schedules_are_right(kernel):
    """More schedules of attention are in `test_kernel_properties`."""
    default = space_for("sm_90", kernel).default
    attention = kernel.name == "attention"
    for p, s in [(p, default(p)) for p in kernel.small()] if attention else drawn(kernel):
        assert_right(p, s)


@each_kernel
def test_sizes_that_nobody_tuned(kernel):
    space = space_for("sm_90", kernel)
    for p in kernel.small()[:2]:
        s = space.default(p)
        found = neighbours(kernel, space, p, s)
        assert found
        for each in found:
            assert_right(each, s)


@pytest.mark.parametrize("name", [name for name in SHIPPED if f"{name}_backward" in SHIPPED])
def test_gradients_are_those_of_the_reference(name):
    """Along a random direction, the outputs of the reference change as the reference of the gradient says."""
    forward, backward = kernel_named(name), kernel_named(f"{name}_backward")
    rng = np.random.default_rng(0)
    for values in {"softmax": ({"rows": 3, "columns": 7},), "rms_norm": ({"rows": 3, "columns": 7},)}.get(
        name, ({"seq_q": 5, "seq_k": 6, "head_dim": 8, "causal": True}, {"seq_q": 3, "seq_k": 6, "head_dim": 8})
    ):
        p, q = forward.problem(**values), backward.problem(**values)
        inputs = {spec.name: rng.standard_normal(spec.shape) for spec in forward.arrays(p) if spec.role == "in"}
        outputs = dict(zip(("Out", "Lse"), call_reference(forward, np, p, inputs), strict=False))
        gradient, step = rng.standard_normal(outputs["Out"].shape), 1e-6
        given = inputs | outputs | {"dOut": gradient}
        if "Lse" in outputs:
            given["Lse"] = outputs["Lse"][..., 0]
        wanted = [spec.name for spec in backward.arrays(q) if spec.role == "in"]
        found = call_reference(backward, np, q, {each: given[each] for each in wanted})
        names = [spec.name.removeprefix("d") for spec in backward.arrays(q) if spec.role == "out"]
        for of, each in zip(names, found, strict=True):
            way = rng.standard_normal(inputs[of].shape)
            up, down = (
                call_reference(forward, np, p, inputs | {of: inputs[of] + side * way})[0] for side in (step, -step)
            )
            np.testing.assert_allclose((each * way).sum(), ((up - down) * gradient).sum() / (2 * step), rtol=1e-5)


@each_kernel
def test_the_declaration_would_be_accepted_from_a_stranger(kernel):
    """Shipped declarations are not checked when they are imported: all that is asked of others is asked here."""
    values = {"name": f"a copy of {kernel.name}", "__module__": __name__}
    stranger = type(kernel.__name__, (kernel,), values)
    assert list(stranger.fields) == list(kernel.fields)
    assert kernel.__doc__


@each_kernel
def test_problems_are_told_apart_and_survive_a_journey(kernel):
    problems = [*kernel.small(), *kernel.default_problems()]
    assert len({p.id for p in problems}) == len(set(problems)) == len({str(p) for p in set(problems)})
    for p in problems:
        assert problem_from_json(p.to_json()) == pickle.loads(pickle.dumps(p)) == kernel.problem(**p.values) == p
        assert p.min_bytes > 0
        assert p.flops >= 0


@each_kernel
def test_a_launch_takes_every_array_and_the_reference_gives_every_output(kernel):
    p = kernel.small()[0]
    taken = {
        each.name
        for step in steps(kernel, p, space_for("sm_90", kernel).default(p), ARCHS["sm_90"])
        for each in step.arguments
    }
    assert {spec.name for spec in kernel.arrays(p)} <= taken
    rng = np.random.default_rng(0)
    inputs = random_inputs(kernel, np, rng, p, own_inputs(kernel, np, rng, p))
    shapes = [spec.shape for spec in kernel.arrays(p) if spec.role in ("out", "inout")]
    assert [np.shape(each) for each in expected_outputs(kernel, np, p, inputs)] == shapes


FEWEST = {
    "rms_norm": 20,
    "scaled_matmul": 16,
    "matmul": 80,
    "matmul_epilogue": 40,
    "grouped_matmul_epilogue": 20,
    "scaled_matmul_epilogue": 16,
    "grouped_matmul": 80,
}
"""Kernel -> the fewest schedules of its suites from which a tune can learn; 1 of others."""


@each_kernel
@pytest.mark.parametrize("arch", ["sm_90", "sm_121"])
def test_as_many_schedules_are_searched_as_a_tune_can_learn_from(kernel, arch):
    space = space_for(arch, kernel)
    for cases in kernel.suites.values():
        for p in {kernel.as_problem(cases[0]), kernel.as_problem(cases[-1])}:
            assert space.violations(space.default(p), p) == []
            if not kernel.name.startswith("attention"):
                assert (FEWEST.get(kernel.name, 1) if arch == "sm_90" else 1) <= len(searched(kernel, p, arch)) <= 400


@each_kernel
def test_what_nobody_measured_gets_what_works(kernel):
    """Of kernels over rows the default, or what the model finds much faster and what spills nothing."""
    spec, space = ARCHS["sm_121"], space_for("sm_121", kernel)
    for p in kernel.default_problems()[:8]:

        def estimate(s, p=p):
            return kernel.cost.model(p, s, kernel.cost.expected(p, s, spec), spec)

        default = space.default(p)
        found = kernel.similarity.cold_start(p, default, space, estimate) or default
        assert space.violations(found, p) == []
        if isinstance(kernel.similarity, RowSimilarity):
            assert found == default or estimate(found) < 0.85 * estimate(default)
            assert not kernel.cost.expected(p, found, spec).spill_bytes


def test_public_functions_are_those_of_the_folders():
    assert {"matmul", "swiglu", "geglu", "rope"} <= set(shipped_functions())
    for name, module in shipped_functions().items():
        assert getattr(ts, name).__module__ == module
        assert getattr(ts, name).__doc__
        assert name in ts.__all__
    with pytest.raises(AttributeError, match="no attribute 'layernorm'"):
        ts.layernorm  # noqa: B018


ROWS = {"TILE_ROWS": 1, "HOLD": True, "PERSISTENT": False, "loads": "plain", "occupancy": 0, "num_worker_warps": 4}
NORM = {"TILE_ROWS": 1, "HOLD": True, "AHEAD": False, "loads": "plain", "num_worker_warps": 4, "occupancy": 1}
LOGITS = {"TILE_ROWS": 1, "SPLITS": 1, "loads": "plain", "occupancy": 0, "TILE_COLUMNS": 1024, "num_worker_warps": 4}
WIDE, THIN = {"m": 4096, "n": 4096, "k": 4096}, {"m": 16, "n": 4096, "k": 4096}
MEASURED = [
    # kernel, sizes, then twice (knobs, registers, threads, shared memory, bytes spilled, blocks of a cluster), as compiled, of
    # which the first was faster on an H200
    (
        "cross_entropy",
        {"rows": 4096, "columns": 128256},
        (LOGITS | {"GROUP": 4}, 64, 128, 1040),
        (LOGITS | {"GROUP": 8}, 64, 128, 1040, 224),
    ),
    (
        "glu",
        {"rows": 4096, "columns": 14336},
        (ROWS | {"TILE_COLUMNS": 1024}, 28, 128, 0),
        (ROWS | {"TILE_COLUMNS": 4096, "PERSISTENT": True, "loads": "tma"}, 64, 128, 0, 48),
    ),
    (
        "layer_norm",
        {"rows": 8192, "columns": 5000},
        (ROWS | {"TILE_COLUMNS": 2048, "loads": "gather"}, 70, 128, 1040),
        (ROWS | {"TILE_COLUMNS": 2048}, 130, 128, 1040),
    ),
    (
        "rms_norm_backward",
        {"rows": 32768, "columns": 4096},
        (NORM | {"TILE_COLUMNS": 4096, "loads": "tma", "occupancy": 3, "BLOCKS": 396}, 92, 256, 29784),
        (NORM | {"TILE_COLUMNS": 4096, "num_worker_warps": 8, "occupancy": 2, "BLOCKS": 264}, 106, 256, 9216),
    ),
    (
        "softmax_backward",
        {"rows": 32768, "columns": 4096},
        (ROWS | {"TILE_COLUMNS": 4096}, 84, 128, 1040),
        (
            ROWS | {"TILE_COLUMNS": 4096, "TILE_ROWS": 2, "loads": "tma", "num_worker_warps": 8, "occupancy": 4},
            40,
            384,
            1040,
            160,
        ),
    ),
    ("rms_norm", {"rows": 32768, "columns": 4096}, ({}, 72, 128, 1040), ({}, 255, 128, 1040)),
    (
        "rms_norm",
        {"rows": 32768, "columns": 4096},
        ({}, 72, 128, 1040),
        ({"HOLD": False, "TILE_COLUMNS": 512}, 72, 128, 1040),
    ),
    ("matmul", WIDE, ({}, 168, 384, 214120), ({"TILE_N": 128}, 168, 384, 197768)),
    (
        "matmul",
        WIDE,
        ({"TILE_M": 256, "num_ctas": 2, "PERSISTENT": True}, 168, 384, 214240, 0, 2),
        ({}, 168, 384, 214120),
    ),
    ("matmul", WIDE, ({}, 168, 384, 214120), ({"TILE_N": 64, "TILE_M": 64, "num_worker_warps": 4}, 128, 256, 107648)),
    (
        "matmul",
        THIN,
        ({"TILE_M": 16, "TILE_N": 32, "TILE_K": 128, "num_worker_warps": 4}, 255, 256, 105680),
        ({}, 168, 384, 214120),
    ),
    ("scaled_matmul", WIDE | {"fast_accum": True}, ({"TILE_N": 256},), ({"TILE_N": 128},)),
    ("scaled_matmul", WIDE, ({"TILE_N": 128},), ({"TILE_N": 256},)),
    ("scaled_matmul", WIDE, ({"TILE_N": 128},), ({"TILE_N": 128, "num_worker_warps": 4},)),
    (
        "scaled_matmul",
        THIN | {"fast_accum": True},
        ({"TILE_M": 16, "TILE_N": 64, "SWAP": True, "num_worker_warps": 4},),
        ({"TILE_M": 16, "TILE_N": 64, "num_worker_warps": 4},),
    ),
]


@pytest.mark.parametrize(
    ("name", "sizes", "faster", "slower"), MEASURED, ids=lambda each: each if isinstance(each, str) else ""
)
def test_the_model_orders_programs_as_they_were_measured(name, sizes, faster, slower):
    kernel, spec = kernel_named(name), ARCHS["sm_90"]
    p, default = kernel.problem(**sizes), {name: each.default for name, each in kernel.knob_fields().items()}

    def us(knobs, registers=0, threads=0, shared=0, spilled=0, ctas=1):
        s = Schedule(default | knobs)
        facts = ResourceFacts(
            registers=registers,
            threads=threads,
            shared_bytes=shared,
            spill_bytes=spilled,
            num_ctas=ctas,
            code_bytes=0,
            ctas_per_sm=1,
        )
        return kernel.cost.model(p, s, facts if registers else kernel.cost.expected(p, s, spec), spec)

    assert p.min_bytes / 4.8e6 < us(*faster) < us(*slower)


COMPILED: dict[str, dict] = {
    "softmax": {"rows": 4096, "columns": 4096},
    "rms_norm": {"rows": 4096, "columns": 4096, "residual": True},
    "softmax_backward": {"rows": 32768, "columns": 4096},
    "rms_norm_backward": {"rows": 32768, "columns": 4096},
    "layer_norm": {"rows": 8192, "columns": 5000},
    "glu": {"rows": 4096, "columns": 14336, "activation": "gelu"},
    "rms_norm_quantized": {"rows": 4096, "columns": 4096, "residual": True},
    "glu_quantized": {"rows": 4096, "columns": 14336, "activation": "gelu"},
    "rope": {"batch": 1, "seq": 4096, "q_heads": 32, "k_heads": 8},
    "rope_in_place": {"batch": 1, "seq": 4096, "q_heads": 32, "k_heads": 8},
    "cross_entropy": {"rows": 4096, "columns": 128256, "smoothed": True},
    "matmul": WIDE | {"b_layout": "column"},
    "matmul_epilogue": WIDE | {"b_layout": "column", "gate": True, "activation": "silu", "residual": True},
    "scaled_matmul": {"m": 512, "n": 4096, "k": 4096, "scales": "tensor", "bias": True},
    "scaled_matmul_epilogue": {"m": 512, "n": 4096, "k": 4096, "gate": True, "activation": "silu", "bias": True},
    "grouped_matmul": {"tokens": 512, "experts": 128, "n": 1536, "k": 2048},
    "grouped_matmul_epilogue": {"tokens": 512, "experts": 128, "n": 768, "k": 2048, "gate": True, "activation": "silu"},
    "attention": {"seq_q": 4096, "seq_k": 4096, "head_dim": 64, "heads": 32, "kv_heads": 32},
    "attention_backward": {"seq_q": 4096, "seq_k": 4096, "head_dim": 64, "heads": 32, "kv_heads": 32},
}


OTHERS = {"attention": "sm_100 sm_121", "attention_backward": "sm_100", "matmul": "sm_100 sm_121"}
OTHERS |= dict.fromkeys(
    (
        *("matmul_epilogue", "grouped_matmul_epilogue", "scaled_matmul", "scaled_matmul_epilogue", "grouped_matmul"),
        *("rms_norm_quantized", "glu_quantized"),
    ),
    "sm_100 sm_121",
)
"""The archs beside sm_90 for which the default compiles with next to no spills, where it does not for all."""


@pytest.mark.compiler
@each_kernel
@pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_100", "sm_121"))]
)
def test_the_default_compiles_with_next_to_no_spills(kernel, arch):
    if arch != "sm_90" and arch not in OTHERS.get(kernel.name, arch):
        pytest.skip("the default of this arch spills")
    p = kernel.problem(**COMPILED[kernel.name]) if kernel.name in COMPILED else kernel.default_problems()[-1]
    assert compile_schedule(kernel, p, space_for(arch, kernel).default(p), arch).facts.spill_bytes <= 16
