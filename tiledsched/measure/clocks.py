"""Whether a GPU held its clock while samples were taken: times at a clock that was held down are no verdict on a schedule.

What a GPU should hold is known from its other measurements, and from its maker. Not all of it is asked for: a heavy kernel
draws more power than a light one, and the other products of an arch are made for other clocks than its representative.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiledsched.core.device import ARCHS
from tiledsched.measure.nvml import HELD_DOWN
from tiledsched.measure.runner import Conditions, Device, Measurement

LEAST_SHARE = {"burst": 0.75, "sustained": 0.4, "graph": 0.75, "graph-cold": 0.75}
"""The least share of the known clock, by regime. Of what ships, all measured on H200s, the lowest clock is 0.83 of the highest
in the burst regime, and 0.78 at the power cap, which is normal in the sustained one. Graphs are replayed with the pauses of the
burst regime. GB10s are reported stuck at 500 to 850 of 2,400 MHz, also without a throttle reason."""
LEAST_SHARE_OF_HOT = {"burst": 0.95, "sustained": 0.75, "graph": 0.95, "graph-cold": 0.95}
"""The least share where NVML names heat or a fault as a reason."""
OTHER_PRODUCT = 0.8
"""Boost clocks of an arch's other products are at least this share of the representative's (L4: 2,040 of 2,520 MHz)."""


def describe_throttling(conditions: Conditions, device: Device, regime: str, seen_mhz: int = 0) -> str:
    """In words how far below its clock a GPU was held while samples were taken; empty where it held it, or NVML does not say.

    Args:
        conditions: of the samples.
        device: the GPU.
        regime: of the samples, burst or sustained.
        seen_mhz: the highest clock of the GPU's other measurements; 0 where there are none.
    """
    spec, clock = ARCHS.get(device.arch), conditions.sm_clock_mhz
    hot = [reason for reason in conditions.throttle_reasons if reason in HELD_DOWN]
    if not clock:
        return f"at a clock that NVML does not report ({', '.join(hot)})" if hot else ""
    makers_mhz = round(spec.clock_ghz * 1e3) if spec else 0
    known_mhz = makers_mhz if spec and device.name.startswith(spec.device) else OTHER_PRODUCT * makers_mhz
    if clock >= (LEAST_SHARE_OF_HOT if hot else LEAST_SHARE).get(regime, 0.0) * max(known_mhz, seen_mhz):
        return ""
    reasons = ", ".join(conditions.throttle_reasons) or "NVML names no reason"
    if spec is None or seen_mhz >= known_mhz:
        return f"at {clock} MHz, where this GPU held {seen_mhz} MHz in other measurements ({reasons})"
    return f"at {clock} MHz, where its maker gives {makers_mhz} MHz for {spec.device} ({reasons})"


def summarise_throttling(taken: Iterable[Measurement], seen_mhz: int = 0) -> str:
    """In words, in how many measurements of one GPU its clock was held down, and the lowest; empty where it was in none.

    Args:
        taken: the measurements. Those of which NVML told neither clock nor reason do not count.
        seen_mhz: the highest clock of other measurements of the GPU.
    """
    return summarise_states(((each.conditions, each.device, each.regime, 1) for each in taken), seen_mhz)


def summarise_states(states: Iterable[tuple[Conditions, Device, str, int]], seen_mhz: int = 0) -> str:
    """What :func:`summarise_throttling` says, of conditions, device and regime with the number of measurements that had them."""
    reporting = [state for state in states if state[0].sm_clock_mhz or state[0].throttle_reasons]
    reporting.sort(key=lambda state: state[0].sm_clock_mhz)
    seen_mhz = max([seen_mhz, *(conditions.sm_clock_mhz for conditions, *_ in reporting)])
    slowed = [
        (words, count)
        for conditions, device, regime, count in reporting
        if (words := describe_throttling(conditions, device, regime, seen_mhz))
    ]
    held, of = sum(count for _, count in slowed), sum(count for *_, count in reporting)
    return f"in {held} of {of} measurements, {slowed[0][0]}" if slowed else ""
