"""How far a request has come, and what speculation did for it."""

from dataclasses import dataclass, field
from typing import Any

from ..engine.engine import Emission
from ..types import StepRecord


@dataclass
class Progress:
    """What is known of one request while it runs. Only the worker's delivery changes it.

    Attributes:
        prompt_tokens: length of its prompt.
        domain: what kind of traffic it is.
        arrived: when it came, in seconds of the worker's clock.
        admitted: when its first step began; None before it has made one.
        first, last: when its first and its latest tokens came; None before.
        gap: seconds between the last two deliveries of tokens; None before the second.
        tokens: output tokens.
        cached: tokens of its prompt that the prefix cache held.
        steps: (drafted, accepted) of each step.
        predicted: tokens drafted from the client's own prediction that stand in the output, and those that do not.
        finish: why it ended; None while it runs.
    """

    prompt_tokens: int
    domain: str
    arrived: float
    admitted: float | None = None
    first: float | None = None
    last: float | None = None
    gap: float | None = None
    tokens: int = 0
    cached: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)
    predicted: tuple[int, int] = (0, 0)
    finish: str | None = None

    def add(self, emission: Emission, record: StepRecord | None, time: float) -> None:
        """Take in what a step did."""
        self.cached += emission.cached_tokens
        self.finish = emission.finish
        if emission.tokens:
            self.gap = None if self.last is None else time - self.last
            self.first, self.last = time if self.first is None else self.first, time
            self.tokens += len(emission.tokens)
        if record is not None:
            self.steps.append((record.proposed, record.accepted))
            if record.predicted:
                stands, (accepted, rejected) = min(record.accepted, record.emitted), self.predicted
                self.predicted = accepted + stands, rejected + record.proposed - stands


def shown_step(record: StepRecord) -> dict[str, Any]:
    """One step as a stream shows it, where origins are asked for.

    Returns:
        drafted, accepted: tokens.
        tested: positions that the target looked at.
        overlap: sum of the chances of acceptance there; over `tested`, the conditional acceptance.
    """
    return {
        "drafted": record.proposed,
        "accepted": record.accepted,
        "tested": len(record.overlap),
        "overlap": round(sum(record.overlap), 6),
    }


def speculative_decoding(of: list[Progress], longest: int, *, per_step: bool) -> dict[str, Any]:
    """What speculation did for some requests, in the shape and with the names of vLLM's per-request metrics.

    Args:
        of: the requests.
        longest: the longest block that is ever drafted.
        per_step: list drafted and accepted tokens of each step as well, steps without drafts included.

    Returns:
        mean_acceptance_length (tokens a step with drafts, the target's own one included), draft_acceptance_rate
        (accepted over drafted; None without drafts), acceptance_histogram (steps with drafts by accepted tokens),
        num_spec_steps, num_accepted_draft_tokens, num_draft_tokens, num_spec_tokens.
    """
    every = [step for progress in of for step in progress.steps]
    steps = [step for step in every if step[0]]
    histogram = [0] * (max([longest, *(drafted for drafted, _ in steps)]) + 1)
    for _, accepted in steps:
        histogram[accepted] += 1
    drafted, accepted = sum(d for d, _ in steps), sum(a for _, a in steps)
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": longest,
    }
    if per_step:
        found["per_step_drafted"], found["per_step_accepted"] = [d for d, _ in every], [a for _, a in every]
    return found
