"""Does a second tier of inputs pay: kept in 8 bits with a scale for every 32, behind those in 16 bits?

    BITDRAFT_ISA=reference python benchmarks/outlier_tiers.py smollm2-135m --formats w8a8,w4a8

KL from bf16 on built-in prompts with 16 inputs of each layer in 16 bits; with the next ones, up to 64, in 8 bits beside
them (inputs with a scale for every 32 of them, weights with one for each output); and with all 64 in 16 bits. The
second tier is made here, in the reference path, and nowhere else.
"""

import argparse
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bitdraft.formats import KV_FORMATS, Recipe, get_format
from bitdraft.measure.workload import calibration_texts, conversations, plain_text
from bitdraft.models.cached import CachedModel
from bitdraft.models.checkpoint import Weights
from bitdraft.models.decoder import Decoder, prepare_model
from bitdraft.ops import native, reference
from bitdraft.ops.encoding import dequantize, round_activations
from bitdraft.ops.packed import Outliers, Packed
from bitdraft.quantize.load import Source, open_source
from bitdraft.quantize.pipeline import quantize
from bitdraft.types import Feed

LENGTH = 160
FIRST, ALL = 16, 64

_second: dict[int, Tensor] = {}
"""The columns of the second tier, by the address of the first ones: what the reference path has no place for."""


def _matmul(x_RK: Tensor, weight: reference.DecodedWeight) -> Tensor:
    rounded = round_activations(x_RK, weight.activation, weight.columns)
    if weight.columns is not None and (columns := _second.get(weight.columns.data_ptr())) is not None:
        rounded[:, columns] = round_activations(x_RK[:, columns], "int8_g32")
    return functional.linear(rounded, weight.values)


def in_tiers(few: Packed, many: Packed) -> Packed:
    """`many` with the columns that `few` has not in 8 bits."""
    if few.outliers is None or many.outliers is None:
        return many
    rest = [i for i, column in enumerate(many.columns) if column not in few.columns]
    columns, side = many.outliers.columns.clone(), many.outliers.side.clone()
    side[:, rest] = dequantize(get_format("w8a8").encode(side[:, rest].float())).bfloat16()
    _second[columns.data_ptr()] = columns[rest].long()
    return replace(many, outliers=Outliers(columns, side))


def log_probs(source: Source, weights: Weights, texts: list[list[int]]) -> Tensor:
    decoder = Decoder(prepare_model(weights))
    model = CachedModel(decoder, kv_tokens=LENGTH, vocab_size=source.tokenizer.vocab_size, kv=KV_FORMATS["f32"])
    found = []
    for ids in texts:
        found.append(model.forward([Feed(0, ids, 0, 0)]).log_softmax(-1))
        model.release(0)
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--formats", default="w8a8,w4a8")
    parser.add_argument("--texts", type=int, default=2, help="of each workload that are scored")
    parser.add_argument("--tokens", type=int, default=1024, help="of calibration")
    given = parser.parse_args()
    assert native.default() is None, "set BITDRAFT_ISA=reference: the second tier is made in the reference path"
    reference._matmul = _matmul
    source = open_source(given.model)
    texts = [
        source.tokenizer.encode(t)[:LENGTH]
        for w in ("code", "chat-en", "chat-zh")
        for t in map(plain_text, conversations(w, given.texts))
    ]
    calibration = [source.tokenizer.encode(text) for text in calibration_texts()]

    def weights(name: str) -> Weights:
        rng = np.random.default_rng(0)
        return quantize(source.checkpoint, Recipe.parse(name), rng=rng, calibration=calibration, tokens=given.tokens)

    def report(name: str, made: Weights) -> None:
        each = (exact.exp() * (exact - log_probs(source, made, texts))).sum(-1)
        error = float(each.std()) / len(each) ** 0.5
        print(f"{name:24} {made.nbytes / 1e6:8.1f} MB  KL {float(each.mean()):.4f} +- {error:.4f} nats", flush=True)

    exact = log_probs(source, weights("bf16"), texts)
    for form in given.formats.split(","):
        few, many = weights(f"{form}-out{FIRST}"), weights(f"{form}-out{ALL}")
        report(form, weights(form))
        report(f"{form}-out{FIRST}", few)
        packed = {name: in_tiers(few.packed[name], many.packed[name]) for name in many.packed}
        if source.checkpoint.config.tied_head:
            packed["model.embed_tokens"] = packed["lm_head"]
        report(f"{form}, {FIRST} and {ALL - FIRST} in 8 bits", replace(many, packed=packed))
        report(f"{form}-out{ALL}", many)


if __name__ == "__main__":
    main()
