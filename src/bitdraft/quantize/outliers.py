"""The few inputs of a layer that are kept in 16 bits, in inputs and weights alike: which they are.

A row of 8-bit inputs has one step, which follows its largest input: a channel that is a hundred times larger than the
others leaves these a hundredth of the codes. Taken out of the row, it costs a narrow product in 16 bits beside the wide
one (LLM.int8(), Dettmers et al., 2208.07339, section 3.2; with columns that are chosen once, on data, as in QUIK,
Ashkboos et al., 2310.09259, section 3.1).

Shape suffixes: T rows (tokens), N outputs, K inputs, G groups of inputs that share a step, S inputs of a group, C
candidates, k columns that are kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..formats import Format
from ..ops.encoding import round_activations
from ..ops.packed import Outliers, Packed

CANDIDATES = 4
"""Columns that are looked at together, for each that is kept."""


@dataclass(frozen=True)
class KeptColumns:
    """What a linear layer keeps in 16 bits.

    Attributes:
        columns: which inputs, ascending.
        removed: share of the squared error of its outputs that they take away, on the rows that calibration kept:
            against the same format without them, rounded to nearest. Negative where the whole is worse.
        nbytes: what they take beside the codes.
    """

    columns: tuple[int, ...]
    removed: float
    nbytes: int


def choose_columns(
    weights: Mapping[str, Tensor], forms: Mapping[str, Format], rows_TK: Tensor, square_K: Tensor, count: int
) -> Tensor:
    """The inputs whose rounding costs the outputs most, in what they add and in what they do to the others.

    The expected squared error of the outputs, with S the columns that are kept, is taken as

        mean over rows of  sum over groups of inputs of  W_g max(|x_j|, j not in S)^2 / (12 * 127^2)
        +  sum over j not in S of e_j

    with W_g the squared weights of the group, and e_j what rounding the weights of j costs, E[x_j^2] |dw_j|^2. Where
    inputs are floats, the error of each input itself is in the place of the first. Of a few candidates all are kept at
    first, and given back one by one, the cheapest first: of two channels that are large in the same rows, taking
    either gains nothing alone.

    Args:
        weights: what reads these inputs, [N, K] float32 each.
        forms: their formats.
        rows_TK: a sample of the inputs.
        square_K: mean square of each input over all tokens.
        count: k; at most K.

    Returns:
        [k] int32, ascending.
    """
    K = rows_TK.shape[1]
    off_K, size_K = torch.zeros(K), torch.zeros(K)
    for reader, weight_NK in weights.items():
        off_K += (forms[reader].round(weight_NK) - weight_NK).square().sum(0)
        size_K += weight_NK.square().sum(0)
    cost_K = square_K * off_K
    kinds = {forms[reader].activation for reader in weights}
    activation = kinds.pop() if len(kinds) == 1 else "bf16"  # as a fused weight has it
    if activation not in ("int8", "int8_g32"):
        cost_K += (round_activations(rows_TK, activation) - rows_TK).square().mean(0) * size_K
        return cost_K.topk(count).indices.sort().values.int()
    step_K = size_K / (12 * 127**2)
    return _give_back(rows_TK.square(), step_K, cost_K, 32 if activation == "int8_g32" else K, count)


def _give_back(square_TK: Tensor, step_K: Tensor, cost_K: Tensor, group: int, count: int) -> Tensor:
    """Which `count` columns are left when the cheapest candidates have been given back.

    Args:
        square_TK: squares of the inputs.
        step_K: what the square of a group's largest input costs, summed over the inputs of the group.
        cost_K: what a column costs by itself.
        group: inputs that share a step.
        count: columns that are kept.
    """
    T, K = square_TK.shape
    group_K = torch.arange(K) // group
    groups = int(group_K[-1]) + 1
    padded = torch.nn.functional.pad(square_TK, (0, groups * group - K)).view(T, groups, group)
    share_G = torch.zeros(groups).index_add(0, group_K, step_K)
    candidates = min(CANDIDATES * count, K)
    floor_TG = padded.topk(min(candidates, group), -1).values[..., -1]
    worth_K = cost_K + (square_TK - floor_TG[:, group_K]).clamp(min=0).mean(0) * share_G[group_K]
    left_C = worth_K.topk(candidates).indices.sort().values
    rest = square_TK.index_fill(1, left_C, 0.0)
    largest_TG = torch.nn.functional.pad(rest, (0, groups * group - K)).view(T, groups, group).amax(-1)
    while len(left_C) > count:
        at_C = group_K[left_C]
        more_C = (square_TK[:, left_C] - largest_TG[:, at_C]).clamp(min=0).mean(0) * share_G[at_C] + cost_K[left_C]
        cheapest = int(more_C.argmin())
        column, place = int(left_C[cheapest]), int(at_C[cheapest])
        largest_TG[:, place] = torch.maximum(largest_TG[:, place], square_TK[:, column])
        left_C = torch.cat((left_C[:cheapest], left_C[cheapest + 1 :]))
    return left_C.int()


def without(x: Tensor, columns_k: Tensor | None) -> Tensor:
    """Rows or weights [any, K] with those columns 0, or as they are."""
    return x if columns_k is None else x.index_fill(1, columns_k.long(), 0.0)


def with_outliers(packed: Packed, weight_NK: Tensor, columns_k: Tensor | None) -> Packed:
    """A weight that was rounded without some columns, and those of the whole weight beside it."""
    if columns_k is None:
        return packed
    return replace(packed, outliers=Outliers(columns_k.clone(), weight_NK[:, columns_k.long()].bfloat16().contiguous()))


def decoupled(products_KK: Tensor, columns_k: Tensor | None) -> Tensor:
    """The products of inputs, [K, K], for GPTQ: columns that are kept make up for nobody's error."""
    if columns_k is None:
        return products_KK
    columns = columns_k.long()
    found = products_KK.index_fill(0, columns, 0.0).index_fill(1, columns, 0.0)
    found.diagonal()[columns] = found.diagonal().mean()
    return found
