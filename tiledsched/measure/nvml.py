"""What NVML reports: the devices of this machine, and their clocks, power and throttle reasons while we measure."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tiledsched.core.errors import or_none
from tiledsched.core.extras import installing
from tiledsched.measure.driver_timeout import LISTED_S, READ_S, asked, unwatched
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

UNNAMED = "unnamed GPU"
"""What a GPU is called that the driver does not name."""
LABEL_VARIABLE = "TILEDSCHED_GPU_LABEL"
"""Environment variable whose value is added to the names of this process's GPUs: the evidence of a GPU that differs from others
of its model is stored under a name of its own."""
HELD_DOWN = ("hardware slowdown", "software thermal", "hardware thermal", "power brake")
"""Reasons for a low clock of a GPU that is faulty or hot, and not just busy."""

DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""Where the driver's kernel module tells its version."""
BUSY_PERCENT = 5
"""Percentage of time below which kernels of another process do not move the median: a desktop that draws uses one or two."""


def _binding() -> Any:
    """The module of NVML, ready to be asked; None where there is no driver or no binding."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml


def _text(value: Any) -> str:
    """What NVML says as text; empty where it says nothing."""
    if value is None:
        return ""
    return value.decode() if isinstance(value, bytes) else str(value)


def labelled(name: str) -> str:
    """The name of a GPU, with the label that an environment variable gives it."""
    label = os.environ.get(LABEL_VARIABLE, "")
    return f"{name} ({label})" if label else name


def _handles(nvml: Any) -> Iterator[Any]:
    """NVML handles of the GPUs that CUDA_VISIBLE_DEVICES names by UUID, else of all GPUs; None for a GPU without one. Other
    GPUs are
    not touched: one of them may be stuck. Numbers mean this order or another, and are left to CUDA.
    """
    words = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if all(word.startswith("GPU-") for word in words):
        found = [or_none(nvml.nvmlDeviceGetHandleByUUID, word.encode()) for word in words]
        if None not in found:  # by the first letters of its UUID CUDA knows a GPU, but NVML does not
            for word, handle in zip(words, found, strict=True):
                asked.about = f"GPU {word}"
                yield handle
            return
    for index in range(or_none(nvml.nvmlDeviceGetCount) or 0):
        asked.about = f"GPU {index} (as nvidia-smi counts)"
        yield or_none(nvml.nvmlDeviceGetHandleByIndex, index)


def gpus() -> list[tuple[str, Device]]:
    """UUID and description of every GPU of this machine as NVML lists them, in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID; empty
    where there is no driver or no NVML binding. Where CUDA_VISIBLE_DEVICES names some by UUID, those.

    sm_count and l2_bytes are 0 here: NVML does not tell them, and asking CUDA would open a context.

    Raises:
        MeasureError: the driver does not answer.
    """
    return [(uuid, device) for uuid, device, _ in asked(_list_gpus, LISTED_S)]


def _list_gpus() -> list[tuple[str, Device, bool]]:
    """UUID and description of each GPU, and whether it is divided into instances (MIG)."""
    nvml = _binding()
    found = []
    for handle in _handles(nvml) if nvml else ():
        capability = or_none(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        if capability is None:
            continue  # listed, but lost or in a mode that computes nothing
        memory = or_none(nvml.nvmlDeviceGetMemoryInfo, handle)
        device = Device(
            name=labelled(_text(or_none(nvml.nvmlDeviceGetName, handle)) or UNNAMED),
            arch=f"sm_{capability[0]}{capability[1]}",
            sm_count=0,
            memory_bytes=int(memory.total) if memory else 0,
            driver=_text(or_none(nvml.nvmlSystemGetDriverVersion)),
        )
        divided = bool((or_none(nvml.nvmlDeviceGetMigMode, handle) or [0])[0])
        found.append((_text(or_none(nvml.nvmlDeviceGetUUID, handle)), device, divided))
    return found


def driver_version() -> str | None:
    """Version of this machine's NVIDIA driver: empty where there is one that does not tell it, None where there is none.

    Raises:
        MeasureError: the driver does not answer.
    """
    version = asked(lambda: _text(or_none(nvml.nvmlSystemGetDriverVersion)) if (nvml := _binding()) else None, LISTED_S)
    if version:
        return version
    try:
        found = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", DRIVER_FILE.read_text())
        return found.group(1) if found else ""
    except OSError:
        return "" if version == "" or shutil.which("nvidia-smi") else None


def why_unusable() -> str:
    """What keeps the GPUs of this machine from being measured on, and what to do; empty where nothing does that can be told
    without opening them, and where there is no driver.

    Raises:
        MeasureError: the driver does not answer.
    """
    if driver_version() is None:
        return ""
    if not all(map(importlib.util.find_spec, ("pynvml", "cupy"))):
        return f"this machine has an NVIDIA driver, but not the packages that measure; run: {installing('gpu')}"
    if not devices():
        return "this machine has an NVIDIA driver, but NVML lists no GPU that can compute; run: tiledsched doctor"
    return ""


def devices() -> list[Device]:
    """The GPUs of :func:`gpus`, without their UUIDs.

    Raises:
        MeasureError: the driver does not answer.
    """
    return [device for _, device in gpus()]


def expected_name() -> str:
    """The name that CUDA will give the GPU that it opens, where that is known before: where the GPUs of this machine have one
    name, and are not divided into instances (MIG), which CUDA names otherwise. Else empty.

    Raises:
        MeasureError: the driver does not answer.
    """
    found = asked(_list_gpus, LISTED_S)
    names = {"" if divided or device.name == labelled(UNNAMED) else device.name for _, device, divided in found}
    return names.pop() if len(names) == 1 else ""


def only_gpu() -> tuple[str, str] | None:
    """UUID and name of the GPU that CUDA will open, before it does; None where there are several to choose from.

    Raises:
        MeasureError: the driver does not answer.
    """
    found = [(uuid, device.name) for uuid, device in gpus()]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    if first.startswith("GPU-"):  # numbers mean this order or another, and are left to CUDA
        found = [each for each in found if each[0].startswith(first)]
    return found[0] if len(found) == 1 and found[0][0] else None


def _readings(nvml: Any, handle: Any) -> dict[str, Any]:
    """The state of a GPU now, by the names of :class:`Conditions`; what NVML does not report is left out."""
    milliwatts = or_none(nvml.nvmlDeviceGetPowerUsage, handle)
    reasons = or_none(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    read = {
        "sm_clock_mhz": or_none(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": or_none(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        "power_w": None if milliwatts is None else milliwatts / 1e3,
        "temperature_c": or_none(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": None
        if reasons is None
        else [name for bit, name in THROTTLE_REASONS.items() if reasons & bit],
    }
    return {name: value for name, value in read.items() if value is not None}


def state_of(uuid: str) -> dict[str, Any]:
    """Clocks (MHz), temperature (C), power (W) and throttle reasons of a GPU now, without opening it; what NVML does not report
    is left out.
    """
    nvml = _binding()
    handle = nvml and or_none(nvml.nvmlDeviceGetHandleByUUID, uuid.encode())
    return {} if handle is None else _readings(nvml, handle)


def current_gpu() -> tuple[str, str]:
    """UUID and name of the current CUDA device; empty where NVML does not report them. That of an instance (MIG) is its GPU's.

    Raises:
        MeasureError: the driver does not answer.
    """
    bus = _current_bus()

    def ask() -> tuple[str, str]:
        nvml, handle = _at(bus)
        if handle is None:
            return "", ""
        return _text(or_none(nvml.nvmlDeviceGetUUID, handle)), _text(or_none(nvml.nvmlDeviceGetName, handle))

    return asked(ask, LISTED_S)


def _current_bus() -> str:
    """Where the current CUDA device of this thread is on the PCI bus; empty where CUDA does not say."""
    with suppress(Exception):  # a process that has torch need not import CuPy, which takes a second
        found = _torch_properties()
        return f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        import cupy

        return str(cupy.cuda.Device().pci_bus_id)
    except Exception:
        return ""


def _at(bus: str) -> tuple[Any, Any]:
    """NVML, and its handle of the GPU at that place; None where there is none."""
    asked.about = f"GPU {bus}"
    nvml = _binding()
    return nvml, or_none(nvml.nvmlDeviceGetHandleByPciBusId, bus.encode()) if nvml and bus else None


def current_processes() -> frozenset[int]:
    """The processes that have the current CUDA device open; none where NVML does not report them."""
    return frozenset().union(*_processes(*_at(_current_bus())))


def _processes(nvml: Any, handle: Any) -> tuple[frozenset[int], frozenset[int]]:
    """The processes that have a GPU open to compute, and those that have it open to draw."""
    if handle is None:
        return frozenset(), frozenset()
    listed = [nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses]
    computing, drawing = (frozenset(each.pid for each in or_none(question, handle) or ()) for question in listed)
    return computing, drawing


def own_processes(before: Collection[int]) -> frozenset[int]:
    """What NVML calls this process and its parent, told by who came since `before`, when this one had not opened the GPU.

    In a container processes may have numbers of their own, and NVML's are the host's: then whoever came is this one.
    """
    now = current_processes()
    came = now - frozenset(before)
    return frozenset({os.getpid(), os.getppid()}) if os.getpid() in now or len(came) != 1 else came


def _torch_properties() -> Any:
    """What torch knows of its current CUDA device, in a process that uses torch and not CuPy; in any other, an exception."""
    torch = None if "cupy" in sys.modules else sys.modules.get("torch")
    return torch.cuda.get_device_properties(torch.cuda.current_device())  # type: ignore[union-attr]


def current_device() -> Device:
    """The current CUDA device, described by the runtime (through torch or CuPy) and by NVML where it answers."""
    nvml = _binding()
    driver = nvml and _text(or_none(nvml.nvmlSystemGetDriverVersion))
    found: Any = None
    with suppress(Exception):
        found = _torch_properties()
    if found is not None:
        return Device(
            name=labelled(found.name),
            arch=f"sm_{found.major}{found.minor}",
            sm_count=found.multi_processor_count,
            memory_bytes=found.total_memory,
            l2_bytes=found.L2_cache_size,
            driver=driver or f"CUDA {sys.modules['torch'].version.cuda}",
        )
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return Device(
        name=labelled(_text(properties["name"])),
        arch=f"sm_{properties['major']}{properties['minor']}",
        sm_count=int(properties["multiProcessorCount"]),
        memory_bytes=int(properties["totalGlobalMem"]),
        l2_bytes=int(properties["l2CacheSize"]),
        driver=driver or f"CUDA {cupy.cuda.runtime.driverGetVersion()}",
    )


class ConditionsLog:
    """Polls NVML during a run and sums it up. What NVML does not tell stays 0 or empty.

    Args:
        ours: what NVML calls the processes whose work on the GPU is the run; this one unless given.
        since_s: `time.time()` from which on others are looked for; now unless given.
        ask: has each question asked; `asked` in a process that nobody watches.

    Raises (as what is told of it):
        MeasureError: the driver does not answer.
    """

    def __init__(
        self,
        ours: Collection[int] = (),
        since_s: float | None = None,
        *,
        ask: Callable[[Callable[[], Any], float], Any] = unwatched,
    ) -> None:
        self._seen: dict[str, list[Any]] = {}
        self._ask, bus = ask, _current_bus()
        self._nvml, self._handle = ask(lambda: _at(bus), LISTED_S)
        self._ours = frozenset(ours or [os.getpid()])
        self._since_s = time.time() if since_s is None else since_s
        self._listed = ask(self._list, READ_S)

    def _list(self) -> tuple[frozenset[int], frozenset[int]]:
        return _processes(self._nvml, self._handle)

    def _ran(self, others: frozenset[int], computing: frozenset[int]) -> tuple[int, ...] | None:
        """The processes of others that ran on the GPU since the beginning; None where NVML does not say, and some of them may
        compute. A desktop, which only draws, is taken not to have run then: it uses one or two percent of a GPU.
        """
        if not others:
            return ()
        unsaid = None if others & computing else ()
        since_us = int(self._since_s * 1e6)
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, since_us)
        except Exception as error:
            # Nothing ran at all, which NVML calls an error; every other one says that it cannot tell.
            return () if getattr(error, "value", None) == self._nvml.NVML_ERROR_NOT_FOUND else unsaid
        recent = [each for each in samples if each.timeStamp > since_us]
        if recent and not {each.pid for each in recent} & (others | self._ours):
            return unsaid  # in a container the processes may have one number in the list and another one here
        return tuple(sorted({each.pid for each in recent if each.pid in others and each.smUtil >= BUSY_PERCENT}))

    def poll(self) -> None:
        """Take one reading."""
        if self._handle is not None:
            self._ask(self._read, READ_S)

    def _read(self) -> None:
        for name, value in _readings(self._nvml, self._handle).items():
            self._seen.setdefault(name, []).append(value)

    def summary(self) -> Conditions:
        """Median clocks, highest power and temperature, every throttle reason seen."""
        seen = self._seen
        computing, drawing = (a | b for a, b in zip(self._listed, self._ask(self._list, READ_S), strict=True))
        listed = computing | drawing
        is_told = bool(listed & self._ours)  # else ours could not be told from others'
        others = listed - self._ours if is_told else frozenset()
        reasons = {name for reading in seen.get("throttle_reasons", []) for name in reading}
        return Conditions(
            sm_clock_mhz=int(statistics.median(seen.get("sm_clock_mhz", [0]))),
            memory_clock_mhz=int(statistics.median(seen.get("memory_clock_mhz", [0]))),
            power_w=max(seen.get("power_w", [0.0])),
            temperature_c=max(seen.get("temperature_c", [0])),
            throttle_reasons=tuple(name for name in THROTTLE_REASONS.values() if name in reasons),
            others=tuple(sorted(others)),
            concurrent_pids=self._ask(lambda: self._ran(others, computing), READ_S) if is_told else (),
        )
