"""A model beside its original, layer by layer: one layer of each in memory at a time.

Both models read the same text. Each layer is run on the original's rows, which shows its own error, and on the model's,
which shows what the errors of all layers so far have become.

Shape suffixes: R rows of text, D hidden size, K inputs, N outputs, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import ops
from ..formats import KV_FORMATS
from ..models.cached import CachedModel
from ..models.checkpoint import Checkpoint, Weights
from ..models.config import ModelConfig
from ..models.decoder import Decoder, PreparedModel, prepare_layer
from ..models.tensor_names import mlp_norm, tensor_shapes
from ..ops import Stack
from ..ops.encoding import is_finite
from ..ops.packed import float_matrix
from ..quantize.fold import READERS
from ..types import Feed
from .model_doctor_weights import Folding, Match, TensorFacts, compare, some_rows, spread, tensor_facts, values

Progress = Callable[[int, int | None, str], None]

_OUTPUT_ROWS = 48
"""Rows of text that the outputs of single linear layers are compared on."""
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens", "lm_head", "model.norm.weight"


@dataclass(frozen=True)
class VectorFacts:
    """A norm or a bias beside the original's.

    Attributes:
        name: Hugging Face's.
        finite: whether every value is a number.
        error: relative; 0 where it is folded into the weights that read it, and they say so.
        offset: the mean of the difference. spread: its standard deviation.
        slack: error that says nothing, because what was folded into it is only known so well.
    """

    name: str
    finite: bool
    error: float
    offset: float
    spread: float
    slack: float = 0.0


@dataclass(frozen=True)
class LayerFacts:
    """What a layer does to the text; medians over the rows of relative errors.

    Attributes:
        layer: its number.
        own_error: of what it adds to the residual stream, on the original's rows.
        stream_error: of the residual stream behind it, with the errors of all layers before.
    """

    layer: int
    own_error: float
    stream_error: float


@dataclass(frozen=True)
class Walk:
    """What a walk through the layers found.

    Attributes:
        tensors, vectors, layers: the facts. foldings: of the linear layers that have one.
        hidden, hidden_original: residual rows behind the last layer, [R, D]; None where the model is not finite, and
            where there is no original.
    """

    tensors: tuple[TensorFacts, ...]
    vectors: tuple[VectorFacts, ...]
    layers: tuple[LayerFacts, ...]
    foldings: Mapping[str, Folding]
    hidden: Tensor | None
    hidden_original: Tensor | None


def as_stored(checkpoint: Checkpoint) -> Weights:
    """A model's weights as its file stores them, finite or not; most lie in the file's pages."""
    config = checkpoint.config
    packed = {name: checkpoint.packed(f"{name}.weight") for name in config.linear_shapes()}
    packed[EMBEDDING] = packed[HEAD] if config.tied_head else checkpoint.packed(f"{EMBEDDING}.weight")
    names = [name for name, shape in tensor_shapes(config).items() if len(shape) == 1]
    return Weights(config, packed, {name: checkpoint.tensor(name) for name in names})


def walk(model: Weights, original: Weights | None, ids: Sequence[int], progress: Progress | None = None) -> Walk:
    """Go through two models of the same sizes, layer by layer.

    Args:
        model: the one that is examined.
        original: what it should be; None looks at the model alone.
        ids: token ids of a text that both know.
        progress: called with (layers done, layers, what).
    """
    tensors: list[TensorFacts] = []
    vectors: list[VectorFacts] = []
    layers: list[LayerFacts] = []
    foldings: dict[str, Folding] = {}
    own_RD: Tensor | None = _embed(model, ids)
    exact_RD = None if original is None else _embed(original, ids)
    for i in range(model.config.num_layers):
        inputs: dict[str, Tensor] = {}
        prefix = f"model.layers.{i}."
        next_RD = None
        if original is not None and exact_RD is not None:
            next_RD = _run(original, i, exact_RD, inputs)
            found, norms = _foldings(model, original, prefix)
            foldings |= {prefix + name: folding for name, folding in found.items()}
            vectors += norms
        else:
            vectors += [_vector(model, None, n) for n in model.tensors if n.startswith(prefix)]
        for key, readers in READERS.items():
            for name in readers:
                tensors.append(_tensor(model, original, prefix + name, foldings, inputs.get(key)))
        sound = all(t.finite for t in tensors[-7:]) and all(v.finite for v in vectors if v.name.startswith(prefix))
        own_RD, facts = _layer(model, i, sound, own_RD, exact_RD, next_RD)
        layers += facts
        exact_RD = next_RD
        if progress:
            progress(i + 1, model.config.num_layers + 1, "examining layers")
    vectors.append(_vector(model, original, FINAL_NORM))
    for name in (HEAD,) if model.config.tied_head else (HEAD, EMBEDDING):
        tensors.append(_tensor(model, original, name, foldings, None))
    if progress:
        progress(model.config.num_layers + 1, model.config.num_layers + 1, "examining layers")
    return Walk(tuple(tensors), tuple(vectors), tuple(layers), foldings, own_RD, exact_RD)


def hidden_rows(model: Weights, ids: Sequence[int]) -> Tensor:
    """Residual rows behind the last layer, [R, D] float32, one layer in memory at a time."""
    x_RD = _embed(model, ids)
    for i in range(model.config.num_layers):
        x_RD = _run(model, i, x_RD)
    return x_RD


def logits(model: Weights, x_RD: Tensor) -> Tensor:
    """Final norm and head over residual rows: [R, V] float32."""
    head = ops.prepare(model.packed[HEAD])
    return Decoder(PreparedModel(model.config, Stack(), model.tensors[FINAL_NORM], head, head, 0)).logits(x_RD)


def _embed(model: Weights, ids: Sequence[int]) -> Tensor:
    return values(some_rows(model.packed[EMBEDDING], torch.tensor(ids))) * model.config.embedding_scale


def _run(model: Weights, i: int, x_RD: Tensor, inputs: dict[str, Tensor] | None = None) -> Tensor:
    """One layer over residual rows, [R, D]; what its linear layers read goes into `inputs`, by the keys of `READERS`.

    The layer runs as a decoder of its own, with the rows as its embedding.
    """
    rows = ops.prepare(float_matrix(x_RD))
    alone = PreparedModel(
        config=replace(model.config, num_layers=1, vocab_size=len(x_RD), embedding_scale=1.0),
        layers=Stack([prepare_layer(model, i)]),
        final_norm=torch.ones(x_RD.shape[1]),
        head=rows,
        embedding=rows,
        packed_bytes=0,
    )
    cached = CachedModel(Decoder(alone), kv_tokens=len(x_RD), vocab_size=len(x_RD), kv=KV_FORMATS["f32"])

    def keep(_: int, name: str, x_RK: Tensor) -> None:
        assert inputs is not None
        inputs[name] = x_RK.clone()

    feed = Feed(0, tuple(range(len(x_RD))), 0, 0)
    return cached.hidden([feed], keep if inputs is not None else None)


def _layer(
    model: Weights, i: int, sound: bool, own_RD: Tensor | None, exact_RD: Tensor | None, next_RD: Tensor | None
) -> tuple[Tensor | None, list[LayerFacts]]:
    """The model's own rows behind a layer, and its errors; nothing from the first layer on that is not finite."""
    if not sound or own_RD is None:
        return None, []
    behind_RD = _run(model, i, own_RD)
    if exact_RD is None or next_RD is None:
        return behind_RD, []
    same_RD = _run(model, i, exact_RD)
    own = _median_error(same_RD - next_RD, next_RD - exact_RD)
    return behind_RD, [LayerFacts(i, own, _median_error(behind_RD - next_RD, next_RD))]


def _median_error(lost_RD: Tensor, whole_RD: Tensor) -> float:
    """Over the rows: a few of them are a hundred times larger than all others, and would drown these."""
    return float((lost_RD.norm(dim=-1) / whole_RD.norm(dim=-1).clamp(min=1e-30)).median())


def _tensor(
    model: Weights, original: Weights | None, name: str, foldings: Mapping[str, Folding], x_RK: Tensor | None
) -> TensorFacts:
    packed = model.packed[name]
    finite = is_finite(packed)
    match: Match | None = None
    if original is not None and finite and is_finite(original.packed[name]):
        rows = None if x_RK is None else x_RK[:: max(1, len(x_RK) // _OUTPUT_ROWS)]
        match = compare(original.packed[name], packed, foldings.get(name, Folding()), rows)
    return tensor_facts(name, packed, finite, match)


def _vector(
    model: Weights, original: Weights | None, name: str, outputs: Tensor | None = None, slack: float = 0.0
) -> VectorFacts:
    found = model.tensors[name]
    finite = bool(found.isfinite().all())
    if original is None or not finite or name not in original.tensors:
        return VectorFacts(name, finite, 0.0, 0.0, 0.0)
    wanted = original.tensors[name] if outputs is None else original.tensors[name] * outputs
    lost = found - wanted
    error = float(lost.norm() / wanted.norm().clamp(min=1e-30))
    return VectorFacts(name, True, error, float(lost.mean()), float(lost.std()), slack)


def _foldings(model: Weights, original: Weights, prefix: str) -> tuple[dict[str, Folding], list[VectorFacts]]:
    """What a layer's weights were scaled by before rounding, and its vectors; a norm that is no fold is a fault."""
    found: dict[str, Folding] = {}
    vectors: list[VectorFacts] = []
    norms = {
        "input_layernorm.weight": ("qkv", "self_attn.q_proj"),
        f"{mlp_norm(model.config)}.weight": ("gate_up", "mlp.up_proj"),
    }
    for name, (key, reader) in norms.items():
        inputs = _norm_fold(model, original, prefix + name, prefix + reader)
        vectors.append(
            _vector(model, original, prefix + name)
            if inputs is None
            else VectorFacts(prefix + name, True, 0.0, 0.0, 0.0)
        )
        found |= {reader: Folding(inputs=inputs) for reader in READERS[key]}
    noise = 0.0
    for writer, reader in (("self_attn.v_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj")):
        outputs, inputs, unknown = _row_fold(model, original, prefix + writer, prefix + reader, found[writer])
        found[writer], found[reader] = replace(found[writer], outputs=outputs), Folding(inputs=inputs)
        noise = unknown if writer.endswith("v_proj") else noise
    for whole in model.tensors:
        if whole.startswith(prefix) and whole.removeprefix(prefix) not in norms:
            folded = whole.endswith("v_proj.bias")
            outputs = found["self_attn.v_proj"].outputs if folded else None
            vectors.append(_vector(model, original, whole, outputs, noise * folded))
    return found, vectors


def _norm_fold(model: Weights, original: Weights, norm: str, reader: str) -> Tensor | None:
    """The model's norm over the original's, where the weights that read it make up for it."""
    own, exact = model.tensors[norm], original.tensors[norm]
    ratio = torch.where(exact.abs() > 1e-6, own / exact, 1.0)
    if not bool(((ratio > 0) & ratio.isfinite()).all()) or float((ratio - 1).abs().max()) < 0.02:
        return None
    rows = spread(model.packed[reader].shape[0])
    found = values(some_rows(model.packed[reader], rows))
    wanted = values(some_rows(original.packed[reader], rows))
    # Up's own rows may be scaled as well: directions are compared, not lengths.
    cosines = [torch.cosine_similarity(found, w, dim=1).median() for w in (wanted / ratio, wanted)]
    return ratio if bool(cosines[0] >= cosines[1]) else None


def _row_fold(
    model: Weights, original: Weights, writer: str, reader: str, folding: Folding
) -> tuple[Tensor | None, Tensor | None, float]:
    """Factors of the writer's rows that the reader's columns make up for: of its rows [N], of the reader's inputs [K].

    None where there are none. The third is how well they could be known, a relative error.
    """
    made, read = (values(model.packed[name]) for name in (writer, reader))
    made_exact, read_exact = folding.apply(values(original.packed[writer])), values(original.packed[reader])
    (rows, rows_like), (columns, columns_like) = _gains(made_exact, made, 1), _gains(read_exact, read, 0)
    heads = writer.endswith("v_proj")
    if heads:
        columns, columns_like = (_mean_of_query_heads(c, model.config) for c in (columns, columns_like))
    common = float((rows + columns).median())
    if abs(common) > 0.8:  # no fold: one of the two is wrong by that factor, and most folds leave the mean as it was
        at_fault = abs(float(rows.median())) > abs(float(columns.median()))
        rows, columns = rows - common * at_fault, columns - common * (not at_fault)
    # Rounding alone makes gains smaller than 1, of rows and columns alike, and half their difference does not see it.
    log, apart = (rows - columns) / 2, rows + columns - (rows + columns).median()
    noise = float(apart.square().mean().sqrt())
    # Where they disagree one of them is at fault, or rounded to next to nothing; the other knows.
    known = torch.where(rows_like > columns_like, rows, -columns)
    known = torch.where((rows_like > 0.7) & (columns_like > 0.7), -columns, known)
    log = torch.where(apart.abs() > 0.3 + 4 * apart.abs().median(), known, log)
    log = torch.where(torch.maximum(rows_like, columns_like) > 0.4, log, 0.0)
    outputs = log.exp2()
    inputs = _by_query_heads(outputs, model.config) if heads else outputs
    folded = _relative(made, made_exact * outputs[:, None]), _relative(read, read_exact / inputs)
    plain = _relative(made, made_exact), _relative(read, read_exact)
    # Factors that were fitted to rounding errors gain next to nothing.
    better = all(a < 1.1 * b for a, b in zip(folded, plain, strict=True)) and sum(folded) < 0.97 * sum(plain)
    return (outputs, inputs, noise) if better else (None, None, noise)


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _mean_of_query_heads(columns: Tensor, config: ModelConfig) -> Tensor:
    """The mean over the query heads that read one value head, for each of its channels."""
    return columns.view(config.num_kv_heads, -1, config.head_dim).mean(1).flatten()


def _gains(wanted: Tensor, found: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Of every row, or column: log2 of the factor that it was scaled by, and its correlation with the original's."""
    product, square = (wanted * found).sum(dim), wanted.square().sum(dim).clamp(min=1e-30)
    gain = (product / square).clamp(2**-8, 2**8).log2()
    return gain, product / (square * found.square().sum(dim)).sqrt().clamp(min=1e-30)


def _by_query_heads(rows: Tensor, config: ModelConfig) -> Tensor:
    """A number for each channel of the value heads, repeated for the query heads that read it."""
    heads = rows.view(config.num_kv_heads, 1, config.head_dim)
    return heads.expand(-1, config.num_heads // config.num_kv_heads, -1).flatten()
