"""The page and the model that comes with it; the page in a real browser."""

from __future__ import annotations

import base64
import contextlib
import io
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from adaptivit.cli.main import main
from adaptivit.data import digits
from adaptivit.serve import Service, command, demo_model, page
from tests.support.models import tiny
from tests.support.serving import Running, error, files, photo, running

pytestmark = pytest.mark.xdist_group("demo")  # one service and one browser

PACKAGE = Path(page.__file__).parent
DIGITS = page._digits


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    with running(Service(demo_model(), wait=0.0)) as found:
        yield found


# -- the model ------------------------------------------------------------------------------------------------------
def test_the_model_is_small_and_knows_its_digits() -> None:
    assert sum(f.stat().st_size for f in (PACKAGE / "model").iterdir()) < 1_000_000
    model = demo_model()
    batch = next(iter(digits.Digits.load().testing(360)))
    with torch.inference_mode():
        for budget, share, least in (
            ("none", 0.413, 0.95),
            ("-0%", 1.0, 0.95),
            ("-50%", 0.5, 0.95),
            ("-60%", 0.4, 0.93),
        ):
            out = model(batch.images, budget=budget)
            assert float((out.logits.argmax(1) == batch.labels).double().mean()) >= least
            assert float(out.macs.mean()) / out.costs.static == pytest.approx(share, abs=0.015)


def test_what_the_page_needs_is_in_the_package() -> None:
    needed = [PACKAGE / "page" / name for name in page._FILES.values()]
    needed += [PACKAGE / "model" / name for name in ("config.json", "model.safetensors")]
    assert all(f.stat().st_size for f in needed)
    root = PACKAGE.parents[1]
    if shutil.which("git") and (root / ".git").exists():  # hatch leaves out what git ignores
        ignored = subprocess.run(["git", "check-ignore", *map(str, needed)], cwd=root, capture_output=True, text=True)
        assert ignored.stdout == ""


def test_examples_are_the_test_pictures() -> None:
    test = digits.splits()["test"]
    for digit, (name, png) in enumerate(DIGITS()):
        assert name == f"a {digit}"
        found = np.asarray(Image.open(io.BytesIO(png)))
        assert (found == test.items[test.labels.index(digit)]).all()  # type: ignore[union-attr]


# -- what the page asks for -----------------------------------------------------------------------------------------
def test_a_look_is_what_the_model_does(live: Running) -> None:
    model = live.service.model
    with live.client() as client:
        about = client.get("/demo/info").json()
        shot = client.get("/demo/examples/3").content
        found = client.post(
            "/demo/look", files=files(shot), data={"budget": "-40%", "picture": "1", "time": "1"}
        ).json()
        plain = client.post("/demo/look", files=files(shot), data={"budget": "-10%"}).json()
    assert (about["grid"], about["layers"], about["dial"]["start"]) == ([8, 8], 6, 59)
    assert about["dial"]["most"] >= 60
    image = model.preprocessing.evaluation()(Image.open(io.BytesIO(shot)))[None]
    with torch.inference_mode():
        out = model(image, budget="-40%")
    assert found["attended"] == [
        "".join("01"[int(on)] for on in row)
        for row in out.trace.attended[:, 0, model.shape.num_prefix_tokens :].tolist()
    ]
    assert found["classes"][0]["name"] == "3"
    assert found["gmacs"] * 1e9 == pytest.approx(float(out.macs_deployed[0]))
    assert found["ms"] > 0 < found["static_ms"]
    assert 1 <= found["copies"] <= 32
    seen = Image.open(io.BytesIO(base64.b64decode(found["picture"].partition(",")[2])))
    assert (np.asarray(seen) == np.asarray(Image.open(io.BytesIO(shot)))).all()
    assert not {"picture", "ms"} & set(plain)
    assert plain["gmacs"] > found["gmacs"]


def test_looks_are_held_to_the_same_limits(live: Running) -> None:
    with live.client() as client:
        assert "Expected one image, got 2" in error(client.post("/demo/look", files=files(photo(), photo())), 422)
        assert "cannot be read as an image" in error(client.post("/demo/look", files=files(b"x")), 422)
        asked = {"files": files(photo()), "data": {"budget": "-99%"}}
        assert "below the least" in error(client.post("/demo/look", **asked), 422)
        for size in ((1, 1), (3, 200), (500, 20)):
            assert client.post("/demo/look", files=files(photo(0, size))).status_code == 200


def test_any_policy_and_no_page() -> None:
    for policy in ("amod", "tome", "static"):
        with running(Service(tiny(policy), wait=0.0)) as found, found.client() as client:
            about = client.get("/demo/info").json()
            assert about["dial"] is None
            assert about["examples"] == ["china", "flower"]  # scikit-learn's: no model of digits
            look = client.post("/demo/look", files=files(photo()), data={"time": "1"}).json()
            assert len(look["attended"]) == 6
    with running(Service(tiny("static")), with_page=False) as found, found.client() as client:
        for path in ("/", "/script.js", "/demo/info"):
            error(client.get(path), 404)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    seen: list[Any] = []

    def run(self: Any, sockets: list[Any]) -> None:
        seen.append(self.config.app)
        sockets[0].close()

    monkeypatch.setattr(command.uvicorn.Server, "run", run)
    opened: list[str] = []
    monkeypatch.setattr(command.webbrowser, "open", opened.append)
    main(["demo", "--port", "0", "--open"])
    assert "aht on cpu, answers at http://127.0.0.1:" in capsys.readouterr().out
    assert opened[0].startswith("http://127.0.0.1:")
    assert seen[0].hosts == {"127.0.0.1", "localhost", "::1"}
    large = io.BytesIO()
    Image.new("1", (8000, 5000)).save(large, "PNG")
    with Image.open(large) as picture:  # PIL's warning is silent: the service refuses such a picture itself
        assert picture.width * picture.height > Image.MAX_IMAGE_PIXELS
    tiny("evit").save_pretrained(tmp_path / "other")
    (tmp_path / "names").write_text("\n".join(f"name {i}" for i in range(10)))
    main(["demo", str(tmp_path / "other"), "--port", "0", "--class-names", str(tmp_path / "names")])
    assert "evit on cpu" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["demo", str(tmp_path / "nowhere"), "--port", "0"])
    assert "no config.json" in capsys.readouterr().err
    (tmp_path / "names").write_text("cat\ndog\n")
    with pytest.raises(SystemExit):
        main(["demo", str(tmp_path / "other"), "--port", "0", "--class-names", str(tmp_path / "names")])
    assert "class_names: expected 10 names, one a line for each class, got 2" in capsys.readouterr().err


def test_the_page_opens_at_the_models_budget() -> None:
    model = demo_model()
    for budget, start in ((None, 59), ("-33%", 33), (0.8 * model.calibration.static, 20), ("none", 59)):
        model.budget = budget
        with contextlib.closing(Service(model)) as service:
            assert page.about(service)["dial"]["start"] == start


def test_the_page_says_what_the_model_knows() -> None:
    for model, names, expected in (
        (demo_model(), None, "10 classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"),
        (tiny("evit"), None, "10 classes, which have no names here"),
        (tiny("evit", more={"num_classes": 1000}), [f"n{i}" for i in range(1000)], "1,000 classes: n0, n1, n2 …"),
    ):
        with contextlib.closing(Service(model, class_names=names)) as service:
            assert page.about(service)["knows"] == expected


# -- in a browser ---------------------------------------------------------------------------------------------------
class Opened:
    """The page in a window, with its messages and requests."""

    def __init__(self, browser: Any, address: str, width: int = 1280, scheme: str = "light", motion: str = "reduce"):
        self.context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion=motion
        )
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.messages.append(m.text))
        self.page.on("pageerror", lambda e: self.messages.append(str(e)))
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.goto(address)

    def text(self, name: str) -> str:
        found: str = self.page.locator(f"#{name}").inner_text()
        return found

    def until(self, condition: str) -> None:
        for _ in range(600):  # not wait_for_function: it evaluates in the page, whose policy forbids that
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never: {condition}")

    def pixels(self) -> str:
        found: str = self.page.evaluate("document.getElementById('canvas').toDataURL()")
        return found


READY = "!document.getElementById('play').disabled && !document.getElementById('time').classList.contains('old')"


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_the_page(width: int, scheme: str, browser: Any, live: Running) -> None:
    shown = Opened(browser, live.address, width, scheme)
    page, text = shown.page, shown.text
    shown.until(READY)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert text("answer") == "3"
    assert text("wanted") == "−59\u00a0%"
    assert "It knows 10 classes: 0, 1, 2" in text("about")
    # the budget, by keyboard: more work, other patches, other figures
    before, work = shown.pixels(), text("macs")
    page.locator("#budget").focus()
    page.keyboard.press("Home")
    shown.until("document.getElementById('macs').textContent === '16.8 MMACs'")
    assert work != "16.8 MMACs"
    assert "±0" in text("wanted")
    assert "±0" in text("macs-of")
    assert page.locator("#budget").get_attribute("aria-valuetext") == "static's work"
    assert text("now") == "Block 6 of 6 · 64 of 64 patches"
    full = shown.pixels()
    assert full != before
    shown.until(READY)
    assert re.fullmatch(r"[\d.]+\sms", text("ms"))
    # block by block
    page.locator("#budget").fill("50")
    shown.until("document.getElementById('macs').textContent !== '16.8 MMACs'")
    page.locator("#block").focus()
    page.keyboard.press("Home")
    assert text("now") == "Block 1 of 6 · 64 of 64 patches"
    assert shown.pixels() == full  # no token has left yet
    page.get_by_label("Next block").click()
    page.keyboard.press("End")
    for _ in range(4):
        page.get_by_label("Next block").click()
    assert text("now").startswith("Block 6 of 6")
    assert shown.pixels() != full
    assert page.locator("#block").get_attribute("aria-valuetext") == text("now")
    assert page.locator("#canvas").get_attribute("aria-label") == f"The picture, {text('now')}"
    assert "sure, with" in text("said")
    # light and dark
    colour = "getComputedStyle(document.body).backgroundColor"
    first = page.evaluate(colour)
    page.locator(".theme").click()
    assert page.evaluate(colour) != first
    assert not shown.messages
    own = tuple(f"{live.address}{path}" for path in ("/", "/style.css", "/script.js", "/icon.svg", "/demo/"))
    assert all(u.startswith((*own, "data:", f"blob:{live.address}")) for u in shown.asked)
    shown.context.close()


def test_upload_and_error(browser: Any, live: Running, tmp_path: Path) -> None:
    shown = Opened(browser, live.address)
    page = shown.page
    shown.until(READY)
    first = shown.pixels()
    (tmp_path / "notes.png").write_text("this is no picture")
    page.locator("#file").set_input_files(tmp_path / "notes.png")
    page.wait_for_selector("#problem:visible")
    assert "cannot be read as an image" in shown.text("problem")
    assert page.locator("#problem").get_attribute("role") == "alert"
    assert all("422" in line for line in shown.messages)  # the browser itself notes the answer
    page.locator("#budget").fill("30")  # the picture before is still there to work with
    page.wait_for_selector("#problem", state="hidden")
    shown.until(READY)
    (tmp_path / "seven.png").write_bytes(DIGITS()[7][1])
    page.locator("#file").set_input_files(tmp_path / "seven.png")
    shown.until("document.getElementById('answer').textContent === '7'")
    assert shown.pixels() != first
    assert page.locator(".examples [aria-pressed=true]").count() == 0
    # dropped on the page
    encoded = base64.b64encode(DIGITS()[4][1]).decode()
    page.evaluate(
        """(data) => {
          const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
          const transfer = new DataTransfer();
          transfer.items.add(new File([bytes], "four.png", { type: "image/png" }));
          document.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
        }""",
        encoded,
    )
    shown.until("document.getElementById('answer').textContent === '4'")
    large = tmp_path / "large.png"
    large.write_bytes(b"\0" * 17_000_000)
    page.locator("#file").set_input_files(large)
    page.wait_for_selector("#problem:visible")
    assert shown.text("problem") == "The file has 17 MB; at most 16 MB are taken."
    shown.context.close()


def test_play_moves_and_stops_at_the_end(browser: Any, live: Running) -> None:
    shown = Opened(browser, live.address, motion="no-preference")
    shown.until(READY)
    shown.until("document.getElementById('block').value === '6'")  # it plays by itself
    shown.until("document.getElementById('play').textContent === 'Play'")
    shown.page.locator("#play").click()
    assert shown.text("play") == "Stop"
    shown.page.evaluate(  # waits and clicks in the page, which is never too late there
        """async () => {
          const [block, play] = ["block", "play"].map((name) => document.getElementById(name));
          while (block.value !== "3") await new Promise((done) => setTimeout(done, 5));
          play.click();
        }"""
    )
    assert shown.text("play") == "Play"
    assert not shown.messages
    shown.context.close()


def test_without_calibration_and_with_a_token(browser: Any) -> None:
    model = tiny("amod")
    with running(Service(model, wait=0.0), token="abc") as found:
        shown = Opened(browser, found.address)
        shown.page.wait_for_selector("#token:visible")
        shown.page.locator("#secret").fill("abc")
        shown.page.keyboard.press("Enter")
        shown.until(READY)
        assert shown.page.locator("#budget").is_disabled()
        assert "not calibrated" in shown.text("hint")
        assert "sit out" in shown.text("means")
        assert all("401" in line for line in shown.messages)
        shown.context.close()


def test_a_picture_chosen_while_another_is_asked_for(browser: Any) -> None:
    """The latest choice is what is shown, however quickly one clicks."""
    with running(Service(demo_model(), wait=0.05)) as found:
        shown = Opened(browser, found.address)
        shown.until(READY)
        buttons = shown.page.locator(".examples button")
        for digit in (1, 5, 8):
            buttons.nth(digit).click()
            shown.page.locator("#budget").fill(str(40 + digit))
        shown.until("document.getElementById('answer').textContent === '8' && " + READY)
        assert shown.text("wanted") == "−48\u00a0%"
        alone = Opened(browser, found.address)
        alone.until(READY)
        alone.page.locator(".examples button").nth(8).click()
        alone.until("document.getElementById('answer').textContent === '8'")
        alone.page.locator("#budget").fill("48")
        alone.until(f"document.getElementById('macs').textContent === '{shown.text('macs')}'")
        assert alone.pixels() == shown.pixels()
        for one in (shown, alone):
            assert not one.messages
            one.context.close()
