"""GPTQ against a slow oracle: one column at a time, the inverse taken anew by elimination, in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.errors import NumericsError
from bitdraft.formats import Format, get_format
from bitdraft.quantize.gptq import DAMPING, Feedback, feedback, gptq, shrinkage
from bitdraft.quantize.rounding import SHRINKS, clipped

SHRINK = 0.3


def prepared(products_KK: Tensor, *, by_activation: bool) -> Feedback:
    return feedback(products_KK, shrink=SHRINK, by_activation=by_activation)


def problem(seed: int, outputs: int = 24, inputs: int = 64, tokens: int = 200) -> tuple[Tensor, Tensor]:
    """A weight and inputs that are correlated, with a few large channels."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, inputs)) @ rng.standard_normal((inputs, inputs)) / inputs**0.5
    x[:, :: 1 + inputs // 4] *= 8
    weight = rng.standard_normal((outputs, inputs))
    return torch.from_numpy(weight).float(), torch.from_numpy(x).float()


def best_grid(weight_NS: Tensor, products_SS: Tensor | None, form: Format) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each output's group, [N] both: of all shares that are tried the one with least error."""
    best: list[tuple[float, Tensor, Tensor]] = []
    for w_S in weight_NS.float():
        tried = []
        for share in SHRINKS:
            packed = form.encode(w_S[None], share)
            off = (form.decode(packed)[0] - w_S).double()
            error = off @ off if products_SS is None else off @ products_SS @ off
            zero = 2.0 ** (form.bits - 1) if packed.zeros is None else float(packed.zeros)
            tried.append((float(error), packed.scales.double().squeeze(), torch.tensor(zero).double()))  # type: ignore[union-attr]
        best.append(min(tried, key=lambda t: t[0]))
    return torch.stack([scale for _, scale, _ in best]), torch.stack([zero for _, _, zero in best])


def oracle(weight_NK: Tensor, products_KK: Tensor, form: Format, by_activation: bool) -> Tensor:
    """The values that GPTQ rounds to, [N, K] float64, by the formulas of section 3.1 of the paper."""
    w, K = weight_NK.double().clone(), weight_NK.shape[1]
    S = form.group_size or K
    diagonal = products_KK.double().diagonal()
    H = products_KK.double() * (1 - SHRINK) + torch.diag(diagonal * SHRINK + DAMPING * diagonal.mean())
    inverse = torch.linalg.inv(H)
    order = sorted(range(K), key=lambda k: -float(diagonal[k])) if by_activation else list(range(K))
    grids = {}
    if by_activation or form.group_size is None:
        for g in range(K // S):
            part = slice(g * S, g * S + S)
            grids[g] = best_grid(w[:, part], None if form.group_size is None else H[part, part], form)
    low, high = (1, 255) if form.bits == 8 else (0, 2**form.bits - 1)
    for n, k in enumerate(order):
        g = k // S
        if g not in grids:
            grids[g] = best_grid(w[:, k : k + S], H[k : k + S, k : k + S], form)
        scale, zero = grids[g]
        value = (((w[:, k] / scale).round() + zero).clamp(low, high) - zero) * scale
        error = (w[:, k] - value) / inverse[k, k]
        for j in order[n + 1 :]:
            w[:, j] -= error * inverse[k, j]
        w[:, k] = value
        inverse = inverse - torch.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return w


def errors(values: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Squared error of each output over all tokens, [N] float64."""
    return (x.double() @ (values.double() - weight.double()).T).square().sum(0)


@pytest.mark.parametrize("name", ["w4a16", "w3a16-asym", "w2a16-asym", "w8a8"])
@pytest.mark.parametrize("by_activation", [False, True])
def test_values_are_those_of_the_slow_oracle(name: str, by_activation: bool) -> None:
    """Output by output. Float32 may choose another neighbour where two are equally near: one output in ten, at most."""
    form = get_format(name)
    weight, x = problem(1)
    products = x.T @ x
    made = form.decode(gptq(weight, form, prepared(products, by_activation=by_activation)))
    expected = oracle(weight, products, form, by_activation)
    better = errors(expected, weight, x) < errors(form.round(weight), weight, x)
    expected = torch.where(better[:, None], expected, form.round(weight).double())
    same = (made.double() - expected).abs().amax(1) < 1e-5
    assert same.float().mean() >= 0.9
    assert errors(made, weight, x).sum() < 1.02 * errors(expected, weight, x).sum()
    assert better.float().mean() > 0.5


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(["w4a16", "w4a16-asym-g64", "w3a8", "w2a16-asym", "w8a16"]),
    tokens=st.sampled_from([1, 10, 64, 300]),
    by_activation=st.booleans(),
)
def test_no_output_is_worse_than_to_nearest(seed: int, name: str, tokens: int, by_activation: bool) -> None:
    """Also with fewer tokens than inputs. The choice is made in float32: a part in a thousand, and what is nothing
    beside the output itself."""
    form = get_format(name)
    weight, x = problem(seed, outputs=6, inputs=128, tokens=tokens)
    made = form.decode(gptq(weight, form, prepared(x.T @ x, by_activation=by_activation)))
    slack = 1e-5 * (x.double() @ weight.double().T).square().sum(0)
    assert bool((errors(made, weight, x) <= 1.001 * errors(form.round(weight), weight, x) + slack).all())


@pytest.mark.parametrize("name", ["w4a16-asym", "w2a16-asym"])
def test_making_up_for_errors_gains_much_where_inputs_are_correlated(name: str) -> None:
    form = get_format(name)
    weight, x = problem(2, inputs=128, tokens=400)
    products = x.T @ x
    blocks = torch.stack([products[i : i + 32, i : i + 32] for i in range(0, 128, 32)])
    by_groups = errors(form.decode(clipped(weight, form, blocks)), weight, x).sum()
    for by_activation in (False, True):
        made = form.decode(gptq(weight, form, prepared(products, by_activation=by_activation)))
        assert errors(made, weight, x).sum() < 0.8 * by_groups


def test_weights_on_the_grid_stay_as_they_are() -> None:
    form = get_format("w4a16")
    weight, x = problem(3)
    weight = form.round(weight)
    made = gptq(weight, form, prepared(x.T @ x, by_activation=True))
    torch.testing.assert_close(form.decode(made), form.round(weight))


def test_dead_inputs_and_no_inputs_are_rounded_to_something_finite() -> None:
    form = get_format("w4a16-asym")
    weight, x = problem(4)
    x[:, ::3] = 0
    for products in (x.T @ x, torch.zeros(64, 64)):
        assert form.decode(gptq(weight, form, prepared(products, by_activation=True))).isfinite().all()


def test_products_of_nothing_real_are_refused() -> None:
    with pytest.raises(NumericsError, match="have no Cholesky factor, though damped"):
        prepared(-torch.eye(8), by_activation=False)


@pytest.mark.parametrize("inputs", [7, 64, 65, 300])
def test_the_factor_is_that_of_the_inverse(inputs: int) -> None:
    """U^T U H = 1 with H shrunk and damped, in the order that the columns go in."""
    _, x = problem(5, inputs=inputs, tokens=400)
    for by_activation in (False, True):
        found = prepared(x.T @ x, by_activation=by_activation)
        upper = found.upper.double()
        assert torch.equal(upper, upper.triu())
        one = upper.T @ upper @ found.products.double()
        torch.testing.assert_close(one, torch.eye(inputs).double(), rtol=0, atol=1e-3)  # float32, condition about 1000


def test_products_are_shrunk_less_the_more_tokens_tell_them() -> None:
    """Errors on other text: of few tokens shrinking lowers them, of many it does no good."""
    assert [shrinkage(tokens) for tokens in (512, 2048, 2**14)] == pytest.approx([0.8, 0.5, 1 / 9])
    form = get_format("w3a16-asym")
    rng = np.random.default_rng(6)
    mixing = rng.standard_normal((64, 64)) / 8
    inputs = [torch.from_numpy(rng.standard_normal((tokens, 64)) @ mixing).float() for tokens in (70, 20_000, 20_000)]
    weight = torch.from_numpy(rng.standard_normal((48, 64))).float()
    few, many, other = inputs

    def error(seen: Tensor, shrink: float) -> float:
        found = gptq(weight, form, feedback(seen.T @ seen, shrink=shrink, by_activation=True))
        return float(errors(form.decode(found), weight, other).sum())

    assert error(few, 0.5) < error(few, 0.0)
    assert error(many, 0.0) < error(many, 0.5)
    assert error(many, 0.0) < error(few, 0.5)
