"""What is computed: the attention problem, its arithmetic and its least memory traffic."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from tiledsched.errors import ProblemError

DTYPES = ("float16", "bfloat16")
ALIGNMENTS = ("top_left", "bottom_right")
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
MAX_HEAD_DIM = 256
TOKENS = 16 * 1024
"""Tokens in the default problem: batch * seq_q. The convention of the FlashAttention papers."""
HIDDEN = 2048
"""heads * head_dim in the default problem, from the same place."""
LARGEST_INT32 = 2**31 - 1


def canonical_json(value: Any) -> str:
    """The one JSON text of `value`: sorted keys, no spaces. Ids are hashes of this."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def stable_id(value: Any, length: int = 12) -> str:
    """First `length` hex digits of SHA-256 over the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


@dataclass(frozen=True, kw_only=True, order=True)
class Problem:
    """Scaled dot-product attention of q `[batch, heads, seq_q, head_dim]` with k, v `[batch, kv_heads, seq_k, head_dim]`.

    Causal means query row i sees key columns 0..i (aligned at the top left, as PyTorch's `is_causal`), or, aligned at the
    bottom right, 0..i + seq_k - seq_q (as in FlashAttention since 2.1 and PyTorch's `causal_lower_right`). A row that
    sees no key gives zeros, as FlashAttention does and, for all its warning of NaN, PyTorch 2.13 too; its log-sum-exp is
    minus infinity, so that it weighs nothing when parts are merged.

    Two ways to say one problem become one: value_dim = head_dim is stored as 0, and an alignment that makes no
    difference (no causal mask, or seq_q = seq_k) as top_left.

    Raises:
        ProblemError: a size below 1, a head_dim or value_dim above 256, an unknown dtype or alignment, or heads not a
            multiple of kv_heads.
    """

    seq_q: int
    """Query rows per head."""
    seq_k: int
    """Key and value rows per head."""
    head_dim: int
    """Columns of q, k, v and the output; 1..256."""
    dtype: str = "float16"
    """float16 or bfloat16, of all four arrays."""
    causal: bool = False
    """Whether each row is limited to columns up to its own, counted as `alignment` says."""
    batch: int = 1
    """Independent sequences."""
    heads: int = 1
    """Query heads."""
    kv_heads: int = 1
    """Key/value heads; each serves heads / kv_heads query heads."""
    alignment: str = "top_left"
    """Where the causal diagonal starts (top_left) or ends (bottom_right)."""
    value_dim: int = 0
    """Columns of v and the output, 1..256; 0 where they are head_dim."""
    lse: bool = False
    """Whether each row's log-sum-exp of its scaled scores is returned, too: natural, float32 `[batch, heads, seq_q]`."""

    def __post_init__(self) -> None:
        for name in ("seq_q", "seq_k", "head_dim", "batch", "heads", "kv_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ProblemError(f"{name} must be a positive integer, got {value!r}")
        if self.head_dim > MAX_HEAD_DIM:
            raise ProblemError(f"head_dim must be at most {MAX_HEAD_DIM}, got {self.head_dim}")
        if self.dtype not in DTYPES:
            raise ProblemError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not isinstance(self.causal, bool):
            raise ProblemError(f"causal must be true or false, got {self.causal!r}")
        if self.heads % self.kv_heads:
            raise ProblemError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads}); repeat or drop heads"
            )
        if self.alignment not in ALIGNMENTS:
            raise ProblemError(f"alignment must be one of {', '.join(ALIGNMENTS)}, got {self.alignment!r}")
        whole = isinstance(self.value_dim, int) and not isinstance(self.value_dim, bool)
        if not whole or not 0 <= self.value_dim <= MAX_HEAD_DIM:
            raise ProblemError(f"value_dim must be 0 (as head_dim) to {MAX_HEAD_DIM}, got {self.value_dim!r}")
        if not isinstance(self.lse, bool):
            raise ProblemError(f"lse must be true or false, got {self.lse!r}")
        if self.value_dim == self.head_dim:
            object.__setattr__(self, "value_dim", 0)
        if not self.causal or self.seq_q == self.seq_k:
            object.__setattr__(self, "alignment", "top_left")

    @classmethod
    def standard(
        cls,
        *,
        seq_len: int,
        head_dim: int,
        dtype: str = "float16",
        causal: bool = False,
        batch: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
    ) -> Problem:
        """The problem people mean by a sequence length and a head dimension alone.

        Unless given, batch and heads fill 16k tokens of 2048 hidden columns, the convention of the FlashAttention
        benchmarks (Dao, arXiv:2307.08691, section 4.1), so that every sequence length does comparable work.
        """
        heads = heads if heads is not None else max(1, HIDDEN // head_dim)
        return cls(
            seq_q=seq_len,
            seq_k=seq_len,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
            batch=batch if batch is not None else max(1, TOKENS // seq_len),
            heads=heads,
            kv_heads=kv_heads if kv_heads is not None else heads,
        )

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def value_columns(self) -> int:
        """Columns of v and the output."""
        return self.value_dim or self.head_dim

    @property
    def tile_d(self) -> int:
        """head_dim rounded up to the power of two (at least 16) that the kernel pads to on chip."""
        return padded(self.head_dim)

    @property
    def tile_v(self) -> int:
        """The same of the columns of v."""
        return padded(self.value_columns)

    @property
    def parts_d(self) -> tuple[int, int]:
        """Two powers of two that hold head_dim in fewer columns than `tile_d`; the second is 0 where there are none."""
        return two_parts(self.head_dim)

    @property
    def parts_v(self) -> tuple[int, int]:
        """The same of the columns of v."""
        return two_parts(self.value_columns)

    @property
    def split_d(self) -> int:
        """Columns of `parts_d` together."""
        return sum(self.parts_d)

    @property
    def split_v(self) -> int:
        """Columns of `parts_v` together."""
        return sum(self.parts_v)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of q, k, v and the output."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def wide(self) -> bool:
        """Whether some array has elements that a 32-bit index does not reach."""
        rows = self.batch * max(self.heads * self.seq_q, self.kv_heads * self.seq_k)
        return rows * max(self.head_dim, self.value_columns) > LARGEST_INT32

    @property
    def visible_pairs(self) -> float:
        """Query-key pairs that contribute, per head: seq_q * seq_k, or the area under the causal diagonal."""
        if not self.causal:
            return float(self.seq_q * self.seq_k)
        square = min(self.seq_q, self.seq_k)
        if self.alignment == "bottom_right":
            return square * square / 2 + max(0, self.seq_k - self.seq_q) * self.seq_q
        return square * square / 2 + max(0, self.seq_q - self.seq_k) * self.seq_k

    @property
    def flops(self) -> float:
        """Floating-point operations of the two products; causal counts half, as in FlashAttention's benchmarks."""
        return 2.0 * self.batch * self.heads * self.visible_pairs * (self.head_dim + self.value_columns)

    @property
    def min_bytes(self) -> int:
        """Least device-memory traffic: q, k, v read once and the output (and the log-sum-exp) written once."""
        rows = self.batch * (self.heads * self.seq_q + self.kv_heads * self.seq_k)
        lse = 4 * self.batch * self.heads * self.seq_q if self.lse else 0
        return rows * (self.head_dim + self.value_columns) * self.element_bytes + lse

    def tflops(self, median_us: float) -> float:
        """Rate in TFLOP/s at `median_us` microseconds."""
        return self.flops / median_us / 1e6

    def to_json(self) -> dict[str, Any]:
        """A plain dict; :meth:`from_json` inverts it.

        Fields that came later are left out at their defaults, so that ids stored before there were any stay valid.
        """
        return without_defaults(asdict(self))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Problem:
        """The problem `to_json` wrote.

        Raises:
            ProblemError: a key is missing, unknown or has a wrong value.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ProblemError(f"unknown problem keys {unknown}; known are {sorted(known)}")
        missing = {"seq_q", "seq_k", "head_dim"} - set(data)
        if missing:
            raise ProblemError(f"a problem needs {sorted(missing)}")
        return cls(**data)

    @cached_property
    def id(self) -> str:
        """Stable 12-digit hex id: equal problems have equal ids in every process and version."""
        return stable_id(self.to_json())

    def replace(self, **changes: Any) -> Problem:
        """A copy with `changes` applied."""
        return replace(self, **changes)

    def __str__(self) -> str:
        seq = f"S={self.seq_q}" if self.seq_q == self.seq_k else f"Sq={self.seq_q} Sk={self.seq_k}"
        heads = f"H={self.heads}" if self.heads == self.kv_heads else f"H={self.heads}/{self.kv_heads}"
        columns = f"D={self.head_dim}/{self.value_dim}" if self.value_dim else f"D={self.head_dim}"
        mask = " causal" if self.causal else ""
        mask += " bottom-right" if self.alignment == "bottom_right" else ""
        lse = " +lse" if self.lse else ""
        return f"B={self.batch} {heads} {seq} {columns} {self.dtype}{mask}{lse}"


LATER = {"alignment": "top_left", "value_dim": 0, "lse": False}
"""Fields of a problem that its JSON holds only where they differ from this."""


def without_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """A problem's fields without those of `LATER` that are at their defaults: what its id is the hash of."""
    return {name: value for name, value in values.items() if name not in LATER or value != LATER[name]}


def padded(columns: int) -> int:
    """`columns` rounded up to a power of two, at least 16: the narrowest side of a matrix product."""
    return max(16, 1 << (columns - 1).bit_length())


def two_parts(columns: int) -> tuple[int, int]:
    """The powers of two that hold `columns` with least padding: (64, 32) for 96; (128, 0) where one is as good."""
    first = max(16, 1 << (columns.bit_length() - 1))
    second = padded(columns - first) if columns > first else 0
    return (first, second) if first + second < padded(columns) else (padded(columns), 0)
