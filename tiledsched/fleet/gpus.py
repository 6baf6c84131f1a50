"""The GPUs of this host, as workers take them: by UUID, because numbers mean one order here and another there."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.core.errors import MeasureError
from tiledsched.fleet.clock import CLOCK, Clock
from tiledsched.measure import driver_timeout, nvml

ANSWER_S = 1.0
"""How long the state of a GPU is waited for: it takes a millisecond, unless the driver is stuck."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, or, without one, a place to build and rank."""

    uuid: str
    """Its UUID as the driver gives it, unique in a fleet."""
    name: str
    """Marketing name; empty without a GPU."""
    arch: str
    """e.g. sm_90; empty for a place that takes every arch."""

    def archs(self, wanted: Collection[str]) -> set[str]:
        """The archs of `wanted` that it can work for."""
        return set(wanted) if not self.arch else {self.arch} & set(wanted)

    def environment(self) -> dict[str, str]:
        """What makes CUDA see this GPU alone."""
        return {"CUDA_VISIBLE_DEVICES": self.uuid} if self.uuid.startswith(("GPU-", "MIG-")) else {}

    def state(self) -> dict[str, Any]:
        """Clock, temperature, power and throttle reasons now; empty where the driver does not say."""
        return nvml.state_of(self.uuid)


class GpuState:
    """The state of a GPU, of which the last answer is kept: the driver of a GPU that is stuck may never answer.

    Args:
        gpu: which.
        clock: by which the age of an answer is told.
    """

    def __init__(self, gpu: Gpu, clock: Clock = CLOCK) -> None:
        self._clock, self._gpu, self._asker, self._answer = clock, gpu, driver_timeout.Asker(), dict[str, Any]()
        self._answered_s = self._clock.monotonic()

    def read(self, within_s: float = ANSWER_S) -> dict[str, Any]:
        """The GPU's state; where the driver does not answer in time, the last one known and how old that is (`age_s`)."""
        try:
            self._answer = self._asker(self._gpu.state, within_s)
        except MeasureError:
            return {**self._answer, "age_s": round(self._clock.monotonic() - self._answered_s, 1)}
        self._answered_s = self._clock.monotonic()
        return self._answer


def gpus_here(own: Callable[[], Sequence[Gpu]] | None = None, *, without: int = 0) -> list[Gpu]:
    """The GPUs that a job may take here: those the driver lists and CUDA_VISIBLE_DEVICES leaves.

    Args:
        own: lists the GPUs in place of the driver, as replays do; see `Job.gpus`.
        without: how many places for work that needs no GPU there are, in place of GPUs; 0 for GPUs.

    Raises:
        MeasureError: the driver does not answer.
    """
    if without:
        return [Gpu(uuid=f"{socket.gethostname()}-{os.getpid()}-{place}", name="", arch="") for place in range(without)]
    return list(own()) if own is not None else visible(gpus_of_driver(), os.environ)


def gpus_of_driver() -> list[Gpu]:
    """All GPUs of this host, in the order of the PCI bus.

    Raises:
        MeasureError: the driver does not answer.
    """
    return [Gpu(uuid=uuid, name=device.name, arch=device.arch) for uuid, device in nvml.gpus()]


def visible(found: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by number (in the order of the PCI bus) or UUID, up to the first name of none."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(found)
    chosen = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        named = found[int(word)] if word.isdigit() and int(word) < len(found) else None
        named = named or next((gpu for gpu in found if word.startswith("GPU-") and gpu.uuid.startswith(word)), None)
        if named is None:
            break
        chosen.append(named)
    return chosen


def illness(state: Mapping[str, Any]) -> str:
    """Why a GPU in this state is slow for another reason than its load; empty where it is not."""
    return ", ".join(reason for reason in state.get("throttle_reasons", ()) if reason in nvml.HELD_DOWN)
