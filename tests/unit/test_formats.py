"""Formats: names, what fits what, sizes, and how much each loses."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save

from bitdraft.errors import FormatError
from bitdraft.formats import FORMATS, METHODS, Recipe, get_format
from bitdraft.formats.resolution import resolution_report
from bitdraft.ops.encoding import round_activations
from bitdraft.ops.packed import concatenate, float_matrix, fuse

ERRORS = {
    # name: relative error of W x on Gaussian weights and inputs, largest of K = 128 to 4096 and ten seeds, with a tenth
    # of room. A uniform error of one step has a standard deviation of step / sqrt(12).
    "f32": (0.0, "nothing is rounded"),
    "bf16": (0.0027, "8 significant bits: 2^-9 at most, 0.0017 in the mean square; inputs and weights add up"),
    "fp8": (0.042, "E4M3's: Gaussian rows have no outliers that would need E5M2"),
    "fp8_e4m3": (0.042, "4 significant bits: 16 times bf16's"),
    "fp8_e5m2": (0.084, "3 significant bits: twice E4M3's"),
    "fp8_e4m3-w": (0.030, "E4M3's, of the weights alone"),
    "w8a16": (0.0101, "step = largest / 127; the largest of 4096 Gaussians is 3.8"),
    "w8a8": (0.0142, "the same of the inputs: sqrt(2) of w8a16's"),
    "w6a16": (0.025, "step = largest / 31; the largest of 32 Gaussians is 2.3"),
    "w6a8": (0.027, "w6a16's and int8's of the inputs"),
    "w4a16": (0.108, "step = largest / 7: 31 / 7 of w6a16's"),
    "w4a16-g64": (0.120, "the largest of 64 Gaussians is 2.6"),
    "w4a16-g128": (0.131, "the largest of 128 Gaussians is 2.8"),
    "w4a16-asym": (0.092, "15 steps from least to largest in place of 14 to twice the largest"),
    "w4a16-g64-asym": (0.103, "likewise"),
    "w4a16-g128-asym": (0.114, "likewise"),
    "w4a8": (0.108, "int8's of the inputs is small beside it"),
    "w3a16": (0.253, "step = largest / 3"),
    "w3a8": (0.253, "step = largest / 3"),
    "w2a16": (0.740, "three codes are used: -largest, 0, largest"),
    "w2a8": (0.740, "three codes are used"),
    "w2a16-asym": (0.450, "four codes are used"),
    "mxfp4": (0.123, "two significant bits, steps of half to a third; scales an octave apart cost a tenth"),
    "mxfp4-a8": (0.123, "int8's of the inputs is small beside it"),
    "nvfp4": (0.095, "the same elements, whose largest in 16 comes to lie where the scale has least error"),
    "nvfp4-a8": (0.095, "int8's of the inputs is small beside it"),
    "w8n4a16": (0.0067, "step = largest / 127 and a little more; the largest of 32 Gaussians is 2.3"),
    "w8n4a8": (0.0121, "the same and int8's of the inputs, 0.0101"),
    "mxfp8": (0.030, "E4M3's, of the weights alone"),
    "mxfp4-had": (0.123, "a rotation leaves Gaussian numbers Gaussian"),
    "w4a8-had": (0.108, "likewise"),
}

ROUNDING = [name for name, form in FORMATS.items() if form.kind != "stored"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_name_is_its_own_format(name: str) -> None:
    assert get_format(name) is FORMATS[name]
    assert FORMATS[name].name == name
    assert FORMATS[name].head in FORMATS


def test_every_format_has_a_bound() -> None:
    assert set(ROUNDING) <= set(ERRORS)


@pytest.mark.parametrize(
    ("name", "canonical", "group", "symmetric"),
    [
        ("w4a16-g32", "w4a16", 32, True),
        ("w4a16-g64", "w4a16-g64", 64, True),
        ("w4a8-g128-asym", "w4a8-g128-asym", 128, False),
        ("w3a16-asym", "w3a16-asym", 32, False),
        ("w6a8-asym-g64", "w6a8-g64-asym", 64, False),
        ("w8a8-ag32", "w8a8-ag32", None, True),
        ("w3a8-ag32-asym-g64", "w3a8-g64-asym-ag32", 64, False),
        ("mxfp4-a8-ag32", "mxfp4-a8-ag32", 32, True),
        ("w4a8-ag32-had", "w4a8-had-ag32", 32, True),
        ("w4a8-had", "w4a8-had", 32, True),
        ("w3a8-had-g128-asym", "w3a8-g128-asym-had", 128, False),
        ("mxfp4-a8-had", "mxfp4-a8-had", 32, True),
        ("nvfp4-had", "nvfp4-had", 16, True),
        ("w8a8-had", "w8a8-had", None, True),
        ("w8n4a8-had", "w8n4a8-had", 32, True),
    ],
)
def test_options_of_a_name(name: str, canonical: str, group: int | None, symmetric: bool) -> None:
    form = get_format(name)
    assert (form.name, form.group_size, form.symmetric) == (canonical, group, symmetric)
    assert get_format(canonical) == form


@pytest.mark.parametrize(
    "name",
    [
        *("", "w4", "w5a16", "int4", "W4A16", "w4a16-", "w4a16-g16", "w4a16-g", "w4a16-sym", "w4a16-g32-g64"),
        *("w4a16-asym-asym", "w8a8-g64", "w8a16-asym", "fp8-g32", "bf16-asym", "w4a16-awq"),
        *("w4a16-h5", "w4a16-h4-h6", "w8a8-h4", "mxfp4-h6", "mxfp4-g64", "mxfp4-asym", "mxfp4-a16"),
        *("nvfp4-had-had", "mxfp8-had", "w8a8-had-had", "w4a8-had-had"),
    ],
)
def test_an_unknown_name_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(FormatError, match=r"there is no format .*bf16.*w4a16.*-g64.*-awq"):
        get_format(name)


@pytest.mark.parametrize(
    ("text", "name", "form", "method"),
    [
        ("w4a16-awq", "w4a16-awq", "w4a16", "awq"),
        ("w4a16-g32-awq", "w4a16-awq", "w4a16", "awq"),
        ("w4a16-g64-asym-awq", "w4a16-g64-asym-awq", "w4a16-g64-asym", "awq"),
        ("w4a16-rtn", "w4a16", "w4a16", "nearest"),
        ("w4a8-g128", "w4a8-g128", "w4a8-g128", "nearest"),
        ("fp8_e4m3-w", "fp8_e4m3-w", "fp8_e4m3-w", "nearest"),
        ("fp8-rtn", "fp8", "fp8", "nearest"),
        ("w4a8-had-awq", "w4a8-had-awq", "w4a8-had", "awq"),
        ("mxfp4-rtn", "mxfp4", "mxfp4", "nearest"),
    ],
)
def test_a_recipe_is_a_format_and_a_method(text: str, name: str, form: str, method: str) -> None:
    recipe = Recipe.parse(text)
    assert (recipe.name, recipe.format.name, recipe.method) == (name, form, method)
    assert Recipe.parse(name) == recipe


@pytest.mark.parametrize("text", ["awq", "-awq", "w4a16-gptq-awq", "w4a16-awq-awq", "w4a16-rtn-awq", "w4a16-awq-g64"])
def test_an_unknown_recipe_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="there is no format"):
        Recipe.parse(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("w8a8-awq", r"has no groups.*w4a16-awq"),
        ("bf16-awq", r"bf16 has none.*Expected bf16 alone.*w4a16-awq"),
        ("fp8-gptq", r"gptq chooses among the codes of integers, and fp8 has none"),
        ("w4a8-had-gptq", r"GPTQ rounds weights as they are"),
        ("w8a8-had-smooth-gptq", r"GPTQ rounds weights as they are"),
        ("w4a16-smooth", r"reads 16-bit inputs\. Expected 8-bit inputs, such as w4a8-smooth"),
        ("w8a16-smooth-gptq", r"such as w8a8-smooth-gptq"),
    ],
)
def test_a_method_that_does_nothing_for_a_format_is_refused(text: str, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        Recipe.parse(text)


@pytest.mark.parametrize("text", ["mxfp4-awq", "nvfp4-a8-had-awq", "w8n4a8-awq"])
def test_awq_needs_ranges_to_choose(text: str) -> None:
    with pytest.raises(FormatError, match=r"codes of integers.*w4a16-awq"):
        Recipe.parse(text)


def test_every_method_has_a_recipe() -> None:
    for method in METHODS:
        recipe = Recipe.parse(f"w4a8-asym-{'rtn' if method == 'nearest' else method}")
        assert recipe.method == method
        assert recipe.calibrated == (method not in ("nearest", "clip"))
        assert recipe.scaling == (method.partition("-")[0] if method[:3] in ("awq", "smo") else None)


@pytest.mark.parametrize("text", ["stored-a8-awq", "stored-a16-rtn"])
def test_what_is_kept_as_stored_takes_no_method(text: str) -> None:
    with pytest.raises(FormatError, match=r"stored-a\d+ keeps weights as the model's file stores them"):
        Recipe.parse(text)


@pytest.mark.parametrize(
    ("name", "activation"), [("stored", "fp8_e4m3"), ("stored-a8", "int8"), ("stored-a16", "bf16")]
)
def test_a_stored_weight_keeps_its_codes_and_reads_what_the_name_says(name: str, activation: str) -> None:
    weight = replace(get_format("w4a16").encode(torch.randn(4, 64)), activation="fp8_e4m3")
    packed = get_format(name).keep(weight)
    assert (packed.activation, packed.format) == (activation, name)
    assert packed.codes is weight.codes


@pytest.mark.parametrize(
    ("name", "canonical", "head"),
    [
        ("w4a8-h8", "w4a8", "w8a8"),
        ("w4a8-h6", "w4a8-h6", "w6a8"),
        ("w4a8-h6-had", "w4a8-had-h6", "w6a8"),
        ("w4a16-h4-g64-asym", "w4a16-g64-asym-h4", "w4a16-g64-asym"),
        ("w4a8-h6-ag32", "w4a8-ag32-h6", "w6a8-ag32"),
    ],
)
def test_the_head_takes_a_width_of_its_own(name: str, canonical: str, head: str) -> None:
    form = get_format(name)
    assert (form.name, form.head) == (canonical, head)
    assert get_format(canonical) == form
    recipe = Recipe.parse(f"{name}-awq")
    assert (recipe.format_of("lm_head").name, recipe.format_of("model.layers.0.mlp.up_proj")) == (head, form)
    own = replace(recipe, formats={"lm_head": get_format("w3a16"), "model.layers.0.mlp.up_proj": get_format("bf16")})
    assert own.format_of("lm_head").bits == 3
    assert own.format_of("model.layers.0.mlp.up_proj").bits == 16


def test_inputs_in_groups_are_rounded_group_by_group() -> None:
    """One large input makes its own group coarse, and no other; the last group may be shorter."""
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(0))
    x[1, 40] = 1000.0
    whole = round_activations(x, "int8_g32")
    for start in (0, 32, 64):
        assert torch.equal(whole[:, start : start + 32], round_activations(x[:, start : start + 32], "int8"))
    off = (whole - x)[1].abs()
    assert off[:32].max() < 0.02 < off[32:64].max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["stored", "stored-a8", "stored-a16"])
def test_floats_are_kept_as_stored(name: str, dtype: torch.dtype) -> None:
    form, weight = get_format(name), torch.tensor([[1e-7, 0.1, -3.3], [65504.0, 0.0, 2.0]]).to(dtype)
    packed = form.keep(float_matrix(weight))
    assert form.bits_per_weight is None
    assert (packed.activation, packed.nbytes) == ("bf16", 6 * dtype.itemsize)
    assert torch.equal(form.decode(packed), weight.float())


def test_a_group_that_does_not_divide_is_refused_with_what_would() -> None:
    get_format("w4a16-g64").check("layer", (8, 576))
    with pytest.raises(FormatError, match=r"mlp\.up: 576 inputs .* groups of 128 \(w4a16-g128\).* use -g64"):
        get_format("w4a16-g128").check("mlp.up", (8, 576))
    with pytest.raises(FormatError, match=r"48 inputs.*8-bit format"):
        get_format("w4a16").check("mlp.up", (8, 48))
    with pytest.raises(FormatError, match="48 inputs"):
        get_format("w4a16").encode(torch.zeros(8, 48))
    get_format("w8a8").check("mlp.up", (8, 48))
    get_format("nvfp4").check("mlp.up", (8, 48))
    with pytest.raises(FormatError, match=r"48 inputs do not divide into blocks of 32 to rotate.*leave -had away"):
        get_format("nvfp4-had").check("mlp.up", (8, 48))


@pytest.mark.parametrize("name", [*ROUNDING, "w4a16-g128", "w4a16-g64-asym", "w3a8-asym"])
@pytest.mark.parametrize("K", [128, 256])
def test_size_is_that_of_a_file(name: str, K: int) -> None:
    """Written as safetensors, scales of groups as float16; and bits per weight are these bytes."""
    form = get_format(name)
    packed = form.encode(torch.randn(6, K, generator=torch.Generator().manual_seed(0)))
    tensors = {"codes": packed.codes}
    if packed.scales is not None:
        integers = form.group_size and form.kind in ("integer", "nested")
        tensors["scales"] = packed.scales.half() if integers else packed.scales
        assert torch.equal(tensors["scales"].float(), packed.scales.float())
    if packed.channel is not None:
        tensors["scale of the tensor"] = packed.channel[:1, 0]
    if packed.zeros is not None:
        tensors["zeros"] = packed.zeros
    file = io.BytesIO(save({key: tensor.contiguous() for key, tensor in tensors.items()}))
    header = int.from_bytes(file.read(8), "little")
    assert packed.nbytes == len(file.getvalue()) - 8 - header
    others = 4 if packed.channel is not None else 0 if packed.scales is None or form.group_size else 4 * 6
    assert packed.nbytes == form.bits_per_weight * 6 * K / 8 + others


@pytest.mark.parametrize("name", [*ROUNDING, "w4a16-g128-asym", "nvfp4-had"])
def test_fused_rows_are_the_rows(name: str) -> None:
    form = get_format(name)
    parts = [torch.randn(n, 256, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2)]
    fused = concatenate([form.encode(part) for part in parts])
    assert fused.shape == (8, 256)
    assert torch.equal(form.decode(fused), torch.cat([form.round(part) for part in parts]))


def test_rows_that_read_rotated_inputs_do_not_fuse_with_others() -> None:
    parts = [get_format(name).encode(torch.zeros(4, 64)) for name in ("w4a8-had", "w4a8")]
    with pytest.raises(FormatError, match=r"w4a8-had, w4a8: .* read the same inputs.* -had for none"):
        fuse(parts)


def test_heads_of_narrow_formats_stay_at_eight_bits_and_round_inputs_alike() -> None:
    for form in FORMATS.values():
        head = get_format(form.head)
        assert head.activation == form.activation
        assert head is form if form.kind == "stored" else head.bits == max(8, form.bits)


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("seed", [0, 1])
def test_errors_stay_in_bounds_and_do_not_grow_with_the_dimension(name: str, seed: int) -> None:
    bound, reason = ERRORS[name]
    rows = resolution_report([name], [128, 512, 4096], np.random.default_rng(seed))
    for row in rows:
        assert row.output_error <= bound, (row, reason)
    assert rows[-1].output_error >= 0.7 * bound  # the bound is no larger than it has to be
    # A tenth of room for chance; int8 scales of whole rows follow the largest of 4096 Gaussians in place of 128.
    growth = 1.5 if name.startswith("w8a") or name == "w8n4a8" else 1.1
    assert rows[-1].output_error <= growth * rows[0].output_error


@pytest.mark.parametrize("name", [name for name in ERRORS if name != "f32"])
def test_errors_of_weights_and_inputs_add_up_as_squares(name: str) -> None:
    """To a tenth: the 4096 outputs share 16 inputs, so that they tell a standard deviation to a few per cent."""
    for row in resolution_report([name], [256, 2048], np.random.default_rng(5)):
        assert row.output_error == pytest.approx((row.weight_error**2 + row.input_error**2) ** 0.5, rel=0.1)


def test_a_report_compares_formats_on_the_same_numbers() -> None:
    both = resolution_report(["w4a16", "w4a8"], [256, 512], np.random.default_rng(0))
    assert [(row.format, row.dimension) for row in both] == [(n, K) for K in (256, 512) for n in ("w4a16", "w4a8")]
    assert both[0].weight_error == both[1].weight_error
    assert both[0] == resolution_report(["w4a16"], [256], np.random.default_rng(0))[0]
    with pytest.raises(FormatError, match="100 inputs"):
        resolution_report(["w4a16"], [100], np.random.default_rng(0))
