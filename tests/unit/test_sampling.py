"""Logits to distribution, against a second implementation that sorts, and by hand."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.decoding.sampling import History, distribution, greedy_tokens, target_distributions, verifiable
from bitdraft.errors import NothingLeftError, NumericsError, ShapeError, UsageError
from bitdraft.types import SamplingParams

START = History.after_prompt((0,))
PLAIN = SamplingParams()


def history_of(prompt: list[int], output: list[int]) -> History:
    history = History.after_prompt(prompt)
    for token in output:
        history = history.extended(token)
    return history


def of(*logits: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(logits, dtype=dtype)


def banned(params: SamplingParams, output: list[int]) -> set[int]:
    """Ids that would complete a bad word, or are not allowed."""
    fitting = [word for word in params.bad_words if len(word) <= len(output) + 1]
    ends = {word[-1] for word in fitting if tuple(output[len(output) + 1 - len(word) :]) == word[:-1]}
    return ends | (set(range(6)) - params.allowed_ids if params.allowed_ids is not None else set())


def reference(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], ending: set[int]
) -> np.ndarray:
    """The same rules, read from their definitions, one token at a time."""
    values = list(logits)
    for token in set(prompt) | set(output):
        value = values[token]
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        values[token] = value - params.frequency_penalty * output.count(token)
        if token in output:
            values[token] -= params.presence_penalty
    for token, bias in params.logit_bias.items():
        values[token] += bias
    if len(output) < params.min_tokens:
        values = [-math.inf if token in ending else value for token, value in enumerate(values)]
    values = [-math.inf if token in banned(params, output) else value for token, value in enumerate(values)]
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.temperature == 0:
        return np.eye(len(values))[order[0]]
    weights = {token: math.exp((values[token] - values[order[0]]) / params.temperature) for token in order}
    kept = order[: params.top_k] if params.top_k else order
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if params.top_p == 1 or mass < params.top_p * total - 1e-13:
            nucleus.append(token)
            mass += weights[token]
    kept = [token for token in nucleus if weights[token] >= params.min_p * (1 - 1e-13)]
    total = sum(weights[token] for token in kept)
    surprise = {token: -math.log(weights[token] / total) for token in kept if weights[token] > 0}
    entropy = sum(weights[token] / total * value for token, value in surprise.items())
    mass, typical = 0.0, []
    for token in sorted(surprise, key=lambda token: (abs(surprise[token] - entropy), token)):
        if params.typical_p == 1 or mass < params.typical_p * total - 1e-13:
            typical.append(token)
            mass += weights[token]
    kept, total = typical, sum(weights[token] for token in typical)
    return np.array([weights[token] / total if token in kept else 0.0 for token in range(len(values))])


tokens = st.integers(0, 5)
all_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 7),
    top_p=st.sampled_from([0.15, 0.52, 0.91, 1.0]),
    min_p=st.sampled_from([0.0, 0.13, 0.6]),
    repetition_penalty=st.sampled_from([1.0, 1.4, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.25]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-2.0, 0.5, 1.0]), max_size=2),
    typical_p=st.sampled_from([0.22, 0.71, 1.0]),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    allowed_ids=st.none() | st.frozensets(tokens, min_size=2),
    min_tokens=st.integers(0, 4),
)
levels = st.sampled_from([-math.inf, -1.5, -1.0, 0.0, 0.25, 1.0, 1.75])


@settings(max_examples=400, deadline=None)
@given(
    st.lists(levels, min_size=6, max_size=6),
    all_params,
    st.lists(tokens, min_size=1, max_size=5),
    st.lists(tokens, max_size=5),
    st.sets(tokens, max_size=2),
)
def test_agrees_with_the_definitions(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], ending: set[int]
) -> None:
    out = banned(params, output) | (ending if len(output) < params.min_tokens else set())
    if all(value == -math.inf or token in out for token, value in enumerate(logits)):
        with pytest.raises(NothingLeftError):
            distribution(of(*logits), params, history_of(prompt, output), ending)
        return
    probs = distribution(of(*logits), params, history_of(prompt, output), ending)
    assert np.allclose(probs.numpy(), reference(logits, params, prompt, output, ending), rtol=0, atol=1e-12)
    assert all(float(p) == 0 for p, logit in zip(probs, logits, strict=True) if logit == -math.inf)


def test_temperature_zero_is_the_lowest_of_the_largest() -> None:
    assert distribution(of(1, 3, 3, 2), SamplingParams(temperature=0), START).tolist() == [0, 1, 0, 0]


def test_temperature_divides_the_logits() -> None:
    probs = distribution(of(0, math.log(2)), SamplingParams(temperature=0.5), START)
    assert probs.tolist() == pytest.approx([0.2, 0.8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-320, 1e-50, 1e-6, 1e30])
def test_extreme_temperatures_stay_numbers(temperature: float, dtype: torch.dtype) -> None:
    probs = distribution(of(-1e30, 0, 2.5, 2.5, dtype=dtype), SamplingParams(temperature=temperature), START)
    assert probs.dtype == dtype
    assert float(probs.sum()) == pytest.approx(1, abs=1e-6)
    if temperature < 1:
        assert probs.tolist() == [0, 0, 0.5, 0.5]


def test_top_k_keeps_lower_ids_on_ties() -> None:
    probs = distribution(of(1, 0, 1, 1), SamplingParams(top_k=2), START)
    assert probs.tolist() == [0.5, 0, 0.5, 0]


def test_top_p_reaches_its_mass_exactly() -> None:
    """0.5 of (0.5, 0.25, 0.25) is reached by the first token alone; a little more takes the lower of the equal ones."""
    logits = of(math.log(0.25), math.log(0.5), math.log(0.25))
    assert distribution(logits, SamplingParams(top_p=0.5), START).tolist() == [0, 1, 0]
    assert distribution(logits, SamplingParams(top_p=0.51), START).tolist() == pytest.approx([1 / 3, 2 / 3, 0])


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    """0.4, 0.3, 0.3 after top-k 2 is 4/7, 3/7: 0.5 is reached by one token, of all three by two."""
    logits = of(0.4, 0.3, 0.3).log()
    assert distribution(logits, SamplingParams(top_k=2, top_p=0.5), START).tolist() == [1, 0, 0]
    assert distribution(logits, SamplingParams(top_p=0.5), START)[1] > 0


def test_min_p_is_relative_to_the_likeliest() -> None:
    probs = distribution(of(0.5, 0.3, 0.2).log(), SamplingParams(min_p=0.5), START)
    assert probs.tolist() == pytest.approx([0.625, 0.375, 0])


def test_typical_keeps_what_is_closest_to_the_entropy() -> None:
    """0.4, 0.3, 0.3: surprises 0.916, 1.204, 1.204 around an entropy of 1.089: the likeliest token is not typical."""
    logits = of(0.4, 0.3, 0.3).log()
    assert distribution(logits, SamplingParams(typical_p=0.29), START).tolist() == [0, 1, 0]
    assert distribution(logits, SamplingParams(typical_p=0.59), START).tolist() == pytest.approx([0, 0.5, 0.5])
    assert distribution(logits, SamplingParams(typical_p=0.61), START).tolist() == pytest.approx([0.4, 0.3, 0.3])


@pytest.mark.parametrize("params", [SamplingParams(typical_p=0.2), SamplingParams(typical_p=0.9, top_p=0.95)])
def test_typical_agrees_with_transformers(params: SamplingParams) -> None:
    """After top-p, where a large vocabulary needs more than the prefix that is sorted first."""
    from transformers import TopPLogitsWarper, TypicalLogitsWarper

    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    theirs = TopPLogitsWarper(params.top_p)(torch.tensor([[0]]), logits[None].clone())
    theirs = TypicalLogitsWarper(params.typical_p)(torch.tensor([[0]]), theirs)
    assert torch.allclose(distribution(logits, params, START), torch.softmax(theirs[0], 0), rtol=0, atol=1e-12)


def test_a_bad_word_is_banned_where_it_would_be_complete() -> None:
    """In the output only: what the prompt began may be ended. Also over the place where the table is made anew."""
    params = SamplingParams(bad_words=((1, 2, 3), (4,)))
    for prompt, output, out in (([1, 2], [], {4}), ([1], [2], {4}), ([0], [1, 2], {3, 4}), ([0], [2, 1], {4})):
        probs = distribution(torch.zeros(5), params, history_of(prompt, output))
        assert {token for token in range(5) if probs[token] == 0} == out
    for length in range(29, 36):
        probs = distribution(torch.zeros(5), params, history_of([0], [0] * length + [1, 2]))
        assert probs[3] == 0
    word = (*[0] * 69, 1)
    assert distribution(torch.zeros(5), SamplingParams(bad_words=(word,)), history_of([0], [0] * 69))[1] == 0
    assert distribution(torch.zeros(5), SamplingParams(bad_words=(word,)), history_of([0], [0] * 68))[1] > 0


@pytest.mark.parametrize("change", [{"bad_words": ((9,),)}, {"allowed_ids": frozenset({0, 9})}, {"logit_bias": {9: 1}}])
def test_ids_outside_the_vocabulary_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(change))} has ids .* to 9. Expected ids from 0 to 2"):
        distribution(of(0, 0, 0), SamplingParams(**change), START)


@pytest.mark.parametrize("change", [{"typical_p": 0.0}, {"bad_words": ((),)}, {"allowed_ids": frozenset()}])
def test_what_cannot_be_meant_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(change))} is .* Expected"):
        SamplingParams(**change)


@dataclass(frozen=True)
class Only:
    """A grammar of token sets, one for each position; behind the last one, and after a wrong token, all are allowed."""

    sets: tuple[frozenset[int], ...]
    vocab_size: int = 3

    @property
    def allowed_V(self) -> torch.Tensor | None:
        if not self.sets:
            return None
        return torch.tensor([token in self.sets[0] for token in range(self.vocab_size)])

    def after(self, token: int) -> "Only":
        return replace(self, sets=self.sets[1:] if self.sets and token in self.sets[0] else ())


def only(*sets: set[int]) -> History:
    return History.after_prompt((0,), Only(tuple(map(frozenset, sets))))


def test_a_grammar_moves_with_every_position_of_a_block() -> None:
    logits = torch.zeros(4, 3)
    probs = target_distributions(logits, [0, 1, 2], PLAIN, only({0}, {1}, {2}))
    assert probs.tolist()[:3] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert greedy_tokens(logits, [0, 1, 2], SamplingParams(temperature=0), only({0}, {1}, {2}))[:3] == (0, 1, 2)


def test_min_tokens_gives_way_where_a_grammar_only_allows_the_end() -> None:
    params = SamplingParams(min_tokens=3)
    assert distribution(torch.zeros(3), params, only({1, 2}), {2}).tolist() == [0, 1, 0]
    assert distribution(torch.zeros(3), params, only({2}), {2}).tolist() == [0, 0, 1]
    with pytest.raises(NothingLeftError, match="a grammar"):
        distribution(torch.zeros(3), SamplingParams(allowed_ids=frozenset({0})), only({2}), {2})


@pytest.mark.parametrize("temperature", [0, 1])
def test_bans_that_leave_nothing_are_no_error_where_nobody_comes(temperature: float) -> None:
    """Token 1 is not allowed, so what the grammar wants after it is of no importance; nor is what follows the end."""
    params = SamplingParams(temperature=temperature, allowed_ids=frozenset({0}))
    history = only({0, 1}, {2}, {2})
    for draft in ([1], [1, 2], [1, 0]):
        verifiable(torch.zeros(len(draft) + 1, 3), draft, params, history)
    verifiable(torch.zeros(3, 3), [0, 0], params, only({0}, set()))
    with pytest.raises(NothingLeftError):
        verifiable(torch.zeros(2, 3), [0], params, history)


def test_a_grammar_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"mask is \[3\] for logits \[4\]"):
        distribution(torch.zeros(4), PLAIN, only({1}))


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    history = history_of([0, 1], [2, 2])
    logits = of(1, -1, 1, 1)
    repeated = distribution(logits, SamplingParams(repetition_penalty=2), history).log()
    assert (repeated - repeated[3]).tolist() == pytest.approx([-0.5, -3, -0.5, 0])
    present = distribution(logits, SamplingParams(presence_penalty=0.5), history).log()
    assert (present - present[3]).tolist() == pytest.approx([0, -2, -0.5, 0])
    frequent = distribution(logits, SamplingParams(frequency_penalty=0.5), history).log()
    assert (frequent - frequent[3]).tolist() == pytest.approx([0, -2, -1, 0])


def test_min_tokens_bans_ending_ids_by_output_index() -> None:
    params = SamplingParams(min_tokens=2)
    for output, banned in (([], True), ([0], True), ([0, 0], False)):
        probs = distribution(of(0, 0, 0), params, history_of([0], output), {2, 99})
        assert (float(probs[2]) == 0) is banned


def test_a_bias_of_minus_infinity_bans() -> None:
    probs = distribution(of(5, 0, 0), SamplingParams(logit_bias={0: -math.inf}), START)
    assert probs.tolist() == [0, 0.5, 0.5]


@pytest.mark.parametrize("size", [3000, 40_000])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_top_p_of_a_large_vocabulary_is_the_sorted_one(size: int, top_p: float, spread: float) -> None:
    """Also where the nucleus is larger than the prefix that is looked at first."""
    logits = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) * spread
    probs = torch.softmax(logits, 0)
    order = torch.sort(probs, descending=True, stable=True).indices
    count = int((probs[order].cumsum(0) < top_p).sum()) + 1
    kept = distribution(logits, SamplingParams(top_p=top_p), START).nonzero()[:, 0]
    assert set(kept.tolist()) == set(order[:count].tolist())


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.89), SamplingParams(top_k=40, top_p=0.89)])
def test_a_small_nucleus_needs_no_sort_of_the_vocabulary(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, sort = [], torch.sort

    def spy(values: torch.Tensor, **options: bool) -> object:
        sizes.append(len(values))
        return sort(values, **options)

    monkeypatch.setattr(torch, "sort", spy)
    logits = torch.linspace(0, 1, 150_000)
    logits[7_000:7_040] = 20
    logits[9_000:] = -math.inf
    assert distribution(logits, params, START).nonzero()[:, 0].tolist() == list(range(7_000, 7_036))
    assert max(sizes) <= 1024


@given(st.lists(tokens, min_size=1, max_size=4), st.lists(tokens, max_size=100))
@settings(max_examples=50, deadline=None)
def test_a_history_counts_what_it_was_told(prompt: list[int], output: list[int]) -> None:
    history = history_of(prompt, output)
    counts = {}
    for ids, numbers in history.tables():
        counts.update(zip(ids.tolist(), numbers.tolist(), strict=True))
    assert counts == {token: output.count(token) for token in {*prompt, *output}}
    assert history.output_length == len(output)


def test_a_history_is_a_value() -> None:
    """What is drafted and thrown away leaves no trace, over the places where the table is made anew."""
    params = SamplingParams(frequency_penalty=1)
    committed = START
    for token in [1, 2] * 40:
        before = distribution(of(0, 0, 0), params, committed)
        speculative = committed
        for _ in range(40):
            speculative = speculative.extended(2)
        assert torch.equal(distribution(of(0, 0, 0), params, committed), before)
        committed = committed.extended(token)


def test_every_position_of_a_block_has_its_own_history() -> None:
    params = SamplingParams(presence_penalty=1, repetition_penalty=1.3, min_tokens=3)
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draft, history = [3, 3, 5], history_of([1], [4])
    block = target_distributions(logits, draft, params, history, {5})
    for i in range(4):
        assert torch.equal(block[i], distribution(logits[i], params, history_of([1], [4, *draft[:i]]), {5}))
    assert (block[:2, 5] == 0).all()
    assert (block[2:, 5] > 0).all()


BANS = {"allowed_ids": frozenset({0, 1, 3, 4, 5}), "bad_words": ((4, 3), (0,))}


@pytest.mark.parametrize("change", [{}, {"presence_penalty": 2.0}, {"logit_bias": {4: 3.0}}, {"min_tokens": 3}, BANS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_tokens_are_where_the_point_masses_are(change: dict[str, Any], dtype: torch.dtype) -> None:
    """With ties: logits rounded to halves. What is no number is named by its place in the output."""
    params = SamplingParams(temperature=0, **change)
    draft, history = [3, 4, 5], history_of([1], [4])
    logits = (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * 2).round().to(dtype) / 2
    expected = target_distributions(logits, draft, params, history, {5}).argmax(-1).tolist()
    assert list(greedy_tokens(logits, draft, params, history, {5})) == expected
    logits[2, 1] = torch.nan
    with pytest.raises(NumericsError, match=r"output token 3 .* NaN"):
        greedy_tokens(logits, draft, params, history, {5})


def test_the_logits_are_left_as_they_are() -> None:
    logits = of(1, 2, 3)
    params = SamplingParams(
        temperature=0.5, top_k=2, repetition_penalty=2, logit_bias={0: 1.0}, min_tokens=1, top_p=0.5, min_p=0.1
    )
    distribution(logits, params, START, {1})
    assert logits.tolist() == [1, 2, 3]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("logits", "says"),
    [
        ([0.0, math.nan], "hold NaN"),
        ([0.0, math.inf], "hold plus infinity"),
        ([-math.inf, -math.inf], "minus infinity for every token"),
    ],
)
def test_what_is_no_number_is_named_with_its_position(logits: list[float], says: str, temperature: float) -> None:
    params = replace(PLAIN, temperature=temperature)
    with pytest.raises(NumericsError, match=f"output token 2 .*{says}.*Expected"):
        distribution(of(*logits), params, history_of([0], [0, 1]))


def test_nan_behind_a_ban_is_still_named() -> None:
    with pytest.raises(NumericsError, match="NaN"):
        distribution(of(0, math.nan), SamplingParams(min_tokens=1), START, {1})


def test_bans_that_leave_nothing_are_named() -> None:
    with pytest.raises(NumericsError, match="min_tokens"):
        distribution(of(0, -math.inf), SamplingParams(min_tokens=1), START, {0})


@pytest.mark.parametrize("token", [-1, 3])
def test_a_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(UsageError, match=r"logit_bias has ids .* Expected ids from 0 to 2"):
        distribution(of(0, 0, 0), SamplingParams(logit_bias={token: 1.0}), START)


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    with pytest.raises(ShapeError, match="float32 or float64"):
        distribution(torch.zeros(3, dtype=torch.bfloat16), PLAIN, START)
    with pytest.raises(ShapeError, match="Expected \\[V\\]"):
        distribution(torch.zeros(1, 3), PLAIN, START)
    with pytest.raises(ShapeError, match="2 drafted tokens"):
        target_distributions(torch.zeros(2, 3), [0, 1], PLAIN, START)
