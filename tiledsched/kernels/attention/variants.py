"""An author's own attention as a kernel: attention with functions of scores, found, named, tuned and checked like any other.

The functions are tile code in cuTile's words (see :mod:`tiledsched.kernels.attention.mods`). What they say, and the values that
they take from around them, are part of the kernel's name: other code is another kernel. The arrays that they read are run-time
arguments, whose contents compile nothing anew.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy

import tiledsched.core.fields as ts
from tiledsched.core.blame import author_line, function_line
from tiledsched.core.canonical import stable_id
from tiledsched.core.cases import Case, drawn, random_inputs
from tiledsched.core.errors import DeclarationError, ProblemError
from tiledsched.core.fields import ArrayField
from tiledsched.core.problem import KernelClass
from tiledsched.core.schedule import Schedule
from tiledsched.core.sources import is_library
from tiledsched.core.storage import to_float, to_host, to_storage
from tiledsched.kernels.attention import problem
from tiledsched.kernels.attention.declaration import Attention
from tiledsched.kernels.attention.inputs import adversarial_case, places
from tiledsched.kernels.attention.reference import ROWS_PER_CHUNK, attention_and_lse
from tiledsched.kernels.attention.scales import LOG2_E, default_scale
from tiledsched.kernels.attention.similarity import FEW_ROWS
from tiledsched.kernels.attention.tiling import combines_later, splits

BLOCK = 128
"""Query rows and keys of a block in lists of blocks."""
HEAD = 2
"""Numbers of a list before those of blocks; see :mod:`tiledsched.kernels.attention.mods`."""
PAIRS_AT_ONCE = 1 << 22
"""Most pairs of row and key for which a function is evaluated together; each takes about 50 bytes meanwhile."""
MASK_PARAMETERS = ("b", "h", "q_idx", "kv_idx")
"""What a function that hides keys is given, before the arrays."""
PLAIN = (bool, int, float, str, type(None))
REFUSED = (
    "it must be a function with a name in a file (def {example}(...): ...), a function that such a function returns, or a frozen "
    "dataclass with __call__"
)
_known: dict[str, KernelClass] = {}


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
        if isinstance(value, ModuleType) or is_library(str(getattr(value, "__module__", None) or "")):
            return getattr(value, "__qualname__", getattr(value, "__name__", repr(value)))
        raise DeclarationError(f"{where}: {value!r:.80} cannot be compiled; " + REFUSED.format(example=what))

    def taken_by(each: FunctionType, where: str) -> list[Any]:
        outer = inspect.getclosurevars(inspect.unwrap(each))
        return [
            [name, visit(value, f"{where}, which reads {name}")]
            for name, value in sorted({**outer.globals, **outer.nonlocals}.items())
        ]

    return [type(function).__name__, visit(function, what)]


def source_of(function: FunctionType, what: str) -> str:
    """The text of a function without comments, docstrings and places.

    Raises:
        DeclarationError: its text lies in no file.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError) as error:
        raise DeclarationError(
            f"{what}: the text of {function.__qualname__} lies in no file, and the compiler reads it; put it into one"
        ) from error
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
) -> KernelClass:
    """The kernel of attention with an author's own functions.

    Assign it to a name in a module, and `tiledsched tune module.py:name` tunes it; `tiledsched.flex` with the same functions is
    then served by what was measured.

    Args:
        score_mod: `score_mod(score, b, h, q_idx, kv_idx, *arrays)`, the new score; see `tiledsched.flex`.
        mask_mod: `mask_mod(b, h, q_idx, kv_idx, *arrays)`, whether a row sees a key.
        arrays: by name, what the functions take in this order, declared with `tiledsched.array`: its shape in the dims of
            attention (batch, heads, kv_heads, seq_q, seq_k, head_dim) or numbers, and its type.

    Raises:
        DeclarationError: neither function is given, one cannot be compiled, or takes another number of arrays.
    """
    caller = sys._getframe(1).f_globals.get("__name__", "")
    fields = dict(arrays or {})
    for name, each in fields.items():
        if not isinstance(each, ArrayField):
            raise DeclarationError(
                f'arrays: {name} must be declared, as in ts.array("heads", dtype="float32"), got {each!r}'
            )
        if not name.isidentifier() or name in Attention.array_fields or name in Attention.fields or name.isupper():
            raise DeclarationError(
                f"arrays: the name {name!r} is taken or no name of a variable; call it something else"
            )
    found = variant(score_mod, mask_mod, [(rank_of(each), each.dtype or "dtype") for each in fields.values()])
    declare(found, fields, caller)
    return found


def rank_of(field: ArrayField) -> int:
    """Axes of a declared array."""
    if isinstance(field.shape, str):
        return len(field.shape.split())
    raise DeclarationError('arrays: a shape is text, as in "batch seq_k"')


def variant(score_mod: Any, mask_mod: Any, arrays: Sequence[tuple[int, str]]) -> KernelClass:
    """The kernel of two functions and arrays of so many axes and such types, which is made at first.

    Raises:
        DeclarationError: as :func:`flex_attention`.
    """
    if score_mod is None and mask_mod is None:
        raise DeclarationError("give score_mod or mask_mod; attention without either is tiledsched.sdpa")
    key = (score_mod, mask_mod, *arrays)
    try:
        return _by_functions[key]
    except (KeyError, TypeError):
        pass
    given = {"score_mod": score_mod, "mask_mod": mask_mod}
    code = {what: code_of(each, what) for what, each in given.items() if each is not None}
    for what in code:
        check_parameters(given[what], what, len(arrays))
    identity = stable_id([code, [list(each) for each in arrays]], 8)
    words = "_".join(dict.fromkeys(word_of(given[what]) for what in code))
    name = f"flex_{words}_{identity}"
    if name not in _known:
        _known[name] = make(name, identity, score_mod, mask_mod, arrays)
    found = _known[name]
    _by_functions[key] = found
    return found


_by_functions: dict[Any, KernelClass] = {}


def word_of(function: Any) -> str:
    """The name of a function, or of the class of an object."""
    return str(getattr(function, "__name__", type(function).__name__)).strip("_").lower()


def check_parameters(function: Any, what: str, count: int) -> None:
    """Make sure that a function can be called with so many arrays.

    Raises:
        DeclarationError: it cannot.
    """
    taken = (("score",) if what == "score_mod" else ()) + MASK_PARAMETERS
    try:
        inspect.signature(function).bind(*taken, *range(count))
    except TypeError as error:
        wanted = ", ".join([*taken, *(f"array{place}" for place in range(count))])
        raise DeclarationError(f"{what}: {word_of(function)} must take ({wanted}): {error}") from error


def reads(function: Any, name: str) -> bool:
    """Whether a function reads what it is given in the place of one of :data:`MASK_PARAMETERS`."""
    code = getattr(function, "__code__", None)
    if code is None:  # an object
        return True
    own = code.co_varnames[MASK_PARAMETERS.index(name)]
    tree = ast.parse(source_of(function, "mask_mod"))
    return any(isinstance(each, ast.Name) and each.id == own for each in ast.walk(tree))


def declare(kernel: KernelClass, fields: Mapping[str, ArrayField], module: str) -> None:
    """Give the arrays of a kernel the names and shapes that its author declares, for inputs that a tune makes."""
    own = dict(zip(kernel.mod_arrays, fields.values(), strict=True))  # type: ignore[attr-defined]
    kernel.array_fields = {**kernel.array_fields, **own}
    kernel.declared_in = module  # type: ignore[attr-defined]


def array_fields_of(
    arrays: Sequence[tuple[int, str]],
) -> tuple[tuple[str, ...], dict[str, ArrayField], dict[str, Callable[[Any], int]]]:
    """(names, declarations, derived sizes) of arrays of so many axes and such types, whose sizes nothing says."""
    fields = {
        f"array{place}": ts.array(" ".join(["array_side"] * rank), dtype=dtype)
        for place, (rank, dtype) in enumerate(arrays)
    }
    return tuple(fields), fields, {"array_side": lambda p: 1}


def make(name: str, identity: str, score_mod: Any, mask_mod: Any, arrays: Sequence[tuple[int, str]]) -> KernelClass:
    """A new kernel; see :func:`variant`."""
    names, fields, sides = array_fields_of(arrays)
    per_batch = mask_mod is not None and reads(mask_mod, "b")
    per_head = mask_mod is not None and reads(mask_mod, "h")
    listed = lambda p: mask_mod is not None and p.seq_q > FEW_ROWS  # noqa: E731
    body = {
        "__module__": __name__,
        "__doc__": f"Attention with {name.removeprefix('flex_').rpartition('_')[0]}.",
        "name": name,
        "suites": {},
        "default_suite": "",
        "derived": Attention.derived
        | sides
        | {
            "has_features": lambda p: True,
            "listed": listed,
            "mask_batch": lambda p: p.batch if per_batch else 1,
            "mask_heads": lambda p: p.heads if per_head else 1,
            "row_blocks": lambda p: -(-p.seq_q // BLOCK),
            "list_length": lambda p: HEAD + -(-p.seq_k // BLOCK),
        },
        "constraints": CONSTRAINTS,
        "mods": (score_mod, mask_mod),
        "mod_arrays": names,
        "identity": identity,
        "declared_in": "",
        "Blocks": ts.array("mask_batch mask_heads row_blocks list_length", dtype="int32", when="listed"),
        "scale_log2": ts.scalar(lambda p: LOG2_E if score_mod else default_scale(p) * LOG2_E, dtype="float32"),
        "cap_scale": ts.scalar(lambda p: default_scale(p) if score_mod else 0.0, dtype="float32"),
        **fields,
        **{
            each.__name__: staticmethod(each)
            for each in (canonical, constants, entry, launches, inputs, reference, adversarial)
        },
        **{each.__name__: classmethod(each) for each in (source_hash, locator, small)},
    }
    return type(name, (Attention,), body)


CONSTRAINTS: Mapping[str, str] = {
    "flat_steps == 0": "a flat loop has no functions of scores",
    "not listed or (tile_m * q_subtiles // (group_rows if pack_gqa else 1) <= 128 and tile_n * kv_subtiles <= 128)": (
        "tiles of rows and steps over keys lie in one block of 128"
    ),
    "not listed or (unroll == 1 and kv_direction == 'forward' and kv_splits == 1)": "steps follow the list of blocks",
    "not listed or not pack_gqa or mask_heads == 1": "the heads of a tile have one list of blocks",
    "not listed or check_bounds or seq_k % 128 == 0": "a block at the edge has tiles behind the last key",
}


def canonical(values: dict[str, Any]) -> dict[str, Any]:
    """As for attention. Refused are the features that a function of the author's says better.

    Raises:
        ProblemError: one of them is asked for.
    """
    for refused in ("softcap", "starts", "packed", "page"):
        if values[refused]:
            raise ProblemError(f"{refused} is not combined with score_mod and mask_mod; say it in one of them")
    return problem.canonical(values)


def constants(p: Any, s: Schedule) -> Mapping[str, bool | int]:
    """The compile-time constants, as the kernels name them."""
    score_mod, mask_mod = p.declaration.mods
    size = BLOCK if p.listed else 0
    full = size and not (p.causal or p.lengths)  # whether the list says which steps need no mask
    more = {
        "SCORE_MOD": score_mod is not None,
        "MASK_MOD": mask_mod is not None,
        "BLOCK_ROWS": size,
        "BLOCK_KEYS": size,
    }
    found = {**Attention.constants(p, s), **more}
    return found | {
        "EVEN": found["EVEN"] and (not size or p.seq_k % size == 0),
        "LOOP_SPLIT": found["LOOP_SPLIT"] and bool(mask_mod is None or full),
    }


def entry(p: Any, s: Schedule) -> Callable[..., None]:
    """The kernel of a problem and schedule."""
    ending = "_share" if combines_later(p, s) else "_split" if splits(p, s) > 1 else "_lse" if p.lse else ""
    return entry_of(p.declaration, ending, p.wide)


@functools.lru_cache(maxsize=256)
def entry_of(kernel: Any, ending: str, wide: bool) -> Callable[..., None]:
    """The kernel function with the functions of an author, from text that cuTile finds where Python keeps the text of modules."""
    from tiledsched.kernels.attention import entries, mods
    from tiledsched.kernels.attention.entries_source import VARIANT, compiled, variant_source

    names: dict[str, Any] = {**vars(entries), "Mods": mods.Mods, "SCORE": kernel.mods[0], "MASK": kernel.mods[1]}
    text = variant_source(ending, kernel.mod_arrays)
    found = compiled(f"<{kernel.name}{ending}>", text, names, f"{VARIANT}{ending}")
    wider: Callable[..., None] = entries.widened(found) if wide else found
    return wider


def launches(p: Any, s: Schedule, device: Any) -> list[tuple[Callable[..., None], tuple[int]]]:
    """As for attention, with the kernel of this module first."""
    return [(entry(p, s), Attention.grid(p, s, device)), *Attention.launches(p, s, device)[1:]]


def source_hash(kernel: Any) -> str:
    """Hash of the source of attention and of the author's functions."""
    return stable_id([Attention.source_hash(), kernel.identity])


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
    lists = {"Blocks": blocks_of(xp, p, read, p.mask_batch, p.mask_heads)} if p.listed else {}
    return {**places(rng, p), **drawn_now, **lists}


def drawn_arrays(xp: Any, rng: Any, p: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Random arrays for the functions of an author, by name: as they are drawn, and as they are read from memory in float64."""
    specs = [p.declaration.array_spec(name, p, None) for name in p.declaration.mod_arrays]
    found = {each.name: drawn(xp, rng, each, each.shape) for each in specs}
    return found, {
        each.name: to_float(xp, to_storage(xp, found[each.name], each.dtype), each.dtype, "float64") for each in specs
    }


def blocks_of(xp: Any, p: Any, arrays: Mapping[str, Any], batches: int, heads: int) -> Any:
    """The lists of blocks of a problem, for so many sequences and heads, from what the author's function says of each pair."""
    found = numpy.empty((batches, heads, p.row_blocks, p.list_length), numpy.int32)
    for b, h in numpy.ndindex(batches, heads):
        for first in range(0, p.seq_q, chunk := -(-rows_at_once(p.seq_k) // BLOCK) * BLOCK):
            visible = mask_of_rows(xp, p, arrays, b, h, first, min(chunk, p.seq_q - first))
            part = list_blocks(xp, visible[None, None])
            found[b, h, first // BLOCK : first // BLOCK + part.shape[2]] = part[0, 0]
    return xp.asarray(found)


def rows_at_once(seq_k: int) -> int:
    """Rows for which a function is evaluated together, so that memory does not grow with the square of the length."""
    return max(1, min(ROWS_PER_CHUNK, PAIRS_AT_ONCE // seq_k))


def mask_of_rows(xp: Any, p: Any, arrays: Mapping[str, Any], b: int, h: int, first: int, count: int) -> Any:
    """`[count, seq_k]`: which keys each row from `first` on sees, as the author's function says."""
    if xp is not numpy:
        scores = xp.zeros((count, p.seq_k), numpy.float32)
        applied_on_gpu(xp, p.declaration, scores, arrays, b, h, first, scored=False)
        return xp.isfinite(scores)
    return evaluated(p.declaration, "mask_mod", *indices(p, b, h, first, count), arrays=arrays)


def applied_on_gpu(xp: Any, kernel: Any, scores: Any, arrays: Mapping[str, Any], *place: int, scored: bool) -> Any:
    """Scores of CuPy that :func:`tiledsched.kernels.attention.applied.apply_on_gpu` changed in place."""
    from tiledsched.kernels.attention.applied import apply_on_gpu

    apply_on_gpu(xp.cuda.get_current_stream(), kernel, scores, arrays, *place, scored=scored)
    return scores


def indices(p: Any, b: int, h: int, first: int, count: int) -> tuple[Any, ...]:
    """What every function of an author is given of rows from `first` on."""
    rows = numpy.arange(first, first + count, dtype=numpy.int32)
    return b, h, rows[:, None], numpy.arange(p.seq_k, dtype=numpy.int32)[None]


def evaluated(kernel: Any, what: str, *values: Any, arrays: Mapping[str, Any]) -> Any:
    """What a function of an author's returns for arrays of any size, in NumPy.

    Raises:
        DeclarationError: it fails, or what it returns has another shape; the message begins with its place.
    """
    from tiledsched.interpreter import InterpreterError, evaluate

    function = kernel.mods[what == "mask_mod"]
    try:
        return evaluate(function, *values, arrays=[arrays[name] for name in kernel.mod_arrays])
    except InterpreterError as error:
        written = function if isinstance(function, FunctionType) else type(function).__call__
        place = author_line(error.__cause__ or error) or function_line(written)
        raise DeclarationError(f"{place}: {what}: {str(error).removesuffix(f' ({place})')}") from error


def reference(
    xp: Any, Q: Any, K: Any, V: Any, Sinks: Any, Starts: Any, Lengths: Any, p: Any, **arrays: Any
) -> tuple[Any, Any]:
    """The output and the log-sum-exp of each row in the precision of the inputs, with the author's own functions."""
    kernel, (score_mod, mask_mod) = p.declaration, p.declaration.mods
    last: dict[Any, Any] = {}

    def visible(b: int, h: int, first: int, count: int) -> Any:
        place = b % p.mask_batch, h % p.mask_heads, first
        if place not in last:
            last.clear()
            last[place] = mask_of_rows(xp, p, arrays, b, h, first, count)
        return last[place]

    def modified(scores: Any, b: int, h: int, first: int) -> Any:
        count = len(scores)
        if xp is not numpy:
            return applied_on_gpu(xp, kernel, scores, arrays, b, h, first, scored=score_mod is not None)
        if score_mod is not None:
            scores = evaluated(kernel, "score_mod", scores, *indices(p, b, h, first, count), arrays=arrays)
        return scores if mask_mod is None else xp.where(visible(b, h, first, count), scores, -xp.inf)

    out, lse = attention_and_lse(
        xp,
        Q,
        K,
        V,
        dtype=str(Q.dtype),
        sinks=Sinks,
        starts=Starts,
        lengths=Lengths,
        modified=modified,
        rows_per_chunk=rows_at_once(p.seq_k),
        **problem.mask_of(p),
    )
    return out, lse[..., None]


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
    found = numpy.zeros((batches, heads, row_blocks, HEAD + key_blocks), numpy.int32)
    for b, h, block in numpy.ndindex(batches, heads, row_blocks):
        part = visible[b, h, block * BLOCK : (block + 1) * BLOCK]
        padded = xp.zeros((len(part), key_blocks * BLOCK), bool)  # no block is full that crosses the last key
        padded[:, :keys] = part
        sides = padded.reshape(len(part), key_blocks, BLOCK)
        some, every = to_host(sides.any(axis=(0, 2))), to_host(sides.all(axis=(0, 2)))
        partial, full = (numpy.flatnonzero(each) for each in (some & ~every, every))
        found[b, h, block, :HEAD] = len(partial), len(partial) + len(full)
        found[b, h, block, HEAD : HEAD + len(partial)] = partial
        if len(full):
            found[b, h, block, -len(full) :] = full[::-1]
    return found
