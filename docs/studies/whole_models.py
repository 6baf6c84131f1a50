"""Times whole models under torch's attention and under ours: `python -m docs.studies.whole_models --repeat 5 --csv FILE`.

The models are transformers of three families at their real widths and with fewer layers, made from a configuration with
random weights; nothing is downloaded. One model runs under both implementations, in turn: the prompt (prefill), then greedy
generation (decode). The first pass of each is told by itself, and the rounds after it are interleaved. With `--repeat`, every
run is a process of its own that starts as a user's would, in an empty home.

Compared are, after all times were taken, the logits of the prompt and the tokens generated. A choice between two nearly
equal logits may fall either way with any change of rounding; so generation is also compared step by step, both continuing
torch's tokens, and torch is compared with itself: its fastest backend with its plain one.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from docs.studies.flags import flag, integers, parser_with, positive, words
from tiledsched import configure
from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core.errors import ConfigError, TiledschedError
from tiledsched.core.extras import installing, package_version
from tiledsched.core.files import csv_text, write_whole
from tiledsched.core.processes import child_environment
from tiledsched.measure.lock import holding_current_gpu
from tiledsched.measure.nvml import devices
from tiledsched.ops import fallback
from tiledsched.ops.integrations import transformers as integration
from tiledsched.report.document import Paragraph, Table, to_markdown

METHODS = ("sdpa", integration.NAME)
"""torch's attention through transformers, and ours."""
PHASES = ("prefill", "decode")
COMPARED_BATCH, COMPARED_PROMPT = 2, 1024
"""Sequences and tokens of each prompt that are compared, at most."""
COMMAND = (sys.executable, "-m", "docs.studies.whole_models")
"""The command that starts a fresh process."""
HOMES = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
"""Environment variables that name the folders of a user's files."""
KEPT_ELSEWHERE = (
    "TILEDSCHED_DB",
    "TILEDSCHED_SITE",
    "TILEDSCHED_CACHE",
    "TILEDSCHED_BUNDLE",
    "CUDA_CACHE_PATH",
    "CUDA_TILE_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
)
"""Environment variables that name what earlier processes may have left. A fresh process does not get them."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model."""

    family: str
    """Name of the family in transformers: Llama, Qwen2 or Qwen3."""
    hidden: int
    """Columns between layers."""
    intermediate: int
    """Columns within a layer's MLP."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads."""
    head_dim: int = 128
    """Columns of a head."""
    layers: int = 8
    """Transformer blocks."""
    vocabulary: int = 8192
    """Number of tokens."""

    def __str__(self) -> str:
        return (
            f"{self.family} hidden={self.hidden} layers={self.layers} H={self.heads}/{self.kv_heads} D={self.head_dim}"
        )


MODELS = {
    "llama": ModelShape(family="Llama", hidden=4096, intermediate=14336, heads=32, kv_heads=8),
    "qwen3": ModelShape(family="Qwen3", hidden=4096, intermediate=12288, heads=32, kv_heads=8),
    "qwen2": ModelShape(family="Qwen2", hidden=3584, intermediate=18944, heads=28, kv_heads=4),
}
"""The widths of Llama 3.1 8B, Qwen3 8B and Qwen2.5 7B."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model, implementation and phase in one process."""

    model: str
    """A key of :data:`MODELS`."""
    method: str
    """sdpa or tiledsched."""
    phase: str
    """prefill (the prompt) or decode (one token after the other)."""
    batch: int
    """Sequences."""
    prompt: int
    """Tokens of each prompt."""
    run: int
    """Number of the process, from 1."""
    tokens: int
    """Tokens that the phase works on, over all sequences."""
    median_ms: float
    """Median time of the whole phase, in milliseconds."""
    low_ms: float
    """Shortest time of any round."""
    high_ms: float
    """Longest time of any round."""
    tokens_per_s: float
    """Tokens over the median time."""
    rounds: int
    """Number of rounds."""
    growing: bool
    """Whether prompts grew from round to round, so that no length came twice."""
    first_ms: float
    """Time of the pass before the rounds, which counts in no median; for the first prompt of a run it is the process's
    first call. Ours comes first in odd runs and torch's in even ones, because the first also pays for what both
    need.
    """
    ratio: float | None
    """Median over the rounds of torch's time over ours in the same round; None for torch."""
    ratio_low: float | None
    """Smallest of these ratios."""
    ratio_high: float | None
    """Largest of these ratios."""
    fallbacks: str
    """Calls that tiledsched left to torch, and why; empty where there were none."""
    shape: str
    """Sizes of the model."""
    dtype: str
    """Type of weights and activations."""
    device: str
    """Name of the GPU."""
    versions: str
    """Versions of what decides the times."""
    date: str
    """Date of the run."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far apart the two implementations are on one model."""

    model: str
    """A key of :data:`MODELS`."""
    prompt_error: float
    """Norm of the difference of the prompt's logits over the norm of torch's logits, computed in one pass."""
    step_error: float
    """Norm of that difference for the logits from which tokens are chosen, one step after the other, over their norm."""
    same_tokens: bool
    """Whether greedy generation gave the same tokens."""
    first_difference: int | None
    """First position at which a generated token differs; None where none does."""
    agreement: float
    """Share of steps where both choose the same token after torch's tokens."""
    largest_gap: float
    """Largest difference, in torch's logits, between two tokens chosen differently; 0 where all choices agree."""
    control_first_difference: int | None
    """`first_difference` for torch's math backend instead of our kernel."""
    control_step_error: float
    """`step_error` for torch's math backend."""
    control_agreement: float
    """`agreement` for torch's math backend."""
    control_largest_gap: float
    """`largest_gap` for torch's math backend."""
    fallbacks: tuple[str, ...]
    """Calls that tiledsched left to torch, and why."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts and samples of a run."""

    batch: int = 1
    """Sequences."""
    prompt: int = 1024
    """Tokens of each prompt."""
    new_tokens: int = 32
    """Tokens generated after each prompt."""
    rounds: int = 5
    """Samples of each method and phase."""
    growing: bool = False
    """Whether each round's prompt is longer than the one before and its answer, so that no length comes twice."""
    dtype: torch.dtype = torch.bfloat16
    """Type of weights and activations."""
    device: str = "cuda"
    """Device of the model."""
    seed: int = 0
    """Seed of weights and prompts."""

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt}"

    def prompt_of(self, number: int) -> int:
        """Tokens of each prompt in a round; rounds are numbered from 0."""
        return self.prompt + (self.growing and number) * (self.new_tokens + 1)


def make_model(shape: ModelShape, work: Workload) -> Any:
    """A model of this shape with random weights, made where it runs and in its dtype.

    Raises:
        ConfigError: transformers is missing or does not know the family.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"transformers is not installed; run: {installing('transformers')}") from error
    integration.register()
    try:
        config_class = getattr(transformers, f"{shape.family}Config")
        model_class = getattr(transformers, f"{shape.family}ForCausalLM")
    except AttributeError as error:
        raise ConfigError(f"transformers {transformers.__version__} has no {shape.family}; upgrade it") from error
    config = config_class(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=1 << 17,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(work.seed)
    with torch.device(work.device), _default_dtype(work.dtype):
        return model_class(config).eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_prompt(shape: ModelShape, work: Workload) -> torch.Tensor:
    """Random tokens, `[batch, prompt]`, of the longest prompt."""
    generator, longest = torch.Generator().manual_seed(work.seed), work.prompt_of(work.rounds)
    return torch.randint(1, shape.vocabulary, (work.batch, longest), generator=generator).to(work.device)


def use(model: Any, method: str) -> None:
    """Switch the model to an attention implementation."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(method)
    else:
        model.config._attn_implementation = method


@torch.no_grad()
def prefill(model: Any, prompt: torch.Tensor) -> Any:
    """The model's output for the whole prompt, with its cache; logits of the last position only."""
    return model(input_ids=prompt, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def decode(model: Any, output: Any, count: int, after: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` greedy tokens after a prefill, `[batch, count]`, and the logits they were chosen from, `[count, batch,
    vocabulary]`. With `after`, `[batch, count]`, each step continues those tokens, whatever was chosen.
    """
    tokens, logits = [], []
    for step in range(count):
        logits.append(output.logits[:, -1])
        tokens.append(logits[-1].argmax(-1, keepdim=True))
        fed = tokens[-1] if after is None else after[:, step : step + 1]
        output = model(input_ids=fed, past_key_values=output.past_key_values, use_cache=True)
    return torch.cat(tokens, dim=1), torch.stack(logits)


@torch.no_grad()
def all_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of every position, `[batch, positions, vocabulary]`, float32 on the CPU."""
    return torch.cat([model(input_ids=each[None], use_cache=True).logits.float().cpu() for each in tokens])


@dataclass(frozen=True, kw_only=True)
class _Generation:
    """What one implementation generated."""

    tokens: torch.Tensor
    """By itself, `[batch, count]`."""
    logits: torch.Tensor
    """Of each step after torch's tokens, `[batch, count, vocabulary]`, float32 on the CPU."""

    def first_difference(self, other: _Generation) -> int | None:
        """First position at which a token differs."""
        different = (self.tokens != other.tokens).any(0).nonzero()
        return int(different[0]) if len(different) else None

    def agreement(self, other: _Generation) -> tuple[float, float]:
        """(share of steps where both choose the same, largest gap between the two choices here where they do not)."""
        mine, theirs = self.logits.argmax(-1), other.logits.argmax(-1)
        apart = mine != theirs
        gaps = (self.logits.gather(-1, mine[..., None]) - self.logits.gather(-1, theirs[..., None]))[..., 0][apart]
        return 1.0 - float(apart.float().mean()), float(gaps.max()) if len(gaps) else 0.0


def _generate(model: Any, work: Workload, prompt: torch.Tensor, after: torch.Tensor | None = None) -> _Generation:
    tokens, logits = decode(model, prefill(model, prompt), work.new_tokens)
    if after is not None:
        _, logits = decode(model, prefill(model, prompt), work.new_tokens, after)
    return _Generation(tokens=tokens, logits=logits.transpose(0, 1).float().cpu())


def _relative_error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    return float((logits - reference).norm() / reference.norm())


def compare(model: Any, name: str, work: Workload, prompt: torch.Tensor) -> Comparison:
    """Logits and tokens of both implementations, on the first tokens of the first sequences."""
    prompt = prompt[:COMPARED_BATCH, :COMPARED_PROMPT]
    torchs, our_name = METHODS
    fallback.forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(model, torchs)
        reference = _generate(model, work, prompt)
        with sdpa_kernel(SDPBackend.MATH):
            control = _generate(model, work, prompt, reference.tokens)
        whole = torch.cat([prompt, reference.tokens], dim=1)
        torchs_logits = all_logits(model, whole)
        use(model, our_name)
        ours = _generate(model, work, prompt, reference.tokens)
        prompt_error = _relative_error(all_logits(model, whole), torchs_logits)
    agreement, gap = reference.agreement(ours)
    control_agreement, control_gap = reference.agreement(control)
    first = reference.first_difference(ours)
    return Comparison(
        model=name,
        prompt_error=prompt_error,
        step_error=_relative_error(ours.logits, reference.logits),
        same_tokens=first is None,
        first_difference=first,
        agreement=agreement,
        largest_gap=gap,
        control_first_difference=reference.first_difference(control),
        control_step_error=_relative_error(control.logits, reference.logits),
        control_agreement=control_agreement,
        control_largest_gap=control_gap,
        fallbacks=tuple(_ours(caught)),
    )


def _ours(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """What tiledsched warned of, each message once."""
    return list(dict.fromkeys(str(each.message) for each in caught if "tiledsched" in str(each.message)))


def time_phases(
    model: Any, name: str, shape: ModelShape, work: Workload, prompt: torch.Tensor, run: int = 1
) -> list[Row]:
    """Both phases under both implementations: a first pass, then interleaved rounds, in each of which every method runs once,
    in turning order.
    """
    samples: dict[tuple[str, str], list[float]] = {(each, phase): [] for each in METHODS for phase in PHASES}
    reasons: dict[tuple[str, str], list[str]] = {each: [] for each in samples}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(1 + work.rounds):
            for method in METHODS[:: -1 if (number + run) % 2 else 1]:
                use(model, method)
                if not number:
                    _release()  # what one method has freed is not the other's to take
                given = prompt[:, : work.prompt_of(number)]
                calls: dict[str, Callable[[Any], Any]] = {
                    "prefill": lambda _, given=given: prefill(model, given),  # type: ignore[misc]
                    "decode": lambda output: decode(model, output, work.new_tokens),
                }
                output = None
                for phase, call in calls.items():
                    if not number:
                        fallback.forget_warnings()
                    told = len(caught)
                    output, seconds = _timed(call, output)
                    samples[method, phase].append(seconds)
                    reasons[method, phase] += _ours(caught[told:])
                del output  # before the next prompt fills another cache
    rows = []
    for (method, phase), (first, *seconds_each) in samples.items():
        median_s = statistics.median(seconds_each)
        count = work.batch * (work.prompt if phase == "prefill" else work.new_tokens)
        pairs = zip(samples[METHODS[0], phase][1:], seconds_each, strict=True)
        ratios = [theirs / ours for theirs, ours in pairs] if method != METHODS[0] else []
        rows.append(
            Row(
                model=name,
                method=method,
                phase=phase,
                batch=work.batch,
                prompt=work.prompt,
                run=run,
                tokens=count,
                median_ms=_ms(median_s),
                low_ms=_ms(min(seconds_each)),
                high_ms=_ms(max(seconds_each)),
                tokens_per_s=round(count / median_s, 1),
                rounds=work.rounds,
                growing=work.growing,
                first_ms=_ms(first),
                ratio=round(statistics.median(ratios), 4) if ratios else None,
                ratio_low=round(min(ratios), 4) if ratios else None,
                ratio_high=round(max(ratios), 4) if ratios else None,
                fallbacks="; ".join(dict.fromkeys(reasons[method, phase])),
                shape=str(shape),
                dtype=str(work.dtype).removeprefix("torch."),
                device=_device_name(work.device),
                versions=versions(),
                date=date.today().isoformat(),
            )
        )
    return rows


def _timed(call: Callable[[Any], Any], given: Any) -> tuple[Any, float]:
    _wait()
    started = time.perf_counter()
    result = call(given)
    _wait()
    return result, time.perf_counter() - started


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _release() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device


@functools.cache
def versions() -> str:
    """What decides the times besides the GPU: `torch 2.11.0, transformers 5.17.0, tileiras 13.4.92, driver 580.159.04`."""
    found = {name: package_version(name) for name in ("torch", "transformers", "tiledsched", "cuda-tile")}
    found |= {"tileiras": compiler_at_hand(), "driver": next((each.driver for each in devices()), "")}
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def measure(
    models: Mapping[str, ModelShape],
    works: Sequence[Workload],
    *,
    run: int = 1,
    comparing: bool = True,
    left: Callable[[], bool] = lambda: True,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[Row | Comparison]:
    """Times of all models and workloads, then comparisons: so no time depends on whether there is one.

    Args:
        models: by name.
        works: each is timed with each model; comparisons are as large as they let them be.
        run: which process this is.
        comparing: whether to compare.
        left: whether there is time to start something.
        note: is told what was left out for want of memory.
    """
    for name, shape in models.items():
        if not left():
            return
        model = make_model(shape, works[0])
        for work in works:
            if not left():
                return
            rows = None
            try:
                rows = time_phases(model, name, shape, work, make_prompt(shape, work), run)
            except torch.OutOfMemoryError:
                note(f"{name} {work}: not enough memory")
            yield from rows or ()
        del model
        _release()
    for name, shape in models.items() if comparing else ():
        if not left():
            return
        work = replace(
            works[0],
            batch=min(COMPARED_BATCH, max(each.batch for each in works)),
            prompt=min(COMPARED_PROMPT, max(each.prompt for each in works)),
        )
        yield compare(make_model(shape, work), name, work, make_prompt(shape, work)[:, : work.prompt])
        _release()


class _RunFailedError(TiledschedError):
    """A fresh process ended with an error, which it has printed."""

    def __init__(self, run: int, code: int) -> None:
        super().__init__(f"run {run} ended with {code}")
        self.exit_code = code if code > 0 else 1


def in_fresh_processes(
    runs: int, arguments: Callable[[int], Sequence[str]], *, left: Callable[[], bool] = lambda: True
) -> Iterator[Row | Comparison]:
    """What `runs` processes find, one after the other, each with an empty home folder.

    Raises:
        TiledschedError: one of them failed; it has said why.
    """
    for run in range(1, runs + 1):
        if not left():
            return
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            yield from in_a_process(run, arguments(run), make_home(home), home)


def make_home(folder: str) -> dict[str, str]:
    """Make a user's folders in a folder, and give the environment of a process that has them as its own."""
    environment = {name: value for name, value in child_environment().items() if name not in KEPT_ELSEWHERE}
    environment |= {name: os.path.join(folder, name.lower()) for name in HOMES}
    for name in HOMES:
        os.mkdir(environment[name])
    return environment


def in_a_process(
    run: int, arguments: Sequence[str], environment: Mapping[str, str], folder: str
) -> Iterator[Row | Comparison]:
    """What one process finds with these arguments.

    Raises:
        TiledschedError: it failed; it has said why.
    """
    with subprocess.Popen(
        [*COMMAND, "--run", str(run), *arguments], env=environment, cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield from filter(None, map(_read, process.stdout or ()))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise _RunFailedError(run, process.returncode)


def _read(line: str) -> Row | Comparison | None:
    """A line that another process wrote with `_write`; any other line is printed to stderr, and gives None."""
    for kind in (Row, Comparison):
        if line.startswith(f'{{"{kind.__name__}": '):
            return kind(**json.loads(line)[kind.__name__])
    print(line, end="", file=sys.stderr)
    return None


def _write(found: Row | Comparison) -> None:
    print(json.dumps({type(found).__name__: asdict(found)}), flush=True)


def to_text(rows: Sequence[Row], asked: int) -> str:
    """The summary as Markdown: torch's time over ours for each model, workload and phase, and what else there is to say.

    Args:
        rows: of all runs.
        asked: how many models and workloads there should be, over all runs.
    """
    cells: dict[tuple[str, int, int, str], list[Row]] = {}
    for row in rows:
        if row.ratio is not None:
            cells.setdefault((row.model, row.batch, row.prompt, row.phase), []).append(row)
    if not cells:
        return "nothing was measured"
    middles: dict[str, list[float]] = {phase: [] for phase in PHASES}
    lines = []
    for (model, batch, prompt, phase), found in cells.items():
        middle = statistics.median(row.ratio or 0.0 for row in found)
        low, high = min(row.ratio_low or 0.0 for row in found), max(row.ratio_high or 0.0 for row in found)
        middles[phase].append(middle)
        lines.append((model, str(batch), str(prompt), phase, f"{middle:.3f}x", f"{low:.3f} to {high:.3f}"))
    head = ("model", "batch", "prompt", "phase", "torch's time over ours", "of single rounds")
    measured = len({(row.run, row.model, row.batch, row.prompt) for row in rows})
    told = [
        f"{phase}: {statistics.geometric_mean(found):.3f}x by geometric mean, least {min(found):.3f}x."
        for phase, found in middles.items()
        if found
    ]
    for method in METHODS:
        firsts = {row.run: row.first_ms for row in reversed(rows) if row.method == method}
        told.append(
            f"First prefill of a process with {method}: {min(firsts.values()):.0f} to {max(firsts.values()):.0f} ms."
        )
    told += [f"{asked - measured} of {asked} were not measured."] if measured < asked else []
    told += [f"Calls left to torch: {why}" for why in dict.fromkeys(row.fallbacks for row in rows) if why]
    told.append(f"{rows[0].device}, {rows[0].dtype}, {rows[0].versions}; {rows[0].date}")
    return to_markdown([Table(head=head, rows=lines), *(Paragraph(text=text) for text in told)])


def _parser() -> argparse.ArgumentParser:
    parser = parser_with(
        flag(
            "--model",
            type=words(tuple(MODELS)),
            default=list(MODELS),
            metavar="NAMES",
            help=f"of {', '.join(MODELS)}; default: all",
        ),
        flag("--batch", type=integers, default=[1, 16], metavar="NUMBERS", help="sequences; default: 1,16"),
        flag(
            "--prompt",
            type=integers,
            default=[1024, 8192],
            metavar="NUMBERS",
            help="tokens of each prompt; default: 1024,8192",
        ),
        *(
            flag(name, type=positive, default=default, metavar="N", help=f"{text}; default: {default}")
            for name, default, text in (
                ("--new-tokens", 32, "tokens generated"),
                ("--rounds", 5, "samples of each phase"),
                ("--layers", 8, "transformer blocks"),
            )
        ),
        flag(
            "--growing",
            action="store_true",
            help="make each round's prompt longer than the one before and its answer, as a conversation does: no "
            "length comes twice",
        ),
        flag("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16"),
        flag("--device", default="cuda"),
        flag(
            "--repeat",
            type=positive,
            metavar="N",
            help="run everything in N fresh processes with empty homes; default: once, in this one",
        ),
        flag("--budget", type=float, metavar="SECONDS", help="start nothing more after this long (default: no limit)"),
        flag("--no-compare", action="store_true", help="no comparison of logits and tokens"),
        flag("--csv", metavar="FILE", help="where to write the rows, as they come"),
        flag("--json", action="store_true", help="print rows, ratios and comparisons as JSON"),
        flag("--run", type=positive, help=argparse.SUPPRESS),  # of a fresh process: which it is
        description="Run transformers with random weights under torch's attention and "
        "tiledsched's; compare speed, logits and tokens.",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, and print."""
    options, started = _parser().parse_args(arguments), time.monotonic()
    configure(compile="wait")  # else torch computes the first calls
    models = {name: replace(MODELS[name], layers=options.layers) for name in options.model}
    works = [
        Workload(
            batch=batch,
            prompt=prompt,
            new_tokens=options.new_tokens,
            rounds=options.rounds,
            growing=options.growing,
            dtype=getattr(torch, options.dtype),
            device=options.device,
        )
        for batch in options.batch
        for prompt in options.prompt
    ]

    def seconds_left() -> float:
        return float("inf") if options.budget is None else started + options.budget - time.monotonic()

    def left() -> bool:
        return seconds_left() > 0

    def child(run: int) -> list[str]:
        compares = run == 1 and not options.no_compare
        return [
            "--model",
            ",".join(models),
            "--batch",
            ",".join(map(str, options.batch)),
            "--prompt",
            ",".join(map(str, options.prompt)),
            "--new-tokens",
            str(options.new_tokens),
            "--rounds",
            str(options.rounds),
            "--layers",
            str(options.layers),
            "--dtype",
            options.dtype,
            "--device",
            options.device,
            *([] if options.budget is None else ["--budget", f"{seconds_left():.3f}"]),
            *(["--growing"] if options.growing else []),
            *([] if compares else ["--no-compare"]),
        ]

    rows: list[Row] = []
    comparisons: list[Comparison] = []
    failed = 0
    here = options.device.startswith("cuda") and not options.repeat
    try:
        with holding_current_gpu() if here else nullcontext():
            for found in (
                in_fresh_processes(options.repeat, child, left=left)
                if options.repeat
                else measure(
                    models, works, run=options.run or 1, comparing=not options.no_compare, left=left, note=_note
                )
            ):
                if options.run:
                    _write(found)
                elif isinstance(found, Comparison):
                    comparisons.append(found)
                else:
                    rows.append(found)
                    _note(_progress_line(found))
                    if options.csv:
                        write_whole(options.csv, csv_text(map(asdict, rows)))
    except TiledschedError as error:
        _note(str(error))
        failed = error.exit_code
    if not left() and not options.run:
        _note("the budget is spent")
    if options.run or (failed and not rows):
        return failed
    if options.json:
        print(
            json.dumps(
                {
                    "schema_version": 2,
                    "rows": [asdict(row) for row in rows],
                    "comparisons": [asdict(each) for each in comparisons],
                },
                indent=2,
            )
        )
    else:
        for each in comparisons:
            _print(each)
        print(to_text(rows, len(models) * len(works) * (options.repeat or 1)))
    return failed


def _note(text: str) -> None:
    print(f"whole_models: {text}", file=sys.stderr, flush=True)


def _progress_line(row: Row) -> str:
    ratio = "" if row.ratio is None else f", {row.ratio:.3f}x ({row.ratio_low:.3f} to {row.ratio_high:.3f})"
    return (
        f"run {row.run}: {row.model} {row.batch}x{row.prompt} {row.method} {row.phase}: {row.median_ms:.1f} ms "
        f"(first {row.first_ms:.1f}){ratio}"
    )


def _print(each: Comparison) -> None:
    tokens = "the same tokens" if each.same_tokens else f"tokens differ from position {each.first_difference}"
    control = each.control_first_difference
    for text in (
        f"{each.model}: logits {each.prompt_error:.2e} apart for the prompt, {each.step_error:.2e} step by step; "
        f"{tokens}; after torch's tokens {each.agreement:.1%} of choices agree (largest gap where not: "
        f"{each.largest_gap:.3g})",
        f"  torch's math backend: {each.control_step_error:.2e} apart step by step, "
        f"{'the same tokens' if control is None else f'tokens differ from position {control}'}, "
        f"{each.control_agreement:.1%} agree (largest gap where not: {each.control_largest_gap:.3g})",
        *(f"  {reason}" for reason in each.fallbacks),
    ):
        print(text)


if __name__ == "__main__":
    sys.exit(main())
