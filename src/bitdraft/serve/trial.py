"""What a draft that nobody has measured can be expected to bring, found out before the first request."""

from collections.abc import Sequence

from ..engine.engine import Engine
from ..engine.sequence import Request
from ..types import SamplingParams, StepRecord
from .load import Pair

TEXTS, PROMPT_TOKENS, OUTPUT_TOKENS = 3, 96, 24
"""Enough to tell a draft that helps from one that does not, in seconds."""


def try_draft(pair: Pair, texts: Sequence[str], k: int) -> float | None:
    """Let the target go on from some texts, greedily, with its draft.

    Args:
        pair: a loaded pair that nobody uses yet; of the texts its caches keep what prefix caches keep.
        texts: some of them are taken, from all over.
        k: tokens drafted a step.

    Returns:
        the conditional acceptance; None without a draft, or where it drafted nothing.
    """
    tokenizer = pair.opened.target.tokenizer
    chosen = texts[:: max(1, len(texts) // TEXTS)][:TEXTS]
    length = min(PROMPT_TOKENS, pair.target.context_length - OUTPUT_TOKENS - 1)
    prompts = [tuple(tokenizer.encode(text)[:length]) for text in chosen]
    if not (pair.drafter and k and prompts and all(prompts)):
        return None
    records: list[StepRecord] = []
    engine = Engine(
        pair.target, pair.drafter, eos_ids=(), max_draft=k, max_batch=len(prompts), on_record=records.append
    )
    for number, prompt in enumerate(prompts):
        engine.submit(Request(number, prompt, SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)))
    for _ in engine.run():
        pass
    overlap = [chance for record in records for chance in record.overlap]
    return sum(overlap) / len(overlap) if overlap else None
