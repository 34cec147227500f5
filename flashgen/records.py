"""One tuned configuration with the evidence for it (Entry), and the plain dicts that stand for it in a file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from typing import Literal, TypeVar, get_args

from flashgen.errors import FlashgenError, InputError, did_you_mean
from flashgen.families import family_named
from flashgen.features import OPTIONAL
from flashgen.hardware import Gpu, Identity
from flashgen.problem import Bucket, Problem
from flashgen.space import Config
from flashgen.spec import Spec
from flashgen.untrusted import check_number, count, mapping, scalar, shown, text

Method = Literal["measured", "estimated"]

_ENTRY_KEYS = ("spec", "bucket", "family", "config", "method", "problem", "time_us", "error", "versions")
_TIMES = ("median", "spread", "samples", "eager")
_GPU_KEYS = ("name", "backend", "capability", "num_sms", "shared_per_block")


@dataclass(frozen=True)
class Timing:
    """How long one launch takes.

    Attributes:
        median_us: microseconds, measured or the model's estimate.
        spread_us: microseconds that the samples lie apart; None for an estimate.
        samples: how many launches were timed; None for an estimate.
        eager_us: microseconds from one launch to the next where each is one from Python; None where the others say it.
    """

    median_us: float
    spread_us: float | None
    samples: int | None
    eager_us: float | None = None

    def __post_init__(self) -> None:
        check_number("time_us.median", self.median_us, low=1e-9)
        if self.spread_us is not None:
            check_number("time_us.spread", self.spread_us)
        if self.samples is not None:
            count("time_us.samples", self.samples, low=1)
        if self.eager_us is not None:
            check_number("time_us.eager", self.eager_us, low=1e-9)


@dataclass(frozen=True)
class Accuracy:
    """The largest error of the kernel against the float64 reference, and the largest that was allowed."""

    max_error: float
    allowed: float

    def __post_init__(self) -> None:
        check_number("error.max_error", self.max_error)
        check_number("error.allowed", self.allowed)


@dataclass(frozen=True)
class Versions:
    """What an entry was made with; `driver` is None where there is none, `template` is render.template_hash."""

    flashgen: str
    triton: str
    torch: str
    driver: str | None
    template: str

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (name, value) != ("driver", None):
                text(f"versions.{name}", value)


@dataclass(frozen=True)
class Entry:
    """One tuned configuration, complete enough to be judged later.

    Attributes:
        method: "measured" on the GPU, or "estimated" by the model without it.
        problem: the sizes that were timed.
        accuracy: None for an estimate, whose kernel never ran.

    Raises:
        InputError: a value that no file may hold, or evidence that does not fit the method.
        UnknownNameError: no family has this name.
    """

    spec: Spec
    bucket: Bucket
    family: str
    config: Config
    method: Method
    problem: Problem
    time: Timing
    accuracy: Accuracy | None
    versions: Versions

    def __post_init__(self) -> None:
        family = family_named(self.family)
        if family.op != self.spec.op:
            raise InputError(f"family {family.name!r} computes op={family.op!r}, but the spec says {self.spec.op!r}.")
        family.config(self.config)
        for name, size in vars(self.bucket).items():
            if count(f"bucket.{name}", size).bit_count() != 1:
                raise InputError(f"bucket.{name} must be a power of two, but got {shown(size)}.")
        if min(self.problem.stated.values()) < 1:
            raise InputError(f"a problem without any work has no fastest config, but got {self.problem}.")
        if self.method not in get_args(Method):
            raise InputError(f"method={self.method!r} is not known. {did_you_mean(str(self.method), get_args(Method))}")
        evidence = (self.time.spread_us, self.time.samples, self.accuracy)
        if (None in evidence) if self.method == "measured" else (evidence != (None, None, None)):
            raise InputError("'measured' needs time_us.spread, time_us.samples and error; 'estimated' has none.")
        if self.accuracy is not None and self.accuracy.max_error > self.accuracy.allowed:
            raise InputError(f"{self.accuracy} is an error above what is allowed. Tune again.")

    @property
    def key(self) -> tuple[str, Spec, Bucket, Method]:
        """What a file holds at most one entry of."""
        return (self.family, self.spec.tuned_as, self.bucket, self.method)

    @property
    def label(self) -> str:
        """What a message calls the entry."""
        return f"{self.method} {self.family} {self.spec.label} at {self.bucket.seq_q}x{self.bucket.seq_kv}"

    @property
    def us_per_score(self) -> float:
        """Median time by scores computed, so that entries timed at different sizes compare."""
        sizes = self.problem
        return self.time.median_us / (sizes.batch * sizes.heads * sizes.seq_q * sizes.seq_kv)

    def to_plain(self) -> dict[str, object]:
        """The entry as dicts of str, int, float and None, keys in the file's order."""
        time = {"median": self.time.median_us, "spread": self.time.spread_us, "eager": self.time.eager_us}
        samples = {} if self.time.samples is None else {"samples": self.time.samples}
        error = None if self.accuracy is None else asdict(self.accuracy)
        # float() and str() undo subclasses: numpy's float64, torch's version string.
        return {
            "spec": self.spec.stated,
            "bucket": asdict(self.bucket),
            "family": self.family,
            "config": {name: self.config[name] for name in family_named(self.family).choices},
            "method": self.method,
            "problem": self.problem.stated,
            "time_us": {name: float(value) for name, value in time.items() if value is not None} | samples,
            "error": error and {name: float(value) for name, value in error.items()},
            "versions": {name: value and str(value) for name, value in asdict(self.versions).items()},
        }

    @staticmethod
    def from_plain(value: object) -> Entry:
        """Build an Entry from what a file holds.

        Raises:
            InputError, UnknownNameError: a key or value that cannot be right, by name.
        """
        plain = mapping("the entry", value, _ENTRY_KEYS)
        time = mapping("time_us", plain["time_us"], ["median"], optional=_TIMES[1:])
        config = mapping("config", plain["config"])
        family = family_named(text("family", plain["family"]))
        return Entry(
            spec=_spec(plain["spec"]),
            bucket=_record(Bucket, "bucket", plain["bucket"]),
            family=family.name,
            config=family.config({name: scalar(f"config.{name}", number) for name, number in config.items()}),
            method=scalar("method", plain["method"]),
            problem=_record(Problem, "problem", plain["problem"], optional=["page_size"]),
            time=Timing(*(scalar(f"time_us.{name}", time.get(name)) for name in _TIMES)),
            accuracy=None if plain["error"] is None else _record(Accuracy, "error", plain["error"]),
            versions=_record(Versions, "versions", plain["versions"]),
        )


def label_of(value: object) -> str:
    """What a complaint calls an entry that may be wrong anywhere: its spec, if that much can be read."""
    try:
        return _spec(value.get("spec") if isinstance(value, dict) else None).slug
    except FlashgenError:
        return "spec unreadable"


def gpu_to_plain(gpu: Gpu) -> dict[str, object]:
    """What a file says about the GPU that it is for."""
    backend, capability, num_sms, shared = gpu.identity
    return dict(zip(_GPU_KEYS, (gpu.name, backend, list(capability), num_sms, shared), strict=True))


def gpu_from_plain(value: object) -> tuple[str, Identity]:
    """The GPU's name, and its identity to compare with Gpu.identity; InputError names what cannot be right."""
    plain = mapping("gpu", value, _GPU_KEYS)
    name, backend = (text(f"gpu.{key}", plain[key]) for key in ("name", "backend"))
    if not isinstance(plain["capability"], list) or len(plain["capability"]) != 2:
        raise InputError(f"gpu.capability must be a pair such as [9, 0], but got {shown(plain['capability'])}.")
    major, minor = (count("gpu.capability", number) for number in plain["capability"])
    num_sms, shared = (count(f"gpu.{key}", plain[key]) for key in ("num_sms", "shared_per_block"))
    return name, (backend, (major, minor), num_sms, shared)


_Record = TypeVar("_Record", Spec, Bucket, Problem, Accuracy, Versions)


def _record(kind: type[_Record], what: str, value: object, optional: Collection[str] = ()) -> _Record:
    names = [field.name for field in fields(kind)]
    plain = mapping(what, value, [name for name in names if name not in optional], optional)
    return kind(**{name: scalar(f"{what}.{name}", item) for name, item in plain.items()})


def _spec(value: object) -> Spec:
    """A Spec whose expressions are digests: what is run comes from callers, never from a file."""
    spec = _record(Spec, "spec", value, optional=OPTIONAL)
    if spec != spec.named:
        raise InputError(f"score_mod and mask_mod of spec must be digests such as '#0123456789ab', but got {spec}.")
    return spec
