"""A run directory: configuration, log, checkpoints, the final model; and the progress bar that shows the figures.

OUT/config.json      what was asked for, with versions
OUT/log.jsonl        one line every log_steps steps and one an epoch
OUT/checkpoint/      model, optimiser, average and step of the last good moment, replaced as a whole
OUT/model/           the final model (adaptivit.load)
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save

from . import __version__, checkpoint
from .config import TrainConfig
from .data import Loaded
from .errors import NotFiniteError, UserError, WeightsError
from .evaluate import Result
from .files import new_directory, recover, write_bytes, write_json
from .objectives import Losses
from .output import Output

if TYPE_CHECKING:
    from .train import Trainer

# May differ between an interrupted run and its continuation.
_FREE = {"out", "resume", "recipe", "workers", "device", "log_steps", "checkpoint_steps", "tensorboard", "compile"}


class RunDirectory:
    def __init__(self, config: TrainConfig, accelerator: Accelerator) -> None:
        """Refuse what cannot be, before anything is read or written."""
        self.config, self.path, self.main = config, Path(config.out), accelerator.is_main_process
        self.console = Console(stderr=True)
        self.writer: Any = None
        exists = (self.path / "config.json").exists()
        if config.resume:
            if not exists:
                raise UserError(f"--resume: there is no run in {self.path} (no config.json).")
            self._same_configuration()
        elif exists:
            raise UserError(f"{self.path} already holds a run: pass --resume to go on with it, or another --out.")
        if config.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("--tensorboard needs the package tensorboard: pip install tensorboard.") from None
            self._writer_type = SummaryWriter

    def _same_configuration(self) -> None:
        try:
            old = dict(json.loads((self.path / "config.json").read_text())["config"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--resume: {self.path / 'config.json'} is damaged.") from None
        new = json.loads(json.dumps(asdict(self.config)))
        differ = [f"{k} (was {old.get(k)!r}, now {new[k]!r})" for k in new if k not in _FREE and old.get(k) != new[k]]
        if differ:
            raise UserError(f"--resume: {self.path} was started with another configuration: {'; '.join(differ[:4])}.")

    def open(self) -> None:
        """From here on the run exists."""
        if self.main:
            if not self.config.resume:
                versions = {"adaptivit": __version__, "torch": torch.__version__, "python": platform.python_version()}
                write_json(self.path / "config.json", {"config": asdict(self.config), "versions": versions})
            if self.config.tensorboard:
                self.writer = self._writer_type(str(self.path / "tensorboard"))

    def say(self, line: str | None) -> None:
        if line and self.main:
            self.console.print(line, highlight=False)

    def log(self, record: dict[str, Any]) -> None:
        if not self.main:
            return
        try:
            with (self.path / "log.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UserError(f"Cannot write {self.path / 'log.jsonl'}: {error.strerror or error}.") from error
        if self.writer is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)) and name != "step":
                    self.writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def checkpoint(self, trainer: Trainer, step: int) -> None:
        """Everything that a continuation needs, replaced in one move."""
        if not all(bool(p.isfinite().all()) for p in trainer.model.parameters()):
            raise NotFiniteError(
                f"The weights are not finite after step {step}. Lower the learning rate; "
                "the last good checkpoint was kept."
            )
        if not self.main:
            return
        state = BytesIO()
        average = None if trainer.average is None else trainer.average.values
        torch.save({"step": step, "optimizer": trainer.optimizer.state_dict(), "average": average}, state)
        with new_directory(self.path / "checkpoint") as place:
            weights = {k: v.cpu().clone() for k, v in checkpoint.tensors(trainer.model).items()}
            write_bytes(place / "model.safetensors", save(weights))
            write_bytes(place / "training.pt", state.getvalue())

    def restore(self, trainer: Trainer) -> int:
        """Load the last checkpoint into the trainer; returns the number of steps done (0 without one)."""
        place = self.path / "checkpoint"
        if self.main:
            recover(place)
            recover(self.path / "model")
        trainer.accelerator.wait_for_everyone()
        if not place.exists():
            self.say("no checkpoint yet: starting from the beginning")
            self._truncate_log(0)
            return 0
        checkpoint.load_tensors(trainer.model, place)
        try:
            state = torch.load(place / "training.pt", map_location=trainer.accelerator.device, weights_only=True)
            trainer.optimizer.load_state_dict(state["optimizer"])
            step, average = int(state["step"]), state["average"]
            if trainer.average is not None:
                checkpoint.check_fit(trainer.average.values, average, str(place / "training.pt"))
                trainer.average.values = average
        except Exception as error:
            raise WeightsError(f"Damaged checkpoint: {place / 'training.pt'} ({type(error).__name__}).") from None
        self.say(f"resumed after step {step}")
        self._truncate_log(step)
        return step

    def _truncate_log(self, step: int) -> None:
        """Steps after the checkpoint are taken again, so their lines go."""
        path = self.path / "log.jsonl"
        if self.main and path.exists():
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            write_bytes(path, "".join(f"{x}\n" for x in lines if json.loads(x)["step"] <= step).encode())

    def finish(self, trainer: Trainer, result: Result) -> None:
        if self.main:
            results = {"validation": result.summary()}
            if trainer.average is None:
                trainer.model.save_pretrained(self.path / "model", results=results)
            else:
                with trainer.average.used(trainer.model):
                    trainer.model.save_pretrained(self.path / "model", results=results)
            if self.writer is not None:
                self.writer.close()


class Meter:
    """Progress with the figures that matter, on the screen and in the log."""

    def __init__(self, run: RunDirectory, total: int, start: int, show: bool) -> None:
        self.run, self.speed = run, 0.0
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=run.console,
            disable=not show,
        )
        self.task = self.progress.add_task("train", total=total, completed=start, figures="")

    def __enter__(self) -> Meter:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def step(self, step: int, losses: Losses, output: Output, batch: Loaded, speed: float, trainer: Trainer) -> None:
        self.speed = speed if self.speed == 0 else 0.9 * self.speed + 0.1 * speed
        self.progress.advance(self.task)
        if step % self.run.config.log_steps and not (step < 3):
            return
        hits = output.logits.detach().argmax(1).cpu() == batch.labels.cpu()
        figures = {
            "loss": float(losses.total.detach()),
            **{name: float(value) for name, value in losses.terms.items()},
            "accuracy": 100 * float(hits.double().mean()),
            "mean_depth": float(output.trace.mean_depth.mean()),
            "gmacs": float(output.macs_deployed.mean()) / 1e9,
            "images_per_second": self.speed,
            "lr": trainer.optimizer.param_groups[0]["lr"],
        }
        facts = output.trace.facts
        if "plan" in facts:  # whether execution keeps to the plan
            gap = (facts["halt"] - facts["plan"].detach())[facts["planned"]]
            figures["plan_gap"] = float(gap.mean()) if len(gap) else 0.0
        self.run.log({"kind": "train", "step": step + 1, **figures})
        terms = " ".join(f"{name} {float(value):.3f}" for name, value in losses.terms.items())
        text = (
            f"{terms} | acc {figures['accuracy']:.1f} % | depth {figures['mean_depth']:.2f} | "
            f"{figures['gmacs']:.3f} GMACs | {self.speed:.0f} img/s"
        )
        self.progress.update(self.task, figures=text)

    def epoch(self, epoch: int, step: int, result: Result) -> None:
        self.run.log({"kind": "validation", "step": step, "epoch": epoch + 1, **result.summary()})
        self.run.say(
            f"epoch {epoch + 1}: top-1 {result.top1:.2f} %, depth {result.mean_depth:.2f}, {result.gmacs:.4f} GMACs"
            f" ({-100 * result.saved:+.1f} %)"
            + ("" if result.plan_gap is None else f", N - N_target {result.plan_gap:+.2f}")
        )
