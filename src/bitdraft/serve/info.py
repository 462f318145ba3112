"""The effective configuration, for `/info`: what runs, not what was asked for."""

from dataclasses import asdict, dataclass
from typing import Any

from .. import __version__
from ..engine.engine import Load
from ..formats import KVFormat, Recipe
from ..models.cached import CachedModel
from ..ops import hardware, native
from ..quantize.load import Source
from .load import NGRAM, Pair
from .memory import MemoryPlan
from .settings import Settings


@dataclass(frozen=True)
class Runs:
    """How the engine was set up.

    Attributes:
        max_batch: requests that run at once.
        max_rows: rows of tokens in a step with chunks of prompts.
        max_draft: longest block, of a draft and from a client's prediction.
        confidence: a block ends after a token that the draft finds less likely; 0 never.
        prefix_cache: whether prefixes are shared.
    """

    max_batch: int
    max_rows: int
    max_draft: int
    confidence: float
    prefix_cache: bool


def describe(pair: Pair, plan: MemoryPlan, settings: Settings, runs: Runs) -> dict[str, Any]:
    """What does not change while the server runs."""
    opened = pair.opened
    draft: dict[str, Any] | None = None
    if pair.draft and opened.draft and opened.draft_recipe:
        draft = _model(opened.draft, opened.draft_recipe, pair.draft)
    elif opened.ngram:
        draft = {"name": NGRAM, "format": None, "bits": None, "device": "cpu", "kv_format": None, "kv_bits": None}
    if draft is not None:
        draft |= {"chosen": opened.why or None, "not_chosen": dict(opened.refused)}
    kernels = native.default()
    return {
        "server": "bitdraft",
        "version": __version__,
        "models": list(settings.names),
        "target": _model(opened.target, opened.target_recipe, pair.target),
        "draft": draft,
        "max_model_len": pair.target.context_length,
        "max_batch": runs.max_batch,
        "max_batched_tokens": runs.max_rows,
        "speculative": {
            "max_draft": runs.max_draft if pair.drafter else 0,
            "max_predicted": runs.max_draft,
            "confidence": runs.confidence,
            "lossless": True,
        },
        "prefix_cache": runs.prefix_cache,
        "memory_bytes": {**plan.parts, "all": plan.total},
        "machine": {
            "device": "cpu",
            "processor": hardware.processor(),
            "isa": kernels.isa if kernels else "reference",
            "threads": kernels.threads if kernels else None,
            "kernels": native.describe(),
        },
        "sampling_defaults": asdict(settings.defaults),
        "unknown_fields": "ignored" if settings.lenient else "refused",
        "limits": {
            "max_queue": settings.max_queue,
            "max_body_bytes": settings.max_body,
            "timeout_seconds": settings.timeout,
        },
    }


def current(fixed: dict[str, Any], reasons: str, load: Load, acceptance: dict[str, dict[str, float]]) -> dict[str, Any]:
    """All of `/info`: what does not change, and what is so now."""
    speculative = fixed["speculative"] | {"draft_length": reasons, "conditional_acceptance": acceptance}
    return fixed | {"speculative": speculative, "load": asdict(load)}


def _model(source: Source, recipe: Recipe, model: CachedModel) -> dict[str, Any]:
    kv = model.pool.format
    bits = recipe.format.bits_per_weight
    return {
        "name": source.name,
        "path": str(source.path),
        "family": source.checkpoint.config.family,
        "stored_as": source.checkpoint.stored_as,
        "format": recipe.name,
        "bits": round(source.checkpoint.stored_bits if bits is None else bits, 3),
        "weight_bytes": model.decoder.packed_bytes,
        "device": "cpu",
        "kv_format": kv.name,
        "kv_bits": round(kv.bits_per_number(source.checkpoint.config.head_dim), 3),
        "kv_scales": _scales(kv),
        "kv_scales_from": model.kv_scales_from,
        "kv_tokens": model.pool.num_blocks * model.pool.block_size,
        "context_length": model.context_length,
    }


def _scales(kv: KVFormat) -> str:
    if kv.needs_scales:
        return "one for each layer and head"
    if kv.bits:
        return "of each block, beside its codes"
    return "of each token" if kv.bits_per_number(64) < 16 else "none needed"
