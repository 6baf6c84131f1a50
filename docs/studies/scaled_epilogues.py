r"""Products of 8-bit floats with the epilogues that models have, on a GPU: as `ts.scaled_matmul` serves them, beside
`torch._scaled_mm` and torch.compile.

    python -m docs.studies.scaled_epilogues tune --seconds 180 --database scaled.db --csv tuned.csv
    python -m docs.studies.scaled_epilogues prepare --processes 8
    TILEDSCHED_DB=scaled.db python -m docs.studies.scaled_epilogues times --seconds 60 --csv times.csv

`times` computes linear layers of Llama 3 and Qwen 3 with what stands behind them: SwiGLU over the gate and up projections, whose
weights lie in one matrix, and the residual behind the down and output projections. Each token and each output has a scale, and
sums stay in the tensor cores (`use_fast_accum`). It times what is served, our own kernel, `torch._scaled_mm` followed by torch's
operations, and what torch.compile makes of these. All calls are captured in CUDA graphs, take turns, and are timed behind a flush
of the L2 cache. Results are compared with those that torch computes in float32.

`prepare` makes the first calls of all products side by side, in so many processes, which leave what they compile to `times`.
`tune` lets a few schedules race on each product (see `product_races`), but for those that the database has measured.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from docs.studies.batch_invariance import normal
from docs.studies.epilogues import ADDED, ARCH, METHODS, SWIGLU, conclusion
from docs.studies.flags import flag, integers, names, parser_with, positive
from docs.studies.flex_variants import collected, medians_us, relative_error
from docs.studies.product_races import in_time, races
from tiledsched.core.registry import kernel_named

LAYERS = {
    "llama3_8b gate_up": (14336, 4096),
    "llama3_8b down": (4096, 14336),
    "llama3_8b output": (4096, 4096),
    "llama3_70b gate_up": (28672, 8192),
    "llama3_70b down": (8192, 28672),
    "qwen3_8b gate_up": (12288, 4096),
    "qwen3_8b down": (4096, 12288),
}
"""Layer -> columns of the result, and k, from the models' published configurations. Gate and up projections have SwiGLU behind
them, the others a residual."""
TOKENS = (16, 512, 4096)


def has_gate(layer: str) -> bool:
    """Whether SwiGLU stands behind a layer."""
    return layer.endswith("gate_up")


def tensors_of(layer: str, tokens: int) -> dict[str, Any]:
    """The arguments of `ts.scaled_matmul` of a product; sums are of the size of 1."""
    import torch

    n, k = LAYERS[layer]
    columns = 2 * n if has_gate(layer) else n
    a, weight = normal(1, tokens, k).to(torch.float8_e4m3fn), normal(2, columns, k).to(torch.float8_e4m3fn)
    found = {"a": a, "b": weight.t()}
    for place, (name, shape) in enumerate({"scale_a": (tokens, 1), "scale_b": (1, columns)}.items()):
        found[name] = normal(3 + place, *shape).float().abs().clamp(0.5, 2.0) * (k**-0.5 if name == "scale_a" else 1.0)
    return found if has_gate(layer) else found | {"residual": normal(5, tokens, n)}


def finished(sums: Any, residual: Any = None) -> Any:
    """What follows the product, in torch's words: SwiGLU where there is no residual."""
    import torch

    if residual is not None:
        return sums + residual
    gate, up = sums.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def in_torch(a: Any, b: Any, scale_a: Any, scale_b: Any, residual: Any = None) -> Any:
    """The same in torch's words."""
    import torch

    sums = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)
    return finished(sums, residual)


def exact(a: Any, b: Any, scale_a: Any, scale_b: Any, residual: Any = None) -> Any:
    """The same in float32."""
    return finished((a.float() @ b.float()) * scale_a * scale_b, None if residual is None else residual.float())


def methods_of(given: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Each method's call."""
    import torch

    import tiledsched as ts

    words: dict[str, Any] = {} if "residual" in given else {"activation": "silu", "gate": "halves"}
    served = partial(ts.scaled_matmul, **given, **words, use_fast_accum=True)

    def own() -> Any:
        with ts.configure(rivals="off"):
            return served()

    compiled = partial(torch.compile(in_torch, dynamic=False), **given)
    return {"served": served, "own": own, "eager": partial(in_torch, **given), "compiled": compiled}


def prepare(product: tuple[str, int]) -> None:
    """Make each method's first call of a product."""
    import tiledsched as ts

    with ts.configure(compile="wait"):
        for call in methods_of(tensors_of(*product)).values():
            call()


def times(products: Sequence[tuple[str, int]], ends_s: float) -> Iterator[dict[str, Any]]:
    """A row for each product: each method's time in microseconds, torch's over ours, and the error of what is served."""
    import torch

    for layer, tokens in in_time(products, ends_s):
        began = time.monotonic()
        torch.compiler.reset()  # else torch gives up on a function that it has compiled for eight problems
        given = tensors_of(layer, tokens)
        methods = methods_of(given)
        for call in methods.values():  # captures compile and load nothing
            call()
        few = {name: each[:256] if name in ("a", "scale_a", "residual") else each for name, each in given.items()}
        right = exact(**few)
        errors = relative_error(methods["served"]()[:256], right), relative_error(in_torch(**few), right)
        us = medians_us(methods)
        best = min(us.get("eager", math.inf), us.get("compiled", math.inf))
        yield {
            "product": f"{layer} {tokens}",
            **{f"{each}_us": round(us[each], 2) if each in us else "" for each in METHODS},
            "over_served": round(best / us["served"], 4) if "served" in us else "",
            "over_own": round(best / us["own"], 4) if "own" in us else "",
            "error": f"{errors[0]:.1e}",
            "torch_error": f"{errors[1]:.1e}",
            "seconds": round(time.monotonic() - began, 1),
        }


def tune(products: Sequence[tuple[str, int]], ends_s: float, database: str) -> Iterator[dict[str, Any]]:
    """A row for each product: our time in microseconds, each rival's over ours, and what serves from now on."""
    kernel, cells = kernel_named("scaled_matmul_epilogue"), []
    for layer, tokens in products:
        (n, k), follows = LAYERS[layer], SWIGLU if has_gate(layer) else ADDED
        problem = kernel.problem(m=tokens, n=n, k=k, scales="row", fast_accum=True, **follows)
        cells.append((f"{layer} {tokens}", problem))
    return races(kernel, cells, arch=ARCH, database=database, ends_s=ends_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune, prepare or time; 1 if nothing was tuned or timed."""
    began = time.monotonic()
    import tiledsched as ts

    parser = parser_with(
        flag("what", choices=["tune", "prepare", "times"]),
        flag("--layers", type=names, default=[""], help="words of which the name of a layer has one"),
        flag("--tokens", type=integers, default=list(TOKENS), help="numbers of rows"),
        flag("--seconds", type=positive, default=3600, help="nothing is begun that would end later"),
        flag("--database", default="scaled.db", help="for `tune`: the database that is written"),
        flag("--processes", type=positive, default=8, help="of `prepare`"),
        flag("--csv", default="", help="a file for the rows"),
        description=__doc__.partition("\n\n")[0],
    )
    options = parser.parse_args(arguments)
    layers = [each for each in LAYERS if any(word in each for word in options.layers)]
    products = [(layer, tokens) for tokens in options.tokens for layer in layers]
    if options.what == "prepare":
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            pool.map(prepare, products, chunksize=1)
        return 0
    run = partial(tune, database=options.database) if options.what == "tune" else times
    with ts.configure(compile="wait"):
        rows = collected(run(products, began + options.seconds), options.csv)
    print("\n".join(conclusion(rows)))
    return int(not rows)


if __name__ == "__main__":
    raise SystemExit(main())
