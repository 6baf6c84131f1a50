"""A GPU of torch that is not there: enough of one for host code to reach its launches on CPU tensors."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

MULTIPROCESSORS = 4
"""Few, so that persistent blocks take several tiles."""
CAPABILITY = (12, 1)
PROPERTIES = SimpleNamespace(multi_processor_count=MULTIPROCESSORS, major=CAPABILITY[0], minor=CAPABILITY[1])


class OnCpu(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU, and empty ones of floats are filled with NaN."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        made = func(*args, **kwargs)
        if func in (torch.empty, torch.empty_like, torch.Tensor.new_empty) and made.dtype.is_floating_point:
            made.fill_(float("nan") if made.dtype.itemsize > 1 else 0)
        return made


@contextlib.contextmanager
def gpu_stand_in():
    """Host code that asks torch for a GPU is told of a small one of compute capability 12.1."""
    with contextlib.ExitStack() as stack:
        for name, answer in {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),
            "get_device_capability": lambda device=None: CAPABILITY,
            "get_device_properties": lambda device=None: PROPERTIES,
            "synchronize": lambda device=None: None,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True)))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor))
        stack.enter_context(OnCpu())
        yield
