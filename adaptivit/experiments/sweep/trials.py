"""The trials of a sweep on disk, shared by all the processes that work on them.

OUT/sweep.json         what is searched; another search in the same place is refused
OUT/trials/NNNN.json   the point of a trial, and what is known of it when it has ended
OUT/.locks/            one lock for choosing a trial, one for each trial that runs

A trial belongs to a point (its number). The process that runs it holds its lock, which the system takes back when the
process dies: a trial that was begun and not ended, but whose lock is free, is run again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...utils.atomic_io import write_json
from ...utils.environment import versions
from ...utils.lock import Lock
from ...utils.settings import flat
from ..store import same_settings
from .config import FREE, TRIALS, SweepConfig
from .space import Axis, Params, points, total


@dataclass(frozen=True)
class Claim:
    """A trial that this process has taken."""

    number: int
    params: Params
    lock: Lock


@dataclass(frozen=True)
class Record:
    """What is known of a trial."""

    number: int
    params: Params
    status: str  # begun, finished, failed; of those that were begun `running` in another process
    facts: dict[str, Any]  # result, recipe, reason, seconds, date, versions

    def figure(self, name: str) -> float:
        return float(self.facts["result"][name])

    @property
    def top1(self) -> float:
        return self.figure("top1")

    @property
    def gmacs(self) -> float:
        return self.figure("gmacs")

    @property
    def share(self) -> float:
        """GMACs as a share of static's."""
        return self.gmacs / self.figure("gmacs_static")


class Trials:
    def __init__(self, config: SweepConfig, axes: Sequence[Axis]) -> None:
        """Begin a sweep, or go on with the one that is there."""
        self.config, self.axes, self.out = config, axes, Path(config.train.out)
        self.count, self.seed = total(axes, config.method, config.trials, TRIALS), config.train.seed
        self.optuna: Any = _optuna() if config.method == "tpe" else None
        self.planned = [] if self.optuna else points(axes, config.method, self.seed, self.count)
        if (self.out / "trials").exists() and not (self.out / "sweep.json").exists():
            raise UserError(f"{self.out} holds trials but no sweep.json: pass another --out.")
        try:
            (self.out / ".locks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot write {self.out}: {error.strerror or error}.") from error
        with self.alone():
            same_settings(self.out / "sweep.json", "sweep", self._settings())

    def _settings(self) -> dict[str, Any]:
        """What all processes and calls share."""
        config = self.config
        found = {k: v for k, v in flat(config.train).items() if k not in FREE}
        found |= {"space": list(config.space), "method": config.method, "objective": config.objective}
        return found | ({"max_share": config.max_share} if config.objective == "budget" else {})

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time."""
        with Lock(self.out / ".locks" / "choosing"):
            yield

    def _path(self, number: int) -> Path:
        return self.out / "trials" / f"{number:04d}.json"

    def _lock(self, number: int) -> Lock:
        return Lock(self.out / ".locks" / f"{number:04d}")

    def _read(self, number: int) -> Record | None:
        path = self._path(number)
        try:
            return Record(**json.loads(path.read_text())) if path.exists() else None
        except (ValueError, TypeError):
            raise UserError(f"{path} is damaged: remove it, and the trial is run again.") from None

    def claim(self) -> Claim | None:
        """Take the next trial that has not ended and does not run; None when there is none."""
        with self.alone():
            for number in range(1, self.count + 1):
                record = self._read(number)
                lock = self._lock(number)
                if (record is not None and record.status != "begun") or not lock.acquire(wait=False):
                    continue
                if record is None:
                    params = self.planned[number - 1] if self.planned else self._suggest(number)
                    record = self._write(number, params, "begun", {})
                return Claim(number, record.params, lock)
            return None

    def _write(self, number: int, params: Params, status: str, facts: dict[str, Any]) -> Record:
        record = Record(number, params, status, facts)
        write_json(self._path(number), vars(record))
        return record

    def end(self, claim: Claim, status: str, facts: dict[str, Any]) -> Record:
        """Record how a trial ended; one that is still `begun` is run again."""
        record = self._write(claim.number, claim.params, status, {"versions": versions("optuna"), **facts})
        claim.lock.release()
        return record

    def records(self) -> list[Record]:
        """One for each point that has ended or runs, by number; to be called alone()."""
        found = []
        for number in range(1, self.count + 1):
            record, lock = self._read(number), self._lock(number)
            if record is not None and record.status != "begun":
                found.append(record)
            elif record is not None and not lock.acquire(wait=False):
                found.append(replace(record, status="running"))
            elif record is not None:
                lock.release()  # interrupted
        return found

    def _suggest(self, number: int) -> Params:
        """Optuna's next point, by a sampler of its own: processes do not repeat each other, and the seed decides."""
        optuna, both = self.optuna, self.config.objective == "hypervolume"
        states = optuna.trial.TrialState
        kinds = {"finished": states.COMPLETE, "failed": states.FAIL, "running": states.RUNNING}
        distributions = {axis.key: _distribution(optuna, axis) for axis in self.axes}
        sampler = optuna.samplers.TPESampler(seed=(self.seed * 1_000_003 + number) % 2**32, constant_liar=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Optuna calls experimental
            study = optuna.create_study(directions=["maximize", "minimize"] if both else ["maximize"], sampler=sampler)
            for record in self.records():
                values = record.facts.get("objectives") if record.status == "finished" else None
                known = {"params": record.params, "distributions": distributions, "values": values}
                study.add_trial(optuna.trial.create_trial(state=kinds[record.status], **known))
            return dict(study.ask(distributions).params)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError('--method tpe needs the package optuna: pip install "adaptivit[sweep]".') from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _distribution(optuna: Any, axis: Axis) -> Any:
    kinds = optuna.distributions
    if axis.choices:
        return kinds.CategoricalDistribution(axis.choices)
    if axis.whole:
        return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)
