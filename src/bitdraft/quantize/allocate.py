"""A format for every tensor of a draft, chosen by what its rounding costs in acceptance.

The least loss within a budget, or the most tokens a second where the cost of steps is known (objective.py says how they
hang together). Every tensor's options are priced before (sensitivity.py), and chosen from by the knapsack.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from ..errors import UsageError
from ..formats import Format, Recipe, get_format
from ..formats.recipe import Method
from ..models.config import ModelConfig
from .knapsack import Option, hull, states
from .objective import Budget, Response, Speed
from .sensitivity import Sensitivities

HEAD = "lm_head"


def candidates(activation: str = "16") -> tuple[Format, ...]:
    """Formats to choose from, all with inputs of one width, '16' or '8': 2 to 8 bits, groups of 32 to 128."""
    named = [f"w{bits}a{activation}-g{g}" for bits in (2, 3, 4, 6) for g in (32, 64, 128)]
    return tuple(get_format(n) for n in (*named, *(f"{n}-asym" for n in named), f"w8a{activation}"))


def packed_bytes(form: Format, shape: tuple[int, int]) -> float:
    """What a weight [N, K] takes on disk in a format: codes, scales and zero points, as `Packed.nbytes` counts them."""
    if form.bits_per_weight is None:
        raise UsageError(f"{form.name} takes what the model's file says. Expected a format with a width of its own.")
    per_output = 4 if form.group_size is None and form.kind != "float" else 0
    return shape[0] * (shape[1] * form.bits_per_weight / 8 + per_output)


@dataclass(frozen=True)
class Choice:
    """What one tensor got.

    Attributes:
        tensor: its name. weights: how many. format: its format's name. size: bytes. kl: expected, nats a token.
        up, down: the next dearer and cheaper formats worth having, with what they would change: (format, bytes, KL).
    """

    tensor: str
    weights: int
    format: str
    size: float
    kl: float
    up: tuple[str, float, float] | None
    down: tuple[str, float, float] | None

    @property
    def bits(self) -> float:
        """Bits a weight, scales and zero points counted."""
        return 8 * self.size / self.weights


@dataclass(frozen=True)
class Prediction:
    """What is expected of one way to bring the draft into low bits.

    Attributes:
        name: of the way. bits, bits_without_head: a weight. size: bytes. kl: nats a token. acceptance: of the probe.
        tokens_per_second: None without measured step costs.
    """

    name: str
    bits: float
    bits_without_head: float
    size: float
    kl: float
    acceptance: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class Allocation:
    """A format for every tensor, and what is expected of it.

    Attributes:
        base: the format that says how inputs are rounded. choices: tensor by tensor.
        budget: what it had to fit. response: acceptance by KL. expected: of the choice.
        baselines: what uniform formats, and 6 bits for keys and values, are expected to give.
    """

    base: str
    choices: tuple[Choice, ...]
    budget: Budget
    response: Response
    expected: Prediction
    baselines: tuple[Prediction, ...]

    @property
    def formats(self) -> dict[str, str]:
        """Format names by tensor, for a recipe."""
        return {choice.tensor: choice.format for choice in self.choices}

    def recipe(self, method: Method = "clip") -> Recipe:
        """The recipe; its name says the bits a weight, and which choice it is by the start of a SHA-256."""
        return mixed_recipe(self.formats, self.base, self.expected.bits, method)


def mixed_recipe(formats: Mapping[str, str], base: str, bits: float, method: Method = "clip") -> Recipe:
    """A recipe of one format for each tensor.

    Args:
        formats: format names by tensor. base: the format of all others. bits: a weight, for the name.
        method: how weights are rounded.
    """
    digest = sha256(repr((base, sorted(formats.items()))).encode()).hexdigest()[:8]
    name = f"mixed-{bits:.2f}bits-{digest}" + f"-{method}"
    return Recipe(name, get_format(base), method, {tensor: get_format(form) for tensor, form in formats.items()})


def weights_by_tensor(config: ModelConfig) -> dict[str, tuple[tuple[int, int], ...]]:
    """The matrices that are in a tensor's format: one each, and the embedding with the head where it is another."""
    found: dict[str, tuple[tuple[int, int], ...]] = {n: (shape,) for n, shape in config.linear_shapes().items()}
    return found if config.tied_head else {**found, HEAD: found[HEAD] * 2}


def options(
    config: ModelConfig, prices: Sensitivities, formats: Sequence[Format], fixed: Mapping[str, str]
) -> dict[str, list[Option]]:
    """Bytes and KL of every format that fits a tensor.

    Args:
        config: the draft's sizes. prices: of its tensors. formats: candidates.
        fixed: tensors that are not chosen for, with their format, which was priced, too.

    Raises:
        UsageError: a tensor that no candidate fits.
    """
    found = {}
    for tensor, shapes in weights_by_tensor(config).items():
        allowed = [f for f in formats if (tensor, f.name) in prices.kl and fixed.get(tensor, f.name) == f.name]
        if not allowed:
            raise UsageError(
                f"{tensor}: none of {', '.join(f.name for f in formats)} fits its {shapes[0][1]} inputs and was "
                "priced. Expected at least one; offer smaller groups, or w8a16."
            )
        found[tensor] = [
            Option(f.name, sum(packed_bytes(f, shape) for shape in shapes), max(0.0, prices.kl[tensor, f.name]))
            for f in allowed
        ]
    return found


def allocate(
    config: ModelConfig,
    prices: Sensitivities,
    formats: Sequence[Format],
    budget: Budget,
    response: Response,
    speed: Speed | None = None,
    head: str | None = None,
) -> Allocation:
    """Choose a format for every tensor within a budget.

    Args:
        config: the draft's sizes.
        prices: what each format of each tensor costs.
        formats: candidates, all with inputs of one width.
        budget: the most that the draft may be.
        response: acceptance by KL.
        speed: step costs; without them the least loss within the budget is chosen.
        head: the head's format; None chooses it, too. A budget without the head needs one.

    Raises:
        UsageError: a budget that not even the smallest formats meet, or without the head and no format for it.
    """
    if not budget.with_head and head is None:
        raise UsageError("a budget that does not count the head says nothing about it. Expected a format for the head.")
    offered = options(config, prices, formats, {HEAD: head} if head else {})
    counted = {t: s for t, s in weights_by_tensor(config).items() if budget.with_head or t != HEAD}
    room = budget.bytes_of(sum(n * k for shapes in counted.values() for n, k in shapes), speed)
    if budget.unit == "ms" and not budget.with_head:
        room -= offered[HEAD][0].cost  # a step reads the head, whether it is chosen or not
    best, best_rate = None, -math.inf
    outside = {} if budget.with_head else {HEAD: offered[HEAD][0]}
    for state in states({tensor: offered[tensor] for tensor in counted}, room):
        state |= outside
        if speed is None:
            best = state
            continue
        kl, size = (sum(getattr(option, part) for option in state.values()) for part in ("loss", "cost"))
        rate = speed.tokens_per_second(response.acceptance(kl), size)
        if rate >= best_rate:
            best, best_rate = state, rate
    assert best is not None  # `states` yields one at least
    base = formats[0]
    chosen = {tensor: option.name for tensor, option in best.items()}
    return Allocation(
        base.name,
        tuple(_choice(config, tensor, option, offered[tensor]) for tensor, option in best.items()),
        budget,
        response,
        predict("mixed", chosen, config, prices, response, speed),
        tuple(baselines(config, prices, formats, response, speed)),
    )


def _choice(config: ModelConfig, tensor: str, option: Option, offered: Sequence[Option]) -> Choice:
    corners = hull(offered)
    place = corners.index(option)

    def change(to: int) -> tuple[str, float, float] | None:
        if not 0 <= to < len(corners):
            return None
        return corners[to].name, corners[to].cost - option.cost, corners[to].loss - option.loss

    weights = sum(n * k for n, k in weights_by_tensor(config)[tensor])
    return Choice(tensor, weights, option.name, option.cost, option.loss, change(place + 1), change(place - 1))


def predict(
    name: str,
    formats: Mapping[str, str],
    config: ModelConfig,
    prices: Sensitivities,
    response: Response,
    speed: Speed | None = None,
) -> Prediction:
    """What a format for each tensor is expected to give, all of them priced."""
    shapes = weights_by_tensor(config)
    sizes = {t: sum(packed_bytes(get_format(f), shape) for shape in shapes[t]) for t, f in formats.items()}
    counts = {t: sum(n * k for n, k in shapes[t]) for t in formats}
    size, kl = sum(sizes.values()), sum(prices.kl[t, f] for t, f in formats.items())
    acceptance = response.acceptance(kl)
    return Prediction(
        name,
        bits=8 * size / sum(counts.values()),
        bits_without_head=8 * (size - sizes[HEAD]) / (sum(counts.values()) - counts[HEAD]),
        size=size,
        kl=kl,
        acceptance=acceptance,
        tokens_per_second=speed.tokens_per_second(acceptance, size) if speed else None,
    )


def baselines(
    config: ModelConfig,
    prices: Sensitivities,
    formats: Sequence[Format],
    response: Response,
    speed: Speed | None = None,
) -> list[Prediction]:
    """Uniform formats with an 8-bit head, and with 6 bits for keys and values ("kv6"), as far as priced."""
    tensors = list(weights_by_tensor(config))
    width = formats[0].name.split("-")[0].partition("a")[2]
    head, found = f"w8a{width}", []
    for form in formats:
        for keys in (form.name, f"w6a{width}-g{form.group_size}-asym" if form.group_size else ""):
            keys = get_format(keys).name if keys else keys
            chosen = {t: keys if t.endswith((".k_proj", ".v_proj")) else form.name for t in tensors} | {HEAD: head}
            rule = keys != form.name
            if (form.bits < 6 or not rule) and all((t, f) in prices.kl for t, f in chosen.items()):
                name = f"{form.name} kv6" if rule else form.name
                found.append(predict(name, chosen, config, prices, response, speed))
    return found
