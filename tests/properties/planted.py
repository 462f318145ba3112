"""Bugs that speculative decoders really had, as patches of the real code: `plant(monkeypatch)`."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy import random_table

from bitdraft.decoding import sampling, streams, verify
from bitdraft.decoding.protocols import DraftRow, Purpose
from bitdraft.decoding.sampling import History
from bitdraft.drafters import model
from bitdraft.drafters.model import ModelDrafter
from bitdraft.types import Proposal, SamplingParams

DRAFT = random_table(8)
"""The draft's table in the games that plant `raw_q`."""

Plant = Callable[[pytest.MonkeyPatch], None]

# --- bugs of the draft -----------------------------------------------------------------------------------------------


def spoil_proposals(
    spoil: Callable[[ModelDrafter, Sequence[DraftRow], Proposal], Proposal],
) -> Plant:
    """Plant a bug between the drafter and its caller."""
    honest = ModelDrafter.propose

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(ModelDrafter, "propose", lambda self, rows: spoil(self, rows, honest(self, rows)))

    return plant


def raw_q(drafter: ModelDrafter, rows: Sequence[DraftRow], proposal: Proposal) -> Proposal:
    """Reports the unfiltered distribution at temperature 1, whatever the token was drawn from."""
    assert proposal.probs is not None
    probs = proposal.probs.clone()
    for k in range(len(proposal.tokens[0])):
        text = (*rows[0].tokens, *proposal.tokens[0][:k])
        probs[0, k] = torch.softmax(DRAFT(text), 0)
    return replace(proposal, probs=probs)


def cut(proposal: Proposal, length: int) -> Proposal:
    return replace(proposal, tokens=(proposal.tokens[0][:length],))


def drop_unsure(drafter: ModelDrafter, rows: Sequence[DraftRow], proposal: Proposal) -> Proposal:
    """Stops before the token that was drawn with little confidence, which is thrown away."""
    assert proposal.probs is not None
    last = len(proposal.tokens[0]) - 1
    if last >= 0 and proposal.probs[0, last, proposal.tokens[0][last]] < 0.4:
        return cut(proposal, last)
    return proposal


def drop_second(drafter: ModelDrafter, rows: Sequence[DraftRow], proposal: Proposal) -> Proposal:
    """Drops token 1 wherever it was drawn: DSpark's counter-example in its smallest form."""
    drawn = proposal.tokens[0]
    return cut(proposal, drawn.index(1)) if 1 in drawn else proposal


def cut_by_product(drafter: ModelDrafter, rows: Sequence[DraftRow], proposal: Proposal) -> Proposal:
    """Keeps the longest prefix whose tokens' probabilities multiply to a fifth, decided after all were drawn."""
    assert proposal.probs is not None
    product, keep = 1.0, 0
    for k in range(len(proposal.tokens[0])):
        product *= float(proposal.probs[0, k, proposal.tokens[0][k]])
        keep = k + 1 if product >= 0.2 else keep
    return cut(proposal, keep)


class Greedy:
    """Draws the likeliest token, whatever is asked."""

    def draw(self, probs: Tensor, start: int, position: int, purpose: Purpose) -> int:
        return int(probs.argmax())


def argmax_drafts(patch: pytest.MonkeyPatch) -> None:
    honest = ModelDrafter.propose

    def propose(self: ModelDrafter, rows: Sequence[DraftRow]) -> Proposal:
        return honest(self, [replace(row, randomness=Greedy()) for row in rows])  # type: ignore[arg-type]

    patch.setattr(ModelDrafter, "propose", propose)


def without_grammar(history: History) -> History:
    return replace(history, constraint=None)


def grammar_on_p_only(patch: pytest.MonkeyPatch) -> None:
    honest = sampling.distribution
    patch.setattr(
        model,
        "distribution",
        lambda logits, params, history, ids: honest(logits, params, without_grammar(history), ids),
    )


def masked_after_the_draw(patch: pytest.MonkeyPatch) -> None:
    """Draws without the grammar, and says that it drew from what the grammar left of the distribution."""
    honest = ModelDrafter.propose

    def propose(self: ModelDrafter, rows: Sequence[DraftRow]) -> Proposal:
        proposal = honest(self, [replace(row, history=without_grammar(row.history)) for row in rows])
        assert proposal.probs is not None
        probs, constraint = proposal.probs.clone(), rows[0].history.constraint
        for k, token in enumerate(proposal.tokens[0]):
            assert constraint is not None
            if constraint.allowed_V is not None and constraint.allowed_V.any():
                probs[0, k] *= constraint.allowed_V
                probs[0, k] /= probs[0, k].sum()
            constraint = constraint.after(token)
        return replace(proposal, probs=probs)

    patch.setattr(ModelDrafter, "propose", propose)


def without(**neutral: float) -> Plant:
    """The draft's distribution ignores some sampling parameters: honest, but not the target's rules."""
    honest = sampling.distribution

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            model,
            "distribution",
            lambda logits, params, history, ids: honest(logits, replace(params, **neutral), history, ids),
        )

    return plant


# --- bugs of the target's distributions ------------------------------------------------------------------------------


def penalty_once_per_block(patch: pytest.MonkeyPatch) -> None:
    honest = sampling.target_distributions

    def frozen(logits: Tensor, tokens: list[int], params: SamplingParams, history: History, ids: object) -> Tensor:
        return torch.cat([honest(row[None], [], params, history, ids) for row in logits])  # type: ignore[arg-type]

    patch.setattr(sampling, "target_distributions", frozen)


def output_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Bad words are looked for inside the block only."""
    honest = sampling.target_distributions

    def forgetful(logits: Tensor, tokens: list[int], params: SamplingParams, history: History, ids: object) -> Tensor:
        blank = replace(history, recent=(), table=replace(history.table, output=()))
        return honest(logits, tokens, params, blank, ids)  # type: ignore[arg-type]

    patch.setattr(sampling, "target_distributions", forgetful)


def shift_min_tokens(by: int) -> Plant:
    honest = sampling.target_distributions

    def plant(patch: pytest.MonkeyPatch) -> None:
        def shifted(logits: Tensor, tokens: list[int], params: SamplingParams, history: History, ids: object) -> Tensor:
            moved = replace(history, output_length=history.output_length + by)
            return honest(logits, tokens, params, moved, ids)  # type: ignore[arg-type]

        patch.setattr(sampling, "target_distributions", shifted)

    return plant


def highest_id_on_ties(patch: pytest.MonkeyPatch) -> None:
    honest = torch.argmax
    patch.setattr(sampling.torch, "argmax", lambda x: len(x) - 1 - honest(x.flip(0)))


# --- bugs of the verification ----------------------------------------------------------------------------------------


def in_verify(name: str, function: Callable[..., object]) -> Plant:
    return lambda patch: patch.setattr(verify, name, function)


honest_chances, honest_next, honest_ratios = verify.acceptance_chances, verify.next_distribution, verify._ratios


def inverse_ratio(rule: verify.Rule, tokens: list[int], p: Tensor, q: Tensor | None) -> Tensor:
    ratios = honest_ratios(tokens, p, q)
    return torch.tensor([min(1.0, 1 / ratio) if ratio > 0 else 1.0 for ratio in ratios], dtype=torch.float64)


def half_precision_ratio(tokens: list[int], p: Tensor, q: Tensor | None) -> list[float]:
    """0 / 0 where both underflow, and a comparison with NaN that ends as an acceptance."""
    assert q is not None
    return [
        1.0 if (a == 0 and b == 0) else float(a) / float(b)
        for a, b in ((p[i, x].half(), q[i, x].half()) for i, x in enumerate(tokens))
    ]


def block_chances(left_over: Callable[[int, list[float], Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The block rule's chances with another Z_i."""

    def chances(rule: verify.Rule, tokens: list[int], p: Tensor, q: Tensor) -> Tensor:
        if rule == "token":
            return honest_chances(rule, tokens, p, q)
        weights = verify._prefix_weights(tokens, p, q)
        values = []
        for i in range(1, len(tokens)):
            z = float(left_over(i, weights, p, q).clamp_min(0).sum())
            values.append(z / (z + (1 - weights[i])) if z + (1 - weights[i]) > 0 else 1.0)
        return torch.tensor([*values, weights[-1]], dtype=torch.float64)

    return chances


right_z = block_chances(lambda i, weights, p, q: weights[i] * p[i] - q[i])
z_of_the_position_before = block_chances(lambda i, weights, p, q: weights[i] * p[i - 1] - q[i - 1])
z_without_weight = block_chances(lambda i, weights, p, q: p[i] - q[i])
z_with_the_weight_before = block_chances(lambda i, weights, p, q: weights[i - 1] * p[i] - q[i])


def residual_is_p(p: Tensor, q: Tensor, weight: float = 1.0) -> Tensor:
    return p


def residual_not_renormalised(p: Tensor, q: Tensor, weight: float = 1.0) -> Tensor:
    return (weight * p - q).clamp_min(0)


def residual_of_q(p: Tensor, q: Tensor, weight: float = 1.0) -> Tensor:
    left = (q - weight * p).clamp_min(0)
    return left / left.sum()


def residual_without_weight(rule: verify.Rule, accepted: int, tokens: list[int], p: Tensor, q: Tensor) -> Tensor:
    return honest_next("token", accepted, tokens, p, q)


def ones_for_point_masses(patch: pytest.MonkeyPatch) -> None:
    """The block rule for n-gram drafts, with 1 for q over the whole vocabulary."""

    def ones(p: Tensor, q: Tensor | None) -> Tensor:
        return torch.ones_like(p[:-1]) if q is None else q

    patch.setattr(verify, "rule_for", lambda rule, length, **row: "block" if length >= 2 else "token")
    patch.setattr(verify, "acceptance_chances", lambda rule, tokens, p, q: honest_chances(rule, tokens, p, ones(p, q)))
    patch.setattr(
        verify, "next_distribution", lambda rule, n, tokens, p, q: honest_next(rule, n, tokens, p, ones(p, q))
    )


def free_token_from_q(rule: verify.Rule, accepted: int, tokens: list[int], p: Tensor, q: Tensor) -> Tensor:
    whole = tokens and accepted == len(tokens)
    return q[-1] if whole else honest_next(rule, accepted, tokens, p, q)


def last_row_always(rule: verify.Rule, accepted: int, tokens: list[int], p: Tensor, q: Tensor) -> Tensor:
    return p[-1]


def residual_of_the_next_row(rule: verify.Rule, accepted: int, tokens: list[int], p: Tensor, q: Tensor) -> Tensor:
    if accepted == len(tokens):
        return p[-1]
    return verify.residual(p[accepted + 1], q[accepted])


def target_after_rejection(rule: verify.Rule, accepted: int, tokens: list[int], p: Tensor, q: object) -> Tensor:
    return p[accepted]


def first_failure(rule: verify.Rule, length: int, coin: Callable[[int], bool]) -> int:
    return next((i for i in range(length) if not coin(i)), length)


def last_success(rule: verify.Rule, length: int, coin: Callable[[int], bool]) -> int:
    return next((i + 1 for i in reversed(range(length)) if coin(i)), 0)


def overlap_everywhere(patch: pytest.MonkeyPatch) -> None:
    honest = verify.verify

    def generous(
        proposal: Proposal, target_probs: Sequence[Tensor], rows: Sequence[DraftRow], rule: verify.Rule
    ) -> object:
        verdict = honest(proposal, target_probs, rows, rule)
        p, q = target_probs[0], proposal.probs
        assert q is not None
        everywhere = [verify.overlap(p[i], q[0, i]) for i in range(len(proposal.tokens[0]))]
        return replace(verdict, overlap=(tuple(everywhere),))

    patch.setattr(verify, "verify", generous)


# --- bugs of chance --------------------------------------------------------------------------------------------------


def named_by(name: Callable[[int, int, Purpose], tuple[int, int, int, int]]) -> Plant:
    """Decisions share a uniform number where `name` makes no difference between them."""
    return lambda patch: patch.setattr(streams, "counter", name)


def without_purpose(start: int, position: int, purpose: Purpose) -> tuple[int, int, int, int]:
    return position, 0, start, 0


def draft_noise_for_next(start: int, position: int, purpose: Purpose) -> tuple[int, int, int, int]:
    """As the coupled rule does it, under a rule that is not made for it."""
    return position, Purpose.NEXT if purpose == Purpose.DRAFT else purpose, start, 0


def without_start(start: int, position: int, purpose: Purpose) -> tuple[int, int, int, int]:
    return position, purpose, 0, 0


def without_position(start: int, position: int, purpose: Purpose) -> tuple[int, int, int, int]:
    return 0, purpose, start, 0


def wrong_side_of_the_border(patch: pytest.MonkeyPatch) -> None:
    """A token of probability 0 owns the point at which its empty interval lies."""
    patch.setattr(
        streams, "token_at", lambda probs, uniform: int(torch.searchsorted(probs.double().cumsum(0), uniform))
    )
