"""A bounded load test of the whole service over HTTP on loopback, with malformed requests mixed in.

    python benchmarks/serve_load.py IMAGES WEIGHTS OUT.csv --policies static evit --budget=-33% --seconds 40

Every contender is `adaptivit serve` in a process of its own, with a bearer of load that keeps so many requests under
way, decoding included; every tenth request is malformed in one of several ways. Contenders take turns, so that what
else the machine does hits all alike. A contender fails where an answer is lost, is a 5xx, or is not the one that the
same file got before. Its memory is read at a quarter of the time and at the end. At last it is told to stop while
requests are under way: all that were accepted must be answered. Rows are appended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

import adaptivit
from adaptivit.data import dataset
from adaptivit.policies import spec as settings
from adaptivit.utils.csv import append_csv
from adaptivit.utils.hardware import device_name

BACKBONE = "deit_tiny_patch16_224"
BOMB = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\1\0\0\0\1\0\0\x08\2\0\0\0"  # a header of 65,536 x 65,536 pixels


@dataclass
class Contender:
    spec: str
    process: subprocess.Popen[str]
    address: str
    latencies: list[float] = field(default_factory=list)
    codes: Counter[int] = field(default_factory=Counter)
    malformed: Counter[int] = field(default_factory=Counter)
    said: dict[int, Any] = field(default_factory=dict)  # of each file
    sent: int = 0
    answered: int = 0
    wrong: int = 0
    seconds: float = 0.0
    memory: list[int] = field(default_factory=list)  # MiB

    def resident(self) -> None:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        self.memory.append(int(found[1]) // 1024 if found else 0)


def malformed(number: int, good: bytes) -> dict[str, Any]:
    """A request that must be refused."""
    kinds: list[dict[str, Any]] = [
        {"files": [("images", ("a.jpg", good[: len(good) // 2]))]},
        {"files": [("images", ("a.png", BOMB))]},
        {"files": [("images", ("a.txt", b"no image at all"))]},
        {"content": b'{"images": [', "headers": {"content-type": "application/json"}},
        {"json": {"images": ["%%%"]}},
        {"files": [("images", ("a.jpg", good))], "data": {"top_k": "-1"}},
        {"files": [("images", ("a.jpg", good))], "data": {"budget": "free"}},
        {"files": [("images", ("a.jpg", good))] * 33},
        {"content": b"\0" * 17_000_000, "headers": {"content-type": "application/json"}},
    ]
    return kinds[number % len(kinds)]


async def one(client: httpx.AsyncClient, contender: Contender, number: int, files: list[bytes]) -> None:
    index = number % len(files)
    contender.sent += 1
    try:
        await _one(client, contender, number, files, index)
    except httpx.HTTPError as error:  # lost
        print(f"{contender.spec}: request {number} has no answer: {error!r}", flush=True)


async def _one(client: httpx.AsyncClient, contender: Contender, number: int, files: list[bytes], index: int) -> None:
    if number % 10 == 9:
        answer = await client.post("/v1/classify", **malformed(number // 10, files[index]))
        contender.malformed[answer.status_code] += 1
    else:
        begun = time.perf_counter()
        answer = await client.post("/v1/classify", files=[("images", ("a", files[index]))])
        contender.codes[answer.status_code] += 1
        if answer.status_code == 200:
            contender.latencies.append(time.perf_counter() - begun)
            top = answer.json()["images"][0]["classes"][0]["class"]
            contender.wrong += contender.said.setdefault(index, top) != top
    contender.answered += 1


async def load(contender: Contender, files: list[bytes], seconds: float, under_way: int, numbers: Any) -> None:
    """Keep so many requests under way for so long."""
    until = time.perf_counter() + seconds
    begun = time.perf_counter()
    limits = httpx.Limits(max_connections=under_way, max_keepalive_connections=under_way)
    async with httpx.AsyncClient(base_url=contender.address, timeout=60, limits=limits) as client:

        async def worker() -> None:
            while time.perf_counter() < until:
                await one(client, contender, next(numbers), files)

        await asyncio.gather(*(worker() for _ in range(under_way)))
    contender.seconds += time.perf_counter() - begun


async def stopped(contender: Contender, files: list[bytes], under_way: int) -> tuple[int, int]:
    """(answered, accepted) of requests that are under way when the service is told to stop."""
    async with httpx.AsyncClient(base_url=contender.address, timeout=60) as client:
        sent = [
            asyncio.ensure_future(client.post("/v1/classify", files=[("images", ("a", files[i % len(files)]))]))
            for i in range(under_way)
        ]
        while True:  # all of them have been taken up
            text = (await client.get("/metrics")).text
            found = re.search(r"requests_in_progress (\d+)", text)
            taken = int(found[1]) - 1 if found else 0  # this question is one of them
            if taken + sum(s.done() for s in sent) >= under_way:
                break
        contender.process.send_signal(signal.SIGTERM)
        answers = await asyncio.gather(*sent, return_exceptions=True)
    good = sum(isinstance(a, httpx.Response) and a.status_code == 200 for a in answers)
    return good, under_way


def start(spec: str, place: Path) -> Contender:
    command = [sys.executable, "-m", "adaptivit", "serve", str(place), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    if found is None:
        raise SystemExit(f"{spec} did not start: {line}")
    return Contender(spec, process, found[0].rstrip("/"))


def checkpoint(spec: str, given: argparse.Namespace, place: Path) -> None:
    from serve_worker import tensors

    torch.manual_seed(given.seed)
    name, values = settings.parse(spec)
    model = adaptivit.create(BACKBONE, name, weights=given.weights, **values)
    if spec != "static":
        model.calibrate(tensors(given.images, 64), given.budget)
    model.save_pretrained(place)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("images", "weights", "out"):
        parser.add_argument(name)
    parser.add_argument("--policies", nargs="+", default=["static", "evit"])
    parser.add_argument("--budget", default="-33%")
    parser.add_argument("--seconds", type=float, default=40.0, help="of load for each contender, in all its turns")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--under-way", type=int, default=32)
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = dataset.for_evaluation(given.images, "auto").spread(given.files)
    files = [Path(str(item)).read_bytes() for item in found.items]
    failures: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contenders = []
        for i, spec in enumerate(given.policies):
            checkpoint(spec, given, folder / str(i))
            contenders.append(start(spec, folder / str(i)))
            stack.callback(contenders[-1].process.kill)
            print(f"{spec} is up", flush=True)
        for turn in range(given.turns):
            for contender in contenders:
                numbers = itertools.count(contender.sent)
                asyncio.run(load(contender, files, given.seconds / given.turns, given.under_way, numbers))
                contender.resident()
                print(f"turn {turn + 1}: {contender.spec} {contender.memory[-1]} MiB", flush=True)
        for contender in contenders:
            answered, accepted = asyncio.run(stopped(contender, files, given.under_way))
            code = contender.process.wait(60)
            good = contender.codes[200]
            every = contender.codes + contender.malformed
            row = {
                "policy": contender.spec,
                "budget": "" if contender.spec == "static" else given.budget,
                "images_per_s": good / contender.seconds,
                "p50_ms": 1e3 * percentile(contender.latencies, 0.5),
                "p99_ms": 1e3 * percentile(contender.latencies, 0.99),
                "under_way": given.under_way,
                "seconds": contender.seconds,
                "requests": contender.sent,
                "lost": contender.sent - contender.answered,
                "answers_200": good,
                "answers_429": every[429],
                "answers_4xx": sum(n for c, n in contender.malformed.items() if 400 <= c < 500),
                "malformed": sum(contender.malformed.values()),
                "answers_5xx": sum(n for c, n in every.items() if c >= 500),
                "changed_answers": contender.wrong,
                "mib_first_turn": contender.memory[0],
                "mib_last_turn": contender.memory[-1],
                "answered_while_stopping": f"{answered}/{accepted}",
                "exit_code": code,
                "backbone": BACKBONE,
                "turns": given.turns,
                "seed": given.seed,
                "device": device_name(torch.device("cpu")),
                "date": datetime.date.today().isoformat(),
                "torch": torch.__version__,
                "adaptivit": adaptivit.__version__,
            }
            append_csv(given.out, {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
            print(", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in list(row.items())[:19]))
            bad = {
                "answers lost": row["lost"],
                "5xx": row["answers_5xx"],
                "malformed requests that were carried out": row["malformed"] - row["answers_4xx"],
                "changed answers": contender.wrong,
                "not answered while stopping": accepted - answered,
                "exit code": code,
                "MiB grown by more than 10 %": max(0, contender.memory[-1] - int(1.1 * contender.memory[0])),
            }
            failures += [f"{contender.spec}: {n} {what}" for what, n in bad.items() if n]
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
