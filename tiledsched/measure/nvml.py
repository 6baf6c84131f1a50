"""What NVML tells: the devices of this machine, and their clocks, power and throttle reasons while we measure."""

from __future__ import annotations

import functools
import operator
import statistics
from collections.abc import Callable
from typing import Any

from tiledsched.measure.runner import Conditions, Device

THROTTLE_REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons, without 0x1 (idle), which pacing causes on purpose."""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _tell(question: Callable[..., Any], *about: Any) -> Any:
    """NVML's answer, or None where this GPU does not tell: a GB10, for one, has no memory of its own to report."""
    try:
        return question(*about)
    except Exception:
        return None


def devices() -> list[Device]:
    """GPUs of this machine as NVML lists them; empty where there is no driver or no NVML binding.

    sm_count and l2_bytes are 0 here: NVML does not tell them, and asking CUDA would open a context.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return []
    found = []
    driver = _text(_tell(pynvml.nvmlSystemGetDriverVersion) or "")
    for index in range(_tell(pynvml.nvmlDeviceGetCount) or 0):
        handle = _tell(pynvml.nvmlDeviceGetHandleByIndex, index)
        capability = _tell(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
        if capability is None:
            continue  # listed, but lost or in a mode that computes nothing
        memory = _tell(pynvml.nvmlDeviceGetMemoryInfo, handle)
        found.append(Device(name=_text(_tell(pynvml.nvmlDeviceGetName, handle) or "unnamed GPU"),
                            arch=f"sm_{capability[0]}{capability[1]}", sm_count=0,
                            memory_bytes=int(memory.total) if memory else 0, driver=driver))  # fmt: skip
    return found


def current_device() -> Device:
    """The current CUDA device, described by the runtime (through CuPy) and by NVML where it answers."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    driver = ""
    try:
        import pynvml

        pynvml.nvmlInit()
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        driver = f"CUDA {cupy.cuda.runtime.driverGetVersion()}"
    return Device(name=_text(properties["name"]), arch=f"sm_{properties['major']}{properties['minor']}",
                  sm_count=int(properties["multiProcessorCount"]), memory_bytes=int(properties["totalGlobalMem"]),
                  l2_bytes=int(properties["l2CacheSize"]), driver=driver)  # fmt: skip


class ConditionsLog:
    """Polls NVML during a run and sums it up. What NVML does not tell stays 0 or empty."""

    def __init__(self) -> None:
        self._seen: dict[str, list[int]] = {}
        self._handle: Any = None
        try:
            import cupy
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(cupy.cuda.Device().pci_bus_id.encode())
        except Exception:
            self._handle = None

    def poll(self) -> None:
        """Take one reading."""
        if self._handle is None:
            return
        nvml, handle = self._nvml, self._handle
        readings = {
            "sm": _tell(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "memory": _tell(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            "milliwatts": _tell(nvml.nvmlDeviceGetPowerUsage, handle),
            "temperature": _tell(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "reasons": _tell(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        }
        for name, value in readings.items():
            if value is not None:
                self._seen.setdefault(name, []).append(value)

    def summary(self) -> Conditions:
        """Median clocks, highest power and temperature, every throttle reason seen."""
        seen = self._seen
        reasons = functools.reduce(operator.or_, seen.get("reasons", []), 0)
        throttled = tuple(name for bit, name in THROTTLE_REASONS.items() if reasons & bit)
        return Conditions(sm_clock_mhz=int(statistics.median(seen.get("sm", [0]))),
                          memory_clock_mhz=int(statistics.median(seen.get("memory", [0]))),
                          power_w=max(seen.get("milliwatts", [0])) / 1e3,
                          temperature_c=max(seen.get("temperature", [0])),
                          throttle_reasons=throttled)  # fmt: skip
