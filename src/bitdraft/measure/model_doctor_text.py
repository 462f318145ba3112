"""What the doctor looks at around the weights: settings, vocabulary, chat template, and what becomes of a text.

Shape suffixes: R rows of text, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BitdraftError, PairError
from ..models.checkpoint import Weights
from ..models.config import ModelConfig
from ..models.tokenizer import Tokenizer, check_pair
from ..models.tokenizer_folder import read_json
from .model_doctor_layers import hidden_rows, logits

TOKENS = 200
"""Tokens of text that models are run on, at most."""

_CHAT = (
    ({"role": "user", "content": "What is 2 + 2?"},),
    (
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "Another one."},
    ),
)
_NEUTRAL = {"family", "vocab_size", "context_length", "tied_head", "norm_eps"}
"""Settings that may differ without a change of the output, or that are judged elsewhere."""


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer, beside the original's where there is one.

    Attributes:
        has_template: whether there is a chat template.
        wanted_template: whether the original has one.
        rendered, rendered_original: the first conversation that the two render differently; None where all agree.
        refused: what the template raised, where the original's does not.
        begins: how many beginning tokens a chat prompt gets from template and tokenizer together; None where no prompt
            can be made.
        begins_original: the same of the original.
        eos: texts of the tokens that end an output. eos_missing: of the original's that are not among them.
        vocabulary: how two tokens differ; None where all agree.
        turn_end: the token that ends a turn in the template, if it ends no output.
    """

    has_template: bool
    wanted_template: bool
    rendered: str | None
    rendered_original: str | None
    refused: str | None
    begins: int | None
    begins_original: int | None
    eos: tuple[str, ...]
    eos_missing: tuple[str, ...]
    vocabulary: str | None
    turn_end: str | None


@dataclass(frozen=True)
class LogitFacts:
    """A model's distributions over a text beside the original's.

    Attributes:
        tokens: rows that were compared.
        kl: mean KL(p || q) in nats, the original first. top1: share of rows with the same likeliest token.
        nll, nll_original: nats a token of the text costs each of them.
    """

    tokens: int
    kl: float | None
    top1: float | None
    nll: float
    nll_original: float | None


@dataclass(frozen=True)
class DraftFacts:
    """A model as the draft of a target, at temperature 1 on a text that both read.

    Attributes:
        target: its name.
        acceptance: mean of sum min(p, q); None where the vocabularies differ.
        acceptance_original: the same of the original; None where there is none.
        vocabulary: why the two have no common vocabulary; None if they have.
        same_template: whether both render chats alike.
    """

    target: str
    acceptance: float | None
    acceptance_original: float | None
    vocabulary: str | None
    same_template: bool


@dataclass(frozen=True)
class Declared:
    """What config.json says of how a folder is quantised.

    Attributes:
        method: quant_method. bits, group, symmetric: of the weights; None where it does not say.
        ignored: layers that are said not to be quantised.
    """

    method: str
    bits: int | None
    group: int | None
    symmetric: bool | None
    ignored: tuple[str, ...]


def tokenizer_facts(own: Tokenizer, original: Tokenizer | None) -> TokenizerFacts:
    """Look at a tokenizer and its chat template."""
    texts, refused = _rendered(own)
    wanted, _ = (None, None) if original is None else _rendered(original)
    pairs = [(a, b) for a, b in zip(texts, wanted or texts, strict=True) if a is not None and b is not None and a != b]
    eos = {i: own.token_text(i) for i in own.eos_ids}
    missing = [] if original is None else [original.token_text(i) for i in original.eos_ids if i not in eos]
    return TokenizerFacts(
        has_template=own.chat_template is not None,
        wanted_template=own.chat_template is not None if original is None else original.chat_template is not None,
        rendered=pairs[0][0] if pairs else None,
        rendered_original=pairs[0][1] if pairs else None,
        refused=refused if wanted is None or wanted[0] is not None else None,
        begins=_begins(own, texts[0]),
        begins_original=None if original is None or wanted is None else _begins(original, wanted[0]),
        eos=tuple(eos.values()),
        eos_missing=tuple(missing),
        vocabulary=None if original is None else _unlike(original, own),
        turn_end=_turn_end(own),
    )


def _rendered(tokenizer: Tokenizer) -> tuple[list[str | None], str | None]:
    """The sample conversations as text, None where the template refuses; and why it refuses the first."""
    texts: list[str | None] = []
    refused = None
    for messages in _CHAT:
        try:
            texts.append(None if tokenizer.chat_template is None else tokenizer.render(messages))
        except BitdraftError as error:
            texts.append(None)
            refused = refused or (str(error) if messages is _CHAT[0] else None)
    return texts, refused


def _begins(tokenizer: Tokenizer, text: str | None) -> int | None:
    """Beginning tokens of a prompt, if a program adds the tokenizer's to the template's, as many do."""
    if text is None:
        return None
    ids = tokenizer.encode(text, add_bos=False, parse_special=True)
    if not ids or tokenizer.decode(ids[:1]):  # it begins with words
        return int(tokenizer.bos_id is not None)
    run = next((n for n, i in enumerate(ids) if i != ids[0]), len(ids))
    return run + 1 if tokenizer.bos_id == ids[0] else run


def _turn_end(tokenizer: Tokenizer) -> str | None:
    """What follows an assistant's words in the template, if it is a special token that ends no output."""
    try:
        text = tokenizer.render(
            [{"role": "user", "content": "A"}, {"role": "assistant", "content": "Zebra"}], add_generation_prompt=False
        )
    except BitdraftError:
        return None
    ids = tokenizer.encode(text.rpartition("Zebra")[2].lstrip(), add_bos=False, parse_special=True)
    special = [i for i in ids[:1] if not tokenizer.decode([i]) and i not in tokenizer.eos_ids]
    return tokenizer.token_text(special[0]) if special and tokenizer.eos_ids else None


def _unlike(target: Tokenizer, draft: Tokenizer) -> str | None:
    try:
        check_pair(target, draft)
    except PairError as error:
        return str(error)
    return None


def settings_apart(own: ModelConfig, original: ModelConfig) -> list[tuple[str, Any, Any]]:
    """(setting, the model's, the original's) of all settings that change the output and differ."""
    names = [f.name for f in fields(ModelConfig) if f.name not in _NEUTRAL]
    pairs = [(n, getattr(own, n), getattr(original, n)) for n in names]
    apart = [(n, a, b) for n, a, b in pairs if a != b and not _windows_alike(n, own, original)]
    if not 0.5 < own.norm_eps / original.norm_eps < 2:
        apart.append(("norm_eps", own.norm_eps, original.norm_eps))
    return apart


def _windows_alike(name: str, own: ModelConfig, original: ModelConfig) -> bool:
    """Whether a sliding window is no shorter than what either was made for."""
    windows = [c.sliding_window or c.context_length for c in (own, original)]
    return name == "sliding_window" and min(windows) >= min(own.context_length, original.context_length)


def logit_facts(
    model: Weights, original: Weights | None, own_RD: Tensor, exact_RD: Tensor | None, ids: Sequence[int]
) -> LogitFacts:
    """Compare the two models' distributions over a text, from the rows behind their last layers."""
    own = logits(model, own_RD).log_softmax(-1)
    nll = _nll(own, ids)
    if original is None or exact_RD is None:
        return LogitFacts(len(ids), None, None, nll, None)
    exact = logits(original, exact_RD).log_softmax(-1)
    shared = min(own.shape[1], exact.shape[1])
    p_RV, q_RV = exact[:, :shared].log_softmax(-1), own[:, :shared].log_softmax(-1)
    kl = (p_RV.exp() * (p_RV - q_RV)).sum(-1).clamp(min=0).mean()
    top1 = (p_RV.argmax(-1) == q_RV.argmax(-1)).float().mean()
    return LogitFacts(len(ids), float(kl), float(top1), nll, _nll(exact, ids))


def _nll(log_RV: Tensor, ids: Sequence[int]) -> float:
    return -float(log_RV[:-1].gather(1, torch.tensor(ids)[1:, None]).mean())


def draft_facts(
    name: str,
    target: Weights,
    tokenizers: tuple[Tokenizer, Tokenizer],
    drafts: Sequence[tuple[Weights, Tensor | None]],
    ids: Sequence[int],
) -> DraftFacts:
    """How often a target would take what a model drafts.

    Args:
        name: the target's.
        target: its weights.
        tokenizers: the target's and the draft's.
        drafts: the draft and, where there is one, its original, each with its rows behind the last layer; None where it
            does not run.
        ids: the text, as token ids of both.
    """
    vocabulary = _unlike(*tokenizers)
    same = _rendered(tokenizers[0])[0] == _rendered(tokenizers[1])[0]
    if vocabulary is not None:
        return DraftFacts(name, None, None, vocabulary, same)
    p_RV = logits(target, hidden_rows(target, ids)).softmax(-1)
    found = []
    for weights, rows in drafts:
        q_RV = None if rows is None else logits(weights, rows).softmax(-1)
        shared = 0 if q_RV is None else min(p_RV.shape[1], q_RV.shape[1])
        found.append(None if q_RV is None else float(torch.minimum(p_RV[:, :shared], q_RV[:, :shared]).sum(-1).mean()))
    return DraftFacts(name, found[0], found[1] if len(found) > 1 else None, None, same)


def declared(path: Path) -> Declared | None:
    """What a model folder says of its quantisation; None if it says nothing, or several things for several layers."""
    config = path / "config.json"
    raw = read_json(config).get("quantization_config") if config.exists() else None
    if not isinstance(raw, dict):
        return None
    groups = raw.get("config_groups")
    scheme: Mapping[str, Any] = raw
    if isinstance(groups, dict):
        if len(groups) != 1:
            return None
        scheme = next(iter(groups.values())).get("weights") or {}
    bits, group = scheme.get("num_bits", scheme.get("bits")), scheme.get("group_size")
    symmetric = scheme.get("symmetric", scheme.get("sym"))
    if symmetric is None and "zero_point" in scheme:
        symmetric = not scheme["zero_point"]
    ignored = raw.get("ignore") or raw.get("modules_to_not_convert") or ()
    return Declared(
        method=str(raw.get("quant_method", "unknown")),
        bits=bits if isinstance(bits, int) else None,
        group=group if isinstance(group, int) and group > 0 else None,
        symmetric=symmetric if isinstance(symmetric, bool) else None,
        ignored=tuple(str(name) for name in ignored),
    )
