"""Drafters that need no model: n-gram and scripted."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitdraft.decoding.protocols import Drafter, DraftRow
from bitdraft.decoding.sampling import History
from bitdraft.decoding.streams import Streams
from bitdraft.drafters.ngram import NGramDrafter
from bitdraft.drafters.point_mass import point_masses
from bitdraft.drafters.scripted import Scripted, always, always_wrong, half_wrong, oracle
from bitdraft.errors import UsageError
from bitdraft.types import SamplingParams


def row_of(tokens: list[int], budget: int, prompt_length: int = 1, request: int = 0) -> DraftRow:
    return DraftRow(
        request=request,
        tokens=tokens,
        prompt_length=prompt_length,
        budget=budget,
        sampling=SamplingParams(),
        history=History.after_prompt(tokens),
        randomness=Streams(0, request),
    )


def drafts(drafter: Drafter, *rows: DraftRow) -> list[list[int]]:
    proposal = drafter.propose(rows)
    assert proposal.probs is None
    return [list(block) for block in proposal.tokens]


def test_blocks_keep_their_lengths() -> None:
    proposal = point_masses([[4, 5], [], [6]])
    assert proposal.tokens == ((4, 5), (), (6,))
    assert point_masses([]).tokens == ()
    assert point_masses([[], []]).tokens == ((), ())


@pytest.mark.parametrize(
    ("tokens", "budget", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1, 2]),
        ([1, 2, 3], 2, []),
        ([5], 3, []),
        ([7, 1, 2, 3, 8, 2, 3, 9, 9, 1, 2, 3], 1, [8]),  # three tokens before two, though those occurred later
        ([7, 3, 4, 3, 5, 3], 2, [5, 3]),  # the latest of equal ones
        ([3, 4, 5, 6, 3, 3], 3, [4, 5, 6]),  # the latest with three tokens after it
        ([8, 3, 3], 5, [3]),  # too short, and the only one
        ([2, 2, 2, 2], 2, [2]),  # three tokens again, one after them: the longest suffix comes first
        ([1, 2, 1, 2, 1, 2], 4, [1, 2]),
        ([1, 2, 3, 4, 1, 2], 0, []),
    ],
)
def test_copies_what_followed_before(tokens: list[int], budget: int, expected: list[int]) -> None:
    assert drafts(NGramDrafter(3, 1), row_of(tokens, budget)) == [expected]


def naive(tokens: list[int], budget: int, max_n: int, min_n: int) -> list[int]:
    """The definition, looking everywhere."""
    for size in range(max_n, min_n - 1, -1):
        suffix = tokens[-size:]
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == suffix]
        if len(tokens) >= size and ends and budget:
            full = [end for end in ends if end + budget <= len(tokens)]
            end = max(full) if full else min(ends)
            return tokens[end : end + budget]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.integers(1, 4), max_size=30),
    st.integers(0, 6),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_agrees_with_looking_everywhere(text: list[int], steps: list[int], budget: int, one: int, other: int) -> None:
    """At every length on the way: the index grows with what is committed and is never made anew."""
    drafter = NGramDrafter(max(one, other), min(one, other))
    length = 1
    for step in [0, *steps]:
        length = min(length + step, len(text))
        known = text[:length]
        expected = naive(known, budget, max(one, other), min(one, other))
        assert drafts(drafter, row_of(known, budget)) == [expected]
        drafter.commit(0, length)


def test_requests_have_indexes_of_their_own() -> None:
    drafter = NGramDrafter(2, 1)
    rows = [row_of([1, 2, 3, 1], 2, request=7), row_of([1, 5, 5, 1], 2, request=8)]
    assert drafts(drafter, *rows) == [[2, 3], [5, 5]]
    drafter.release(7)
    drafter.release(99)
    assert drafts(drafter, row_of([4, 9], 2, request=7), row_of([1, 5, 5, 1, 5], 1, request=8)) == [[], [5]]


@pytest.mark.parametrize("sizes", [(0, 0), (2, 3), (3, 0)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="Expected 1 <= min_n <= max_n"):
        NGramDrafter(*sizes)


OUTPUTS = {0: [5, 6, 7, 8], 1: [1, 2]}


def test_the_oracle_replays_from_where_the_output_is() -> None:
    rows = [row_of([9], 3), row_of([9, 9, 5, 6], 3, prompt_length=2), row_of([9, 1, 2], 3, request=1)]
    assert drafts(oracle(OUTPUTS), *rows) == [[5, 6, 7], [7, 8], []]


def test_always_wrong_is_wrong_everywhere() -> None:
    assert drafts(always_wrong(OUTPUTS, vocab_size=9), row_of([9], 4)) == [[6, 7, 8, 0]]


def test_half_wrong_has_one_wrong_token_in_each_block() -> None:
    drafter = half_wrong(OUTPUTS, vocab_size=9, random=Random(1))
    places = set()
    for _ in range(50):
        (draft,) = drafts(drafter, row_of([9], 4))
        wrong = [i for i in range(4) if draft[i] != OUTPUTS[0][i]]
        assert len(wrong) == 1
        assert 0 <= draft[wrong[0]] < 9
        places.update(wrong)
    assert places == {0, 1, 2, 3}
    assert OUTPUTS[0] == [5, 6, 7, 8]
    assert drafts(drafter, row_of([9, 1, 2], 4, request=1)) == [[]]


def test_half_wrong_is_as_random_as_its_argument() -> None:
    def run(seed: int) -> list[list[int]]:
        drafter = half_wrong(OUTPUTS, 9, random=Random(seed))
        return [drafts(drafter, row_of([9], 4))[0] for _ in range(20)]

    assert run(3) == run(3) != run(4)


def test_one_token_everywhere() -> None:
    assert drafts(always(2), row_of([9], 3), row_of([9], 0)) == [[2, 2, 2], []]


def test_a_script_is_cut_to_the_budget() -> None:
    drafter = Scripted(lambda row: list(range(row.start, 99)))
    assert drafts(drafter, row_of([4, 4, 4], 2)) == [[2, 3]]
    drafter.commit(0, 3)
    drafter.release(0)
    assert drafts(drafter, row_of([4, 4, 4], 2)) == [[2, 3]]
