"""Attention with functions of its author's own, to the tuner: named by its place, served by plain attention's winners until then."""

from __future__ import annotations

import re
from dataclasses import replace

import cuda.tile as ct
import pytest
from fake_builds import FakeBuilds
from served_entries import SPACE, SUMMARY, entry
from store_samples import RIVALS

from tiledsched import array, flex_attention
from tiledsched.checking.accuracy import Accuracy
from tiledsched.core import registry
from tiledsched.core.config import Settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import DeclarationError
from tiledsched.core.problem import Problem, rate_text
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.serve.entries import load_table, table_of
from tiledsched.serve.transfer import lent
from tiledsched.store.db import TuningDB
from tiledsched.tuning.resources import Tools

MODS = """
import cuda.tile as ct
import numpy
import tiledsched as ts
from tiledsched import flex_attention


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def alibi(score, b, h, q_idx, kv_idx, slopes):
    return score + ct.gather(slopes, h) * (kv_idx - q_idx)


def make():
    inside = flex_attention(mask_mod=causal)


my_causal = flex_attention(mask_mod=causal)
my_alibi = flex_attention(score_mod=alibi, arrays={"slopes": ts.array("heads", dtype="float32")})
"""
SIZES = {"seq_q": 2048, "seq_k": 2048, "head_dim": 128, "batch": 4, "heads": 16, "kv_heads": 16}
P = "-p S=128,D=64,B=1,H=2"


def seen(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def biased(score, b, h, q_idx, kv_idx):
    return score + kv_idx


def together(b, h, q_idx, kv_idx, ids):
    return ct.gather(ids, (b, q_idx)) == ct.gather(ids, (b, kv_idx))


def beginning(b, h, q_idx, kv_idx, lengths_of):
    return kv_idx < ct.gather(lengths_of, b)


LISTED, SCORED = flex_attention(mask_mod=seen), flex_attention(score_mod=biased)
READING = flex_attention(mask_mod=together, arrays={"ids": array("batch seq_k", dtype="int32")})
PREFIX = flex_attention(mask_mod=beginning, arrays={"lengths_of": array("batch", dtype="int32")})


@pytest.fixture
def here(home, monkeypatch):
    """A folder with `mymods.py`, where commands run, 80 columns wide."""
    (home / "mymods.py").write_text(MODS)
    monkeypatch.chdir(home)
    monkeypatch.setenv("COLUMNS", "80")
    return home


def tune(cli, words: str) -> str:
    """What a tune with made-up machine code prints."""
    tools = Tools(pool=lambda jobs: FakeBuilds(), artifacts=lambda folder: FakeBuilds(), devices=list)
    return cli(f"tune {words} {P} --arch sm_121 --trials 2", tools=tools).out


# Its name and place


def test_a_variant_is_tuned_shown_and_explained_by_its_place(here, cli) -> None:
    out = tune(cli, "mymods.py:my_causal")
    assert "TFLOP/s of all pairs" in out
    assert "tiledsched explain mymods.py:my_causal --arch sm_121" in out
    name = registry.load_kernel("mymods.py:my_causal").name
    shown = cli("show mymods.py:my_causal").out
    assert shown.startswith(f"tuned schedules of {name} (mymods.py:my_causal)\nsm_121 B=1 H=2 S=128 D=64 float16: not")
    why = cli(f"explain mymods.py:my_causal {P} --arch sm_121").out
    assert "modelled: nothing was measured; the entry for this problem is the model's choice" in why
    assert f"run: tiledsched tune mymods.py:my_causal {P[:5]}" in why
    assert f"nothing of {registry.title_of(registry.load_kernel('mymods.py:my_alibi'))} is tuned" in (
        cli("show mymods.py:my_alibi").err
    )
    assert max(map(len, (out.split("\nNext:")[0] + shown).splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.compiler
def test_from_an_empty_home_a_variant_is_compiled_and_tuned_in_other_processes(here, python) -> None:
    program = "import sys; from tiledsched.cli import main; sys.exit(main())"
    words = f"tune mymods.py:my_alibi {P} --arch sm_121 --trials 1 --jobs 1".split()
    said = " ".join(python(program, *words, HOME=str(here)).out.split())
    assert re.search(r"[12] compiled now, 0 failed", said)


def test_an_edited_function_is_another_kernel_and_what_is_kept_of_the_former_is_told(here, cli) -> None:
    tune(cli, "mymods.py:my_causal")
    (here / "edited.py").write_text(MODS.replace("q_idx >= kv_idx", "q_idx > kv_idx"))
    before, after = (registry.load_kernel(f"{file}.py:my_causal").name for file in ("mymods", "edited"))
    kept = f"kept, but not served: 1 entry of {before}, whose code is another"
    assert kept in cli("show edited.py:my_causal").err
    assert kept not in cli("show mymods.py:my_causal").err
    assert "versions" not in cli("db check").out
    tune(cli, "edited.py:my_causal")
    lines = " ".join(cli("db check").out.split())
    assert "flex_causal has 2 versions: " in lines
    assert all(f"{name} (1 entry)" in lines for name in (before, after))
    assert sorted(cli("db check --json").json["versions"]["flex_causal"]) == sorted([before, after])


def test_entries_of_a_variant_travel_and_those_of_an_unknown_one_run_nothing(here, cli) -> None:
    tune(cli, "mymods.py:my_causal")
    assert cli("db export mymods.py:my_causal -o table.json").out == "1 entry written to table.json\n"
    assert "entries: 1 added" in cli("db import table.json --db other.db").out
    gone = Problem("flex_gone_0123abcd", {"seq_q": 64})
    with TuningDB.open(here / "other.db") as db:
        assert db.put_entry(entry(FULL, "modelled").replace(problem=gone, kernel=gone.kernel, arch="sm_121"))
    name = registry.load_kernel("mymods.py:my_causal").name
    shown = cli("show --db other.db --arch sm_121").out
    assert f"tuned schedules of {name} (mymods.py:my_causal)" in shown
    assert "tuned schedules of flex_gone_0123abcd\nsm_121 seq_q=64: not measured" in shown
    assert "no damage found" in cli("db check --db other.db").out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "mymods.py:alibi",
            "my_attention = tiledsched.flex_attention(score_mod=alibi), and name mymods.py:my_attention",
        ),
        ("mymods.py:causal", "my_attention = tiledsched.flex_attention(mask_mod=causal)"),
        ("mymods.py:my_alib", "declares no kernel 'my_alib'; it declares no class (did you mean 'my_alibi'?)"),
        ("mymods.py", "name its kernel, too: mymods.py:my_causal or mymods.py:my_alibi"),
        ("mymods.py:inside", "(a function sets that name: set it outside of functions); it declares my_causal"),
        ("flex_alibi_01234567", "name the file or module that declares it"),
    ],
)
def test_slips_on_the_command_line_say_what_was_meant(here, cli, word, said) -> None:
    assert said in cli(f"explain {word} {P}", code=2).err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mine = flex_attention(mask_mod=lambda b, h, q, k: q >= k)", "a function with a name in a file"),
        ("import functools\nmine = flex_attention(mask_mod=functools.partial(causal, b=1))", "cannot be compiled"),
        (
            "W = numpy.arange(3)\ndef f(b, h, q, k): return q < W[0]\nmine = flex_attention(mask_mod=f)",
            "pass an array in",
        ),
        (
            "import other\ndef f(b, h, q, k): return other.g(q)\nmine = flex_attention(mask_mod=f)",
            "from other import NAME",
        ),
        (
            "def f(b, h): return b\nmine = flex_attention(mask_mod=f)",
            "mask_mod must take (b, h, q_idx, kv_idx), and f does not",
        ),
        (
            'mine = flex_attention(score_mod=alibi, arrays={"slopes": ts.array("head", dtype="float32")})',
            "arrays: slopes: 'head' is no size",
        ),
    ],
)
def test_slips_in_a_declaration_are_told_with_their_line(here, cli, line, said) -> None:
    (here / "other.py").write_text("def g(q): return q")
    (here / "wrong.py").write_text(MODS + line)
    told = cli(f"explain wrong.py:mine {P}", code=2).err
    assert said in told
    assert told.endswith(f"(wrong.py, line {(MODS + line).count(chr(10)) + 1})\n")


def test_a_variant_without_a_name_in_a_module_is_refused_until_it_has_one() -> None:
    kernel = flex_attention(mask_mod=[seen][0], score_mod=biased)
    with pytest.raises(DeclarationError, match=r"has no name in a module; write my_attention = "):
        kernel.locator()
    assert registry.command_word(kernel) == kernel.name
    globals()["BOTH"] = kernel
    assert registry.command_word(kernel).endswith("test_flex_tuner.py:BOTH")


# What serves it until it is tuned

LARGE = [Attention.problem(**SIZES, causal=causal) for causal in (False, True)]
FULL, CAUSAL = LARGE
WINNERS = [SPACE.default(p).replace(tile_m=128, tile_n=64, num_worker_warps=8, occupancy=2) for p in LARGE]
GATED = replace(
    SUMMARY, accuracy=Accuracy(max_abs_error=1e-3, worst_tile_error=1e-3, worst_tile=(0, 0, 0), repeatable=True)
)
LENT = [
    entry(p, schedule=schedule, rivals=RIVALS, measurement=GATED)
    for p, schedule in ((FULL, WINNERS[0]), (CAUSAL, WINNERS[1].replace(loop_split=True, block_order="reversed")))
]


def served(kernel, entries, problem=None):
    """What serves a problem of a kernel on an H200, where these entries are known."""
    table = table_of(entries, Settings(), kernel=kernel, compiler="13.4.92")
    return table.resolve(problem or kernel.problem(**SIZES), "sm_90", "NVIDIA H200")


@pytest.mark.parametrize(("kernel", "winner"), [(SCORED, LENT[0]), (LISTED, LENT[1])])
def test_until_it_is_tuned_plain_attentions_winner_serves_and_counts_as_transferred(kernel, winner) -> None:
    found = served(kernel, LENT)
    order = "swizzled" if kernel is LISTED else winner.schedule["block_order"]
    schedule = winner.schedule.replace(block_order=order)
    assert (found.provenance, found.schedule, found.is_own) == ("transferred", schedule, False)
    assert found.reason.startswith(f"from plain attention: the nearest problem is {winner.problem}, measured on NVIDIA")
    assert (found.rivals, found.gated, found.expected_loss) == ((), (), None)
    assert served(Attention, LENT, CAUSAL).provenance == "measured"  # which stays as it was


def test_a_variants_own_measurements_come_first_and_a_models_choice_for_it_does_not() -> None:
    other = SPACE.default(FULL).replace(tile_n=32)
    own = {
        provenance: entry(SCORED.problem(**SIZES), provenance, kernel=SCORED.name, schedule=other)
        for provenance in ("measured", "modelled")
    }
    assert served(SCORED, [*LENT, own["modelled"]]).schedule == WINNERS[0]
    assert served(SCORED, [own["modelled"]]).provenance == "modelled"
    exact = served(SCORED, [*LENT, own["measured"]])
    assert (exact.provenance, exact.schedule, exact.is_own) == ("measured", other, True)
    near = served(SCORED, [*LENT, own["measured"]], SCORED.problem(**SIZES | {"batch": 5}))
    assert (near.entry.kernel, near.schedule) == (SCORED.name, other)
    far = served(SCORED, [*LENT, own["measured"]], SCORED.problem(**SIZES | {"batch": 16}))
    assert far.entry.kernel == SCORED.name
    assert served(Attention, [own["measured"]], FULL).provenance == "default"  # nothing is lent back


def test_what_is_illegal_for_a_variant_is_not_served_but_the_nearest_legal_schedule_is() -> None:
    wide = LENT[1].schedule.replace(block_order="swizzled", tile_m=64, q_subtiles=2, unroll=2, peel_first=False)
    found = served(LISTED, [LENT[1].replace(schedule=wide)])
    assert not space_for("sm_90", LISTED).unworkable(found.schedule, LISTED.problem(**SIZES))
    assert {knob: found.schedule[knob] for knob in wide if found.schedule[knob] != wide[knob]} in (
        {"unroll": 1},
        {"unroll": 1, "peel_first": True},
    )


@pytest.mark.parametrize(("head_dim", "tile"), [(64, (128, 64, 8)), (128, (64, 128, 4))])
def test_on_hopper_a_winner_of_large_tiles_lends_its_other_knobs_only(head_dim, tile) -> None:
    p = Attention.problem(**SIZES | {"head_dim": head_dim})
    large = SPACE.default(p).replace(tile_m=128, tile_n=128, num_worker_warps=8, persistent="strided", latency_k=2)
    found = lent(entry(p, schedule=large, runner_up=large.replace(qk_ahead=True)), SCORED)
    m, n, warps = tile
    small = {"tile_m": m, "tile_n": n, "num_worker_warps": warps, "occupancy": 2}
    assert (found.schedule, found.runner_up) == (large.replace(**small), None)
    assert lent(entry(p, schedule=found.schedule), SCORED).schedule == found.schedule
    for kept in (entry(p, schedule=large, arch="sm_121"), entry(p.replace(head_dim=256), schedule=large)):
        assert lent(kept, SCORED).schedule == large


def window(b, h, q_idx, kv_idx, *arrays):
    return (kv_idx <= q_idx) & (q_idx - kv_idx < 512)


WINDOW = flex_attention(mask_mod=window)


@pytest.mark.parametrize(("head_dim", "keys", "keeps"), [(64, 8192, False), (128, 4096, False), (128, 8192, True)])
def test_on_hopper_a_mask_that_shows_many_keys_is_lent_large_tiles_for_wide_heads_and_many_keys(
    head_dim, keys, keeps
) -> None:
    p = Attention.problem(**SIZES | {"head_dim": head_dim, "seq_q": keys, "seq_k": keys, "causal": True})
    large = SPACE.default(p).replace(tile_m=128, tile_n=128, num_worker_warps=8, occupancy=1, loop_split=True)
    kept, of_window, of_prefix, reading, two = (
        lent(entry(p, schedule=each), kernel).schedule
        for kernel, each in (
            (LISTED, large),
            (WINDOW, large),
            (PREFIX, large),
            (READING, large),
            (LISTED, large.replace(q_subtiles=2)),
        )
    )
    assert (kept == large.replace(block_order="swizzled")) is keeps
    assert of_window["occupancy"] == (3 if head_dim == 64 else 2)
    assert (of_prefix["occupancy"], reading["occupancy"]) == (2, 2)  # arrays say what is hidden
    assert (two["occupancy"], two["q_subtiles"]) == (2, 1)


@pytest.mark.parametrize(("head_dim", "keys", "blocks"), [(64, 2048, 2), (64, 4096, 3), (128, 4096, 2)])
def test_on_hopper_a_mask_that_shows_few_keys_has_three_blocks_for_narrow_heads(head_dim, keys, blocks) -> None:
    p = Attention.problem(**SIZES | {"head_dim": head_dim, "seq_q": keys, "seq_k": keys})
    found = lent(entry(p, schedule=SPACE.default(p).replace(persistent="snake", latency_v=1)), WINDOW).schedule
    assert (found["occupancy"], found["persistent"] == "no") == (blocks, blocks == 3)
    assert not space_for("sm_90", WINDOW).unworkable(found, WINDOW.problem(**SIZES | {"seq_q": keys, "seq_k": keys}))


def test_a_problem_of_its_own_at_another_size_lends_before_plain_attention() -> None:
    """Tuned at 4096 keys, ALiBi's winner loses 1% at 1024 to 32768 keys; what plain attention lends there, 7% to 15%."""
    far = {"seq_q": 16384, "seq_k": 16384}
    own = entry(SCORED.problem(**SIZES), kernel=SCORED.name, schedule=LENT[0].schedule.replace(tile_m=64, latency_v=4))
    plain = entry(Attention.problem(**SIZES | far), schedule=LENT[0].schedule)
    wanted = SCORED.problem(**SIZES | far)
    found = served(SCORED, [plain, own], wanted)
    assert (found.entry.kernel, found.schedule["latency_v"]) == (SCORED.name, 4)
    assert served(SCORED, [plain], wanted).entry.kernel == Attention.name


def test_only_the_kernel_whose_space_it_has_lends_to_a_kernel() -> None:
    for name in registry.SHIPPED:
        assert registry.kernel_named(name).space == name.removesuffix("_epilogue")
    assert lent(LENT[0].replace(accum_mode="invariant"), SCORED) is None
    assert lent(entry(SCORED.problem(**SIZES), kernel=SCORED.name), LISTED) is None


@pytest.mark.parametrize(("arch", "head_dim", "heads"), [("sm_90", 128, 16), ("sm_121", 64, 8)])
def test_no_rival_serves_or_races_a_variant(arch, head_dim, heads) -> None:
    sizes = {"seq_q": 16384, "seq_k": 16384, "head_dim": head_dim, "heads": heads, "kv_heads": heads}
    for kernel in (LISTED, SCORED):
        p = kernel.problem(**sizes)
        table = load_table(Settings(db="/nonexistent/x.db"), kernel=kernel, archs={arch})
        found = table.resolve(p, arch)
        assert "from plain attention: the " in found.reason
        assert (found.rivals, dict(kernel.rivals(p))) == ((), {})
        assert kernel.rivals is not Attention.rivals
    plain = load_table(Settings(db="/nonexistent/x.db"), kernel=Attention, archs={arch})
    assert plain.resolve(Attention.problem(**sizes), arch).rivals


# Its problems and costs


def test_the_problems_of_a_variant_are_those_of_attention_without_masks() -> None:
    assert {str(p) for p in LISTED.default_problems()} == {str(p) for p in Attention.default_problems() if not p.causal}
    every = [p for name in LISTED.suites for p in LISTED.suite(name)]
    assert not any(p.causal or p.window or p.packed or p.page or p.sinks or p.lengths for p in every)
    assert {"serving", "masks"}.isdisjoint(LISTED.suites)
    assert set(LISTED.suites) < set(Attention.suites)


def test_the_model_charges_for_functions_and_for_masks_where_they_are_applied() -> None:
    spec, split = arch_spec("sm_90"), WINNERS[0].replace(loop_split=True)

    def us(kernel, schedule=WINNERS[0], **more):
        p = kernel.problem(**SIZES, **more)
        return kernel.cost.model(p, schedule, kernel.cost.expected(p, schedule, spec), spec)

    assert us(Attention) < us(SCORED)
    assert us(Attention, causal=True) < us(LISTED) < us(SCORED)
    assert us(LISTED, split) < us(LISTED)


def test_rates_say_that_a_mask_is_not_counted() -> None:
    p = {kernel: kernel.problem(**SIZES) for kernel in (Attention, LISTED, SCORED)}
    assert len({each.flops for each in p.values()}) == 1
    words = [rate_text(each, 1000.0).split(" ", 1)[1] for each in p.values()]
    assert words == ["TFLOP/s", "TFLOP/s of all pairs", "TFLOP/s"]


def test_one_order_for_every_batch_is_had_without_a_mask_and_else_refused(here, cli) -> None:
    assert SCORED.reduction_order(SCORED.problem(**SIZES), WINNERS[0]) is not None
    said = cli(f"tune mymods.py:my_causal {P} --numerics invariant --arch sm_121", code=2).err
    assert "takes the blocks that all their rows see last, so that no order of sums can serve every batch" in said


def test_a_variant_is_baked_as_a_module_and_not_as_a_patch(here, cli) -> None:
    name = registry.load_kernel("mymods.py:my_causal").name
    words = f"bake mymods.py:my_causal {P} --arch sm_121"
    assert f"def {name}_schedule(" in cli(words).out
    assert "write a module: -o FILE.py" in cli(f"{words} -o x.patch", code=2).err


def test_a_mask_that_fails_where_it_is_tried_is_served_as_one_of_which_nothing_is_known() -> None:
    def divides(b, h, q_idx, kv_idx, *arrays):
        return kv_idx % (2048 // (q_idx + 1)) <= q_idx

    failing = flex_attention(mask_mod=divides)
    p = Attention.problem(**SIZES | {"seq_q": 8192, "seq_k": 8192})
    assert lent(entry(p, schedule=SPACE.default(p)), failing).schedule["occupancy"] == 2
