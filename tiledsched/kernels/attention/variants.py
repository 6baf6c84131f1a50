"""An author's own attention as a kernel: attention with functions of scores, found, named, tuned and checked like any other.

The functions are tile code in cuTile's words (see :mod:`tiledsched.kernels.attention.mods`). What they say, and the values that
they take from around them, are part of the kernel's name: other code is another kernel. The arrays that they read are run-time
arguments, whose contents compile nothing anew.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy

import tiledsched.core.fields as ts
from tiledsched.core.arrays import to_float, to_storage
from tiledsched.core.canonical import stable_id
from tiledsched.core.cases import Case, drawn, random_inputs
from tiledsched.core.copies import names_in
from tiledsched.core.errors import DeclarationError, ProblemError, author_line, function_line
from tiledsched.core.fields import ArrayField
from tiledsched.core.kernel import check_array
from tiledsched.core.modules import is_library
from tiledsched.core.problem import KernelClass
from tiledsched.core.schedule import Schedule
from tiledsched.core.shapes import split_shape
from tiledsched.core.sources import compiled
from tiledsched.kernels.attention import problem
from tiledsched.kernels.attention.declaration import Attention
from tiledsched.kernels.attention.inputs import adversarial_case, places
from tiledsched.kernels.attention.options import MASK_PARAMETERS, PARAMETERS, VARIANT_ARRAYS, word_of as word_of
from tiledsched.kernels.attention.reference import ROWS_PER_CHUNK, attention_and_lse
from tiledsched.kernels.attention.scales import LOG2_E, default_scale
from tiledsched.kernels.attention.similarity import FEW_ROWS
from tiledsched.kernels.attention.tiling import combines_later, splits
from tiledsched.kernels.attention.variant_tuning import tuning_traits

BLOCK = 128
"""Query rows and keys of a block in lists of blocks."""
HEAD = 2
"""Numbers of a list before those of blocks; see :mod:`tiledsched.kernels.attention.mods`."""
PAIRS_AT_ONCE = 1 << 22
"""Most pairs of row and key for which a function is evaluated together; each takes about 50 bytes meanwhile."""
WIDE_ARRAY = "Annotated[ct.Array, ct.ArrayAnnotation(index_dtype=ct.int64)]"
"""The type of an array of more than 2**31 - 1 elements, in the text of kernels."""
MODS = ("score_mod", "mask_mod", "score_grad", "weight_mod")
"""The functions of an author, as a kernel has them in `mods`; None for those that he does not give."""
PLAIN = (bool, int, float, str, type(None))
REFUSED = (
    "it must be a function with a name in a file (def {example}(...): ...), a function that such a function returns, or a frozen "
    "dataclass with __call__"
)
MAX_FUNCTIONS = 1024
"""Pairs of functions that are found without reading their text: a function may be made anew in each call."""
TAKEN = "from around it a function takes numbers, text, tuples of these and functions; pass an array in arrays=..."
_known: dict[tuple[Any, str], KernelClass] = {}


def code_of(function: Any, what: str) -> list[Any]:
    """What decides the machine code of a function: its text, and the values and functions that it takes from around it.

    Args:
        function: the function of an author.
        what: its argument's name, for errors.

    Raises:
        DeclarationError: it is no such function, or takes something else than numbers, text, tuples and functions.
    """
    seen: set[int] = set()

    def visit(value: Any, where: str) -> Any:
        if isinstance(value, PLAIN):
            return repr(value)
        if isinstance(value, tuple):
            return [visit(each, where) for each in value]
        if id(value) in seen:
            return "again"
        seen.add(id(value))
        if isinstance(value, FunctionType) and value.__name__ != "<lambda>":
            return [source_of(value, what), *taken_by(value, where)]
        if dataclasses.is_dataclass(type(value)) and callable(value) and type(value).__dataclass_params__.frozen:
            own = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            parts = [visit(each, f"{where}, which holds {name}") for name, each in own.items()]
            return [type(value).__qualname__, *parts, visit(type(value).__call__, where)]
        module = value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", None) or "")
        if where != what and is_library(module) and (hasattr(value, "__name__") or module.startswith("cuda.")):
            return module if isinstance(value, ModuleType) else f"{module}.{getattr(value, '__qualname__', value)}"
        if isinstance(value, ModuleType):
            raise DeclarationError(
                f"{where}: what it takes of the module {module} is not known; write: from {module} import NAME"
            )
        wanted = REFUSED.format(example=what) if where == what else TAKEN
        raise DeclarationError(f"{where}: {value!r:.80} cannot be compiled; {wanted}")

    def taken_by(each: FunctionType, where: str) -> list[Any]:
        each = inspect.unwrap(each)
        read = each.__globals__.keys() & names_in(each.__code__)
        found = {**inspect.getclosurevars(each).nonlocals, **{name: each.__globals__[name] for name in read}}
        given = [
            ("its defaults", each.__defaults__ or ()),
            *(each.__kwdefaults__ or {}).items(),
            *sorted(found.items()),
        ]
        return [[name, visit(value, f"{where}, which reads {name}")] for name, value in given]

    return [type(function).__name__, visit(function, what)]


def source_of(function: FunctionType, what: str) -> str:
    """The text of a function without comments, docstrings and places.

    Raises:
        DeclarationError: its text lies in no file in UTF-8.
    """
    try:
        return _text_of(inspect.unwrap(function).__code__)
    except (OSError, SyntaxError, TypeError) as error:
        raise DeclarationError(
            f"{what}: the text of {function.__qualname__} lies in no file that is in UTF-8, and the compiler reads it; put it "
            "into one"
        ) from error


@functools.lru_cache(maxsize=1024)  # functions that another returns in each call have one code
def _text_of(code: CodeType) -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(node, ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def flex_attention(
    *,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    arrays: Mapping[str, ArrayField] | None = None,
    score_grad: Callable[..., Any] | None = None,
) -> KernelClass:
    """The kernel of attention with an author's own functions.

    Assign it to a name in a module, and `tiledsched tune module.py:name` tunes it; `tiledsched.flex` with the same functions is
    then served by what was measured.

    Args:
        score_mod: `score_mod(score, b, h, q_idx, kv_idx, *arrays)`, the new score; see `tiledsched.flex`.
        mask_mod: `mask_mod(b, h, q_idx, kv_idx, *arrays)`, whether a row sees a key.
        arrays: by name, what the functions take in this order, declared with `tiledsched.array`: its shape in the dims of
            attention (batch, heads, kv_heads, seq_q, seq_k, head_dim) or numbers, and its type.
        score_grad: `score_grad(score, b, h, q_idx, kv_idx, *arrays)`, the derivative of `score_mod` in the score, for gradients.
            Needed only where `score_mod` does more than arithmetic whose derivative is known by rule.

    Raises:
        DeclarationError: neither function is given, one cannot be compiled, or takes another number of arrays.
    """
    caller = sys._getframe(1).f_globals.get("__name__", "")
    fields = {**(arrays or {})}  # of which anything but a mapping is an error that says so
    for name, each in fields.items():
        if not isinstance(each, ArrayField):
            raise DeclarationError(
                f'arrays: {name} must be declared, as in ts.array("heads", dtype="float32"), got {each!r}'
            )
        if not name.isidentifier() or name in Attention.array_fields or name in Attention.fields or name.isupper():
            raise DeclarationError(
                f"arrays: the name {name!r} is taken or no name of a variable; call it something else"
            )
    shapes = [(rank_of(each), each.dtype or "dtype") for each in fields.values()]
    found = variant(score_mod, mask_mod, shapes, score_grad)
    declare(found, fields, caller)
    return found


def rank_of(field: ArrayField) -> int:
    """Axes of a declared array."""
    if isinstance(field.shape, str):
        return len(split_shape(field.shape))
    raise DeclarationError('arrays: a shape is text, as in "batch seq_k"')


def variant(
    score_mod: Any, mask_mod: Any, arrays: Sequence[tuple[int, str]], score_grad: Any = None, weight_mod: Any = None
) -> KernelClass:
    """The kernel of an author's functions and arrays of so many axes and such types, which is made at first.

    Raises:
        DeclarationError: as :func:`flex_attention`.
    """
    if score_mod is None and mask_mod is None and weight_mod is None:
        raise DeclarationError("give score_mod or mask_mod; attention without either is tiledsched.sdpa")
    if score_grad is not None and score_mod is None:
        raise DeclarationError("score_grad is the derivative of score_mod; give both, or leave out score_grad")
    functions = (score_mod, mask_mod, score_grad, weight_mod)
    key = (*map(id, functions), *arrays)
    if key in _by_functions:
        return _by_functions[key][0]
    given = {what: each for what, each in zip(MODS, functions, strict=True) if each is not None}
    found = kernel_by_code("flex", given, arrays, make)
    if len(_by_functions) >= MAX_FUNCTIONS:
        _by_functions.clear()
    _by_functions[key] = found, *functions
    return found


_by_functions: dict[Any, tuple[Any, ...]] = {}
"""Kernels by the identity of their functions, which are held so that no other object takes it. Functions that are equal may be
different code: `Scale(1) == Scale(1.0)`, for a dataclass."""


def kernel_by_code(
    kind: str, functions: Mapping[str, Any], arrays: Sequence[tuple[int, str]], make: Callable[..., KernelClass]
) -> KernelClass:
    """The kernel of an author's functions, which is made at first. Functions of equal code have one.

    Args:
        kind: how its name begins.
        functions: by their names in :data:`PARAMETERS`.
        arrays: axes and element type of each array that they take.
        make: makes it: `make(name, identity, functions, arrays)`.

    Raises:
        DeclarationError: a function cannot be compiled, or takes another number of arrays.
    """
    from tiledsched.kernels.attention.torch_mods import in_tile_code

    functions = in_tile_code(functions, [rank for rank, _ in arrays])
    code = {what: code_of(each, what) for what, each in functions.items()}
    for what, each in functions.items():
        check_parameters(each, what, len(arrays))
    identity = stable_id([code, [list(each) for each in arrays]], 8)
    words = "_".join(dict.fromkeys(word_of(each) for what, each in functions.items() if what != "score_grad"))
    name = f"{kind}_{words}_{identity}"
    if (make, name) not in _known:
        try_out(functions, arrays)
        _known[make, name] = make(name, identity, functions, arrays)
    return _known[make, name]


def check_parameters(function: Any, what: str, count: int) -> None:
    """Make sure that a function can be called with so many arrays.

    Raises:
        DeclarationError: it cannot.
    """
    taken = PARAMETERS[what]
    try:
        inspect.signature(function).bind(*taken, *range(count))
    except TypeError as error:
        wanted = ", ".join([*taken, *(f"array{place}" for place in range(count))])
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise DeclarationError(
            f"{what} must take ({wanted}), and {name} does not: {error}; a function is given all arrays of the call, and those "
            "that functions in torch's words read: take each, or end with *arrays"
        ) from error


def reads(function: Any, place: int) -> bool:
    """Whether a function reads its argument at a place, or passes it to one that does."""
    if not isinstance(function, FunctionType):
        function, place = type(function).__call__, place + 1
    if place >= function.__code__.co_argcount:  # one of *arrays
        return True
    own, outer = function.__code__.co_varnames[place], inspect.getclosurevars(function)
    known = {
        name: each for name, each in {**outer.globals, **outer.nonlocals}.items() if isinstance(each, FunctionType)
    }
    nodes = list(ast.walk(ast.parse(source_of(function, "mask_mod"))))
    mentions = {each for each in nodes if isinstance(each, ast.Name) and each.id == own}
    for call in nodes:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in known:
            plain = itertools.takewhile(lambda each: not isinstance(each, ast.Starred), call.args)
            mentions -= {
                each for at, each in enumerate(plain) if each in mentions and not reads(known[call.func.id], at)
            }
    return bool(mentions)


def declare(kernel: KernelClass, fields: Mapping[str, ArrayField], module: str) -> None:
    """Give the arrays of a kernel the names and shapes that its author declares, for inputs that a tune makes."""
    for name, each in fields.items():
        check_array(kernel, f"arrays: {name}", each)
    own = dict(zip(kernel.mod_arrays, fields.values(), strict=True))  # type: ignore[attr-defined]
    kernel.array_fields = {**kernel.array_fields, **own}
    kernel.declared_in = module


def array_fields_of(
    arrays: Sequence[tuple[int, str]],
) -> tuple[tuple[str, ...], dict[str, ArrayField], dict[str, Callable[[Any], int]]]:
    """(names, declarations, derived sizes) of arrays of so many axes and such types, whose sizes nothing says; and the sizes of
    lists of blocks."""
    fields = {
        f"array{place}": ts.array(" ".join(["array_side"] * rank), dtype=dtype)
        for place, (rank, dtype) in enumerate(arrays)
    }
    sizes = {
        "array_side": lambda p: 1,
        "row_blocks": lambda p: -(-p.seq_q // BLOCK),
        "list_length": lambda p: HEAD + -(-p.seq_k // BLOCK),
    }
    return tuple(fields), fields, sizes


def make(name: str, identity: str, functions: Mapping[str, Any], arrays: Sequence[tuple[int, str]]) -> KernelClass:
    """A new kernel; see :func:`variant`."""
    names, fields, sides = array_fields_of(arrays)
    score_mod, mask_mod, score_grad, weight_mod = map(functions.get, MODS)
    per_batch = mask_mod is not None and reads(mask_mod, MASK_PARAMETERS.index("b"))
    per_head = mask_mod is not None and reads(mask_mod, MASK_PARAMETERS.index("h"))
    listed = lambda p: mask_mod is not None and p.seq_q > FEW_ROWS  # noqa: E731
    body = {
        "__module__": __name__,
        "__doc__": f"Attention with {name.removeprefix('flex_').rpartition('_')[0]}.",
        "name": name,
        **tuning_traits(score_mod, mask_mod),
        "derived": Attention.derived
        | sides
        | {
            "has_features": lambda p: True,
            "listed": listed,
            "score_mod": lambda p: score_mod is not None,
            "mask_mod": lambda p: mask_mod is not None,
            "mask_batch": lambda p: p.batch if per_batch else 1,
            "mask_heads": lambda p: p.heads if per_head else 1,
        },
        "constraints": CONSTRAINTS,
        "mods": (score_mod, mask_mod, score_grad),
        "weight_mod": weight_mod,
        "mod_arrays": names,
        "identity": identity,
        "Blocks": ts.array("mask_batch mask_heads row_blocks list_length", dtype="int32", when="listed"),
        "scale_log2": ts.scalar(lambda p: LOG2_E if score_mod else default_scale(p) * LOG2_E, dtype="float32"),
        "cap_scale": ts.scalar(lambda p: default_scale(p) if score_mod else 0.0, dtype="float32"),
        **fields,
        **{each.__name__: staticmethod(each) for each in (canonical, constants, entry, inputs, reference, adversarial)},
        **{each.__name__: classmethod(each) for each in (source_hash, locator, small)},
    }
    return type(name, (Attention,), body)


CONSTRAINTS: Mapping[str, str] = {
    "flat_steps == 0": "a flat loop has no functions of scores",
    "not listed or (tile_m * q_subtiles // (group_rows if pack_gqa else 1) <= 128 and tile_n * kv_subtiles <= 128)": (
        "tiles of rows and steps over keys lie in one block of 128"
    ),
    "not listed or (unroll == 1 and kv_direction == 'forward' and kv_splits == 1 and not qk_ahead)": (
        "steps follow the list of blocks"
    ),
    "not listed or not pack_gqa or mask_heads == 1": "the heads of a tile have one list of blocks",
    "not listed or check_bounds or seq_k % 128 == 0": "a block at the edge has tiles behind the last key",
}


def canonical(values: dict[str, Any]) -> dict[str, Any]:
    """The values that stand for all equivalent ways to state a problem of attention, without features that a function of the
    author's says better.

    Raises:
        ProblemError: one of them is asked for.
    """
    for refused in ("softcap", "window", "window_right", "starts", "packed", "page", "kv8"):
        if values.get(refused):  # gradients do not have all of them
            raise ProblemError(f"{refused} is not combined with score_mod and mask_mod; say it in one of them")
    return problem.canonical(values)


def constants(p: Any, s: Schedule) -> Mapping[str, bool | int]:
    """The compile-time constants, as the kernels name them."""
    score_mod, mask_mod, _ = p.declaration.mods
    size = BLOCK if p.listed else 0
    found = {
        **Attention.constants(p, s),
        "SCORE_MOD": score_mod is not None,
        "MASK_MOD": mask_mod is not None,
        "WEIGHT_MOD": p.declaration.weight_mod is not None,
        "BLOCK_ROWS": size,
        "BLOCK_KEYS": size,
    }
    return found | {
        "EVEN": found["EVEN"] and (not size or p.seq_k % size == 0),
        "LOOP_SPLIT": found["LOOP_SPLIT"]
        and not (size and (p.causal or p.lengths)),  # lists know the author's mask only
    }


def entry(p: Any, s: Schedule) -> Callable[..., None]:
    """The kernel of a problem and schedule."""
    ending = "_share" if combines_later(p, s) else "_split" if splits(p, s) > 1 else "_lse" if p.lse else ""
    given = tuple([each for each in VARIANT_ARRAYS if p.declaration.present(each, p)])
    return entry_of(p.declaration, ending, given, p.wide)


@functools.lru_cache(maxsize=256)
def entry_of(kernel: Any, ending: str, given: tuple[str, ...], wide: bool) -> Callable[..., None]:
    """The kernel function with the functions of an author, from text that cuTile finds where Python keeps the text of modules."""
    from tiledsched.kernels.attention import entries, mods
    from tiledsched.kernels.attention.entries_source import VARIANT, variant_source

    names = {
        **vars(entries),
        "Mods": mods.Mods,
        "SCORE": kernel.mods[0],
        "MASK": kernel.mods[1],
        "WEIGHT": kernel.weight_mod,
    }
    text = variant_source(ending, given, kernel.mod_arrays)
    found = compiled(f"<{kernel.name}{ending} {' '.join(given)}>", text, names, f"{VARIANT}{ending}")
    wider: Callable[..., None] = entries.widened(found) if wide else found
    if wide:
        wider.__annotations__.update(dict.fromkeys(kernel.mod_arrays, WIDE_ARRAY))
    return wider


def source_hash(kernel: Any) -> str:
    """Hash of the source of attention, or of its gradients, and of the author's functions."""
    return stable_id([kernel.__base__.source_hash(), kernel.identity])


def locator(kernel: Any) -> str:
    """`module:name` or `/path/file.py:name`: where another process finds the kernel.

    Raises:
        DeclarationError: no module has it under a name.
    """
    module = sys.modules.get(kernel.declared_in)
    for name, value in vars(module).items() if module else ():
        if value is kernel:
            holder = type(name, (), {"__module__": kernel.declared_in})
            return str(Attention.locator.__func__(holder))  # type: ignore[attr-defined]
    raise DeclarationError(
        f"{kernel.name} has no name in a module; write my_attention = tiledsched.flex_attention(...) in a file, and tune that"
    )


def inputs(xp: Any, rng: Any, p: Any) -> Mapping[str, Any]:
    """Random arrays for the functions of an author, the lists of blocks that follow from them, and where sequences end."""
    drawn_now, read = drawn_arrays(xp, rng, p)
    return {**places(rng, p), **drawn_now, **lists_for(xp, p, read)}


def lists_for(xp: Any, p: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The lists of blocks of a problem by the name of their array, where it has any."""
    return {"Blocks": blocks_of(xp, p, arrays, p.mask_batch, p.mask_heads)} if p.listed else {}


def drawn_arrays(xp: Any, rng: Any, p: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Random arrays for the functions of an author, by name: as they are drawn, and as they are read from memory in float64."""
    specs = [p.declaration.array_spec(name, p, None) for name in p.declaration.mod_arrays]
    found = {each.name: drawn(xp, rng, each, each.shape) for each in specs}
    return found, {
        each.name: to_float(xp, to_storage(xp, found[each.name], each.dtype), each.dtype, "float64") for each in specs
    }


def blocks_of(xp: Any, p: Any, arrays: Mapping[str, Any], batches: int, heads: int) -> Any:
    """The lists of blocks of a problem, for so many sequences and heads, from what the author's function says of each pair."""
    found = xp.empty((batches, heads, p.row_blocks, p.list_length), numpy.int32)
    for b, h in numpy.ndindex(batches, heads):
        for first in range(0, p.seq_q, chunk := -(-rows_at_once(p.seq_k) // BLOCK) * BLOCK):
            visible = mask_of_rows(xp, p, arrays, b, h, first, min(chunk, p.seq_q - first))
            found[b, h, first // BLOCK : (first + chunk) // BLOCK] = list_blocks(xp, visible[None, None])[0, 0]
    return found


def rows_at_once(seq_k: int) -> int:
    """Rows for which a function is evaluated together, so that memory does not grow with the square of the length."""
    return max(1, min(ROWS_PER_CHUNK, PAIRS_AT_ONCE // seq_k))


def mask_of_rows(xp: Any, p: Any, arrays: Mapping[str, Any], b: int, h: int, first: int, count: int) -> Any:
    """`[count, seq_k]`: which keys each row from `first` on sees, as the author's function says."""
    zeros = xp.zeros((count, p.seq_k), numpy.float32)
    return xp.isfinite(changed(xp, p.declaration, zeros, arrays, b, h, first, scored=False))


def changed(
    xp: Any, kernel: Any, scores: Any, arrays: Mapping[str, Any], b: int, h: int, first: int, *, scored: bool = True
) -> Any:
    """Scores `[rows, seq_k]` of a head, from row `first` on, as the functions of a kernel change and hide them; without `scored`
    they are only hidden.
    """
    from tiledsched.kernels.attention.applied import apply_on_gpu, exactly

    score_mod, mask_mod = map(exactly, kernel.mods[:2])
    given = [arrays[name] for name in kernel.mod_arrays]
    if xp is not numpy:
        return apply_on_gpu(xp, kernel, scores, given, b, h, first, scored=scored and score_mod is not None)
    rows, keys = (numpy.arange(size, dtype=numpy.int32) for size in scores.shape)
    places = (b, h, first + rows[:, None], keys[None])
    if score_mod is not None and scored:
        scores = evaluated(score_mod, "score_mod", scores, *places, arrays=given)
    if mask_mod is not None:
        scores = numpy.where(evaluated(mask_mod, "mask_mod", *places, arrays=given), scores, -numpy.inf)
    return scores


def evaluated(function: Any, what: str, *values: Any, arrays: Sequence[Any]) -> Any:
    """What a function of an author's returns for arrays of any size, in NumPy.

    Raises:
        DeclarationError: it fails, returns another shape, or is a mask that is not boolean, or a score that is; the message
            begins with the place.
    """
    from tiledsched.interpreter import InterpreterError, evaluate
    from tiledsched.interpreter.values import OutsideError, UnsupportedOperationError

    written = function if isinstance(function, FunctionType) else type(function).__call__
    try:
        found = evaluate(function, *values, arrays=arrays)
    except (OutsideError, UnsupportedOperationError):
        raise
    except InterpreterError as error:
        place = author_line(error.__cause__ or error) or function_line(written)
        raise DeclarationError(f"{place}: {what}: {str(error).removesuffix(f' ({place})')}") from error
    kinds = {"mask_mod": "booleans, as comparisons do", "score_mod": "scores; give what hides keys as mask_mod"}
    if what in kinds and (found.dtype == bool) == (what == "score_mod"):
        raise DeclarationError(
            f"{function_line(written)}: {what}: {word_of(function)} must return {kinds[what]}, got {found.dtype}"
        )
    return found


def try_out(functions: Mapping[str, Any], arrays: Sequence[tuple[int, str]]) -> None:
    """Evaluate the functions of an author on a few rows and keys and on arrays of zeros, so that an error names the line before
    anything is compiled.

    Raises:
        DeclarationError: as :func:`evaluated`; or a smaller tile makes other values, so that a schedule would decide them.
    """
    from tiledsched.interpreter.launch import element_type
    from tiledsched.interpreter.values import OutsideError, UnsupportedOperationError
    from tiledsched.kernels.attention.applied import strictly

    zeros = [numpy.zeros((1,) * rank, element_type("float16" if dtype == "dtype" else dtype)) for rank, dtype in arrays]
    rows, keys = numpy.arange(4, dtype=numpy.int32)[:, None], numpy.arange(8, dtype=numpy.int32)[None]
    values: dict[str, Any] = {"b": 0, "h": 0} | dict.fromkeys(
        ("score", "acc"), numpy.linspace(-1, 2, 32, dtype=numpy.float32).reshape(4, 8)
    )
    values |= {"q_idx": rows, "kv_idx": keys, "row": rows, "column": keys}
    for what, function in functions.items():
        given = [values[each] for each in PARAMETERS[what]]
        with contextlib.suppress(
            OutsideError, UnsupportedOperationError
        ):  # only a call knows sizes and the compiler's words
            whole = evaluated(strictly(function), what, *given, arrays=zeros)
            corner = [each[:2, :1] if isinstance(each, numpy.ndarray) else each for each in given]
            if not numpy.allclose(
                whole[:2, :1], evaluated(strictly(function), what, *corner, arrays=zeros), equal_nan=True
            ):
                raise DeclarationError(
                    f"{what}: {word_of(function)} returns other values for a part of a tile than for the whole, and a schedule "
                    "chooses the tiles; make each value of its own element, row and column alone, without ct.sum, ct.max and "
                    "others that join elements"
                )


def reference(
    xp: Any, Q: Any, K: Any, V: Any, Sinks: Any, Starts: Any, Lengths: Any, p: Any, **arrays: Any
) -> tuple[Any, Any]:
    """The output and the log-sum-exp of each row in the precision of the inputs, with the author's own functions."""
    out, lse = attention_and_lse(
        xp,
        Q,
        K,
        V,
        dtype=str(Q.dtype),
        sinks=Sinks,
        starts=Starts,
        lengths=Lengths,
        **changed_scores(xp, p, arrays),
        **problem.mask_of(p),
    )
    return out, lse[..., None]


def changed_scores(xp: Any, p: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of attention's reference by which it has scores as the author's functions change and hide them."""
    of_kernel = functools.partial(changed, xp, p.declaration, arrays=arrays)
    return {"modified": of_kernel, "rows_per_chunk": rows_at_once(p.seq_k)}


def adversarial(xp: Any, rng: Any, p: Any, right: Callable[..., Any]) -> Iterator[Case]:
    """Yield attention's own case, with other random arrays."""
    own = random_inputs(p.declaration, xp, rng, p)
    more = {name: own[name] for name in (*p.declaration.mod_arrays, "Blocks") if name in own}
    case = adversarial_case(xp, rng, p, lambda found: right({**found, **more}))
    yield Case(case.kinds, {**case.inputs, **more}, case.expected)


def small(kernel: Any) -> list[Any]:
    """Problems of some blocks that no tile divides, and of so few rows that there are no lists."""
    make = kernel.problem
    return [
        make(seq_q=200, seq_k=300, head_dim=32, heads=2, kv_heads=1, batch=2),
        make(seq_q=150, seq_k=270, head_dim=40, heads=2, dtype="bfloat16", lse=True),
        make(seq_q=50, seq_k=130, head_dim=32, heads=4, kv_heads=2, lse=True),
        make(seq_q=1, seq_k=200, head_dim=64, heads=4, kv_heads=1, batch=2),
    ]


def list_blocks(xp: Any, visible: Any) -> Any:
    """The lists of blocks of a mask `[batches, heads, seq_q, seq_k]`; see :mod:`tiledsched.kernels.attention.mods`."""
    batches, heads, rows, keys = visible.shape
    row_blocks, key_blocks = -(-rows // BLOCK), -(-keys // BLOCK)
    padded = xp.zeros((batches, heads, row_blocks * BLOCK, key_blocks * BLOCK), bool)
    padded[:, :, :rows, :keys] = visible
    pairs = padded.reshape(batches, heads, row_blocks, BLOCK, key_blocks, BLOCK).sum(axis=(3, 5))
    all_pairs = BLOCK * xp.minimum(rows - BLOCK * xp.arange(row_blocks), BLOCK)[:, None]
    lists = ordered_blocks(xp, xp.arange(key_blocks), (pairs > 0) & (pairs < all_pairs), pairs == all_pairs)
    return lists.astype(numpy.int32)


def ordered_blocks(xp: Any, numbers: Any, partial: Any, full: Any) -> Any:
    """Lists of blocks, `[..., blocks of rows, 2 + blocks of keys]`.

    Args:
        xp: numpy, cupy or torch.
        numbers: those of the blocks of keys, in order.
        partial, full: `[..., blocks of rows, blocks of keys]`, whether blocks are seen in part, and whether in full.
    """
    count, in_part, total = len(numbers), partial.sum(-1)[..., None], (partial | full).sum(-1)[..., None]
    # In rising order: those seen in part by number, those not seen, and those seen in full by falling number.
    rank = xp.where(partial, numbers, xp.where(full, 3 * count - numbers, count + numbers))
    is_listed = (numbers < in_part) | (numbers >= count - total + in_part)
    return xp.concatenate([in_part, total, rank.argsort(-1) * is_listed], -1)
