"""Two processes under torchrun take the same steps as one at the same global batch, and survive being killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import SMALL, log, refused, train, weights
from tests.support.data_sets import folder, split_folder
from tests.support.processes import assert_close_weights, free_port, pair, start_pair

pytestmark = pytest.mark.xdist_group("processes")  # ports, and moments to be killed at: one after the other

PLAIN = ("--augment.kind", "none", "--optim.lr", 1e-3, "--optim.clip-grad", 0)


def torchrun(
    *words: Any, options: tuple[Any, ...] = (), processes: int = 2, meanwhile: Callable[[Any], None] | None = None
) -> tuple[int, str, str]:
    """torchrun; all of its processes end with this call. Returns its code and its output."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes]
    start += options or ("--master-port", free_port())
    if options and "--rdzv-endpoint" not in options:
        start += ("--master-port", free_port())
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as wrong:
        run = subprocess.Popen(
            [str(w) for w in (*start, "-m", "adaptivit", *words)],
            stdout=out,
            stderr=wrong,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            if meanwhile is not None:
                meanwhile(run)
            run.wait(timeout=300)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        out.seek(0)
        wrong.seek(0)
        return run.returncode, out.read(), wrong.read()


@pytest.mark.parametrize("policy", ["static", "aht"])
def test_two_processes_train_without_a_loss_of_the_policy(tmp_path: Path, policy: str) -> None:
    """With `aht` the planners get no gradient from the task loss, and are parameters all the same."""
    where = split_folder(tmp_path / "in")
    more = (*PLAIN, "--policy", policy, "--optim.clip-grad", 1)
    assert train(where, tmp_path / "one", *more) == 0
    pair(where, tmp_path / "two", *more)
    assert_close_weights(tmp_path / "one", tmp_path / "two")


# -- the same curve -------------------------------------------------------------------------------------------------
TEACH = ("--loss.distill", 0.5)
DEEP = ("--loss.prior", 0.1, "--loss.prior-depth", 3)
AHT = ("--policy", "aht:straight_through=true", "--loss.target-depth", 0.1)
AVIT = ("--policy", "avit:gate_center=2,gate_scale=1", "--loss.prior-form", "reference")
DYNAMIC = ("--policy", "dynamicvit", "--loss.ratio", 2, "--loss.features", 0.5)
HEADS = ("--policy", "confidence:heads=own", "--optim.backbone-lr", 0)
CURVES: dict[str, tuple[Any, ...]] = {  # every objective, and everything that is random
    "aht": (*AHT, *TEACH, *DEEP, "--loss.ponder", 0.01, "--loss.cost", 1, "--optim.ema", 0.9, "--optim.drop-path", 0.3),
    "avit": (*AVIT, *DEEP, "--loss.ponder", 0.01),
    "dynamicvit": (*DYNAMIC, *TEACH, "--augment.mixup", 0.8, "--augment.cutmix", 1),
    "pondernet": ("--policy", "pondernet", "--loss.task", 0, "--loss.expected", 1, "--loss.geometric", 0.1),
    "confidence": (*HEADS, *TEACH, "--loss.exits", 1, "--loss.self-distill", 1),
}


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training images, a validation set whose last batch is uneven, and a static model to be taught by."""
    root = tmp_path_factory.mktemp("data")
    folder(root / "in" / "train")
    folder(root / "in" / "val", each=5, seed=1)  # 15 images in batches of 8
    assert train(root / "in", root / "static", *PLAIN, "--policy", "static") == 0
    return root / "in"


def teacher(where: Path, words: tuple[Any, ...]) -> tuple[Any, ...]:
    return ("--weights", where.parent / "static" / "model") if "--loss.distill" in words else ()


def assert_same_curve(a: Path, b: Path, tolerance: float = 1e-4) -> None:
    """Every figure of every line of the log, speed aside."""
    first, second = log(a), log(b)
    assert [(r["kind"], r["step"]) for r in first] == [(r["kind"], r["step"]) for r in second]
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"images_per_second", "kind", "layout"}:
            same = one[name] if one[name] is None else pytest.approx(one[name], rel=tolerance, abs=tolerance)
            assert other[name] == same, (name, one["step"])


@pytest.mark.parametrize("name", CURVES)
def test_two_processes_have_the_curve_of_one(tmp_path: Path, where: Path, name: str) -> None:
    words = (*PLAIN, *CURVES[name], *teacher(where, CURVES[name]))
    words += ("--optim.clip-grad", 1, "--epochs", 2, "--optim.lr", 1e-4)
    assert train(where, tmp_path / "one", *words) == 0
    pair(where, tmp_path / "two", *words)
    assert_same_curve(tmp_path / "one", tmp_path / "two")
    assert_close_weights(tmp_path / "one", tmp_path / "two", 2e-5)
    last = log(tmp_path / "two")[-1]
    assert last["images"] == 15, "every image of validation counts once"


def test_two_processes_that_accumulate_have_the_curve_of_one(tmp_path: Path, where: Path) -> None:
    words = (*PLAIN, *CURVES["aht"], *teacher(where, CURVES["aht"]), "--optim.lr", 1e-4)
    assert train(where, tmp_path / "one", *words) == 0
    pair(where, tmp_path / "two", *words, "--run.accumulate", 2, "--run.checkpoint-activations")
    assert_same_curve(tmp_path / "one", tmp_path / "two")
    assert_close_weights(tmp_path / "one", tmp_path / "two", 2e-5)


def quickly_compiled() -> None:
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]


@pytest.mark.skipif("ADAPTIVIT_SLOW" not in os.environ, reason="half a minute of compiling; set ADAPTIVIT_SLOW=1")
def test_two_processes_under_compile(tmp_path: Path, where: Path) -> None:
    words = (*PLAIN, "--policy", "static", "--optim.drop-path", 0.3, "--optim.lr", 1e-4)
    assert train(where, tmp_path / "one", *words) == 0
    pair(where, tmp_path / "two", *words, "--run.compile", first=quickly_compiled)
    assert_same_curve(tmp_path / "one", tmp_path / "two", 1e-3)


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # torch's, where a process has one image
def test_images_that_one_process_cannot_read(tmp_path: Path, where: Path) -> None:
    """Half of the images: the share of a process is empty in some step, and the other does not wait in vain."""
    data = tmp_path / "in"
    shutil.copytree(where, data)
    for file in sorted((data / "train").rglob("*.png"))[::2]:
        content = file.read_bytes()
        file.write_bytes(content[:600])  # the header is whole
    words = (*PLAIN, "--policy", "aht:straight_through=true", "--loss.target-depth", 0.1, "--batch-size", 4)
    words += ("--allow-corrupt", "--optim.drop-path", 0.3, "--optim.lr", 1e-4)
    assert train(data, tmp_path / "one", *words) == 0
    pair(data, tmp_path / "two", *words)
    assert_same_curve(tmp_path / "one", tmp_path / "two")


# -- sharded weights ------------------------------------------------------------------------------------------------
def test_sharded_weights_train_like_whole_ones(tmp_path: Path, where: Path) -> None:
    """Curve and weights are those of one process, and each of them can go on where the other stopped."""
    words = (
        *PLAIN,
        *CURVES["aht"],
        *teacher(where, CURVES["aht"]),
        "--optim.clip-grad",
        0.5,
        "--optim.lr",
        1e-4,
        "--optim.warmup-epochs",
        1,
        "--epochs",
        2,
    )
    assert train(where, tmp_path / "one", *words) == 0
    pair(where, tmp_path / "two", *words, "--run.fsdp")
    assert_same_curve(tmp_path / "one", tmp_path / "two")
    assert_close_weights(tmp_path / "one", tmp_path / "two", 2e-5)
    for first, second in (("one", "two"), ("two", "one")):
        mixed = tmp_path / f"{first}-{second}"
        shutil.copytree(tmp_path / first, mixed)
        state = torch.load(mixed / "checkpoint" / "training.pt", weights_only=True)
        assert state["optimizer"]["state"][0]["exp_avg"].shape == state["average"]["vit.cls_token"].shape
        assert type(state["average"]["vit.head.weight"]) is torch.Tensor
        config = json.loads((mixed / "config.json").read_text())
        config["config"]["epochs"] = 3
        (mixed / "config.json").write_text(json.dumps(config))
        more = (*words, "--epochs", 3, "--resume")
        if second == "two":
            pair(where, mixed, *more, "--run.fsdp")
        else:
            assert train(where, mixed, *more) == 0
    assert_close_weights(tmp_path / "one-two", tmp_path / "two-one", 5e-5)
    starts = json.loads((tmp_path / "two-one" / "environment.json").read_text())
    assert [s["processes"] for s in starts] == [2, 1]


def watched() -> None:
    """Each step prints how many numbers of weights and moments the process holds."""
    from adaptivit.training.step import Trainer

    step = Trainer.step

    def told(self: Trainer, *arguments: Any) -> Any:
        found = step(self, *arguments)
        own = sum(getattr(p, "to_local", p.detach)().numel() for p in self.model.parameters())
        moments = [m for s in self.optimizer.state.values() for m in (s["exp_avg"], s["exp_avg_sq"])]
        print("HELD", own, sum(getattr(m, "to_local", m.detach)().numel() for m in moments))
        return found

    Trainer.step = told  # type: ignore[method-assign]


def test_sharding_is_really_sharding(tmp_path: Path, where: Path) -> None:
    """A process has half of the weights and of AdamW's state."""
    out = tmp_path / "two"
    pair(where, out, *PLAIN, "--policy", "static", "--run.fsdp", first=watched)
    files = [out.with_suffix(f".{rank}.txt").read_text() for rank in range(2)]
    held = [[int(w) for w in text.split("HELD")[1].split()[:2]] for text in files]
    total = sum(v.numel() for v in weights(out).values())
    assert sum(h[0] for h in held) == total
    assert sum(h[1] for h in held) == 2 * total
    assert max(h[0] for h in held) < 0.6 * total


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--run.fsdp",), "start it with torchrun"),
        (("--run.checkpoint-activations", "--run.compile"), "cannot be combined"),
    ],
)
def test_impossible_combinations_are_refused_before_anything_is_written(
    tmp_path: Path, where: Path, capsys: Any, more: tuple[Any, ...], message: str
) -> None:
    words = ("train", "--data", where, "--out", tmp_path / "no", "--device", "cpu", *SMALL, *more)
    assert message in refused(capsys, *words)
    assert "times 3 parts" in refused(capsys, *words[: -len(more)], "--run.accumulate", 3)
    assert not (tmp_path / "no").exists()


# -- killed ---------------------------------------------------------------------------------------------------------
KILLED = (
    *PLAIN,
    "--policy",
    "aht:straight_through=true",
    "--loss.target-depth",
    0.1,
    "--optim.ema",
    0.9,
    "--optim.drop-path",
    0.3,
)
KILLED += ("--epochs", 3, "--run.checkpoint-steps", 2, "--optim.lr", 1e-4, "--augment.kind", "rand")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, where: Path) -> Path:
    """A run of two processes that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    pair(where, out, *KILLED)
    return out


def deadly(victims: tuple[int, ...]) -> None:
    """Kill these processes inside the fifth step."""
    from adaptivit.training.step import Trainer

    run = Trainer._run

    def last(self: Trainer, part: Any) -> Any:
        found = run(self, part)
        self.runs = getattr(self, "runs", 0) + 1  # type: ignore[attr-defined]
        if self.runs == 5 and self.accelerator.process_index in victims:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Trainer._run = last  # type: ignore[method-assign]


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_a_killed_process_ends_the_other_and_the_run_goes_on(
    tmp_path: Path, where: Path, whole: Path, victims: tuple[int, ...]
) -> None:
    """Killed inside the fifth step, after the checkpoint of the fourth; the other one reports it and ends."""
    out = tmp_path / "out"
    codes, printed = start_pair(where, out, *KILLED, first=partial(deadly, victims))
    assert [codes[v] for v in victims] == [-signal.SIGKILL] * len(victims)
    for rank in {0, 1} - set(victims):
        assert codes[rank] == 2
        assert "lost another one" in printed[rank]
        assert "--resume" in printed[rank]
        assert "Traceback" not in printed[rank]
    assert torch.load(out / "checkpoint" / "training.pt", weights_only=True)["step"] == 4
    pair(where, out, *KILLED, "--resume")
    assert_same_curve(whole, out)
    assert_close_weights(whole, out, 1e-6)


def test_torchrun_starts_a_killed_run_again_where_it_was(tmp_path: Path, where: Path, whole: Path) -> None:
    """--max-restarts: one process is killed from outside at some moment, torchrun ends the other and starts both."""
    out = tmp_path / "out"

    def kill(run: Any) -> None:
        """Once the first checkpoint is there, one of torchrun's own children."""
        deadline = time.monotonic() + 200
        while not (out / "checkpoint").exists() and time.monotonic() < deadline and run.poll() is None:
            time.sleep(0.05)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)

    words = ("--data", where, "--out", out, "--device", "cpu", *SMALL, *KILLED)
    code, printed, wrong = torchrun("train", *words, options=("--max-restarts", 1), meanwhile=kill)
    assert code == 0, wrong[-3000:]
    assert printed.count("saved") == 1, "one process speaks"
    assert "resumed after step" in wrong
    assert_same_curve(whole, out)
    assert_close_weights(whole, out, 1e-6)
    assert len(json.loads((out / "environment.json").read_text())) == 2


def test_restarted_processes_do_not_use_addresses_of_the_first_attempt(tmp_path: Path, where: Path) -> None:
    """torchrun's own store lives on after a restart, with the addresses of the first attempt; the second process of
    the next attempt comes late, so the first one would read its old address."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    more = (*PLAIN, "--policy", "static", "--epochs", 1)
    for attempt, late in (("0", 0.0), ("1", 2.0)):
        environ = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": attempt}
        out = tmp_path / attempt
        codes, printed = start_pair(where, out, *more, port=store.port, late=late, **environ)
        assert codes == [0, 0], "".join(printed)[-3000:]


def test_two_nodes(tmp_path: Path, where: Path, whole: Path) -> None:
    """Two torchrun of one process each that find each other, as on two machines; here they share one."""
    out, port = tmp_path / "out", free_port()
    words = ("train", "--data", where, "--out", out, "--device", "cpu", *SMALL, *KILLED)
    place = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two")
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(torchrun, *words, options=place, processes=1) for _ in range(2)]
        for run in runs:
            code, _, wrong = run.result()
            assert code == 0, wrong[-3000:]
    assert_same_curve(whole, out)
    assert json.loads((out / "environment.json").read_text())[0]["nodes"] == 2


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    where = split_folder(tmp_path / "in")
    with pytest.raises(AssertionError, match="multiple of 2 processes"):
        pair(where, tmp_path / "two", "--batch-size", 7)
    assert not (tmp_path / "two").exists()
