"""NVML of the made-up GB10; see `gb10`."""

from __future__ import annotations

import types

import gb10

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_ERROR_NOT_FOUND = 1, 2, 0, 6
ALWAYS = ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetCudaComputeCapability")


class NVMLError(Exception):
    """An answer of NVML; `value` is its number."""

    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 6: "Not Found"}[value])
        self.value = value


def running(pids):
    return [types.SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids]


ANSWERS = {
    "nvmlInit": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: gb10.DRIVER,
    "nvmlDeviceGetCount": lambda: gb10.COUNT,
    "nvmlDeviceGetHandleByIndex": lambda index: range(gb10.COUNT)[index],
    "nvmlDeviceGetHandleByUUID": lambda uuid: gb10.UUIDS.index(uuid.decode()),
    "nvmlDeviceGetHandleByPciBusId": lambda bus: gb10.BUSES.index(bus.decode()),
    "nvmlDeviceGetName": lambda handle: gb10.NAME,
    "nvmlDeviceGetUUID": lambda handle: None if "no-uuid" in gb10.WORDS else gb10.UUIDS[handle],
    "nvmlDeviceGetCudaComputeCapability": lambda handle: None if "no-arch" in gb10.WORDS else gb10.ARCH,
    "nvmlDeviceGetMigMode": lambda handle: [1, 1] if "mig" in gb10.WORDS else None,
    "nvmlDeviceGetClockInfo": lambda handle, kind: gb10.CLOCK_MHZ if kind == NVML_CLOCK_SM else None,
    "nvmlDeviceGetPowerUsage": lambda handle: 46_000,
    "nvmlDeviceGetTemperature": lambda handle, kind: 71,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: gb10.REASONS,
    "nvmlDeviceGetComputeRunningProcesses": lambda handle: running(
        [*gb10.OPENED, *([gb10.TRAINING] if "training" in gb10.WORDS else [])]
    ),
    "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: running(
        [gb10.XORG, gb10.SHELL] if "desktop" in gb10.WORDS else []
    ),
}
"""What is answered; None for what is not supported, as is every other question."""


def __getattr__(name: str):
    if not name.startswith("nvml"):
        raise AttributeError(name)

    def ask(*about):
        told = name in ANSWERS and not ("silent" in gb10.WORDS and name not in ALWAYS)
        answer = ANSWERS[name](*about) if told else None
        if answer is None and name != "nvmlInit":
            raise NVMLError(3)
        return answer

    return ask
