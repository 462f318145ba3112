"""What each tensor's rounding does to a draft, for all tensors and formats at once.

A rounding error `D` of one weight moves the logits z by J D x, to first order, and so moves the draft's distribution q:

    KL(q0 || q)  =  1/2 E_{y ~ q0} [ ( sum_t  g_t . D x_t )^2 ]  +  o(D^2),      g = d log q0(y) / d (W x)

which is the Fisher information of q0 seen from the layer's outputs (Martens, 1412.1193, sections 5 and 9.2): the same
curvature that KL(p || q) and, on average, the overlap with a target have, as long as errors have no preferred
direction. So one pass forward and a few backward, each with another y drawn from q0, price every format of every
tensor; a format then costs the product D x. Errors of different outputs (rows of D) are rounded independently, so that

* their expected squares add, and a sample of outputs stands for all;
* errors of different tensors add too, in KL, until they are large.

What it leaves out: terms beyond the second order (2 bits), and the direction of an error, which helps or hurts the
overlap on just these texts and averages out on others. Of SmolLM2-135M as its own draft, 21 single changes to 2, 3, 4
bits (benchmarks/quantisation.py): rank correlation with the true KL 0.94; price over KL 0.92, spread by a factor 1.6.

Shape suffixes: S draws of y, T rows of all texts, B texts, N outputs of a tensor, R of them sampled, K inputs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from ..formats import Format
from ..ops.reference import rms_norm
from .differentiable import embedding_name, layer_weights, run_layer
from .pipeline import LINEAR
from .rounding import best_shrink
from .teacher_forced import Progress, TeacherForced

Rounder = Callable[[Tensor, Format], Tensor]
"""From a weight [N, K] float32 and a format to the values that the rounded weight stands for; row by row."""

OUTPUTS = 128
"""Outputs of each tensor, evenly spread, that errors are computed for."""

HEAD_ROWS = 2048
"""Rows of the head that errors are computed for: those whose tokens the draft is least sure of."""

Key = tuple[str, str]
"""A tensor's name and a format's."""


@dataclass(frozen=True)
class Sensitivities:
    """Expected KL(q0 || q) in nats a token, of each tensor in each format while all others are at full precision.

    Attributes:
        kl: by tensor and format. acceptance: of the draft at full precision, on the same tokens. tokens: how many.
    """

    kl: Mapping[Key, float]
    acceptance: float
    tokens: int


def least_squares(weight_NK: Tensor, form: Format) -> Tensor:
    """The values of a weight in a format, each range shrunk to where its squared error is least: method `clip`."""
    if form.kind != "integer":
        return form.round(weight_NK)
    return form.round(weight_NK, best_shrink(weight_NK, form))


def sensitivities(
    draft: TeacherForced,
    formats: Sequence[Format],
    *,
    rng: np.random.Generator,
    draws: int = 4,
    rounder: Rounder = least_squares,
    path: Path | None = None,
    progress: Progress | None = None,
) -> Sensitivities:
    """Price every format of every linear layer and of the head.

    Args:
        draft: the draft on the probe's texts.
        formats: candidates; those that do not fit a tensor are left out for it.
        rng: draws y.
        draws: passes backward; the error of an estimate falls like 1 / sqrt(draws x texts).
        rounder: how a weight is rounded.
        path: a .jsonl file that prices are kept in as they come, and read from when it is there.
        progress: called with (layers done, layers, what).

    Raises:
        UsageError: the file is of another draft, probe or question.
    """
    seed = int(rng.integers(2**62))
    journal = _Journal(path, _question(draft, formats, draws, seed))
    layers = draft.source.config.num_layers
    generator = torch.Generator().manual_seed(seed)
    head = draft.source.tensor("lm_head.weight")
    if ("lm_head", "head") not in journal.done:
        journal.add("lm_head", "head", _head_prices(draft, head, formats, rounder))
    wanted = [(f"model.layers.{i}.{name}", i) for i in range(layers) for name in LINEAR]
    missing = {i for name, i in wanted if (name, "weight") not in journal.done}
    embedding_done = ("lm_head", "embedding") in journal.done
    lowest = 0 if not embedding_done else min(missing, default=layers)
    if lowest < layers or not embedding_done:
        g_STD = _head_gradients(draft, head, draws, generator)
        del head
        for i in reversed(range(lowest, layers)):
            weights = layer_weights(draft.source, i)
            g_STD, reads, gradients = _backward(draft, weights, i, g_STD)
            if i in missing:
                for name in LINEAR:
                    prices = _prices(draft, weights[f"{name}.weight"], reads[name], gradients[name], formats, rounder)
                    journal.add(f"model.layers.{i}.{name}", "weight", prices)
            if progress:
                progress(layers - i, layers, "pricing layers")
        if not embedding_done:
            journal.add("lm_head", "embedding", _embedding_prices(draft, g_STD, formats, rounder))
    return Sensitivities(journal.total(), draft.acceptance, draft.judged)


def _backward(
    draft: TeacherForced, weights: Mapping[str, Tensor], layer: int, g_STD: Tensor
) -> tuple[Tensor, Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Gradients at a layer's input, what its linear layers read [T, K], and gradients of what they say [S, T, N]."""
    x_TD = draft.inputs[layer].detach().requires_grad_()
    y_TD, taps = run_layer(x_TD, weights, draft.source.config, draft.rotary, draft.rows)
    places = [x_TD, *(taps.outputs[name] for name in LINEAR)]
    found = [torch.autograd.grad(y_TD, places, g_TD, retain_graph=True) for g_TD in g_STD]
    stacked = [torch.stack(parts) for parts in zip(*found, strict=True)]
    reads = {name: x.detach() for name, x in taps.inputs.items()}
    return stacked[0], reads, dict(zip(LINEAR, stacked[1:], strict=True))


def _head_gradients(draft: TeacherForced, head_VD: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """d log q0(y) / d (rows before the final norm) for y ~ q0 at every judged row: [S, T, D], 0 at the others."""
    y_TS = torch.multinomial(draft.q_TV, draws, replacement=True, generator=generator)
    usable = min(draft.q_TV.shape[1], len(head_VD))
    mean_TD = draft.q_TV[:, :usable] @ head_VD[:usable]
    x_TD = draft.inputs[-1][draft.rows.scored].detach().requires_grad_()
    read_TD = rms_norm(x_TD, draft.norm_D, draft.source.config.norm_eps)
    g_STD = torch.zeros(draws, *draft.inputs[-1].shape)
    for s in range(draws):
        pull = (head_VD[y_TS[:, s]] - mean_TD) / draft.probe.temperature
        (g_TD,) = torch.autograd.grad(read_TD, x_TD, pull, retain_graph=True)
        g_STD[s, draft.rows.scored] = g_TD
    return g_STD


def _fitting(formats: Sequence[Format], inputs: int) -> list[Format]:
    return [form for form in formats if form.group_size is None or inputs % form.group_size == 0]


def _prices(
    draft: TeacherForced,
    weight_NK: Tensor,
    x_TK: Tensor,
    g_STN: Tensor,
    formats: Sequence[Format],
    rounder: Rounder,
) -> dict[str, float]:
    N = len(weight_NK)
    chosen = torch.arange(0, N, -(-N // OUTPUTS))
    sample_RK, g_STR = weight_NK[chosen], g_STN[:, :, chosen]
    prices = {}
    for form in _fitting(formats, weight_NK.shape[1]):
        moved_TR = x_TK @ (rounder(sample_RK, form) - sample_RK).T
        prices[form.name] = _fisher(draft, g_STR * moved_TR) * N / len(chosen)
    return prices


def _fisher(draft: TeacherForced, products_STR: Tensor) -> float:
    """1/2 E (sum over a text's rows)^2, summed over texts and outputs, for each judged token."""
    S, _, R = products_STR.shape
    sums_SBR = torch.zeros(S, len(draft.rows.lengths), R).index_add_(1, draft.rows.owners, products_STR)
    return float(sums_SBR.square().sum(dtype=torch.float64)) / (2 * S * draft.judged)


def _head_prices(
    draft: TeacherForced, head_VD: Tensor, formats: Sequence[Format], rounder: Rounder
) -> dict[str, float]:
    """Of the head as output: 1/2 sum_v q(v) (1 - q(v)) dz(v)^2, exact to second order for independent rows."""
    x_TD = rms_norm(draft.inputs[-1][draft.rows.scored], draft.norm_D, draft.source.config.norm_eps)
    spread_TV = draft.q_TV * (1 - draft.q_TV)
    by_row = spread_TV.sum(0)
    chosen = by_row[: len(head_VD)].topk(min(HEAD_ROWS, len(head_VD), len(by_row))).indices
    rest = float(by_row.sum() / by_row[chosen].sum())
    sample_RD = head_VD[chosen]
    prices = {}
    for form in _fitting(formats, head_VD.shape[1]):
        moved_TR = x_TD @ (rounder(sample_RD, form) - sample_RD).T / draft.probe.temperature
        total = float((spread_TV[:, chosen] * moved_TR.square()).sum(dtype=torch.float64))
        prices[form.name] = total * rest / (2 * draft.judged)
    return prices


def _embedding_prices(
    draft: TeacherForced, g_STD: Tensor, formats: Sequence[Format], rounder: Rounder
) -> dict[str, float]:
    """Of the embedding, which is kept in the head's format: only rows of tokens that occur are moved."""
    occurring, place_T = torch.unique(draft.rows.ids, return_inverse=True)
    table = draft.source.tensor(embedding_name(draft.source))[occurring]
    prices = {}
    for form in _fitting(formats, table.shape[1]):
        prices[form.name] = _fisher(draft, (g_STD * (rounder(table, form) - table)[place_T]).sum(-1, keepdim=True))
    return prices


def _question(draft: TeacherForced, formats: Sequence[Format], draws: int, seed: int) -> str:
    parts = [draft.source.origin, draft.probe.digest, [form.name for form in formats], draws, seed]
    return sha256(json.dumps(parts).encode()).hexdigest()


class _Journal:
    """Prices as they come, in memory and in a file: a line for each tensor and part ('weight', 'head', 'embedding')."""

    def __init__(self, path: Path | None, question: str) -> None:
        self._path = path
        self.done: dict[tuple[str, str], dict[str, float]] = {}
        if path is None:
            return
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"question": question}) + "\n", encoding="utf-8")
            return
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
        first, *lines = [json.loads(line) for line in whole.splitlines()] or [{}]
        if first.get("question") != question:
            raise UsageError(
                f"{path} holds sensitivities of another draft, probe, set of formats or seed. Expected the same "
                "question; remove the file, or name another."
            )
        path.write_text(whole + "\n", encoding="utf-8")  # without a last line that was cut short
        self.done = {(line["tensor"], line["part"]): line["kl"] for line in lines}

    def add(self, tensor: str, part: str, prices: dict[str, float]) -> None:
        self.done[tensor, part] = prices
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"tensor": tensor, "part": part, "kl": prices}) + "\n")

    def total(self) -> dict[Key, float]:
        found: dict[Key, float] = {}
        for (tensor, _), prices in self.done.items():
            for form, kl in prices.items():
                found[tensor, form] = found.get((tensor, form), 0.0) + kl
        return found
