"""A whole model under torch's attention and under ours: `python -m tiledsched.studies.whole_models --csv FILE`.

The models are small transformers of two families, made from a configuration with random weights; nothing is downloaded.
One model runs under both implementations, in turn: the prompt (prefill), then greedy generation (decode). Compared are
the logits of the prompt and the tokens generated. A choice between two nearly equal logits may fall either way with any
change of rounding; so generation is also compared step by step, both continuing torch's tokens, and torch is compared with
itself: its fastest backend with its plain one.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tiledsched.attention.integrations import transformers as integration
from tiledsched.errors import ConfigError, TiledschedError
from tiledsched.extras import installing
from tiledsched.files import write_whole
from tiledsched.measure.lock import holding_current_gpu

METHODS = ("sdpa", integration.NAME)
"""torch's attention through transformers, and ours."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of one model."""

    family: str
    """Llama or Qwen3: names of transformers' classes."""
    hidden: int
    """Columns between layers."""
    layers: int
    """Transformer blocks."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads."""
    head_dim: int
    """Columns of a head."""
    vocabulary: int = 8192
    """Tokens there are."""

    def __str__(self) -> str:
        return (
            f"{self.family} hidden={self.hidden} layers={self.layers} H={self.heads}/{self.kv_heads} D={self.head_dim}"
        )


MODELS = {
    "llama": ModelShape(family="Llama", hidden=2048, layers=6, heads=32, kv_heads=8, head_dim=64),
    "qwen": ModelShape(family="Qwen3", hidden=2048, layers=6, heads=16, kv_heads=4, head_dim=128),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model, implementation and phase."""

    model: str
    """Its shape."""
    method: str
    """sdpa or tiledsched."""
    phase: str
    """prefill (the prompt) or decode (one token after the other)."""
    batch: int
    """Sequences."""
    prompt: int
    """Tokens of each prompt."""
    tokens: int
    """Tokens the phase works on, all sequences together."""
    median_ms: float
    """Of the whole phase, milliseconds."""
    tokens_per_s: float
    """Tokens over the median."""
    rounds: int
    """Samples."""
    device: str
    """Where."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far apart the two implementations are on one model."""

    model: str
    """Its shape."""
    prompt_error: float
    """Norm of the difference of the prompt's logits, made in one pass, over the norm of torch's."""
    step_error: float
    """The same of the logits from which tokens are chosen, one step after the other."""
    same_tokens: bool
    """Whether greedy generation gave the same tokens."""
    first_difference: int | None
    """First position at which a generated token differs; None where none does."""
    agreement: float
    """Share of steps where both choose the same token after torch's tokens."""
    largest_gap: float
    """Where they choose differently: how far apart the two logits are for torch, at most; 0 where they never do."""
    control_first_difference: int | None
    """As `first_difference`, of torch's math backend instead of ours."""
    control_step_error: float
    """As `step_error`, of torch's math backend."""
    control_agreement: float
    """As `agreement`, of torch's math backend."""
    control_largest_gap: float
    """As `largest_gap`, of torch's math backend."""
    fallbacks: tuple[str, ...]
    """What tiledsched left to torch, and why."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is run."""

    batch: int = 4
    """Sequences."""
    prompt: int = 4096
    """Tokens of each prompt."""
    new_tokens: int = 64
    """Tokens generated after it."""
    rounds: int = 5
    """Samples of each method and phase."""
    dtype: torch.dtype = torch.float16
    """Of weights and activations."""
    device: str = "cuda"
    """Where."""
    seed: int = 0
    """Of weights and prompts."""


def make_model(shape: ModelShape, work: Workload) -> Any:
    """A model of this shape with random weights.

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
        hidden_size=shape.hidden, intermediate_size=3 * shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocabulary, max_position_embeddings=max(8192, work.prompt + work.new_tokens),
        bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(work.seed)
    return model_class(config).to(device=work.device, dtype=work.dtype).eval()


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
    """  # fmt: skip
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


def compare(model: Any, shape: ModelShape, work: Workload, prompt: torch.Tensor) -> Comparison:
    """Logits and tokens of both implementations."""
    torchs, our_name = METHODS
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
        model=str(shape), prompt_error=prompt_error, step_error=_relative_error(ours.logits, reference.logits),
        same_tokens=first is None, first_difference=first, agreement=agreement, largest_gap=gap,
        control_first_difference=reference.first_difference(control),
        control_step_error=_relative_error(control.logits, reference.logits),
        control_agreement=control_agreement, control_largest_gap=control_gap,
        fallbacks=tuple(dict.fromkeys(str(each.message) for each in caught if "tiledsched" in str(each.message))),
    )  # fmt: skip


def time_phases(model: Any, shape: ModelShape, work: Workload, prompt: torch.Tensor) -> list[Row]:
    """Both phases under both implementations, interleaved: each round runs every method once, in turning order."""
    samples: dict[tuple[str, str], list[float]] = {
        (each, phase): [] for each in METHODS for phase in ("prefill", "decode")
    }
    for number in range(work.rounds):
        for method in METHODS[:: 1 if number % 2 else -1]:
            use(model, method)
            output, seconds = _timed(lambda: prefill(model, prompt))
            samples[method, "prefill"].append(seconds)
            _, seconds = _timed(lambda output=output: decode(model, output, work.new_tokens))  # type: ignore[misc]
            samples[method, "decode"].append(seconds)
    rows = []
    for (method, phase), seconds_each in samples.items():
        median_s = statistics.median(seconds_each)
        count = work.batch * (work.prompt if phase == "prefill" else work.new_tokens)
        rows.append(Row(model=str(shape), method=method, phase=phase, batch=work.batch, prompt=work.prompt, tokens=count,
                        median_ms=round(median_s * 1e3, 3), tokens_per_s=round(count / median_s, 1), rounds=work.rounds,
                        device=_device_name(work.device)))  # fmt: skip
    return rows


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    _wait()
    started = time.perf_counter()
    result = call()
    _wait()
    return result, time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device


def run(shape: ModelShape, work: Workload) -> tuple[list[Row], Comparison]:
    """Everything for one model."""
    model = make_model(shape, work)
    generator = torch.Generator().manual_seed(work.seed)
    prompt = torch.randint(1, shape.vocabulary, (work.batch, work.prompt), generator=generator).to(work.device)
    comparison = compare(model, shape, work, prompt)  # first, so that nothing is compiled while time is taken
    return time_phases(model, shape, work, prompt), comparison


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description="Run small transformers with random weights under torch's attention and "
                                     "tiledsched's; compare logits, tokens and speed.")  # fmt: skip
    parser.add_argument("--model", choices=(*MODELS, "both"), default="both", help="default: both")
    for name, default, text in (("--batch", 4, "sequences"), ("--prompt", 4096, "tokens of each prompt"),
                                ("--new-tokens", 64, "tokens generated"), ("--rounds", 5, "samples of each phase"),
                                ("--layers", None, "transformer blocks (default: 6)")):  # fmt: skip
        parser.add_argument(name, type=int, default=default, help=text)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", metavar="FILE", help="where to write the rows")
    parser.add_argument("--json", action="store_true", help="print rows and comparisons as JSON")
    options = parser.parse_args(arguments)
    work = Workload(batch=options.batch, prompt=options.prompt, new_tokens=options.new_tokens, rounds=options.rounds,
                    dtype=getattr(torch, options.dtype), device=options.device)  # fmt: skip
    rows: list[Row] = []
    comparisons: list[Comparison] = []
    for name in MODELS if options.model == "both" else (options.model,):
        shape = MODELS[name]
        if options.layers:
            shape = ModelShape(**(asdict(shape) | {"layers": options.layers}))
        try:
            with holding_current_gpu() if work.device.startswith("cuda") else nullcontext():
                more, comparison = run(shape, work)
        except TiledschedError as error:
            print(f"model_run: {error}", file=sys.stderr)
            return error.exit_code
        rows += more
        comparisons.append(comparison)
    if options.csv:
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
        write_whole(options.csv, table.getvalue())
    if options.json:
        print(json.dumps({"schema_version": 1, "rows": [asdict(row) for row in rows],
                          "comparisons": [asdict(each) for each in comparisons]}, indent=2))  # fmt: skip
    else:
        _print(rows, comparisons)
    return 0


def _print(rows: Sequence[Row], comparisons: Sequence[Comparison]) -> None:
    for row in rows:
        print(
            f"{row.model:50} {row.method:10} {row.phase:8} {row.median_ms:10.1f} ms {row.tokens_per_s:12.0f} tokens/s"
        )
    for each in comparisons:
        tokens = "the same tokens" if each.same_tokens else f"tokens differ from position {each.first_difference}"
        print(
            f"{each.model}: logits {each.prompt_error:.2e} apart for the prompt, {each.step_error:.2e} step by step; {tokens}"
        )
        print(
            f"  after torch's tokens {each.agreement:.1%} of choices agree (largest gap where not: {each.largest_gap:.3g})"
        )
        control = each.control_first_difference
        print(f"  torch's math backend: {each.control_step_error:.2e} apart step by step, "
              f"{'the same tokens' if control is None else f'tokens differ from position {control}'}, "
              f"{each.control_agreement:.1%} agree (largest gap where not: {each.control_largest_gap:.3g})")  # fmt: skip
        for reason in each.fallbacks:
            print(f"  {reason}")


if __name__ == "__main__":
    sys.exit(main())
