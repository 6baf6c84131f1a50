"""The optional features of attention, in one table: what the operators take, and what both declarations have for it.

A row is an argument of the operators: its name, its type and its default. The notes of its type are the fields of the problem
that say whether a call has the feature, and the array by which the kernels get it. From the table follow the fields, arrays and
constants of the kernels, the parameters of their entries (:mod:`entries_source`) and the schema of the operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_type_hints

import tiledsched.core.fields as ts
from tiledsched.core.problem import Problem

SIZE, FLAG = ts.dim(0, least=0, omit_default=True), ts.flag(omit_default=True)
DTYPES = ("float16", "bfloat16")
ALIGNMENTS = ("top_left", "bottom_right")
EIGHT_BITS = "float8_e4m3fn"
"""The type of keys and values in 8 bits: a sign, 4 bits of exponent, 3 of mantissa, and numbers up to 448."""
KV8_SCALES = ("", "tensor", "head", "page")
"""What keys and values in 8 bits have a scale for; empty for those of the type of the queries. Kernels get the index."""
MAX_HEAD_DIM = 256
SIZES = {
    "seq_q": ts.dim(),
    "seq_k": ts.dim(),
    "head_dim": ts.dim(constant=True, most=MAX_HEAD_DIM),
    "dtype": ts.dtype(*DTYPES),
    "causal": ts.flag(),
    "batch": ts.dim(1),
    "heads": ts.dim(1),
    "kv_heads": ts.dim(1),
    "alignment": ts.choice(*ALIGNMENTS, omit_default=True),
    "value_dim": ts.dim(0, constant=True, least=0, most=MAX_HEAD_DIM, omit_default=True),
}
"""The fields of every problem of attention and of its gradients: sizes, element type and the causal mask."""


class AttentionFields:
    """What the declarations of attention and of its gradients share; each is a :class:`Kernel`, too."""

    locals().update(SIZES)

    label: ClassVar[Mapping[str, str | tuple[str, ...]]] = {
        "S": ("seq_q", "seq_k"),
        "D": "head_dim",
        "B": "batch",
        "H": ("heads", "kv_heads"),
    }
    written: ClassVar[Mapping[str, str | tuple[str, ...]]] = {
        "Sq": "seq_q",
        "Sk": "seq_k",
        "right": "window_right",
        "D": ("head_dim", "value_dim"),
    }
    planning_rivals: ClassVar[tuple[str, ...]] = ("torch_cudnn",)
    compiled_rivals: ClassVar[tuple[str, ...]] = ("flash_attention_4",)


class FeatureArguments(NamedTuple):
    """The optional features of a call, as the operators take them; each at its default where the call does not have it."""

    window: Annotated[int, {"window": SIZE, "window_right": SIZE}] = 0
    """Keys that a row sees up to its own, which is one of them; 0 for all."""
    softcap: Annotated[float, {"softcap": FLAG}] = 0.0
    """Cap of the scaled scores; 0 for none."""
    sinks: Annotated[Any, {"sinks": FLAG, "Sinks": ts.array("heads", when="sinks")}] = None
    """`[heads]`: a logit more in the denominator of each row."""
    key_starts: Annotated[
        Any, {"starts": FLAG, "Starts": ts.array("batch", dtype="int32", when="starts", below="seq_k")}
    ] = None
    """`[batch]`: the first key of each sequence that counts."""
    key_lengths: Annotated[
        Any, {"lengths": FLAG, "Lengths": ts.array("sequences", dtype="int32", when="lengths", below="past_keys")}
    ] = None
    """`[batch]`: the first key of each sequence that does not count any more."""
    cu_seqlens_q: Annotated[Any, {"packed": SIZE, "CuQ": ts.array("offsets", dtype="int32", when="ends_q")}] = None
    """`[sequences + 1]`: where packed sequences begin in q."""
    cu_seqlens_k: Annotated[Any, {"CuK": ts.array("offsets", dtype="int32", when="ends_k")}] = None
    """`[sequences + 1]`: where packed sequences begin in k and v."""
    block_table: Annotated[
        Any, {"page": SIZE, "Table": ts.array("sequences pages", dtype="int32", when="paged", below="key_entries")}
    ] = None
    """`[sequences, pages]`: which entries of k and v hold a sequence's keys."""
    max_seqlen_q: int = 0
    """Rows of the longest packed sequence; 0 where the caller did not say."""
    max_seqlen_k: int = 0
    """Keys of the longest packed sequence; 0 where the caller did not say."""
    window_right: int = 0
    """Keys that a row sees after its own."""
    k_scale: Annotated[
        Any,
        {
            "kv8": ts.choice(*KV8_SCALES, omit_default=True),
            "q8": FLAG,
            "KScale": ts.array("kv_scales", dtype="float32", when="eight_bits"),
        },
    ] = None
    """`[1]`, `[kv_heads]` or `[pages]`: what keys in 8 bits are multiplied with, and queries, too, where these have 8 bits."""
    v_scale: Annotated[Any, {"VScale": ts.array("kv_scales", dtype="float32", when="eight_bits")}] = None
    """Likewise for values."""

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The arguments that are tensors, in the order of :data:`ARRAYS`; None for those that the call does not have."""
        return (*self[2:8], *self[11:13])


_notes = get_type_hints(FeatureArguments, include_extras=True)
_declared = [each for note in _notes.values() for parts in get_args(note)[1:] for each in parts.items()]
_types = {int: "SymInt", float: "float", Any: "Tensor?"}
FIELDS: dict[str, Any] = {name: each for name, each in _declared if not isinstance(each, ts.ArrayField)}
"""The fields of problems that say which features they have."""
ARRAYS: dict[str, Any] = {name: each for name, each in _declared if isinstance(each, ts.ArrayField)}
"""The arrays of features, in the order of the arguments."""
PADDED_ARRAYS = tuple(name for name, each in ARRAYS.items() if each.when in FIELDS)
"""The arrays of kernels with features."""
VARLEN_ARRAYS = tuple(name for name, each in ARRAYS.items() if each.when != "eight_bits")
"""The arrays of kernels of packed sequences and pages; kernels of keys in 8 bits have all."""
VARIANT_ARRAYS = (*PADDED_ARRAYS, "Blocks")
"""The optional arrays of kernels with an author's own functions, but for those that the functions take."""
SCHEMA = ", ".join(
    f"{_types[(get_args(note) or [note])[0]]} {name}={FeatureArguments._field_defaults[name]}"
    for name, note in _notes.items()
)
"""The arguments in their order, as torch writes schemas."""
MASK_PARAMETERS = ("b", "h", "q_idx", "kv_idx")
"""What a function that hides keys is given, before the arrays."""
PARAMETERS = {
    **dict.fromkeys(("score_mod", "score_grad"), ("score", *MASK_PARAMETERS)),
    **dict.fromkeys(("mask_mod", "weight_mod"), MASK_PARAMETERS),
    "epilogue": ("acc", "row", "column"),
}
"""What each function of an author is given; an epilogue is one of a matrix product."""


def feature_constants(p: Problem) -> dict[str, bool]:
    """The compile-time constants that say which features a problem has, as the kernels name them."""
    return {name.upper(): bool(getattr(p, name)) for name in FIELDS}


def feature_words(p: Problem, mark: str, between: str, flag: str) -> str:
    """The features of a problem in words, such as ` window=40 +sinks`: what stands before each, between a name and its number,
    and before the name of a flag.
    """
    found = ""
    for kind in (ts.Dim, ts.Choice, ts.Flag):
        for name, each in FIELDS.items():
            if isinstance(each, kind) and getattr(p, name):
                word = name.removeprefix("window_")
                found += f"{mark}{flag}{name}" if kind is ts.Flag else f"{mark}{word}{between}{getattr(p, name)}"
    return found


def word_of(function: Any) -> str:
    """The name of a function, or of the one that made it, or of the class of an object."""
    return str(getattr(function, "__qualname__", type(function).__name__)).partition(".")[0].strip("_").lower()
