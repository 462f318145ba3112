"""How likely the target is to accept the next draft, from what it made of the last ones.

`StepRecord.overlap` has the chance itself at every position that a block reached, not the coin that fell; under the
coupled rule 1 or 0, whose mean is that chance, too. Nothing is known of positions behind a rejection, and nothing is
guessed of them from matches there.

What is believed of a request is its own recent blocks, drawn towards what holds for its domain, and that towards what
was believed before anything was seen (a plan's measurement, or `UNKNOWN`). Two things are drawn: first the level, one
number for all positions, as a text that is hard at position 1 is hard at position 2; then every position by itself.

Letters: K drafted tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

UNKNOWN = 0.7
"""Conditional acceptance where nothing was measured: worth a try, and given up after a few blocks."""
MOST_DOMAINS = 64
"""Domains come from clients, and memory is finite: later ones are counted with those that have no name."""
_REQUEST_MEMORY, _DOMAIN_MEMORY = 0.92, 0.99  # what a block's evidence is worth one block later
_LEVEL_STRENGTH, _POSITION_STRENGTH = 4.0, 8.0  # how many observations a belief counts for
_MOST_GAP = 16


@dataclass
class _Evidence:
    """Weighted sums of overlaps, by position."""

    weight: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)

    def add(self, overlap: Sequence[float], memory: float) -> None:
        self.weight = [w * memory for w in self.weight]
        self.total = [t * memory for t in self.total]
        for j, value in enumerate(overlap):
            if j == len(self.weight):
                self.weight.append(0.0)
                self.total.append(0.0)
            self.weight[j] += 1
            self.total[j] += value

    def over(self, belief: Sequence[float]) -> list[float]:
        """The belief, one value a position, moved to what was seen."""
        pairs = list(zip(self.weight, self.total, belief, strict=False))
        seen = sum(w for w, _, _ in pairs)
        shift = sum(t - w * b for w, t, b in pairs) / (seen + _LEVEL_STRENGTH)
        moved = [min(max(b + shift, 0.0), 1.0) for b in belief]
        for j, (w, t, _) in enumerate(pairs):
            moved[j] = (t + _POSITION_STRENGTH * moved[j]) / (w + _POSITION_STRENGTH)
        return moved


class Acceptance:
    """Running estimates of conditional acceptance, by request and position."""

    def __init__(self, prior: Mapping[str, Sequence[float]]) -> None:
        """Start from what is believed beforehand.

        Args:
            prior: conditional acceptance at positions 1, 2, .. by domain; the domain '' is for all that are not named.
        """
        self._prior = {domain: tuple(hazards) for domain, hazards in prior.items() if hazards}
        self._domains: dict[str, _Evidence] = {}
        self._requests: dict[int, _Evidence] = {}

    def known(self, domain: str) -> str:
        """The name that a domain is counted under."""
        return domain if domain in self._domains or len(self._domains) < MOST_DOMAINS else ""

    def hazards(self, request: int, domain: str, k: int) -> list[float]:
        """The chance at each of positions 1 .. k that a draft is accepted, given that all before it were."""
        prior = self._prior.get(domain) or self._prior.get("") or (UNKNOWN,)
        belief = [*prior[:k], *prior[-1:] * (k - len(prior))]
        for evidence in (self._domains.get(self.known(domain)), self._requests.get(request)):
            if evidence is not None:
                belief = evidence.over(belief)
        return belief

    def observe(self, request: int, domain: str, overlap: Sequence[float], gap: int = 0) -> None:
        """Take in one block.

        Args:
            request, domain: whose it was.
            overlap: the chances at the positions that it reached, at least one.
            gap: steps without a draft since the request's last block; they age what was known of the request.
        """
        aged = _REQUEST_MEMORY ** (1 + min(gap, _MOST_GAP))
        self._requests.setdefault(request, _Evidence()).add(overlap, aged)
        self._domains.setdefault(self.known(domain), _Evidence()).add(overlap, _DOMAIN_MEMORY)

    def forget(self, request: int) -> None:
        """Drop what is known of a request; its domain keeps what it taught."""
        self._requests.pop(request, None)
