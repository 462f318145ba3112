"""Our codec of quantised folders against the library whose format it is, and against transformers, which uses it."""

import json
from pathlib import Path
from typing import Any

import pytest
import quantized_models
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from model_files import write_folder

from bitdraft.formats import KV_FORMATS, Recipe, get_format
from bitdraft.models.cached import CachedModel
from bitdraft.models.checkpoint import Weights, open_checkpoint
from bitdraft.models.compressed import decode, encode, scheme_for
from bitdraft.models.compressed_config import compressed_layout, quantization_config
from bitdraft.models.decoder import Decoder, prepare_model
from bitdraft.models.scheme import Scheme
from bitdraft.ops.encoding import dequantize
from bitdraft.quantize.command import quantize_folder
from bitdraft.quantize.load import open_source
from bitdraft.types import Feed

N, K = 40, 96  # 40 zero points fill no whole word at most widths
ROWS = torch.Generator().manual_seed(0)


def theirs(form: str, inputs: dict[str, Any] | None = None, **weights: Any) -> QuantizationScheme:
    """A scheme of the library."""
    given = QuantizationArgs(**inputs) if inputs else None
    return QuantizationScheme(
        targets=["Linear"], format=form, weights=QuantizationArgs(**weights), input_activations=given
    )


def ours(scheme: QuantizationScheme) -> Scheme:
    """What we read of the library's own description of it."""
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=scheme.format, ignore=["lm_head"])
    layout = compressed_layout(json.loads(config.model_dump_json()), "config.json")
    assert layout.scheme_of("lm_head") is None
    found = layout.scheme_of("model.layers.0.mlp.up_proj")
    assert found is not None
    return found


def integers() -> list[tuple[str, QuantizationScheme]]:
    packed = [
        (f"w{bits}-{strategy}-{size}{'' if symmetric else '-asym'}", bits, strategy, size, symmetric)
        for bits in range(2, 9)
        for strategy, size in (("group", 32), ("group", 48), ("channel", None))
        for symmetric in (True, False)
    ]
    made = [
        (name, theirs("pack-quantized", num_bits=bits, strategy=how, group_size=size, symmetric=symmetric))
        for name, bits, how, size, symmetric in packed
    ]
    plain = [
        ("w8", 8, "channel", None, True),
        ("w8-tensor", 8, "tensor", None, True),
        ("w4-asym", 4, "group", 32, False),
    ]
    made += [
        (f"int-{name}", theirs("int-quantized", num_bits=b, strategy=how, group_size=size, symmetric=symmetric))
        for name, b, how, size, symmetric in plain
    ]
    return made


@pytest.mark.parametrize(("name", "scheme"), integers(), ids=lambda value: value if isinstance(value, str) else "")
def test_integers_that_the_library_packs_are_read_as_it_reads_them(name: str, scheme: QuantizationScheme) -> None:
    args = scheme.weights
    groups = K // args.group_size if args.group_size else 1
    shape = (1,) if args.strategy == "tensor" else (N, groups)
    # float16 values in float32: their products with codes are exact, so nothing below needs a tolerance.
    scale = (torch.rand(shape, generator=ROWS) * 0.1 + 0.01).half().float()
    half = 2 ** (args.num_bits - 1)
    zero = torch.randint(-half, half, shape, generator=ROWS).to(torch.int8) if not args.symmetric else None
    weight = torch.randn(N, K, generator=ROWS) * half * 0.05
    state = {"weight": weight, "weight_scale": scale} | ({} if zero is None else {"weight_zero_point": zero})
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    read = decode("layer", stored, ours(scheme), (N, K), "folder")
    assert torch.equal(dequantize(read), expected)
    assert expected.unique().numel() > 3


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("static", [False, True])
def test_8_bit_floats(strategy: str, static: bool) -> None:
    inputs = {"num_bits": 8, "type": "float", "dynamic": not static, "strategy": "tensor" if static else "token"}
    scheme = theirs("float-quantized", inputs, num_bits=8, type="float", strategy=strategy)
    shape = (N, 1) if strategy == "channel" else (1,)
    state = {
        "weight": torch.randn(N, K, generator=ROWS),
        "weight_scale": torch.rand(shape, generator=ROWS) / 100 + 0.01,
    }
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    stored = compressor.compress(state, scheme) | ({"input_scale": torch.ones(1)} if static else {})
    read = decode("layer", stored, ours(scheme), (N, K), "folder")
    assert torch.equal(dequantize(read), compressor.decompress(stored, scheme)["weight"])
    assert read.activation == "fp8_e4m3"
    assert ("for each row where the file has one for all" in ours(scheme).input_note) == static


def test_nvfp4() -> None:
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    scheme.format = "nvfp4-pack-quantized"
    scale = (torch.rand(N, K // 16, generator=ROWS) * 100 + 1).to(torch.float8_e4m3fn).float()
    state = {
        "weight": torch.randn(N, K, generator=ROWS),
        "weight_scale": scale,
        "weight_global_scale": torch.tensor([150.0]),
    }
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    stored = compressor.compress(state, scheme)
    # Their own decompression computes in bfloat16; their codes are what is compared.
    codes = unpack_fp4_from_uint8(stored["weight_packed"], N, K, dtype=torch.float32)
    expected = codes * scale.repeat_interleave(16, dim=1) / 150
    read = decode("layer", stored, ours(scheme), (N, K), "folder")
    torch.testing.assert_close(dequantize(read), expected, rtol=2**-22, atol=0)  # divided by 150, times 1 / 150
    assert ours(scheme).input_note == "inputs keep 16 bits where the file asks for 4"


def test_mxfp4() -> None:
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    scheme.format = "mxfp4-pack-quantized"
    scale = 2.0 ** torch.randint(-9, 3, (N, K // 32), generator=ROWS)
    state = {"weight": torch.randn(N, K, generator=ROWS), "weight_scale": scale}
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    read = decode("layer", stored, ours(scheme), (N, K), "folder")
    assert torch.equal(dequantize(read), expected.float())
    assert ours(scheme).input_note == ""


FORMATS = [
    "w4a16",
    "w4a16-g64-asym",
    "w2a16",
    "w3a16-asym",
    "w6a8",
    "w4a8-asym",
    "w8a8",
    "w8a16",
    "fp8_e4m3",
    "fp8_e4m3-w",
]


@pytest.mark.parametrize("name", FORMATS)
def test_what_we_write_the_library_reads_to_the_same_values(name: str) -> None:
    packed = get_format(name).encode(torch.randn(N, 128, generator=ROWS))
    scheme = scheme_for("layer", packed)
    assert scheme is not None
    layers = {"model.layers.0.mlp.up_proj": scheme, "lm_head": None}
    config = QuantizationConfig.model_validate(quantization_config(layers))
    (group,) = config.config_groups.values()
    stored = {key.removeprefix("layer."): tensor for key, tensor in encode("layer", packed).items()}
    compressor = BaseCompressor.get_value_from_registry(group.format)
    got = compressor.decompress(stored, group)["weight"]
    # They multiply in the type of the scales: float16 for groups rounds each product by half of its last bit.
    torch.testing.assert_close(
        got.float(), dequantize(packed), rtol=2**-11 if got.dtype == torch.float16 else 0, atol=0
    )
    assert (group.input_activations is not None) == (packed.activation != "bf16" and packed.zeros is None)
    read = decode("layer", stored, scheme, packed.shape, "folder")
    assert torch.equal(read.codes.view(torch.uint8), packed.codes.view(torch.uint8))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4-a8", "nvfp4"])
def test_4_bit_floats_that_we_write_the_library_reads(name: str) -> None:
    packed = get_format(name).encode(torch.randn(N, 128, generator=ROWS))
    scheme = scheme_for("layer", packed)
    assert scheme is not None
    config = QuantizationConfig.model_validate(quantization_config({"layer": scheme, "lm_head": None}))
    (group,) = config.config_groups.values()
    stored = {key.removeprefix("layer."): tensor for key, tensor in encode("layer", packed).items()}
    got = BaseCompressor.get_value_from_registry(group.format).decompress(stored, group)["weight"]
    # Theirs is computed in bfloat16: of a power of two exactly, of NVFP4's scales with two roundings.
    torch.testing.assert_close(got.float(), dequantize(packed), rtol=2**-7 if name == "nvfp4" else 0, atol=0)
    assert group.input_activations is None


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("FP8_DYNAMIC", "fp8_e4m3"),
        ("FP8", "fp8_e4m3"),
        ("W8A8", "w8a8"),
        ("W4A16", "w4a16-g128"),
        ("W4A16_ASYM", "w4a16-g128-asym"),
        ("W3A16", "w3a16-g128"),
        ("W8A16", "w8a16-g128"),
        ("W4A8", "w4a8-g128"),
        ("NVFP4A16", "nvfp4"),
        ("MXFP4", "mxfp4"),
    ],
)
def test_presets_are_called_by_our_names(preset: str, name: str) -> None:
    scheme = preset_name_to_scheme(preset, ["Linear"])
    storage = {"F": "float-quantized", "N": "nvfp4-pack-quantized", "M": "mxfp4-pack-quantized"}.get(preset[0])
    scheme.format = storage or ("int-quantized" if preset == "W8A8" else "pack-quantized")
    assert ours(scheme).format_name == name


IDS = list(range(3, 40))


def our_logits(folder: Path, embedding: torch.Tensor) -> torch.Tensor:
    """Logits of our own decoder, [T, V], with the 16-bit embedding that other programs see."""
    checkpoint = open_checkpoint(folder)
    exact = get_format("f32")
    packed = {n: checkpoint.packed(f"{n}.weight") for n in checkpoint.config.linear_shapes() if n != "lm_head"}
    # Inputs that no format rounds stay in float32, as they do in transformers.
    packed = {n: w if w.activation != "bf16" else exact.encode(dequantize(w)) for n, w in packed.items()}
    outer = exact.encode(embedding)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    vectors = {name: checkpoint.tensor(name) for name in index if name.endswith(("norm.weight", ".bias"))}
    weights = Weights(checkpoint.config, packed | {"lm_head": outer, "model.embed_tokens": outer}, vectors)
    sizes = {"kv_tokens": 64, "vocab_size": checkpoint.config.vocab_size, "kv": KV_FORMATS["f32"]}
    return CachedModel(Decoder(prepare_model(weights)), **sizes).forward([Feed(0, IDS, 0, 0)])


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("recipe", "family", "tolerance"),
    [
        ("bf16", "llama", 1e-4),
        ("w4a16", "llama", 1e-4),
        ("w4a16", "qwen2", 1e-4),
        ("w8a16", "qwen3", 1e-4),
        ("fp8_e4m3-w", "llama", 1e-4),
        # Decompressed in the float16 of the scales.
        ("w3a16-asym", "llama", 1e-3),
        # They round 8-bit inputs to 255 codes over max / 127.5, we to 255 over max / 127: two rounding errors apart.
        ("w8a8", "llama", 0.03),
        ("w4a8", "qwen2", 0.03),
        ("fp8_e4m3", "llama", 0.03),
        # Decompressed in bfloat16.
        ("mxfp4", "llama", 1e-2),
    ],
)
def test_transformers_loads_a_folder_to_our_logits(tmp_path: Path, recipe: str, family: str, tolerance: float) -> None:
    source = quantized_models.small_source(tmp_path / "source", quantized_models.config(family))
    quantized_models.write(tmp_path / "made", source, Recipe.parse(recipe))
    # Otherwise transformers has no room for packed zero points, and meets the bfloat16 of 4-bit floats with float32.
    dequantised = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    settings = dequantised if "asym" in recipe or "fp4" in recipe else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32, **settings)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    got = our_logits(tmp_path / "made", source.tensor("model.embed_tokens.weight").bfloat16().float())
    assert float((got - expected).norm() / expected.norm()) < tolerance


def test_mixed_precision_is_read_by_both_alike(tmp_path: Path) -> None:
    """Formats by kind of layer, one layer apart and one kept in 16 bits: patterns, names and an ignored layer."""
    source = quantized_models.small_source(tmp_path / "source", quantized_models.config("llama"))
    names = ("w8a8", "fp8_e4m3", "bf16")
    apart = {
        **{f"model.layers.{i}.self_attn.v_proj": get_format(names[0]) for i in range(2)},
        "model.layers.1.mlp.down_proj": get_format(names[1]),
        "model.layers.0.mlp.down_proj": get_format(names[2]),
    }
    recipe = Recipe("mixed", get_format("w4a16"), "nearest", apart)
    made = quantized_models.write(tmp_path / "made", source, recipe)
    raw = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert raw["format"] == "mixed-precision"
    assert "re:.*self_attn\\.v_proj$" in {t for group in raw["config_groups"].values() for t in group["targets"]}
    assert set(raw["ignore"]) == {"lm_head", "model.layers.0.mlp.down_proj"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    with torch.no_grad():
        model(torch.tensor([IDS]))  # which decompresses
    for name, packed in made.items():
        if name.startswith("model.layers."):
            torch.testing.assert_close(model.get_submodule(name).weight.data, dequantize(packed), rtol=2**-11, atol=0)


def test_scales_of_keys_and_values_are_described_as_the_library_describes_them() -> None:
    """U70: `kv_cache_scheme` is one that the library's own class takes, and says nothing that it would not."""
    scheme = scheme_for("x", get_format("w8a8").encode(torch.randn(N, K, generator=ROWS)))
    found = quantization_config({"model.layers.0.mlp.up_proj": scheme, "lm_head": None}, kv_scales=True)
    assert found is not None
    config = QuantizationConfig.model_validate(found)
    assert config.kv_cache_scheme == QuantizationArgs(
        num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True
    )
    assert compressed_layout(json.loads(config.model_dump_json()), "config.json").kv_cache
    only = quantization_config({"model.layers.0.mlp.up_proj": None, "lm_head": None}, kv_scales=True)
    assert only is not None
    assert QuantizationConfig.model_validate(only).kv_cache_scheme is not None


def test_folders_that_keep_inputs_in_16_bits_are_refused_by_others(tmp_path: Path) -> None:
    """Without the columns beside the codes the model says something else: better nothing than that."""
    source = open_source(str(write_folder(tmp_path / "model", quantized_models.config("qwen2"))))
    ids = [source.tokenizer.encode(f"hello world {i} " * 6) for i in range(30)]
    quantize_folder(source, Recipe.parse("w8a8-out8"), tmp_path / "out", seed=0, calibration=ids, tokens=512)
    with pytest.raises(Exception, match="bitdraft-outliers"):  # of whichever kind
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
