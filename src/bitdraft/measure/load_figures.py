"""From answers to figures, each by its full name and with its interval.

    TTFT       from when a request was due until its first piece of text
    TPOT       (last piece - first piece) / (output tokens - 1), one number a request
    ITL        time between pieces. A speculative server sends several tokens in one piece, so there are two of it:
               by chunk, the gap itself; by token, the gap shared out to the tokens of the piece that ends it
    throughput output tokens of a block over its time, from the first request to the last answer's end
    goodput    requests a second that were answered whole, with a TTFT within the bound

Requests that failed count for nothing but the share of failures. Intervals of latencies are over requests, those of
throughput over rounds: with fewer than three rounds there are none.

Letters: B bootstrap resamples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from .load_config import LoadConfig
from .load_run import Answer
from .stats import (
    DEGENERATE_BELOW,
    RESAMPLES,
    Estimate,
    Floats,
    Interval,
    combine,
    percentiles,
    ratio_of_sums,
    resample,
)

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_SHORTEST_JUDGED = 20  # output tokens below which repetition says nothing
_FEWEST_ROUNDS = 3

Percentiles = Mapping[str, Interval]
"""By name of the percentile: p50, p95, p99."""


@dataclass(frozen=True)
class Line:
    """Everything about one load on one arm of one server. Times are seconds.

    Attributes:
        load, lengths, level, server, arm: what it is about.
        requests, failed: counts. errors: what went wrong, the most frequent first, with counts.
        throughput, goodput, requests_a_second: see the module. good_share: of all requests.
        ttft, tpot, itl_token, itl_chunk: percentiles; empty without a whole answer.
        tokens_a_chunk: output tokens over pieces of text. counted: the server said how many tokens each piece has.
        prompt_tokens, output_tokens: medians, by the server's count; None if it did not count.
        cached_share: prompt tokens that the server had in its cache, of all; None if it did not say.
        drafted: tokens. accepted_per_drafted: of answers that are no loops; None without drafts.
        degenerate: answers that repeat themselves.
        speedup: throughput over that of `against`; None for the line that others are held against.
        against: the other line, as 'server arm'.
    """

    load: str
    lengths: str
    level: float
    server: str
    arm: str
    requests: int
    failed: int
    errors: tuple[tuple[str, int], ...]
    throughput: Interval
    goodput: Interval
    requests_a_second: Interval
    good_share: float
    ttft: Percentiles
    tpot: Percentiles
    itl_token: Percentiles
    itl_chunk: Percentiles
    tokens_a_chunk: float | None
    counted: bool
    prompt_tokens: float | None
    output_tokens: float | None
    cached_share: float | None
    drafted: int | None
    accepted_per_drafted: float | None
    degenerate: int
    speedup: Interval | None
    against: str


_Group = tuple[str, str, str, str]


def lines(config: LoadConfig, answers: Sequence[Answer], rng: np.random.Generator) -> list[Line]:
    """The figures of every load and arm, in the order in which they ran; lines that are compared stand together."""
    groups: dict[_Group, list[Answer]] = {}
    for answer in answers:
        groups.setdefault((answer.load, answer.lengths, answer.server, answer.arm), []).append(answer)
    rounds = sorted({answer.round for answer in answers})
    weights = resample(len(rounds), rng) if len(rounds) >= _FEWEST_ROUNDS else None
    rates = {group: _rates(its, rounds, weights, config.ttft_bound) for group, its in groups.items()}
    found = []
    for group, its in groups.items():
        against = _baseline(group, groups)
        speedup = None
        if against is not None:
            speedup = combine(lambda a, b: a / b, rates[group][0], rates[against][0]).interval()
        found.append(_line(group, its, rates[group], config.ttft_bound, rng, speedup, against))
    places = {(line.load, line.lengths): i for i, line in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda line: places[line.load, line.lengths])


def _baseline(group: _Group, groups: Mapping[_Group, object]) -> _Group | None:
    """Drafts are held against none on the same server, and servers against the first one."""
    load, lengths, server, arm = group
    if arm == "speculative" and (load, lengths, server, "plain") in groups:
        return load, lengths, server, "plain"
    first = next(other for other in groups if other[:2] == (load, lengths))
    return None if first == group or first[2] == server else first


def _whole(answer: Answer) -> bool:
    return not answer.error and bool(answer.gaps)


def _output(answer: Answer) -> int:
    """Output tokens: as the server counted, else those that came in pieces, else the pieces."""
    return answer.output_tokens or sum(answer.tokens) or len(answer.gaps)


def _ttft(answer: Answer) -> float:
    return answer.sent - answer.due + answer.gaps[0]


def _rates(
    answers: Sequence[Answer], rounds: Sequence[int], weights: Floats | None, bound: float
) -> tuple[Estimate, Estimate, Estimate]:
    """Output tokens, good requests and whole requests a second."""
    sums = np.zeros((4, len(rounds)))
    for i, number in enumerate(rounds):
        block = [answer for answer in answers if answer.round == number]
        whole = [answer for answer in block if _whole(answer)]
        if not block:
            continue
        sums[0, i] = sum(map(_output, whole))
        sums[1, i] = sum(_ttft(answer) <= bound for answer in whole)
        sums[2, i] = len(whole)
        sums[3, i] = max(a.ended for a in block) - min(a.due for a in block)
    unknown = np.full((RESAMPLES, len(rounds)), np.nan)
    over = [ratio_of_sums(sums[j], sums[3], unknown if weights is None else weights) for j in range(3)]
    return over[0], over[1], over[2]


def _line(
    group: _Group,
    answers: Sequence[Answer],
    rates: tuple[Estimate, Estimate, Estimate],
    bound: float,
    rng: np.random.Generator,
    speedup: Interval | None,
    against: _Group | None,
) -> Line:
    whole = [answer for answer in answers if _whole(answer)]
    weights = resample(len(whole), rng) if whole else np.zeros((0, 0))
    chunks = [answer.gaps[1:] for answer in whole]
    tpot = [[sum(a.gaps[1:]) / (_output(a) - 1)] if _output(a) > 1 else [] for a in whole]
    errors: dict[str, int] = {}
    for answer in answers:
        if not _whole(answer):
            errors[answer.error or "no text"] = errors.get(answer.error or "no text", 0) + 1
    judged = [a for a in whole if not _degenerate(a) and a.drafted is not None and a.accepted is not None]
    drafted = sum(a.drafted or 0 for a in judged)
    prompts = [a.prompt_tokens for a in whole if a.prompt_tokens is not None]
    cached = [a.cached_tokens for a in whole if a.cached_tokens is not None]
    pieces = sum(len(a.gaps) for a in whole)
    tokens, good, requests = rates
    return Line(
        *group[:2],
        level=answers[0].level,
        server=group[2],
        arm=group[3],
        requests=len(answers),
        failed=len(answers) - len(whole),
        errors=tuple(sorted(errors.items(), key=lambda item: -item[1])),
        throughput=tokens.interval(),
        goodput=good.interval(),
        requests_a_second=requests.interval(),
        good_share=sum(_ttft(a) <= bound for a in whole) / len(answers),
        ttft=_percentiles([[_ttft(a)] for a in whole], weights),
        tpot=_percentiles(tpot, weights),
        itl_token=_percentiles([_by_token(a) for a in whole], weights),
        itl_chunk=_percentiles(chunks, weights),
        tokens_a_chunk=sum(map(_output, whole)) / pieces if pieces else None,
        counted=all(all(a.tokens) for a in whole),
        prompt_tokens=median(prompts) if prompts else None,
        output_tokens=median(map(_output, whole)) if whole else None,
        cached_share=sum(cached) / sum(prompts) if cached and sum(prompts) else None,
        drafted=drafted if judged else None,
        accepted_per_drafted=sum(a.accepted or 0 for a in judged) / drafted if drafted else None,
        degenerate=sum(map(_degenerate, whole)),
        speedup=speedup,
        against=f"{against[2]} {against[3]}" if against else "",
    )


def _degenerate(answer: Answer) -> bool:
    return _whole(answer) and _output(answer) >= _SHORTEST_JUDGED and answer.distinct < DEGENERATE_BELOW


def _by_token(answer: Answer) -> list[float]:
    """For every token behind the first piece, its share of the gap before its piece."""
    later = answer.gaps[1:]
    if all(answer.tokens):
        return [gap / n for gap, n in zip(later, answer.tokens[1:], strict=True) for _ in range(n)]
    each = max((_output(answer) - 1) / len(later), 1.0) if later else 1.0  # unknown: as many in every piece
    return [gap / each for gap in later]


def _percentiles(values: Sequence[Sequence[float]], weights: Floats) -> Percentiles:
    if not any(values):
        return {}
    found = percentiles(values, tuple(SHARES.values()), weights)
    return {name: estimate.interval() for name, estimate in zip(SHARES, found, strict=True)}


def warnings(config: LoadConfig, found: Sequence[Line]) -> list[str]:
    """What to distrust, sentence by sentence."""
    said = []
    for line in found:
        name = f"{line.server}, {line.arm}, {line.load}, {line.lengths}"
        if line.failed:
            said.append(f"{name}: {line.failed} of {line.requests} requests failed ({line.errors[0][0]}).")
        if line.degenerate:
            said.append(
                f"{name}: {line.degenerate} answers repeat themselves (distinct bigram ratio below "
                f"{DEGENERATE_BELOW}). Drafts of a loop are accepted too easily; these do not count for acceptance."
            )
        if line.cached_share and line.cached_share > 0.05:
            said.append(f"{name}: {line.cached_share:.0%} of the prompt tokens were in the server's cache already.")
        wanted = int(line.lengths.split("/")[1]) if "/" in line.lengths else 0
        if line.output_tokens is not None and not config.natural_stop and line.output_tokens < 0.9 * wanted:
            said.append(
                f"{name}: outputs have {line.output_tokens:.0f} tokens, {wanted} were asked for. The server cannot be "
                "asked to write on after an end."
            )
        if line.requests > line.failed and not line.counted:
            said.append(f"{name}: the server does not say how many tokens a piece has; ITL by token is an average.")
    return said
