"""Reading NVML where a GPU tells everything, some of it, or nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
import types
from concurrent.futures import wait

import pytest

from tiledsched import doctor
from tiledsched.core.errors import MeasureError
from tiledsched.measure import driver_timeout, nvml
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
        self.well = threading.Event()
        """Until it is set, nothing is answered about the second GPU."""

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def ask(*about):
            if about[:1] == ("second",):
                self.well.wait(20)
            values = self.answers.get(name)
            if isinstance(values, dict):
                values = values.get(about[-1])
            if isinstance(values, list):
                values = values.pop(0)
            if values is None:
                raise NVMLError("Not Supported")
            return values

        return ask


ONE_GPU = {
    "nvmlInit": True,
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": {0: "handle"},
    "nvmlDeviceGetHandleByPciBusId": "handle",
    "nvmlDeviceGetName": b"NVIDIA GB10",
    "nvmlDeviceGetCudaComputeCapability": (12, 1),
    "nvmlSystemGetDriverVersion": "580.1",
}


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


@pytest.mark.parametrize(
    ("answers", "memory_bytes"),
    [
        ({"nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=1 << 37)}, 1 << 37),
        ({}, 0),  # a GB10 shares the host's memory, and NVML then answers the question with an error
        ({"nvmlDeviceGetCudaComputeCapability": None}, None),  # it computes nothing
        ({"nvmlInit": None}, None),
        ({"nvmlDeviceGetCount": None}, None),
        ({"nvmlDeviceGetCount": 0}, None),
    ],
)
def test_devices(binding, answers, memory_bytes):
    binding(**answers)
    expected = Device(name="NVIDIA GB10", arch="sm_121", sm_count=0, memory_bytes=memory_bytes or 0, driver="580.1")
    assert nvml.devices() == ([] if memory_bytes is None else [expected])


@pytest.mark.parametrize(
    ("answers", "text", "program", "version"),
    [
        ({}, "", None, "580.1"),
        ({"nvmlDeviceGetCount": 0}, "", None, "580.1"),
        ({"nvmlSystemGetDriverVersion": None}, "", None, ""),
        ({"nvmlSystemGetDriverVersion": None}, "NVRM version: NVIDIA UNIX  550.54.15  Fri", None, "550.54.15"),
        ({"nvmlInit": None}, "NVRM version: NVIDIA UNIX  550.54.15  Fri\nGCC version 12.3.0", None, "550.54.15"),
        ({"nvmlInit": None}, "nothing that can be read", None, ""),
        ({"nvmlInit": None}, "", "/usr/bin/nvidia-smi", ""),
        ({"nvmlInit": None}, "", None, None),
    ],
)
def test_the_driver(binding, monkeypatch, tmp_path, answers, text, program, version):
    binding(**answers)
    monkeypatch.setattr(nvml, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(nvml.shutil, "which", lambda name: program)
    if text:
        nvml.DRIVER_FILE.write_text(text)
    assert nvml.driver_version() == version


def test_no_binding(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.devices() == []


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (
            {
                "nvmlDeviceGetClockInfo": {"sm": [1980, 1500, 1400], "memory": [3201, 3201, 3201]},
                "nvmlDeviceGetPowerUsage": [650_000, 701_500, 690_000],
                "nvmlDeviceGetTemperature": [50, 61, 60],
                "nvmlDeviceGetCurrentClocksThrottleReasons": [0x1, 0x4, 0x4 | 0x20],
            },
            Conditions(
                sm_clock_mhz=1500,
                memory_clock_mhz=3201,
                power_w=701.5,
                temperature_c=61,
                throttle_reasons=("power cap", "software thermal"),
            ),
        ),
        (  # told in part: the third reading of the power fails
            {"nvmlDeviceGetClockInfo": {"sm": 2400}, "nvmlDeviceGetPowerUsage": [45_000, 44_000, None]},
            Conditions(sm_clock_mhz=2400, power_w=45.0),
        ),
        ({"nvmlDeviceGetHandleByPciBusId": None}, Conditions()),
    ],
)
def test_conditions(binding, answers, expected):
    binding(**answers)
    log = nvml.ConditionsLog()
    for _ in range(3):
        log.poll()
    assert log.summary() == expected


OURS, TRAINING, DESKTOP = os.getpid(), 4711, 815


class NotFoundError(NVMLError):
    value = 6


def process(pid):
    return types.SimpleNamespace(pid=pid)


def ran(pid, percent, after_s=1.0):
    """A sample of a process's share of the GPU, so long after the beginning."""
    return types.SimpleNamespace(pid=pid, smUtil=percent, timeStamp=int((NOW + after_s) * 1e6))


NOW = 1.7e9


@pytest.mark.parametrize(
    ("compute", "graphics", "samples", "others", "beside"),
    [
        ([OURS], [], [ran(OURS, 60)], (), ()),
        ([OURS, TRAINING], [], [ran(OURS, 40), ran(TRAINING, 55)], (TRAINING,), (TRAINING,)),
        ([OURS, TRAINING], [], [ran(OURS, 40)], (TRAINING,), ()),  # it only has it open
        ([OURS, TRAINING], [], NotFoundError(), (TRAINING,), ()),
        ([OURS], [OURS, DESKTOP], [ran(OURS, 40), ran(DESKTOP, 2)], (DESKTOP,), ()),  # it draws now and then
        ([OURS], [DESKTOP], [ran(DESKTOP, 5)], (DESKTOP,), (DESKTOP,)),
        ([OURS, TRAINING], [], [ran(99999, 90)], (TRAINING,), None),  # a container, and the host's numbers
        ([OURS], [], [ran(99999, 90)], (), ()),
        ([OURS, TRAINING], [], [ran(TRAINING, 90, after_s=-0.1)], (TRAINING,), ()),  # before the beginning
        ([OURS, TRAINING], None, None, (TRAINING,), None),  # not told whether it ran
        ([OURS], [DESKTOP], None, (DESKTOP,), ()),  # nor is that of a desktop, which only draws
        ([OURS, DESKTOP], [DESKTOP], None, (DESKTOP,), None),  # it computes, too
        ([OURS, TRAINING], [DESKTOP], None, (DESKTOP, TRAINING), None),
        ([OURS], [DESKTOP], [ran(99999, 90)], (DESKTOP,), ()),
        ([OURS], None, None, (), ()),
        ([TRAINING], [], [ran(TRAINING, 90)], (), ()),  # which of them is ours is not told: nothing is
        (None, None, None, (), ()),
    ],
)
def test_processes_of_others(binding, compute, graphics, samples, others, beside):
    made = binding(
        nvmlDeviceGetComputeRunningProcesses=compute and [list(map(process, compute)) for _ in range(2)],
        nvmlDeviceGetGraphicsRunningProcesses=graphics and [list(map(process, graphics)) for _ in range(2)],
    )
    made.NVML_ERROR_NOT_FOUND = 6

    def utilization(handle, since_us):
        assert since_us == int(NOW * 1e6)
        if samples is None or isinstance(samples, Exception):
            raise samples or NVMLError("Not Supported")
        return [*samples, types.SimpleNamespace(pid=0, smUtil=0, timeStamp=0)]

    made.nvmlDeviceGetProcessUtilization = utilization
    told = nvml.ConditionsLog(since_s=NOW).summary()
    assert (told.others, told.concurrent_pids) == (others, beside)
    assert told.disturbance == (f"beside process {beside[0]} on the GPU" if beside else "")


@pytest.mark.parametrize(
    ("before", "after", "ours"),
    [
        ([7], [7, OURS], {OURS, os.getppid()}),
        ([7], [7, 31337], {31337}),  # a container with numbers of its own
        ([7], [7, 8, 9], {OURS, os.getppid()}),  # who of them is ours cannot be told, and none is listed
        ([7], [7], {OURS, os.getppid()}),
    ],
)
def test_what_nvml_calls_us(binding, before, after, ours):
    binding(nvmlDeviceGetComputeRunningProcesses=[[process(pid) for pid in pids] for pids in (before, after)])
    assert nvml.own_processes(nvml.current_processes()) == ours


@pytest.mark.parametrize(
    ("visible", "uuids", "found"),
    [
        ("", ["GPU-aa"], "GPU-aa"),
        ("0", ["GPU-aa"], "GPU-aa"),
        ("", ["GPU-aa", "GPU-bb"], None),
        ("1", ["GPU-aa", "GPU-bb"], None),  # in which order CUDA counts is not known
        ("GPU-b,GPU-a", ["GPU-aa", "GPU-bb"], "GPU-bb"),
        ("GPU-c", ["GPU-aa", "GPU-bb"], None),
        ("", [], None),
        ("", None, None),
    ],
)
def test_the_gpu_that_will_be_opened(binding, monkeypatch, visible, uuids, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    binding(
        nvmlDeviceGetCount=len(uuids) if uuids else 0,
        nvmlDeviceGetUUID=uuids,
        nvmlDeviceGetHandleByIndex={0: "one", 1: "other"},
    )
    assert nvml.only_gpu() == (found and (found, "NVIDIA GB10"))


@pytest.mark.parametrize(
    ("answers", "name"),
    [
        ({}, "NVIDIA GB10"),
        ({"nvmlDeviceGetMigMode": [(0, 1)]}, "NVIDIA GB10"),
        ({"nvmlDeviceGetMigMode": [(1, 1)]}, ""),  # CUDA opens an instance
        ({"nvmlDeviceGetName": None}, ""),
        ({"nvmlDeviceGetCount": 2, "nvmlDeviceGetName": ["NVIDIA GB10", "NVIDIA GB10"]}, "NVIDIA GB10"),
        ({"nvmlDeviceGetCount": 2, "nvmlDeviceGetName": ["NVIDIA GB10", "NVIDIA H200"]}, ""),
        ({"nvmlDeviceGetCount": 0}, ""),
    ],
)
def test_the_name_that_cuda_will_give(binding, answers, name):
    binding(**{"nvmlDeviceGetHandleByIndex": {0: "one", 1: "other"}, **answers})
    assert nvml.expected_name() == name


def test_the_gpu_that_is_open_and_others_that_left_or_came(binding):
    made = binding(
        nvmlDeviceGetUUID=b"GPU-aa",
        nvmlDeviceGetComputeRunningProcesses=[[process(OURS), process(1)], [process(OURS), process(2)]],
    )
    made.NVML_ERROR_NOT_FOUND = 6
    assert nvml.current_gpu() == ("GPU-aa", "NVIDIA GB10")
    assert nvml.ConditionsLog().summary().others == (1, 2)
    binding(nvmlDeviceGetHandleByPciBusId=None)
    assert nvml.current_gpu() == ("", "")


@pytest.fixture
def stuck(binding, monkeypatch):
    """A driver that answers nothing about the second of two GPUs, until told to."""
    made = binding(
        nvmlDeviceGetCount=2,
        nvmlDeviceGetHandleByIndex={0: "first", 1: "second"},
        nvmlDeviceGetHandleByUUID={b"GPU-aa": "first"},
        nvmlDeviceGetUUID={"first": "GPU-aa"},
    )
    monkeypatch.setattr(nvml, "asked", driver_timeout.Asker())
    monkeypatch.setattr(nvml, "LISTED_S", 0.1)
    monkeypatch.setattr(nvml, "READ_S", 0.1)
    yield made
    made.well.set()


def test_a_gpu_that_is_stuck_is_named_and_waited_for_once(stuck, monkeypatch):
    threads = threading.active_count()
    for ask in (nvml.devices, nvml.gpus, nvml.only_gpu):
        with pytest.raises(
            MeasureError, match=r"GPU 1 \(as nvidia-smi counts\) of .* CUDA_VISIBLE_DEVICES with its UUID"
        ):
            ask()
        monkeypatch.setattr(nvml, "LISTED_S", 60.0)  # nobody waits for it again
    assert threading.active_count() == threads + 1
    found = {each.name: each for each in doctor.examine()}
    assert (found["gpu"].status, "it is stuck" in found["gpu"].detail) == ("broken", True)
    assert found["gpu"].remedy.startswith("see what nvidia-smi says")
    stuck.well.set()
    wait([nvml.asked._unanswered], 5)
    assert len(nvml.devices()) == 2


def test_who_names_another_gpu_goes_on_without_the_stuck_one(stuck, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa")
    assert [device.arch for device in nvml.devices()] == ["sm_121"]
    assert [uuid for uuid, _ in nvml.gpus()] == ["GPU-aa"]
    assert nvml.only_gpu() == ("GPU-aa", "NVIDIA GB10")


def test_a_gpu_that_gets_stuck_while_it_measures(stuck):
    """A bench has no other process to watch it: its readings have a deadline. A worker's have none."""
    log = nvml.ConditionsLog(ask=nvml.asked)
    log.poll()
    stuck.answers["nvmlDeviceGetHandleByPciBusId"] = "second"
    with pytest.raises(MeasureError, match=r"GPU 0000:01:00\.0 of "):
        nvml.ConditionsLog(ask=nvml.asked)
    with pytest.raises(MeasureError, match="is stuck"):
        log.poll()
    with pytest.raises(MeasureError, match="is stuck"):
        nvml.current_gpu()


def test_an_answer_in_time_is_cheap():
    """Of a thousand: far below the millisecond that the driver takes."""
    ask = driver_timeout.Asker()
    began = time.process_time()
    assert [ask(lambda: 7, 10.0) for _ in range(1000)] == [7] * 1000
    assert time.process_time() - began < 1.0
    with pytest.raises(ZeroDivisionError):
        ask(lambda: 1 // 0, 10.0)


def test_a_process_that_has_torch_need_not_import_cupy(monkeypatch):
    found = types.SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=1 << 37,
        L2_cache_size=1 << 25,
        pci_domain_id=0,
        pci_bus_id=0x1B,
        pci_device_id=0,
    )
    cuda = types.SimpleNamespace(current_device=lambda: 0, get_device_properties=lambda index: found)
    monkeypatch.setitem(
        sys.modules, "torch", types.SimpleNamespace(cuda=cuda, version=types.SimpleNamespace(cuda="13.0"))
    )
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(nvml, "_binding", lambda: None)
    assert nvml._current_bus() == "00000000:1b:00.0"
    device = nvml.current_device()
    assert (device.name, device.arch, device.sm_count, device.driver) == ("NVIDIA H200", "sm_90", 132, "CUDA 13.0")
    assert "cupy" not in sys.modules
