r"""Products with the epilogues that models have, on a GPU: as `ts.matmul` serves them, beside cuBLAS and torch.compile.

    python -m docs.studies.epilogues tune --database epilogues.db       # the problems, quickly; writes nothing else
    TILEDSCHED_DB=epilogues.db python -m docs.studies.epilogues times --csv times.csv
    python -m docs.studies.epilogues stores --csv stores.csv

`times` computes linear layers of Llama 3, Qwen and Mixtral with what stands behind them: SwiGLU over the gate and up projections,
the residual behind the down and output projections, the bias of queries, keys and values. Weights lie as `torch.nn.Linear` keeps
them. It times what is served, our own kernel, `torch.mm` followed by torch's operations, and what torch.compile makes of these.
All calls are captured in CUDA graphs, take turns, and are timed behind a flush of the L2 cache. Results are compared with those
that torch computes in float32.

`stores` times our kernel's untuned schedule with results stored by threads and by the TMA unit.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from docs.studies.batch_invariance import normal
from docs.studies.flags import flag, integers, names, parser_with, positive
from docs.studies.flex_variants import collected, medians_us, relative_error

SWIGLU, ADDED, BIASED = {"activation": "silu", "gate": True}, {"residual": True}, {"bias": True}
LAYERS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "llama3_8b gate_up": (14336, 4096, SWIGLU),
    "llama3_8b down": (4096, 14336, ADDED),
    "mixtral output": (4096, 4096, ADDED),
    "llama3_70b gate_up": (28672, 8192, SWIGLU),
    "llama3_70b down": (8192, 28672, ADDED),
    "qwen3_8b gate_up": (12288, 4096, SWIGLU),
    "qwen3_8b down": (4096, 12288, ADDED),
    "qwen2_7b qkv": (4608, 3584, BIASED),
}
"""Layer -> (n, k, epilogue), from the models' published configurations."""
ARCH, TOKENS = "sm_90", (64, 1024, 8192)
METHODS = ("served", "own", "eager", "compiled")


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

    sums = torch.mm(input, other)
    sums = sums if bias is None else sums + bias
    sums = sums if gate is None else torch.nn.functional.silu(torch.mm(input, gate)) * sums
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
    return {"served": served, "own": own, "eager": eager, "compiled": compiled}


def times(layers: Sequence[str], tokens: Sequence[int], most_s: float) -> Iterator[dict[str, Any]]:
    """A row for each product: each method's time in microseconds, torch's over ours, and the error of what is served."""
    import torch

    ends = time.monotonic() + most_s
    for name, values in cells(layers, tokens):
        if time.monotonic() > ends:
            print(f"no time left for {name} and what follows", file=sys.stderr)
            return
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
            **{f"{each}_us": round(us[each], 2) if each in us else "" for each in METHODS},
            "over_served": round(best / us["served"], 4) if "served" in us else "",
            "over_own": round(best / us["own"], 4) if "own" in us else "",
            "error": f"{errors[0]:.1e}",
            "torch_error": f"{errors[1]:.1e}",
        }


def stores(layers: Sequence[str], tokens: Sequence[int], most_s: float) -> Iterator[dict[str, Any]]:
    """A row for each product: the time of our kernel in microseconds, by how it stores its results."""
    ends = time.monotonic() + most_s
    for name, values in cells(layers, tokens):
        if time.monotonic() > ends:
            return
        given = tensors_of(values)
        varied: tuple[dict[str, Any], ...] = (
            {},
            {"TMA_STORE": True},
            {"PERSISTENT": False},
            {"TMA_STORE": True, "PERSISTENT": False},
        )
        calls = {" ".join(knobs) or "as served": own_call(values, given, **knobs) for knobs in varied}
        yield {"product": name, **{key: round(us, 2) for key, us in medians_us(calls).items()}}


def tune(layers: Sequence[str], tokens: Sequence[int], database: str, effort: str, most_s: float) -> None:
    """Tune every product, its rivals with it, while time is left."""
    import tiledsched as ts

    ends = time.monotonic() + most_s
    for name, values in cells(layers, tokens):
        if time.monotonic() < ends:
            ts.tune("matmul_epilogue", [values], arch=ARCH, effort=effort, db=database)
            print(f"tuned: {name}", flush=True)


def conclusion(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The mean and the least of torch's time over ours, as served and of our kernel alone."""
    said = []
    for each in ("over_served", "over_own"):
        found = [float(row[each]) for row in rows if row.get(each)]
        if found:
            mean = math.exp(statistics.mean(map(math.log, found)))
            least = min(rows, key=lambda row: float(row[each] or math.inf))["product"]
            said.append(f"{each}: {len(found)} products, mean {mean:.3f}, least {min(found):.3f} ({least})")
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune or time; 1 if nothing was timed."""
    import tiledsched as ts

    parser = parser_with(
        flag("what", choices=["tune", "times", "stores"]),
        flag("--layers", type=names, default=[""], help="words of which the name of a layer has one"),
        flag("--tokens", type=integers, default=list(TOKENS), help="numbers of rows"),
        flag("--most-seconds", type=positive, default=3600, help="seconds after which no further product is begun"),
        flag("--database", default="epilogues.db", help="for `tune`: the database that is written"),
        flag("--effort", default="quick", help="for `tune`: quick, default or thorough"),
        flag("--csv", default="", help="a file for the rows"),
        description=__doc__.partition("\n\n")[0],
    )
    options = parser.parse_args(arguments)
    if options.what == "tune":
        tune(options.layers, options.tokens, options.database, options.effort, options.most_seconds)
        return 0
    run = times if options.what == "times" else stores
    with ts.configure(compile="wait"):
        rows = collected(run(options.layers, options.tokens, options.most_seconds), options.csv)
    print("\n".join(conclusion(rows)))
    return int(not rows)


if __name__ == "__main__":
    raise SystemExit(main())
