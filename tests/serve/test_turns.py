"""Fair turns between clients; work that was cancelled is not begun; budgets of pixels."""

from __future__ import annotations

import asyncio
import io
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from PIL import Image

import adaptivit
from adaptivit.serve import Batcher, Job, Service, turns
from adaptivit.serve.batcher import QueueFull
from adaptivit.serve.config import Limits, share
from adaptivit.serve.turns import Asker, Room, Workers, next_turn
from tests.support.models import pictures, tiny
from tests.support.serving import error, files, photo, running, until

pytestmark = pytest.mark.xdist_group("serve_limits")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("static")


@dataclass
class Piece:
    asker: Asker
    turn: float


def test_turns_are_shared_by_clients_then_by_requests() -> None:
    waiting: list[Piece] = []

    def add(client: str, request: int, cost: float, count: int, now: float = 0.0) -> None:
        for _ in range(count):
            waiting.append(Piece(Asker(client, request), next_turn(now, Asker(client, request), cost, waiting)))

    for request in range(8):
        add("attacker", request, 31e6, 4)
    add("other", 0, 1e5, 1)
    add("attacker", 8, 1e5, 1)  # the same address: behind a proxy, all have one
    order = sorted(waiting, key=lambda piece: piece.turn)
    assert [piece.asker for piece in order[:2]] == [("other", 0), ("attacker", 8)]
    assert [piece.turn for piece in waiting[:4]] == [31e6, 62e6, 93e6, 124e6]
    waiting = []
    add("large", 0, 100.0, 1)
    for i in range(200):  # small ones without end: the large one is not passed for ever
        add(f"small {i}", 0, 1.0, 1, now=float(i))
    assert sum(piece.turn < 100.0 for piece in waiting) == 99


def test_a_client_leaves_room_for_others() -> None:
    assert [share(n) for n in (1, 3, 4, 64)] == [1, 3, 3, 48]
    room = Room(8)
    with room.held("a", 6):
        assert not room.fits("a", 1)
        assert room.fits("b", 2)
        assert not room.fits("b", 3)
    assert room.fits("a", 6)
    assert not room._taken


def test_cancelled_work_is_not_begun_and_small_work_passes_large() -> None:
    begun: list[str] = []
    go = threading.Event()

    def work(name: str) -> str:
        begun.append(name)
        assert name == "small" or go.wait(60)
        return name

    async def main() -> None:
        workers = Workers(2, large=10)
        asked = [asyncio.ensure_future(workers.run(Asker("a"), 100, work, f"large {i}")) for i in range(3)]
        await asyncio.sleep(0)
        assert await workers.run(Asker("a", 1), 1, work, "small") == "small"  # one thread is kept for those
        asked[1].cancel()
        await asyncio.sleep(0)
        go.set()
        assert await asked[2] == "large 2"
        workers.close()

    asyncio.run(main())
    assert begun == ["large 0", "small", "large 2"]


def test_large_work_goes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[int] = []
    monkeypatch.setattr(turns.sys, "platform", "linux")
    monkeypatch.setattr(turns.os, "setpriority", lambda _, thread, nice: lowered.append(thread))

    def lower() -> bool:
        return threading.get_native_id() in lowered

    async def main() -> tuple[bool, bool]:
        workers = Workers(2, large=10)
        found = await workers.run(Asker("a"), 100, lower), await workers.run(Asker("a"), 1, lower)
        workers.close()
        return found

    assert asyncio.run(main()) == (True, False)


def test_decoding_ends_with_its_time_out(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, begun = Service._tensor, []

    def slowly(*given: Any) -> Any:
        begun.append(given)
        time.sleep(0.2)
        return decode(*given)

    monkeypatch.setattr(Service, "_tensor", slowly)
    service = Service(model, limits=Limits(timeout=0.5), wait=0.0)
    with running(service, with_page=False) as found, found.client() as client:
        assert "no answer within 0.5 s" in error(client.post("/v1/classify", files=files(*[photo()] * 32)), 503)
        count = len(begun)
        assert 1 <= count <= 8
        time.sleep(0.5)
        assert len(begun) == count
    begun.clear()
    broken = [photo(), b"GIF89a" + b"\1" * 20, *[photo()] * 30]
    # a service of its own: the first has kept its connection idle for as long as its time-out, and may be closing it
    with running(Service(model, wait=0.0), with_page=False) as found, found.client() as client:
        error(client.post("/v1/classify", files=files(*broken)), 422)  # by its header: nothing is decoded
    assert begun == []


def test_work_of_a_client_that_has_gone_is_not_begun(model: Any) -> None:
    service, go, begun = Service(model, wait=0.0), threading.Event(), []
    service._tensor = lambda *given: begun.append(given) or go.wait(60)  # type: ignore
    with running(service, with_page=False) as found:
        line = socket.create_connection(("127.0.0.1", found.port), timeout=60)
        request = httpx.Request("POST", found.address + "/v1/classify", files=files(*[photo()] * 8))
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        line.sendall(f"POST /v1/classify HTTP/1.1\r\n{head}\r\n".encode() + request.read())
        until(lambda: len(begun) == 2)  # a thread each
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.close()  # resets the connection
        until(lambda: service.metrics.get("requests_total", route="/v1/classify", code=499) == 1)
        go.set()
        until(lambda: not service._workers._begun)
    assert len(begun) == 2


def test_a_slow_model_has_small_batches(model: Any) -> None:
    batcher = Batcher(model, wait=0.5, longest=1.0)
    assert batcher._room() == batcher.tokens
    batcher._pace = 1 / 17  # an image in a second
    assert batcher._room() == batcher.tokens / 4
    batcher._seen = {"a": 0.0, "b": 0.0}
    batcher._pace = 1 / (2 * 8.5 * 17)  # of half a second
    assert batcher._room() == pytest.approx(8.5 * 17)
    batcher._seen, batcher._pace = {}, 1 / (5.5 * 17)
    answers = [f.result(60).images for f in batcher.submit([Job(image) for image in pictures(8)])]
    batcher.close()
    assert answers[:5] == [5] * 5


def test_a_client_shares_the_batches_that_others_wait_for(model: Any) -> None:
    batcher, begun, go = Batcher(model, wait=0.0, longest=1e-9), threading.Event(), threading.Event()
    held = batcher.call(lambda: begun.set() or go.wait(60))
    assert begun.wait(60)  # the model's thread waits
    many = batcher.submit([Job(image, asker=Asker("a", 1)) for image in pictures(4)])
    few = batcher.submit([Job(image, asker=Asker("b", 2)) for image in pictures(2)])
    batcher._pace = 1e-9
    go.set()
    assert held.result(60)
    images = [future.result(60).images for future in (*few, *many)]
    batcher.close()
    assert images == [4] * 4 + [2] * 2  # two of each, then those that are left


def test_pixels_of_a_request_and_of_all_are_limited(model: Any) -> None:
    limits = Limits(max_pixels=0.01, max_request_pixels=0.02, max_pixels_under_way=0.024)
    service, go = Service(model, limits=limits, wait=0.0), threading.Event()
    decode = service._tensor
    service._tensor = lambda *given: go.wait(60) and decode(*given)  # type: ignore
    with running(service, with_page=False) as found, found.client() as client, ThreadPoolExecutor(1) as pool:
        out = io.BytesIO()
        Image.new("RGB", (100, 100)).save(out, "PNG")
        shot = out.getvalue()
        line = "The images have too many pixels together; at most 0.02 million are taken."
        assert error(client.post("/v1/classify", files=files(shot, shot, shot)), 413) == line
        first = pool.submit(client.post, "/v1/classify", files=files(shot, shot))
        until(lambda: service._pixels._taken.total() == 20_000)
        refused = client.post("/v1/classify", files=files(shot))
        assert "wait to be decoded" in error(refused, 429)
        assert refused.headers["retry-after"] == "1"
        go.set()
        assert first.result().status_code == 200
        assert client.post("/v1/classify", files=files(shot)).status_code == 200


def test_scans_of_a_jpeg_count_as_pixels(model: Any) -> None:
    out = io.BytesIO()
    Image.open(io.BytesIO(photo())).save(out, "JPEG", progressive=True)
    jpeg = out.getvalue()
    last = jpeg.rindex(b"\xff\xda")
    service = Service(model, limits=Limits(max_pixels=0.01, max_request_pixels=0.01), wait=0.0)
    with running(service, with_page=False) as found, found.client() as client:
        for times, status in ((0, 200), (80, 200), (100, 413)):  # 32 x 32 pixels, once for ten scans
            many = jpeg[:-2] + jpeg[last:-2] * times + jpeg[-2:]
            assert client.post("/v1/classify", files=files(many)).status_code == status


@pytest.fixture
def held(model: Any) -> Iterator[Any]:
    """A service whose model waits until it may go."""
    service, go, begun = Service(model, wait=0.0, batch_images=2), threading.Event(), []
    run = service.batcher._pass

    def wait(batch: list[Job]) -> Any:
        begun.append([job.asker.client for job in batch])
        assert go.wait(60)
        return run(batch)

    service.batcher._pass = wait  # type: ignore[method-assign]
    yield service.batcher, go, begun
    go.set()
    service.close()


def test_the_model_takes_clients_in_turns(held: Any) -> None:
    batcher, go, begun = held
    image = pictures(1)[0]

    def jobs(client: str, request: int, count: int) -> list[Job]:
        return [Job(image, asker=Asker(client, request)) for _ in range(count)]

    first = batcher.submit(jobs("a", 0, 2))
    until(lambda: len(begun) == 1)
    answers = first + [f for i in range(6) for f in batcher.submit(jobs("a", i, 32))]
    with pytest.raises(QueueFull, match="192 of one client"):
        batcher.submit(jobs("a", 9, 1))
    answers += batcher.submit(jobs("b", 0, 2))
    for answer in answers[2:4]:
        answer.cancel()  # makes room
    answers += batcher.submit(jobs("a", 9, 2))
    go.set()
    assert all(answer.cancelled() or answer.result(60) for answer in answers)
    assert begun[0] == ["a", "a"]
    assert sum(batch.count("b") for batch in begun[1:4]) == 2
    assert sum(map(len, begun)) == 2 + 192 - 2 + 2 + 2


def test_limits_that_do_not_fit_together() -> None:
    with pytest.raises(adaptivit.UserError, match="max_request_pixels: expected room for at least one image of 200"):
        Limits(max_pixels=200)
    with pytest.raises(adaptivit.UserError, match="max_pixels_under_way: expected room"):
        Limits(max_request_pixels=600)
