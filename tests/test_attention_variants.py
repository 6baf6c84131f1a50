"""The gallery of attention variants: each is what its paper says, and compiles; mistakes are noticed; the page shows the file."""

import functools
import io
import itertools
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import cuda.tile as ct
import numpy as np
import pytest

from docs.examples import attention_variants, tuned_attention_variants
from docs.studies import attention_pictures
from tiledsched.interpreter import evaluate
from tiledsched.kernels.attention.applied import exactly

FILE = Path(attention_variants.__file__)
PAGE = FILE.parents[1] / "attention_variants.md"
RNG = np.random.default_rng(1)
PREFIX = np.array([5, 40], np.int32)
DOCUMENTS = np.sort(RNG.integers(0, 6, (2, 93)), -1).astype(np.int32)
SLOPES = np.array([0.5, 0.0625, 0.0078125], np.float32)
TABLE = RNG.standard_normal((32, 3), np.float32)
PATTERN = RNG.random((3, 5, 6)) < 0.4
BIAS = RNG.standard_normal((1, 3, 77, 93), np.float32)
PARENTS = [[-1, 0, 0, 1, 1, 2, 3, 5], [-1, -1, 1, 2, 3, 0, 5, 5]]
CONTEXT = np.array([60, 85], np.int32)


def ancestors():
    """Which nodes are ancestors of a node, or itself: a node adds itself to what its parent has."""
    found = np.zeros((2, 8, 8), bool)
    for sequence, node in itertools.product(range(2), range(8)):
        parent = PARENTS[sequence][node]
        found[sequence, node] = found[sequence, parent] & (parent >= 0)
        found[sequence, node, node] = True
    return found


# ---- the definitions: what row q sees of key k, or its new score; sequence b, head h ---------------------------------


def seen_in_tree(b, h, q, k):
    """All of the context, and the nodes on the way from a root."""
    while k >= CONTEXT[b] and q >= 0 and q != k - CONTEXT[b]:
        q = PARENTS[b][q]
    return q >= 0


@functools.cache
def t5_bucket(distance):
    """Each of the 8 smallest distances has a bucket; the other 8 grow by the factor (128 / 8) ** (1 / 8), in powers of integers."""
    n, ahead = abs(distance), 16 * (distance > 0)
    return ahead + (n if n < 8 else 8 + max(step for step in range(8) if n**8 * 8**step >= 8**8 * 128**step))


def nearest(place, size, count):
    """The `count` places nearest to one."""
    return sorted(range(size), key=lambda other: (abs(other - place), other))[:count]


def seen_in_image(b, h, q, k):
    (y, x), (to_y, to_x) = divmod(q, 11), divmod(k, 11)
    return to_y in nearest(y, 7, 5) and to_x in nearest(x, 11, 5)


def seen_in_video(b, h, q, k):
    here, there = (np.array(np.unravel_index(place, (3, 4, 6))) for place in (q, k))
    return bool((np.abs(here - there) <= (1, 1, 2)).all())


def same_block(b, h, q, k):
    return PATTERN[h].repeat(16, 0).repeat(16, 1)[q, k]


def tanh(x):
    return 1 - 2 / (math.exp(2 * x) + 1)


def alibi(b, h, q, k, score):
    return score - float(SLOPES[h]) * (q - k)


CASES = {
    "causal": ("causal", (), (77, 93), lambda b, h, q, k: k in range(q + 1)),
    "prefix_lm": ("prefix_lm", (PREFIX,), (77, 93), lambda b, h, q, k: k in range(max(q + 1, PREFIX[b]))),
    "window_with_global_tokens": (
        "window_with_global_tokens(9, 3)",
        (),
        (77, 93),
        lambda b, h, q, k: k in range(q - 9, q + 10) or min(q, k) in range(3),
    ),
    "same_document": ("same_document", (DOCUMENTS,), (93, 93), lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k]),
    "alibi": ("alibi", (SLOPES,), (77, 93), alibi),
    "t5_bias": ("t5_bias", (), (77, 301), lambda b, h, q, k, score: score + TABLE[t5_bucket(k - q), h]),
    "softcap": ("softcap(5.0)", (), (77, 93), lambda b, h, q, k, score: 5 * tanh(score / 5)),
    "neighbourhood_2d": ("neighbourhood_2d(7, 11, 2)", (), (77, 77), seen_in_image),
    "window_3d": ("window_3d(4, 6, 1, 1, 2)", (), (72, 72), seen_in_video),
    "tree": ("tree", (CONTEXT, ancestors()), (8, 93), seen_in_tree),
    "block_sparse": ("block_sparse(16)", (PATTERN,), (77, 93), same_block),
    "dense_bias": ("dense_bias", (BIAS,), (77, 93), lambda b, h, q, k, score: score + BIAS[0, h, q, k]),
}
"""Name -> the function, its arrays, rows and keys, and the definition: of a score if that takes one, or else of a mask."""


def scores_of(name):
    """Random scores where a variant changes scores, none where it is a mask."""
    _, _, shape, definition = CASES[name]
    takes_score = definition.__code__.co_argcount == 5
    return [3 * np.random.default_rng(0).standard_normal((2, 3, *shape))] if takes_score else []


@functools.cache
def by_definition(name):
    _, _, shape, definition = CASES[name]
    places = list(np.ndindex(2, 3, *shape))
    more = [each.reshape(-1) for each in scores_of(name)]
    return np.array([definition(*place, *also) for place, *also in zip(places, *more, strict=True)]).reshape(
        2, 3, *shape
    )


def difference(module, name, *, packed=False):
    """Largest difference from the definition, of each sequence and head; `packed` has the rows of all heads in one tile."""
    function, arrays, (rows, keys), _ = CASES[name]
    mod, expected, worst = eval(function, vars(module)), by_definition(name), 0.0
    if name == "t5_bias":
        arrays = (TABLE[module.t5_buckets()].T,)
    q_idx, kv_idx = np.arange(rows, dtype=np.int32)[:, None], np.arange(keys, dtype=np.int32)[None]
    heads = [slice(None)] if packed else range(3)
    for b, h in itertools.product(range(2), heads):
        of_head = np.repeat(np.arange(3, dtype=np.int32), rows)[:, None] if packed else h
        of_row = np.tile(q_idx, (3, 1)) if packed else q_idx
        scores = [each[b, h].reshape(-1, keys) for each in scores_of(name)]
        found = evaluate(exactly(mod), *scores, b, of_head, of_row, kv_idx, arrays=arrays)
        assert found.dtype == expected.dtype
        worst = max(worst, np.abs(np.subtract(found, expected[b, h].reshape(-1, keys), dtype=float)).max())
    return worst


def test_there_are_twelve_variants_of_at_most_ten_lines():
    code = FILE.read_text(encoding="utf-8").split("\n\n\n")[1:]
    assert [each.split("(")[0] for each in code] == [f"def {name}" for name in [*CASES, "t5_buckets"]]
    assert len(CASES) == 12
    assert max(len([line for line in each.splitlines() if line.strip()]) for each in code) <= 10


@pytest.mark.parametrize("packed", [False, True], ids=["one_head", "packed_heads"])
@pytest.mark.parametrize("name", CASES)
def test_a_variant_is_what_its_definition_says(name, packed):
    assert difference(attention_variants, name, packed=packed) < 1e-12


MISTAKES = {
    "causal": [("kv_idx <= q_idx", "kv_idx < q_idx"), ("kv_idx <= q_idx", "q_idx <= kv_idx")],
    "prefix_lm": [("kv_idx < ct", "kv_idx <= ct"), ("(prefix, b)", "(prefix, h)")],
    "window_with_global_tokens": [("<= window", "< window"), ("kv_idx < tokens", "kv_idx <= tokens")],
    "same_document": [("(b, q_idx)", "(b, q_idx + 1)"), ("(b, kv_idx)", "(0, kv_idx)")],
    "alibi": [("* distance", "* -distance"), ("slopes, h", "slopes, b"), ("ct.float32)\n", "ct.float32) + 1\n")],
    "t5_bias": [("biases, h", "biases, b"), ("score + load", "score - load")],
    "softcap": [("/ cap", "* cap"), ("cap - ct", "1.0 - ct"), ("2.0 * cap", "cap")],
    "neighbourhood_2d": [
        ("width - 1 - radius", "width - radius"),
        ("q_idx // width, radius", "q_idx // height, radius"),
        ("- column)) <= radius", "- column)) < radius"),
    ],
    "window_3d": [("- columns", "- rows"), ("kv_idx // width % height", "kv_idx // width % width"), ("<= 0", "< 0")],
    "tree": [("node < 0", "node <= 0"), ("(b, q_idx, node)", "(b, node, q_idx)"), ("context, b", "context, h")],
    "block_sparse": [("(h, q_idx", "(b, q_idx"), ("kv_idx // block", "(kv_idx + 1) // block")],
    "dense_bias": [("q_idx, kv_idx))", "q_idx, kv_idx + 1))"), ("h % attn_mask.shape[1]", "h % attn_mask.shape[0]")],
    "t5_buckets": [
        ("int(far", "round(far"),
        ("distance > 0", "distance < 0"),
        ("distance > 0", "distance >= 0"),
        ("furthest / exact", "furthest"),
    ],
}
"""Name -> mistakes in the text of its function."""


@pytest.mark.parametrize(("name", "right", "wrong"), [(name, *each) for name in MISTAKES for each in MISTAKES[name]])
def test_a_mistake_in_a_variant_is_noticed(name, right, wrong):
    before, text = FILE.read_text(encoding="utf-8").split(f"\ndef {name}(")
    assert right in text.split("\n\n\n")[0]
    made = SimpleNamespace()
    exec(compile(f"{before}\ndef {name}({text.replace(right, wrong, 1)}", str(FILE), "exec"), vars(made))
    assert difference(made, "t5_bias" if name == "t5_buckets" else name) > 1e-3


# ---- the page and its pictures ---------------------------------------------------------------------------------------


def test_the_page_shows_the_code_of_the_file_and_a_picture_of_each():
    """With WRITE_TABLES=1 the blocks of code are written anew."""
    page, functions = PAGE.read_text(encoding="utf-8"), FILE.read_text(encoding="utf-8").rstrip().split("\n\n\n")[1:]
    if os.environ.get("WRITE_TABLES") == "1":
        for name, code in zip([*CASES, "t5_buckets"], functions, strict=True):
            page = re.sub(
                rf"```python\ndef {name}\(.*?```", lambda _, code=code: f"```python\n{code}\n```", page, flags=re.DOTALL
            )
        PAGE.write_text(page, encoding="utf-8")
    assert sorted(re.findall(r"\n```python\n(def .*?)\n```", page, re.DOTALL)) == sorted(functions)
    assert re.findall(r"\]\(images/attention/(\w+)\.svg\)", page) == [*CASES]
    assert re.findall(r"^\|\[.*?\]\(#.*?\)\|`(\w+)_mod`\|`(\w+)", page, re.MULTILINE) == [
        ("score" if scores_of(name) else "mask", name) for name in CASES
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_picture_is_what_the_function_gives(name):
    """`python -m docs.studies.attention_pictures` draws them anew."""
    made = attention_pictures.svg(attention_pictures.PICTURES[name])
    assert (PAGE.parent / "images" / "attention" / f"{name}.svg").read_text(encoding="utf-8") == made
    assert len(made) < 16_000


def test_tiles_of_a_picture_are_full_partial_or_empty():
    seen = np.ones((32, 64), bool)
    seen[:16, 16:32], seen[3, 40], seen[16:, 32:] = False, False, np.eye(16, 32, dtype=bool)
    found = attention_pictures.tile_classes(seen).tolist()
    assert found == [["full", "empty", "partial", "full"], ["full", "full", "partial", "empty"]]
    assert attention_pictures.runs(np.array([[1, 1, 0, 1], [0, 0, 0, 0]], bool)) == "M0 0h2v1H0zM3 0h1v1H3z"


def test_what_was_tuned_is_of_these_functions():
    """A function that changes has another name, and what was measured of it is found no more."""
    declared = {each.name for each in vars(tuned_attention_variants).values() if hasattr(each, "mods")}
    entries = json.loads((FILE.parent / "attention_variants_sm_90.json").read_text(encoding="utf-8"))["entries"]
    assert len(declared) == 12
    assert declared == {
        tuned_attention_variants.causal.name,
        *(each["kernel"] for each in entries),
    }  # untuned it is faster


# ---- the compiler ----------------------------------------------------------------------------------------------------


def kernel_of(mod, count, changes_scores, packed):
    """A kernel that applies a variant to each tile of scores: `count` arrays, rows of one head or of several in a tile."""

    def apply(Scores, Out, arrays):
        b, h = ct.bid(0), ct.bid(1)
        q_idx = ct.bid(2) * 64 + ct.arange(64, dtype=ct.int32)[:, None]
        kv_idx = ct.arange(64, dtype=ct.int32)[None, :]
        if packed:
            h, q_idx = h * 4 + q_idx // 16, q_idx % 16
        scores = ct.load(Scores, (b, ct.bid(1), ct.bid(2), 0), (1, 1, 64, 64)).reshape((64, 64))
        if changes_scores:
            scores = mod(scores, b, h, q_idx, kv_idx, *arrays)
        else:
            scores = ct.where(mod(b, h, q_idx, kv_idx, *arrays), scores, -math.inf)
        ct.store(Out, (b, ct.bid(1), ct.bid(2), 0), scores.reshape((1, 1, 64, 64)))

    def none(Scores, Out):
        apply(Scores, Out, ())

    def one(First, Scores, Out):
        apply(Scores, Out, (First,))

    def two(First, Second, Scores, Out):
        apply(Scores, Out, (First, Second))

    return ct.kernel((none, one, two)[count])


@pytest.mark.compiler
@pytest.mark.parametrize(("arch", "packed"), [("sm_90", False), pytest.param("sm_121", True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_a_variant_compiles(name, arch, packed):
    from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, export_kernel

    function, arrays, _, _ = CASES[name]
    arrays = (TABLE[attention_variants.t5_buckets()].T,) if name == "t5_bias" else arrays
    of = [(getattr(ct, f"{each.dtype}{'_' * (each.dtype == bool)}"), each.ndim) for each in arrays]
    constraints = [
        ArrayConstraint(
            dtype,
            ndim,
            index_dtype=ct.int32,
            stride_lower_bound_incl=0,
            alias_groups=(),
            may_alias_internally=False,
            stride_constant=(*[None] * (ndim - 1), 1),
        )
        for dtype, ndim in [*of, (ct.float32, 4), (ct.float32, 4)]
    ]
    kernel = kernel_of(eval(function, vars(attention_variants)), len(arrays), bool(scores_of(name)), packed)
    signature, cubin = KernelSignature(constraints, CallingConvention.cutile_python_v1()), io.BytesIO()
    export_kernel(kernel, [signature], cubin, gpu_code=arch, output_format="cubin")
    assert cubin.getvalue().startswith(b"\x7fELF")
