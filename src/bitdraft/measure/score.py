"""Score a draft on a text of the target: one teacher-forced pass, every statistic of every position.

The target's side is stored as its last hidden rows, a hundredth of the size of its logits, and turned into logits
again for every draft (docs/decisions/0004-hidden-states.md).

Letters: T tokens of the output, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..decoding.sampling import History, target_distributions
from ..types import SamplingParams
from .trace import Score, Text


def score(
    text: Text,
    format_name: str,
    target_logits: Tensor,
    draft_logits: Tensor,
    prompt: Sequence[int],
    sampling: SamplingParams,
    ending_ids: frozenset[int],
) -> Score:
    """Compare the two models at every position of a text.

    Args:
        text: what the target wrote, T tokens.
        format_name: names the draft.
        target_logits, draft_logits: [T, V] float32; row t is what the model said before token t of the output.
        prompt: token ids before the output, for the repetition penalty.
        sampling: the serving sampling parameters, applied to both sides alike.
        ending_ids: ids that min_tokens bans.
    """
    history = History.after_prompt(prompt)
    p_TV = target_distributions(target_logits, text.ids[:-1], sampling, history, ending_ids)
    q_TV = target_distributions(draft_logits, text.ids[:-1], sampling, history, ending_ids)
    tokens = torch.tensor(text.ids)[:, None]
    p_x, q_x = p_TV.gather(1, tokens)[:, 0], q_TV.gather(1, tokens)[:, 0]
    log_p, log_q = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    plain_p, plain_q = log_p.exp(), log_q.exp()
    # Ids outside the shared vocabulary are at -inf on one side or both: they are left out of the divergences, which
    # would be infinite, and count in full against the overlap.
    difference = (log_p - log_q).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return Score(
        format=format_name,
        workload=text.workload,
        index=text.index,
        overlap=_list(torch.minimum(p_TV, q_TV).sum(-1)),
        ratio=_list((q_x / p_x).nan_to_num(nan=0.0)),
        overlap_t1=_list(torch.minimum(plain_p, plain_q).sum(-1)),
        kl_pq=tuple((plain_p * difference).sum(-1).clamp(min=0).tolist()),
        kl_qp=tuple((plain_q * -difference).sum(-1).clamp(min=0).tolist()),
        top1=tuple((target_logits.argmax(-1) == draft_logits.argmax(-1)).tolist()),
    )


def _list(values_T: Tensor) -> tuple[float, ...]:
    """As a tuple, with sums that rounding lifted over 1 brought back."""
    return tuple(values_T.clamp(0, 1).tolist())
