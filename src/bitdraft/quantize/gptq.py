"""GPTQ (Frantar et al., 2210.17323): column by column, the columns to come making up for the error so far.

What is minimised is the squared error of the outputs, `d^T H d` for each output with d the error of its weights and
`H = X^T X` the products of the inputs (the paper's H is twice that: the factor changes no choice). With
`H^-1 = U^T U`, U upper triangular (section 3.4), rounding column k leaves the error `e_k = (w_k - q_k) / U_kk`, the
columns j > k move by `-e_k U_kj`, and the error in all is the sum of `e_k^2`.

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

_BLOCK = 128
"""Columns whose feedback to all later ones is given in one product; a multiple of every group size."""


@dataclass(frozen=True)
class Feedback:
    """What a column's error does to the columns after it, for the inputs of one linear layer or of several.

    Attributes:
        products: X^T X, [K, K] float32, damped.
        damping: what was added to the products' diagonal.
        upper: U with `products^-1 = U^T U`, [K, K] float32, upper triangular.
        order: the columns in the order in which they are rounded, [K]; both matrices are in this order.
    """

    products: Tensor
    damping: float
    upper: Tensor
    order: Tensor


def feedback(products_KK: Tensor, *, by_activation: bool) -> Feedback:
    """Prepare for rounding whatever reads inputs with these products.

    Args:
        products_KK: X^T X over the calibration tokens, [K, K] float32.
        by_activation: round the columns with the largest inputs first, when most others are left to make up for them.

    Raises:
        NumericsError: the products are no products of real inputs: they have no Cholesky factor even when damped.
    """
    K = len(products_KK)
    diagonal_K = products_KK.diagonal()
    order = diagonal_K.argsort(descending=True, stable=True) if by_activation else torch.arange(K)
    damped = products_KK[order][:, order]
    share = DAMPING * max(float(diagonal_K.mean()), 1e-20)
    added = 0.0
    for _ in range(4):
        damped.diagonal().add_(share)
        added += share
        # H turned by 180 degrees is L L^T, so H = R R^T with R = L turned, upper triangular: U = R^-1.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            return Feedback(damped, added, _inverse(lower).flip(0, 1), order)
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
    code_KN, error_N = torch.empty_like(w_KN), torch.zeros(N)
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
        error_N += e_BN.square().sum(0)
    made = grid.pack(code_KN.T.contiguous())
    return _better(weight_NK, form, given, made, error_N)


def output_error(off_NK: Tensor, given: Feedback) -> Tensor:
    """`d^T H d` of each output with the damped products, [N]."""
    off_NK = off_NK[:, given.order]
    return (off_NK @ given.products).mul_(off_NK).sum(-1)


def _better(weight_NK: Tensor, form: Format, given: Feedback, made: Packed, error_N: Tensor) -> Packed:
    """Outputs of `made`, and where rounding to nearest has the smaller error on the data, those of that.

    The data's error is what the damped products say, less the damping's share in it.
    """
    plain = form.encode(weight_NK)
    off_NK, plain_off_NK = form.decode(made).sub_(weight_NK), form.decode(plain).sub_(weight_NK)
    gain_N = output_error(plain_off_NK, given) - error_N
    gain_N -= given.damping * (plain_off_NK.square().sum(-1) - off_NK.square().sum(-1))
    use = gain_N > 0

    def choose(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
        return None if ours is None or theirs is None else torch.where(use[:, None], ours, theirs)

    codes = torch.where(use[:, None], made.codes, plain.codes)
    return Packed(
        form.name,
        plain.shape,
        form.bits,
        form.activation,
        codes,
        choose(made.scales, plain.scales),
        choose(made.zeros, plain.zeros),
    )


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
