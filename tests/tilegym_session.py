"""Two sessions of TileGym's own functions on CPU tensors, up to their launches: each prints what its searches answered.

Each is a process of its own, which finds TileGym and torch imported, and of searches knows nothing: in the first a fake machine
measures, in the second whoever measures or compiles is an error. Of torch.cuda three questions about the GPU are answered as an H200
would.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
import warnings
from types import SimpleNamespace
from unittest.mock import patch

import torch

torch.cuda.get_device_capability = lambda *device: (9, 0)
torch.cuda.get_device_properties = lambda *device: SimpleNamespace(multi_processor_count=132)
torch.cuda.current_stream = lambda *device: 0

from fake_machine import FakeMachine

from tiledsched.remember import machine as machines

warnings.simplefilter("ignore")


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def rope(module):
    q, k, cos = half(1, 8, 64, 64), half(1, 2, 64, 64), half(1, 64, 64)
    module._select_rope_kernel(q, k, cos, cos, 64, (64, 1, 1), 8, 2, 32)


def gated(module):
    return half(2, 16, 256), half(2, 16, 256)


CALLS = {
    "suites.liger.cutile.softmax": [
        lambda m: m._get_tuned_single_kernel(1000, 1024, 64, torch.float16, 0, half(64, 1000), half(64, 1000)),
        lambda m: m._get_tuned_single_kernel(1024, 1024, 64, torch.float32, 0, half(64, 1024), half(64, 1024)),
        lambda m: m._get_tuned_multi_fwd_kernel(9000, 4096, 64, 0, half(64, 9000), half(64, 9000)),
    ],
    "suites.liger.cutile.fused_add_rms_norm": [lambda m: m.fused_add_rms_norm(half(64, 256), half(64, 256), half(256))],
    "suites.unsloth.cutile.geglu": [
        lambda m: m.geglu_exact_forward(*gated(m)),
        lambda m: m.geglu_approx_forward(*gated(m)),
    ],
    "suites.unsloth.cutile.swiglu": [lambda m: m.swiglu_fg(*gated(m))],
    "suites.unsloth.cutile.rms_layernorm": [lambda m: m.rms_layernorm(half(64, 256), half(256))],
    "suites.flashinfer.cutile.gemm.masked_bmm": [
        lambda m: m.masked_bmm(half(2, 64, 64), half(2, 64, 64), torch.full((2,), 64, dtype=torch.int32))
    ],
    "ops.cutile.softmax": [lambda m: m.softmax(half(64, 1000)), lambda m: m.softmax(half(64, 1000), use_tma=True)],
    "ops.cutile.rope": [rope],
    "ops.cutile.silu_and_mul": [lambda m: m.silu_and_mul(half(64, 512))],
    "ops.cutile.matmul": [
        lambda m: m.matmul(half(64, 64), half(64, 64)),
        lambda m: m.matmul(half(64, 64), half(64, 64), static_persistent=True),
    ],
    "ops.cutile.bmm": [lambda m: m.bmm(half(2, 64, 64), half(2, 64, 64))],
    "ops.cutile.group_gemm": [lambda m: m.group_gemm([half(64, 64), half(32, 64)], [half(64, 64), half(64, 64)])],
    "ops.cutile.attention": [lambda m: m.tile_fmha(half(1, 2, 64, 64), half(1, 2, 64, 64), half(1, 2, 64, 64))],
    "ops.cutile.mla": [
        lambda m: m.tile_mla(
            *(half(1, 2, 64, 128) for _ in range(3)), half(1, 2, 64, 64), half(1, 1, 64, 64), True, 0.1
        )
    ],
}
"""Module of TileGym -> calls of it; each is a call site of `exhaustive_search`."""


def never(program):
    raise AssertionError("nothing is to be measured again")


def main() -> None:
    for name in CALLS:
        importlib.import_module(f"tilegym.{name}")
    for machine in (FakeMachine(), FakeMachine(never, never)):
        child = os.fork()
        if not child:
            session(machine)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def session(machine: FakeMachine) -> None:
    found = []
    with patch.object(machines, "machine", machine):
        for name, calls in CALLS.items():
            module = importlib.import_module(f"tilegym.{name}")
            plain = module.exhaustive_search

            def recorded(*given, _plain=plain, _name=name, **named):
                began = time.process_time()
                result = _plain(*given, **named)
                ms = (time.process_time() - began) * 1e3
                found.append([_name, str(result.best.config), result.best.mean_us, len(result.successes), ms])
                return result

            module.exhaustive_search = recorded
            for call in calls:
                before = len(found)
                with contextlib.suppress(Exception):  # the launch, which needs a GPU
                    call(module)
                if len(found) == before:
                    found.append([name, "no answer", 0.0, 0, 0.0])
    print(json.dumps({"found": found, "done": dict(machine.done)}), flush=True)


if __name__ == "__main__":
    main()
