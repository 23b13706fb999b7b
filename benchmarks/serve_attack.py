"""What attackers cost one who asks for a picture at a time: the service under hostile load, over HTTP on loopback.

    python benchmarks/serve_attack.py IMAGES WEIGHTS OUT.csv --seconds 10 --turns 2

`adaptivit serve` runs in a process of its own, with its default limits. A bystander asks for one image after the
other, first alone, then beside each attack, in turns; an attack keeps eight requests under way from another address
(127.0.0.2; attacks marked "same address" from the bystander's). Memory is the peak of an attack above that of the idle
service; `busy_s` is how long the service went on after the last answer. It fails where the bystander's p99 is more
than ten times that alone, where it is refused, where an attacker gets a 5xx other than the time-out's 503 or no answer
to a whole request, and where an attack takes more than 1 GiB. Rows are appended.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import datetime
import http.client
import io
import itertools
import json
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import adaptivit
from adaptivit.data import dataset
from adaptivit.utils.csv import append_csv
from adaptivit.utils.hardware import device_name

BACKBONE = "deit_tiny_patch16_224"
BOMB = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\1\0\0\0\1\0\0\x08\2\0\0\0"  # a header of 65,536 x 65,536 pixels


# -- requests, as bytes ---------------------------------------------------------------------------------------------
def post(body: bytes, kind: str, path: str = "/v1/classify", head: str = "") -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{lines}Connection: close\r\n{head}\r\n".encode() + body


def form(*files: bytes, path: str = "/v1/classify", **fields: str) -> bytes:
    parts = [f'Content-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields.items()]
    for data in files:
        parts.append(b'Content-Disposition: form-data; name="images"; filename="a"\r\n\r\n' + data + b"\r\n")
    body = b"".join(b"--x\r\n" + part for part in parts) + b"--x--\r\n"
    return post(body, "multipart/form-data; boundary=x", path)


def flat(width: int, height: int, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (90, 120, 40)).save(out, kind, **options)
    return out.getvalue()


def scans(jpeg: bytes, count: int) -> bytes:
    """A progressive JPEG whose last scan is there again and again: bytes cost little, each scan a pass over it all."""
    last = jpeg.rindex(b"\xff\xda")
    return jpeg[:-2] + jpeg[last:-2] * count + jpeg[-2:]


def malformed(good: bytes) -> list[bytes]:
    """Requests that are refused."""
    kind = "application/json"
    return [
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        post(b"0\r\n\r\n", kind, head="Transfer-Encoding: chunked\r\n"),
        post(b'{"images": [', kind),
        post(b"[" * 1_000_000, kind),
        post(json.dumps({"images": ["%%%"] * 32}).encode(), kind),
        post(
            json.dumps({"inputs": [{"name": "images", "shape": [10**30, 3, 8, 8]}]}).encode(),
            kind,
            "/v2/models/adaptivit/infer",
        ),
        post(b"[" + b"0," * 7_000_000 + b"0]", kind),
        post(b"\0" * 17_000_000, kind),
        form(good[: len(good) // 2]),
        form(BOMB),
        form(b"no image at all"),
        form(*[good] * 33),
        form(good, top_k="-1"),
        form(good, budget="free"),
    ]


@dataclass
class Attack:
    name: str
    requests: list[bytes]
    way: str = "whole"  # half: the sending side is closed first; gone: the connection is, at once
    address: str = "127.0.0.2"


def attacks(good: bytes) -> list[Attack]:
    jpeg = flat(6200, 5000, "JPEG")  # 31 megapixels
    progressive = flat(6200, 5000, "JPEG", progressive=True)
    webp, strip = flat(5600, 5600, "WEBP", lossless=True), flat(16_000, 1, "PNG")
    text = json.dumps({"images": [base64.b64encode(jpeg).decode()] * 4}).encode()
    found = [
        Attack("32 images of 31 MP", [form(*[jpeg] * 32)]),
        Attack("4 images of 31 MP", [form(*[jpeg] * 4), post(text, "application/json")]),
        Attack("4 images of 31 MP, same address", [form(*[jpeg] * 4)], address="127.0.0.1"),
        Attack("4 images of 31 MP, half closed", [form(*[jpeg] * 4)], "half"),
        Attack("4 images of 31 MP, gone at once", [form(*[jpeg] * 4)], "gone"),
        Attack("4 WebP of 31 MP", [form(*[webp] * 4)]),
        Attack("JPEG of 31 MP, 90 scans", [form(scans(progressive, 80))]),
        Attack("JPEG of 31 MP, 20,000 scans", [form(scans(progressive, 20_000))]),
        Attack("32 images of 16,000 x 1", [form(*[strip] * 32)]),
        Attack("32 images of 224 x 224", [form(*[good] * 32)]),
        Attack("one image, half closed", [form(good)], "half"),
        Attack("the demo page's measurement", [form(good, path="/demo/look", time="1", picture="1")]),
        Attack("malformed", malformed(good)),
    ]
    return [*found, Attack("mixed", [request for attack in found for request in attack.requests])]


# -- who sends them -------------------------------------------------------------------------------------------------
@dataclass
class Load:
    attack: Attack
    port: int
    codes: Counter[str] = field(default_factory=Counter)
    sent: Any = field(default_factory=itertools.count)

    async def one(self) -> None:
        request = self.attack.requests[next(self.sent) % len(self.attack.requests)]
        way = self.attack.way
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self.port, local_addr=(self.attack.address, 0), limit=2**20
            )
        except OSError:
            self.codes["not connected"] += 1
            return
        try:
            writer.write(request)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            if way == "gone":
                await asyncio.sleep(0.05)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.codes["gone"] += 1
                return
            if way == "half":
                writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 90)
            found = re.match(rb"HTTP/1.1 (\d+)", answer)
            self.codes[found[1].decode() if found else "no answer"] += 1
        except (OSError, TimeoutError):
            self.codes["gone" if way == "gone" else "no answer"] += 1
        finally:
            writer.close()

    async def all(self, seconds: float, under_way: int) -> None:
        until = time.perf_counter() + seconds

        async def worker() -> None:
            while time.perf_counter() < until:
                await self.one()

        await asyncio.gather(*(worker() for _ in range(under_way)))


@dataclass
class Bystander:
    port: int
    data: bytes
    latencies: list[float] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)

    def ask(self, goes_on: Callable[[], bool]) -> None:
        """One image after the other."""
        while goes_on():
            begun = time.perf_counter()
            try:
                line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=90)
                line.request("POST", "/v1/classify", self.data, {"Content-Type": "multipart/form-data; boundary=x"})
                answer = line.getresponse()
                answer.read()
                line.close()
                code = str(answer.status)
            except (OSError, http.client.HTTPException):
                code = "no answer"
            self.codes[code] += 1
            self.latencies.append(time.perf_counter() - begun)
            time.sleep(0.01)


# -- the service ----------------------------------------------------------------------------------------------------
@dataclass
class Served:
    process: subprocess.Popen[str]
    port: int

    def memory(self, name: str = "VmRSS") -> int:
        """MiB"""
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(found[1]) // 1024 if found else 0

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def cpu(self) -> float:
        """Seconds of CPU so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def idle(self) -> float:
        """Seconds until it computes nothing."""
        begun = time.perf_counter()
        while True:
            before = self.cpu()
            time.sleep(0.25)
            if self.cpu() - before < 0.05:
                return max(0.0, time.perf_counter() - begun - 0.25)


def start(place: Path, log: Path) -> Served:
    command = [sys.executable, "-m", "adaptivit", "serve", str(place), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log.open("w"), text=True)
    assert process.stdout is not None
    found = re.search(r"http://\S+:(\d+)/", process.stdout.readline())
    if found is None:
        raise SystemExit(f"the service did not start: {log.read_text()}")
    return Served(process, int(found[1]))


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


@dataclass
class Figures:
    bystander: Bystander
    load: Load | None = None
    peak: int = 0
    busy: float = 0.0


def turn(served: Served, figures: Figures, seconds: float, under_way: int) -> None:
    served.forget_peak()
    load = figures.load
    if load is None:
        until = time.perf_counter() + seconds
        figures.bystander.ask(lambda: time.perf_counter() < until)
    else:
        thread = threading.Thread(target=lambda: asyncio.run(load.all(seconds, under_way)))
        thread.start()
        figures.bystander.ask(thread.is_alive)
        thread.join()
    figures.busy = max(figures.busy, served.idle())
    figures.peak = max(figures.peak, served.memory("VmHWM"))


def commit() -> str:
    words = ["git", "-C", str(Path(adaptivit.__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True)
    return found.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("images", "weights", "out"):
        parser.add_argument(name)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack in a turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--under-way", type=int, default=8, help="requests of the attacker at once")
    parser.add_argument("--only", nargs="+", help="attacks whose names hold one of these")
    given = parser.parse_args()
    item = dataset.for_evaluation(given.images, "auto").items[0]
    good = Path(str(item)).read_bytes()
    body = form(good).partition(b"\r\n\r\n")[2]
    failures: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        adaptivit.create(BACKBONE, "static", weights=given.weights).save_pretrained(folder / "model")
        served = start(folder / "model", folder / "log")
        stack.callback(served.process.kill)
        chosen = [a for a in attacks(good) if not given.only or any(word in a.name for word in given.only)]
        turn(served, Figures(Bystander(served.port, body)), 3.0, 0)  # warm
        idle = served.memory()
        alone = Figures(Bystander(served.port, body))
        under = [Figures(Bystander(served.port, body), Load(attack, served.port)) for attack in chosen]
        for number in range(given.turns):
            for figures in (alone, *under):
                turn(served, figures, given.seconds, given.under_way)
                name = figures.load.attack.name if figures.load else "alone"
                p99 = 1e3 * percentile(figures.bystander.latencies, 0.99)
                print(
                    f"turn {number + 1}: {name}: p99 {p99:.0f} ms, {dict(figures.load.codes) if figures.load else ''}",
                    flush=True,
                )
        first = percentile(alone.bystander.latencies, 0.99)
        for figures in (alone, *under):
            latencies, codes = figures.bystander.latencies, figures.bystander.codes
            by = figures.load.codes if figures.load else Counter()
            name = figures.load.attack.name if figures.load else "alone"
            row = {
                "attack": name,
                "bystander_requests": len(latencies),
                "bystander_refused": len(latencies) - codes["200"],
                "p50_ms": 1e3 * percentile(latencies, 0.5),
                "p99_ms": 1e3 * percentile(latencies, 0.99),
                "p99_of_alone": percentile(latencies, 0.99) / first,
                "attacker_requests": sum(by.values()),
                "attacker_answers": " ".join(f"{code}:{n}" for code, n in sorted(by.items())),
                "peak_mib_above_idle": figures.peak - idle,
                "busy_s": figures.busy,
                "idle_mib": idle,
                "under_way": given.under_way,
                "seconds": given.seconds,
                "turns": given.turns,
                "backbone": BACKBONE,
                "device": device_name(torch.device("cpu")),
                "date": datetime.date.today().isoformat(),
                "torch": torch.__version__,
                "commit": commit(),
            }
            append_csv(given.out, {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
            print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in list(row.items())[:10]))
            bad = {
                f"p99 of {row['p99_of_alone']:.1f} times that alone": row["p99_of_alone"] > 10,
                "the bystander was refused": row["bystander_refused"],
                "no answer": by["no answer"] + by["not connected"],
                "5xx": sum(n for code, n in by.items() if code.startswith("5") and code != "503"),
                f"{row['peak_mib_above_idle']} MiB": row["peak_mib_above_idle"] > 1024,
            }
            failures += [f"{name}: {what}" for what, n in bad.items() if n]
        lines = (folder / "log").read_text().splitlines()
        print(f"{len(lines)} lines on stderr", *lines[:5], sep="\n")
        failures += [f"{len(lines)} lines on stderr"] if lines else []
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
