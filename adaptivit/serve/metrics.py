"""Counters of a service as Prometheus text, safe to write from several threads."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict, deque

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_WINDOW = 60.0  # seconds of the rate

_HELP = {
    "requests_total": ("counter", "Answers, by route and status; route malformed: no HTTP."),
    "images_total": ("counter", "Images answered."),
    "batches_total": ("counter", "Passes of the model."),
    "tokens_total": ("counter", "Tokens computed, summed over blocks."),
    "tokens_saved_total": ("counter", "Tokens that the static model would have computed in addition."),
    "macs_total": ("counter", "Multiply-accumulates computed."),
    "macs_saved_total": ("counter", "Multiply-accumulates that the static model would have computed in addition."),
    "tokens_per_second": ("gauge", "Tokens computed, over the last minute."),
    "queue_images": ("gauge", "Images that wait for the model."),
    "requests_in_progress": ("gauge", "Requests under way."),
    "request_seconds": ("histogram", "From the first byte of a request to its answer."),
    "queue_seconds": ("histogram", "An image's wait for the model."),
    "batch_seconds": ("histogram", "A pass of the model."),
    "batch_images": ("histogram", "Images of a pass."),
}
_EDGES = {"batch_images": tuple(float(2**i) for i in range(9))}
_EDGES |= dict.fromkeys(("request_seconds", "queue_seconds", "batch_seconds"), _SECONDS)


class Metrics:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # of counters and gauges
        self._counts: dict[str, dict[str, list[int]]] = defaultdict(dict)  # of histograms: by bucket, and above all
        self._sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._recent: deque[tuple[float, float]] = deque()  # when, tokens

    def add(self, name: str, amount: float = 1.0, **labels: object) -> None:
        key = _labels(labels)
        with self._lock:
            self._values[name][key] += amount
            if name == "tokens_total":
                self._recent.append((time.monotonic(), amount))
                self._forget()

    def observe(self, name: str, value: float, **labels: object) -> None:
        key, edges = _labels(labels), _EDGES[name]
        with self._lock:
            counts = self._counts[name].setdefault(key, [0] * (len(edges) + 1))
            counts[bisect_left(edges, value)] += 1
            self._sums[name][key] += value

    def get(self, name: str, **labels: object) -> float:
        with self._lock:
            return self._values[name].get(_labels(labels), 0.0)

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - _WINDOW:
            self._recent.popleft()

    def text(self, queue: int) -> str:
        """The exposition format, version 0.0.4."""
        lines = []
        with self._lock:
            self._forget()
            self._values["queue_images"][""] = queue
            self._values["tokens_per_second"][""] = sum(n for _, n in self._recent) / _WINDOW
            for name, (kind, meaning) in _HELP.items():
                lines += [f"# HELP adaptivit_{name} {meaning}", f"# TYPE adaptivit_{name} {kind}"]
                if kind == "histogram":
                    for labels, counts in sorted(self._counts[name].items()):
                        lines += _histogram(name, labels, counts, self._sums[name][labels])
                else:
                    found = sorted(self._values[name].items()) or [("", 0.0)]
                    lines += [_line(name, labels, value) for labels, value in found]
        return "\n".join(lines) + "\n"


def _histogram(name: str, labels: str, counts: list[int], total: float) -> list[str]:
    lines, below = [], 0
    for edge, count in zip((*(f"{e:g}" for e in _EDGES[name]), "+Inf"), counts, strict=True):
        below += count
        lines.append(_line(f"{name}_bucket", ",".join(filter(None, (labels, f'le="{edge}"'))), below))
    return [*lines, _line(f"{name}_sum", labels, total), _line(f"{name}_count", labels, below)]


def _line(name: str, labels: str, value: float) -> str:
    return f"adaptivit_{name}{f'{{{labels}}}' if labels else ''} {value:.17g}"


def _labels(labels: dict[str, object]) -> str:
    return ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))
