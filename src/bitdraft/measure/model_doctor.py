"""`bitdraft doctor MODEL`: a model, quantised by whomever, beside the original that it was made from.

Reads the files tensor by tensor and a text of 200 tokens layer by layer; `examine_model` collects facts,
`ModelCheckup.findings` judges them. Thresholds follow the resolution of each weight's own format: what rounding the
original to nearest on the same grid would cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError
from ..formats import Recipe
from ..models.checkpoint import Weights
from ..models.config import ModelConfig
from ..models.tokenizer import Tokenizer
from ..ops.machine import torch_on_all_cores
from ..quantize.load import Progress, Source, open_source
from ..quantize.pipeline import quantize
from . import model_doctor_findings as judge
from .model_doctor_causes import Cause, cause_of
from .model_doctor_faults import Finding, suspicious
from .model_doctor_layers import LayerFacts, VectorFacts, Walk, as_stored, walk
from .model_doctor_text import (
    TOKENS,
    Declared,
    DraftFacts,
    LogitFacts,
    TokenizerFacts,
    declared,
    draft_facts,
    logit_facts,
    settings_apart,
    tokenizer_facts,
)
from .model_doctor_weights import Folding, TensorFacts

_SIZES = {"hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_size"}


@dataclass(frozen=True)
class Model:
    """A model as the doctor sees it.

    Attributes:
        name: what the user called it.
        weights: as they are stored, or as a recipe made them.
        tokenizer: its tokenizer.
        declared: what its config.json says of its quantisation, if it says something.
    """

    name: str
    weights: Weights
    tokenizer: Tokenizer
    declared: Declared | None = None


@dataclass(frozen=True)
class ModelCheckup:
    """What was found about a model, as facts.

    Attributes:
        model, original: names; None where there is no original.
        stored_as: how the model's layers are stored.
        vocabulary: rows of its embedding.
        text_tokens: tokens of text that it was run on.
        tied: whether the head is the embedding, of the model and of the original.
        settings: (name, the model's, the original's) of settings that differ.
        tensors, vectors, layers: facts about its parts, see their classes.
        causes: why a weight is not what it should be, by name; None where no cause is known.
        logits: what became of the text; None where the model does not run.
        tokenizer, declared, draft: see their classes.
    """

    model: str
    original: str | None
    stored_as: str
    vocabulary: int
    text_tokens: int
    tied: tuple[bool, bool]
    settings: tuple[tuple[str, Any, Any], ...]
    tensors: tuple[TensorFacts, ...]
    vectors: tuple[VectorFacts, ...]
    layers: tuple[LayerFacts, ...]
    causes: Mapping[str, Cause | None]
    logits: LogitFacts | None
    tokenizer: TokenizerFacts
    declared: Declared | None
    draft: DraftFacts | None

    @property
    def well(self) -> bool:
        """Whether nothing is grave."""
        return not any(finding.grave for finding in self.findings)

    @property
    def findings(self) -> list[Finding]:
        """Everything that could be better, the gravest first."""
        found = [
            *judge.setting_findings(list(self.settings)),
            *judge.weights_found(self.tensors, dict(self.causes), self.tied),
            *judge.vector_findings(self.vectors),
            *judge.declared_findings(self.declared, self.tensors),
        ]
        known = any(finding.grave for finding in found)
        found += judge.layer_findings(self.layers, self.tensors, known)
        known = any(finding.grave for finding in found)
        expected = [t.match.output_expected for t in self.tensors if t.match is not None]
        coarse = max((e for e in expected if e is not None), default=0.0)
        found += judge.logit_findings(self.logits, self.vocabulary, known, coarse)
        found += judge.tokenizer_findings(self.tokenizer)
        found += judge.draft_findings(self.draft, self.original is not None, known)
        return judge.sorted_findings(found)

    def as_json(self) -> dict[str, Any]:
        """All facts and findings, and `well`."""
        findings = [asdict(finding) for finding in self.findings]
        facts = asdict(self) | {"causes": {name: c and asdict(c) for name, c in self.causes.items()}}
        return {"well": self.well, **facts, "findings": findings}


def open_model(source: Source) -> Model:
    """A model as its file stores it."""
    return Model(source.name, as_stored(source.checkpoint), source.tokenizer, declared(Path(source.path)))


def examine_by_name(
    model: str,
    against: str | None,
    draft_of: str | None,
    format: str | None,
    texts: Sequence[str],
    progress: Progress | None = None,
) -> ModelCheckup:
    """Find the models and examine one of them.

    Args:
        model: name, folder, .gguf or hub id of the model to examine.
        against: its original; None for none, or for the model itself where there is a format.
        draft_of: a target that it is to draft for.
        format: a recipe that the model is first brought into.
        texts: to read, and to calibrate a recipe on.
        progress: called while files are fetched, weights quantised and layers examined.

    Raises:
        UsageError: a model, a file or a format that cannot be used.
    """
    source = open_source(model, progress)
    examined = open_model(source)
    original = None if against is None else open_model(open_source(against, progress))
    if format is not None:
        original = original or examined
        recipe = Recipe.parse(format)
        calibration = [source.tokenizer.encode(text) for text in texts]
        with torch_on_all_cores():
            weights = quantize(
                source.checkpoint, recipe, rng=np.random.default_rng(0), calibration=calibration, progress=progress
            )
        examined = Model(f"{model} in {recipe.name}", weights, source.tokenizer)
    target = None if draft_of is None else open_model(open_source(draft_of, progress))
    with torch_on_all_cores():
        return examine_model(examined, original, target, texts, progress)


def examine_model(
    model: Model, original: Model | None, target: Model | None, texts: Sequence[str], progress: Progress | None = None
) -> ModelCheckup:
    """Examine a model.

    Args:
        model: the model.
        original: what it was made from; None looks at the model alone.
        target: what it is to draft for.
        texts: to read, 200 tokens of them.
        progress: called with (layers done, layers, what).
    """
    settings = [] if original is None else settings_apart(model.weights.config, original.weights.config)
    like = original if original is not None and not _SIZES & {name for name, _, _ in settings} else None
    exact = None if like is None else like.weights
    known = [m.weights.config for m in (model, like, target) if m is not None]
    ids = _ids((original or model).tokenizer, texts, known)
    walked = walk(model.weights, exact, ids, progress)
    logits = None
    if walked.hidden is not None:
        logits = logit_facts(model.weights, exact, walked.hidden, walked.hidden_original, ids)
    tied = model.weights.config.tied_head
    return ModelCheckup(
        model=model.name,
        original=None if original is None else original.name,
        stored_as=_stored_as(walked),
        vocabulary=model.weights.config.vocab_size,
        text_tokens=len(ids),
        tied=(tied, tied if original is None else original.weights.config.tied_head),
        settings=tuple(settings),
        tensors=walked.tensors,
        vectors=walked.vectors,
        layers=walked.layers,
        causes={} if exact is None else _causes(model.weights, exact, walked),
        logits=logits,
        tokenizer=tokenizer_facts(model.tokenizer, None if original is None else original.tokenizer),
        declared=model.declared,
        draft=None if target is None else _draft(model, like, target, walked, ids),
    )


def _ids(tokenizer: Tokenizer, texts: Sequence[str], configs: Sequence[ModelConfig]) -> list[int]:
    """Token ids of text that all models can read."""
    room = min([TOKENS, *(config.context_length for config in configs)])
    ids: list[int] = []
    for text in texts:
        if len(ids) < room:
            ids += tokenizer.encode(text, add_bos=not ids)
    usable = [i for i in ids[:room] if i < min(config.vocab_size for config in configs)]
    if len(usable) < 2:
        raise UsageError(
            f"the texts to read are {len(usable)} tokens that all models know. Expected 2 or more: are these models of "
            "one kind?"
        )
    return usable


def _causes(model: Weights, original: Weights, walked: Walk) -> dict[str, Cause | None]:
    found: dict[str, Cause | None] = {}
    for tensor in walked.tensors:
        if tensor.match is not None and suspicious(tensor.match):
            found[tensor.name] = cause_of(
                tensor,
                original.packed,
                model.packed,
                walked.foldings.get(tensor.name, Folding()),
                model.config.num_layers,
                original.config.tied_head,
            )
    return found


def _draft(model: Model, original: Model | None, target: Model, walked: Walk, ids: Sequence[int]) -> DraftFacts:
    drafts = [(model.weights, walked.hidden)]
    if original is not None:
        drafts.append((original.weights, walked.hidden_original))
    return draft_facts(target.name, target.weights, (target.tokenizer, model.tokenizer), drafts, ids)


def _stored_as(walked: Walk) -> str:
    names = [t.stored for t in walked.tensors if t.name.startswith("model.layers.")]
    return "/".join(sorted(set(names), key=lambda name: -names.count(name)))
