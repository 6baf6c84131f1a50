"""Reading NVML where a GPU tells everything, some of it, or nothing."""

from __future__ import annotations

import sys
import types

import pytest

from tiledsched.measure import nvml
from tiledsched.measure.runner import Conditions, Device


class NVMLError(Exception):
    pass


class Binding(types.ModuleType):
    """pynvml with answers to set; a question without one is not supported."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = "sm", "memory", "gpu"
    NVMLError = NVMLError

    def __init__(self, **answers):
        super().__init__("pynvml")
        self.answers = answers

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def ask(*about):
            values = self.answers.get(name)
            if isinstance(values, dict):
                values = values.get(about[-1])
            if isinstance(values, list):
                values = values.pop(0)
            if values is None:
                raise NVMLError("Not Supported")
            return values

        return ask


ONE_GPU = {"nvmlInit": True, "nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": {0: "handle"},
           "nvmlDeviceGetHandleByPciBusId": "handle", "nvmlDeviceGetName": b"NVIDIA GB10",
           "nvmlDeviceGetCudaComputeCapability": (12, 1), "nvmlSystemGetDriverVersion": "580.1"}  # fmt: skip


@pytest.fixture
def binding(monkeypatch):
    def install(**answers):
        made = Binding(**{**ONE_GPU, **answers})
        monkeypatch.setitem(sys.modules, "pynvml", made)
        cupy = types.ModuleType("cupy")
        cupy.cuda = types.SimpleNamespace(Device=lambda: types.SimpleNamespace(pci_bus_id="0000:01:00.0"))
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        return made

    return install


def test_devices(binding):
    binding(nvmlDeviceGetMemoryInfo=types.SimpleNamespace(total=1 << 37))
    expected = Device(name="NVIDIA GB10", arch="sm_121", sm_count=0, memory_bytes=1 << 37, driver="580.1")
    assert nvml.devices() == [expected]


def test_unified_memory_is_not_reported(binding):
    """A GB10 shares the host's memory, and NVML then answers the question with an error."""
    binding()
    assert [(device.arch, device.memory_bytes) for device in nvml.devices()] == [("sm_121", 0)]


def test_a_device_that_computes_nothing_is_left_out(binding):
    binding(nvmlDeviceGetCudaComputeCapability=None)
    assert nvml.devices() == []


@pytest.mark.parametrize("answers", [{"nvmlInit": None}, {"nvmlDeviceGetCount": None}, {"nvmlDeviceGetCount": 0}])
def test_no_driver(binding, answers):
    binding(**answers)
    assert nvml.devices() == []


def test_no_binding(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.devices() == []


DEVICE = Device(name="NVIDIA GB10", arch="sm_121", sm_count=48)


def test_conditions(binding):
    binding(
        nvmlDeviceGetClockInfo={"sm": [1980, 1500, 1400], "memory": [3201, 3201, 3201]},
        nvmlDeviceGetPowerUsage=[650_000, 701_500, 690_000],
        nvmlDeviceGetTemperature=[50, 61, 60],
        nvmlDeviceGetCurrentClocksThrottleReasons=[0x1, 0x4, 0x4 | 0x20],
    )
    log = nvml.ConditionsLog()
    for _ in range(3):
        log.poll()
    assert log.summary() == Conditions(sm_clock_mhz=1500, memory_clock_mhz=3201, power_w=701.5, temperature_c=61,
                                       throttle_reasons=("power cap", "software thermal"))  # fmt: skip


def test_conditions_that_are_told_in_part(binding):
    binding(nvmlDeviceGetClockInfo={"sm": 2400}, nvmlDeviceGetPowerUsage=[45_000, 44_000])
    log = nvml.ConditionsLog()
    for _ in range(3):  # the third power reading fails
        if not log._nvml.answers["nvmlDeviceGetPowerUsage"]:
            log._nvml.answers["nvmlDeviceGetPowerUsage"] = None
        log.poll()
    assert log.summary() == Conditions(sm_clock_mhz=2400, power_w=45.0)


def test_no_conditions(binding):
    binding(nvmlDeviceGetHandleByPciBusId=None)
    log = nvml.ConditionsLog()
    log.poll()
    assert log.summary() == Conditions()
