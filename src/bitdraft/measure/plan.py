"""What was decided, for later commands to act on: one small file, `plan.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import Literal

from ..errors import UsageError
from .figures import Figures
from .files import writable, write_atomically
from .recommend import Recommendation
from .records import from_json, parse, to_json
from .stats import Interval
from .trace import Sampling

VERSION = 1


@dataclass(frozen=True)
class Plan:
    """How to run a pair of models on one machine.

    Attributes:
        version: of this file's layout.
        target, draft: the models' names, as they were given.
        target_format, draft_format: what each is run in; a draft_format of None decodes without speculation.
        k: drafted tokens a step, by workload; 0 for those that are better off without. default_k: for other traffic.
        speedup: expected over no speculation; 'do not speculate' keeps the best that was found.
        evidence: 'confirmed' by end-to-end runs, or 'predicted'. verdict: see `recommend`.
        machine: the fingerprint of where it was measured; step costs hold there only.
        sampling: the sampling values that it was measured with.
        trace_sha256: names the evidence, see `Trace.digest`.
        kv: format of keys and values of both models; None is bf16, or f32 beside the format f32.
        acceptance: of the draft format by workload, at positions 1, 2, .. of a block if it gets there; what the running
            estimates of `engine.controller` begin with.
    """

    version: int
    target: str
    draft: str
    target_format: str
    draft_format: str | None
    k: Mapping[str, int]
    default_k: int
    speedup: Interval
    evidence: Literal["confirmed", "predicted"]
    verdict: Literal["speculate", "undecided", "do not speculate"]
    machine: str
    sampling: Sampling
    trace_sha256: str
    kv: str | None = None
    acceptance: Mapping[str, tuple[float, ...]] | None = None

    def __post_init__(self) -> None:
        lengths = (self.default_k, *self.k.values())
        if min(lengths) < 0 or (self.draft_format is None and max(lengths) > 0):
            raise UsageError(
                f"draft lengths are {lengths} with draft_format {self.draft_format!r}. Expected counts of at least 0, "
                "and only 0 without a draft format. Make the plan anew with `bitdraft measure`."
            )

    def save(self, path: Path) -> None:
        """Write the plan, whole or not at all.

        Raises:
            UsageError: the folder cannot be written.
        """
        with writable(path.parent):
            write_atomically(path, json.dumps(to_json(self), indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """Read a plan strictly.

        Raises:
            UsageError: no such file, another version, an unknown or missing field, or a value that cannot be.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"{path} cannot be read ({error}). Expected the plan.json that `bitdraft measure -o` writes."
            raise UsageError(message) from None
        raw = parse(text, str(path))
        version = raw.get("version") if isinstance(raw, dict) else None
        if version != VERSION:
            raise UsageError(
                f"{path}: version is {version!r}. This bitdraft reads version {VERSION}. Make the plan anew with "
                "`bitdraft measure`."
            )
        return from_json(cls, raw, str(path))


def make_plan(figures: Figures, recommendation: Recommendation) -> Plan:
    """The plan that follows from a recommendation.

    Raises:
        UsageError: nothing was timed, so there is nothing to plan with.
    """
    if recommendation.evidence == "none" or recommendation.speedup is None:
        raise UsageError(
            "there is no plan yet: the costs of a step have not been timed. Expected a measurement that ran to its "
            "end. Go on with `bitdraft measure --resume`."
        )
    run = figures.run
    return Plan(
        version=VERSION,
        target=run.target.name,
        draft=run.draft.name,
        target_format=run.target_format,
        draft_format=recommendation.draft_format,
        k=recommendation.k,
        default_k=recommendation.default_k,
        speedup=recommendation.speedup,
        evidence=recommendation.evidence,
        verdict=recommendation.verdict,
        machine=run.machine.fingerprint,
        sampling=run.sampling,
        trace_sha256=figures.digest,
        kv=run.kv,
        acceptance=_acceptance(figures, recommendation.draft_format),
    )


def _acceptance(figures: Figures, name: str | None) -> dict[str, tuple[float, ...]] | None:
    if name is None:
        return None
    found = {}
    for workload in figures.workloads:
        hazards = (round(hazard.value, 4) for hazard in figures.cells[name, workload].hazards)
        found[workload] = tuple(takewhile(isfinite, hazards))
    return found
