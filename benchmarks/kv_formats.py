"""What a format of keys and values costs: logits, divergence and acceptance, at short and at long contexts.

A target and a draft read one long text (sources of Python's standard library), teacher-forced, in every format of keys
and values, and the rows of some stretches are compared with those of bfloat16. The same for rotary angles in bfloat16,
which the product never computes: positions above 256 are not numbers of that type.

    python benchmarks/kv_formats.py build/kv-formats                 # resumable: a file for each model and format
    python benchmarks/kv_formats.py build/kv-formats --table         # what is there, as Markdown

Letters: R rows, D hidden size, V vocabulary, T tokens.
"""

import argparse
import ast
import dataclasses
import decimal
import difflib
import doctest
import inspect
import sys
import tarfile
import time
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bitdraft.formats import KV_FORMATS, Recipe
from bitdraft.measure.workload import calibration_texts
from bitdraft.models.cached import CachedModel
from bitdraft.models.decoder import Decoder
from bitdraft.models.kv_scales import find_scales
from bitdraft.ops import Rotary
from bitdraft.quantize.load import Source, load_model, open_source
from bitdraft.types import Feed

TARGET, DRAFT = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
SOURCES = (argparse, ast, dataclasses, decimal, difflib, doctest, tarfile, typing)
SCORED = 128
"""Rows that are compared: the last of each context."""


def text_ids(source: Source, tokens: int) -> list[int]:
    """The first tokens of the text; each module gives 300 lines, so that there are several of them."""
    text = "\n\n".join("\n".join(inspect.getsource(module).splitlines()[100:400]) for module in SOURCES)
    ids = source.tokenizer.encode(text)
    assert len(ids) >= tokens, f"the text has {len(ids)} tokens, {tokens} are wanted"
    return ids[:tokens]


def rotary_table(decoder: Decoder, positions: int, where: str) -> Rotary:
    """Cosines and sines as bfloat16 arithmetic would give them.

    Args:
        decoder: whose angles.
        positions: how many.
        where: 'position' rounds the position alone; 'angle' its product with the frequency, too.
    """
    config = decoder.config
    frequency_C = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    at_T = torch.arange(positions, dtype=torch.float32).bfloat16()
    angle_TC = at_T.double()[:, None] * frequency_C
    if where == "angle":
        angle_TC = (at_T[:, None] * frequency_C.bfloat16()).double()
    return Rotary(angle_TC.cos().float().contiguous(), angle_TC.sin().float().contiguous())


def cases(decoder: Decoder, calibration: list[int], tokens: int) -> Iterator[tuple[str, CachedModel]]:
    """The model in every format, the exact one first; then in bfloat16 with other angles."""
    kinds = decoder._kinds_for(tokens + 64)
    for name, kv in KV_FORMATS.items():
        scales = find_scales(decoder, calibration) if kv.needs_scales else None
        yield (
            name,
            CachedModel(decoder, kv_tokens=tokens + 64, vocab_size=decoder.config.vocab_size, kv=kv, kv_scales=scales),
        )
    for where in ("position", "angle"):
        rotary = rotary_table(decoder, len(kinds[0].rotary.cos), where)
        decoder._kinds = tuple(replace(kind, rotary=rotary) for kind in kinds)
        yield (
            f"bf16, {where} in bfloat16",
            CachedModel(decoder, kv_tokens=tokens + 64, vocab_size=decoder.config.vocab_size, kv=KV_FORMATS["bf16"]),
        )
    decoder._kinds = kinds


def read(model_name: str, folder: Path, tokens: int, only: list[str]) -> None:
    """Write the hidden rows of every case that is not there yet, [T, D] float32."""
    source = open_source(model_name)
    decoder = load_model(source, Recipe.parse("w8a16"), kv_tokens=16, rng=np.random.default_rng(0)).decoder
    ids = text_ids(source, tokens)
    calibration = [token for text in calibration_texts() for token in source.tokenizer.encode(text)]
    for name, model in cases(decoder, calibration, tokens):
        file = path(folder, model_name, tokens, name)
        if file.exists() or (only and name not in only):
            continue
        started = time.perf_counter()
        hidden = model.hidden([Feed(0, ids, 0, 0)])
        np.save(file.with_suffix(".half.npy"), hidden.numpy())
        file.with_suffix(".half.npy").rename(file)
        print(f"{model_name} {tokens} {name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


def path(folder: Path, model: str, tokens: int, name: str) -> Path:
    """Where the rows of a case are kept."""
    return folder / f"{model} {tokens} {name}.npy"


def compare(p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest difference of logits, KL(p || q) in nats and sum min(p, q), [R] each."""
    width = min(p_logits.shape[1], q_logits.shape[1])  # tables that are padded differently
    p_logits, q_logits = p_logits[:, :width], q_logits[:, :width]
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    apart = (p_logits - q_logits).abs().amax(-1)
    return apart, (p.exp() * (p - q)).sum(-1), torch.minimum(p.exp(), q.exp()).sum(-1)


class Logits:
    """Logits of kept rows, stretch by stretch."""

    def __init__(self, model: str, folder: Path) -> None:
        """Load the model for its output head."""
        self._model, self._folder = model, folder
        source = open_source(model)
        self._cached = load_model(source, Recipe.parse("w8a16"), kv_tokens=16, rng=np.random.default_rng(0))

    def __call__(self, tokens: int, name: str, rows: range) -> Tensor | None:
        """Of some rows, [R, V]; None if the case is not there."""
        file = path(self._folder, self._model, tokens, name)
        if not file.exists():
            return None
        kept = np.load(file, mmap_mode="r")[rows.start : rows.stop : rows.step]
        return self._cached.logits(torch.from_numpy(np.array(kept)))


def show(values_R: Tensor, digits: int) -> str:
    """A mean with its standard error."""
    return f"{float(values_R.mean()):.{digits}f} ± {float(values_R.std()) / len(values_R) ** 0.5:.{digits}f}"


def kv_table(logits: dict[str, Logits], tokens: int) -> None:
    """For each context and format: the model against itself in bfloat16, and the draft against the target in that."""
    print(
        "| context | keys and values | model | max logit error | KL, nats | Σ min with bf16 | lost as draft, points |"
    )
    print("|---|---|---|---|---|---|---|")
    accepted = []
    for context in (c for c in (512, 2048, 8192) if c <= tokens):
        rows = range(context - SCORED, context)
        target = logits[TARGET](tokens, "bf16", rows) if TARGET in logits else None
        for model, own in logits.items():
            exact = own(tokens, "bf16", rows)
            for name in KV_FORMATS:
                got = own(tokens, name, rows)
                if got is None or exact is None or name == "bf16":
                    continue
                apart, kl, overlap = compare(exact, got)
                lost = ""
                if model == DRAFT and target is not None:
                    lost = show(100 * (compare(target, exact)[2] - compare(target, got)[2]), 2)
                figures = f"{float(apart.max()):.3f} | {show(kl, 5)} | {show(overlap, 4)} | {lost}"
                print(f"| {context} | `{name}` | {model} | {figures} |")
        if target is not None and (exact := logits[DRAFT](tokens, "bf16", rows)) is not None:
            accepted.append(f"Acceptance of the draft at {context} in bf16: {show(compare(target, exact)[2], 4)}.")
    print("", *accepted, sep="\n")


def rotary_table_of_results(logits: dict[str, Logits], tokens: int) -> None:
    """Acceptance of the draft by position, with angles in FP32 and in bfloat16."""
    print("| positions | FP32 | positions in bfloat16 | positions and angles in bfloat16 |")
    print("|---|---|---|---|")
    for start, stop in ((0, 256), (256, 512), (512, 1024), (1024, 2048)):
        rows = range(start, stop, max(1, (stop - start) // 128))
        target = logits[TARGET](tokens, "bf16", rows)
        if target is None:
            continue
        cells = []
        for name in ("bf16", "bf16, position in bfloat16", "bf16, angle in bfloat16"):
            got = logits[DRAFT](tokens, name, rows)
            cells.append("" if got is None else show(compare(target, got)[2], 4))
        print(f"| {start} to {stop - 1} | {' | '.join(cells)} |")


def main() -> None:
    """Read what is missing, or print what is there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--models", default=f"{DRAFT},{TARGET}")
    parser.add_argument("--only", default="", help="cases to read, with semicolons; all if empty")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    models = given.models.split(",")
    if not given.table:
        for model in models:
            read(model, given.folder, given.tokens, [name for name in given.only.split(";") if name])
        return
    logits = {model: Logits(model, given.folder) for model in models}
    kv_table(logits, given.tokens)
    if len(logits) == 2:
        print()
        rotary_table_of_results(logits, given.tokens)


if __name__ == "__main__":
    main()
