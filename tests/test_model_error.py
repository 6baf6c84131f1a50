"""The model's error: the figures that ship against raw data, and where they hold."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from report_samples import plain, problem_of

from tiledsched.core import data_files
from tiledsched.core.device import ResourceFacts, arch_spec
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.report.effects import joined_effects, value_effects
from tiledsched.store.exchange import read_table
from tiledsched.store.model_error import ModelError, error_of, error_text

SHIPPED = data_files.tuning_db() / "model"
PUBLISHED = Path(__file__).parents[1] / "docs" / "results" / "blackwell"
ARCHS = {"GB10": "sm_121", "B300": "sm_103"}


def rows(kernel, source):
    found = json.loads((SHIPPED / kernel / "error.json").read_text())
    assert found["command"].startswith("python -m docs.studies.model_error")
    return [row for row in found["rows"] if source in row["source"]]


def published():
    """(arch, length, head dimension, tile, error) of every published figure that has a counterpart among our schedules."""
    programs = json.loads((PUBLISHED / "programs.json").read_text())["programs"]
    for row in csv.DictReader((PUBLISHED / "figures.csv").open(newline="")):
        size, sides = dict(re.findall(r"\b([BHSD])=(\d+)", row["problem"])), re.match(r"\d+x\d+", row["schedule"])
        if (
            row["device"] not in ARCHS
            or row["kernel"] not in ("attention", "tiledattention")
            or not sides
            or len(size) < 4
        ):
            continue
        arch, causal, tile = ARCHS[row["device"]], "causal" in row["problem"], sides[0]
        occupancy = int((re.search(r"occ=(\d)", row["schedule"]) or [0, 1])[1])
        accumulators = "fp16" if "acc=fp16" in row["schedule"] else "fp32"
        mask = "causal" if causal else "full"
        facts = programs.get(f"{arch} D={size['D']} {mask} {tile} occ={occupancy} {accumulators}")
        if facts is None or row["unit"] not in ("ms", "TFLOP/s"):
            continue
        problem = Attention.standard(
            seq_len=int(size["S"]), head_dim=int(size["D"]), causal=causal, batch=int(size["B"]), heads=int(size["H"])
        )
        m, n = map(int, tile.split("x"))
        schedule = Schedule(
            {name: knob.default for name, knob in space_for(arch, Attention).knobs.items()},
            tile_m=m,
            tile_n=n,
            occupancy=occupancy,
            accum_mode=accumulators,
            loop_split=causal,
            num_worker_warps=8 if m == 256 else 4,
        )
        value = float(row["value"])
        us = value * 1e3 if row["unit"] == "ms" else problem.flops / value / 1e6
        estimate = Attention.cost.model(problem, schedule, ResourceFacts(**facts), arch_spec(arch))
        yield arch, problem.seq_q, problem.head_dim, tile, estimate / us - 1


def test_the_errors_of_published_figures_are_those_of_the_raw_figures():
    found = list(published())
    assert len(found) == 106
    for row in rows("attention", "published"):
        (low, high), dims = row["where"]["seq_q"][0], row["where"]["head_dim"]
        errors = [
            error
            for arch, seq, dim, tile, error in found
            if arch == row["arch"] and low <= seq <= high and dim in dims and row["tile"] in ("", tile)
        ]
        assert (row["figures"], row["mean"]) == (len(errors), pytest.approx(np.abs(errors).mean(), abs=1e-4))
        assert row["worst"] == pytest.approx(max(errors, key=abs), abs=1e-4)


@pytest.mark.parametrize("kernel", ["attention", "matmul", "rms_norm"])
def test_the_errors_of_held_out_landscapes_are_those_of_their_measurements(kernel):
    declared, means = kernel_named(kernel), []
    for path in sorted((data_files.tuning_db() / "landscapes" / kernel / "held_out").glob("*_burst_*")):
        table = read_table(path)
        facts = {each.fingerprint: each.facts for each in table.artifacts}
        own, times = [stored.measurement for stored in table.measurements], {}
        complete = space_for("sm_90", declared).complete
        for one in own:  # a program that was timed twice counts once
            grids = declared.grids(one.problem, complete(one.schedule), arch_spec("sm_90"))
            times.setdefault((one.fingerprint, grids), []).append(one)
        medians = {key: float(np.median([one.median_us for one in same])) for key, same in times.items()}
        best = min(medians[key] for key, same in times.items() if any(one.accuracy is not None for one in same))
        errors = [
            declared.cost.model(same[0].problem, complete(same[0].schedule), facts[key[0]], arch_spec("sm_90"))
            / medians[key]
            - 1
            for key, same in times.items()
            if medians[key] <= 1.3 * best
        ]
        means.append((len(errors), pytest.approx(np.abs(errors).mean(), abs=1e-4)))
    assert [(row["figures"], row["mean"]) for row in rows(kernel, "programs of one problem")] == means


def attention(seq, dim, **more):
    return Attention.standard(**{"seq_len": seq, "head_dim": dim, "causal": False, "batch": 1, "heads": 8, **more})


@pytest.mark.parametrize(
    ("arch", "problem", "tile", "figures"),
    [
        ("sm_121", attention(4096, 128), (64, 64), 44),
        ("sm_121", attention(4096, 128), (128, 128), 54),  # no figures of that tile: those of all
        ("sm_121", attention(1024, 64), (64, 64), 22),
        ("sm_121", attention(4096, 96), (64, 64), 12),
        ("sm_121", attention(4096, 256), (64, 64), None),
        ("sm_121", attention(400, 64), (64, 64), None),
        ("sm_121", attention(32768, 64), (64, 64), None),
        ("sm_121", attention(4096, 128, causal=True).replace(window=128), (64, 64), None),
        ("sm_120", attention(4096, 128), (64, 64), None),
        ("sm_103", attention(4096, 128), (64, 64), None),  # those of B300 are causal
        ("sm_103", attention(4096, 128, causal=True), (256, 128), 5),
    ],
)
def test_an_error_holds_for_what_was_compared_alone(arch, problem, tile, figures):
    error = error_of(arch, problem, plain(*tile))
    assert (error and error.figures) == figures
    assert ("off on average" in error_text(error)) == (figures is not None)


def test_kernels_that_were_never_compared_have_no_error():
    for name in ("softmax", "matmul", "layer_norm"):
        assert error_of("sm_121", kernel_named(name).small()[0], Schedule(TILE_M=64)) is None


ERROR = ModelError(mean=0.05, worst=0.1, figures=9, source="figures")


@pytest.mark.parametrize(
    ("slower", "error", "advice", "preferred"),
    [
        (1.2, ERROR, "leave", ((0, 1),)),
        (1.04, ERROR, "unclear", ()),  # within the error
        (1.2, None, "unclear", ()),  # of which nobody knows how far off it is
    ],
)
def test_estimates_advise_only_beyond_the_error_and_have_a_range(slower, error, advice, preferred):
    times = {Schedule(n=n, k=k): (100 + n) * (slower + n / 100 if k else 1) for n in range(6) for k in (0, 1)}
    one = problem_of(times, provenance="modelled", error=error)
    (verdict,) = (each for each in joined_effects([one]) if each.knob == "k")
    assert (verdict.advice, verdict.preferred) == (advice, preferred)
    (effect,) = (each for each in value_effects(one) if each.knob == "k")
    ratios = [slower + n / 100 for n in range(6)]
    assert (effect.ci_low, effect.ci_high, effect.estimated) == (
        pytest.approx(ratios[0]),
        pytest.approx(ratios[-1]),
        True,
    )
