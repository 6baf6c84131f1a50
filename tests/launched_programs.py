"""Calls operators on cuTile's own launcher, with the driver of `fake_driver.c`, and prints for every launch as JSON whether the file of
its program is the one that `tiledsched warmup` would have written."""

from __future__ import annotations

import json
from typing import Any

import cuda.tile as ct
import torch
from serve_on_cpu import runtime_on_cpu, using

import tiledsched as ts
from tiledsched.core import launches
from tiledsched.serve.prebuilt import ServedKernel

TYPES = {torch.float16: "<f2", torch.float32: "<f4", torch.int32: "<i4", torch.int64: "<i8", torch.uint8: "|u1"}
launched: list[tuple[str, int, bool]] = []


class OnGpu:
    """A CPU tensor that says that it lies on a GPU."""

    def __init__(self, tensor: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": TYPES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "version": 3,
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
        }


def launch(stream: int, grid: Any, kernel: Any, arguments: tuple[Any, ...]) -> None:
    def moved(each: Any) -> Any:
        return (
            [moved(one) for one in each] if isinstance(each, list) else OnGpu(each) if torch.is_tensor(each) else each
        )

    ct.launch(stream, grid, kernel, tuple(map(moved, arguments)))


def asked(kernel: ServedKernel, signature: Any, *given: Any) -> Any:
    """What `ServedKernel._compile` looks for, beside what is built ahead."""
    built = launches.signature(kernel.declaration, kernel.problem, kernel.schedule, kernel.step)
    same = kernel.program_path(launches.assumed(kernel.declaration, signature, kernel.step)) == kernel.program_path(
        built
    )
    launched.append((kernel.declaration.name, kernel.place, same))
    return b"machine code", "kernel", None, ()


def normal(*shape: int, gradient: bool = False) -> Any:
    return torch.zeros(shape, dtype=torch.float16).requires_grad_(gradient)


def call() -> None:
    ts.sdpa(*(normal(1, 4, 300, 64) for _ in range(3)), causal=True)
    ts.sdpa(normal(2, 32, 1, 128), normal(2, 8, 2048, 128), normal(2, 8, 2048, 128), return_lse=True)
    q, k, v = (normal(1, 2, 256, 64, gradient=True) for _ in range(3))
    ts.sdpa(q, k, v).sum().backward()
    ts.matmul(normal(256, 512), normal(384, 512).t())
    ts.grouped_matmul(normal(256, 128), normal(4, 128, 64), torch.tensor([64, 128, 192, 256], dtype=torch.int32))
    ts.rms_norm(normal(64, 1024, gradient=True), normal(1024, gradient=True)).sum().backward()
    ts.layer_norm(normal(64, 1024), normal(1024), normal(1024))
    ts.softmax(normal(64, 1000))
    ts.swiglu(normal(64, 1024), normal(64, 1024))
    ts.cross_entropy(normal(64, 1000), torch.zeros(64, dtype=torch.int64))
    ts.rope(normal(1, 4, 128, 64), normal(1, 2, 128, 64), torch.zeros(128, 32), torch.zeros(128, 32))


if __name__ == "__main__":
    ServedKernel._compile = asked
    with using(runtime_on_cpu(launch)):
        call()
    print(json.dumps(launched))
