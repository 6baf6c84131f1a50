"""The launch of a kernel that may begin before the one ahead of it has ended, which CuPy cannot say, by CUDA's driver."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy

from tiledsched.measure.arrays import address

SERIALIZATION = 6
"""The driver's number of the launch attribute "programmatic stream serialization"."""


def launch_dependent(
    function: int, grid: tuple[int, int, int], arguments: Sequence[Any], stream: int, driver: Any = None
) -> None:
    """Queue a launch of tile code, which has to wait itself for the launch ahead of it (:mod:`tiledsched.core.chains`).

    Args:
        function: the driver's handle.
        grid: blocks.
        arguments: arrays and numbers, as :func:`tiledsched.measure.arrays.pack` makes them.
        stream: the driver's handle.
        driver: the driver's library; by default that of this machine.

    Raises:
        RuntimeError: the driver refuses the launch.
    """
    numbers = (each if isinstance(each, numpy.generic) else numpy.uint64(address(each)) for each in arguments)
    values = [numpy.asarray(each) for each in numbers]
    places = (ctypes.c_void_p * len(values))(*[each.ctypes.data for each in values])
    attribute = ctypes.create_string_buffer(struct.pack("i4xi60x", SERIALIZATION, 1), 72)  # CUlaunchAttribute
    config = struct.pack("7I4x2PI4x", *grid, 1, 1, 1, 0, stream, ctypes.addressof(attribute), 1)  # CUlaunchConfig
    launch = (driver or ctypes.CDLL("libcuda.so.1")).cuLaunchKernelEx
    failure = launch(config, ctypes.c_void_p(function), places, None)
    if failure:
        raise RuntimeError(f"CUDA's driver refuses a dependent launch: error {failure}")
