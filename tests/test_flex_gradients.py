"""The gradients of an author's own attention: derivatives by rule, and the kernel that uses them."""

from __future__ import annotations

import dataclasses
import functools
import math

import cuda.tile as ct
import numpy as np
import pytest
from test_flex_reference import Module
from tile_checks import mutated

import tiledsched as ts
from tiledsched.build.compiler import compile_schedule, prepare_process
from tiledsched.checking.interpreted import check_schedule
from tiledsched.core.errors import DeclarationError
from tiledsched.core.space_files import space_for
from tiledsched.interpreter import evaluate, launches_on_cpu, run_schedule
from tiledsched.kernels.attention.derivatives import by_rule, derivative
from tiledsched.kernels.attention.similarity import FEW_ROWS
from tiledsched.kernels.attention.variants import flex_attention, list_blocks
from tiledsched.kernels.attention_backward.variants import gradient_of

CAP, SLOPE = 1.5, 0.25


# Functions of scores as authors write them, and the same in NumPy with the derivative written by hand.


def alibi(score, b, h, q_idx, kv_idx, slopes):
    return score + ct.gather(slopes, h) * (kv_idx - q_idx)


def softcap(score, b, h, q_idx, kv_idx, *arrays):
    return CAP * ct.tanh(score / CAP)


def by_key(score, b, h, q_idx, kv_idx, factors):
    return score * ct.gather(factors, kv_idx)


def causal_score(score, b, h, q_idx, kv_idx, *arrays):
    return ct.where(kv_idx <= q_idx, score, -math.inf)


def undefined_when_hidden(score, b, h, q_idx, kv_idx, *arrays):
    return score + ct.log(ct.sqrt(score * 0 + (q_idx - kv_idx + 1)))


def up_to(rows):
    def score_mod(score, b, h, q_idx, kv_idx, *arrays):
        return score * ct.rsqrt(rows - ct.astype(q_idx, ct.float32))

    return score_mod


def causal(b, h, q_idx, kv_idx, *arrays):
    return kv_idx <= q_idx


def strictly_before(b, h, q_idx, kv_idx, *arrays):
    return kv_idx < q_idx


def same_document(b, h, q_idx, kv_idx, ids):
    return ct.gather(ids, (b, q_idx)) == ct.gather(ids, (b, kv_idx))


def before_heads(b, h, q_idx, kv_idx, *arrays):
    return kv_idx <= q_idx + h


def near(b, h, q_idx, kv_idx, *arrays):
    return ct.abs(q_idx - kv_idx) < 20


def parts(b, h, q_idx, kv_idx, *arrays):
    """The first rows see one block in part and two in full, the next ones blocks with a gap between, and the last ones none."""
    later = (ct.abs(q_idx - kv_idx) < 20) | (kv_idx >= 400)
    return ct.where(q_idx < 128, (kv_idx >= 100) & (kv_idx < 384), later & (q_idx < 300))


def by_place(b, h, q_idx, kv_idx, *arrays):
    return (kv_idx >= 120 * (b + h)) & (kv_idx < 120 * (b + h) + 100)


def exact(inputs, scale, change=None, visible=True, dlse=0.0):
    """dQ, dK, dV, Out and Lse in float64. `change(s)` gives the changed scores and the derivative."""
    q, k, v, dout = (inputs[name].astype(np.float64) for name in ("Q", "K", "V", "dOut"))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = np.einsum("bhqd,bhkd->bhqk", q, k) * scale
    with np.errstate(all="ignore"):
        t, slope = change(s) if change else (s, np.ones_like(s))
    visible = np.broadcast_to(visible, s.shape)
    t, slope = np.where(visible, t, -np.inf), np.where(visible, slope, 0.0)
    most = np.maximum(t.max(-1, keepdims=True), -1e30)
    e = np.exp(t - most)
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total > 0, total, 1.0)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + most)[..., 0]
    out = p @ v
    ds = p * (dout @ v.swapaxes(2, 3) - (dout * out).sum(-1, keepdims=True) + np.asarray(dlse)[..., None]) * slope
    dq, dk, dv = scale * ds @ k, scale * ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout
    shape = (q.shape[0], -1, group, *dk.shape[2:])
    return dq, dk.reshape(shape).sum(2), dv.reshape(*shape[:-1], v.shape[3]).sum(2), out, lse


def case(name, b, h, rows, keys, rng):
    """(kernel, arrays, change in NumPy, mask in NumPy) of a kind of attention."""
    i, j = np.arange(rows)[:, None], np.arange(keys)[None]
    f32 = {"dtype": "float32"}
    if name == "alibi":
        slopes = (SLOPE / (1 + np.arange(h))).astype(np.float32)
        bias = slopes[:, None, None] * (j - i)
        return kernel(alibi, None, slopes=ts.array("heads", **f32)), [slopes], lambda s: (s + bias, s * 0 + 1), True
    if name == "softcap":
        capped = lambda s: (CAP * np.tanh(s / CAP), 1 - np.tanh(s / CAP) ** 2)  # noqa: E731
        return kernel(softcap, causal), [], capped, j <= i
    if name == "documents":
        ids = np.sort(rng.integers(0, 3 + 2 * np.arange(b)[:, None], (b, max(rows, keys))), 1).astype(np.int32)
        seen = ids[:, :rows, None] == ids[:, None, :keys]
        return kernel(None, same_document, ids=ts.array("batch seq_k", dtype="int32")), [ids], None, seen[:, None]
    if name == "near":
        return kernel(None, near), [], None, np.abs(i - j) < 20
    if name == "by_place":
        first = 120 * np.add.outer(np.arange(b), np.arange(h))[:, :, None, None]
        return kernel(None, by_place), [], None, (j >= first) & (j < first + 100)
    if name == "parts":
        later = ((np.abs(i - j) < 20) | (j >= 400)) & (i < 300)
        return kernel(None, parts), [], None, np.where(i < 128, (j >= 100) & (j < 384), later)
    if name == "by_key":
        factors = rng.standard_normal(keys).astype(np.float32)
        made = kernel(by_key, before_heads, factors=ts.array("seq_k", **f32))
        return made, [factors], lambda s: (s * factors, s * 0 + factors), j <= i + np.arange(h)[:, None, None]
    if name == "causal_score":
        return kernel(causal_score, None), [], lambda s: (np.where(j <= i, s, -np.inf), s * 0 + (j <= i)), True
    if name == "undefined":
        bias = 0.5 * np.log(np.maximum(i - j + 1.0, 1e-9))
        return kernel(undefined_when_hidden, causal), [], lambda s: (s + bias, s * 0 + 1), j <= i
    if name == "up_to":
        factor = (rows - i) ** -0.5
        return kernel(_up_to(rows), None), [], lambda s: (s * factor, s * 0 + factor), True
    return kernel(None, strictly_before), [], None, j < i


@functools.cache
def _kernel(score_mod, mask_mod, names):
    return gradient_of(flex_attention(score_mod=score_mod, mask_mod=mask_mod, arrays=dict(names)))


def kernel(score_mod, mask_mod, **arrays):
    return _kernel(score_mod, mask_mod, tuple(arrays.items()))


_up_to = functools.cache(up_to)
CHANGES = (
    {},
    {"structure": "two_pass", "tile_m": 32, "tile_n": 32, "tile_m_dq": 32, "tile_n_dq": 16, "loop_split": True},
    {"scores_transposed": False, "scores_ahead": True, "group_heads": "apart", "product_order": "dv_dk_dq"},
    {"product_order": "dq_late", "tile_m": 128, "tile_n": 64},
    {"structure": "two_pass", "tile_m_dq": 128, "tile_n_dq": 64, "persistent": True, "tile_n": 64},
)


def errors(*given, **options):
    """Relative error of dQ, dK and dV against float64, as if each had at least a hundredth of the size of dOut."""
    found, wanted, floor = computed(*given, **options)
    return [
        np.linalg.norm(each - one) / max(np.linalg.norm(one), floor) for each, one in zip(found, wanted, strict=True)
    ]


def computed(name, rows, keys, change=0, b=1, h=2, kv_heads=1, head_dim=64, seed=0, make=case, unseen=None):
    """(dQ, dK and dV, the right ones, the least size by which errors are divided).

    `unseen` names arrays, and the rows or keys of them that are NaN for the kernel.
    """
    rng = np.random.default_rng(seed)
    found, arrays, altered, visible = make(name, b, h, rows, keys, rng)
    p = found.problem(seq_q=rows, seq_k=keys, head_dim=head_dim, heads=h, kv_heads=kv_heads, batch=b, dlse=True)
    shapes = {"Q": (h, rows), "K": (kv_heads, keys), "V": (kv_heads, keys), "dOut": (h, rows)}
    inputs = {each: rng.standard_normal((b, *shape, head_dim)).astype(np.float16) for each, shape in shapes.items()}
    inputs["dLse"] = rng.standard_normal((b, h, rows)).astype(np.float32)
    *wanted, out, lse = exact(inputs, head_dim**-0.5, altered, visible, inputs["dLse"])
    inputs |= {"Out": out.astype(np.float16), "Lse": lse.astype(np.float32)}
    inputs |= {f"array{place}": each for place, each in enumerate(arrays)}
    if p.listed:
        seen = np.broadcast_to(visible, (b, h, rows, keys))[: p.mask_batch, : p.mask_heads]
        inputs["Blocks"] = list_blocks(np, seen)
    floor = 0.01 * np.linalg.norm(inputs["dOut"].astype(float))
    for each, places in (unseen or {}).items():
        inputs[each][:, :, places] = np.nan
    schedule = space_for("sm_90", found).default(p)
    options = {each: value for each, value in CHANGES[change].items() if each != "group_heads" or h > kv_heads}
    schedule = schedule.replace(**options)
    given = run_schedule(found, p, schedule, inputs)
    return [given[each].astype(float) for each in ("dQ", "dK", "dV")], wanted, floor


NAMES = ("alibi", "softcap", "documents", "by_key", "causal_score", "undefined", "strictly_before", "up_to")


SIZES = ((1, 1, 64), (129, 129, 64), (63, 129, 128), (129, 1, 64))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_gradients_are_those_of_a_formula_in_float64(name, change):
    assert np.max(errors(name, 63, 63, change, b=2, h=2)) < 3e-3


@pytest.mark.parametrize(("name", "size"), [*zip(NAMES, SIZES * 2, strict=False)])
def test_sizes_that_are_no_multiples_of_tiles(name, size):
    rows, keys, head_dim = size
    assert np.max(errors(name, rows, max(keys, rows) if name == "documents" else keys, 0, head_dim=head_dim)) < 3e-3


# Blocks that are skipped.

LISTED = ("parts", "near", "by_place", "documents", "by_key", "strictly_before")


def of_blocks(name, change=0, of=errors, **more):
    """Errors of a problem of three blocks of rows and four of keys, the last of which no tile divides."""
    return of(name, 330, 450, change, b=2, h=2, kv_heads=1, head_dim=16, **more)


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_gradients_of_several_blocks(name, change):
    assert np.max(of_blocks(name, change)) < 3e-3


def test_lists_that_are_read_a_few_at_once():
    with mutated(MODULES, "LISTS_AT_ONCE = 128", "LISTS_AT_ONCE = 2"):
        assert np.max(of_blocks("strictly_before")) < 3e-3


def around_nan(change):
    """The largest error in the gradients of keys and rows of a window that see no block of the others in which there is NaN; NaN
    where such a block is loaded."""
    found = []
    for names, unseen, kinds, seen in (
        (("Q", "dOut"), slice(0, 128), (1, 2), slice(256, None)),
        (("Q", "dOut"), slice(256, None), (1, 2), slice(0, 128)),
        (("K", "V"), slice(0, 128), (0,), slice(256, None)),
        (("K", "V"), slice(384, None), (0,), slice(0, 256)),
    ):
        made, wanted, _ = of_blocks("near", change, computed, unseen=dict.fromkeys(names, unseen))
        for kind in kinds:
            one, other = made[kind][:, :, seen], wanted[kind][:, :, seen]
            found.append(np.linalg.norm(one - other) / np.linalg.norm(other))
    return np.max(found)


@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_blocks_that_nothing_sees_are_not_loaded(change):
    assert around_nan(change) < 3e-3


END, BEGIN = "(*at, 1), check_bounds=False) * tiles", "(*at, 0), check_bounds=False) * tiles"
LIST_FAULTS = {
    "rows end early": (END, f"{END} - 1", "strictly_before", 0),
    "rows begin late": (BEGIN, f"{BEGIN} + 1", "strictly_before", 0),
    "rows end late": (END, f"{END} + 1", "", 0),
    "rows begin early": (BEGIN, f"{BEGIN} - 1", "", 0),
    "keys end early": ("(most + 1) * tiles", "(most + 1) * tiles - 1", "strictly_before", 1),
    "keys begin late": ("min(least * tiles, steps)", "min(least * tiles + 1, steps)", "strictly_before", 1),
    "keys end late": ("(most + 1) * tiles", "(most + 1) * tiles + 1", "", 1),
    "keys begin early": ("min(least * tiles, steps)", "min(max(least * tiles - 1, 0), steps)", "", 1),
    "rows of the first block of keys": ("tile.place * const.TILE_N // const.BLOCK", "0", "documents", 0),
    "keys of the first block of rows": ("place * const.TILE_M // const.BLOCK, const", "0, const", "documents", 1),
    "lists of the first head": (
        "lists_of(rows.head, rows.entry, Spans)",
        "lists_of(0, rows.entry, Spans)",
        "by_place",
        0,
    ),
    "lists of the first sequence": (
        "lists_of(rows.head, rows.entry, Spans)",
        "lists_of(rows.head, 0, Spans)",
        "by_place",
        0,
    ),
    "no first full block": (
        "ct.where(full > 0, ct.minimum(",
        "ct.where(full > blocks, ct.minimum(",
        "strictly_before",
        0,
    ),
    "no last full block": ("HEAD + blocks - full", "HEAD - 1 + blocks", "parts", 0),
    "no last partial block": ("HEAD - 1 + partial", "HEAD", "parts", 0),
    "the first lists alone": (
        "rows = part * LISTS_AT_ONCE + ct.arange(LISTS_AT_ONCE",
        "rows = ct.arange(2",
        "strictly_before",
        0,
    ),
}
"""What stands in the tile code, what is put in its place, the mask (none for blocks with NaN) and the knobs that notice it."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", LIST_FAULTS)
def test_faults_in_what_is_skipped_are_noticed(fault):
    old, new, name, change = LIST_FAULTS[fault]
    with mutated(MODULES, old, new):
        assert not (np.max(of_blocks(name, change)) if name else around_nan(change)) < 3e-3


SLOPED = "ct.where(p == 0.0, 0.0, ds * slope)"
MUTATIONS = {
    "no derivative": (SLOPED, "ds", "softcap", 0),
    "no derivative in the second pass": (SLOPED, "ds", "softcap", 1),
    "a derivative where nothing is seen": (SLOPED, "ds * slope", "undefined", 0),
    "a derivative taken twice": (SLOPED, "ds * slope * slope", "by_key", 0),
    "scores that are not scaled": ("scores = scores * variant.scale", "scores = scores * 1.0", "softcap", 0),
    "no mask": ("visible = visible & variant.mods.mask(*others)", "visible = visible", "documents", 0),
    "no mask in the second pass": (
        "visible = visible & variant.mods.mask(*others)",
        "visible = visible",
        "documents",
        1,
    ),
    "rows behind the last": ("last < rows.Q.shape[2] + tile.offset, tile)", "last >= 0, tile)", "up_to", 0),
    "the mask of the first head": ("variant_of(0, rows.head,", "variant_of(0, 0 * rows.head,", "by_key", 0),
    "scores of the first head": ("variant_of(0, rows.head,", "variant_of(0, 0 * rows.head,", "alibi", 2),
    "scores of the first head, second pass": ("variant_of(0, head,", "variant_of(0, 0 * head,", "alibi", 1),
    "the mask of the first sequence": (
        "rows.head, rows.entry, tile.offset",
        "rows.head, 0, tile.offset",
        "documents",
        0,
    ),
    "derivatives in the place of scores": ("value_of(changed), slope_of", "slope_of(changed), slope_of", "softcap", 0),
}
MODULES = [
    "tiledsched.kernels.attention.mods",
    *(f"tiledsched.kernels.attention_backward.{name}" for name in ("tiles", "rows", "queries", "entries")),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", MUTATIONS)
def test_faults_are_noticed(fault):
    old, new, name, change = MUTATIONS[fault]
    with mutated(MODULES, old, new):
        assert not np.max(errors(name, 63, 63, change, b=2, h=2)) < 3e-3


# Derivatives by rule.

OF_KEYS = ts.array("seq_k", dtype="float32")


def arithmetic(score, b, h, q_idx, kv_idx, *arrays):
    found = -score * (q_idx - score) / (score * score + 2.0) + score / 3 - 1 / (score + 9.0)
    found += 2 - score
    return -(1.0 - -found) * kv_idx + score


def by_name(score, b, h, q_idx, kv_idx, *arrays):
    found = ct.sub(ct.mul(score, ct.add(score, q_idx)), ct.truediv(kv_idx, ct.add(9.0, score)))
    return ct.negative(ct.where(ct.less(found, score), found, ct.mul(score, 0.5)))


def exponentials(score, b, h, q_idx, kv_idx, *arrays):
    return ct.exp(0.3 * score) + ct.exp2(score) * 0.1 + ct.exp(0.1) * (score + 9.0) ** 3


def logarithms(score, b, h, q_idx, kv_idx, *arrays):
    return ct.log(score * score + 1.0) - ct.log2(score + 9.0)


def roots(score, b, h, q_idx, kv_idx, *arrays):
    return ct.sqrt(score + 9.0) + ct.rsqrt(score * score + 0.5)


def waves(score, b, h, q_idx, kv_idx, *arrays):
    return ct.tanh(score) + ct.sin(score) * ct.cos(2.0 * score)


def choices(score, b, h, q_idx, kv_idx, *arrays):
    near = ct.where((score > -1.0) & (score <= 0.9), -score, score * score)
    return near + ct.maximum(score, 0.3) + ct.minimum(1, score) + ct.maximum(score, near)


def steps(score, b, h, q_idx, kv_idx, *arrays):
    return ct.abs(score) * ct.floor(score) + ct.abs(score - 1.0) - ct.ceil(score) + score.astype(ct.int32)


def branches(score, b, h, q_idx, kv_idx, *arrays):
    found = score if CAP > 1 else score * kv_idx
    if CAP < 1:
        found = found * found
    for power in range(3):
        found = found * score + power
    return found


def constant(score, b, h, q_idx, kv_idx, *arrays):
    return q_idx * 1.0


def helper(x, y):
    return x * y - -x


def composed(factor, functions):
    def score_mod(score, b, h, q_idx, kv_idx, *arrays):
        def again(x):
            return x * SLOPE - score

        first, second = functions
        return second(first(score, kv_idx), factor) + again(score) * ct.gather(arrays[0], kv_idx)

    return score_mod


@dataclasses.dataclass(frozen=True)
class Capped:
    cap: float
    inner: object

    def __call__(self, score, b, h, q_idx, kv_idx, *arrays):
        return self.cap * ct.tanh(self.inner(score, q_idx) / self.cap) - self.more(score)

    def more(self, score):
        return -score * self.cap


COMPOSED, CAPPED = composed(3.0, (helper, helper)), Capped(2.0, helper)
BY_RULE = {
    each.__name__: each
    for each in (arithmetic, by_name, exponentials, logarithms, roots, waves, choices, steps, branches, constant)
} | {"composed": COMPOSED, "dataclass": CAPPED, "alibi": alibi, "by_key": by_key}


@pytest.mark.parametrize("name", BY_RULE)
def test_a_derivative_by_rule_is_that_of_small_differences(name):
    function, array = BY_RULE[name], np.linspace(-1, 2, 8)
    scores = np.random.default_rng(0).standard_normal((8, 8)) * 2
    others = (1, 2, np.arange(8, dtype=np.int32)[:, None], np.arange(8, dtype=np.int32)[None])
    value = lambda scores: evaluate(function, scores, *others, arrays=[array])  # noqa: E731
    wanted = (value(scores + 1e-6) - value(scores - 1e-6)) / 2e-6
    found = evaluate(derivative(by_rule(function)), scores, *others, arrays=[array])
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-8)


def several(score, b, h, q_idx, kv_idx, array):
    given = b, h, q_idx, kv_idx, array
    return arithmetic(score, *given) + choices(score, *given) + branches(score, *given) + CAPPED(score, *given)


@pytest.mark.slow
@pytest.mark.compiler
def test_copies_compile():
    """With signs, comparisons, dataclasses and loops."""
    prepare_process()
    made = gradient_of(flex_attention(score_mod=several, mask_mod=causal, arrays={"of_keys": OF_KEYS}))
    p = made.problem(seq_q=100, seq_k=100, head_dim=64)
    assert compile_schedule(made, p, space_for("sm_90", made).default(p), "sm_90").fingerprint


def flushed(score, b, h, q_idx, kv_idx, *arrays):
    return ct.exp2(score, flush_to_zero=True)


def test_options_of_functions_are_handed_on():
    places = np.zeros((1, 1), np.int32)
    found = evaluate(derivative(by_rule(flushed)), np.full((1, 1), 2.0, np.float32), 0, 0, places, places)
    assert found == pytest.approx(4 * math.log(2))


def summed(score, b, h, q_idx, kv_idx, *arrays):
    doubled = 2.0 * score
    return score - 0.0 * ct.max(doubled, axis=1, keepdims=True)


def unrolled(score, b, h, q_idx, kv_idx, *arrays):
    for power in ct.static_iter(range(2)):
        score = score * power
    return score


@pytest.mark.parametrize(("function", "line", "what"), [(summed, 2, "ct.max"), (unrolled, 1, "static_iter")])
def test_what_no_rule_knows_names_the_line_and_the_remedy(function, line, what):
    line += function.__code__.co_firstlineno
    with pytest.raises(DeclarationError, match=rf"test_flex_gradients.py, line {line}: .*score_grad=") as raised:
        gradient_of(flex_attention(score_mod=function))
    assert what in str(raised.value)


def twice_softcap(score, b, h, q_idx, kv_idx, *arrays):
    return 2.0 * (1.0 - ct.tanh(score / CAP) * ct.tanh(score / CAP))


def test_check_knows_variants_and_finds_a_wrong_derivative():
    wrong = gradient_of(flex_attention(score_mod=softcap, mask_mod=causal, score_grad=twice_softcap))
    schedule = space_for("sm_90", wrong).default(wrong.small()[0])
    assert check_schedule(kernel(softcap, causal), kernel(softcap, causal).small()[0], schedule)[0]
    assert "relative error 1 " in check_schedule(wrong, wrong.small()[0], schedule)[2]


def right_slope(score, b, h, q_idx, kv_idx, *arrays):
    return 1.0 - ct.tanh(score / CAP) * ct.tanh(score / CAP)


@pytest.mark.parametrize("score_grad", [None, right_slope])
def test_the_reference_on_a_gpu_is_the_one_in_numpy(score_grad):
    made = gradient_of(flex_attention(score_mod=softcap, mask_mod=causal, score_grad=score_grad))
    p = made.small()[0]
    given = {
        each: np.asarray(value, np.float64) for each, value in made.inputs(np, np.random.default_rng(0), p).items()
    }
    given |= dict.fromkeys(("Sinks", "Starts", "Lengths", "dLse"))
    with launches_on_cpu() as launched:
        found = made.reference(Module(), **given, p=p)
    assert launched
    for one, other in zip(found, made.reference(np, **given, p=p), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-8)


def test_the_authors_own_derivative_is_used_and_part_of_the_identity():
    own = flex_attention(score_mod=softcap, mask_mod=causal, score_grad=twice_softcap)
    assert own is not flex_attention(score_mod=softcap, mask_mod=causal)
    with_own = lambda *given: (gradient_of(own), *case("softcap", *given)[1:])  # noqa: E731
    dq, dk, dv = errors("", 33, 33, make=lambda name, *given: with_own(*given))
    assert dq == pytest.approx(1.0, abs=0.01)  # it is twice what is right
    assert dk == pytest.approx(1.0, abs=0.01)
    assert dv < 3e-3
    with pytest.raises(DeclarationError, match="score_grad is the derivative of score_mod"):
        flex_attention(mask_mod=causal, score_grad=twice_softcap)


# Their launch.


def flex_call(name, rows=40, columns=16, scale=0.3):
    """(arguments of the gradients of `flex` as autograd asks for them, the right ones) of a call with its results."""
    torch = pytest.importorskip("torch")
    from tiledsched.ops.block_masks import types_of, variant_named
    from tiledsched.ops.flex import FlexFeatures

    rng = np.random.default_rng(0)
    _, arrays, change, visible = case(name, 2, 4, rows, rows, rng)
    heads = {"Q": 4, "K": 2, "V": 2, "dOut": 4}
    given = {each: rng.standard_normal((2, count, rows, columns)).astype(np.float16) for each, count in heads.items()}
    given["dLse"] = rng.standard_normal((2, 4, rows)).astype(np.float32)
    *wanted, out, lse = exact(given, scale, change, visible, given["dLse"])
    q, k, v, dout, dlse = map(torch.from_numpy, given.values())
    saved = (q, k, v, torch.from_numpy(out).half(), torch.from_numpy(lse).float())
    arrays = [*map(torch.from_numpy, arrays)]
    lists = None
    if rows > FEW_ROWS and FUNCTIONS[name][1] is not None:
        seen = np.broadcast_to(visible, (2, 1, rows, rows))[: 2 if name == "documents" else 1]
        lists = torch.from_numpy(list_blocks(np, seen))
    variant = FlexFeatures(variant_named(*FUNCTIONS[name], types_of(arrays)), lists, arrays)
    return (dout, dlse, saved, None, scale, variant, None), wanted


FUNCTIONS = {"alibi": (alibi, None), "softcap": (softcap, causal), "documents": (None, same_document)}


def assert_gradients(found, wanted):
    for one, right in zip(found[:3], wanted, strict=True):
        assert one.dtype.itemsize == 2
        assert np.linalg.norm(one.double().numpy() - right) < 3e-3 * np.linalg.norm(right)


@pytest.mark.parametrize(("name", "rows"), [*((name, 40) for name in FUNCTIONS), ("documents", 200), ("softcap", 200)])
def test_a_plan_is_made_once_and_launched(launches, name, rows):
    from tiledsched.ops import backward

    given, wanted = flex_call(name, rows)
    each = 3 + (rows > FEW_ROWS)  # one more for the rows that may see a block of keys
    for _ in range(2):
        assert_gradients(backward.gradients(*given), wanted)
    (plan,) = backward.cache.ready.values()
    assert plan.rival is plan.in_graphs is None  # which would know nothing of the functions
    assert not plan.problem.declaration.rivals(plan.problem)
    assert len(launches) == 2 * each
    assert_gradients(backward.gradients(*given[:-1], True), wanted)  # deterministic
    assert len(launches) > 2 * each
    assert len(backward.cache.ready) == 2
    dout, dlse, (q, *saved), *others = given
    q, dout = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, dout))
    found = backward.gradients(dout, dlse, (q, *saved), *others)
    assert_gradients(found, wanted)
    assert found[0].stride() == q.stride()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_on_the_host_are_computed_by_the_reference(fresh, name):
    from tiledsched.ops.backward import gradients

    given, wanted = flex_call(name)
    with pytest.warns(UserWarning, match="flex uses its reference"):
        assert_gradients(gradients(*given), wanted)
    dout, dlse, saved, *others = given
    empty = gradients(dout[:, :, :0], dlse[:, :, :0], tuple(each[:, :, :0] for each in saved), *others)
    assert [tuple(each.shape) for each in empty[:3]] == [(2, 4, 0, 16), (2, 2, 0, 16), (2, 2, 0, 16)]


def test_the_operator_of_gradients_is_well_made(launches):
    torch = pytest.importorskip("torch")
    from tiledsched.core.errors import UnsupportedError
    from tiledsched.ops.backward import gradients
    from tiledsched.ops.flex import flex_backward_operator

    given, wanted = flex_call("alibi", rows=8)
    dout, dlse, saved, _, scale, variant, _ = given
    arguments = (dout, *saved, dlse, variant.lists, list(variant.arrays), variant.kernel.name, scale, None)
    torch.library.opcheck(flex_backward_operator, arguments, rtol=1e-2, atol=1e-2)
    saved[0].requires_grad_()
    with torch.enable_grad():
        found = gradients(*given)
    assert_gradients([each.detach() for each in found[:3]], wanted)
    with pytest.raises(UnsupportedError, match="second derivatives"):
        found[0].sum().backward()


def test_arrays_have_no_gradients(launches):
    torch = pytest.importorskip("torch")
    from tiledsched.core.errors import UnsupportedError

    q, k, v = (torch.randn(1, 2, 8, 16).half() for _ in range(3))
    with pytest.raises(UnsupportedError, match=r"arrays\[0\] requires a gradient.*detach"):
        ts.flex(q, k, v, alibi, arrays=(torch.ones(2, requires_grad=True),))
