"""Interleaved timing: every contender in every round, so that clocks and heat hit all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

Call = Callable[[], Any]


def interleave(
    contenders: dict[str, Call],
    rounds: int = 11,
    calls: int = 5,
    wait: dict[str, Call] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each contender, one entry per round.

    Args:
      contenders: functions that enqueue one piece of work and return its results.
      rounds: how often each contender is measured; the order rotates.
      calls: calls per measurement, enqueued without waiting in between.
      wait: functions that wait for the device, for contenders that return no JAX arrays.
    """
    wait = wait or {}

    def measure(name: str) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = contenders[name]()
        wait.get(name, lambda: jax.block_until_ready(result))()
        return (time.perf_counter() - start) / calls

    names = list(contenders)
    for name in names:  # compile and warm up
        measure(name)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for i in range(len(names)):
            name = names[(i + number) % len(names)]
            seconds[name].append(measure(name))
    return seconds


def median(seconds: list[float]) -> float:
    """Median over the rounds."""
    return statistics.median(seconds)


def ratio(slow: list[float], fast: list[float]) -> float:
    """Median over the rounds of slow / fast within one round: above 1, `fast` is faster."""
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))
