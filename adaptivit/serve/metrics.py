"""Counters of a service, as Prometheus text. Written to from the event loop and from the worker thread."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_IMAGES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_WINDOW = 60.0  # seconds that a rate is taken over

_HELP = {
    "requests_total": ("counter", "Answers, by route and status."),
    "images_total": ("counter", "Images classified."),
    "batches_total": ("counter", "Passes of the model."),
    "tokens_total": ("counter", "Tokens computed, counted once for every block that computed them."),
    "tokens_saved_total": ("counter", "Tokens that the static model would have computed beside them."),
    "macs_total": ("counter", "Multiply-accumulates that ran."),
    "macs_saved_total": ("counter", "Multiply-accumulates that the static model would have run beside them."),
    "tokens_per_second": ("gauge", "Tokens computed, over the last minute."),
    "queue_images": ("gauge", "Images that wait for the model."),
    "requests_in_progress": ("gauge", "Requests under way."),
    "request_seconds": ("histogram", "From the first byte of a request to its answer."),
    "queue_seconds": ("histogram", "An image's wait for the model."),
    "batch_seconds": ("histogram", "A pass of the model."),
    "batch_images": ("histogram", "Images of a pass."),
}


class Metrics:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = {}
        self._counts: dict[tuple[str, str], list[int]] = {}  # of histograms, one a bucket and one for what lies above
        self._sums: dict[tuple[str, str], float] = {}
        self._recent: deque[tuple[float, float]] = deque()  # when, tokens

    def add(self, name: str, amount: float = 1.0, **labels: object) -> None:
        key = (name, _labels(labels))
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount
            if name == "tokens_total":
                now = time.monotonic()
                self._recent.append((now, amount))
                self._forget(now)

    def observe(self, name: str, value: float, **labels: object) -> None:
        key, edges = (name, _labels(labels)), _edges(name)
        with self._lock:
            counts = self._counts.setdefault(key, [0] * (len(edges) + 1))
            counts[bisect_left(edges, value)] += 1
            self._sums[key] = self._sums.get(key, 0.0) + value

    def get(self, name: str, **labels: object) -> float:
        with self._lock:
            return self._values.get((name, _labels(labels)), 0.0)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - _WINDOW:
            self._recent.popleft()

    def text(self, queue: int) -> str:
        """The exposition format, version 0.0.4."""
        with self._lock:
            self._forget(time.monotonic())
            values = dict(self._values) | {
                ("queue_images", ""): float(queue),
                ("tokens_per_second", ""): sum(n for _, n in self._recent) / _WINDOW,
            }
            counts, sums = {k: list(v) for k, v in self._counts.items()}, dict(self._sums)
        lines = []
        for name, (kind, meaning) in _HELP.items():
            full = f"adaptivit_{name}"
            lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}"]
            if kind == "histogram":
                for (_, labels), found in ((k, v) for k, v in sorted(counts.items()) if k[0] == name):
                    lines += _histogram(full, labels, found, sums[(name, labels)], _edges(name))
                continue
            found_values = [(labels, v) for (n, labels), v in sorted(values.items()) if n == name]
            lines += [f"{full}{_braced(labels)} {v:.17g}" for labels, v in found_values or [("", 0.0)]]
        return "\n".join(lines) + "\n"


def _edges(name: str) -> tuple[float, ...]:
    return _IMAGES if name == "batch_images" else _SECONDS


def _histogram(name: str, labels: str, counts: list[int], total: float, edges: tuple[float, ...]) -> list[str]:
    lines, below = [], 0
    for edge, count in zip((*(f"{e:g}" for e in edges), "+Inf"), counts, strict=True):
        below += count
        both = ",".join(filter(None, (labels, f'le="{edge}"')))
        lines.append(f"{name}_bucket{_braced(both)} {below}")
    return [*lines, f"{name}_sum{_braced(labels)} {total:.17g}", f"{name}_count{_braced(labels)} {below}"]


def _labels(labels: dict[str, object]) -> str:
    return ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""
