"""Trains a GPT of 124M parameters under several attentions in turn: `python -m docs.studies.gpt --csv FILE --losses FILE`.

The model has GPT-2's sizes (12 layers of 12 heads, 768 columns, 1,024 tokens, a vocabulary of 50,304) and random weights.
Its data are made from a seed, see :func:`tokens`. Every method starts from the same weights, sees the same tokens in the
same order and takes the same steps of AdamW in bf16 autocast; only the attention differs. All methods live in one
process and take turns, a block of steps each, so that their times can be compared.

How far runs with torch's own attentions are from each other in the loss says what rounding alone does. `ours-deterministic`
runs under `torch.use_deterministic_algorithms`, twice; both runs must end with the same bits.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiledsched as ts
from docs.studies.flags import count, flag, parser_with, positive, words
from tiledsched.core.extras import package_version
from tiledsched.core.files import csv_text, write_whole
from tiledsched.measure.lock import holding_current_gpu
from tiledsched.ops import backward, plans
from tiledsched.report.document import Paragraph, Table, to_markdown

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q, k, v `[batch, heads, tokens, head_dim]`."""
BASE = "cudnn"
"""The method that the others are compared with."""
LAST = 50
"""Steps at the end over which losses are averaged."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model and of its data."""

    layers: int = 12
    """Transformer blocks."""
    heads: int = 12
    """Heads of each."""
    width: int = 768
    """Columns between layers."""
    context: int = 1024
    """Tokens of a sequence."""
    vocabulary: int = 50304
    """Number of tokens."""


SHAPES = {"124M": Shape(), "tiny": Shape(layers=2, heads=2, width=64, context=64, vocabulary=512)}


class Block(nn.Module):
    """One layer: attention, then a perceptron, each after a normalisation and added to what came in."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = shape.heads, attend
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv, self.project = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, width]`, as `x`."""
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        x = x + self.project(self.attend(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return x


class GPT(nn.Module):
    """A decoder of GPT-2's kind; the embedding of tokens is also the last layer's weight."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.token, self.place = (nn.Embedding(shape.vocabulary, shape.width), nn.Embedding(shape.context, shape.width))
        self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                last = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.layers) if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, given: Tensor, wanted: Tensor) -> Tensor:
        """The mean cross entropy of the tokens `wanted` after those `given`, both `[batch, tokens]`."""
        x = self.token(given) + self.place.weight[: given.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.token.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())


def tokens(shape: Shape, batch: int, steps: int, seed: int = 0) -> Tensor:
    """`[steps, batch, context + 1]`: text that can be learnt, made from a seed on the CPU.

    The first half of each sequence is a walk: each token is one of the 4 successors, all equally likely, that the token
    before has. Only the first 1,024 tokens of the vocabulary occur (or all, if there are fewer), and their successors are
    drawn once. The second half of a sequence repeats the first. The least possible loss is log 4 = 1.39 in the first half,
    which needs no attention, and 0 in the second, which only attention over half a sequence gives.
    """
    generator = torch.Generator().manual_seed(seed)
    kinds, half = min(1024, shape.vocabulary), (shape.context + 1) // 2
    successors = torch.randint(kinds, (kinds, 4), generator=generator)
    sequences = steps * batch
    walk = torch.empty(sequences, shape.context + 1, dtype=torch.long)
    walk[:, 0] = torch.randint(kinds, (sequences,), generator=generator)
    turns = torch.randint(4, (sequences, half), generator=generator)
    for place in range(1, half):
        walk[:, place] = successors[walk[:, place - 1], turns[:, place]]
    for place in range(half, shape.context + 1):
        walk[:, place] = walk[:, place - half]
    return walk.view(steps, batch, -1)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of tiledsched."""
    return ts.sdpa(q, k, v, causal=True)


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of torch, by the backend that is chosen around the step."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def flash_4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of FlashAttention-4."""
    from flash_attn.cute import flash_attn_func

    made = flash_attn_func(*(each.transpose(1, 2) for each in (q, k, v)), causal=True)
    return (made[0] if isinstance(made, tuple) else made).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class Method:
    """An attention, and how the model around it runs."""

    attend: Attend
    """Computes it."""
    backend: SDPBackend | None = None
    """The backend of torch's attention; None for its own choice."""
    compiled: str | None = None
    """The mode of `torch.compile` for the model; None if it is not compiled."""
    deterministic: bool = False
    """Whether it runs under `torch.use_deterministic_algorithms`."""


METHODS = {
    "ours": Method(attend=ours),
    BASE: Method(attend=torchs, backend=SDPBackend.CUDNN_ATTENTION),
    "flash": Method(attend=torchs, backend=SDPBackend.FLASH_ATTENTION),
    "flash-4": Method(attend=flash_4),
    "ours-compiled": Method(attend=ours, compiled="default"),
    f"{BASE}-compiled": Method(attend=torchs, backend=SDPBackend.CUDNN_ATTENTION, compiled="default"),
    "ours-graphs": Method(attend=ours, compiled="reduce-overhead"),
    f"{BASE}-graphs": Method(attend=torchs, backend=SDPBackend.CUDNN_ATTENTION, compiled="reduce-overhead"),
    "ours-deterministic": Method(attend=ours, deterministic=True),
    "ours-deterministic-again": Method(attend=ours, deterministic=True),
}
"""All methods: tiledsched, torch's attention by its backends cuDNN and flash, and FlashAttention-4."""
TORCHS = (BASE, "flash", f"{BASE}-compiled", f"{BASE}-graphs")
"""Runs of torch alone, whose distances from each other are the noise of a run: only their rounding differs."""


@dataclass(kw_only=True)
class Run:
    """A model in training."""

    name: str
    """A key of :data:`METHODS`."""
    method: Method
    """What it stands for."""
    model: nn.Module
    """The model."""
    step: Callable[[Tensor, Tensor], Tensor]
    """The model, or what `torch.compile` made of it."""
    optimizer: torch.optim.Optimizer
    """AdamW over its parameters."""
    losses: list[Tensor] = field(default_factory=list)
    """The loss of each step."""
    block_ms: list[float] = field(default_factory=list)
    """The mean time of a step in each block."""


def start(name: str, method: Method, shape: Shape, device: str, seed: int) -> Run:
    """A model with fresh weights, which depend on the seed only."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = GPT(shape, method.attend)
    decayed = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device != "cpu")
    step = torch.compile(model, mode=method.compiled) if method.compiled else model
    return Run(name=name, method=method, model=model, step=step, optimizer=optimizer)


def rate(step: int, steps: int, peak: float = 3e-4, warmup: int = 100) -> float:
    """The learning rate: rising to the peak in `warmup` steps, then falling to a tenth of it along a cosine."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def take_steps(run: Run, data: Tensor, first: int, steps: int, device: str) -> None:
    """Train on `data`, `[steps of this block, batch, context + 1]`, from step `first` of `steps` on."""
    with ExitStack() as block:
        if run.method.backend is not None:
            block.enter_context(sdpa_kernel(run.method.backend))
        torch.use_deterministic_algorithms(run.method.deterministic)
        block.callback(torch.use_deterministic_algorithms, False)
        for number, batch in enumerate(data, first):
            for group in run.optimizer.param_groups:
                group["lr"] = rate(number, steps)
            with torch.autocast(device, torch.bfloat16):
                loss = run.step(batch[:, :-1], batch[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)
            run.losses.append(loss.detach().clone())  # a CUDA graph writes the next loss into the same memory


def take_turns(
    runs: Sequence[Run], data: Tensor, block: int, device: str, left: Callable[[], bool] = lambda: True
) -> int:
    """Train all runs, a block of steps each in turn, and return how many steps each of them took.

    Args:
        runs: what is trained.
        data: `[steps, batch, context + 1]` on the device.
        block: steps of a block.
        device: cuda or cpu.
        left: whether there is time for another round of blocks.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for first in range(0, len(data), block):
        if not left():
            return first
        for run in runs:
            part = data[first : first + block]
            wait()
            begun = time.perf_counter()
            take_steps(run, part, first, len(data), device)
            wait()
            run.block_ms.append(1e3 * (time.perf_counter() - begun) / len(part))
    return len(data)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method."""

    method: str
    """A key of :data:`METHODS`."""
    shape: str
    """A key of :data:`SHAPES`."""
    batch: int
    """Sequences of a step."""
    steps: int
    """Steps taken."""
    first_loss: float
    """Loss of the first step."""
    last_loss: float
    """Mean loss of the last :data:`LAST` steps."""
    distance: float
    """Mean over all steps of the distance of the loss from that of the method compared with."""
    step_ms: float
    """Median over the blocks, without the first, of the mean time of a step, in milliseconds."""
    low_ms: float
    """Shortest of these times."""
    high_ms: float
    """Longest of them."""
    ratio: float
    """Median over the blocks of the base's time over this method's, in the same round of blocks."""
    device: str
    """Name of the GPU."""
    versions: str
    """Versions of what decides the times."""
    date: str
    """Date of the run."""


def summarise(runs: Sequence[Run], shape: str, batch: int, device: str) -> list[Row]:
    """A row for each run. The first block, in which programs are compiled, counts for no time."""
    curves = {run.name: torch.stack(run.losses).double().cpu() for run in runs}
    named = {run.name: run for run in runs}
    eager = named.get(BASE, runs[0])
    rows = []
    for run in runs:
        # A compiled model is compared with torch's model that is compiled in the same way.
        base = named.get(f"{BASE}-{run.name.partition('-')[2]}", eager) if run.method.compiled else eager
        times, others = (each.block_ms[1:] or each.block_ms for each in (run, base))
        curve = curves[run.name]
        rows.append(
            Row(
                method=run.name,
                shape=shape,
                batch=batch,
                steps=len(curve),
                first_loss=float(curve[0]),
                last_loss=float(curve[-LAST:].mean()),
                distance=float((curve - curves[eager.name]).abs().mean()),
                step_ms=statistics.median(times),
                low_ms=min(times),
                high_ms=max(times),
                ratio=statistics.median(theirs / mine for theirs, mine in zip(others, times, strict=True)),
                device=torch.cuda.get_device_name() if device == "cuda" else "CPU",
                versions=f"tiledsched {ts.__version__}, torch {torch.__version__}, "
                f"flash-attn-4 {package_version('flash-attn-4') or 'missing'}",
                date=date.today().isoformat(),
            )
        )
    return rows


def same_bits(runs: Sequence[Run]) -> bool | None:
    """Whether the deterministic runs have the same losses and weights to the bit; None where there are fewer than two."""
    found = [run for run in runs if run.method.deterministic]
    if len(found) < 2:
        return None
    first, second = ([*run.losses, *run.model.parameters()] for run in found[:2])
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def noise(runs: Sequence[Run]) -> tuple[float, float]:
    """What rounding alone does: the largest distance of any two runs of torch alone, as in `Row.distance` and of the
    mean losses of the last steps. Zeros where there is only one."""
    curves = [torch.stack(run.losses).double().cpu() for run in runs if run.name in TORCHS]
    pairs = list(itertools.combinations(curves, 2))
    apart = max((float((one - other).abs().mean()) for one, other in pairs), default=0.0)
    ends = max((abs(float(one[-LAST:].mean() - other[-LAST:].mean())) for one, other in pairs), default=0.0)
    return apart, ends


def to_text(rows: Sequence[Row], distances: tuple[float, float], same: bool | None) -> str:
    """The summary as Markdown."""
    head = ("attention", "step, ms", "lowest to highest", "cuDNN's time over it", "last loss", "distance")
    lines = [
        (
            row.method,
            f"{row.step_ms:.2f}",
            f"{row.low_ms:.2f} to {row.high_ms:.2f}",
            f"{row.ratio:.3f}x",
            f"{row.last_loss:.4f}",
            f"{row.distance:.5f}",
        )
        for row in rows
    ]
    told = [
        f"{rows[0].shape}, {rows[0].steps} steps of {rows[0].batch} sequences; loss of the first step "
        f"{rows[0].first_loss:.4f}. Last loss: mean of the last {LAST} steps. Distance: mean distance from the loss with cuDNN.",
        f"runs of torch alone are up to {distances[0]:.5f} apart, and {distances[1]:.5f} in the last loss.",
    ]
    if same is not None:
        told.append(f"The two deterministic runs {'have the same bits' if same else 'DIFFER'}.")
    told.append(f"{rows[0].device}; {rows[0].versions}; {rows[0].date}")
    return to_markdown([Table(head=head, rows=lines), *(Paragraph(text=text) for text in told)])


def served() -> list[str]:
    """What tiledsched served in this process, a line for each problem."""
    found = [each for cache in (plans.cache, backward.cache) for each in cache.ready.values()]
    return sorted(
        {
            f"{each.problem.kernel} {each.problem}: {each.served.schedule.short()} ({each.served.provenance})"
            for each in found
        }
    )


def losses_csv(runs: Sequence[Run]) -> str:
    """The loss of every step, a column for each method."""
    curves = {run.name: torch.stack(run.losses).tolist() for run in runs}
    steps = range(len(next(iter(curves.values()))))
    return csv_text({"step": step, **{name: f"{curve[step]:.5f}" for name, curve in curves.items()}} for step in steps)


def _parser() -> argparse.ArgumentParser:
    parser = parser_with(
        flag("--shape", choices=tuple(SHAPES), default="124M"),
        flag(
            "--methods",
            type=words(tuple(METHODS)),
            default=list(METHODS),
            metavar="NAMES",
            help=f"of {', '.join(METHODS)}",
        ),
        *(
            flag(name, type=positive, default=default, metavar="N", help=f"{text}; default: {default}")
            for name, default, text in (
                ("--steps", 300, "steps of training"),
                ("--batch", 8, "sequences of a step"),
                ("--block", 20, "steps that a method takes in its turn"),
            )
        ),
        flag("--seed", type=count, default=0, metavar="N", help="of weights and data; default: 0"),
        flag("--device", choices=("cuda", "cpu"), default="cuda"),
        flag("--budget", type=float, metavar="SECONDS", help="start no more blocks after this long"),
        flag("--warm", action="store_true", help="take one step of each method, which fills compilers' caches"),
        flag("--csv", metavar="FILE", help="where to write a row for each method"),
        flag("--losses", metavar="FILE", help="where to write the loss of every step"),
        description="Train a GPT under several attentions, which take turns.",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, train, and print."""
    begun = time.monotonic()
    options = _parser().parse_args(arguments)
    shape = SHAPES[options.shape]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    if options.device == "cuda":
        ts.configure(compile="wait", fallback="error", rivals="record")  # our kernels alone, from the first call on
    data = tokens(shape, options.batch, options.steps, options.seed).to(options.device)
    runs = [start(name, METHODS[name], shape, options.device, options.seed) for name in options.methods]

    def left() -> bool:
        return options.budget is None or time.monotonic() < begun + options.budget

    if options.warm:
        take_turns(runs, data[:1], 1, options.device)
        return 0
    with holding_current_gpu() if options.device == "cuda" else nullcontext():
        take_turns(runs, data, options.block, options.device, left)
    rows = summarise(runs, options.shape, options.batch, options.device)
    if options.csv:
        write_whole(Path(options.csv), csv_text(map(asdict, rows)))
    if options.losses:
        write_whole(Path(options.losses), losses_csv(runs))
    print(to_text(rows, noise(runs), same_bits(runs)))
    print("\n".join(["served:", *(f"  {each}" for each in served())]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
