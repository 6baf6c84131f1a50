"""`block_mask`: which blocks of 128 query rows and 128 keys a mask shows, found on the GPU, for `flex` to visit only these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

from tiledsched.core.arrays import strides_of
from tiledsched.core.cases import call_reference
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.core.fields import ALSO_CALLED
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.kernels.attention.lists import lists_kernel
from tiledsched.kernels.attention.torch_mods import tile_mods
from tiledsched.kernels.attention.variants import BLOCK, HEAD, ordered_blocks, variant
from tiledsched.kernels.attention_backward import masks
from tiledsched.ops.arguments import check_tensors
from tiledsched.serve import process
from tiledsched.serve.chain import Served
from tiledsched.serve.execute import is_plain_call, is_traced, launch_first, launch_plan
from tiledsched.serve.op import define, on_host
from tiledsched.serve.plan import Plan, choose, make_plan
from tiledsched.serve.plan_cache import PlanCache, are_ordinary, call_key
from tiledsched.serve.schema import Output

PICTURE = 64
"""Most characters of a line of a picture."""
MARKS = (".", "+", "#")
"""What a picture shows for blocks that no row sees, that some rows see or in part, and that all rows see in full."""
cache: PlanCache[Plan] = PlanCache(call_key)
"""Plans of the kernels that fill lists."""
found: PlanCache[Any] = PlanCache(call_key)
"""Block masks of functions that take no arrays, by function, sizes, device and stream."""


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of keys each block of query rows sees, of a mask function: what :func:`block_mask` returns.

    `print(mask)` draws it: a line for each 128 rows and a character for each 128 keys. It does so from the values on the GPU, and
    waits for them.

    Raises:
        ProblemError: lists of another shape or type than these sizes need.
    """

    lists: Tensor = field(repr=False)
    """`[1 or batch, 1 or heads, row blocks, 2 + key blocks]` int32, contiguous. Of each row block: how many key blocks are
    seen in part, and how many in part or in full; then, from the front, the numbers of those seen in part and, from the back, of
    those that every row sees in full. What lies between is 0."""
    mask_mod: Callable[..., Any]
    """`mask_mod(b, h, q_idx, kv_idx, *arrays)`, whether a row sees a key. It decides inside of blocks seen in part, and wherever
    there are at most 64 rows; the lists must say the same."""
    rows: int
    """Number of query rows, seq_q."""
    keys: int
    """Number of keys, seq_k."""
    of: tuple[int | None, int | None] = (None, None)
    """The numbers of sequences and of heads that it was made for; None where the mask is the same for any number."""
    key: tuple[Any, ...] = field(init=False, repr=False)
    """What the plan of a call depends on."""

    def __post_init__(self) -> None:
        wanted = (-(-self.rows // BLOCK), HEAD + -(-self.keys // BLOCK))
        lists = self.lists
        if lists.dtype != torch.int32 or lists.ndim != 4 or lists.shape[2:] != wanted or not lists.is_contiguous():
            raise ProblemError(
                f"lists must be a contiguous int32 tensor [1 or batch, 1 or heads, {wanted[0]}, {wanted[1]}] for {self.rows} "
                f"rows and {self.keys} keys, got {lists.dtype} {tuple(lists.shape)}"
            )
        key = (id(self.mask_mod), self.rows, self.keys, *lists.shape[:2], lists.device)
        object.__setattr__(self, "key", key)

    @classmethod
    def from_blocks(
        cls, mask_mod: Callable[..., Any], rows: int, keys: int, seen: Tensor, full: Tensor | None = None
    ) -> BlockMask:
        """The block mask of a given pattern of blocks.

        Args:
            mask_mod: the mask function that the pattern is of, as for :func:`block_mask`.
            rows, keys: seq_q and seq_k.
            seen: `[1 or batch, 1 or heads, row blocks, key blocks]` boolean: the blocks in which some row sees a key.
            full: the same shape: those in which every row sees every key, so that `mask_mod` need not be computed there; none
                unless given. A last block of fewer than 128 keys is never taken as full.

        Raises:
            ProblemError: the patterns are no boolean tensors, or of other shapes than these sizes need.
        """
        full = torch.zeros_like(seen) if full is None else full
        if seen.dtype != torch.bool or full.dtype != torch.bool or seen.shape != full.shape:
            raise ProblemError(
                f"seen and full must be boolean tensors of one shape, got {seen.dtype} {tuple(seen.shape)} and {full.dtype} "
                f"{tuple(full.shape)}"
            )
        numbers = torch.arange(seen.shape[-1], device=seen.device)
        full = full & ((numbers + 1) * BLOCK <= keys)
        return cls(ordered_blocks(torch, numbers, seen & ~full, full).to(torch.int32), mask_mod, rows, keys)

    def states(self) -> Tensor:
        """`[1 or batch, 1 or heads, row blocks, key blocks]` uint8 on the CPU: 0 for blocks that no row sees, 1 for those seen in
        part, 2 for those that every row sees in full. It waits for the GPU."""
        lists = self.lists.cpu().long()
        partial, total, numbers = lists[..., :1], lists[..., 1:HEAD], lists[..., HEAD:]
        count = numbers.shape[-1]
        places = torch.arange(count)
        values = torch.where(places >= count - (total - partial), 2, (places < partial).long())
        return torch.zeros_like(numbers).scatter_reduce(-1, numbers, values, "amax").to(torch.uint8)

    def __str__(self) -> str:
        states = self.states()
        batches, heads, rows, columns = states.shape
        step = -(-max(rows, columns) // PICTURE)
        lines = [
            "".join(_mark(states[0, 0, i : i + step, j : j + step]) for j in range(0, columns, step))
            for i in range(0, rows, step)
        ]
        which = f", the first of {batches * heads} masks" if batches * heads > 1 else ""
        shares = [100 * int((states == state).sum()) / max(1, states.numel()) for state in (2, 1, 0)]
        return "\n".join(
            [
                f"{self.rows} rows x {self.keys} keys in blocks of {BLOCK}: {shares[0]:.0f}% seen in full ({MARKS[2]}),",
                f"{shares[1]:.0f}% in part ({MARKS[1]}), {shares[2]:.0f}% not at all ({MARKS[0]}){which}",
                *lines,
            ]
        )


def _mark(part: Tensor) -> str:
    """The character for some blocks."""
    least, most = int(part.min()), int(part.max())
    return MARKS[least if least == most else 1]


def block_mask(mask_mod: Callable[..., Any], q: Tensor, k: Tensor, arrays: tuple[Tensor, ...] = ()) -> BlockMask:
    """Find, on the GPU, which blocks of keys the rows of each block see, for `tiledsched.flex` to skip all others.

    Make it once where several calls have the same mask, as the layers of a model have. `flex` itself does so for a mask without
    arrays, and otherwise in each call.

    Args:
        mask_mod: `mask_mod(b, h, q_idx, kv_idx, *arrays)`, whether a row sees a key; see `tiledsched.flex`.
        q: `[batch, heads, seq_q, head_dim]`, for its sizes and its device; or three axes, as for `flex`.
        k: `[batch, kv_heads, seq_k, head_dim]`, for its sizes.
        arrays: what the function takes, as for `flex`. Nothing is read on the host.

    Raises:
        DeclarationError: the function cannot be compiled.
        ProblemError: arrays that it does not take, or tensors of other shapes.
        UnsupportedError: the GPU has no search space.
    """
    check_tensors(q, k, k)
    if q.ndim == k.ndim == 3:
        q, k = q[None], k[None]
    _, mask, arrays = read_mods(None, mask_mod, arrays, q)
    kernel = variant_named(None, mask, types_of(arrays))
    by_sequence, by_head = tells_apart(kernel)
    sizes = q.shape[0] if by_sequence else None, q.shape[1] if by_head else None
    return BlockMask(find_lists(kernel, q, k, arrays), mask_mod, q.shape[2], k.shape[2], sizes)


def read_arrays(arrays: Any, q: Tensor) -> tuple[Tensor, ...]:
    """The arrays of an author's functions as the kernels take them: of integers of 64 bits, those of 32; their values are not
    read.

    Raises:
        ProblemError: they are no tensors, or on another device than q.
    """
    if not isinstance(arrays, (tuple, list)):
        raise ProblemError(
            f"arrays must be a tuple of tensors in the order in which the functions take them, got {type(arrays).__name__}; "
            "of one tensor write arrays=(ids,)"
        )
    for place, each in enumerate(arrays):
        if not isinstance(each, Tensor) or each.device != q.device:
            got = f"one on {each.device}" if isinstance(each, Tensor) else type(each).__name__
            raise ProblemError(
                f"arrays[{place}] must be a torch.Tensor on q's device, {q.device}, got {got}; move it there, and have the "
                "function capture numbers"
            )
    return tuple([each.to(torch.int32) if each.dtype == torch.int64 else each for each in arrays])


def read_mods(score_mod: Any, mask_mod: Any, arrays: Any, q: Tensor) -> tuple[Any, Any, tuple[Tensor, ...]]:
    """The functions of an author as tile code, and all arrays of the call as the kernels take them, with the tensors behind them
    that functions in torch's words read.

    Raises:
        DeclarationError: a function has no translation to tile code.
        ProblemError: as :func:`read_arrays`.
    """
    arrays = read_arrays(arrays, q)
    if not is_traced():  # torch.compile cannot follow
        score_mod, mask_mod, arrays = tile_mods(score_mod, mask_mod, arrays)
    return score_mod, mask_mod, read_arrays(arrays, q)


def by_name(arrays: Iterable[Any]) -> dict[str, Any]:
    """The arrays of an author's functions by the names that the kernels have for them."""
    return {f"array{place}": each for place, each in enumerate(arrays)}


def types_of(arrays: Sequence[Tensor]) -> tuple[tuple[int, str], ...]:
    """Axes and element type of each array, by the name that kernels have for it."""
    names = [str(each.dtype).removeprefix("torch.") for each in arrays]
    return tuple([(each.ndim, ALSO_CALLED.get(name, name)) for each, name in zip(arrays, names, strict=True)])


def variant_named(score_mod: Any, mask_mod: Any, types: tuple[tuple[int, str], ...], score_grad: Any = None) -> str:
    """The name of the kernel of an author's functions, which is made first where need be.

    Raises:
        DeclarationError: as `tiledsched.flex_attention`.
    """
    return variant(score_mod, mask_mod, types, score_grad).name


# Under torch.compile: called while tracing and not traced.
variant_named._dynamo_marked_constant = True  # type: ignore[attr-defined]


def find_lists(kernel: str, q: Tensor, k: Tensor, arrays: tuple[Tensor, ...]) -> Tensor:
    """The lists of blocks of a kernel of attention for tensors of four axes.

    Those of a function without arrays are made once for each stream, because another would have to wait for them; and not while a
    CUDA graph is captured, whose memory is its own.
    """
    is_plain = not is_traced() and is_plain_call() and are_ordinary((q, k))
    if not is_plain or arrays or q.device.type != process.runtime.device_type or process.runtime.is_capturing():
        return lists_operator(q.detach(), k.detach(), list(arrays), kernel)
    key = (kernel, q.shape, k.shape[2], q.device, process.runtime.current_stream(q.get_device()))
    with torch.inference_mode(False):  # whose tensors no gradient could save
        kept: Tensor = found.find(key, lambda: fill_lists(q, k, [], kernel))
    return kept


def tells_apart(kernel: str) -> tuple[bool, bool]:
    """Whether the mask of a kernel of attention is another one for each sequence, and for each head."""
    derived, two = kernel_named(kernel).derived, SimpleNamespace(batch=2, heads=2)
    return derived["mask_batch"](two) > 1, derived["mask_heads"](two) > 1


tells_apart._dynamo_marked_constant = True  # type: ignore[attr-defined]


def shape_of_lists(kernel: str, q: Any, k: Any) -> tuple[Any, ...]:
    """The shape of the lists of a kernel of attention for tensors of four axes."""
    derived, sizes = kernel_named(kernel).derived, SimpleNamespace(batch=q.shape[0], heads=q.shape[1])
    row_blocks, key_blocks = ((each.shape[2] + BLOCK - 1) // BLOCK for each in (q, k))
    return derived["mask_batch"](sizes), derived["mask_heads"](sizes), row_blocks, HEAD + key_blocks


def fill_lists(q: Tensor, k: Tensor, arrays: Sequence[Tensor], kernel: str) -> Any:
    """The lists of blocks of a kernel of attention: by a launch; of tensors on the CPU, by the reference; of empty ones, zeros.

    Raises:
        UnsupportedError: the GPU has no search space.
        LaunchError: the launch failed, or a CUDA graph is being captured and the program never ran.
    """
    shape = shape_of_lists(kernel, q, k)
    if 0 in (*q.shape, k.shape[2]):
        return q.new_zeros(shape, dtype=torch.int32)
    if q.device.type != process.runtime.device_type:
        problem = _problem(shape, q, k, arrays, kernel)
        made = call_reference(problem.declaration, numpy, problem, by_name(on_host(each, "") for each in arrays))
        return torch.from_numpy(made[0]).to(q.device)
    tensors, key = (q, *arrays), (kernel, shape, *call_key(*arrays), q.shape[2], k.shape[2], q.device)
    ready = cache.ready.get(key)
    if ready is not None:
        return launch_plan(ready, tensors)
    make = lambda served=None: _make_plan(shape, q, k, arrays, kernel, served)  # noqa: E731
    plan = cache.find(key, make)
    if isinstance(plan, str):
        raise UnsupportedError(f"block_mask: {plan}")
    # Only for mask tensors: lists that an author keeps are to name no block in vain.
    stand_in = (lambda plan: _every_block(shape, q)) if kernel_named(kernel).declared_in == masks.__name__ else None
    return launch_first(cache, key, plan, lambda plan: launch_plan(plan, tensors, first=True), make, stand_in)


def _every_block(shape: tuple[int, ...], q: Tensor) -> Tensor:
    """Lists that name every block as seen in part: right for every mask, while what finds the blocks is compiled."""
    blocks = shape[3] - HEAD
    numbers = torch.arange(-HEAD, blocks, dtype=torch.int32, device=q.device)
    return torch.where(numbers < 0, blocks, numbers).expand(shape).contiguous()


def _problem(shape: tuple[int, ...], q: Tensor, k: Tensor, arrays: Sequence[Tensor], kernel: str) -> Problem:
    listing = lists_kernel(kernel_named(kernel).mods[1], types_of(arrays))  # type: ignore[attr-defined]
    return listing.problem(seq_q=q.shape[2], seq_k=k.shape[2], batch=shape[0], heads=shape[1])


def _make_plan(
    shape: tuple[int, ...], q: Tensor, k: Tensor, arrays: Sequence[Tensor], kernel: str, served: Served | None
) -> Plan | str:
    """The plan of the kernel that fills lists, or why it cannot serve these tensors. It is launched with q first, which it does
    not read."""
    problem = _problem(shape, q, k, arrays, kernel)
    decision = choose("block_mask", problem, (q,), None, served)
    if isinstance(decision, str):
        return decision
    inputs = {"": q} | by_name(arrays)
    output = Output(shapes=(shape,), strides=(strides_of(shape, False),), dtype="int32")
    return make_plan(decision, inputs, {"Blocks": output}, {})


_, lists_operator = define(
    "tiledsched::block_lists",
    "(Tensor q, Tensor k, Tensor[] arrays, str kernel) -> Tensor",
    fill_lists,
    lambda q, k, arrays, kernel: q.new_empty(shape_of_lists(kernel, q, k), dtype=torch.int32),
)
