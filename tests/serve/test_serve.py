"""The service: answers are the model's, batches are filled by tokens, and every limit holds."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import adaptivit
from adaptivit.budget.curve import parse
from adaptivit.evaluation.predict import as_json, predict
from adaptivit.serve import Batcher, Job, Service, memory
from adaptivit.serve.batcher import QueueFull
from tests.support.models import pictures, tiny
from tests.support.serving import Running, error, files, photo, running, until

pytestmark = pytest.mark.xdist_group("serve")  # one service


@pytest.fixture(scope="module")
def model() -> Any:
    made = tiny("aht", beta=-1.0)
    made.calibrate(pictures(32))
    made.class_names = [f"class {i}" for i in range(10)]
    return made


@pytest.fixture(scope="module")
def live(model: Any) -> Iterator[Running]:
    with running(Service(model, wait=0.0)) as found:
        yield found


@pytest.fixture(scope="module")
def client(live: Running) -> Iterator[httpx.Client]:
    with live.client() as found:
        yield found


def shaped(model: Any, data: bytes) -> torch.Tensor:
    return model.preprocessing.evaluation()(Image.open(io.BytesIO(data)).convert("RGB"))[None]


# -- answers --------------------------------------------------------------------------------------------------------
def test_answers_are_those_of_predict(model: Any, client: httpx.Client, tmp_path: Path) -> None:
    shots = [photo(0), photo(1, (50, 41), "JPEG"), photo(2, (40, 64), "WEBP")]
    for i, data in enumerate(shots):
        (tmp_path / str(i)).write_bytes(data)
    wanted = predict(model, [tmp_path / str(i) for i in range(3)], top_k=4)
    form = client.post("/v1/classify", files=files(*shots), data={"top_k": "4"})
    text = [base64.b64encode(data).decode() for data in shots]
    text[1] = "data:image/jpeg;base64," + text[1]
    plain = client.post("/v1/classify", json={"images": text, "top_k": 4})
    for answer in (form, plain):
        assert answer.status_code == 200
        for found, one in zip(answer.json()["images"], wanted, strict=True):
            assert [c["name"] for c in found["classes"]] == [c["name"] for c in one.answer["classes"]]
            chances = [c["probability"] for c in one.answer["classes"]]
            assert [c["probability"] for c in found["classes"]] == pytest.approx(chances, rel=1e-4)
            assert found["gmacs"] == pytest.approx(one.gmacs)
            assert found["live"] == one.live
            assert found["saved"] == pytest.approx(1 - one.gmacs / one.static_gmacs)


def kinds(value: Any) -> Any:
    """The names and types of a JSON value."""
    if isinstance(value, dict):
        return {key: kinds(v) for key, v in value.items()}
    return [kinds(v) for v in value[:1]] if isinstance(value, list) else type(value)


def test_predict_writes_what_the_service_returns(model: Any, client: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(photo())
    said = json.loads(as_json(predict(model, [tmp_path / "a.png"]), "adaptivit"))
    assert said["images"][0].pop("image") == str(tmp_path / "a.png")
    answer = client.post("/v1/classify", files=files(photo())).json()
    assert kinds(said) == kinds(answer)
    for name in ("gmacs", "static_gmacs", "saved", "mean_depth", "live"):
        assert said["images"][0][name] == answer["images"][0][name]
    described = client.get("/openapi.json").json()["paths"]["/v1/classify"]["post"]["responses"]["200"]
    one = described["content"]["application/json"]["schema"]["properties"]["images"]["items"]
    assert set(one["properties"]) == set(one["required"]) == set(said["images"][0])


def test_budgets_one_for_all_and_one_an_image(model: Any, client: httpx.Client) -> None:
    shots = [photo(i) for i in range(3)]
    given = ["-10%", None, "-50%"]
    text = [base64.b64encode(data).decode() for data in shots]
    answer = client.post("/v1/classify", json={"images": text, "budget": given}).json()["images"]
    with torch.inference_mode():
        for data, budget, found in zip(shots, given, answer, strict=True):
            alone = model(shaped(model, data), budget=budget or "none")
            assert found["gmacs"] * 1e9 == pytest.approx(float(alone.macs_deployed[0]))
    same = client.post("/v1/classify", files=files(*shots), data={"budget": "-50%"}).json()["images"]
    assert same[2]["live"] == answer[2]["live"]
    assert answer[0]["gmacs"] > answer[2]["gmacs"]


def test_a_picture_is_turned_the_right_way_up(client: httpx.Client) -> None:
    upright = Image.open(io.BytesIO(photo(3)))
    out, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # stored a quarter turn to the left
    upright.rotate(90).save(out, "PNG", exif=exif)
    both = client.post("/v1/classify", files=files(photo(3), out.getvalue())).json()["images"]
    assert both[0] == both[1]


def test_greys_of_16_bits_are_those_of_8(client: httpx.Client) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint8)
    made = []
    for array in (grey, grey.astype(np.uint16) * 257):
        out = io.BytesIO()
        Image.fromarray(array).save(out, "PNG")
        made.append(out.getvalue())
    both = client.post("/v1/classify", files=files(*made)).json()["images"]
    assert both[0] == both[1]


def test_v2_gives_the_models_logits(model: Any, client: httpx.Client) -> None:
    images = pictures(3)
    tensor = {"name": "images", "shape": [3, 3, 32, 32], "datatype": "FP32", "data": images.flatten().tolist()}
    with torch.inference_mode():
        wanted = model(images, budget="-40%")
    for data in (tensor["data"], images.tolist()):  # flat, or nested
        asked = {"id": "x7", "inputs": [tensor | {"data": data}], "parameters": {"budget": "-40%"}}
        answer = client.post("/v2/models/adaptivit/infer", json=asked)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["id"] == "x7"
        outputs = {o["name"]: o for o in found["outputs"]}
        assert outputs["logits"]["shape"] == [3, 10]
        logits = torch.tensor(outputs["logits"]["data"]).reshape(3, 10)
        torch.testing.assert_close(logits, wanted.logits, rtol=1e-4, atol=1e-4)
        assert outputs["macs"]["data"] == pytest.approx(wanted.macs_deployed.tolist())
        assert outputs["live"]["data"] == wanted.trace.live.T.flatten().tolist()
    encoded = {"name": "images", "shape": [1], "datatype": "BYTES", "data": [base64.b64encode(photo()).decode()]}
    answer = client.post("/v2/models/adaptivit/infer", json={"inputs": [encoded], "outputs": [{"name": "macs"}]})
    assert [o["name"] for o in answer.json()["outputs"]] == ["macs"]
    assert client.get("/v2/health/ready").json() == {"ready": True}
    about = client.get("/v2/models/adaptivit").json()
    assert about["inputs"][0]["shape"] == [-1, 3, 32, 32]
    assert client.get("/v2/models/adaptivit/ready").json()["ready"] is True
    assert client.get("/v2").json()["name"] == "adaptivit"
    assert "Unknown model" in error(client.get("/v2/models/other"), 404)


def test_openapi_and_health(client: httpx.Client) -> None:
    found = client.get("/openapi.json").json()
    assert {"/v1/classify", "/v2/models/{name}/infer", "/healthz", "/metrics"} <= set(found["paths"])
    body = found["paths"]["/v1/classify"]["post"]["requestBody"]["content"]
    assert set(body) == {"multipart/form-data", "application/json"}
    assert client.get("/healthz").json() == {"status": "ok", "model": "adaptivit"}


def test_metrics_add_up(model: Any) -> None:
    with running(Service(model, wait=0.05)) as found, found.client() as client:
        given = client.post("/v1/classify", files=files(photo(0), photo(1)), data={"budget": "-40%"}).json()["images"]
        client.post("/v1/classify", files=files(b"no image"))
        text = client.get("/metrics").text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert all(re.fullmatch(r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})?', name) for name in values)
    assert values["adaptivit_images_total"] == 2
    assert values["adaptivit_tokens_total"] == sum(sum(one["live"]) for one in given)
    macs = sum(one["gmacs"] for one in given) * 1e9
    assert values["adaptivit_macs_total"] == pytest.approx(macs)
    assert values["adaptivit_macs_saved_total"] == pytest.approx(2e9 * given[0]["static_gmacs"] - macs)
    assert values["adaptivit_tokens_per_second"] > 0
    assert values['adaptivit_requests_total{code="200",route="/v1/classify"}'] == 1
    assert values['adaptivit_requests_total{code="422",route="/v1/classify"}'] == 1
    assert values['adaptivit_request_seconds_bucket{route="/v1/classify",le="+Inf"}'] == 2
    assert values['adaptivit_batch_images_bucket{le="1"}'] == 0
    assert values['adaptivit_batch_images_bucket{le="2"}'] == 1


# -- batches --------------------------------------------------------------------------------------------------------
class Held(Batcher):
    """A batcher whose passes wait until they may go, and are written down."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.go, self.begun, self.batches = threading.Event(), threading.Semaphore(0), []
        super().__init__(*given, **more)

    def _pass(self, batch: list[Job]) -> Any:
        self.begun.release()
        assert self.go.wait(60)
        self.batches.append(batch)
        return super()._pass(batch)


def jobs(model: Any, budgets: list[str | None]) -> list[Job]:
    images = pictures(len(budgets), seed=5)
    return [Job(image, parse(b) if b else None) for image, b in zip(images, budgets, strict=True)]


def held(model: Any, given: list[Job], **more: Any) -> list[list[int]]:
    """Which of the jobs ran together, where the first ran alone and all others waited behind it."""
    batcher = Held(model, wait=0.0, **more)
    answers = batcher.submit(given[:1])
    assert batcher.begun.acquire(timeout=60)
    answers += batcher.submit(given[1:])
    batcher.go.set()
    for answer in answers:
        answer.result(60)
    batcher.close()
    number = {id(job): i for i, job in enumerate(given)}
    return [[number[id(job)] for job in batch] for batch in batcher.batches]


def test_a_batch_is_filled_by_tokens(model: Any) -> None:
    full = [len(b) for b in held(model, jobs(model, [None] + ["-0%"] * 9), tokens=17 * 3)]
    cheap = [len(b) for b in held(model, jobs(model, [None] + ["-60%"] * 9), tokens=17 * 3)]
    assert full == [1, 3, 3, 3]
    assert cheap == [1, 7, 2]  # 0.4 of the tokens: 51 // 6.8
    assert [len(b) for b in held(model, jobs(model, ["-60%"] * 10), tokens=17 * 3, images=4)] == [1, 4, 4, 1]


def test_cheap_images_ride_along_and_nobody_starves(model: Any) -> None:
    given = [None, "-0%", "-0%", "-60%", "-0%", "-60%"]
    assert held(model, jobs(model, given), tokens=17 + 14) == [[0], [1, 3, 5], [2], [4]]
    assert held(model, jobs(model, given), tokens=1) == [[i] for i in range(6)]  # too large for any batch: alone


def test_expectations_follow_what_images_take() -> None:
    batcher = Batcher(tiny("aht", beta=3.0), wait=0.0)
    assert batcher.expected(None) == 17
    (answer,) = batcher.submit(jobs(batcher.model, [None]))
    mean = sum(answer.result(60).live) / 6
    assert mean < 17
    batcher.close()
    assert batcher.expected(None) == pytest.approx(mean)


def test_shared_batches_give_what_images_get_alone(model: Any) -> None:
    given = jobs(model, [None, "-20%", "-60%", "-0%"])
    batcher = Batcher(model, wait=0.2)
    answers = [f.result(60) for f in batcher.submit(given)]
    batcher.close()
    assert {a.images for a in answers} == {4}
    with torch.inference_mode():
        for job, answer in zip(given, answers, strict=True):
            alone = model(job.image[None], budget="none" if job.budget is None else job.budget.text)
            torch.testing.assert_close(answer.logits, alone.logits[0], rtol=1e-4, atol=1e-4)
            assert answer.live == alone.trace.live[:, 0].tolist()
            assert answer.macs == float(alone.macs_deployed[0])


def test_one_image_at_fault_does_not_take_the_others_along(model: Any) -> None:
    given = jobs(model, [None] * 3)
    given[1].image = torch.zeros(3, 8, 8)
    batcher = Batcher(model, wait=0.1)
    answers = batcher.submit(given)
    assert answers[0].result(60).images == answers[2].result(60).images == 1
    with pytest.raises(adaptivit.UserError, match="32 x 32"):
        answers[1].result(60)
    batcher.close()


def test_the_queue_is_all_or_nothing_and_closing_finishes_it(model: Any) -> None:
    batcher = Held(model, wait=0.0, queue=3)
    first = batcher.submit(jobs(model, [None]))
    assert batcher.begun.acquire(timeout=60)
    more = batcher.submit(jobs(model, [None] * 2))
    with pytest.raises(QueueFull, match="3 images"):
        batcher.submit(jobs(model, [None] * 2))
    assert batcher.waiting == 2
    more[1].cancel()
    closing = threading.Thread(target=batcher.close)
    closing.start()
    while not batcher._closing:
        time.sleep(0.01)
    with pytest.raises(QueueFull, match="shutting down"):
        batcher.submit(jobs(model, [None]))
    batcher.go.set()
    closing.join(60)
    assert not batcher.alive
    assert first[0].done()
    assert more[0].done()
    assert sum(map(len, batcher.batches)) == 2  # the third is not waited for


def test_a_budget_that_does_not_hold_here_is_said_at_the_start() -> None:
    model = tiny("aht", beta=-1.0)
    model.calibrate(pictures(16), "9000 ms")
    model.budget_state.calibration = replace(
        model.calibration, latency=replace(model.calibration.latency, device="another")
    )
    with pytest.raises(adaptivit.UserError, match="measured on another"):
        Batcher(model)


def test_free_memory_goes_back_now_and_then(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of other and other lengths leave holes in the heap; every few seconds it is asked to give them back."""
    asked: list[int] = []
    monkeypatch.setattr(memory, "_trim", lambda: asked.append)
    monkeypatch.setattr(memory, "EVERY", 3600.0)
    with contextlib.closing(Batcher(model)) as batcher:
        job = Job(torch.zeros(3, 32, 32))
        batcher.submit([job])[0].result(60)
        assert asked == []
        monkeypatch.setattr(memory, "EVERY", 0.0)
        for _ in range(2):  # the second comes after the first has been followed by a look
            batcher.submit([Job(torch.zeros(3, 32, 32))])[0].result(60)
        until(lambda: len(asked) >= 2)
        assert set(asked) == {0}


def test_memory_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    memory._trim.cache_clear()
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    assert memory._trim() is None
    trimmer = memory.Trimmer()
    monkeypatch.setattr(memory, "EVERY", 0.0)
    trimmer.step()
    memory._trim.cache_clear()
