"""TileGym's own functions under its `exhaustive_search` and under `tiledsched.remember()`, on a machine with a GPU.

`python -m docs.studies.tilegym theirs FILE [SITE ...]` calls each function once and notes what its searches answered and how long
they took. `ours` does so with our function in place of cuTile's; once more, it tells what a stored answer takes.
`python -m docs.studies.tilegym judge FILE THEIRS OURS` times the two answers of every search in turn, by torch's events. Each
result is compared with torch's. A line of JSON is written for each function as it ends.
"""

from __future__ import annotations

import importlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tiledsched
from docs.studies.flags import flag, parser_with

ROUNDS, NOT_COUNTED = 34, 4
"""Launches of each answer by the judge, and how many of them do not count."""
GAP_S = 0.002
"""From one launch of the judge to the next."""
SPIN_CYCLES = 600_000
"""Cycles that the GPU is kept busy while the host queues a launch."""
FLUSH_BYTES = 128 << 20
Case = tuple[Callable[[], Any], Callable[[], Any]]
"""A call of TileGym's, and the same in torch."""


def _tensors(*shapes: tuple[int, ...], dtype: str = "float16") -> list[Any]:
    import torch

    return [torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for shape in shapes]


def _softmax(module: Any, rows: int, columns: int, **more: Any) -> Case:
    import torch

    (x,) = _tensors((rows, columns))
    return lambda: module.softmax(x, **more), lambda: torch.softmax(x.float(), -1)


def _gated(module: Any, name: str, function: Callable[[Any], Any]) -> Case:
    gate, up = _tensors((2, 1024, 8192), (2, 1024, 8192))
    return lambda: getattr(module, name)(gate, up), lambda: function(gate.float()) * up.float()


def _geglu(module: Any, name: str, approximate: str) -> Case:
    import torch

    return _gated(module, name, partial(torch.nn.functional.gelu, approximate=approximate))


def _swiglu(module: Any) -> Case:
    import torch

    return _gated(module, "swiglu_fg", torch.nn.functional.silu)


def _silu_and_mul(module: Any) -> Case:
    import torch

    (x,) = _tensors((4096, 16384))
    return lambda: module.silu_and_mul(x), lambda: torch.nn.functional.silu(x[:, :8192].float()) * x[:, 8192:].float()


def _rms(x: Any, weight: Any) -> Any:
    import torch

    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight.float()


def _rms_layernorm(module: Any) -> Case:
    x, weight = _tensors((4096, 4096), (4096,))
    return lambda: module.rms_layernorm(x, weight), lambda: _rms(x.float(), weight)


def _add_rms_norm(module: Any) -> Case:
    x, residual, weight = _tensors((4096, 4096), (4096, 4096), (4096,), dtype="bfloat16")
    return lambda: module.fused_add_rms_norm(x, residual, weight), lambda: _rms((x + residual).float(), weight)


def _matmul(module: Any, **more: Any) -> Case:
    a, b = _tensors((4096, 2048), (2048, 4096))
    return lambda: module.matmul(a, b, **more), lambda: a @ b


def _bmm(module: Any) -> Case:
    a, b = _tensors((8, 1024, 1024), (8, 1024, 1024))
    return lambda: module.bmm(a, b), lambda: a @ b


def _group_gemm(module: Any) -> Case:
    import torch

    a = _tensors((512, 1024), (1024, 1024), (256, 1024))
    b = _tensors(*[(1024, 2048)] * 3)
    return (
        lambda: torch.cat(list(module.group_gemm(a, b))),
        lambda: torch.cat([one @ other for one, other in zip(a, b, strict=True)]),
    )


def _rope(module: Any) -> Case:
    """The kernel changes its arguments in place."""
    import torch

    q, k = _tensors((2, 32, 2048, 128), (2, 8, 2048, 128))
    rates = 10000 ** (-torch.arange(64, device="cuda") / 64)
    angles = torch.arange(2048, device="cuda")[:, None] * rates[None]
    cos, sin = (torch.cat([each, each], -1)[None].half() for each in (angles.cos(), angles.sin()))

    def rotated(x: Any) -> Any:
        turned = torch.cat([-x[..., 64:], x[..., :64]], -1)
        return x * cos[:, None].float() + turned * sin[:, None].float()

    return (
        lambda: torch.cat(module.apply_rope_base(q.clone(), k.clone(), cos, sin), 1),
        lambda: torch.cat([rotated(q.float()), rotated(k.float())], 1),
    )


def _attention(module: Any, name: str, batch: int, heads: int, rows: int, *, backward: bool) -> Case:
    import torch

    inputs = _tensors(*[(batch, heads, rows, 128)] * 3)
    (gradient,) = _tensors((batch, heads, rows, 128))

    def run(function: Callable[..., Any]) -> Any:
        leaves = [each.clone().requires_grad_(backward) for each in inputs]
        out = function(*leaves, is_causal=True)
        if not backward:
            return out
        out.backward(gradient)
        return torch.stack([out.detach(), *(each.grad for each in leaves)])

    return (lambda: run(getattr(module, name)), lambda: run(torch.nn.functional.scaled_dot_product_attention))


SITES: Mapping[str, tuple[str, Callable[[Any], Case]]] = {
    "liger_softmax": ("suites.liger.cutile.softmax", partial(_softmax, rows=4096, columns=2048)),
    "liger_softmax_long": ("suites.liger.cutile.softmax", partial(_softmax, rows=2048, columns=20000)),
    "liger_fused_add_rms_norm": ("suites.liger.cutile.fused_add_rms_norm", _add_rms_norm),
    "unsloth_geglu_exact": (
        "suites.unsloth.cutile.geglu",
        partial(_geglu, name="geglu_exact_forward", approximate="none"),
    ),
    "unsloth_geglu_approx": (
        "suites.unsloth.cutile.geglu",
        partial(_geglu, name="geglu_approx_forward", approximate="tanh"),
    ),
    "unsloth_swiglu": ("suites.unsloth.cutile.swiglu", _swiglu),
    "unsloth_rms_layernorm": ("suites.unsloth.cutile.rms_layernorm", _rms_layernorm),
    "ops_rope": ("ops.cutile.rope", _rope),
    "ops_softmax": ("ops.cutile.softmax", partial(_softmax, rows=4096, columns=4096)),
    "ops_softmax_tma": ("ops.cutile.softmax", partial(_softmax, rows=4096, columns=4096, use_tma=True)),
    "ops_silu_and_mul": ("ops.cutile.silu_and_mul", _silu_and_mul),
    "ops_matmul": ("ops.cutile.matmul", _matmul),
    "ops_matmul_persistent": ("ops.cutile.matmul", partial(_matmul, static_persistent=True)),
    "ops_bmm": ("ops.cutile.bmm", _bmm),
    "ops_group_gemm": ("ops.cutile.group_gemm", _group_gemm),
    "ops_fmha": (
        "ops.cutile.attention",
        partial(_attention, name="tile_fmha", batch=2, heads=16, rows=2048, backward=False),
    ),
    "ops_fmha_backward": (
        "ops.cutile.attention",
        partial(_attention, name="tile_fmha_with_backward", batch=1, heads=8, rows=1024, backward=True),
    ),
}
"""Function of TileGym -> its module, and what makes the case from the module."""


class Recorder:
    """Stands in for `exhaustive_search` and notes what it answers.

    Args:
        plain: the function that answers.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain
        self.calls: list[dict[str, Any]] = []
        """A row for each search since :meth:`take`."""

    def __call__(self, space: Iterable[Any], *given: Any, **named: Any) -> Any:
        """Answer, and note the time and the answer."""
        configs = list(space)
        row: dict[str, Any] = {"configs": len(configs)}
        self.calls.append(row)
        began = time.perf_counter()
        result = self._plain(configs, *given, **{**named, "quiet": True})
        row["seconds"] = time.perf_counter() - began
        row["winner"] = next(place for place, each in enumerate(configs) if each is result.best.config)
        return result

    def take(self) -> list[dict[str, Any]]:
        """The rows so far, which are forgotten."""
        found, self.calls = self.calls, []
        return found


class Judge(Recorder):
    """Times the two answers of each search in turn.

    Args:
        answers: by site, the places of the two answers of each search.
    """

    def __init__(self, answers: Mapping[str, list[tuple[int, int]]]) -> None:
        super().__init__(lambda: None)
        self._answers = answers
        self._kernels: dict[int, Any] = {}
        self.site = ""

    def __call__(
        self,
        space: Iterable[Any],
        stream: Any,
        grid_fn: Callable[[Any], Any],
        kernel: Any,
        args_fn: Callable[[Any], Any],
        hints_fn: Callable[[Any], Mapping[str, Any]] | None = None,
        **named: Any,
    ) -> Any:
        """Note the medians of both; the answer is the second."""
        import cuda.tile as ct
        import torch
        from cuda.tile.tune import Measurement, TuningResult

        configs = list(space)
        places = self._answers[self.site][len(self.calls)]
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        samples: list[list[float]] = [[], []]
        for turn in range(ROUNDS):
            for side in random.sample((0, 1), 2):
                config = configs[places[side]]
                made = kernel if isinstance(kernel, ct.kernel) else kernel(config)
                made = (
                    made.replace_hints(**(hints_fn(config) if hints_fn else {})) if turn == 0 else self._kernels[side]
                )
                self._kernels[side] = made
                args = args_fn(config)
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                torch.cuda._sleep(SPIN_CYCLES)
                before.record()
                ct.launch(stream, grid_fn(config), made, args)
                after.record()
                after.synchronize()
                samples[side] += [before.elapsed_time(after) * 1e3] if turn >= NOT_COUNTED else []
                time.sleep(GAP_S)
        theirs, ours = map(statistics.median, samples)
        self.calls.append({"places": places, "theirs_us": theirs, "ours_us": ours, "ratio": ours / theirs})
        best = Measurement(config=configs[places[1]], mean_us=ours, num_samples=ROUNDS, error_margin_us=0.0)
        return TuningResult(best=best, successes=(best,), failures=())


def run(recorder: Recorder, sites: Iterable[str], file: Path) -> None:
    """Call the functions, and write a row for each as it ends."""
    import torch

    for name in sites:
        where, make = SITES[name]
        row: dict[str, Any] = {"site": name}
        try:
            module: Any = importlib.import_module(f"tilegym.{where}")
            module.exhaustive_search = recorder
            torch.manual_seed(0)
            call, reference = make(module)
            if isinstance(recorder, Judge):
                recorder.site = name
            found, wanted = (each[0] if isinstance(each, tuple) else each for each in (call(), reference()))
            found = found.detach().float().reshape(wanted.shape)
            row["error"] = float((found - wanted.float()).norm() / wanted.float().norm())
        except Exception as error:  # a function that does not run here costs one row
            row["failure"] = f"{type(error).__name__}: {error}"[:300]
        row["calls"] = recorder.take()
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def answers(theirs: Iterable[str], ours: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
    """By site, the places of both answers of each search, from the lines of two files."""
    both = [{row["site"]: row["calls"] for row in map(json.loads, lines)} for lines in (theirs, ours)]
    return {
        site: [(one["winner"], other["winner"]) for one, other in zip(both[0][site], both[1][site], strict=False)]
        for site in both[0].keys() & both[1].keys()
    }


def main() -> None:
    """See the module."""
    parser = parser_with(
        flag("how", choices=("theirs", "ours", "judge")),
        flag("file", type=Path),
        flag("more", nargs="*", help="sites; for judge the two files"),
        description=__doc__,
    )
    options = parser.parse_args()
    if options.how == "judge":
        theirs, ours = (Path(each).read_text().splitlines() for each in options.more)
        found = answers(theirs, ours)
        run(Judge(found), [site for site in SITES if found.get(site)], options.file)
        return
    from cuda.tile import tune

    plain = tiledsched.exhaustive_search if options.how == "ours" else tune.exhaustive_search
    run(Recorder(plain), options.more or SITES, options.file)


if __name__ == "__main__":
    main()
