"""What tests on a GPU share: its arch, CUDA graphs and side streams. The fixture `serve` is in conftest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def arch() -> str:
    """The arch of the GPU here, as `sm_90`."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph that holds a call, and the outputs that each replay writes."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def replayed(call: Callable[[], Any]) -> Any:
    """The outputs of a call that a CUDA graph has captured, after a replay."""
    graph, out = captured(call)
    graph.replay()
    torch.cuda.synchronize()
    return out


def on_side_stream(call: Callable[[], Any], times: int = 1) -> Any:
    """The outputs of the last of some calls on a stream of their own, which the current one then waits for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            out = call()
    torch.cuda.current_stream().wait_stream(stream)
    return out


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normally distributed numbers, the same for the same number of them."""
    generator = torch.Generator("cuda").manual_seed(math.prod(shape))
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)
