"""A draft in FP32 on the texts of a probe: its distributions, and what they become when weights change.

Shape suffixes: T judged rows, V vocabulary, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import UsageError
from ..models.checkpoint import Checkpoint
from .differentiable import Change, Rows, embedding_name, final_rows, layer_weights, rotary_for, run_layer
from .probe import AcceptanceProbe, overlap

Progress = Callable[[int, int | None, str], None]


@dataclass(frozen=True)
class Outcome:
    """What a changed draft does on the probe's texts.

    Attributes:
        kl: mean KL(q0 || q) in nats, q0 of the unchanged draft. acceptance: mean sum_v min(p, q).
        acceptances: the mean of each text.
    """

    kl: float
    acceptance: float
    acceptances: tuple[float, ...]


class TeacherForced:
    """A draft in FP32, run over a probe's texts once, with the rows that each layer read.

    Attributes:
        source: the draft. probe: the texts. rows: their layout. usable: ids from here on the draft does not share.
        inputs: what each layer reads, [rows, D] each, and last what the final norm reads.
        q_TV: the draft's distributions at the judged rows. acceptance: their mean overlap with the target's.
    """

    def __init__(
        self, source: Checkpoint, probe: AcceptanceProbe, usable: int, progress: Progress | None = None
    ) -> None:
        """Run the draft.

        Args:
            source: the draft's checkpoint.
            probe: the texts, few hundred tokens: distributions of all judged rows are held in memory.
            usable: how many token ids mean the same to target and draft.
            progress: called with (layers done, layers, what).

        Raises:
            UsageError: a text is longer than the draft's context.
        """
        self.source, self.probe, self.usable = source, probe, usable
        longest = max(len(text.context) for text in probe.texts)
        if longest > source.config.context_length:
            raise UsageError(
                f"{source.origin}: a text of {longest} tokens, the context is {source.config.context_length}. Use a "
                "probe of shorter texts."
            )
        self.rows = Rows([t.context for t in probe.texts], [len(t.prompt) - 1 for t in probe.texts])
        self.rotary = rotary_for(source.config, self.rows)
        self._p_TV = torch.cat([probe.probabilities(text) for text in probe.texts])
        self.norm_D = source.tensor("model.norm.weight")
        self.inputs = [source.tensor(embedding_name(source))[self.rows.ids]]
        with torch.no_grad():
            for i in range(source.config.num_layers):
                self.inputs.append(self._layer(self.inputs[-1], i, None))
                if progress:
                    progress(i + 1, source.config.num_layers, "running the draft in FP32")
            logits_TV = self._logits(self.inputs[-1], source.tensor("lm_head.weight"))
        self._log_q_TV = (logits_TV / probe.temperature).log_softmax(-1)
        self.q_TV = self._log_q_TV.exp()
        self.acceptance = float(overlap(self._p_TV, logits_TV, probe.temperature).double().mean())

    @property
    def judged(self) -> int:
        """Rows whose distributions are judged."""
        return len(self.q_TV)

    @torch.no_grad()
    def changed(self, change: Change, first_layer: int = 0, progress: Progress | None = None) -> Outcome:
        """The draft with other weights, from `first_layer` on; the layers below are as they were.

        Args:
            change: makes the weights of linear layers, 'lm_head' among them; asked for every one from that layer on.
                A tied embedding changes with the head where the first layer is 0.
            first_layer: the lowest layer that has changed; `num_layers` for the head alone.
            progress: called with (layers done, layers, what).
        """
        head = change("lm_head", self.source.tensor("lm_head.weight"))
        x = self.inputs[first_layer]
        if first_layer == 0:
            tied = self.source.config.tied_head
            table = head if tied else change("lm_head", self.source.tensor("model.embed_tokens.weight"))
            x = table[self.rows.ids]
        for i in range(first_layer, self.source.config.num_layers):
            x = self._layer(x, i, change)
            if progress:
                progress(i + 1, self.source.config.num_layers, "running the draft changed")
        logits_TV = self._logits(x, head)
        log_q_TV = (logits_TV / self.probe.temperature).log_softmax(-1)
        # Ids that are not usable are at -inf in both: 0 x (-inf - -inf).
        kl_T = (self.q_TV * (self._log_q_TV - log_q_TV).nan_to_num(nan=0.0)).sum(-1)
        overlap_T = overlap(self._p_TV, logits_TV, self.probe.temperature).double()
        each = torch.split(overlap_T, [len(text.ids) for text in self.probe.texts])
        return Outcome(float(kl_T.double().mean()), float(overlap_T.mean()), tuple(float(t.mean()) for t in each))

    def _layer(self, x: Tensor, layer: int, change: Change | None) -> Tensor:
        weights = layer_weights(self.source, layer, change)
        return run_layer(x, weights, self.source.config, self.rotary, self.rows)[0]

    def _logits(self, x: Tensor, head_VD: Tensor) -> Tensor:
        """Logits of the judged rows, as wide as the target's."""
        width = self._p_TV.shape[1]
        usable = min(self.usable, width, len(head_VD))
        logits_TV = final_rows(x, self.norm_D, self.source.config, self.rows) @ head_VD[:usable].T
        return functional.pad(logits_TV, (0, width - usable), value=-torch.inf)
