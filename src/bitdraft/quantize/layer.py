"""One layer rounded by a recipe: scales chosen and folded, then each weight rounded, all on what the layer reads.

Shape suffixes: N outputs, K inputs, T rows, G groups, S inputs of a group.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..formats import Format, Recipe
from ..models.config import ModelConfig
from ..ops.encoding import dequantize, rotate, round_activations
from ..ops.packed import Packed
from .awq import awq_scale
from .calibrate import LayerInputs
from .fold import MAKERS, ORDER, READERS, best_scale, by_value_head, divide_out
from .gptq import Feedback, feedback, gptq, shrinkage
from .outliers import KeptColumns, choose_columns, decoupled, with_outliers, without
from .rounding import clipped, nearest
from .smooth import smooth_scale

UNCLIPPED = ("self_attn.q_proj", "self_attn.k_proj")
"""Not clipped on data: their outputs meet in a product, where an error measured alone misleads (as in the code of AWQ's
authors)."""

Kept = Callable[[str], Packed]
"""A linear layer's weight as the model's file stores it, by name within the layer."""


def product_sizes(forms: Mapping[str, Format], recipe: Recipe, inputs: Mapping[str, int]) -> dict[str, int]:
    """How many channels `LayerInputs` sums products of, by inputs: all for GPTQ, those of the largest group otherwise.

    Args:
        forms: the format of each linear layer, by name within the layer.
        recipe: the method.
        inputs: channels, by the keys of `READERS`.
    """
    sizes = {}
    for name, readers in READERS.items():
        integers = [forms[reader] for reader in readers if forms[reader].kind == "integer"]
        if recipe.method.endswith("gptq") and integers:
            sizes[name] = inputs[name]
        elif recipe.method in ("nearest", "clip"):  # with outliers: these round without data
            sizes[name] = 1
        else:
            sizes[name] = max((form.group_size or 1 for form in integers), default=1)
    return sizes


def round_layer(
    tensors: dict[str, Tensor],
    forms: Mapping[str, Format],
    recipe: Recipe,
    stats: LayerInputs,
    config: ModelConfig,
    kept: Kept,
) -> tuple[dict[str, Packed], dict[str, float], dict[str, KeptColumns]]:
    """Round one layer on what it reads.

    Args:
        tensors: the layer's tensors by name within the layer ('self_attn.q_proj.weight', ...), float32; norms and
            biases are replaced where a scale is folded into them.
        forms: the format of each linear layer, by name within the layer, without '.weight'.
        recipe: the method.
        stats: what the linear layers read.
        config: the model's sizes.
        kept: gives what a `stored` format keeps.

    Returns:
        the weights by name within the layer; the relative error of their outputs, sqrt(sum of squares over sum of
        squares), on the rows that were kept; and the inputs that they keep in 16 bits, where the recipe asks for such.
    """
    packed: dict[str, Packed] = {}
    errors: dict[str, float] = {}
    outliers: dict[str, KeptColumns] = {}
    for name in ORDER:
        weights = {reader: tensors[f"{reader}.weight"] for reader in READERS[name]}
        rows_TK = stats.rows(name)
        exact = {reader: rows_TK @ weight.T for reader, weight in weights.items()}
        columns_k: Tensor | None = None
        if recipe.outliers:
            columns_k = choose_columns(weights, forms, rows_TK, stats.mean_square(name), recipe.outliers)
        scale_K = _scale(name, weights, forms, recipe, stats, config, columns_k)
        made = _round(name, weights, forms, recipe, stats, scale_K, kept, columns_k)
        error = {reader: _output_error(made[reader], rows_TK, scale_K, exact[reader]) for reader in weights}
        if recipe.scaling:
            plain = {
                reader: with_outliers(
                    _kept_or_nearest(reader, without(w, columns_k), forms[reader], kept), w, columns_k
                )
                for reader, w in weights.items()
            }
            plain_error = {reader: _output_error(plain[reader], rows_TK, None, exact[reader]) for reader in weights}
            if sum(plain_error.values()) < sum(error.values()):
                made, error, scale_K = plain, plain_error, None
        for reader, weight in weights.items() if recipe.outliers else ():
            before = _output_error(nearest(weight, forms[reader]), rows_TK, None, exact[reader])
            outliers[reader] = _kept_columns(made[reader], 1 - error[reader] / max(before, 1e-30))
        if scale_K is not None:
            divide_out(tensors, name, scale_K, config)
        packed |= made
        errors |= {reader: (error[reader] / max(float(exact[reader].square().sum()), 1e-30)) ** 0.5 for reader in made}
    return packed, errors, outliers


def _kept_columns(packed: Packed, removed: float) -> KeptColumns:
    assert packed.outliers is not None
    return KeptColumns(packed.columns, removed, packed.outliers.nbytes)


def _scale(
    name: str,
    weights: Mapping[str, Tensor],
    forms: Mapping[str, Format],
    recipe: Recipe,
    stats: LayerInputs,
    config: ModelConfig,
    columns_k: Tensor | None,
) -> Tensor | None:
    """What these inputs are to be divided by, [K]; None where the method does not say, or where a weight that would
    have to change is kept as it is stored."""
    touched = [*weights, *filter(None, [MAKERS[name]])]
    if recipe.scaling is None or any(forms[reader].kind == "stored" for reader in touched):
        return None
    if recipe.scaling == "awq":
        magnitude_K = stats.mean_magnitude(name)
        scale_of = awq_scale(by_value_head(magnitude_K, config, largest=False) if name == "o" else magnitude_K)
    else:
        largest_K = stats.largest(name)
        weight_K = torch.stack([weight.abs().amax(0) for weight in weights.values()]).amax(0)
        if name == "o":
            largest_K, weight_K = (by_value_head(of, config, largest=True) for of in (largest_K, weight_K))
        scale_of = smooth_scale(largest_K, weight_K)
    readers = [(without(weight, columns_k), forms[reader]) for reader, weight in weights.items()]
    return best_scale(scale_of, readers, without(stats.rows(name), columns_k))


def _round(
    name: str,
    weights: Mapping[str, Tensor],
    forms: Mapping[str, Format],
    recipe: Recipe,
    stats: LayerInputs,
    scale_K: Tensor | None,
    kept: Kept,
    columns_k: Tensor | None,
) -> dict[str, Packed]:
    """The readers of one kind of inputs, rounded for inputs divided by a scale, some of them kept in 16 bits."""
    packed = {}
    given: Feedback | None = None
    for reader, weight in weights.items():
        form = forms[reader]
        whole = weight if scale_K is None else weight * scale_K
        scaled = without(whole, columns_k)
        if form.kind != "integer" or recipe.method == "nearest":
            made = _kept_or_nearest(reader, scaled, form, kept)
        elif recipe.method == "clip":
            made = clipped(scaled, form)
        elif recipe.method.endswith("gptq"):
            if given is None:
                products_KK = _products(stats, name, len(weight[0]), scale_K)[0]
                given = feedback(
                    decoupled(products_KK, columns_k), shrink=shrinkage(stats.tokens(name)), by_activation=True
                )
            made = gptq(scaled, form, given)
        elif reader in UNCLIPPED:
            made = nearest(scaled, form)
        else:
            products_GSS = None if form.group_size is None else _products(stats, name, form.group_size, scale_K)
            made = clipped(scaled, form, products_GSS)
        packed[reader] = with_outliers(made, whole, columns_k)
    return packed


def _products(stats: LayerInputs, name: str, size: int, scale_K: Tensor | None) -> Tensor:
    """The products of the inputs of every group as they are after scaling, [G, S, S]."""
    products_GSS = stats.products(name, size)
    if scale_K is None:
        return products_GSS
    scale_GS = scale_K.view(-1, size)
    return products_GSS / (scale_GS[:, :, None] * scale_GS[:, None, :])


def _kept_or_nearest(reader: str, weight: Tensor, form: Format, kept: Kept) -> Packed:
    return form.keep(kept(reader)) if form.kind == "stored" else nearest(weight, form)


def _output_error(packed: Packed, rows_TK: Tensor, scale_K: Tensor | None, exact_TN: Tensor) -> float:
    """Squared error of the outputs, the rounding of the inputs included."""
    x_TK = rows_TK if scale_K is None else rows_TK / scale_K
    x_TK = rotate(x_TK, packed.rotation) if packed.rotation else x_TK
    x_TK = round_activations(x_TK, packed.activation, None if packed.outliers is None else packed.outliers.columns)
    return float((x_TK @ dequantize(packed).T).sub_(exact_TN).square_().sum())
