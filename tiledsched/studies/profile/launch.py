"""The process that is profiled: it calls one method once, after a few calls that are not profiled."""

from __future__ import annotations

import json
import sys
import warnings

from tiledsched.core.errors import TiledschedError, UnsupportedError
from tiledsched.core.registry import load_kernel, problem_from_json

WARMUPS = 5
FAILED = 3
"""Exit code where the method does not run on the problem. The last line of stderr says why."""


def main(kernel_name: str, problem_json: str, method_name: str) -> int:
    """Call a method on random inputs, and mark for the profiler which call counts."""
    import cupy
    import torch

    from tiledsched.ops.bench import choose_methods
    from tiledsched.ops.own_methods import own_outputs
    from tiledsched.rivals.methods import make_case
    from tiledsched.serve.process import wait_for_programs

    wait_for_programs()
    problem = problem_from_json(json.loads(problem_json))
    (method,) = choose_methods(load_kernel(kernel_name), [method_name], [problem])
    try:
        if refusal := method.refusal(problem, torch.cuda.get_device_properties(0).total_memory):
            raise UnsupportedError(refusal)
        with warnings.catch_warnings():  # torch warns why it refuses a backend; so does the exception
            warnings.simplefilter("ignore")
            call = method.make(make_case(torch, cupy, problem, own_outputs).arrays)
            for _ in range(WARMUPS):
                call()
            torch.cuda.synchronize()
    except (TiledschedError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", file=sys.stderr)
        return FAILED
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return 0
