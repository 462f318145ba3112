"""What the engine, a drafter and a language model promise one another.

Letters: V vocabulary, R rows of logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from ..types import Blocks, Feed, Proposal, SamplingParams
from .sampling import History


class Purpose(IntEnum):
    """What a random number is for. Different purposes read independent streams."""

    DRAFT = 1
    ACCEPT = 2
    NEXT = 3


class Randomness(Protocol):
    """The random decisions of one request, and the only source of chance in decoding.

    A decision is named by the block it belongs to (`start`: output tokens committed before the block), the output
    position it decides, and its purpose. The block is part of the name because the block rule lets a rejected suffix
    tell something about the noise that drafted it: reusing that noise for the next draft of the same position would
    bias the output (docs/decisions/0003-random-streams.md).
    """

    def coin(self, chance: float, start: int, position: int) -> bool:
        """True with probability `chance`: whether the draft at `position` is accepted."""
        ...

    def draw(self, probs: Tensor, start: int, position: int, purpose: Purpose) -> int:
        """A token id drawn from `probs`, [V], which sums to 1."""
        ...

    def coupled_draw(self, probs: Tensor, position: int) -> int:
        """A token id drawn from `probs`, [V], with the noise that the output position has for every such draw.

        The block is no part of the name: whoever draws for a position, from whatever distribution, in whatever block,
        reads the same noise. Draws from like distributions are mostly the same token, from the same one always.
        """
        ...


class LanguageModel(Protocol):
    """A decoder with a KV cache per request. Prefill, decode and verify are the same call."""

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to vocab_size - 1."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens that one request's cache can hold."""
        ...

    def blocks(self) -> Blocks:
        """What the cache has room for now."""
        ...

    def adopt(self, request: int, tokens: Sequence[int]) -> int:
        """Start `request`, which is not known, with the longest prefix of `tokens` that the cache still holds.

        From then on its own text is kept for others, too: what stands below a length that it is truncated to.

        Args:
            request: a number that is not in use.
            tokens: the text that is going to be fed; its last token is always left to be fed.

        Returns:
            how many of the tokens the request holds now; 0 if none, or without a prefix cache.
        """
        ...

    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        """Append tokens and return the wanted logits, [R, V] float32, feed after feed, row after row.

        A request that was not seen before gets an empty cache. The value of a row does not depend on the other rows,
        but for rounding.
        """
        ...

    def truncate(self, request: int, length: int) -> None:
        """Forget everything of `request` past `length` tokens: rollback is a length. What stands below it is true."""
        ...

    def release(self, request: int) -> None:
        """Forget `request` and give its memory back. An unknown request is no error."""
        ...


@dataclass(frozen=True)
class DraftRow:
    """One sequence as a drafter sees it.

    Attributes:
        request: the number of the request; a drafter may keep state under it.
        tokens: prompt and committed output. Never changed by the drafter.
        prompt_length: how many of `tokens` are the prompt.
        budget: draft at most so many tokens; 0 asks for none.
        sampling: the request's sampling parameters; q is made by the same rules as p.
        history: token counts of `tokens`, for the penalties.
        randomness: the request's random decisions.
        prediction: token ids that the caller expects the output to repeat; empty for none.
        room: tokens that there is room to draft; `budget` is what is worth drafting by other means than a prediction.
    """

    request: int
    tokens: Sequence[int]
    prompt_length: int
    budget: int
    sampling: SamplingParams
    history: History
    randomness: Randomness
    prediction: tuple[int, ...] = ()
    room: int = 0

    @property
    def start(self) -> int:
        """Output tokens committed so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def coupled(self) -> bool:
        """Whether the coupled rule decides, and a drafter that draws does so by `Randomness.coupled_draw`."""
        return self.sampling.reproducible and self.sampling.temperature > 0


class Drafter(Protocol):
    """Suggests what the target will say next.

    A drafter may be wrong, never dishonest: `Proposal.probs` is the distribution its tokens were really drawn from.
    """

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Suggest up to `row.budget` tokens after each row."""
        ...

    def commit(self, request: int, length: int) -> None:
        """Of the request's tokens, the first `length` (prompt and output) are now true; forget the rest."""
        ...

    def release(self, request: int) -> None:
        """Forget `request`. An unknown request is no error."""
        ...


class LookaheadPolicy(Protocol):
    """How many tokens to draft.

    A decision may look at the past and at the token just drawn, and that token is kept: dropping a token because of
    its own probability would change the output's law.
    """

    @property
    def limit(self) -> int:
        """No block is longer than this."""
        ...

    @property
    def reads_probabilities(self) -> bool:
        """Whether `stop_after` looks at probabilities, which cost a pass over the vocabulary at temperature 0."""
        ...

    def stop_after(self, drafted: int, chosen_prob: float, top_prob: float) -> bool:
        """Whether a block ends after the token just drawn, which stays in it.

        Args:
            drafted: tokens in the block, the one just drawn included.
            chosen_prob: the draft's probability of the token just drawn; at temperature 0 what its logits give it.
            top_prob: the draft's largest probability at that position, likewise.
        """
        ...
