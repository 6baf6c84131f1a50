"""Whether fresh processes serve the same programs, whatever their caches hold and whatever they served before:
`python -m docs.studies.same_choice --processes 60 --problems 200`, with `--launch` on a GPU.

Each process has its own seed of hashes and takes the problems in an order of its own. Half of them have an empty cache folder,
and the others share one, so that they find what those before them built. A process prints the schedule that it serves for each
problem: what lookup answers, and with `--launch` what `sdpa` runs after two calls. The exit code is 1 where two processes differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

from docs.studies.served_programs import drawn
from tiledsched.core.config import load_settings
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention import Attention
from tiledsched.serve.entries import load_table


def problems(seed: int, count: int, launch: bool) -> list[Problem]:
    """The problems that every process is asked for. With `launch` those that `sdpa` takes without further tensors."""
    found = list(dict.fromkeys(drawn(Attention, seed, 3 * count if launch else count)))
    plain = [each for each in found if not (each.has_features or each.is_varlen or each.lse)] if launch else found
    return plain[:count]


def looked_up(of: Sequence[Problem], arch: str) -> dict[str, str]:
    """The schedule that lookup answers for each problem, by the problem's id."""
    table = load_table(load_settings(), kernel=Attention, archs={arch})
    return {problem.id: table.resolve(problem, arch).schedule.id for problem in of}


def launched(of: Sequence[Problem]) -> dict[str, str]:
    """The schedule that `sdpa` runs for each problem, by the problem's id, after two calls on the GPU."""
    import torch

    from tiledsched.ops import sdpa as serve

    found = {}
    for problem in of:
        dtype, keys = getattr(torch, problem.dtype), (problem.batch, problem.kv_heads, problem.seq_k)
        q = torch.randn(problem.batch, problem.heads, problem.seq_q, problem.head_dim, device="cuda", dtype=dtype)
        k = torch.randn(*keys, problem.head_dim, device="cuda", dtype=dtype)
        v = torch.randn(*keys, problem.value_columns, device="cuda", dtype=dtype)
        causal: Any = problem.alignment if problem.causal else False
        for _ in range(2):
            serve.sdpa(q, k, v, causal=causal)
        found[problem.id] = serve.plan_for(q, k, v, causal=causal).served.schedule.id
    return found


def child(options: argparse.Namespace) -> int:
    """Print what this process serves."""
    of = problems(options.seed, options.problems, options.launch)
    random.Random(options.child).shuffle(of)
    found = launched(of) if options.launch else looked_up(of, options.arch)
    print(json.dumps(found, sort_keys=True))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the processes, and compare what they print."""
    parser = argparse.ArgumentParser(prog="python -m docs.studies.same_choice", description="do processes serve alike?")
    parser.add_argument("--processes", type=int, default=60, help="fresh processes (60)")
    parser.add_argument("--problems", type=int, default=200, help="problems of attention (200)")
    parser.add_argument("--at-once", type=int, default=1, help="processes that run at the same time (1)")
    parser.add_argument("--arch", default="sm_90", help="the arch, without --launch (sm_90)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (1)")
    parser.add_argument("--launch", action="store_true", help="call sdpa on this machine's GPU")
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return child(options)
    given = list(sys.argv[1:] if arguments is None else arguments)
    answers: list[str] = []
    with tempfile.TemporaryDirectory() as shared:
        for start in range(1, options.processes + 1, options.at_once):
            numbers = range(start, min(start + options.at_once, options.processes + 1))
            with tempfile.TemporaryDirectory() as cold:
                started = [_start(given, number, shared if number % 2 else cold) for number in numbers]
                answers += [process.communicate()[0] for process in started]
    counts = Counter(answers)
    same = len(counts) == 1 and next(iter(counts)) != ""
    print(f"{max(counts.values())} of {options.processes} processes serve the same for {options.problems} problems")
    return 0 if same else 1


def _start(given: Sequence[str], number: int, cache: str) -> subprocess.Popen[str]:
    folders = {"TILEDSCHED_CACHE": cache, "CUDA_TILE_CACHE_DIR": os.path.join(cache, "cuda_tile")}
    return subprocess.Popen(
        [sys.executable, "-m", "docs.studies.same_choice", *given, "--child", str(number)],
        env={**os.environ, **folders, "PYTHONHASHSEED": str(number)},
        stdout=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
