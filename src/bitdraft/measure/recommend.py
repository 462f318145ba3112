"""From figures to advice: which draft format, how many tokens to draft, or not to speculate. In plain words.

The rules, in order:

* Where requests were run from end to end, those runs decide; otherwise the predictions do.
* Each workload gets the draft length that is fastest for it, and none where that is not above 1.
* The format is the one that is fastest over all workloads, equal numbers of tokens of each.
* Formats that cannot be told apart, and lie within 3%, are a tie; so are those within 1%. The one that needs the
  fewest packed bytes is taken, and the tie is said.
* 'speculate' is said when the whole 95% interval of the speedup lies above 1; 'do not speculate' when no workload
  gains with any format; 'undecided' in between.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .caveats import caveats
from .figures import Cell, Figures, harmonic
from .numbers import count, listed, milliseconds, percent, size, times, with_span
from .predict import break_even_acceptance, loss
from .stats import Estimate, Interval, combine

Verdict = Literal["speculate", "undecided", "do not speculate"]
Evidence = Literal["confirmed", "predicted", "none"]


@dataclass(frozen=True)
class Recommendation:
    """What to do, how sure that is, and why.

    Attributes:
        verdict: see the module. draft_format: None if none is to be used.
        k: by workload, 0 where speculation does not pay. default_k: for traffic of no known workload.
        speedup: over the same target without speculation; of 'do not speculate', the best that was found.
        evidence: what the speedup rests on.
        sure: the chance that the verdict's side of 1 is the true one; None if the samples are too few to say.
        ties: formats that are as fast.
        headline: the advice, one sentence. reasons: why, sentence by sentence. warnings: what to distrust.
    """

    verdict: Verdict
    draft_format: str | None
    k: Mapping[str, int]
    default_k: int
    speedup: Interval | None
    evidence: Evidence
    sure: float | None
    ties: tuple[str, ...]
    headline: str
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Candidate:
    """One format. `raw` speculates everywhere; `gain` only where that is faster, and is 1 elsewhere."""

    name: str
    cells: Mapping[str, Cell]
    raw: Estimate
    gain: Estimate
    confirmed: bool

    @property
    def k(self) -> dict[str, int]:
        """The best draft length by workload, 0 where speculation does not pay."""
        return {workload: cell.k if _speedup(cell).value > 1 else 0 for workload, cell in self.cells.items()}

    @property
    def shown(self) -> Estimate:
        """Its speedup: as advised or, if that is never to speculate, as it would be."""
        return self.gain if any(self.k.values()) else self.raw


def recommend(figures: Figures) -> Recommendation:
    """Choose a format and draft lengths, and say so in words."""
    candidates = _candidates(figures)
    notes = caveats(figures)
    if not candidates:
        return Recommendation(
            verdict="undecided",
            draft_format=None,
            k={},
            default_k=0,
            speedup=None,
            evidence="none",
            sure=None,
            ties=(),
            headline="No recommendation yet: the costs of a step have not been timed.",
            reasons=("Acceptance alone does not say whether speculation is faster. Go on with --resume.",),
            warnings=notes,
        )
    best, ties = _choose(candidates, figures)
    pays = any(best.k.values())
    speedup, above = best.shown.interval(), best.shown.chance_above(1.0)
    verdict: Verdict = "do not speculate" if not pays else "speculate" if (speedup.low or 0) > 1 else "undecided"
    return Recommendation(
        verdict=verdict,
        draft_format=best.name if pays else None,
        k=best.k,
        default_k=_default_k(best),
        speedup=speedup,
        evidence="confirmed" if best.confirmed else "predicted",
        sure=None if above is None else above if pays else 1 - above,
        ties=tuple(tie.name for tie in ties),
        headline=_headline(verdict, best, figures),
        reasons=tuple(_reasons(verdict, best, ties, candidates, speedup, above, figures)),
        warnings=notes,
    )


def _speedup(cell: Cell) -> Estimate:
    assert cell.speedup is not None
    return cell.speedup


def _candidates(figures: Figures) -> list[_Candidate]:
    """Formats with evidence on every workload; those that ran from end to end alone, if any did."""
    found = []
    for name in figures.formats:
        cells = {workload: figures.cells[name, workload] for workload in figures.workloads}
        if any(cell.speedup is None for cell in cells.values()):
            continue
        each = [_speedup(cell) for cell in cells.values()]
        one = Estimate(1.0, np.ones_like(each[0].samples))
        found.append(
            _Candidate(
                name=name,
                cells=cells,
                raw=harmonic(each),
                gain=harmonic([speedup if speedup.value > 1 else one for speedup in each]),
                confirmed=all(cell.confirmation for cell in cells.values()),
            )
        )
    return [c for c in found if c.confirmed] or found


def _choose(candidates: list[_Candidate], figures: Figures) -> tuple[_Candidate, list[_Candidate]]:
    """The best candidate, and those that are tied with it."""
    fastest = max(candidates, key=lambda c: (c.gain.value, c.raw.value))
    if not any(fastest.k.values()):
        return fastest, []
    group = [c for c in candidates if c is fastest or _tied(fastest, c)]
    if all(c.name in figures.sizes for c in group):
        chosen = min(group, key=lambda c: (figures.sizes[c.name].disk_bytes, -c.gain.value))
    else:
        chosen = fastest
    return chosen, [c for c in group if c is not chosen]


def _tied(fastest: _Candidate, other: _Candidate) -> bool:
    ratio = combine(lambda a, b: a / b, fastest.gain, other.gain)
    bounds = ratio.interval()
    apart = bounds.low is not None and bounds.low > 1
    return ratio.value <= 1.01 or (ratio.value <= 1.03 and not apart)


def _default_k(best: _Candidate) -> int:
    """Of the draft lengths chosen for the workloads, the one that is fastest over all of them."""
    chosen = sorted({k for k in best.k.values() if k})
    if not chosen:
        return 0

    def over_all(k: int) -> float:
        speedups = [next((p.speedup for p in c.curve if p.k == k), None) for c in best.cells.values()]
        return harmonic([s for s in speedups if s]).value if all(speedups) else 0.0

    return max(chosen, key=over_all)


def _headline(verdict: Verdict, best: _Candidate, figures: Figures) -> str:
    if verdict == "do not speculate":
        high = best.raw.interval().high
        why = "it would be slower" if high is not None and high < 1 else "no gain is to be seen"
        return f"Do not speculate with {figures.run.draft.name} on this machine: {why}."
    lengths: dict[int, list[str]] = {}
    for workload, k in best.k.items():
        lengths.setdefault(k, []).append(workload)
    if len(lengths) == 1:
        plan = f"K = {next(iter(lengths))}"
    else:
        parts = [f"{f'K = {k}' if k else 'no speculation'} for {listed(names)}" for k, names in lengths.items()]
        plan = listed(parts)
    if verdict == "undecided":
        return f"The {best.name} draft with {plan} may pay, but this measurement does not show it."
    return f"Use the {best.name} draft with {plan}."


def _reasons(
    verdict: Verdict,
    best: _Candidate,
    ties: list[_Candidate],
    candidates: list[_Candidate],
    speedup: Interval,
    above: float | None,
    figures: Figures,
) -> list[str]:
    reasons = [_speed_sentence(verdict, best, speedup, above)]
    reasons += [f"{_cell_sentence(cell)} {_loss_sentence(cell)}".strip() for cell in best.cells.values()]
    if figures.costs and best.name in figures.costs.draft and 1 in figures.costs.target:
        draft, plain = figures.costs.draft[best.name].value, figures.costs.target[1].value
        reasons.append(
            f"A drafted token costs {milliseconds(draft)}, a token of the target {milliseconds(plain)}: "
            f"c = T_draft / T_target = {count(draft / plain)}."
        )
    if ties:
        reasons.append(_tie_sentence(best, ties, figures))
    others = [c for c in candidates if c is not best and c not in ties]
    if others:
        reasons.append(_against(best, max(others, key=lambda c: c.gain.value), figures))
    if best.confirmed:
        reasons += _not_run(best, figures)
    else:
        tried = sum(max(len(cell.curve) for cell in c.cells.values()) for c in candidates)
        reasons.append(
            f"This is a prediction, and the best of {tried} combinations of format and K on the same texts, which "
            "flatters it a little. Nothing was run from end to end yet."
        )
    return reasons


def _speed_sentence(verdict: Verdict, best: _Candidate, speedup: Interval, above: float | None) -> str:
    how = "measured end to end" if best.confirmed else "predicted"
    shown = with_span(speedup, times)
    if verdict == "do not speculate":
        sure = "" if above is None else f" The chance that it is faster at all is {_chance(above)}."
        lengths = listed([f"K = {k}" for k in sorted({cell.k for cell in best.cells.values()})])
        return f"The fastest candidate, {best.name} with {lengths}, reaches {shown} of the plain speed, {how}.{sure}"
    sure = "" if above is None else f" The chance that it is faster than no speculation is {_chance(above)}."
    return f"Speedup over no speculation: {shown}, {how}.{sure}"


def _chance(share: float) -> str:
    return "above 99.9%" if share > 0.999 else "below 0.1%" if share < 0.001 else percent(share)


def _cell_sentence(cell: Cell) -> str:
    point = cell.best
    shown = with_span(cell.agreement.conditional_acceptance.interval(), percent)
    text = (
        f"{cell.workload}: conditional acceptance {shown}, {count(point.tokens_per_step.value)} tokens a step at "
        f"K = {cell.k}."
    )
    if point.cost is None:
        return text
    needed = point.cost.break_even().value
    alpha = break_even_acceptance(needed, cell.k)
    if np.isnan(alpha):
        return f"{text} Even with every draft accepted it would be slower: a step costs {count(needed)} plain ones."
    return f"{text} Speculation pays above {percent(alpha)}, or {count(needed)} tokens a step."


def _loss_sentence(cell: Cell) -> str:
    if cell.best.cost is None:
        return ""
    parts = loss(cell.best.tokens_per_step.value, cell.k, cell.best.cost)
    words = {"acceptance": "rejected drafts", "drafting": "drafting", "extra rows": "verifying extra rows"}
    ranked = sorted(((share, words.get(cause, cause)) for cause, share in parts.shares.items()), reverse=True)
    named = [f"{word} ({percent(share, 0)})" for share, word in ranked if share >= 0.05]
    if not named:
        return f"Next to nothing of the ideal {cell.k + 1}× is lost."
    return f"What is missing to the ideal {cell.k + 1}× goes to {listed(named)}."


def _tie_sentence(best: _Candidate, ties: list[_Candidate], figures: Figures) -> str:
    others = listed([f"{tie.name} ({times(tie.gain.value)})" for tie in ties])
    if best.name not in figures.sizes:
        return f"A tie with {others}: {best.name} is the faster by a hair."
    packed = size(figures.sizes[best.name].disk_bytes)
    return f"A tie with {others}: {best.name} is taken because it is the smallest, {packed} packed."


def _not_run(best: _Candidate, figures: Figures) -> list[str]:
    """Formats that were predicted to be faster than the choice, but did not run from end to end."""
    ours = figures.overall[best.name].predicted
    return [
        f"{name} was predicted to be faster still ({times(total.predicted.value)} against {times(ours.value)}), but "
        "was not run from end to end: confirm more candidates to know."
        for name, total in figures.overall.items()
        if ours and total.predicted and not total.confirmed and total.predicted.value > ours.value
    ]


def _against(best: _Candidate, other: _Candidate, figures: Figures) -> str:
    """Why the next best format is not the choice."""
    sure = combine(lambda a, b: a / b, best.shown, other.shown).chance_above(1.0)
    text = f"Next comes {other.name} with {times(other.shown.value)}"
    if sure is not None:
        text += f"; the chance that {best.name} is really faster is {_chance(sure)}"
    ours, theirs = figures.overall[best.name], figures.overall[other.name]
    facts = []
    if ours.conditional_acceptance.value > 0:
        share = theirs.conditional_acceptance.value / ours.conditional_acceptance.value
        facts.append(f"its acceptance is {percent(share)}")
    if figures.costs and {best.name, other.name} <= set(figures.costs.draft):
        cost = figures.costs.draft[other.name].value / figures.costs.draft[best.name].value
        facts.append(f"its drafted token costs {percent(cost, 0)}")
    return f"{text}. Against {best.name}, {listed(facts)}." if facts else f"{text}."
