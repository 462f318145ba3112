"""`bitdraft doctor MODEL`: sound copies pass; every planted fault is found, with its place and its remedy."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from model_files import TEMPLATE, backend, interleaved, write_gguf
from planted_models import (
    DOWN,
    GATE,
    LINEAR,
    NORM,
    TEXTS,
    K,
    Q,
    V,
    changed,
    checkpoint,
    nibbles_turned,
    original,
    quantised,
    reordered,
    scaled,
    sizes,
    swapped,
    trained,
    with_scales_of,
)
from rich.console import Console

from bitdraft.formats import get_format
from bitdraft.formats.resolution import round_like
from bitdraft.measure.model_doctor import Model, ModelCheckup, examine_model, open_model
from bitdraft.measure.model_doctor_faults import Finding, places
from bitdraft.measure.model_doctor_report import render_model
from bitdraft.measure.model_doctor_text import Declared, declared
from bitdraft.models.checkpoint import Checkpoint, Weights
from bitdraft.models.tokenizer import Tokenizer
from bitdraft.ops.encoding import dequantize
from bitdraft.ops.packed import float_matrix
from bitdraft.quantize.load import open_source

EIGHT, FOUR, FOUR_ASYM = "w8a8", "w4a16", "w4a16-asym"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("original"), sizes())


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("stranger"), sizes(), seed=1)


@pytest.fixture(scope="module")
def copies(source: Checkpoint) -> Callable[[str], Weights]:
    kept: dict[str, Weights] = {}

    def copy(format: str) -> Weights:
        if format not in kept:
            kept[format] = quantised(source, format)
        return kept[format]

    return copy


def examined(weights: Weights, source: Checkpoint, target: Model | None = None) -> ModelCheckup:
    copy = Model("copy", weights, source.tokenizer())
    return examine_model(copy, original(source), target, TEXTS)


def graves(found: ModelCheckup) -> list[Finding]:
    return [finding for finding in found.findings if finding.grave]


FORMATS = (
    "stored", "bf16", "f32", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3-w", "w8a8", "w8a16", "w6a8", "w6a16-g64-asym", "w4a8",
    "w4a16-asym-h4", "w3a16", "w3a8-g64-asym", "w2a16", "w2a8-asym", "w4a16-awq", "w4a8-asym-awq", "w3a16-awq",
    "w2a16-awq", "w2a16-asym-awq",
)  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_a_sound_copy_has_nothing_grave(copies: Callable[[str], Weights], source: Checkpoint, format: str) -> None:
    found = examined(copies(format), source)
    assert graves(found) == []
    assert found.well
    for tensor in found.tensors:
        assert tensor.match is not None
        # AWQ's clipping moves a weight no further than half as much again as rounding to nearest does.
        assert tensor.match.error <= 1.5 * tensor.match.expected + 1e-6, tensor.name


def test_the_original_is_no_different_from_itself(source: Checkpoint) -> None:
    found = examined(original(source).weights, source)
    assert found.findings == []
    assert found.logits is not None
    assert (found.logits.kl, found.logits.top1) == (0.0, 1.0)
    assert {layer.stream_error for layer in found.layers} == {0.0}


def test_two_bits_are_coarse_and_it_is_said_that_the_format_is(
    copies: Callable[[str], Weights], source: Checkpoint
) -> None:
    (note,) = examined(copies("w2a16"), source).findings
    assert not note.grave
    assert "coarse, as its format is" in note.what
    assert "more bits" in note.remedy


@pytest.mark.parametrize("format", [f for f in FORMATS if "awq" not in f and f != "stored"])
def test_rounding_alike_is_rounding_in_the_same_format(format: str) -> None:
    weight = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 128), dtype=np.float32))
    made = get_format(format).encode(weight)
    for name in (format, "as the file calls it"):
        assert torch.equal(round_like(weight, replace(made, format=name)), dequantize(made))


def test_what_is_folded_exactly_is_no_fault(source: Checkpoint) -> None:
    """Scales that move between a norm or a layer and its readers change no output: nothing to complain of."""
    rng = np.random.default_rng(0)
    weights = original(source).weights
    packed, tensors = dict(weights.packed), dict(weights.tensors)

    def times(name: str, factor: torch.Tensor) -> None:
        packed[name] = float_matrix(packed[name].codes * factor)

    for i in range(weights.config.num_layers):
        prefix = f"model.layers.{i}."
        qkv, mlp, v, up = (torch.from_numpy(rng.lognormal(0, 0.7, n).astype(np.float32)) for n in (64, 64, 32, 128))
        tensors[prefix + "input_layernorm.weight"] = tensors[prefix + "input_layernorm.weight"] / qkv
        tensors[prefix + "post_attention_layernorm.weight"] = tensors[prefix + "post_attention_layernorm.weight"] / mlp
        tensors[prefix + "self_attn.v_proj.bias"] = tensors[prefix + "self_attn.v_proj.bias"] / v
        for name in "qkv":
            times(f"{prefix}self_attn.{name}_proj", qkv)
        times(prefix + "self_attn.v_proj", 1 / v[:, None])
        times(prefix + "self_attn.o_proj", v.view(2, 1, 16).expand(2, 2, 16).flatten())
        times(prefix + "mlp.gate_proj", mlp)
        times(prefix + "mlp.up_proj", mlp / up[:, None])
        times(prefix + "mlp.down_proj", up)
    found = examined(replace(weights, packed=packed, tensors=tensors), source)
    assert found.findings == []
    # float32 has 24 bits; three products of them stand between a weight and its original.
    assert all(t.match is not None and t.match.error < 1e-6 for t in found.tensors)


@dataclass(frozen=True)
class Plant:
    """A fault: what is done to a sound copy, and what has to be said."""

    format: str
    change: Callable[[Weights], Weights]
    where: str
    what: str
    remedy: str


def packed(name: str, **fields: object) -> Callable[[Weights], Weights]:
    return lambda w: changed(w, name, lambda p: replace(p, **fields))  # type: ignore[arg-type]


def shifted_zeros(by: int) -> Callable[[Weights], Weights]:
    def change(weights: Weights) -> Weights:
        zeros = weights.packed[GATE].zeros
        assert zeros is not None
        return changed(weights, GATE, lambda p: replace(p, zeros=zeros + by))

    return change


def ones(weights: Weights, *names: str) -> Weights:
    for name in names:
        scales = weights.packed[name].scales
        assert scales is not None
        weights = changed(weights, name, lambda p, s=scales: replace(p, scales=torch.ones_like(s)))  # type: ignore[misc]
    return weights


def vector(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], Weights]:
    return lambda w: replace(w, tensors=w.tensors | {name: change(w.tensors[name])})


def damaged_rows(weights: Weights) -> Weights:
    codes = weights.packed[DOWN].codes.clone()
    codes[5:8] = torch.from_numpy(np.random.default_rng(0).integers(0, 255, codes[5:8].shape, dtype=np.uint8))
    return changed(weights, DOWN, lambda p: replace(p, codes=codes))


def with_nan(weights: Weights) -> Weights:
    scales = weights.packed[DOWN].scales
    assert scales is not None
    scales = scales.clone()
    scales[3, 0] = torch.nan
    return changed(weights, DOWN, lambda p: replace(p, scales=scales))


def untied(weights: Weights) -> Weights:
    rng = torch.Generator().manual_seed(0)
    head = float_matrix(torch.randn(weights.packed["lm_head"].shape, generator=rng))
    config = replace(weights.config, tied_head=False)
    return replace(weights, config=config, packed=weights.packed | {"lm_head": head})


ORDER = torch.from_numpy(np.random.default_rng(0).permutation(128))
COLUMNS = torch.from_numpy(np.random.default_rng(0).permutation(64))

PLANTS = {
    "scales doubled": Plant(EIGHT, lambda w: changed(w, K, scaled(2)), "layer 1: self_attn.k_proj", "2 times", "by 2"),
    "scales doubled, 4 bits": Plant(
        FOUR, lambda w: changed(w, V, scaled(2)), "layer 1: self_attn.v_proj", "2 times", "by 2"
    ),
    "scales doubled, 2 bits": Plant(
        "w2a16", lambda w: changed(w, DOWN, scaled(2)), "layer 1: mlp.down_proj", "times", "Divide"
    ),
    "scales doubled after AWQ": Plant(
        "w4a16-awq", lambda w: changed(w, V, scaled(2)), "layer 1: self_attn.v_proj", "times", "Divide"
    ),
    "activation scale ignored": Plant(
        EIGHT, lambda w: changed(w, DOWN, scaled(1 / 37)), "layer 1: mlp.down_proj", "0.027 times", "input_scale"
    ),
    "scales swapped": Plant(
        EIGHT,
        lambda w: with_scales_of(w, GATE, "model.layers.1.mlp.up_proj"),
        "layer 1: mlp.gate_proj, mlp.up_proj",
        "each other's scales",
        "own scales back",
    ),
    "scales swapped between layers": Plant(
        FOUR,
        lambda w: with_scales_of(w, DOWN, "model.layers.2.mlp.down_proj"),
        "layers 1-2: mlp.down_proj",
        "each other's scales",
        "own scales back",
    ),
    "scales ignored": Plant(
        FOUR, lambda w: ones(w, Q), "layer 1: self_attn.q_proj", "every scale is 1", "weight_scale"
    ),
    "scales ignored everywhere": Plant(
        EIGHT,
        lambda w: ones(w, *(n.replace(".1.", f".{i}.") for i in range(3) for n in LINEAR)),
        "layers 0-2: self_attn.q_proj, ",
        "every scale is 1",
        "weight_scale",
    ),
    "zero points off by one": Plant(
        FOUR_ASYM, shifted_zeros(1), "layer 1: mlp.gate_proj", "off by one: every value is -1 step", "GPTQ"
    ),
    "zero points less one": Plant(
        FOUR_ASYM, shifted_zeros(-1), "layer 1: mlp.gate_proj", "off by one: every value is +1 step", "GPTQ"
    ),
    "zero points ignored": Plant(
        FOUR_ASYM, packed(GATE, zeros=None), "layer 1: mlp.gate_proj", "zero points were ignored", "qzeros"
    ),
    "rows permuted": Plant(
        EIGHT,
        lambda w: changed(w, GATE, lambda p: reordered(p, ORDER, 0)),
        "layer 1: mlp.gate_proj",
        "rows are permuted",
        "rotary layout",
    ),
    "columns permuted": Plant(
        FOUR,
        lambda w: changed(w, GATE, lambda p: reordered(p, COLUMNS, 1)),
        "layer 1: mlp.gate_proj",
        "columns are permuted",
        "g_idx",
    ),
    "k and v swapped": Plant(
        FOUR,
        lambda w: swapped(w, K, V),
        "layer 1: self_attn.k_proj, self_attn.v_proj",
        "k_proj and v_proj are swapped",
        "Exchange",
    ),
    "gate and up swapped": Plant(
        EIGHT,
        lambda w: swapped(w, GATE, "model.layers.1.mlp.up_proj"),
        "layer 1: mlp.gate_proj, mlp.up_proj",
        "gate_proj and up_proj are swapped",
        "Exchange",
    ),
    "layers swapped": Plant(
        FOUR,
        lambda w: swapped(w, DOWN, "model.layers.2.mlp.down_proj"),
        "layers 1-2: mlp.down_proj",
        "model.layers.1.mlp.down_proj and model.layers.2.mlp.down_proj are swapped",
        "Exchange",
    ),
    "some rows damaged": Plant(
        FOUR, damaged_rows, "layer 1: mlp.down_proj", "3 of its rows are damaged, row 5 the first", "file again"
    ),
    "NaN": Plant(FOUR, with_nan, "layer 1: mlp.down_proj", "NaN", "Get the file again"),
    "nibbles turned": Plant(
        FOUR,
        lambda w: changed(w, Q, nibbles_turned),
        "layer 1: self_attn.q_proj",
        "codes are in another order",
        "lowest bits",
    ),
    "norm off by one": Plant(
        FOUR, vector(NORM, lambda n: n - 1), "layer 1: post_attention_layernorm.weight", "off by one", "Gemma"
    ),
    "norm of another": Plant(
        EIGHT,
        vector(NORM, lambda n: n.flip(0)),
        "layer 1: post_attention_layernorm.weight",
        "not the original's",
        "from the original",
    ),
    "final norm doubled": Plant(
        EIGHT,
        vector("model.norm.weight", lambda n: 2 * n),
        "model.norm.weight",
        "not the original's",
        "from the original",
    ),
    "bias lost": Plant(
        EIGHT,
        vector(K + ".bias", torch.zeros_like),
        "layer 1: self_attn.k_proj.bias",
        "not the original's",
        "from the original",
    ),
    "rope theta of another": Plant(
        EIGHT,
        lambda w: replace(w, config=replace(w.config, rope_theta=1e6)),
        "settings",
        "rope_theta is 1000000.0, and the original's is 10000.0",
        "Set rope_theta to 10000.0",
    ),
    "head not tied": Plant(EIGHT, untied, "lm_head", "tied", "head"),
}


@pytest.mark.parametrize("fault", PLANTS)
def test_a_planted_fault_is_named_with_its_place_and_its_remedy(
    copies: Callable[[str], Weights], source: Checkpoint, fault: str
) -> None:
    plant = PLANTS[fault]
    found = graves(examined(plant.change(copies(plant.format)), source))
    assert len(found) == 1, [(f.where, f.what) for f in found]
    assert plant.where in found[0].where
    assert plant.what in found[0].what
    assert plant.remedy in found[0].remedy
    assert found[0].costs


def test_a_layer_of_another_model_is_one_finding(
    copies: Callable[[str], Weights], source: Checkpoint, stranger: Checkpoint
) -> None:
    other = quantised(stranger, FOUR)
    mixed = copies(FOUR).packed | {name: other.packed[name] for name in LINEAR}
    (found,) = graves(examined(replace(copies(FOUR), packed=mixed), source))
    assert (found.where, found.what) == ("layer 1", "a layer of another model")
    assert set(found.tensors) == set(LINEAR)


def test_another_model_is_not_a_list_of_faults(source: Checkpoint, stranger: Checkpoint) -> None:
    found = graves(examined(quantised(stranger, FOUR), source))
    assert found[0].where == "all layers"
    assert "another model" in found[0].what
    assert not any("mlp" in f.where for f in found[1:])


# Files


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16"])
def test_a_sound_gguf_has_nothing_grave(tmp_path: Path, family: str, kind: str) -> None:
    source, path = gguf_copy(tmp_path, family, kind)
    found = examine_model(open_model(open_source(str(path))), original(source), None, TEXTS)
    assert graves(found) == []
    assert found.stored_as == kind.replace("F16", "float16")


def test_a_gguf_whose_q_and_k_were_not_reordered_is_found(tmp_path: Path) -> None:
    """The reader of a llama file undoes the converter's reordering; a file that has none comes out permuted."""
    source, path = gguf_copy(tmp_path, "llama", "Q8_0", turned=True)
    (found,) = graves(examine_model(open_model(open_source(str(path))), original(source), None, TEXTS))
    assert (found.where, found.what) == ("layers 0-2: self_attn.q_proj, self_attn.k_proj", "its rows are permuted")


def gguf_copy(folder: Path, family: str, kind: str, turned: bool = False) -> tuple[Checkpoint, Path]:
    of = sizes(family)
    source = checkpoint(folder / "original", of)
    tensors = trained(of)
    types = {n: gguf.GGMLQuantizationType[kind] for n in tensors if n.endswith("_proj.weight")}
    if turned:
        for name in types:
            if ".q_proj." in name or ".k_proj." in name:
                heads = of.num_heads if ".q_proj." in name else of.num_kv_heads
                rows = np.arange(tensors[name].shape[0])
                back = np.argsort(interleaved(rows[:, None], heads)[:, 0])
                tensors[name] = tensors[name][back]
    return source, write_gguf(folder / "copy.gguf", of, tensors=tensors, types=types)


def test_a_vocabulary_that_was_padded_is_no_fault(copies: Callable[[str], Weights], source: Checkpoint) -> None:
    sound = copies(EIGHT)
    head = sound.packed["lm_head"]
    assert head.scales is not None
    wider = replace(
        head,
        shape=(head.shape[0] + 5, head.shape[1]),
        codes=torch.cat([head.codes, head.codes[:5]]),
        scales=torch.cat([head.scales, head.scales[:5]]),
    )
    padded = replace(
        sound,
        config=replace(sound.config, vocab_size=sound.config.vocab_size + 5),
        packed=sound.packed | {"lm_head": wider, "model.embed_tokens": wider},
    )
    assert graves(examined(padded, source)) == []


def test_a_model_of_other_sizes_is_not_compared_weight_by_weight(source: Checkpoint, tmp_path: Path) -> None:
    deeper = checkpoint(tmp_path / "deeper", sizes(num_layers=4))
    found = examine_model(original(deeper), original(source), None, TEXTS)
    assert [f.what for f in graves(found)] == ["num_layers is 4, and the original's is 3"]
    assert all(tensor.match is None for tensor in found.tensors)


def test_without_an_original_only_what_needs_none_is_judged(
    copies: Callable[[str], Weights], source: Checkpoint
) -> None:
    alone = Model("copy", with_nan(copies(FOUR)), source.tokenizer())
    found = examine_model(alone, None, None, TEXTS)
    assert [f.where for f in graves(found)] == ["layer 1: mlp.down_proj"]
    assert found.logits is None


# Settings of the file


def test_what_config_json_says_is_held_against_the_tensors(
    copies: Callable[[str], Weights], source: Checkpoint
) -> None:
    said = Declared("gptq", bits=4, group=128, symmetric=False, ignored=(DOWN,))
    copy = Model("copy", copies(FOUR), source.tokenizer(), said)
    found = {f.what: f for f in graves(examine_model(copy, original(source), None, TEXTS))}
    assert "config.json says group_size 128, and the tensors say 32" in found
    assert "config.json says symmetric False, and the tensors say True" in found
    assert found["config.json says that it is not quantised, and it is"].where == "layer 1: mlp.down_proj"
    assert len(found) == 3
    right = replace(copy, declared=Declared("gptq", bits=4, group=32, symmetric=True, ignored=("lm_head",)))
    assert graves(examine_model(right, original(source), None, TEXTS)) == []


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, Declared("gptq", 4, 128, True, ())),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "modules_to_not_convert": ["a"]},
            Declared("awq", 4, 64, False, ("a",)),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "ignore": ["lm_head"],
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "symmetric": True, "group_size": None}}},
            },
            Declared("compressed-tensors", 8, None, True, ("lm_head",)),
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {}, "group_1": {}}}, None),
        (None, None),
    ],
)
def test_the_quantisation_that_a_folder_declares(tmp_path: Path, said: object, wanted: Declared | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    assert declared(tmp_path) == wanted


# Tokenizer and template


def tokenizer(template: str | None = TEMPLATE, eos: tuple[int, ...] = (2,), bos: int | None = None) -> Tokenizer:
    return Tokenizer(backend(), origin="copy", eos_ids=eos, bos_id=bos, chat_template=template)


@pytest.mark.parametrize(
    ("own", "where", "what", "remedy"),
    [
        (tokenizer(TEMPLATE.replace("<|im_end|>", "</s>")), "chat template", "</s>", "original's chat template"),
        (tokenizer(None), "chat template", "there is none", "Copy chat_template.jinja"),
        (tokenizer("{{ raise_exception('no') }}"), "chat template", "refuses", "original's chat template"),
        (tokenizer(eos=(0,)), "eos_token_id", "does not end at '<|im_end|>'", "Copy eos_token_id"),
        (tokenizer(eos=()), "eos_token_id", "does not end at '<|im_end|>'", "Copy eos_token_id"),
        (tokenizer(bos=1), "tokenizer and chat template", "begins with 2", "add_bos_token to false"),
    ],
)
def test_a_fault_of_tokenizer_or_template_is_found(
    source: Checkpoint, own: Tokenizer, where: str, what: str, remedy: str
) -> None:
    wanted = Model("original", original(source).weights, tokenizer())
    found = graves(examine_model(replace(wanted, tokenizer=own), wanted, None, TEXTS))
    assert len(found) == 1, [(f.where, f.what) for f in found]
    assert where in found[0].where
    assert what in found[0].what
    assert remedy in found[0].remedy


def test_a_template_that_doubles_its_beginning_is_found(source: Checkpoint) -> None:
    begun = "<|endoftext|>" + TEMPLATE
    wanted = Model("original", original(source).weights, tokenizer(begun))
    doubled = replace(wanted, tokenizer=tokenizer("<|endoftext|>" + begun))
    whats = [f.what for f in graves(examine_model(doubled, wanted, None, TEXTS))]
    assert "a chat prompt begins with 2 beginning tokens, the original's with 1" in whats
    # Llama 3's own files double theirs: what the original does, too, is no fault of the copy.
    both = replace(wanted, tokenizer=tokenizer(begun, bos=0))
    assert graves(examine_model(both, both, None, TEXTS)) == []


def other_vocabulary() -> Tokenizer:
    pieces = json.loads(backend().to_str())
    names = sorted(pieces["model"]["vocab"], key=pieces["model"]["vocab"].get)
    pieces["model"]["vocab"] = {
        name: (i - 3 + 7) % (len(names) - 3) + 3 if i > 2 else i for i, name in enumerate(names)
    }
    return Tokenizer(
        tokenizers.Tokenizer.from_str(json.dumps(pieces)), origin="other", eos_ids=(2,), chat_template=TEMPLATE
    )


# As a draft


def test_a_draft_of_itself_is_always_accepted(copies: Callable[[str], Weights], source: Checkpoint) -> None:
    found = examined(copies("f32"), source, target=Model("target", copies("f32"), source.tokenizer()))
    assert found.draft is not None
    assert found.draft.acceptance == pytest.approx(1, abs=1e-5)  # sums of float32 probabilities
    assert graves(found) == []


def test_a_draft_with_another_vocabulary_says_which_ids_differ(source: Checkpoint) -> None:
    wanted = original(source)
    target = replace(wanted, name="big", tokenizer=other_vocabulary())
    (found,) = graves(examine_model(wanted, wanted, target, TEXTS))
    assert found.where == "as the draft of big"
    assert "token ids mean one thing to the target" in found.costs
    assert "family" in found.remedy


def test_a_damaged_draft_is_told_from_a_wrong_one(
    copies: Callable[[str], Weights], source: Checkpoint, stranger: Checkpoint
) -> None:
    sharp = sharpened(original(source))
    broken = replace(sharp, weights=changed(sharp.weights, "lm_head", lambda p: replace(p, codes=p.codes.flip(0))))
    found = {f.where: f for f in graves(examine_model(broken, sharp, sharp, TEXTS))}
    damaged = found["as the draft of original"]
    assert "quantisation lost the rest" in damaged.what
    assert damaged.remedy == "Mend the faults above"
    other = sharpened(original(stranger))
    (wrong,) = graves(examine_model(other, other, sharp, TEXTS))
    assert "the original does no better" in wrong.what
    assert wrong.remedy == "Choose another draft"


def sharpened(model: Model) -> Model:
    """With logits as large as a trained model's: untrained distributions are flat, and flat ones overlap."""
    norm = model.weights.tensors["model.norm.weight"] * 8
    return replace(model, weights=replace(model.weights, tensors=model.weights.tensors | {"model.norm.weight": norm}))


# What is printed


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([K], "layer 1: self_attn.k_proj"),
        ([f"model.layers.{i}.mlp.up_proj" for i in (0, 1, 2, 5)], "layers 0-2, 5: mlp.up_proj"),
        ([K, V, "lm_head"], "layer 1: self_attn.k_proj, self_attn.v_proj; lm_head"),
    ],
)
def test_places_are_short(names: list[str], words: str) -> None:
    assert places(names) == words


def test_text_and_json_say_the_same(copies: Callable[[str], Weights], source: Checkpoint) -> None:
    found = examined(changed(copies(EIGHT), K, scaled(2)), source)
    console = Console(width=160)
    with console.capture() as capture:
        render_model(found, console)
    said = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert not said["well"]
    for finding in said["findings"]:
        assert finding["where"] in capture.get()
        assert finding["remedy"] in capture.get()
    (tensor,) = [t for t in said["tensors"] if t["name"] == K]
    assert tensor["match"]["gain"] == pytest.approx(2, rel=1e-3)  # half a step of 127 in each of 64 products
    assert said["causes"][K] == {"kind": "factor", "other": "", "value": pytest.approx(2, rel=1e-3)}
