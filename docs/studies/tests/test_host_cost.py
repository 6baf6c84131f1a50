"""The measurement of host costs: what is timed, in which order, and what is written."""

from __future__ import annotations

import contextlib
import gc
import time

from docs.studies.host_cost import CALLS_PER_BLOCK, HostMethod, measure_host_costs


def busy_for(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_methods_take_turns_and_are_timed_alone() -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def slow_to_enter():
        log.append("enter")
        busy_for(1e-3)
        yield

    def call(name: str, seconds: float):
        def timed() -> None:
            log.append(name)
            assert not gc.isenabled() or len(log) <= 2 * CALLS_PER_BLOCK + 1  # on only while warming up
            busy_for(seconds)

        return timed

    methods = {
        "short": HostMethod(call=call("short", 50e-6), within=slow_to_enter),
        "long": HostMethod(call=call("long", 500e-6)),
    }
    costs = measure_host_costs(methods, rounds=6, synchronize=lambda: log.append("wait"))
    assert gc.isenabled()
    by_name = {cost.method: cost for cost in costs}
    assert 50 <= by_name["short"].median_us < 500 <= by_name["long"].median_us
    assert all(cost.p90_us >= cost.median_us for cost in costs)
    warmed_up = log[2 * CALLS_PER_BLOCK + 1 :]
    assert warmed_up.count("wait") == 12  # before every block, and never inside one
    blocks = [part.split() for part in " ".join(warmed_up).replace("enter ", "").split("wait")[1:]]
    assert all(len(block) == CALLS_PER_BLOCK and len(set(block)) == 1 for block in blocks)
    assert len({block[0] for block in blocks[:2]}) == 2  # every method once a round
    orders = {tuple(block[0] for block in blocks[i : i + 2]) for i in range(0, 12, 2)}
    assert len(orders) == 2
