"""From the facts about a model to findings, the gravest first: settings, weights, layers, tokenizer, and the pair."""

import math
from collections.abc import Iterator
from typing import Any

from .model_doctor_causes import Cause
from .model_doctor_faults import Finding, broken, places, weight_findings
from .model_doctor_layers import LayerFacts, VectorFacts
from .model_doctor_text import Declared, DraftFacts, LogitFacts, TokenizerFacts
from .model_doctor_weights import TensorFacts

_LOW, _POOR = 0.3, 0.5
"""Acceptance below which a draft is no draft, and below which it is a poor one."""


def setting_findings(apart: list[tuple[str, Any, Any]]) -> Iterator[Finding]:
    """Settings of the model that are not the original's."""
    for name, own, original in apart:
        yield Finding(
            f"{name} is {own!r}, and the original's is {original!r}",
            "the model's settings",
            "every layer computes something else than it was trained to",
            f"Set {name} to {original!r} in config.json, or convert the file again from the original's config",
            True,
            50.0,
        )


def vector_findings(vectors: tuple[VectorFacts, ...]) -> Iterator[Finding]:
    """Norms and biases that are not the original's."""
    bad = [v.name for v in vectors if not v.finite]
    if bad:
        yield Finding(
            "NaN or infinite values",
            places(bad),
            "every output of the model is NaN",
            "Get the file again",
            True,
            100.0,
            tuple(bad),
        )
    off = [v for v in vectors if v.finite and v.error > 0.02 + v.slack]
    by_what: dict[str, list[VectorFacts]] = {}
    for vector in off:
        by_what.setdefault(_vector_fault(vector), []).append(vector)
    for what, found in by_what.items():
        ones = "off by one" in what
        yield Finding(
            what,
            places([v.name for v in found]),
            f"up to {max(v.error for v in found):.0%} of its size, in front of all that reads it",
            "Some converters add 1 to the norms of Gemma's family: convert again as this model's family"
            if ones
            else "Take the tensor from the original: norms and biases are not quantised",
            True,
            5.0 + max(v.error for v in found),
            tuple(v.name for v in found),
        )


def _vector_fault(vector: VectorFacts) -> str:
    if abs(abs(vector.offset) - 1) < 0.05 and vector.spread < 0.05:
        return f"off by one: every value is {vector.offset:+.0f} from the original's"
    return "not the original's, and no weight makes up for it"


def layer_findings(layers: tuple[LayerFacts, ...], tensors: tuple[TensorFacts, ...], known: bool) -> Iterator[Finding]:
    """Layers that are wrong though none of their weights explains it; `known`: something else does."""
    odd = []
    for layer in layers:
        own = [t.match for t in tensors if t.name.startswith(f"model.layers.{layer.layer}.") and t.match is not None]
        explained = math.sqrt(sum((m.output_error or 0.0) ** 2 for m in own))
        if layer.own_error > 3 * explained + 0.1 and not any(broken(m) for m in own):
            odd.append(layer)
    if odd and not known:
        yield Finding(
            "its outputs are wrong though its weights are right",
            places([f"model.layers.{layer.layer}.all" for layer in odd], whole=True),
            f"what it adds is off by {max(layer.own_error for layer in odd):.0%}",
            "Compare settings that this page does not: rotary scaling, window, heads, activation",
            True,
            8.0,
        )


def declared_findings(said: Declared | None, tensors: tuple[TensorFacts, ...]) -> Iterator[Finding]:
    """What config.json says of the quantisation, against the tensors."""
    if said is None:
        return
    quantised = [t for t in tensors if t.bits < 16 and t.name.startswith("model.layers.")]
    ignored = [t for t in quantised if t.name in said.ignored]
    for field, wanted, found in (
        ("bits", said.bits, {t.name: t.bits for t in quantised}),
        ("group_size", said.group, {t.name: t.group for t in quantised}),
        ("symmetric", said.symmetric, {t.name: not t.zeros for t in quantised}),
    ):
        apart = {name: value for name, value in found.items() if wanted is not None and value != wanted}
        if apart:
            values = " and ".join(sorted({str(value) for value in apart.values()}))
            yield Finding(
                f"config.json says {field} {wanted}, and the tensors say {values}",
                places(apart),
                "a program that trusts config.json gives weights the scales of others",
                f"Correct {field} of quantization_config ({said.method}), or quantise again",
                True,
                20.0,
                tuple(apart),
            )
    if ignored:
        yield Finding(
            "config.json says that it is not quantised, and it is",
            places([t.name for t in ignored]),
            "a program that trusts config.json reads its codes as numbers, or refuses the file",
            "Take it from the ignored layers of quantization_config, or quantise again",
            True,
            20.0,
            tuple(t.name for t in ignored),
        )


def tokenizer_findings(found: TokenizerFacts) -> Iterator[Finding]:
    """Vocabulary, ends, beginnings and chat template."""
    if found.vocabulary is not None:
        yield Finding(
            "its vocabulary is not the original's",
            "tokenizer",
            found.vocabulary,
            "Copy the original's tokenizer files",
            True,
            60.0,
        )
    if found.eos_missing or not found.eos:
        missing = " and ".join(map(repr, found.eos_missing)) or "any token"
        yield Finding(
            f"it does not end at {missing}, where the original does"
            if found.eos_missing
            else "no token ends an output",
            "tokenizer: eos_token_id",
            "answers go on after their end, up to the limit",
            "Copy eos_token_id from the original's generation_config.json",
            True,
            30.0,
        )
    yield from _template_findings(found)
    own, original = found.begins, found.begins_original
    if own is not None and ((original is None and own > 1) or (original is not None and own != original)):
        again = original is None or own > original
        yield Finding(
            f"a chat prompt begins with {own} beginning tokens"
            + ("" if original is None else f", the original's with {original}"),
            "tokenizer and chat template",
            "text after a doubled or missing beginning is not what the model was trained on",
            "Take the beginning token from the template, or set add_bos_token to false"
            if again
            else "Set add_bos_token as the original does, or take its chat template",
            original is not None,
            15.0,
        )
    elif found.turn_end is not None and not found.eos_missing and original is None:
        yield Finding(
            f"{found.turn_end!r} ends a turn of the template, and no output",
            "tokenizer: eos_token_id",
            "answers may go on after their end",
            "Add it to eos_token_id of generation_config.json",
            False,
            1.0,
        )


def _template_findings(found: TokenizerFacts) -> Iterator[Finding]:
    where = "chat template"
    if found.wanted_template and not found.has_template:
        yield Finding(
            "there is none, and the original has one",
            where,
            "chats are refused, or a program puts another template in its place",
            "Copy chat_template.jinja, or the template in tokenizer_config.json, from the original",
            True,
            30.0,
        )
    if found.refused is not None:
        yield Finding(
            "it refuses a plain question", where, found.refused, "Copy the original's chat template", True, 30.0
        )
    if found.rendered is not None and found.rendered_original is not None:
        at = next(
            (i for i, (a, b) in enumerate(zip(found.rendered, found.rendered_original, strict=False)) if a != b),
            min(len(found.rendered), len(found.rendered_original)),
        )
        own, original = (text[max(0, at - 10) : at + 30] for text in (found.rendered, found.rendered_original))
        yield Finding(
            f"it renders {own!r} where the original renders {original!r}",
            where,
            "the model reads text of a form that it was not trained on",
            "Copy the original's chat template",
            True,
            25.0,
        )
    if not found.wanted_template and found.has_template:
        yield Finding(
            "there is one, and the original has none",
            where,
            "a base model is asked in a form that it was not trained on",
            "Give raw prompts, or examine against the chat model",
            False,
            2.0,
        )


def draft_findings(found: DraftFacts | None, original: bool, faults: bool) -> Iterator[Finding]:
    """A draft that its target does not take, and why.

    Args:
        found: the facts.
        original: whether an original was given.
        faults: whether something else about the draft is grave.
    """
    if found is None:
        return
    where = f"as the draft of {found.target}"
    if found.vocabulary is not None:
        remedy = "Choose a draft of the target's own family; a reduced vocabulary needs its map"
        yield Finding("the two have no common vocabulary", where, found.vocabulary, remedy, True, 40.0)
    if not found.same_template:
        yield Finding(
            "the two render chats differently",
            where,
            "the draft reads the target's chat form, which it was perhaps not trained on",
            "Give the draft the target's text, as bitdraft does; or choose a draft of the target's family",
            False,
            3.0,
        )
    if found.acceptance is None or found.acceptance >= _POOR:
        return
    before = found.acceptance_original
    if before is not None and before > found.acceptance + 0.1:
        why = f"the original is taken at {before:.2f}: quantisation lost the rest"
        remedy = "Mend the faults above" if faults else "Use more bits, AWQ, or smaller groups"
    elif before is not None:
        why, remedy = (
            f"the original does no better ({before:.2f}): it is no draft for this target",
            "Choose another draft",
        )
    elif faults:
        why, remedy = "the draft is damaged", "Mend the faults above"
    else:
        why = "it is another model's draft, or damaged"
        remedy = "Examine it against its original (--against), or choose a draft of the target's family"
    yield Finding(
        f"{found.acceptance:.2f} of what it drafts would be accepted; {why}",
        where,
        "drafting takes longer than it saves",
        remedy,
        found.acceptance < _LOW,
        12.0,
    )


def logit_findings(found: LogitFacts | None, vocabulary: int, faults: bool, coarse: float) -> Iterator[Finding]:
    """What became of the distributions, where nothing else was found.

    Args:
        found: the facts; None where the model does not run.
        vocabulary: its size.
        faults: whether something else is grave.
        coarse: relative error of outputs that its formats cost, the worst layer's.
    """
    if found is None or faults:
        return
    if found.nll_original is None:
        if found.nll > 0.6 * math.log(vocabulary):
            yield Finding(
                f"a token of plain English costs it {found.nll:.1f} nats, of {math.log(vocabulary):.1f} for guessing",
                "the whole model",
                "it says nothing that its text would lead to",
                "Examine it against its original (--against), which names the layer",
                True,
                9.0,
            )
    elif found.kl is not None and found.kl > 0.3:
        yield Finding(
            f"it is coarse, as its format is: KL {found.kl:.2f} nats, {found.top1:.0%} of likeliest tokens kept",
            "the whole model",
            f"outputs of its layers are off by up to {coarse:.0%}, all of it the format's resolution",
            "Use more bits, smaller groups, or AWQ",
            False,
            found.kl,
        )


def head_words(own_tied: bool, original_tied: bool) -> str:
    """What to add to a fault of the head where it is tied in one of the two."""
    if own_tied == original_tied:
        return ""
    words = {True: "is the embedding (tied)", False: "is a tensor of its own (not tied)"}
    return f"The head of the original {words[original_tied]}, here it {words[own_tied]}"


def sorted_findings(found: list[Finding]) -> list[Finding]:
    """The gravest first."""
    return sorted(found, key=lambda f: (not f.grave, -f.size))


def weights_found(
    tensors: tuple[TensorFacts, ...], causes: dict[str, Cause | None], tied: tuple[bool, bool]
) -> list[Finding]:
    """Findings about linear layers, embedding and head."""
    return list(weight_findings(tensors, causes, head_words(*tied)))
