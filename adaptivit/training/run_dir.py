"""A run directory: configuration, log, checkpoints, the final model; and the progress bar that shows the figures.

OUT/config.json      what was asked for
OUT/left_out.txt     files and images that were left out, where these are more than ten
OUT/environment.json one entry a start: command, commit, versions, devices
OUT/log.jsonl        one line every run.log_steps steps and one an epoch
OUT/train.csv        its lines of training as a table, validation.csv those of validation, curves.png both as a picture
OUT/checkpoint/      model, optimiser, average and step of the last good moment, replaced as a whole
OUT/model/           the final model (adaptivit.load)
"""

from __future__ import annotations

import hashlib
import json
import time
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console
from safetensors.torch import save

from .. import tasks
from ..checkpoint import weights as checkpoint
from ..checkpoint.place import digest_of
from ..errors import NotFiniteError, UserError, WeightsError, reason_of
from ..evaluation.evaluate import Result
from ..utils import environment
from ..utils.atomic_io import new_directory, recover, write_bytes, write_json
from ..utils.coerce import require, shown
from ..utils.console import bars, left_out
from ..utils.settings import flat
from ..utils.sharded import like, whole
from ..utils.text import json_text
from . import fsdp, log_plots
from .config import FREE, RENAMED, TrainConfig
from .losses import Losses

if TYPE_CHECKING:
    from .step import StepStats, Trainer

_REDRAW = 60.0  # seconds between two pictures while training goes on


class RunDirectory:
    def __init__(self, config: TrainConfig, accelerator: Accelerator) -> None:
        """Check OUT against the configuration, before anything is written."""
        self.config, self.path, self.main = config, Path(config.out), accelerator.is_main_process
        self.accelerator, self.drawn = accelerator, time.monotonic()
        self.console = Console(stderr=True)
        self.named = 0
        self.left_out: dict[str, None] = {}  # files and images that training does without
        self.writer: Any = None
        exists = (self.path / "config.json").exists()
        if config.resume:
            if not exists:
                raise UserError(f"--resume: there is no run in {self.path} (no config.json).")
        elif exists:
            raise UserError(f"{self.path} already holds a run: pass --resume to go on with it, or another --out.")
        if config.run.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("--run.tensorboard needs the package tensorboard: pip install tensorboard.") from None
            self._writer_type = SummaryWriter

    def settle(self, config: TrainConfig) -> None:
        """The configuration, once the number of images is known; refused if OUT holds a run of another one."""
        self.config = config
        if not config.resume:
            return
        try:
            old = dict(json.loads((self.path / "config.json").read_text())["config"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"--resume: {self.path / 'config.json'} is damaged.") from None
        if renamed := [f"{name} is {RENAMED[name] or 'gone'} now" for name in old if name in RENAMED]:
            raise UserError(f"--resume: an older version began {self.path}: {'; '.join(renamed[:4])}. Start anew.")
        new = json.loads(json.dumps(flat(self.config)))
        other = [k for k in new if k not in FREE and old.get(k) != new[k]]
        differ = [f"{k} (was {shown(old.get(k))}, now {new[k]!r})" for k in other]
        if differ:
            raise UserError(f"--resume: {self.path} was started with another configuration: {'; '.join(differ[:4])}.")

    def open(self) -> None:
        """Write the configuration and where it runs."""
        if self.main:
            if not self.config.resume:
                write_json(self.path / "config.json", {"config": flat(self.config)})
            here = environment.describe(self.accelerator.device, self.accelerator.num_processes)
            write_json(self.path / "environment.json", [*self._starts(), here])
            if self.config.run.tensorboard:
                self.writer = self._writer_type(str(self.path / "tensorboard"))

    def _starts(self) -> list[Any]:
        """Entries of earlier starts; none if the file is damaged."""
        try:
            found = json.loads((self.path / "environment.json").read_text())
        except (OSError, ValueError, RecursionError):
            return []
        return found if isinstance(found, list) else []

    def say(self, line: str | None) -> None:
        if line and self.main:
            self.console.print(line, highlight=False)

    def name_left_out(self) -> None:
        """Every process has to call it."""
        every = list(dict.fromkeys(gather_object(list(self.left_out))))
        if self.main and len(every) > self.named:
            left_out(every, self.path / "left_out.txt")
            self.named = len(every)

    def log(self, record: dict[str, Any]) -> None:
        if not self.main:
            return
        try:
            with (self.path / "log.jsonl").open("a") as file:
                file.write(json_text(record) + "\n")
        except OSError as error:
            raise UserError(f"Cannot write {self.path / 'log.jsonl'}: {error.strerror or error}.") from error
        if self.writer is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)) and name != "step":
                    self.writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def checkpoint(self, trainer: Trainer, step: int) -> None:
        """Write what a resumed run needs, replaced as a whole."""
        weights = checkpoint.tensors(trainer.model)
        if not all(bool(v.isfinite().all()) for v in weights.values()):
            raise NotFiniteError(
                f"The weights are not finite after step {step}. Lower the learning rate; "
                "the last good checkpoint was kept."
            )
        average = None if trainer.average is None else trainer.average.values
        if trainer.copy is None:
            optimizer = trainer.optimizer.state_dict()
        else:
            optimizer = fsdp.optimizer_state(trainer.optimizer)
            average = None if average is None else {k: whole(v).cpu() for k, v in average.items()}
        if not self.main:
            return
        state, model = BytesIO(), save({k: v.cpu().clone() for k, v in weights.items()})
        digest = hashlib.sha256(model).hexdigest()
        torch.save({"step": step, "weights": digest, "optimizer": optimizer, "average": average}, state)
        with new_directory(self.path / "checkpoint") as place:
            write_bytes(place / "model.safetensors", model)
            write_bytes(place / "training.pt", state.getvalue())

    def restore(self, trainer: Trainer, steps: int) -> int:
        """Load the last checkpoint into the trainer; returns how many of all its steps are done (0 without one)."""
        place = self.path / "checkpoint"
        if self.main:
            recover(place)
            recover(self.path / "model")
        trainer.accelerator.wait_for_everyone()
        records = log_plots.read(self.path / "log.jsonl")
        if not place.exists():
            self._truncate_log(records, 0)
            return 0
        weights, file = place / "model.safetensors", place / "training.pt"
        state = checkpoint.read_pickle(file)
        try:
            step, average, digest = state["step"], state["average"], state.get("weights")
            require(type(step) is int and 0 < step <= steps, "step", f"1..{steps}", step)
            if digest not in (None, digest_of(weights)):  # None: of an older version
                raise WeightsError(f"{weights} is not of the step that training.pt beside it is of")
            checkpoint.fill(trainer.model, checkpoint.read_weights(weights), str(weights))
            if trainer.copy is None:
                trainer.optimizer.load_state_dict(state["optimizer"])
            else:
                fsdp.load_optimizer(trainer.optimizer, state["optimizer"])
            for parameter, values in trainer.optimizer.state.items():
                shapes = {tuple(v.shape) for v in values.values() if isinstance(v, torch.Tensor) and v.ndim}
                require(shapes <= {tuple(parameter.shape)}, "optimizer", "AdamW's state of these weights", shapes)
            if trainer.average is not None:
                own = trainer.average.values
                require(isinstance(average, dict), "average", "weights", average)
                checkpoint.check_fit(own, average, str(file))
                checkpoint.check_finite(average, str(file))
                trainer.average.values = {k: like(own[k], v) for k, v in average.items()}
        except Exception as error:  # what a file holds can fail in any way
            raise WeightsError(
                f"--resume: damaged checkpoint {file}: {reason_of(error).rstrip('.')}. Take checkpoint/ from a copy of "
                f"the run; or remove it, and the run begins anew."
            ) from None
        self._truncate_log(records, step)
        return step

    def _truncate_log(self, records: list[dict[str, Any]], step: int) -> None:
        """Remove the lines of steps after the checkpoint, which are taken again."""
        if self.main and (self.path / "log.jsonl").exists():
            kept = "".join(f"{json_text(record)}\n" for record in records if record["step"] <= step)
            write_bytes(self.path / "log.jsonl", kept.encode())

    def show(self, last: bool = False) -> None:
        """Write the log as tables, and once a minute as a picture."""
        if not self.main:
            return
        records = log_plots.read(self.path / "log.jsonl")
        log_plots.write_tables(records, self.path)
        if last or time.monotonic() - self.drawn > _REDRAW:
            write_bytes(self.path / "curves.png", log_plots.draw(records, self.path.name, tasks.get(self.config.task)))
            self.drawn = time.monotonic()

    def finish(self, trainer: Trainer, result: Result) -> None:
        self.show(last=True)
        self.name_left_out()
        with trainer.whole() as model:
            if self.main:
                model.save_pretrained(self.path / "model", results={"validation": result.summary()})
        if self.writer is not None:
            self.writer.close()


class StepLog:
    """Progress with the figures that matter, on the screen and in the log."""

    def __init__(self, run: RunDirectory, total: int, start: int, show: bool) -> None:
        self.run, self.speed = run, 0.0
        self.done, self.total = start, total
        self.bars = bars(run.console, keep=True, hide=not show)

    def __enter__(self) -> StepLog:
        self.progress = self.bars.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bars.__exit__(*error)

    def wants(self, step: int) -> bool:
        """Whether this step is logged."""
        return step < 3 or step % self.run.config.run.log_steps == 0

    def step(self, step: int, losses: Losses, stats: StepStats | None, speed: float, trainer: Trainer) -> None:
        self.speed = speed if self.speed == 0 else 0.9 * self.speed + 0.1 * speed
        self.done += 1
        if stats is None:
            self.progress("train", self.done, self.total)
            return
        figures = {
            "loss": float(losses.total.detach()),
            **{name: float(value) for name, value in losses.terms.items()},
            **stats.figures(),
            "images_per_second": self.speed,
            "lr": trainer.optimizer.param_groups[0]["lr"],
        }
        self.run.log({"kind": "train", "step": step + 1, **figures})
        task, metric = trainer.task, next(iter(trainer.task.metrics.values()))
        shown = [
            f"loss {figures['loss']:.3g}",
            f"{task.score} {metric.text(figures[task.score])}",
            f"{figures['gmacs']:.3g} GMACs",
            f"depth {figures['mean_depth']:.2f}",
            f"{self.speed:.0f} img/s",
            *(f"{name} {float(value):.3f}" for name, value in losses.terms.items()),
        ]
        self.progress("train", self.done, self.total, shown)

    def epoch(self, epoch: int, step: int, result: Result) -> None:
        self.run.log({"kind": "validation", "step": step, "epoch": epoch + 1, **result.summary()})
        self.run.show()
        self.run.say(
            f"epoch {epoch + 1}: {result.text}, depth {result.mean_depth:.2f}, {result.gmacs:.4f} GMACs"
            f" ({-100 * result.saved:+.1f} %)"
            + ("" if result.plan_gap is None else f", N - N_target {result.plan_gap:+.2f}")
        )
