"""The scales of an 8-bit float cache, found from data: one for each layer and KV head, of keys and of values.

A scale that all tokens share cannot follow a token, but it is free: no token carries one. E4M3 is as precise at a
hundredth of its range as at its end, so that the scales leave room for what the text did not show.

Shape suffixes: J KV heads.
"""

from collections.abc import Sequence

from torch import Tensor

from ..errors import UsageError
from ..formats.kv import KV_FORMATS
from ..types import Feed
from .cached import CachedModel
from .decoder import Decoder

TOKENS = 512
"""How much of a text is read."""
LARGEST = 448 / 2
"""Where the largest number seen lands in E4M3, whose own largest is 448. A rotary position alone may raise an entry of
a key by a factor of 1.41."""


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
