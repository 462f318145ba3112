"""Weights as GGUF files store them, in the compiled kernels: their values, products, and weights of several parts.

Tolerances. Values are equal to the bit but for the sign of a zero: a code of 8 bits at most times a small scale of 8 at
most times a float16 is a product of 24 bits, exact in FP32, so that a multiply-add rounds once, where ggml subtracts.
Products add up the same terms in another order than the reference, and 8-bit inputs have scale and minimum apart, whose
sums may be some times larger than their difference: 1e-5 of the largest output. Behind a norm, 8-bit inputs may fall to
the other side of a tie: 3e-3 of the largest output.

Shape suffixes: R rows, D hidden size, N outputs, K inputs, M inner size of an MLP.
"""

import pytest
import torch
from gguf_weights import QUANTISED, random_blocks, stored
from native_kernels import every_isa, kernels
from torch import Tensor

from bitdraft import ops
from bitdraft.errors import FormatError, ShapeError
from bitdraft.formats import get_format
from bitdraft.ops import reference
from bitdraft.ops.encoding import dequantize
from bitdraft.ops.gguf_blocks import BLOCK_FORMATS
from bitdraft.ops.native import Native
from bitdraft.ops.packed import Packed, block_matrix, fuse
from bitdraft.ops.panels import PanelWeight

FLOATS = ("F32", "F16", "BF16")
MIXED = {
    "q and k as one": ("Q4_K", "Q4_K", "Q6_K"),
    "q alone": ("Q5_0", "Q8_0", "Q8_0"),
    "three": ("Q5_K", "Q4_1", "Q5_1"),
    "a float among them": ("Q4_0", "F16", "Q8_0"),
}
SHARE = {"linear_add": 1e-5, "behind a norm": 3e-3}

every_type = pytest.mark.parametrize("name", [*QUANTISED, *FLOATS])
every_width = pytest.mark.parametrize("activation", [8, 16])
every_mixture = pytest.mark.parametrize("types", MIXED.values(), ids=MIXED)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, expected: Tensor, share: float) -> None:
    """Every entry within `share` of the largest expected one."""
    assert got.shape == expected.shape
    assert float((got - expected).abs().max()) <= share * float(expected.abs().max())


def rows_are_alone(run: Native, weight: PanelWeight, x: Tensor, norm: Tensor, bias: Tensor, whole: Tensor) -> None:
    for rows in (1, 2, 3, 5, 9):
        assert torch.equal(run.norm_linear(x[:rows], norm, 1e-6, weight, bias), whole[:rows])
        assert torch.equal(run.norm_linear(x[-rows:], norm, 1e-6, weight, bias), whole[-rows:])


@every_isa
@every_type
@every_width
def test_panels_hold_the_decoded_values(isa: str, name: str, activation: int) -> None:
    packed, run = stored(name, 37, 512, activation), kernels(isa, 1)
    assert torch.equal(run.embed(torch.arange(37), run.prepare(packed)), dequantize(packed))


@every_isa
@pytest.mark.parametrize("name", QUANTISED)
def test_scales_of_every_float16_size(isa: str, name: str) -> None:
    """Subnormal, largest and zero."""
    form, run = QUANTISED[name], kernels(isa, 1)
    codes = random_blocks(form, 16, 512, seed=3)
    blocks = codes.view(-1, form.nbytes)
    for i, bits in enumerate((0x0001, 0x03FF, 0x7BFF, 0x0000, 0xFBFF, 0x8001)):
        for start in form.scales:
            blocks[i::7, start], blocks[i::7, start + 1] = bits & 255, bits >> 8
    packed = Packed("stored-a8", (16, 512), form.code_bits, "int8", codes, blocks=form)
    assert torch.equal(run.embed(torch.arange(16), run.prepare(packed)), dequantize(packed))


@every_isa
@every_type
@every_width
def test_products_agree_and_rows_are_alone(isa: str, name: str, activation: int) -> None:
    packed, x, norm = stored(name, 37, 512, activation), random(40, 512) * 3, random(512, seed=2).abs() + 0.5
    bias, decoded = random(37, seed=3), reference.prepare(packed)
    for threads in (1, 2):
        run = kernels(isa, threads)
        weight = run.prepare(packed)
        assert weight.packed_bytes == packed.codes.numel() * packed.codes.element_size()
        added = run.linear_add(x, weight, torch.zeros(40, 37))
        assert_close(added, reference.linear_add(x, decoded, torch.zeros(40, 37)), SHARE["linear_add"])
        whole = run.norm_linear(x, norm, 1e-6, weight, bias)
        assert_close(whole, reference.norm_linear(x, norm, 1e-6, decoded, bias), SHARE["behind a norm"])
        rows_are_alone(run, weight, x, norm, bias, whole)


@every_isa
@every_mixture
@every_width
@pytest.mark.parametrize("sizes", [(48, 16, 16), (20, 7, 33)])
def test_a_weight_of_parts_is_its_parts(
    isa: str, types: tuple[str, ...], activation: int, sizes: tuple[int, ...]
) -> None:
    """To the bit the outputs of each part alone; on any number of threads, whatever rows are beside a row."""
    N = sum(sizes)
    parts = [stored(name, n, 256, activation, seed=n) for name, n in zip(types, sizes, strict=True)]
    x, norm, bias, residual = random(40, 256), random(256, seed=2).abs() + 0.5, random(N, seed=3), random(40, N, seed=4)
    fused = fuse(parts)
    decoded = reference.prepare(*fused)
    assert torch.equal(decoded.values, torch.cat([dequantize(part) for part in parts]))
    for threads in (1, 2, 3):
        run = kernels(isa, threads)
        weight = run.prepare(*fused)
        assert (weight.shape, weight.activation) == ((N, 256), decoded.activation)
        assert weight.packed_bytes == decoded.packed_bytes == sum(part.nbytes for part in parts)
        whole = run.norm_linear(x, norm, 1e-6, weight, bias)
        assert_close(whole, reference.norm_linear(x, norm, 1e-6, decoded, bias), SHARE["behind a norm"])
        rows_are_alone(run, weight, x, norm, bias, whole)
        sums, at = run.linear_add(x, weight, residual), 0
        for part in fused:
            columns = slice(at, at := at + part.shape[0])
            alone = run.prepare(part)
            assert torch.equal(whole[:, columns], run.norm_linear(x, norm, 1e-6, alone, bias[columns]))
            assert torch.equal(sums[:, columns], run.linear_add(x, alone, residual[:, columns].contiguous()))


@every_isa
@every_width
@pytest.mark.parametrize("M", [32, 20])
@pytest.mark.parametrize("types", [("Q4_K", "Q6_K"), ("Q8_0", "Q4_1"), ("F16", "Q5_0"), ("Q5_K", "Q5_K")])
def test_gate_and_up_of_two_types(isa: str, types: tuple[str, str], M: int, activation: int) -> None:
    gate, up = (stored(name, M, 256, activation, seed=i) for i, name in enumerate(types))
    down = stored("BF16", 256, M, activation, seed=2)
    x, norm = random(9, 256), random(256, seed=2).abs() + 0.5
    fused = fuse([gate, up])
    decoded = reference.prepare(*fused), reference.prepare(down)
    expected = reference.gated_mlp(x, norm, 1e-6, *decoded)
    for threads in (1, 2):
        run = kernels(isa, threads)
        weights = run.prepare(*fused), run.prepare(down)
        inner = run.gated_inputs(x, norm, 1e-6, weights[0])
        assert_close(inner, reference.gated_inputs(x, norm, 1e-6, decoded[0]), 2 * SHARE["behind a norm"])
        whole = run.gated_mlp(x, norm, 1e-6, *weights)
        assert_close(whole, expected, 2 * SHARE["behind a norm"])
        assert torch.equal(whole, run.linear_add(inner, weights[1], x))
        for rows in (1, 2, 5):
            assert torch.equal(run.gated_mlp(x[:rows], norm, 1e-6, *weights), whole[:rows])


def test_rows_that_are_stored_alike_are_one_part() -> None:
    for types, count in zip(MIXED.values(), (2, 2, 3, 3), strict=True):
        parts = fuse([stored(name, 16, 256) for name in types])
        assert len(parts) == count
        assert {part.activation for part in parts} == {"bf16" if "F16" in types else "int8"}
    with pytest.raises(ShapeError, match="one format and one number of inputs"):
        fuse([stored("Q4_0", 16, 256), stored("Q8_0", 16, 512)])
    mixed = fuse([stored("Q4_0", 16, 256), stored("Q4_0", 16, 256, 16)])
    assert {part.activation for part in mixed} == {"bf16"}


@every_isa
@pytest.mark.parametrize(
    "names", [("w4a8", "w6a8", "w8a8"), ("w4a16-asym", "w3a16", "bf16"), ("w2a8", "bf16", "w4a8-g64")]
)
def test_q_k_and_v_of_widths_of_their_own(isa: str, names: tuple[str, str, str]) -> None:
    """Mixed precision: a part for each format, and the bits that each would give alone with the same inputs."""
    run, x, norm = kernels(isa, 2), random(5, 256), torch.ones(256)
    parts = fuse([get_format(name).encode(random(n, 256, seed=n)) for name, n in zip(names, (64, 16, 16), strict=True)])
    assert len(parts) == 3
    got = run.norm_linear(x, norm, 1e-6, run.prepare(*parts), None)
    alone = [run.norm_linear(x, norm, 1e-6, run.prepare(part), None) for part in parts]
    assert torch.equal(got, torch.cat(alone, -1))
    expected = reference.norm_linear(x, norm, 1e-6, reference.prepare(*parts), None)
    assert_close(got, expected, SHARE["behind a norm"])


def test_parts_that_do_not_fit_together_are_refused() -> None:
    """By the operation, and by the library, which does not trust it."""
    run, x, norm = kernels("scalar", 1), random(2, 256), torch.ones(256)
    four = [stored(name, 16, 256) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1")]
    short, floats = stored("Q8_0", 16, 128), stored("F16", 16, 256)
    for parts, said in ((four, "4 parts"), ([four[0], short], "inputs, activation"), ([four[0], floats], "activation")):
        with pytest.raises(ShapeError, match=rf"prepare: given .*{said}"):
            ops.prepare(*parts)
    for parts, said in ((four, "more parts"), ([four[0], short], "other inputs"), ([four[0], floats], "otherwise")):
        with pytest.raises(ShapeError, match=f"weight: .*{said}"):
            run.norm_linear(x, norm, 1e-6, run.prepare(*parts), None)
    with pytest.raises(ShapeError, match="table: a weight of several parts"):
        run.embed(torch.tensor([0]), run.prepare(*four[:2]))


@every_isa
@pytest.mark.parametrize("name", ["stored-a8", "stored-a16"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_one_code_without_a_counterpart(isa: str, name: str, rows: int) -> None:
    """ggml writes no -128, but a file may hold it, at any place and at all: two products of it meet in 16 bits."""
    run, x = kernels(isa, 1), random(rows, 64)
    x[0, 10:12], x[-1, 20:22] = 4.0, -4.0  # the largest of their rows: codes of 127 and -127 beside each other
    for everywhere in (False, True):
        codes = random_blocks(QUANTISED["Q8_0"], 64, 64)
        values = codes.view(64, 2, 34)[:, :, 2:]
        if everywhere:
            values.fill_(128)
        else:
            for n in range(64):  # a pair of inputs for each output
                values[n, n // 32, n % 32] = values[n, n // 32, n % 32 ^ 1] = 128
        packed = get_format(name).keep(block_matrix(codes, QUANTISED["Q8_0"]))
        residual = torch.zeros(rows, 64)
        expected = reference.linear_add(x, reference.prepare(packed), residual)
        assert_close(run.linear_add(x, run.prepare(packed), residual), expected, SHARE["linear_add"])


def test_blocks_that_are_not_read_are_refused() -> None:
    packed = Packed(
        "stored-a16", (16, 64), 32, "bf16", torch.zeros(16, 256, dtype=torch.uint8), blocks=BLOCK_FORMATS[0]
    )
    with pytest.raises(FormatError, match="F32 blocks for 64 inputs"):
        kernels("scalar", 1).prepare(packed)
