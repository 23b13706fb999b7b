"""The service's limits, each of them: sizes, counts, times, tokens, names, paths; and a clean end."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from adaptivit.cli.main import main
from adaptivit.cli.serve import ServeConfig
from adaptivit.serve import Job, Service, command
from adaptivit.serve.config import Limits
from tests.support.models import pictures, tiny
from tests.support.serving import Running, error, files, photo, running, until

pytestmark = pytest.mark.xdist_group("serve_limits")  # one service

SMALL = Limits(max_upload=0.2, max_pixels=0.02, max_images=4, max_queue=8, max_requests=6, timeout=60.0)


@pytest.fixture(scope="module")
def model() -> Any:
    made = tiny("aht", beta=-1.0)
    made.calibrate(pictures(32))
    return made


@pytest.fixture(scope="module")
def live(model: Any) -> Iterator[Running]:
    with running(Service(model, limits=SMALL, wait=0.0)) as found:
        yield found


@pytest.fixture(scope="module")
def client(live: Running) -> Iterator[httpx.Client]:
    with live.client() as found:
        yield found


# -- limits ---------------------------------------------------------------------------------------------------------
def png_of(width: int, height: int) -> bytes:
    """A PNG whose header promises many pixels, in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )


def test_upload_size(client: httpx.Client) -> None:
    large = photo(0, (300, 300))  # noise hardly shrinks: 270 kB
    line = "The request is too large: at most 0.2 MB are taken."
    assert error(client.post("/v1/classify", files=files(large)), 413) == line

    def endless() -> Iterator[bytes]:
        for _ in range(60):
            yield b"x" * 10_000

    kind = {"content-type": "application/json"}
    many = client.post("/v1/classify", content=b"x" * 1_500_000, headers=kind)  # far more than a socket holds
    assert error(many, 413) == line  # is heard all the same
    # and without Content-Length
    assert error(client.post("/v1/classify", content=endless(), headers=kind), 413) == line
    assert client.post("/v1/classify", files=files(photo())).status_code == 200


def test_an_upload_that_never_ends_is_cut_off(live: Running) -> None:
    sent = 0
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as line:
        head = "POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        line.sendall((head + "Transfer-Encoding: chunked\r\n\r\n").encode())
        try:
            while sent < 50_000_000:
                line.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
                sent += 0x10000
        except OSError:
            pass
    assert sent < 20_000_000


@pytest.mark.parametrize("size", [(200, 200), (12_000, 12_000), (60_000, 60_000)])
def test_pixels_are_counted_before_they_are_decoded(size: tuple[int, int], client: httpx.Client) -> None:
    message = error(client.post("/v1/classify", files=files(photo(), png_of(*size))), 413)
    assert message == "image 2: the image has too many pixels; at most 0.02 million are taken."
    message = error(client.post("/v1/classify", files=files(photo(), png_of(1, 70_000))), 413)
    assert message == "image 2: a side of at most 65,535 pixels is taken."


def test_bad_requests_are_told_in_one_line(client: httpx.Client) -> None:
    good = base64.b64encode(photo()).decode()
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"files": files(b"")}, 422, "image 1: the file is empty."),
        ({"files": files(photo(), b"GIF89a, or so")}, 422, "image 2: cannot be read as an image"),
        ({"files": files(photo()[:400])}, 422, "image 1: cannot be read"),
        ({"files": files(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")}, 422, "cannot be read"),
        ({"files": files(*[photo()] * 5)}, 413, "at most 4 a request"),
        ({"files": [("other", ("a.png", photo(), "image/png"))]}, 422, "in the field 'images', got 'other'"),
        ({"files": files(photo()), "data": {"top_k": "0"}}, 422, "top_k: expected a whole number in 1..10, got 0."),
        ({"files": files(photo()), "data": {"top_k": "many"}}, 422, "got 'many'"),
        ({"files": files(photo()), "data": {"budget": "cheap"}}, 422, "budget: expected '0.8 GMACs'"),
        ({"files": files(photo()), "data": {"budget": "-99%"}}, 422, "below the least that this model can do"),
        ({"files": files(photo()), "data": {"budget": "9" * 5000}}, 422, "got '999"),
        ({"files": files(photo()), "data": {"threshold": "1"}}, 422, "Unknown field 'threshold'"),
        ({"data": {"top_k": "1"}}, 415, "Expected multipart/form-data or application/json."),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "boundary"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "not JSON at line 1"),
        ({"content": b"\xff\xfe", "headers": {"content-type": "application/json"}}, 400, "not JSON"),
        ({"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 400, "not JSON"),
        ({"json": {"images": [0] * 2000}}, 413, "The JSON has too many values."),
        ({"content": b'{"top_k": NaN}', "headers": {"content-type": "application/json"}}, 400, "not JSON"),
        ({"json": [1]}, 422, "Expected a JSON object, got a list."),
        ({"json": {}}, 422, "images: expected a list"),
        ({"json": {"images": 3}}, 422, "images: expected a list"),
        ({"json": {"images": [3]}}, 422, "image 1: expected a base64 string, got a number."),
        ({"json": {"images": ["äöü"]}}, 422, "image 1: this is not base64."),
        ({"json": {"images": [good] * 5}}, 413, "at most 4"),
        ({"json": {"images": [good], "top_k": True}}, 422, "got True"),
        ({"json": {"images": [good], "top_k": 1.5}}, 422, "got 1.5"),
        ({"json": {"images": [good], "budget": ["-10%", "-20%"]}}, 422, "each of 1 images, got 2"),
        ({"json": {"images": [good], "budget": {}}}, 422, "budget: expected"),
        ({"json": {"images": [good], "budget": -3}}, 422, "budget: expected a number of MACs > 0"),
        ({"json": {"images": [good], "budget": 10**400}}, 422, "budget: expected a number of MACs > 0"),
        ({"json": {"images": [good], "budget": [10**4000]}}, 422, "budget: expected a number of MACs > 0"),
        ({"json": {"images": [good], "top_k": 10**4000}}, 422, "top_k: expected a whole number"),
    ]
    for request, status, words in cases:
        message = error(client.post("/v1/classify", **request), status)
        assert words in message, (words, message)
        assert len(message) < 300


def test_bad_v2_requests(client: httpx.Client) -> None:
    good = {"name": "images", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": [0.0] * 3072}
    cases: list[tuple[Any, int, str]] = [
        ({}, 422, "inputs: expected a list"),
        ({"inputs": [good, good]}, 422, "the one tensor"),
        ({"inputs": [good | {"name": "x"}]}, 422, "expected the name 'images', got 'x'"),
        ({"inputs": [good | {"shape": [1, 3, 8, 8]}]}, 422, "[B, 3, 32, 32]"),
        ({"inputs": [good | {"shape": [9, 3, 32, 32]}]}, 413, "at most 4"),
        ({"inputs": [good | {"shape": ["1"]}]}, 422, "whole numbers"),
        ({"inputs": [good | {"shape": [10**30, 3, 32, 32]}]}, 413, "at most 4"),
        ({"inputs": [good | {"datatype": "INT8"}]}, 422, "FP32 or BYTES, got 'INT8'"),
        ({"inputs": [good | {"data": [0.0] * 9}]}, 422, "expected 3072 numbers"),
        ({"inputs": [good | {"data": ["0"] * 3072}]}, 422, "expected 3072 numbers"),
        ({"inputs": [good | {"data": [[0.0], [0.0, 1.0]]}]}, 422, "expected 3072 numbers"),
        ({"inputs": [good | {"data": [1e39] * 3072}]}, 422, "finite numbers"),
        ({"inputs": [good | {"data": [1e38] * 3072}]}, 422, "image 1: the model's answer is not finite"),
        ({"inputs": [good | {"data": "AAAA"}]}, 422, "to be a list"),
        ({"inputs": [good | {"datatype": "BYTES", "shape": [2], "data": ["AA=="]}]}, 422, "got 1"),
        ({"inputs": [good], "outputs": [{"name": "boxes"}]}, 422, "got 'boxes'"),
        ({"inputs": [good], "id": "\ud800"}, 400, "not JSON"),
        ({"inputs": [good], "id": "\n"}, 422, "id: expected a printable string"),
        ({"inputs": [good | {"data": [0] * 20_000}]}, 413, "too many values"),
        ({"inputs": [{str(i): i for i in range(2000)}]}, 413, "too many values"),
        ({"inputs": [good], "parameters": {"budget": "much"}}, 422, "budget: expected"),
        ({"inputs": [good], "parameters": {"budget": 10**400}}, 422, "budget: expected"),
        ({"inputs": [good | {"data": [10**400] + [0] * 3071}]}, 422, "expected 3072 numbers"),
        ({"inputs": [good | {"data": [0.5] * 3071 + [10**400]}]}, 422, "expected 3072 numbers"),
        ({"inputs": [good | {"data": [0.5] * 3071 + [10**39]}]}, 422, "expected 3072 numbers"),
    ]
    for request, status, words in cases:
        answer = client.post(
            "/v2/models/adaptivit/infer", content=json.dumps(request), headers={"content-type": "application/json"}
        )
        assert words in error(answer, status), (words, answer.text)
    kind = {"content-type": "application/octet-stream"}
    assert "application/json" in error(client.post("/v2/models/adaptivit/infer", content=b"x", headers=kind), 415)
    assert client.get("/healthz").status_code == 200


def test_paths_lead_nowhere(live: Running, client: httpx.Client) -> None:
    for path in ("/nothing", "/demo/examples/-1", "/demo/examples/99", "/docs", "/model/config.json"):
        error(client.get(path), 404)
    error(client.get("/demo/examples/x"), 422)
    error(client.put("/v1/classify"), 405)
    for path in ("/../../../etc/passwd", "/..%2f..%2fetc/passwd", "/style.css/../../config.py", "//etc/passwd"):
        with socket.create_connection(("127.0.0.1", live.port), timeout=60) as line:
            line.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
            found = b"".join(iter(lambda line=line: line.recv(65536), b""))
        assert found.startswith(b"HTTP/1.1 404"), path


def test_every_answer_has_the_headers(client: httpx.Client) -> None:
    for path in ("/", "/healthz", "/nothing", "/metrics"):
        found = client.get(path).headers
        assert "default-src 'none'" in found["content-security-policy"]
        assert "unsafe" not in found["content-security-policy"]
        assert found["x-content-type-options"] == "nosniff"
        assert "server" not in found


# -- too much, too slow ---------------------------------------------------------------------------------------------
@dataclass
class Slow:
    """A service whose model waits until it may go."""

    found: Running
    begun: threading.Event
    go: threading.Event


@contextlib.contextmanager
def slow(model: Any, timeout: float = 60.0) -> Iterator[Slow]:
    service = Service(model, limits=Limits(max_images=4, max_queue=4, max_requests=3, timeout=timeout), wait=0.0)
    begun, go, run = threading.Event(), threading.Event(), service.batcher._pass

    def wait(batch: list[Job]) -> Any:
        begun.set()
        assert go.wait(60)
        return run(batch)

    service.batcher._pass = wait  # type: ignore[method-assign]
    with running(service) as found:
        try:
            yield Slow(found, begun, go)
        finally:
            go.set()


def test_a_full_queue_is_429(model: Any) -> None:
    with slow(model) as one, one.found.client() as client, ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.post, "/v1/classify", files=files(photo()))
        assert one.begun.wait(60)
        second = pool.submit(client.post, "/v1/classify", files=files(*[photo()] * 3))
        until(lambda: one.found.service.batcher.waiting == 3)
        refused = client.post("/v1/classify", files=files(photo(), photo()))
        one.go.set()
        assert "queue is full (4 images" in error(refused, 429)
        assert refused.headers["retry-after"] == "1"
        assert first.result().status_code == second.result().status_code == 200


def test_too_many_requests_at_once_are_429(model: Any) -> None:
    with slow(model) as one, one.found.client() as client, ThreadPoolExecutor(3) as pool:
        under_way = [pool.submit(client.post, "/v1/classify", files=files(photo())) for _ in range(3)]
        until(lambda: one.found.service.metrics.get("requests_in_progress") == 3)
        refused = client.post("/v1/classify", files=files(photo()))
        assert client.get("/healthz").status_code == 200  # a probe is heard all the same
        one.go.set()
        assert "at most 3" in error(refused, 429)
        assert refused.headers["retry-after"] == "1"
        assert [request.result().status_code for request in under_way] == [200] * 3


def test_time_out(model: Any) -> None:
    with slow(model, timeout=1.5) as one, one.found.client() as client:
        late = client.post("/v1/classify", files=files(photo()))
        assert "no answer within 1.5 s" in error(late, 503)
        with socket.create_connection(("127.0.0.1", one.found.port), timeout=60) as line:  # a body that does not come
            line.sendall(b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            line.sendall(b"Content-Length: 99\r\n\r\n{")
            reply = b"".join(iter(lambda: line.recv(65536), b""))
        assert reply.startswith(b"HTTP/1.1 408")
        assert b"did not arrive within 1.5 s" in reply
        one.go.set()
        until(
            lambda: client.post("/v1/classify", files=files(photo())).status_code == 200
        )  # a busy machine takes 1.5 s


def test_a_request_that_breaks_off_leaves_nothing_behind(live: Running, client: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as line:
        line.sendall(b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        line.sendall(b"Content-Length: 99\r\n\r\n{")
        until(lambda: live.service.metrics.get("requests_in_progress") == 1)
    until(lambda: live.service.metrics.get("requests_in_progress") == 0)
    assert client.post("/v1/classify", files=files(photo())).status_code == 200


def said(live: Running, request: bytes, *, half_close: bool = True) -> bytes:
    """All that the service answers to these bytes."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as line:
        line.sendall(request)
        if half_close:
            line.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: line.recv(65536), b""))


def test_a_half_closed_connection_gets_its_answers(live: Running) -> None:
    body = json.dumps({"images": [base64.b64encode(photo()).decode()]}).encode()
    head = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    request = head + str(len(body)).encode() + b"\r\n\r\n" + body
    assert said(live, request).startswith(b"HTTP/1.1 200")
    assert said(live, request * 3).count(b"HTTP/1.1 200") == 3  # pipelined
    assert said(live, request + b"GET /heal").count(b"HTTP/1.1") == 1  # the second is not whole
    assert said(live, request + request[:-9]).count(b"HTTP/1.1 200") == 1
    assert said(live, request[:-9]) == b""
    assert said(live, b"") == b""
    until(lambda: live.service.metrics.get("requests_in_progress") == 0)


def test_two_lengths_of_one_body_are_refused(live: Running) -> None:
    head = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    smuggled = b"0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    for length in (b"5", b"%d" % len(smuggled)):
        both = b"Content-Length: " + length + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = said(live, head + both + smuggled, half_close=False)  # the service closes it
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"Expected Content-Length or Transfer-Encoding, got both." in answer
        assert answer.count(b"HTTP/1.1") == 1


def test_malformed_requests_are_counted_and_not_logged(
    live: Running, client: httpx.Client, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    before = live.service.metrics.get("requests_total", route="malformed", code=400)
    for request in (b"\x16\x03\x01\x02\0\x01\0\x01", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"):
        assert said(live, request, half_close=False).startswith(b"HTTP/1.1 400")
    upgrade = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert said(live, upgrade).startswith(b"HTTP/1.1 200")
    assert f'adaptivit_requests_total{{code="400",route="malformed"}} {before + 3:g}' in client.get("/metrics").text
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def closed(line: socket.socket) -> float:
    """Seconds until the other side closes the connection."""
    begun = time.monotonic()
    with contextlib.suppress(ConnectionResetError):
        while line.recv(65536):
            pass
    return time.monotonic() - begun


def silent(place: tuple[str, int]) -> None:
    """A connection that sends nothing at all."""
    with socket.create_connection(place, timeout=60) as line:
        assert closed(line) > 0.5


def byte_by_byte(place: tuple[str, int]) -> None:
    """A head that does not come to its end."""
    with socket.create_connection(place, timeout=60) as line:
        sent = 0
        with contextlib.suppress(OSError):
            for byte in b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 400:
                line.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.02)
        assert sent < 400


def broken_off(place: tuple[str, int]) -> None:
    """A request that is answered, and the beginning of a second."""
    with socket.create_connection(place, timeout=60) as line:
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 200")
        line.sendall(b"GET /hea")
        closed(line)


def test_idle_connections_are_closed(model: Any) -> None:
    """Silent ones, heads that come byte by byte, and answers that are not fetched; while requests go on."""
    with slow(model, timeout=1.5) as one:
        one.go.set()
        place = ("127.0.0.1", one.found.port)
        with ThreadPoolExecutor(3) as pool:
            for held in [pool.submit(hold, place) for hold in (silent, byte_by_byte, broken_off)]:
                held.result()
        with socket.socket() as line:  # more answers than the buffers hold, and none are read
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(place)
            line.settimeout(1)
            with contextlib.suppress(OSError):
                for _ in range(4000):
                    line.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
            until(lambda: not one.found.server.server_state.connections)
        with one.found.client() as client:
            for _ in range(4):  # longer together than the time-out
                assert client.post("/v1/classify", files=files(photo())).status_code == 200
                time.sleep(0.6)


def test_connections_are_counted(model: Any) -> None:
    limits = Limits(max_connections=4)  # three of one client
    with running(Service(model, limits=limits, wait=0.0)) as found, found.client() as client:
        assert client.get("/healthz").status_code == 200
        place = ("127.0.0.1", found.port)
        held = [socket.create_connection(place, timeout=60) for _ in range(2)]
        until(lambda: len(found.server.server_state.connections) == 3)
        with socket.create_connection(place, timeout=60) as more:
            closed(more)
        assert client.get("/healthz").status_code == 200  # those that were there are heard
        for line in held:
            line.close()


def test_base64_in_lines(client: httpx.Client) -> None:
    """As `base64 photo.png` prints it."""
    text = base64.encodebytes(photo()).decode()
    assert text.count("\n") > 2
    whole = client.post("/v1/classify", json={"images": [base64.b64encode(photo()).decode()]})
    parts = client.post("/v1/classify", json={"images": [text]})
    assert parts.status_code == 200
    assert parts.json()["images"][0]["classes"] == whole.json()["images"][0]["classes"]


# -- who may ask ----------------------------------------------------------------------------------------------------
def test_bearer_token(model: Any) -> None:
    with running(Service(model), token="s3cret") as found, found.client() as client:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}, {"authorization": ""}):
            for method, path in (("GET", "/metrics"), ("POST", "/v1/classify"), ("GET", "/demo/info"), ("GET", "/v2")):
                refused = client.request(method, path, headers=given)
                assert "Authorization: Bearer" in error(refused, 401)
                assert refused.headers["www-authenticate"] == "Bearer"
        right = {"authorization": "Bearer s3cret"}
        assert client.post("/v1/classify", files=files(photo()), headers=right).status_code == 200
        assert client.get("/openapi.json").status_code == 401
        for path in ("/healthz", "/v2/health/ready", "/", "/script.js"):
            assert client.get(path).status_code == 200


def test_other_names_are_turned_away(model: Any) -> None:
    hosts = (*command.LOOPBACK, "proxy.example")
    with running(Service(model), hosts=hosts) as found, found.client() as client:
        for name in ("localhost:8000", "127.0.0.1", "[::1]:80", "PROXY.example"):
            assert client.get("/healthz", headers={"host": name}).status_code == 200
        for name in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80"):
            assert "not called by that name" in error(client.get("/v1/classify", headers={"host": name}), 421)


def test_a_fault_of_ours_says_nothing_of_itself(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    service = Service(model, wait=0.0)

    def broken(batch: list[Job]) -> Any:
        raise RuntimeError("secret /home/place")

    service.batcher._pass = broken  # type: ignore[method-assign]
    with running(service) as found, found.client() as client:
        message = error(client.post("/v1/classify", files=files(photo())), 500)
        assert message.startswith("Something went wrong here")
        number = message.removesuffix(".").split()[-1]
        assert client.get("/healthz").status_code == 200
    assert any(number in r.message and r.exc_info for r in caplog.records)


def heard(found: Running) -> bool:
    """Whether a new connection is taken."""
    try:
        socket.create_connection(("127.0.0.1", found.port), timeout=60).close()
    except ConnectionError:
        return False
    return True


def test_shutting_down_finishes_what_was_accepted(model: Any) -> None:
    service = Service(model, wait=0.0, batch_images=2)
    go, run = threading.Event(), service.batcher._pass
    service.batcher._pass = lambda batch: go.wait(60) and run(batch)  # type: ignore
    with (
        running(service) as found,
        found.client() as client,
        ThreadPoolExecutor(6) as pool,
    ):
        under_way = [pool.submit(client.post, "/v1/classify", files=files(photo(i), photo(i))) for i in range(6)]
        until(lambda: service.batcher.waiting >= 10)
        found.server.should_exit = True
        until(lambda: not heard(found))  # no one else comes in
        go.set()
        answers = [one.result() for one in under_way]
        assert [a.status_code for a in answers] == [200] * 6
        assert all(len(a.json()["images"]) == 2 for a in answers)
        found.thread.join(60)
    assert not service.batcher.alive


# -- the command ----------------------------------------------------------------------------------------------------
def test_defaults_are_for_this_machine_alone() -> None:
    assert ServeConfig("x").host == "127.0.0.1"
    assert command.LOOPBACK == ("127.0.0.1", "localhost", "::1")


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["serve", *arguments, *(() if "--port" in arguments else ("--port", "0"))])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_mistakes_on_the_command_line(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "model")
    model.save_pretrained(place)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"Cannot listen on 127.0.0.1, port {port}: Address already in use. Choose another --port" in failed(
            capsys, place, "--port", port
        )
    assert "Cannot listen on nowhere.invalid" in failed(capsys, place, "--host", "nowhere.invalid")
    assert "token_file: file not found" in failed(capsys, place, "--token-file", str(tmp_path / "none"))
    (tmp_path / "token").write_text(" \n")
    assert "without spaces" in failed(capsys, place, "--token-file", str(tmp_path / "token"))
    monkeypatch.setenv("ADAPTIVIT_TOKEN", "two words")
    assert "ADAPTIVIT_TOKEN: expected a token" in failed(capsys, place)
    monkeypatch.delenv("ADAPTIVIT_TOKEN")
    assert "port: expected 0..65535" in failed(capsys, place, "--port", "70000")
    assert "max_queue: expected room" in failed(capsys, place, "--max-queue", "3")
    assert "timeout: expected a number > 0" in failed(capsys, place, "--timeout", "0")
    assert "name: expected letters" in failed(capsys, place, "--name", "a/b")
    assert "Expected either --checkpoint DIR or --backbone" in failed(capsys)
    tiny("aht", more={"num_classes": 0}).save_pretrained(tmp_path / "headless")
    assert "no classifier" in failed(capsys, str(tmp_path / "headless"))


def test_the_command_runs_until_told_to_stop(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "token").write_text("abc\n")
    ports: list[int] = []

    def run(self: Any, sockets: list[socket.socket]) -> None:
        ports.append(sockets[0].getsockname()[1])
        assert not self.config.server_header
        assert self.config.app.token == (b"abc" if len(ports) == 1 else None)
        assert self.config.app.hosts == set()
        sockets[0].close()

    monkeypatch.setattr(command.uvicorn.Server, "run", run)
    given = ("--host", "0.0.0.0", "--port", "0", "--token-file", str(tmp_path / "token"), "--budget", "-33%")
    main(["serve", str(tmp_path / "model"), *given])
    out = capsys.readouterr()
    assert f"answers at http://0.0.0.0:{ports[0]}/" in out.out
    assert "others on the network" not in out.err
    main(["serve", str(tmp_path / "model"), "--host", "0.0.0.0", "--port", "0"])
    assert "others on the network can reach this service; set ADAPTIVIT_TOKEN" in capsys.readouterr().err


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("static").save_pretrained(tmp_path / "model")
    kept = "adaptivit.serve.config"  # the command line has read it
    for name in [n for n in sys.modules if f"{n}.".startswith("adaptivit.serve.") and n != kept]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "pip install 'adaptivit[serve]'" in failed(capsys, str(tmp_path / "model"))
