r"""Products with the epilogues that models have, on a GPU: as `ts.matmul` serves them, beside cuBLAS and torch.compile.

    python -m docs.studies.epilogues tune --database epilogues.db --seconds 180 --csv tuned.csv
    TILEDSCHED_DB=epilogues.db python -m docs.studies.epilogues times --seconds 60 --csv times.csv
    python -m docs.studies.epilogues stores --csv stores.csv

`times` computes linear layers of Llama 3, Qwen and Mixtral with what stands behind them: SwiGLU over the gate and up projections,
the residual behind the down and output projections, the bias of queries, keys and values. Weights lie as `torch.nn.Linear` keeps
them. It times what is served, our own kernel, `torch.mm` followed by torch's operations, what torch.compile makes of these, and
`torch.mm` alone, which is about what a kernel would take whose product is as fast as cuBLAS' and for which the rest is free.
All calls are captured in CUDA graphs, take turns, and are timed behind a flush of the L2 cache. Results are compared with those
that torch computes in float32.

`tune` lets a few schedules race on each product (see `product_races`), but for those that the database has measured. Each part
ends by itself after `--seconds`, and has written what it found until then.

`stores` times our kernel's untuned schedule with results stored by threads and by the TMA unit.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from docs.studies.batch_invariance import normal
from docs.studies.flags import flag, integers, names, parser_with, positive
from docs.studies.flex_variants import collected, medians_us, relative_error
from docs.studies.product_races import in_time, races
from tiledsched.core.registry import kernel_named
from tiledsched.tuning.resources import Tools

SWIGLU, ADDED, BIASED = {"activation": "silu", "gate": True}, {"residual": True}, {"bias": True}
LAYERS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "llama3_8b gate_up": (14336, 4096, SWIGLU),
    "llama3_8b down": (4096, 14336, ADDED),
    "mixtral output": (4096, 4096, ADDED),
    "llama3_70b gate_up": (28672, 8192, SWIGLU),
    "llama3_70b down": (8192, 28672, ADDED),
    "qwen2_7b qkv": (4608, 3584, BIASED),
    "qwen3_8b gate_up": (12288, 4096, SWIGLU),
    "qwen3_8b down": (4096, 12288, ADDED),
}
"""Layer -> (n, k, epilogue), from the models' published configurations. Those that are most like others come last."""
ARCH, TOKENS = "sm_90", (64, 1024, 8192)
METHODS = ("served", "own", "eager", "compiled")
"""Methods that compute the whole."""


def cells(layers: Sequence[str], tokens: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each product, and its problem: the layers whose names hold one of the words."""
    for (name, (n, k, epilogue)), m in itertools.product(LAYERS.items(), tokens):
        if any(each in name for each in layers):
            yield f"{name} {m}", {"m": m, "n": n, "k": k, "b_layout": "column", **epilogue}


def tensors_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `ts.matmul`, in bfloat16; sums are of the size of 1."""
    m, n, k = (values[name] for name in "mnk")
    found = {"input": normal(1, m, k), "other": normal(2, n, k, scale=k**-0.5).t()}
    shapes = {"bias": (n,), "residual": (m, n)}
    found |= {name: normal(3, *shape) for name, shape in shapes.items() if values.get(name)}
    return found | ({"gate": normal(4, n, k, scale=k**-0.5).t()} if values.get("gate") else {})


def in_torch(input: Any, other: Any, bias: Any = None, gate: Any = None, residual: Any = None) -> Any:
    """The same in torch's words, with the activation of these layers."""
    import torch

    gates = None if gate is None else torch.mm(input, gate)
    sums = torch.mm(input, other)
    sums = sums if bias is None else sums + bias
    sums = sums if gates is None else torch.nn.functional.silu(gates) * sums
    return sums if residual is None else sums + residual


def own_call(values: Mapping[str, Any], given: Mapping[str, Any], **knobs: Any) -> Callable[[], Any]:
    """The call of our own kernel on the schedule that is served, with some knobs as they are given."""
    import tiledsched as ts
    from tiledsched.ops.front import operator
    from tiledsched.serve.execute import launch_plan

    fields = {"activation": values.get("activation", "none"), "out_dtype": "bfloat16"}
    fields |= {name: bool(values.get(name)) for name in ("bias", "gate", "residual")}
    tensors = tuple(given[name] for name in ("input", "other", "bias", "gate", "residual") if name in given)
    with ts.configure(rivals="off", **knobs):
        plan = operator("matmul_epilogue", **fields).plan_for(*tensors).own
    launch_plan(plan, tensors, None)
    return lambda: launch_plan(plan, tensors, None)


def methods_of(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Each method's call."""
    import torch

    import tiledsched as ts

    served = partial(ts.matmul, **given, activation=values.get("activation"))
    compiled = partial(torch.compile(in_torch, dynamic=False), **given)
    own, eager = own_call(values, given), partial(in_torch, **given)
    weights = [given[name] for name in ("other", "gate") if name in given]
    both = torch.cat([each.t() for each in weights]).t() if len(weights) > 1 else weights[0]
    product = partial(torch.mm, given["input"], both)
    return {"served": served, "own": own, "eager": eager, "compiled": compiled, "product": product}


def times(layers: Sequence[str], tokens: Sequence[int], ends_s: float) -> Iterator[dict[str, Any]]:
    """A row for each product: each method's time in microseconds, torch's over ours, and the error of what is served."""
    import torch

    for name, values in in_time(cells(layers, tokens), ends_s):
        began = time.monotonic()
        torch.compiler.reset()  # else torch gives up on a function that it has compiled for eight problems
        given = tensors_of(values)
        methods = methods_of(values, given)
        right = in_torch(**{key: each[:256] if key in ("input", "residual") else each for key, each in given.items()})
        exact = in_torch(
            **{key: (each[:256] if key in ("input", "residual") else each).float() for key, each in given.items()}
        )
        errors = relative_error(methods["served"]()[:256], exact), relative_error(right, exact)
        us = medians_us(methods)
        best = min(us.get("eager", math.inf), us.get("compiled", math.inf))
        yield {
            "product": name,
            **{f"{each}_us": round(us[each], 2) if each in us else "" for each in (*METHODS, "product")},
            "over_product": round(best / us["product"], 4) if "product" in us else "",
            "over_served": round(best / us["served"], 4) if "served" in us else "",
            "over_own": round(best / us["own"], 4) if "own" in us else "",
            "error": f"{errors[0]:.1e}",
            "torch_error": f"{errors[1]:.1e}",
            "seconds": round(time.monotonic() - began, 1),
        }


def stores(layers: Sequence[str], tokens: Sequence[int], ends_s: float) -> Iterator[dict[str, Any]]:
    """A row for each product: the time of our kernel in microseconds, by how it stores its results."""
    for name, values in in_time(cells(layers, tokens), ends_s):
        given = tensors_of(values)
        varied: tuple[dict[str, Any], ...] = (
            {},
            {"TMA_STORE": True},
            {"PERSISTENT": False},
            {"TMA_STORE": True, "PERSISTENT": False},
        )
        calls = {" ".join(knobs) or "as served": own_call(values, given, **knobs) for knobs in varied}
        yield {"product": name, **{key: round(us, 2) for key, us in medians_us(calls).items()}}


def tune(
    layers: Sequence[str], tokens: Sequence[int], ends_s: float, database: str, tools: Tools | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each product: our time in microseconds, each rival's over ours, and what serves from now on."""
    kernel = kernel_named("matmul_epilogue")
    products = [(name, kernel.problem(**values)) for name, values in cells(layers, tokens)]
    return races(kernel, products, arch=ARCH, database=database, ends_s=ends_s, tools=tools)


def conclusion(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The mean and the least of torch's time over ours, as served and of our kernel alone, and over that of the product alone."""
    said = []
    for each in ("over_served", "over_own", "over_product"):
        found = [float(row[each]) for row in rows if row.get(each)]
        if found:
            mean = math.exp(statistics.mean(map(math.log, found)))
            least = min(rows, key=lambda row: float(row[each] or math.inf))["product"]
            said.append(f"{each}: {len(found)} products, mean {mean:.3f}, least {min(found):.3f} ({least})")
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune or time; 1 if nothing was."""
    began = time.monotonic()
    import tiledsched as ts

    parser = parser_with(
        flag("what", choices=["tune", "times", "stores"]),
        flag("--layers", type=names, default=[""], help="words of which the name of a layer has one"),
        flag("--tokens", type=integers, default=list(TOKENS), help="numbers of rows"),
        flag("--seconds", type=positive, default=3600, help="nothing is begun that would end later"),
        flag("--database", default="epilogues.db", help="for `tune`: the database that is written"),
        flag("--csv", default="", help="a file for the rows"),
        description=__doc__.partition("\n\n")[0],
    )
    options = parser.parse_args(arguments)
    parts: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {"times": times, "stores": stores}
    run = parts.get(options.what, partial(tune, database=options.database))
    with ts.configure(compile="wait"):
        rows = collected(run(options.layers, options.tokens, began + options.seconds), options.csv)
    print("\n".join(conclusion(rows)))
    return int(not rows)


if __name__ == "__main__":
    raise SystemExit(main())
