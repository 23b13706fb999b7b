"""The trials of a sweep on disk, in Optuna's journal, shared by all the processes that work on them.

OUT/sweep.json     what is searched, with versions; another search in the same place is refused
OUT/journal.log    Optuna's journal: study "sweep"
OUT/.locks/        one lock for choosing a trial, one for each trial that runs

A trial belongs to a point (its number). Who runs it holds its lock, which the system takes back when the process
dies: a trial that says it runs, but whose lock is free, is run again.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...utils.atomic_io import write_json
from ...utils.environment import versions
from ...utils.settings import flat
from .config import FREE, TRIALS, SweepConfig
from .space import Axis, Params, points, total

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError('sweep needs the package optuna: pip install "adaptivit[sweep]".') from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Lock:
    """An exclusive lock on a file, gone when its process is."""

    def __init__(self, path: Path) -> None:
        self.path, self.handle = path, -1

    def acquire(self, wait: bool = True) -> bool:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(handle)
            return False
        except BaseException:
            os.close(handle)
            raise
        self.handle = handle
        return True

    def release(self) -> None:
        os.close(self.handle)
        self.handle = -1


@dataclass(frozen=True)
class Claim:
    """A trial that this process has taken."""

    number: int
    params: Params
    trial: Any  # optuna's
    lock: Lock


@dataclass(frozen=True)
class Record:
    """What is known of a trial."""

    number: int
    params: Params
    status: str  # finished, failed, running
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


class Store:
    def __init__(self, config: SweepConfig, axes: Sequence[Axis]) -> None:
        """Begin a sweep, or go on with the one that is there."""
        self.optuna = _optuna()
        if fcntl is None:
            raise UserError("sweep shares its trials by file locks, which this system does not have.")
        self.config, self.axes, self.out = config, axes, Path(config.train.out)
        self.count = total(axes, config.method, config.trials, TRIALS)
        self.seed = config.train.seed
        self.planned = [] if config.method == "tpe" else points(axes, config.method, self.seed, self.count)
        self._refuse_strangers()
        locks = self.out / ".locks"
        try:
            locks.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot write {self.out}: {error.strerror or error}.") from error
        self.choosing = Lock(locks / "choosing")
        with self.alone():
            self._same_search()
            self.study = self._open(str((self.out / "journal.log").resolve()), Lock(locks / "journal"))
        self.distributions = {axis.key: self._distribution(axis) for axis in axes}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time."""
        self.choosing.acquire()
        try:
            yield
        finally:
            self.choosing.release()

    def _refuse_strangers(self) -> None:
        if (self.out / "trials").exists() and not (self.out / "sweep.json").exists():
            raise UserError(f"{self.out} holds trials but no sweep.json: give the sweep another --out.")

    def _same_search(self) -> None:
        """Refuse another search in the same place, saying what differs."""
        train = {k: v for k, v in flat(self.config.train).items() if k not in FREE}
        mine = {"space": list(self.config.space), "method": self.config.method, "objective": self.config.objective}
        if self.config.objective == "budget":
            mine["max_share"] = self.config.max_share  # type: ignore[assignment]
        new = json.loads(json.dumps({**train, **mine}))
        path = self.out / "sweep.json"
        if not path.exists():
            write_json(path, {"sweep": new, "versions": versions("optuna")})
            return
        try:
            old = dict(json.loads(path.read_text())["sweep"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is damaged: give the sweep another --out.") from None
        keys = dict.fromkeys([*new, *old])
        differ = [f"{k} (was {old.get(k)!r}, now {new.get(k)!r})" for k in keys if old.get(k) != new.get(k)]
        if differ:
            raise UserError(f"{self.out} holds another sweep: {'; '.join(differ[:4])}. Give this one another --out.")

    def _open(self, path: str, lock: Lock) -> Any:
        journal = self.optuna.storages.journal
        both = self.config.objective == "hypervolume"
        with _quiet():
            try:
                storage = self.optuna.storages.JournalStorage(journal.JournalFileBackend(path, lock_obj=lock))
                return self.optuna.create_study(
                    study_name="sweep",
                    storage=storage,
                    directions=["maximize", "minimize"] if both else ["maximize"],
                    sampler=self.optuna.samplers.RandomSampler(self.seed),
                    load_if_exists=True,
                )
            except ValueError as error:
                raise UserError(f"{path} is damaged ({error}): give the sweep another --out.") from None

    def _distribution(self, axis: Axis) -> Any:
        kinds = self.optuna.distributions
        if axis.choices:
            return kinds.CategoricalDistribution(axis.choices)
        if axis.whole:
            return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
        return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)

    def claim(self) -> Claim | None:
        """Take the next trial that nobody has; None when all are taken."""
        with self.alone():
            taken, again = self._look()
            number = next((n for n in range(1, self.count + 1) if n not in taken), None)
            if number is None:
                return None
            trial = self._ask(number, again.get(number))
            lock = self._lock(number)
            lock.acquire()
            return Claim(number, dict(trial.params), trial, lock)

    def _lock(self, number: int) -> Lock:
        return Lock(self.out / ".locks" / f"{number:04d}")

    def _look(self) -> tuple[set[int], dict[int, Params]]:
        """The points that are done or running, and the parameters of those that were begun and not ended."""
        states = self.optuna.trial.TrialState
        taken: set[int] = set()
        again: dict[int, Params] = {}
        for trial in self.study.get_trials(deepcopy=False):
            number = trial.user_attrs.get("number")
            if trial.state in (states.RUNNING, states.WAITING):
                if number is not None and trial.state == states.RUNNING and not self._dead(number):
                    taken.add(number)
                    continue
                if trial.state == states.WAITING:  # a process died while it took this one
                    trial = self.study.ask()
                self.study.tell(trial.number, state=states.FAIL)
            elif trial.state == states.COMPLETE or "reason" in trial.user_attrs:
                taken.add(number)
            if number is not None and set(trial.params) == set(self.distributions):
                again[number] = dict(trial.params)
        return taken, again

    def _dead(self, number: int) -> bool:
        lock = self._lock(number)
        if lock.acquire(wait=False):
            lock.release()
            return True
        return False

    def _ask(self, number: int, params: Params | None) -> Any:
        if params is None and self.planned:
            params = self.planned[number - 1]
        with _quiet():
            if params is not None:
                self.study.enqueue_trial(params, user_attrs={"number": number})
                return self.study.ask(self.distributions)
            # a sampler of its own for every trial: processes do not repeat each other, and the seed decides
            seed = (self.seed * 1_000_003 + number) % 2**32
            self.study.sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            trial = self.study.ask(self.distributions)
            trial.set_user_attr("number", number)
            return trial

    def finish(self, claim: Claim, values: Sequence[float], **facts: Any) -> None:
        self._tell(claim, facts, values=list(values))

    def fail(self, claim: Claim, **facts: Any) -> None:
        """The reason is among the facts; without one the trial is run again."""
        self._tell(claim, facts, state=self.optuna.trial.TrialState.FAIL)

    def _tell(self, claim: Claim, facts: dict[str, Any], **told: Any) -> None:
        facts = {"versions": versions("optuna"), **facts}
        for name in sorted(facts, key=lambda name: name == "reason"):  # the reason says that the rest is there
            claim.trial.set_user_attr(name, facts[name])
        self.study.tell(claim.trial, **told)
        claim.lock.release()

    def records(self) -> list[Record]:
        """One for each point, by number; a trial that was interrupted is none."""
        states = self.optuna.trial.TrialState
        found: dict[int, Record] = {}
        for trial in self.study.get_trials(deepcopy=False):
            facts = {k: v for k, v in trial.user_attrs.items() if k != "number"}
            status = {states.COMPLETE: "finished", states.RUNNING: "running"}.get(trial.state)
            if trial.state == states.FAIL and "reason" in facts:
                status = "failed"
            if status is not None and "number" in trial.user_attrs:
                number = trial.user_attrs["number"]
                found[number] = Record(number, dict(trial.params), status, facts)
        return [found[number] for number in sorted(found)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Optuna warns of what it calls experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
