"""GPTQ (Frantar et al., 2210.17323): column by column, the columns to come making up for the error so far.

What is minimised is the squared error of the outputs, `d^T H d` for each output with d the error of its weights and
`H = X^T X` the products of the inputs (the paper's H is twice that: the factor changes no choice). With
`H^-1 = U^T U`, U upper triangular (section 3.4), rounding column k leaves the error `e_k = (w_k - q_k) / U_kk`, the
columns j > k move by `-e_k U_kj`.

Shape suffixes: N outputs, K inputs, G groups, S inputs of a group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import NumericsError
from ..formats import Format
from ..ops.encoding import pack_bits
from ..ops.packed import Packed
from .rounding import best_shrink

DAMPING = 0.01
"""Of the mean of H's diagonal, added to the diagonal (section 4 of the paper)."""

FEW_TOKENS = 2048
"""With so many tokens they are halved, see `shrinkage`: from 0.3 to 0.6 errors on other text hardly differ then."""

_BLOCK = 128
"""Columns whose feedback to all later ones is given in one product; a multiple of every group size."""


@dataclass(frozen=True)
class Feedback:
    """What a column's error does to the columns after it, for the inputs of one linear layer or of several.

    Attributes:
        seen: X^T X, [K, K] float32.
        products: the same, shrunk and damped, in the order in which the columns are rounded.
        upper: U with `products^-1 = U^T U`, [K, K] float32, upper triangular.
        order: the columns in the order in which they are rounded, [K].
    """

    seen: Tensor
    products: Tensor
    upper: Tensor
    order: Tensor


def shrinkage(tokens: int) -> float:
    """How far the products of different inputs are to be taken towards 0, after so many tokens.

    Few tokens tell them badly, and what is made up for on chance makes other text worse: without shrinking GPTQ has the
    smallest errors on its own calibration set and larger ones than AWQ on other text. The variance of a mean falls like
    1 / tokens, which the share of the diagonal in the best estimate follows (Ledoit and Wolf 2004, theorem 2.1).
    """
    return FEW_TOKENS / (FEW_TOKENS + tokens)


def feedback(products_KK: Tensor, *, shrink: float, by_activation: bool) -> Feedback:
    """Prepare for rounding whatever reads inputs with these products.

    Args:
        products_KK: X^T X over the calibration tokens, [K, K] float32.
        shrink: share by which the products of different inputs are lowered, from 0 to 1.
        by_activation: round the columns with the largest inputs first, when most others are left to make up for them.

    Raises:
        NumericsError: the products are no products of real inputs: they have no Cholesky factor even when damped.
    """
    K = len(products_KK)
    diagonal_K = products_KK.diagonal()
    order = diagonal_K.argsort(descending=True, stable=True) if by_activation else torch.arange(K)
    damped = products_KK[order][:, order].mul_(1 - shrink)
    damped.diagonal().copy_(diagonal_K[order])
    share = DAMPING * max(float(diagonal_K.mean()), 1e-20)
    added = 0.0
    for _ in range(4):
        damped.diagonal().add_(share)
        added += share
        # H turned by 180 degrees is L L^T, so H = R R^T with R = L turned, upper triangular: U = R^-1.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            return Feedback(products_KK, damped, _inverse(lower).flip(0, 1), order)
        share *= 9
    raise NumericsError(
        f"GPTQ: the products of {K} inputs have no Cholesky factor, though damped with {added:.3g}. Expected X^T X of "
        "finite inputs. Calibrate with other or more text."
    )


def _inverse(lower_KK: Tensor) -> Tensor:
    """The inverse of a lower triangular matrix, by halves: products take a tenth of the time of a triangular solver."""
    K = len(lower_KK)
    if K <= _BLOCK // 2:
        solved: Tensor = torch.linalg.solve_triangular(lower_KK, torch.eye(K), upper=False)
        return solved
    half = K // 2
    first, second = _inverse(lower_KK[:half, :half]), _inverse(lower_KK[half:, half:])
    whole = torch.zeros(K, K)
    whole[:half, :half], whole[half:, half:] = first, second
    whole[half:, :half] = -(second @ (lower_KK[half:, :half] @ first))
    return whole


def gptq(weight_NK: Tensor, form: Format, given: Feedback) -> Packed:
    """Round a weight, each output to whichever is better on the calibration set: GPTQ's codes or the nearest ones.

    Where columns go in their own order, a group's scale is found when its turn comes, for the weights as they are by
    then; where they go by activation, for the weights as they were at first, as groups are taken apart then.

    Args:
        weight_NK: [N, K] float32, finite.
        form: an integer format.
        given: of the inputs that the weight reads.
    """
    N, K = weight_NK.shape
    S = form.group_size or K
    in_turn = form.group_size is not None and bool((given.order[1:] > given.order[:-1]).all())
    grid = _Grid(form, N, K)
    if not in_turn:
        blocks = None if form.group_size is None else _diagonal_blocks(given, S)
        grid.fit(weight_NK, slice(None), blocks)
    w_KN = weight_NK.T[given.order].contiguous()
    code_KN = torch.empty_like(w_KN)
    for start in range(0, K, _BLOCK):
        end = min(start + _BLOCK, K)
        e_BN = torch.empty(end - start, N)
        for k in range(start, end):
            column = int(given.order[k])
            if in_turn and k % S == 0:
                group = slice(k, k + S)
                grid.fit(w_KN[group].T, slice(k // S, k // S + 1), given.products[group, group][None])
            code_KN[column], value_N = grid.round(w_KN[k], column // S)
            e_BN[k - start] = (w_KN[k] - value_N) / given.upper[k, k]
            w_KN[k + 1 : end].addr_(given.upper[k, k + 1 : end], e_BN[k - start], alpha=-1)
        w_KN[end:].addmm_(given.upper[start:end, end:].T, e_BN, alpha=-1)
    return _better(weight_NK, form, given, grid.pack(code_KN.T.contiguous()))


def _better(weight_NK: Tensor, form: Format, given: Feedback, made: Packed) -> Packed:
    """Outputs of `made`, and where rounding to nearest has the smaller error on the data, those of that."""

    def error_N(packed: Packed) -> Tensor:
        off_NK = form.decode(packed).sub_(weight_NK)
        return (off_NK @ given.seen).mul_(off_NK).sum(-1)

    plain = form.encode(weight_NK)
    use_N1 = (error_N(made) < error_N(plain))[:, None]

    def choose(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
        return None if ours is None or theirs is None else torch.where(use_N1, ours, theirs)

    codes = torch.where(use_N1, made.codes, plain.codes)
    scales, zeros = choose(made.scales, plain.scales), choose(made.zeros, plain.zeros)
    return Packed(form.name, plain.shape, form.bits, form.activation, codes, scales, zeros)


def _diagonal_blocks(given: Feedback, S: int) -> Tensor:
    """X^T X of the inputs of each group, [G, S, S]."""
    place = given.order.argsort().view(-1, S)
    return given.products[place[:, :, None], place[:, None, :]]


class _Grid:
    """Scales and zero points of a weight that is still to be rounded, as `formats.integer` chooses them."""

    def __init__(self, form: Format, outputs: int, inputs: int) -> None:
        groups = inputs // (form.group_size or inputs)
        self._form, self._shape = form, (outputs, inputs)
        self._low, self._high = (1 if form.bits == 8 else 0), 2**form.bits - 1
        self.scales_GN = torch.empty(groups, outputs)
        self.zeros_GN = torch.full((groups, outputs), 2.0 ** (form.bits - 1))

    def fit(self, weight_NK: Tensor, groups: slice, products_GSS: Tensor | None) -> None:
        """Choose for some groups' weights, ranges shrunk to what gives the least error."""
        found = self._form.encode(weight_NK.contiguous(), best_shrink(weight_NK.contiguous(), self._form, products_GSS))
        assert found.scales is not None
        self.scales_GN[groups] = found.scales.T
        if found.zeros is not None:
            self.zeros_GN[groups] = found.zeros.T.float()

    def round(self, w_N: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Codes from 0 and values of one column."""
        scale_N, zero_N = self.scales_GN[group], self.zeros_GN[group]
        code_N = (w_N / scale_N).round_().add_(zero_N).clamp_(self._low, self._high)
        return code_N, (code_N - zero_N).mul_(scale_N)

    def pack(self, code_NK: Tensor) -> Packed:
        """The weight that the codes make."""
        form = self._form
        codes = code_NK.sub_(128).to(torch.int8) if form.bits == 8 else pack_bits(code_NK, form.bits)
        zeros = None if form.symmetric else self.zeros_GN.T.to(torch.uint8).contiguous()
        return Packed(form.name, self._shape, form.bits, form.activation, codes, self.scales_GN.T.contiguous(), zeros)
