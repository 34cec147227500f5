"""Which candidate to try next: Optuna over a family's space, with a memory. The only file that knows Optuna."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import optuna
from filelock import FileLock, Timeout

from flashgen.families import Family
from flashgen.hardware import Gpu
from flashgen.paths import user_dir
from flashgen.space import Config, Rejection
from flashgen.spec import Spec

# Duplicates in a row after which the sampler is taken to have converged; the rest is drawn at random.
_PATIENCE = 50

optuna.logging.set_verbosity(optuna.logging.WARNING)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C in here takes effect at the end: Optuna fails for good when interrupted with its journal locked."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupts:
        raise KeyboardInterrupt


class Search:
    """Candidates of one family for one spec and GPU, in the order worth trying.

    A space no larger than `trials` is tried completely. A larger one is sampled by TPE, after `first`. A config is
    handed out once; what is known of it, also from an earlier run with the same journal, answers from memory and counts
    among the trials.
    """

    def __init__(
        self,
        family: Family,
        spec: Spec,
        gpu: Gpu,
        *,
        trials: int,
        seed: int,
        journal: Path | None = None,
        name: str = "",
        first: Sequence[Config] = (),
    ) -> None:
        self.space = family.space(spec, gpu)
        self._choices = family.choices
        self._random = random.Random(seed)
        self._usable = set(self.space.usable)
        self._trials: dict[Config, optuna.trial.Trial] = {}
        self._study = optuna.create_study(
            storage=_storage(journal),
            study_name=_study_name(name, family, spec),
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=10),
            load_if_exists=True,
        )
        self.remembered = self._recall()
        self._exhaustive = len(self.space.usable) <= trials
        self._queue = self._start(first)
        self._left = trials - len(self.remembered)

    def _recall(self) -> dict[Config, dict[str, object]]:
        """Outcomes of earlier runs; trials that a killed run left open are closed."""
        remembered = {}
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state == optuna.trial.TrialState.RUNNING:
                self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            if "outcome" in trial.user_attrs and Config(**trial.params) in self._usable:
                remembered[Config(**trial.params)] = trial.user_attrs["outcome"]
        return remembered

    def _start(self, first: Sequence[Config]) -> Iterator[Config]:
        rest = list(self.space.usable) if self._exhaustive else []
        self._random.shuffle(rest)
        return iter(dict.fromkeys([*(config for config in first if config in self._usable), *rest]))

    @_uninterrupted()
    def ask(self) -> Config | None:
        """The next config to try, or None when the trials or the space are used up."""
        if self._left <= 0 or len(self._trials) + len(self.remembered) >= len(self.space.usable):
            return None
        config = self._next()
        if config is not None:
            self._left -= 1
        return config

    def _next(self) -> Config | None:
        for config in self._queue:
            if self._new(config):
                return self._enqueue(config)
        if self._exhaustive:
            return None
        for _ in range(_PATIENCE):
            config, trial = self._suggest()
            if self._new(config):
                self._trials[config] = trial
                return config
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        unseen = [config for config in self.space.usable if self._new(config)]
        return self._enqueue(self._random.choice(unseen))

    def _enqueue(self, config: Config) -> Config:
        """Make the study's next trial this config; others that a killed run left waiting come first and are closed."""
        self._study.enqueue_trial(dict(config))
        suggested, trial = self._suggest()
        while suggested != config:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            suggested, trial = self._suggest()
        self._trials[config] = trial
        return config

    def _new(self, config: Config) -> bool:
        return config in self._usable and config not in self._trials and config not in self.remembered

    def _suggest(self) -> tuple[Config, optuna.trial.Trial]:
        trial = self._study.ask()
        values = {name: trial.suggest_categorical(name, list(choices)) for name, choices in self._choices.items()}
        return Config(**{name: int(str(value)) for name, value in values.items()}), trial

    @_uninterrupted()
    def tell(self, config: Config, value: float | None, outcome: Mapping[str, object] | None) -> None:
        """Record a result.

        Args:
            config: what `ask` returned.
            value: what is minimised; None for a candidate that was refused.
            outcome: what later runs remember; None when another day may end differently.
        """
        trial = self._trials[config]
        if outcome is not None:
            trial.set_user_attr("outcome", dict(outcome))
        if value is None:
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, value)

    @_uninterrupted()
    def abandon(self) -> None:
        """Close the trials that were handed out and never told, as after Ctrl-C."""
        for trial in self._trials.values():
            if self._study.trials[trial.number].state == optuna.trial.TrialState.RUNNING:
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)

    def rejections(self) -> list[Rejection]:
        """Why the rest of the space was refused before anything was compiled."""
        return [rejection for _, rejection in self.space.rejected]


def forget_study(journal: Path | None, name: str, family: Family, spec: Spec) -> None:
    """Drop what a journal remembers of one search."""
    storage, study = _storage(journal), _study_name(name, family, spec)
    if study in optuna.get_all_study_names(storage):
        optuna.delete_study(study_name=study, storage=storage)


def _study_name(name: str, family: Family, spec: Spec) -> str:
    """A stored study cannot change its choices, so other choices are another study."""
    choices = hashlib.sha256(json.dumps(sorted(family.choices.items())).encode()).hexdigest()[:8]
    return f"{name}/{family.name}/{spec.slug}/{choices}"


def _storage(journal: Path | None) -> optuna.storages.BaseStorage:
    if journal is None:
        return optuna.storages.InMemoryStorage()
    from optuna.storages.journal import JournalFileBackend

    journal.parent.mkdir(parents=True, exist_ok=True)
    return optuna.storages.JournalStorage(JournalFileBackend(str(journal)))


@contextlib.contextmanager
def open_journal(gpu_name: str) -> Iterator[Path | None]:
    """The file that remembers this GPU's trials; None when it cannot be written or another process tunes with it."""
    path = user_dir() / "studies" / f"{gpu_name}.journal"
    lock = FileLock(f"{path}.owner", timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        # Optuna's own lock, left by a process that was killed: nobody else can hold it now, and it would cost 30 s.
        Path(f"{path}.lock").unlink(missing_ok=True)
    except (Timeout, OSError):
        yield None
        return
    try:
        yield path
    finally:
        lock.release()
