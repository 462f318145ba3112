"""How far does each quantisation method move a model from itself? KL and overlap on held-out text.

    python benchmarks/methods.py smollm2-135m -o benchmarks/results/methods.jsonl --formats w4a16-asym,w2a16-asym
    python benchmarks/methods.py smollm2-135m -o ... --formats w8a8,w8a8-out16 --methods nearest --against bf16

Every recipe is scored beside the model's own f32 version, or another, on the built-in code and chat prompts, which
calibration does not read. A row for each recipe is added as soon as it is known; those that are there are not made
again.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bitdraft.errors import FormatError
from bitdraft.formats import KV_FORMATS, METHODS, Recipe
from bitdraft.measure.workload import calibration_texts, conversations, plain_text
from bitdraft.models.cached import CachedModel
from bitdraft.models.decoder import Decoder, prepare_model
from bitdraft.ops.machine import torch_on_all_cores
from bitdraft.quantize.load import Source, open_source
from bitdraft.quantize.pipeline import quantize
from bitdraft.types import Feed

LENGTH = 160
"""Tokens of each text that are scored, at most."""


def log_probs(source: Source, recipe: Recipe, texts: list[list[int]], tokens: int) -> Iterator[Tensor]:
    calibration = [source.tokenizer.encode(text) for text in calibration_texts()]
    rng = np.random.default_rng(0)
    with torch_on_all_cores():
        weights = quantize(source.checkpoint, recipe, rng=rng, calibration=calibration, tokens=tokens)
        decoder = Decoder(prepare_model(weights))
    size = source.tokenizer.vocab_size
    model = CachedModel(decoder, kv_tokens=LENGTH, vocab_size=size, kv=KV_FORMATS["f32"])
    for ids in texts:
        yield model.forward([Feed(0, ids, 0, 0)]).log_softmax(-1)
        model.release(0)


def recipes(formats: str, methods: str) -> Iterator[Recipe]:
    for form in formats.split(","):
        for method in methods.split(","):
            try:
                yield Recipe.parse(f"{form}-{'rtn' if method == 'nearest' else method}")
            except FormatError:  # a method that does nothing for this format
                continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--formats", default="w4a8,w4a16-asym,w3a16-asym,w2a16-asym")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--against", default="f32", help="format of the model that the others are compared with")
    parser.add_argument("--texts", type=int, default=4, help="of each workload that are scored")
    parser.add_argument("--tokens", type=int, default=2048, help="of calibration")
    given = parser.parse_args()
    source = open_source(given.model)
    texts = [
        source.tokenizer.encode(t)[:LENGTH]
        for w in ("code", "chat-en", "chat-zh")
        for t in map(plain_text, conversations(w, given.texts))
    ]
    rows = [json.loads(line) for line in given.output.read_text().splitlines()] if given.output.exists() else []
    asked = {"model": given.model, "tokens": given.tokens, "against": given.against, "texts": given.texts}
    before = {"against": "f32", "texts": 4}  # in rows of older runs
    done = {row["recipe"] for row in rows if asked.items() <= (before | row).items()}
    exact: list[Tensor] = []
    for recipe in recipes(given.formats, given.methods):
        if recipe.name in done:
            continue
        exact = exact or list(log_probs(source, Recipe.parse(given.against), texts, given.tokens))
        kl, overlap = [], []
        for p, q in zip(exact, log_probs(source, recipe, texts, given.tokens), strict=True):
            kl.append((p.exp() * (p - q)).sum(-1))
            overlap.append(torch.minimum(p.exp(), q.exp()).sum(-1))
        each = torch.cat(kl)
        row = asked | {
            "recipe": recipe.name,
            "kl": float(each.mean()),
            "kl_error": float(each.std() / len(each) ** 0.5),
            "overlap": float(torch.cat(overlap).mean()),
            "positions": len(each),
        }
        with given.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{recipe.name:28} KL {row['kl']:.4f} +- {row['kl_error']:.4f} nats, sum min(p, q) {row['overlap']:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
