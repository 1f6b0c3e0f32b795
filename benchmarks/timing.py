"""Interleaved timing: every contender in every round, so that clocks and heat hit all alike."""

from __future__ import annotations

import glob
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Call = Callable[[], Any]


class Clock:
    """Runs contenders and times them: by the wall, and by what the device spent in kernels.

    Device time is the sum of all kernel and copy durations between two marker kernels, from JAX's
    profiler. It leaves out launches and gaps, also those between the kernels of one contender.
    """

    def __init__(self, contenders: dict[str, Call], wait: dict[str, Call] | None = None) -> None:
        """`wait`: functions that wait for the device, for contenders without JAX arrays."""
        self._contenders = contenders
        self._wait = wait or {}
        self._marker_operand = jnp.zeros((3, 5, 7))
        self._marker = jax.jit(benchmark_marker)

    def wall(self, rounds: int = 11, calls: int = 5) -> dict[str, list[float]]:
        """Seconds per call of each contender, one entry per round.

        Args:
          rounds: how often each contender is measured; the order rotates.
          calls: calls per measurement, enqueued without waiting in between.
        """
        for name in self._contenders:  # compile and warm up
            self._run(name, 1)
        seconds: dict[str, list[float]] = {name: [] for name in self._contenders}
        for name in self._rotating(rounds):
            start = time.perf_counter()
            self._run(name, calls)
            seconds[name].append((time.perf_counter() - start) / calls)
        return seconds

    def device(self, rounds: int = 11) -> dict[str, list[float]]:
        """Device seconds per call of each contender, one entry per round."""
        for name in self._contenders:
            self._run(name, 1)
        self._mark()
        order = self._rotating(rounds)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self._mark()
                for name in order:
                    self._run(name, 1)
                    self._mark()
            (path,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
            events = _device_events(path)
        segments = _between_markers(events)
        if len(segments) != len(order):
            raise RuntimeError(f"the trace has {len(segments)} parts, not {len(order)}")
        seconds: dict[str, list[float]] = {name: [] for name in self._contenders}
        for name, nanoseconds in zip(order, segments, strict=True):
            seconds[name].append(nanoseconds * 1e-9)
        return seconds

    def _rotating(self, rounds: int) -> list[str]:
        names = list(self._contenders)
        return [names[(i + n) % len(names)] for n in range(rounds) for i in range(len(names))]

    def _run(self, name: str, calls: int) -> None:
        for _ in range(calls):
            result = self._contenders[name]()
        self._wait.get(name, lambda: jax.block_until_ready(result))()

    def _mark(self) -> None:
        self._marker(self._marker_operand).block_until_ready()


def benchmark_marker(x: jax.Array) -> jax.Array:
    """Delimits the contenders in a trace, which tells the name of the program of each kernel."""
    return jnp.tanh(x)


def _device_events(path: str) -> list[tuple[float, float, bool]]:
    """Start and duration in ns of what ran on a GPU, in order, and whether it is the marker's."""
    events = []
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                marks = any(benchmark_marker.__name__ in str(value) for _, value in event.stats)
                events.append((event.start_ns, event.duration_ns, marks))
    return sorted(events)


def _between_markers(events: list[tuple[float, float, bool]]) -> list[float]:
    """Summed durations of the events between two runs of the marker."""
    segments: list[float] = []
    inside_marker = False
    for _, duration, marks in events:
        if marks:
            if not inside_marker:
                segments.append(0.0)
        elif segments:
            segments[-1] += duration
        inside_marker = marks
    return segments[:-1]


def median(seconds: list[float]) -> float:
    """Median over the rounds."""
    return statistics.median(seconds)


def ratio(slow: list[float], fast: list[float]) -> float:
    """Median over the rounds of slow / fast within one round: above 1, `fast` is faster."""
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))
