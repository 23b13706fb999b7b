"""The Hub, against a small server on loopback that speaks what the real client needs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import adaptivit
from adaptivit.errors import UserError, WeightsError
from tests.support.models import pictures, tiny

TOKEN = "hf_stand_in"


class Hub(ThreadingHTTPServer):
    """Repositories in memory: name -> path -> bytes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, repo: str) -> str:
        """The name of what a repository holds now."""
        return hashlib.sha1(repr(sorted(self.repos[repo].items())).encode()).hexdigest()


class Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, body: Any, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, code: str) -> None:
        self.reply({"error": code}, 404, X_Error_Code=code, X_Error_Message=code)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/(\w+/\w+)/resolve/([^/]+)/(.+)", path):
            files = self.server.repos.get(found[1])
            if files is None:
                return self.missing("RepoNotFound")
            if found[3] not in files:
                return self.missing("EntryNotFound")
            tag = hashlib.sha1(files[found[3]]).hexdigest()
            return self.reply(files[found[3]], ETag=f'"{tag}"', X_Repo_Commit=self.server.commit(found[1]))
        found = re.fullmatch(r"/api/models/(\w+/\w+)(?:/(revision|tree)/([^/]+))?", path)
        if found is None or found[1] not in self.server.repos:
            return self.missing("RepoNotFound")
        files, commit = self.server.repos[found[1]], self.server.commit(found[1])
        if found[3] not in (None, "main", commit):
            return self.missing("RevisionNotFound")
        if found[2] == "tree":
            oids = {name: hashlib.sha1(data).hexdigest() for name, data in files.items()}
            return self.reply([{"type": "file", "path": n, "size": len(files[n]), "oid": oids[n]} for n in files])
        siblings = [{"rfilename": name} for name in files]
        return self.reply({"id": found[1], "sha": commit, "private": False, "siblings": siblings, "tags": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(f"{self.command} {self.path}")
        if self.path == "/api/validate-yaml":
            return self.reply({"errors": [], "warnings": []})
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.reply({"error": "no"}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.server.repos.setdefault(repo, {".gitattributes": b""})
            return self.reply({"url": f"{self.server.address}/{repo}", "id": repo})
        repo = "/".join(self.path.split("/")[3:5])
        if "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            return self.reply({"files": [f | {"shouldIgnore": False, "oid": None} for f in files]})
        lines = [json.loads(line) for line in body.splitlines()]
        new = {x["value"]["path"]: base64.b64decode(x["value"]["content"]) for x in lines if x["key"] == "file"}
        self.server.repos[repo] |= new
        commit = self.server.commit(repo)
        return self.reply({"commitUrl": f"{self.server.address}/{repo}/commit/{commit}", "commitOid": commit})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The stand-in in place of the real Hub, with a cache of its own."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}")  # fmt: skip  # noqa: E501
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_is_sent_comes_back(hub: Hub) -> None:
    model = tiny("aht", beta=-1.0)
    model.class_names = [f"class {i}" for i in range(10)]
    address = model.push_to_hub("me/tiny", token=TOKEN, results={"validation": {"top1": 81.5}})
    assert address == f"{hub.address}/me/tiny"
    held = hub.repos["me/tiny"]
    assert set(held) == {".gitattributes", "README.md", "config.json", "halting_maps.png", "model.safetensors"}
    assert "# me/tiny" in held["README.md"].decode()
    assert 'from_pretrained("me/tiny")' in held["README.md"].decode()
    hub.asked.clear()
    again = adaptivit.from_pretrained("me/tiny")
    fetched = {line.rsplit("/", 1)[1] for line in hub.asked if line.startswith("GET /me/tiny/resolve")}
    assert fetched == {"config.json", "model.safetensors"}
    with torch.inference_mode():
        assert torch.equal(model(pictures()).logits, again(pictures()).logits)
    assert (again.class_names, again.notes) == (model.class_names, {"results": {"validation": {"top1": 81.5}}})
    commit = hub.commit("me/tiny")
    assert torch.equal(adaptivit.from_pretrained("me/tiny", revision=commit).vit.head.bias, model.vit.head.bias)
    hub.asked.clear()
    adaptivit.from_pretrained("me/tiny", local_files_only=True)
    assert hub.asked == []
    with pytest.raises(WeightsError, match="RevisionNotFound"):
        adaptivit.from_pretrained("me/tiny", revision="v9")


def test_a_card_of_ones_own_stays(hub: Hub) -> None:
    tiny().push_to_hub("me/tiny", token=TOKEN, images=None)
    tiny(seed=1).push_to_hub("me/tiny", token=TOKEN, images=None)
    hub.repos["me/tiny"]["README.md"] = b"# mine"
    new = tiny(seed=2)
    new.push_to_hub("me/tiny", token=TOKEN, images=None)
    assert hub.repos["me/tiny"]["README.md"] == b"# mine"
    assert torch.equal(adaptivit.from_pretrained("me/tiny").vit.head.bias, new.vit.head.bias)


def test_a_damaged_download_is_named(hub: Hub) -> None:
    tiny().push_to_hub("me/tiny", token=TOKEN, images=None)
    good = hub.repos["me/tiny"]["model.safetensors"]
    hub.repos["me/tiny"]["model.safetensors"] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(WeightsError, match="sha256"):
        adaptivit.from_pretrained("me/tiny")
    del hub.repos["me/tiny"]["config.json"]
    with pytest.raises(WeightsError, match=r"no config\.json"):
        adaptivit.from_pretrained("me/tiny")


def test_what_cannot_be_had_is_one_line(hub: Hub, tmp_path: Path) -> None:
    for name, message in (("me/nothing", "RepositoryNotFound"), ("runs/train/model", "HFValidationError")):
        with pytest.raises(WeightsError, match=f"{name} is no directory.*{message}") as caught:
            adaptivit.from_pretrained(name)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"me/tiny could not be sent .*token") as refused:
        tiny().push_to_hub("me/tiny", token="hf_wrong", images=None)
    assert "\n" not in str(refused.value)
    assert hub.repos == {}


def test_a_directory_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "saved")
    for use in (adaptivit.from_pretrained, adaptivit.load):
        use(tmp_path / "saved")
    with pytest.raises(WeightsError, match="from_pretrained"):
        adaptivit.load("me/tiny")
    assert hub.asked == []


def test_no_network_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(WeightsError, match="me/tiny is no directory, and the Hugging Face Hub gave none"):
        adaptivit.from_pretrained("me/tiny")
