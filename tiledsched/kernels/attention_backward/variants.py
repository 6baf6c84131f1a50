"""The gradients of an author's own attention, as a kernel of their own; see :mod:`tiledsched.kernels.attention.variants`.

Scores are made again from the queries and keys, as the author's functions change and hide them, and the gradients of the scores
are multiplied by the derivative of the change. A block of keys takes the rows from the first to the last whose lists of blocks
reach over it, and a block of rows the keys from the first to the last of its list: empty blocks in between are computed, too.
The arrays that the functions read have no gradients.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tiledsched.core.errors import DeclarationError
from tiledsched.core.fields import Value, workspace
from tiledsched.core.problem import KernelClass
from tiledsched.core.schedule import Schedule
from tiledsched.core.sources import compiled
from tiledsched.kernels.attention import variants
from tiledsched.kernels.attention.problem import mask_of
from tiledsched.kernels.attention_backward.declaration import AttentionBackward
from tiledsched.kernels.attention_backward.inputs import adversarial_case, random_inputs
from tiledsched.kernels.attention_backward.reference import attention_gradients

SIZES = ("array_side", "mask_batch", "mask_heads", "listed", "row_blocks", "list_length")
"""What a problem derives as that of forward does."""
STEP = 1e-6
"""Half of the difference of scores from which the reference takes a derivative."""
WITH_MODS = {"attention_backward_keys": "Spans", "attention_backward_queries": "Blocks"}
"""The launches that make scores, and the array that says which blocks they skip."""


@functools.cache
def gradient_of(kernel: Any) -> KernelClass:
    """The kernel of the gradients of an author's own attention.

    Args:
        kernel: what `tiledsched.flex_attention` returned.

    Raises:
        DeclarationError: no rule knows the derivative of its `score_mod`, and it has no `score_grad`.
    """
    from tiledsched.kernels.attention.derivatives import by_rule, derivative

    score_mod, mask_mod, score_grad = kernel.mods
    fields = {name: kernel.array_fields[name] for name in kernel.mod_arrays}
    of_slope = score_mod
    if score_mod is not None and score_grad is None:
        score_mod = by_rule(score_mod)
        of_slope = derivative(score_mod)
        try:
            variants.try_out(
                {"score_grad": of_slope}, [(variants.rank_of(each), each.dtype) for each in fields.values()]
            )
        except DeclarationError as error:
            raise DeclarationError(
                f"{error}; no rule knows the derivative of score_mod: give it as score_grad=..., a function (score, b, h, q_idx, "
                "kv_idx, *arrays) that returns d score_mod / d score"
            ) from error
    name = kernel.name.replace("flex_", "flex_backward_", 1)
    for_reference = {"name": f"{name}_slope", "mods": (of_slope, None, None), "mod_arrays": kernel.mod_arrays}
    body = {
        "__module__": __name__,
        "__doc__": f"The gradients of {kernel.name}.",
        "name": name,
        "space": AttentionBackward.name,
        "suites": {},
        "default_suite": "",
        "rivals": staticmethod(lambda p: {}),
        "planning_rivals": (),
        "compiled_rivals": (),
        "derived": AttentionBackward.derived | {name: kernel.derived[name] for name in SIZES},
        "mods": (score_mod, mask_mod, score_grad),
        "weight_mod": kernel.weight_mod,
        "for_reference": type(name, (), for_reference),
        "mod_arrays": kernel.mod_arrays,
        "identity": kernel.identity,
        "declared_in": kernel.declared_in,
        "Blocks": kernel.array_fields["Blocks"],
        "Spans": workspace(lambda p, s: (p.mask_batch, p.mask_heads, key_blocks(p), 2), dtype="int32"),
        **fields,
        **{each.__name__: staticmethod(each) for each in (canonical, launches, inputs, reference, adversarial)},
        **{each.__name__: classmethod(each) for each in (variants.source_hash, variants.locator, small)},
    }
    return type(name, (AttentionBackward,), body)


def canonical(values: dict[str, Value]) -> dict[str, Value]:
    """The values that stand for all equivalent ways to state a problem, without features that a function of the author's says
    better.

    Raises:
        ProblemError: a feature is asked for that a function of the author's says better.
    """
    return {name: value for name, value in variants.canonical({**values, "page": 0}).items() if name != "page"}


def inputs(xp: Any, rng: Any, p: Any) -> Mapping[str, Any]:
    """Random inputs, with what attention gives for them."""
    own, read = with_lists(xp, rng, p)
    return random_inputs(xp, rng, p, own, **variants.changed_scores(xp, p, read))


def with_lists(xp: Any, rng: Any, p: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(random arrays for the author's functions, with the lists of blocks that follow; the arrays as read in float64)."""
    own, read = variants.drawn_arrays(xp, rng, p)
    return own | variants.lists_for(xp, p, read), read


def adversarial(xp: Any, rng: Any, p: Any, right: Callable[..., Any]) -> Iterator[Any]:
    """Yield the case of attention's gradients, with random arrays for the author's functions."""
    own, read = with_lists(xp, rng, p)
    yield adversarial_case(xp, rng, p, right, own, **variants.changed_scores(xp, p, read))


def reference(
    xp: Any,
    Q: Any,
    K: Any,
    V: Any,
    Out: Any,
    dOut: Any,
    Lse: Any,
    Sinks: Any,
    Starts: Any,
    Lengths: Any,
    dLse: Any,
    p: Any,
    **arrays: Any,
) -> tuple[Any, ...]:
    """The gradients in the precision of the inputs, with the author's own functions.

    A derivative that the author gives is not used: that of small differences takes its place, so that a wrong one is found.
    """
    kernel = p.declaration

    def slope(scores: Any, b: int, h: int, first: int) -> Any:
        at = functools.partial(variants.changed, xp, kernel.for_reference, arrays=arrays, b=b, h=h, first=first)
        scores = scores.astype("float64")
        return at(scores) if kernel.mods[2] is None else (at(scores + STEP) - at(scores - STEP)) / (2 * STEP)

    return attention_gradients(
        xp,
        Q,
        K,
        V,
        Out,
        dOut,
        Lse,
        dLse,
        dtype=str(Q.dtype),
        sinks=Sinks,
        starts=Starts,
        lengths=Lengths,
        slope=slope if kernel.mods[0] else None,
        **variants.changed_scores(xp, p, arrays),
        **mask_of(p),
    )[: 3 + p.sinks]


def small(kernel: Any) -> list[Any]:
    """Problems of odd lengths, with grouped heads."""
    make = kernel.problem
    return [
        make(seq_q=70, seq_k=90, head_dim=32, heads=4, kv_heads=2, batch=2),
        make(seq_q=90, seq_k=50, head_dim=40, heads=2, dtype="bfloat16", dlse=True, deterministic=True),
        make(seq_q=1, seq_k=130, head_dim=64),
    ]


def launches(p: Any, s: Schedule, device: Any) -> list[tuple[Callable[..., None], tuple[int]]]:
    """The launches of attention's gradients, with the author's functions in those that make scores."""
    from tiledsched.kernels.attention_backward import entries

    found = AttentionBackward.launches(p, s, device)
    if p.listed:
        found.insert(0, (entries.attention_backward_spans, (p.mask_batch * p.mask_heads * key_blocks(p),)))
    return [
        (entry_of(p.declaration, each, WITH_MODS[each.__name__] * p.listed), grid)
        if each.__name__ in WITH_MODS
        else (each, grid)
        for each, grid in found
    ]


def key_blocks(p: Any) -> int:
    """Blocks of keys of a problem that has lists of them; 1 for others."""
    return p.list_length - variants.HEAD if p.listed else 1


@functools.lru_cache(maxsize=256)
def entry_of(kernel: Any, entry: Callable[..., None], skips: str) -> Callable[..., None]:
    """A kernel function of attention's gradients with the functions of an author, the arrays that they take, and the array that
    says which blocks are skipped, unless its name is empty."""
    from tiledsched.kernels.attention.mods import Mods
    from tiledsched.kernels.attention_backward import entries

    names = {
        **vars(entries),
        "Mods": Mods,
        **dict(zip(("SCORE", "MASK", "SLOPE"), kernel.mods, strict=True)),
        "WEIGHT": kernel.weight_mod,
    }
    text = with_arrays(inspect.getsource(entry), kernel.mod_arrays, skips)
    return compiled(f"<{kernel.name} {entry.__name__} {skips}>", text, names, entry.__name__)


def with_arrays(text: str, arrays: Sequence[str], skips: str) -> str:
    """The text of a kernel function that takes further arrays, and hands them on with the author's functions."""
    tree = ast.parse(text)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    parameters = function.args.args
    place = [each.arg for each in parameters].index("scale_log2")
    parameters[place:place] = [ast.arg(each, ast.Name("ct.Array")) for each in filter(None, (skips, *arrays))]
    taken = ast.Tuple([ast.Name(each) for each in arrays])
    more: dict[str, dict[str, ast.expr]] = {
        "Features": {
            "mods": ast.Name("Mods(SCORE, MASK, SLOPE, WEIGHT)"),
            "arrays": taken,
            "Blocks": ast.Name(skips or "None"),
        },
        "tiles.BackwardConstants": {"MODS": ast.Constant(True), "BLOCK": ast.Constant(variants.BLOCK if skips else 0)},
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            node.keywords += [ast.keyword(*each) for each in more.get(ast.unparse(node.func), {}).items()]
    return ast.unparse(tree)
