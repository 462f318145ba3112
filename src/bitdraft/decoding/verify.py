"""Which drafted tokens stand, and what comes after them, so that the output is distributed as the target's own.

Three rules. The token rule accepts token after token (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318,
algorithm 2). The block rule looks at the whole block and accepts at least as many tokens on average (Sun et al.
2403.10444, block verification). The coupled rule draws the target's own token at each position, whatever was drafted,
and a drafted token stands if it is that one (drafter-invariant decoding, Daliri et al. 2408.07978): the
output is the one that the same seed gives without a draft. It is the rule of requests that ask to be reproducible; the
engine's choice between the other two is for all others. Everything but `verify` is a pure function of probabilities.

Entries are computed in the dtype of the distributions, float32 or wider; sums and the ratios of single entries in
float64. A float16 probability would underflow, and its ratio accept what it should not.

Letters: B rows, K drafted tokens, V vocabulary, p target, q draft. `tau` of the paper is `accepted` here.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..errors import ShapeError, UsageError
from ..types import Proposal, Verification
from .protocols import DraftRow, Purpose
from .sampling import PointMasses

Rule = Literal["token", "block"]
"""How blocks are verified, of requests that do not ask for the coupled rule."""

RowRule = Literal["token", "block", "coupled"]
"""How one block is verified."""


def verify(
    proposal: Proposal, target_probs: Sequence[Tensor | PointMasses], rows: Sequence[DraftRow], rule: Rule
) -> Verification:
    """Accept a prefix of each row's draft and draw the token that the target adds.

    Args:
        proposal: what the drafter suggests; its `probs` have the target's vocabulary and are what was drawn from.
        target_probs: for each block [K+1, V], float32 or float64, made by the same filters as `proposal.probs`; or
            the tokens that they are certain of.
        rows: the sequences; their `randomness` decides. Those that are `coupled` are verified by the coupled rule.
        rule: of the others; "block" is used where it differs from "token", see `rule_for`.

    Returns:
        The verification. With the block rule the reached positions of `overlap` are the accepted ones and the one
        after them: their mean describes the accepted text, and is no unbiased estimate of the conditional acceptance,
        because the block rule chooses where to stop by looking ahead.

    Raises:
        ShapeError: tensors that do not fit together, or a drafted token outside the vocabulary.
        UsageError: an unknown rule.
    """
    blocks = []
    for b, (row, tokens, p) in enumerate(zip(rows, proposal.tokens, target_probs, strict=True)):
        q = None if row.coupled else proposal.drawn_from(b)
        _check(tokens, p, q)
        row_rule = rule_for(rule, len(tokens), point_mass=q is None, coupled=row.coupled)
        if isinstance(p, PointMasses):
            blocks.append(_verify_certain(tokens, p.tokens, q))
        elif row_rule == "coupled":
            blocks.append(_verify_coupled(tokens, p, row))
        else:
            blocks.append(_verify_drawn(tokens, p, q, row, row_rule))
    accepted, next_token, overlaps = zip(*blocks, strict=True) if blocks else ((), (), ())
    return Verification(accepted, next_token, overlaps)


_Block = tuple[int, int, tuple[float, ...]]
"""What became of one block: how many tokens stand, the token after them, and the overlap where reached."""


def _verify_drawn(tokens: Sequence[int], p: Tensor, q: Tensor | None, row: DraftRow, rule: Rule) -> _Block:
    count = _accept(rule, tokens, p, q, row)
    probs_V = next_distribution(rule, count, tokens, p, q)
    token = row.randomness.draw(probs_V, row.start, row.start + count, Purpose.NEXT)
    reached = range(min(count + 1, len(tokens)))
    return count, token, tuple(float(p[i, tokens[i]]) if q is None else overlap(p[i], q[i]) for i in reached)


def _verify_certain(tokens: Sequence[int], said: Sequence[int], q: Tensor | None) -> _Block:
    """A target that is certain of one token at each position decides without chance.

    p(x) / q(x) is at least 1 where the drafted token is the target's and 0 elsewhere; the block rule's weights, and its
    chances with them, are 1 up to the first other token and 0 after it; and what is left of p in a residual is the
    target's token. So both rules accept what the two have in common from the start, and add the target's next token.
    """
    chances = [1.0] * len(tokens) if q is None else [float(q[i, token]) for i, token in enumerate(tokens)]
    count = next((i for i, token in enumerate(tokens) if token != said[i] or chances[i] == 0), len(tokens))
    reached = range(min(count + 1, len(tokens)))
    if q is None:
        return count, said[count], tuple(float(tokens[i] == said[i]) for i in reached)
    return count, said[count], tuple(min(1.0, float(q[i, said[i]])) for i in reached)


def _verify_coupled(tokens: Sequence[int], p: Tensor, row: DraftRow) -> _Block:
    """The target's own tokens up to the first that was not drafted. What the draft thought does not enter.

    The overlap is 1 or 0, the drafted token's fate: its chance would take q and a sort of the vocabulary, and
    sum_v min(p, q) is more than that chance.
    """
    for i, drafted in enumerate(tokens):
        token = row.randomness.coupled_draw(p[i], row.start + i)
        if token != drafted:
            return i, token, (1.0,) * i + (0.0,)
    return len(tokens), row.randomness.coupled_draw(p[-1], row.start + len(tokens)), (1.0,) * len(tokens)


def rule_for(rule: Rule, length: int, point_mass: bool, coupled: bool = False) -> RowRule:
    """The rule that a block is really verified by: the one place that decides.

    Where the request asks for it, the coupled one. Of the others: for one token they are the same; for a point mass the
    block rule accepts as many tokens on average as the token rule, and there is no q [K, V] to compute it from.
    """
    if rule not in ("token", "block"):
        raise UsageError(
            f"the verification rule is {rule!r}. Expected 'token' or 'block'; a request has the coupled rule by its "
            "sampling parameter `reproducible`."
        )
    if coupled:
        return "coupled"
    return "block" if rule == "block" and length >= 2 and not point_mass else "token"


def acceptance_chances(rule: Rule, tokens: Sequence[int], target_probs: Tensor, draft_probs: Tensor | None) -> Tensor:
    """The chances that the coins of a block are thrown with.

    Token rule: min(1, p(x_i) / q(x_i)). Block rule, with the weights p_i of `_prefix_weights` and
    Z_i = sum_v max(p_i P(v | x_1..x_i) - Q(v | x_1..x_i), 0): h_i = Z_i / (Z_i + 1 - p_i), and h_K = p_K.

    Args:
        rule: as `rule_for` returned it.
        tokens: the K drafted tokens.
        target_probs: [K+1, V].
        draft_probs: [K, V], or None for point masses (token rule only).

    Returns:
        [K] float64 on the CPU.
    """
    if rule == "token":
        return torch.tensor([min(1.0, r) for r in _ratios(tokens, target_probs, draft_probs)], dtype=torch.float64)
    assert draft_probs is not None, "the block rule needs the draft's distributions"
    weights = _prefix_weights(tokens, target_probs, draft_probs)
    chances = []
    for i in range(1, len(tokens)):
        left_over = float(_excess(target_probs[i], draft_probs[i], weights[i]).sum(dtype=torch.float64))
        total = left_over + (1 - weights[i])  # in this order rounding never makes it less than left_over
        chances.append(left_over / total if total > 0 else 1.0)
    return torch.tensor([*chances, weights[-1]], dtype=torch.float64)


def accepted_count(rule: Rule, length: int, coin: Callable[[int], bool]) -> int:
    """How many tokens stand, from the fewest coins that decide it.

    Args:
        rule: token: the tokens before the first coin that fails. Block: up to the last coin that succeeds.
        length: drafted tokens, K.
        coin: throws the coin of the token at an index from 0 to K-1; asked at most once for each.
    """
    if rule == "token":
        return next((i for i in range(length) if not coin(i)), length)
    return next((i + 1 for i in reversed(range(length)) if coin(i)), 0)


def next_distribution(
    rule: Rule, accepted: int, tokens: Sequence[int], target_probs: Tensor, draft_probs: Tensor | None
) -> Tensor:
    """What the token after the accepted ones is drawn from: the residual after a rejection, else the target itself.

    Args:
        rule: as `rule_for` returned it.
        accepted: tokens that stand, 0 to K.
        tokens: the K drafted tokens.
        target_probs: [K+1, V].
        draft_probs: [K, V], or None for point masses (token rule only).

    Returns:
        [V] in the dtype of `target_probs`, summing to 1.
    """
    p_V = target_probs[accepted]
    if accepted == len(tokens):
        return p_V
    if draft_probs is None:
        q_V = torch.zeros_like(p_V)
        q_V[tokens[accepted]] = 1
        return residual(p_V, q_V)
    weight = _prefix_weights(tokens, target_probs, draft_probs)[accepted] if rule == "block" else 1.0
    return residual(p_V, draft_probs[accepted], weight)


def overlap(p_V: Tensor, q_V: Tensor) -> float:
    """sum_v min(p, q), which is 1 - TV(p, q): the chance that a token drawn from q is accepted by the token rule."""
    return float(torch.minimum(p_V, q_V).sum(dtype=torch.float64))


def residual(p_V: Tensor, q_V: Tensor, weight: float = 1.0) -> Tensor:
    """max(weight p - q, 0), normalised, [V].

    Where nothing is left, p and q are the same but for rounding and a rejection cannot happen but by rounding: p.
    """
    left_V = _excess(p_V, q_V, weight)
    mass = float(left_V.sum(dtype=torch.float64))
    return left_V / mass if mass > torch.finfo(p_V.dtype).tiny else p_V


def _excess(p_V: Tensor, q_V: Tensor, weight: float) -> Tensor:
    return (weight * p_V - q_V).clamp_min(0)


def _ratios(tokens: Sequence[int], target_probs: Tensor, draft_probs: Tensor | None) -> list[float]:
    """p(x_i) / q(x_i), K numbers. A token that q says it cannot have drawn is never accepted."""
    index = torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.int64)
    chosen_p: list[float] = target_probs[index].tolist()
    chosen_q: list[float] = [1.0] * len(tokens) if draft_probs is None else draft_probs[index].tolist()
    return [p / q if q > 0 else 0.0 for p, q in zip(chosen_p, chosen_q, strict=True)]


def _prefix_weights(tokens: Sequence[int], target_probs: Tensor, draft_probs: Tensor) -> list[float]:
    """The block rule's p_0 = 1 and p_i = min(p_{i-1} P(x_i | x_<i) / Q(x_i | x_<i), 1): K+1 numbers."""
    weights = [1.0]
    for ratio in _ratios(tokens, target_probs, draft_probs):
        weights.append(min(weights[-1] * ratio, 1.0))
    return weights


def _accept(rule: Rule, tokens: Sequence[int], p: Tensor, q: Tensor | None, row: DraftRow) -> int:
    if not tokens:
        return 0
    chances = acceptance_chances(rule, tokens, p, q).tolist()
    return accepted_count(
        rule, len(tokens), lambda i: row.randomness.coin(chances[i], row.start, position=row.start + i)
    )


def _check(tokens: Sequence[int], p: Tensor | PointMasses, q: Tensor | None) -> None:
    shape = (len(p.tokens), p.vocab_size) if isinstance(p, PointMasses) else tuple(p.shape)
    if len(shape) != 2 or shape[0] != len(tokens) + 1:
        raise ShapeError(f"target probabilities are {list(shape)} for {len(tokens)} drafted tokens. Expected [K+1, V].")
    if q is not None and (q.shape[-1] != shape[1] or (isinstance(p, Tensor) and q.device != p.device)):
        raise ShapeError(
            f"draft probabilities have {q.shape[-1]} entries on {q.device}, the target's {shape[1]}. "
            "Expected one vocabulary on one device: pad the draft's with zeros."
        )
    if any(not 0 <= token < shape[1] for token in tokens):
        raise ShapeError(f"drafted tokens {list(tokens)} are not all ids from 0 to {shape[1] - 1}.")
