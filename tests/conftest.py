"""What the proofs share: tiny models with weights wild enough to make tokens differ, and how two runs are compared."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from adaptivit.evaluation.evaluate import Result
from adaptivit.experiments.sweep import report, run
from adaptivit.training import log_plots
from adaptivit.training.config import TrainConfig
from tests.support.sweeps import result

# Where Python is told to keep no bytecode, each of the many processes that tests start would compile torch again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.fsync = lambda _: None  # type: ignore[assignment]  # milliseconds a file, and no test cuts the power
torch.set_num_threads(1)  # tensors are so small that a second thread only waits
os.environ.setdefault("OMP_NUM_THREADS", "1")  # nor in processes that tests start
settings.register_profile(
    "proofs",
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
settings.load_profile("proofs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no worker ends with it; xdist itself puts groups before all else."""
    items.sort(key=lambda item: item.path.stem != "test_hopper")


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training draws no picture, which would take half of its time; test_curves.py and torchrun's processes draw."""
    monkeypatch.setattr(log_plots, "draw", lambda *_: b"")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Trials that only say that they ran: the higher lr, the better and the dearer."""
    ran: list[TrainConfig] = []

    def trial(config: TrainConfig, show: bool = True) -> Result:
        ran.append(config)
        return result(50 + 1e4 * config.optim.lr - config.loss.ponder, 0.5 + 400 * config.optim.lr)

    monkeypatch.setattr(run, "run_trial", trial)
    monkeypatch.setattr(run, "_check", lambda *_: None)
    monkeypatch.setattr(report, "draw", lambda *_: None)
    return ran


@pytest.fixture(scope="module")
def browser() -> Any:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright (a development dependency)")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    with api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()
