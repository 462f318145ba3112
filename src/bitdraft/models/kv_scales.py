"""The scales of an 8-bit float cache, as a folder gives them or found from data, and which of the two.

A scale that all tokens share cannot follow a token, but it is free: no token carries one. E4M3 is as precise at a
hundredth of its range as at its end, so that the scales leave room for what the text did not show.

Shape suffixes: J KV heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..errors import ModelFileError, UsageError
from ..formats.kv import KV_FORMATS
from ..types import Feed
from .cached import CachedModel
from .checkpoint import Checkpoint
from .decoder import Decoder
from .quantized_folder import QuantizedCheckpoint

TOKENS = 512
"""How much of a text is read."""
LARGEST = 448 / 2
"""Where the largest number seen lands in E4M3, whose own largest is 448. A rotary position alone may raise an entry of
a key by a factor of 1.41."""


@dataclass(frozen=True)
class KVScales:
    """Scales, and where they came from.

    Attributes:
        layers: of keys and of values for each layer, [J] float32 both.
        origin: 'folder': the model's own files; 'text': a text that was run through the model.
    """

    layers: Sequence[tuple[Tensor, Tensor]]
    origin: Literal["folder", "text"]


def folder_scales(checkpoint: Checkpoint) -> KVScales | None:
    """The scales that a model's folder has for all of its layers; None where it has none, or only 1.0 for all.

    A scale of 1.0 everywhere is what tools write who have seen no text: it is not taken for a calibration.

    Raises:
        ModelFileError: a scale that is no positive number, or of another shape than one for a layer or a KV head.
    """
    if not isinstance(checkpoint, QuantizedCheckpoint) or not checkpoint.kv_scales:
        return None
    heads = checkpoint.config.num_kv_heads
    layers: list[tuple[Tensor, Tensor]] = []
    for i in range(checkpoint.config.num_layers):
        found = checkpoint.cache_scales(i)
        for kind, scale in found.items():
            if scale.numel() not in (1, heads) or not bool((scale.isfinite() & (scale > 0)).all()):
                raise ModelFileError(
                    f"{checkpoint.origin}: 'model.layers.{i}.self_attn.{kind}_scale' is {scale.tolist()}. Expected a "
                    f"positive number, or one for each of {heads} heads: fetch the model again, or use --kv bf16."
                )
        if len(found) < 2:
            return None
        key_scale, value_scale = (found[kind].flatten().expand(heads).contiguous() for kind in ("k", "v"))
        layers.append((key_scale, value_scale))
    if all(bool((scale == 1).all()) for pair in layers for scale in pair):
        return None
    return KVScales(layers, "folder")


def find_scales(decoder: Decoder, ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Run a text through a model and see how large its keys and values get.

    Args:
        decoder: the model, in the format that it will run in.
        ids: the text; its first `TOKENS` tokens are read, from position 0: the first tokens of a text have
            the largest keys.

    Returns:
        scales of keys and of values for each layer, [J] float32 both.

    Raises:
        UsageError: there is no text.
    """
    if not ids:
        raise UsageError("8-bit float keys and values without a text to find their scales from. Expected one; give it.")
    ids = ids[: min(TOKENS, decoder.config.context_length)]
    model = CachedModel(decoder, kv_tokens=len(ids), vocab_size=decoder.config.vocab_size, kv=KV_FORMATS["f32"])
    model.hidden([Feed(0, ids, 0, len(ids))])
    return [(_scale(layer.keys), _scale(layer.values)) for layer in model.pool.layers]


def _scale(written: Tensor) -> Tensor:
    scale_J = written.abs().amax((0, 2, 3)) / LARGEST
    return scale_J.where(scale_J > 0, 1.0)
