"""Taking samples: pacing, interleaving, and a GPU that never waits at the power cap."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from tiledsched.measure import timing
from tiledsched.measure.timing import sample_rounds


class Watch:
    """Notes what is queued and read, and when."""

    def __init__(self) -> None:
        self.queued: list[tuple[int, bool, float]] = []
        self.waiting = 0
        self.waiting_after_reads: list[int] = []

    def queue(self, index: int, *, paced: bool) -> int:
        self.queued.append((index, paced, time.perf_counter()))
        self.waiting += 1
        return index

    def read(self, queued: int) -> float:
        self.waiting -= 1
        self.waiting_after_reads.append(self.waiting)
        return 100.0 + queued


class Log:
    polls = 0

    def poll(self) -> None:
        self.polls += 1


def test_burst_is_paced_interleaved_and_shuffled() -> None:
    watch, log = Watch(), Log()
    samples = sample_rounds(watch, 3, rounds=6, regime="burst", rng=random.Random(1), log=log)
    assert samples == [[100.0 + i] * 6 for i in range(3)]
    rounds = [[index for index, _, _ in watch.queued[i : i + 3]] for i in range(0, 18, 3)]
    assert all(sorted(order) == [0, 1, 2] for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1
    starts = [start for _, _, start in watch.queued]
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert min(gaps) >= 0.9 * timing.BURST_GAP_S
    assert all(paced for _, paced, _ in watch.queued)
    assert log.polls == 6


def test_sustained_keeps_a_round_queued_and_counts_only_warm_samples(monkeypatch) -> None:
    monkeypatch.setattr(timing, "SUSTAINED_WARMUP_S", 0.05)
    watch, log = Watch(), Log()
    started = time.perf_counter()
    samples = sample_rounds(watch, 2, rounds=4, regime="sustained", rng=random.Random(1), log=log)
    assert time.perf_counter() - started >= 0.05
    assert samples == [[100.0] * 4, [101.0] * 4]
    assert len(watch.queued) > 2 * 4
    assert not any(paced for _, paced, _ in watch.queued)
    assert log.polls == 4
    assert watch.waiting == 0
    assert min(watch.waiting_after_reads[:-2]) >= 2  # the next round is queued before this one is read


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_the_same_seed_gives_the_same_orders(monkeypatch, regime) -> None:
    monkeypatch.setattr(timing, "SUSTAINED_WARMUP_S", 0.0)
    monkeypatch.setattr(timing, "BURST_GAP_S", 0.0)
    orders = []
    for _ in range(2):
        watch = Watch()
        sample_rounds(watch, 4, rounds=3, regime=regime, rng=random.Random(5), log=Log())
        orders.append([index for index, _, _ in watch.queued][:12])
    assert orders[0] == orders[1]
