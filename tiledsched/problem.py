"""What is computed: the attention problem, its arithmetic and its least memory traffic."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tiledsched.errors import ProblemError

DTYPES = ("float16", "bfloat16")
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
MAX_HEAD_DIM = 256
TOKENS = 16 * 1024
"""Tokens in the default problem: batch * seq_q. The convention of the FlashAttention papers."""
HIDDEN = 2048
"""heads * head_dim in the default problem, from the same place."""


def canonical_json(value: Any) -> str:
    """The one JSON text of `value`: sorted keys, no spaces. Ids are hashes of this."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def stable_id(value: Any, length: int = 12) -> str:
    """First `length` hex digits of SHA-256 over the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


@dataclass(frozen=True, kw_only=True, order=True)
class Problem:
    """Scaled dot-product attention of q `[batch, heads, seq_q, head_dim]` with k, v `[batch, kv_heads, seq_k, head_dim]`.

    Causal means query row i sees key columns 0..i (aligned at the top left, as in PyTorch).

    Raises:
        ProblemError: a size below 1, a head_dim above 256, an unknown dtype, or heads not a multiple of kv_heads.
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
    """Whether row i is limited to columns 0..i."""
    batch: int = 1
    """Independent sequences."""
    heads: int = 1
    """Query heads."""
    kv_heads: int = 1
    """Key/value heads; each serves heads / kv_heads query heads."""

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
    def tile_d(self) -> int:
        """head_dim rounded up to the power of two (at least 16) that the kernel pads to on chip."""
        return max(16, 1 << (self.head_dim - 1).bit_length())

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of q, k, v and the output."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def visible_pairs(self) -> float:
        """Query-key pairs that contribute, per head: seq_q * seq_k, or the area under the causal diagonal."""
        if not self.causal:
            return float(self.seq_q * self.seq_k)
        square = min(self.seq_q, self.seq_k)
        return square * square / 2 + max(0, self.seq_q - self.seq_k) * self.seq_k

    @property
    def flops(self) -> float:
        """Floating-point operations of the two products; causal counts half, as in FlashAttention's benchmarks."""
        return 4.0 * self.batch * self.heads * self.visible_pairs * self.head_dim

    @property
    def min_bytes(self) -> int:
        """Least device-memory traffic: q, k, v read once and the output written once."""
        query = 2 * self.batch * self.heads * self.seq_q * self.head_dim
        key_value = 2 * self.batch * self.kv_heads * self.seq_k * self.head_dim
        return (query + key_value) * self.element_bytes

    def tflops(self, median_us: float) -> float:
        """Rate in TFLOP/s at `median_us` microseconds."""
        return self.flops / median_us / 1e6

    def to_json(self) -> dict[str, Any]:
        """A plain dict; :meth:`from_json` inverts it."""
        return asdict(self)

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

    @property
    def id(self) -> str:
        """Stable 12-digit hex id: equal problems have equal ids in every process and version."""
        return stable_id(self.to_json())

    def replace(self, **changes: Any) -> Problem:
        """A copy with `changes` applied."""
        return replace(self, **changes)

    def __str__(self) -> str:
        seq = f"S={self.seq_q}" if self.seq_q == self.seq_k else f"Sq={self.seq_q} Sk={self.seq_k}"
        heads = f"H={self.heads}" if self.heads == self.kv_heads else f"H={self.heads}/{self.kv_heads}"
        mask = " causal" if self.causal else ""
        return f"B={self.batch} {heads} {seq} D={self.head_dim} {self.dtype}{mask}"
