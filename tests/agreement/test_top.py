"""The largest logit of each row: the compiled kernels against the reference, to the bit, and where it matters which."""

import math

import pytest
import torch
from native_kernels import every_isa, kernels

from bitdraft import ops
from bitdraft.errors import ShapeError
from bitdraft.ops import reference

STRETCH = 1024
"""Logits that the kernels search at a time (csrc/kernels/logits.inl): ties have to be right across their borders."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@every_isa
@pytest.mark.parametrize("width", [1, 15, 16, 17, STRETCH, STRETCH + 1, 3 * STRETCH + 5])
@pytest.mark.parametrize("threads", [1, 2])
def test_place_and_size_are_the_references(isa: str, width: int, threads: int) -> None:
    """Rows of a wider matrix, with equals in all of them: rounded to a tenth, most values occur often."""
    wide = (random(7, width + 9, seed=width) * 10).round() / 10
    wide[5] = -math.inf
    wide[6, : width - 1] = -math.inf
    wide[0, width:] = math.inf
    assert kernels(isa, threads).top(wide[:, :width]) == reference.top(wide[:, :width])


@every_isa
def test_the_first_of_equals_is_taken_wherever_they_are(isa: str) -> None:
    places = [0, 1, 15, 16, STRETCH - 1, STRETCH, 2 * STRETCH + 3]
    for i, first in enumerate(places):
        row = torch.zeros(1, 2 * STRETCH + 4)
        row[0, places[i:]] = 3.0
        assert kernels(isa, 1).top(row) == ((first,), (3.0,))


@every_isa
def test_what_is_no_number_shows_wherever_it_is(isa: str) -> None:
    """Of either sign and with any payload; infinities are numbers."""
    for width in (1, 20, STRETCH + 20):
        for bits in (0x7FC00000, 0x7F800001, -1):
            for place in {0, width // 2, width - 1}:
                row = random(1, width)
                row.view(torch.int32)[0, place] = bits
                assert math.isnan(kernels(isa, 1).top(row)[1][0])
    assert kernels(isa, 1).top(torch.tensor([[-math.inf, math.inf, 1.0]])) == ((1,), (math.inf,))


def test_what_does_not_fit_is_refused() -> None:
    for logits in (torch.zeros(3), torch.zeros(2, 0)):
        with pytest.raises(ShapeError, match="top: given logits"):
            ops.top(logits)


def test_wider_numbers_are_compared_as_they_are() -> None:
    """Two that are one in float32."""
    assert ops.top(torch.tensor([[1.0, 1.0 + 2**-40]], dtype=torch.float64)) == ((1,), (1.0 + 2**-40,))
