"""One option for each item, the least loss within a budget: a Lagrangian greedy on convex hulls.

For a price `l` of cost, every item by itself takes the option with the least `loss + l cost`: one of the corners of the
lower convex hull of its options. Lowering `l` from high to low makes one item after the other step to its next corner,
in the order of what a step buys for its cost, and every state on that way is optimal for its own cost (Everett,
Operations Research 11, 1963). Where the budget falls between two states, steps that still fit are taken in the same
order: the loss is above the optimum by less than what one step would have bought (Sinha and Zoltners, Operations
Research 27, 1979).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import UsageError


@dataclass(frozen=True)
class Option:
    """One way to have an item.

    Attributes:
        name: of the option. cost, loss: in any units, of all options alike; at least 0.
    """

    name: str
    cost: float
    loss: float


@dataclass(frozen=True)
class Step:
    """An item's way from one corner of its hull to the next, dearer one."""

    item: str
    before: Option
    after: Option

    @property
    def cost(self) -> float:
        """What the step costs more."""
        return self.after.cost - self.before.cost

    @property
    def gain(self) -> float:
        """What the step takes off the loss, for each unit of cost."""
        return (self.before.loss - self.after.loss) / self.cost


def hull(options: Sequence[Option]) -> list[Option]:
    """The corners of the lower convex hull, from the cheapest to the one with the least loss."""
    corners: list[Option] = []
    for option in sorted(options, key=lambda o: (o.cost, o.loss)):
        if corners and option.loss >= corners[-1].loss:
            continue
        while len(corners) > 1 and _bulges(corners[-2], corners[-1], option):
            corners.pop()
        corners.append(option)
    return corners


def _bulges(low: Option, middle: Option, high: Option) -> bool:
    """Whether the middle option lies on or above the line between the others."""
    straight = (middle.loss - low.loss) * (high.cost - low.cost)
    return straight >= (high.loss - low.loss) * (middle.cost - low.cost)


def steps(items: Mapping[str, Sequence[Option]]) -> list[Step]:
    """All steps of all items, the ones that buy most for their cost first; an item's own stay in order."""
    corners = {item: hull(options) for item, options in items.items()}
    found = [Step(item, *pair) for item, its in corners.items() for pair in pairwise(its)]
    return sorted(found, key=lambda step: -step.gain)


def states(items: Mapping[str, Sequence[Option]], budget: float) -> Iterator[dict[str, Option]]:
    """The choices from the cheapest of all on, step by step, as far as the budget goes.

    Args:
        items: the options of each item, at least one.
        budget: the largest cost of all chosen options together.

    Raises:
        UsageError: even the cheapest options cost more.
    """
    chosen = {item: hull(options)[0] for item, options in items.items()}
    cost = sum(option.cost for option in chosen.values())
    if cost > budget:
        raise UsageError(
            f"the budget is {budget:g}, and the smallest choice costs {cost:g}. Expected more: raise the budget, or "
            "offer smaller options."
        )
    yield dict(chosen)
    for step in steps(items):
        if step.before == chosen[step.item] and cost + step.cost <= budget:
            chosen[step.item] = step.after
            cost += step.cost
            yield dict(chosen)


def choose(items: Mapping[str, Sequence[Option]], budget: float) -> dict[str, Option]:
    """The last of `states`: the least loss that the greedy finds within the budget."""
    chosen: dict[str, Option] = {}
    for state in states(items, budget):
        chosen = state
    return chosen
