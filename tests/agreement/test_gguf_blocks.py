"""Dequantised blocks against the `gguf` package, which is ggml's own reader in Python: equal bit for bit."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.errors import ShapeError
from bitdraft.models.gguf import GGUFFile
from bitdraft.ops.gguf_blocks import BLOCK_FORMATS, UNREAD_TYPES, BlockFormat, dequantise


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return np.array_equal(ours.view(np.uint32), np.ascontiguousarray(theirs).view(np.uint32))


def theirs(raw: np.ndarray, kind: int) -> np.ndarray:
    with np.errstate(all="ignore"):  # random bytes hold infinite scales
        return gguf.quants.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType(kind)).reshape(-1)


@pytest.mark.parametrize(("kind", "form"), BLOCK_FORMATS.items(), ids=lambda v: getattr(v, "name", ""))
class TestAgainstGguf:
    @settings(max_examples=40, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(0, 5))
    def test_random_bytes(self, kind: int, form: BlockFormat, seed: int, blocks: int) -> None:
        raw = np.random.default_rng(seed).integers(0, 256, blocks * form.nbytes, dtype=np.uint8)
        ours = dequantise(raw, form)
        assert ours.dtype == np.float32
        assert ours.shape == (blocks * form.values,)
        if blocks:
            assert same_bits(ours, theirs(raw, kind))

    def test_more_blocks_than_are_decoded_at_a_time(self, kind: int, form: BlockFormat) -> None:
        blocks = 150_000 // form.values
        raw = np.random.default_rng(1).integers(0, 256, blocks * form.nbytes, dtype=np.uint8)
        assert same_bits(dequantise(raw, form), theirs(raw, kind))

    def test_every_byte_value_in_every_place(self, kind: int, form: BlockFormat) -> None:
        raw = (np.arange(256)[:, None] + np.arange(form.nbytes) * 7).astype(np.uint8).reshape(-1)
        assert same_bits(dequantise(raw, form), theirs(raw, kind))

    def test_sizes(self, kind: int, form: BlockFormat) -> None:
        named = gguf.GGMLQuantizationType(kind)
        assert (form.name, (form.values, form.nbytes)) == (named.name, gguf.GGML_QUANT_SIZES[named])
        assert form.bits == 8 * form.nbytes / form.values


def test_bytes_that_are_no_whole_number_of_blocks_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"19 bytes of Q4_0. Expected a multiple of 18"):
        dequantise(np.zeros(19, dtype=np.uint8), BLOCK_FORMATS[2])


def test_every_type_of_ggml_is_read_or_named() -> None:
    assert {t.value: t.name for t in gguf.GGMLQuantizationType} == UNREAD_TYPES | {
        kind: form.name for kind, form in BLOCK_FORMATS.items()
    }


def test_a_whole_model_file(smollm2: Path) -> None:
    ours, reader = GGUFFile(smollm2), gguf.GGUFReader(str(smollm2))
    assert list(ours.tensors) == [t.name for t in reader.tensors]
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got = ours.tensor(tensor.name).numpy()
        assert got.shape == expected.shape
        assert same_bits(got, expected)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert dict(ours.metadata) == fields
