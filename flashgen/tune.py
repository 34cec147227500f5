"""The search: refuse by rule, compile in parallel, refuse by resources, check, time, tell, re-measure the finalists."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from flashgen.candidates import Candidate, Method, Ranking, entry_of, from_plain, is_transient, rank_all, to_plain
from flashgen.compilations import Compilations
from flashgen.evaluate import evaluate
from flashgen.families import Family, Variant
from flashgen.gate import judge
from flashgen.hardware import KNOWN_GPUS, Gpu
from flashgen.model import predict_us
from flashgen.problem import Problem
from flashgen.records import Entry
from flashgen.resources import Resources
from flashgen.search import Search, forget_study, open_journal
from flashgen.select import current_versions
from flashgen.space import Config, Rejection
from flashgen.spec import Spec
from flashgen.store import entries_of
from flashgen.workers import Failure, Workers

EVALUATE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Request:
    """What to tune and how long to try.

    Attributes:
        spec: what is computed.
        problems: the sizes to be fast at; each bucket gets a winner of its own.
        gpu: the target; `method` "measured" needs it to be present.
        families: which kernels compete.
        trials: candidates to try per family.
        budget_s: seconds after which no new candidate is started.
        seed: makes the order of candidates reproducible.
        resume: continue from the outcomes that earlier runs of the same request left, or forget them.
        first: configs to try before the sampler's, after the family's default.
    """

    spec: Spec
    problems: tuple[Problem, ...]
    gpu: Gpu
    families: tuple[Family, ...]
    method: Method
    trials: int
    budget_s: float
    seed: int = 0
    resume: bool = True
    first: tuple[Config, ...] = ()


@dataclass
class Progress:
    """Where a search stands; handed to the observer after every candidate."""

    spec: Spec
    total: int
    started: float
    budget_s: float
    done: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    best: Candidate | None = None


@dataclass(frozen=True)
class Outcome:
    """A ranking per bucket, everything that passed, and why the rest did not."""

    request: Request
    rankings: tuple[Ranking, ...]
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    interrupted: bool

    def entries(self, driver: str | None) -> list[Entry]:
        """The winners as the store keeps them; empty when nothing passed."""
        return [
            entry_of(each, self.request.method, current_versions(each.best[0].variant.family.name, driver))
            for each in self.rankings
            if each.best
        ]


def tune(
    request: Request, compilers: Workers, gpu_worker: Workers | None, observe: Callable[[Progress], None]
) -> Outcome:
    """Search every family of the request and rank what passed, per bucket.

    Args:
        request: what to tune.
        compilers: processes that compile.
        gpu_worker: the one process that runs candidates; None when estimating.
        observe: called after every candidate.

    Ctrl-C ends the search; what was found until then is ranked and returned.
    """
    candidates: list[Candidate] = []
    rejections: list[Rejection] = []
    interrupted = False
    start = time.monotonic()
    able = [family for family in request.families if family.space(request.spec, request.gpu).usable]
    for family in request.families:
        # Those that refuse everything need no time.
        number = able.index(family) + 1 if family in able else 0
        deadline = start + request.budget_s * number / max(1, len(able))
        with open_journal(request.gpu.name) as journal:
            name = _study_name(request, family)
            if not request.resume:
                forget_study(journal, name, family, request.spec)
            search = Search(
                family.worth_trying(request.problems), request.spec, request.gpu, trials=request.trials,
                seed=request.seed, journal=journal, name=name,
                first=(family.default(request.spec, request.gpu), *request.first),
            )  # fmt: skip
            rejections += search.rejections()
            progress = Progress(request.spec, min(request.trials, len(search.space.usable)), start, request.budget_s)
            run = _Run(request, family, search, compilers, gpu_worker, progress, observe, candidates, rejections)
            try:
                run.recall()
                run.until(deadline)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                search.abandon()
        if interrupted:
            break
    try:
        rankings = rank_all(request.problems, candidates, None if interrupted else gpu_worker)
    except KeyboardInterrupt:
        interrupted = True
        rankings = rank_all(request.problems, candidates, None)
    return Outcome(request, rankings, tuple(candidates), tuple(rejections), interrupted)


@dataclass
class _Run:
    """One family's search under way."""

    request: Request
    family: Family
    search: Search
    compilers: Workers
    gpu_worker: Workers | None
    progress: Progress
    observe: Callable[[Progress], None]
    candidates: list[Candidate]
    rejections: list[Rejection]

    def recall(self) -> None:
        """Take over what an earlier run found out."""
        for config, outcome in self.search.remembered.items():
            self._count(from_plain(Variant(self.family, self.request.spec, config), outcome))

    def until(self, deadline: float) -> None:
        """Compile ahead in parallel; check and time one candidate after the other."""
        ahead: deque[Variant] = deque()
        depth = 2 * self.compilers.count
        request, to_run = self.request, self.gpu_worker is not None
        compilations = Compilations(self.compilers, request.gpu, to_run=to_run, problems=request.problems)
        while True:
            while len(ahead) < depth and time.monotonic() < deadline:
                config = self.search.ask()
                if config is None:
                    break
                ahead.append(Variant(self.family, self.request.spec, config))
                compilations.start(ahead[-1])
            if not ahead:
                return
            variant = ahead.popleft()
            # The first one, the family's default, is waited for: a winner that nothing beat is better than none.
            if self.progress.done and time.monotonic() > deadline and compilations.cancelled(variant):
                continue
            compiled = compilations.outcome(variant)
            result = self._judge(variant, compiled)
            value = None
            if isinstance(result, Candidate):
                value = sum(math.log(result.us(index)) for index in range(len(self.request.problems)))
            self.search.tell(variant.config, value, None if is_transient(result) else to_plain(result))
            self._count(result)

    def _judge(self, variant: Variant, compiled: tuple[Resources, ...] | Failure) -> Candidate | Rejection:
        rejection = judge(variant, self.request.gpu, compiled)
        if rejection is not None:
            return rejection
        assert not isinstance(compiled, Failure)
        problems, gpu = self.request.problems, self.request.gpu
        predicted = tuple(predict_us(variant, compiled, problem, gpu) for problem in problems)
        if self.gpu_worker is None:
            return Candidate(variant, compiled, predicted)
        future = self.gpu_worker.submit(EVALUATE_TIMEOUT_S, evaluate, variant, problems)
        result = self.gpu_worker.outcome(future)
        if isinstance(result, Failure):
            return Rejection("benchmark", f"run: {result.kind}", result.reason)
        if isinstance(result, Rejection):
            return result
        return Candidate(variant, compiled, predicted, result.accuracy, result.times)

    def _count(self, result: Candidate | Rejection) -> None:
        progress = self.progress
        progress.done += 1
        if isinstance(result, Rejection):
            self.rejections.append(result)
            progress.refused[result.kind] += 1
        else:
            self.candidates.append(result)
            if progress.best is None or result.us(-1) < progress.best.us(-1):
                progress.best = result
        self.observe(progress)


def warm_start(spec: Spec, gpu: Gpu, most: int = 8) -> tuple[Config, ...]:
    """Configs that won for the same head dims with another dtype or mask, here or on other GPUs, frequent ones first.

    They are tried early; a GPU that nobody tuned starts from what others taught.
    """
    won: Counter[Config] = Counter()
    for known in dict.fromkeys((gpu, *KNOWN_GPUS.values())):
        for _, entry in entries_of(known):
            what = entry.spec.op, entry.spec.head_dim, entry.spec.head_dim_v
            if what == (spec.op, spec.head_dim, spec.head_dim_v):
                won[entry.config] += 1000 if known == gpu else 1
    return tuple(config for config, _ in won.most_common(most))


# Of what a study remembers (candidates.to_plain); another one is another study.
_FORMAT = 2


def _study_name(request: Request, family: Family) -> str:
    """Results are remembered for this GPU, these sizes and these versions, and for nothing else."""
    versions = current_versions(family.name)
    about = _FORMAT, [problem.stated for problem in request.problems], asdict(versions), request.gpu.identity
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
    return f"{request.gpu.name}/{request.method}/{digest}"
