"""Tiny language models given as tables, and a reference loop around the real drafter and the real verification.

The logits of a table depend on the whole text before, have ties, and exclude some tokens. A `Game` is one setting:
target, draft, sampling parameters, draft length, rule. `plain_law` is what the output has to be distributed like,
`speculative_law` what it is distributed like.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import fsum, inf

import numpy as np
import torch
from enumeration import law
from torch import Tensor

from bitdraft.decoding import sampling, verify
from bitdraft.decoding.constraint import Constraint
from bitdraft.decoding.protocols import Drafter, DraftRow, LookaheadPolicy, Randomness
from bitdraft.decoding.sampling import History
from bitdraft.drafters.model import ModelDrafter
from bitdraft.types import Blocks, Feed, SamplingParams

Text = tuple[int, ...]
Table = Callable[[Text], Tensor]
"""Text before a position -> logits [V] float64."""

EOS = 2
LEVELS = (-1.0, 0.0, 0.0, 0.7, 1.5)


def random_table(seed: int, vocab_size: int = 3, allowed: Callable[[Text], Sequence[int]] | None = None) -> Table:
    """Logits from a few levels, so that ties happen; one token in seven is excluded, at random or by `allowed`."""

    @cache
    def table(text: Text) -> Tensor:
        rng = np.random.default_rng([seed, *text])
        logits = torch.tensor(rng.choice(LEVELS, vocab_size))
        if allowed is None:
            keep = rng.random(vocab_size) > 1 / 7
            keep[int(rng.integers(EOS))] = True  # something besides the end of sequence
        else:
            keep = np.isin(np.arange(vocab_size), allowed(text))
        logits[torch.tensor(~keep)] = -inf
        return logits

    return table


def constant_table(*probs: float) -> Table:
    """The same distribution after every text."""
    logits = torch.tensor(probs, dtype=torch.float64).log()
    return lambda text: logits


def split_tables(seed: int) -> tuple[Table, Table]:
    """A target and a draft of three tokens that never agree about what is possible."""

    def side(text: Text, flip: bool) -> Sequence[int]:
        first = bool(np.random.default_rng([seed, 1, *text]).integers(2))
        other = int(np.random.default_rng([seed, 2, *text]).integers(EOS))
        return (other,) if first == flip else [token for token in range(3) if token != other]

    return random_table(seed, 3, lambda text: side(text, True)), random_table(
        seed + 1, 3, lambda text: side(text, False)
    )


@dataclass(frozen=True)
class Automaton:
    """A grammar: `moves[state]` leads from each allowed token to a state. State None allows all."""

    moves: tuple[Mapping[int, int], ...]
    vocab_size: int = 3
    state: int | None = 0

    @property
    def allowed_V(self) -> Tensor | None:
        if self.state is None:
            return None
        return torch.tensor([token in self.moves[self.state] for token in range(self.vocab_size)])

    def after(self, token: int) -> "Automaton":
        return self if self.state is None else replace(self, state=self.moves[self.state].get(token))


class TableModel:
    """A table as a `LanguageModel`, with texts for caches."""

    def __init__(self, table: Table, context_length: int = 64) -> None:
        self.table, self.context_length = table, context_length
        self.vocab_size = len(table((0,)))
        self.cached: dict[int, Text] = {}

    def blocks(self) -> Blocks:
        return Blocks(16, 1000, 1000)

    def adopt(self, request: int, tokens: Sequence[int]) -> int:
        return 0

    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        rows = []
        for feed in feeds:
            before = self.cached.get(feed.request, ())
            assert feed.start == len(before), "tokens fed to the wrong place"
            text = (*before, *feed.tokens)
            self.cached[feed.request] = text
            rows += [self.table(text[: feed.start + i + 1]) for i in range(feed.logits_from, len(feed.tokens))]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size, dtype=torch.float64)

    def truncate(self, request: int, length: int) -> None:
        self.cached[request] = self.cached.get(request, ())[:length]

    def release(self, request: int) -> None:
        self.cached.pop(request, None)


@dataclass(frozen=True)
class Game:
    """One setting of a speculative loop.

    Attributes:
        target: the target's table.
        make_drafter: a fresh drafter.
        params: the sampling parameters; `max_tokens` is the output's length.
        rule: how blocks are verified.
        max_draft: longest draft.
        ending_ids: tokens that end the output.
        prompt: the text before the output.
        overshoot: also draft past the end of the output and cut there.
        constraint: the grammar of the output.
    """

    target: Table
    make_drafter: Callable[[], Drafter]
    params: SamplingParams
    rule: verify.Rule = "block"
    max_draft: int = 2
    ending_ids: frozenset[int] = frozenset()
    prompt: Text = (0, 1, 0)
    overshoot: bool = False
    constraint: Constraint | None = None

    def p(self, output: Text) -> Tensor:
        """The target's distribution after `output`, made from the whole text at once."""
        logits = self.target(self.prompt + output)
        return sampling.distribution(logits, self.params, self.history(output), self.ending_ids)

    def history(self, output: Text) -> History:
        history = History.after_prompt(self.prompt, self.constraint)
        for token in output:
            history = history.extended(token)
        return history

    def ended(self, output: Text) -> bool:
        ended = bool(output) and (output[-1] in self.ending_ids or self.history(output).ended)
        return ended or len(output) >= self.params.max_tokens

    def row(self, output: Text, randomness: Randomness, request: int = 0) -> DraftRow:
        room = self.params.max_tokens - len(output) - 1
        budget = self.max_draft if self.overshoot else min(self.max_draft, room)
        text = list(self.prompt + output)
        return DraftRow(
            request=request,
            tokens=text,
            prompt_length=len(self.prompt),
            budget=budget,
            sampling=self.params,
            history=self.history(output),
            randomness=randomness,
        )


def play_block(game: Game, drafter: Drafter, output: Text, randomness: Randomness) -> Text:
    """Draft, verify, and cut at the end: the output after one step of speculative decoding."""
    row = game.row(output, randomness)
    proposal = drafter.propose([row])
    draft = proposal.tokens[0]
    length = len(draft)
    text = game.prompt + output
    logits = torch.stack([game.target((*text, *draft[:i])) for i in range(length + 1)])
    p = sampling.target_distributions(logits, draft, game.params, row.history, game.ending_ids)
    verdict = verify.verify(proposal, [p], [row], game.rule)
    for token in (*draft[: verdict.accepted[0]], verdict.next_token[0]):
        output = (*output, token)
        if game.ended(output):
            break
    return output


def play(game: Game, randomness: Randomness) -> Text:
    """A whole output, block after block, with one drafter that keeps its state."""
    drafter, output = game.make_drafter(), ()
    while not game.ended(output):
        output = play_block(game, drafter, output, randomness)
        drafter.commit(0, len(game.prompt) + len(output) - 1)  # the last token is not drafted, so nobody has fed it
    return output


def plain_law(game: Game) -> dict[Text, float]:
    """The law of sampling token by token from the target."""
    return _compose(game, lambda output: {(*output, v): float(x) for v, x in enumerate(game.p(output)) if x > 0})


def speculative_law(game: Game) -> dict[Text, float]:
    """The law of the speculative loop.

    A block depends on the output before it only, so each output's block is enumerated once and the blocks are composed;
    `law(lambda branches: play(game, branches.randomness(0, 0)))` enumerates whole runs and takes longer.
    """
    return _compose(
        game,
        lambda output: law(lambda branches: play_block(game, game.make_drafter(), output, branches.randomness(0, 0))),
    )


def _compose(game: Game, step: Callable[[Text], dict[Text, float]]) -> dict[Text, float]:
    """The law of the finished outputs, from the law of one step after every unfinished one."""
    reached: dict[Text, list[float]] = defaultdict(list, {(): [1.0]})
    done: dict[Text, float] = {}
    while reached:
        output = min(reached, key=len)
        chance = fsum(reached.pop(output))
        if game.ended(output):
            done[output] = chance
            continue
        for longer, share in step(output).items():
            assert len(longer) > len(output), "a step without progress"
            reached[longer].append(chance * share)
    return done


def model_drafter(
    table: Table, policy: LookaheadPolicy, ending_ids: frozenset[int] = frozenset()
) -> Callable[[], Drafter]:
    """Makes the real model drafter around a table."""
    return lambda: ModelDrafter(TableModel(table), policy, ending_ids)
