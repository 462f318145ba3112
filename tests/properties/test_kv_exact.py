"""Speculation changes nothing, whatever keys and values are kept in: logits to the bit, for every way to feed a text.

Plain decoding, token by token, is the measure. A schedule feeds the same text in chunks, with drafts that are taken
back, beside a neighbour, and going on in a twin that shares the blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import model_files
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import instruction_sets, kernels
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitdraft.decoding.lookahead import Fixed
from bitdraft.drafters.model import ModelDrafter
from bitdraft.engine.engine import Engine
from bitdraft.engine.sequence import Request
from bitdraft.errors import ShapeError, UsageError
from bitdraft.formats import KV_FORMATS, Recipe
from bitdraft.models import kv
from bitdraft.models.cached import CachedModel
from bitdraft.models.checkpoint import open_checkpoint
from bitdraft.models.decoder import Decoder, prepare_model
from bitdraft.models.kv_scales import find_scales
from bitdraft.ops import native
from bitdraft.ops.native import Native
from bitdraft.quantize.pipeline import quantize
from bitdraft.types import Feed, SamplingParams

LENGTH = 330
"""Enough for blocks to be read in codes from 144 on, to give up copies, and for a second chunk of 256."""
TEXT = tuple(int(i) for i in np.random.default_rng(0).integers(0, 256, LENGTH))
WRONG = tuple(int(i) for i in np.random.default_rng(1).integers(0, 256, 64))

CODED = [name for name, known in KV_FORMATS.items() if known.bits]
every_kind = pytest.mark.parametrize("kind", KV_FORMATS)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest kernels, with two threads, whatever the environment asks for."""
    use(monkeypatch, instruction_sets()[-1])


def use(patch: pytest.MonkeyPatch, isa: str) -> None:
    patch.setattr(native, "default", lambda: kernels(isa, 2))


@cache
def decoder(isa: str, layers: int = 2) -> Decoder:
    """A model of random weights that attends to all of a text, prepared for the kernels in use."""
    with TemporaryDirectory() as folder:
        model_files.write_folder(Path(folder), model_files.config("qwen2", context_length=512, num_layers=layers))
        file = Path(folder) / "model.safetensors"
        soft = {name: x * 0.1 if "q_proj" in name else x for name, x in load_file(file).items()}
        save_file(soft, file)
        weights = quantize(open_checkpoint(Path(folder)), Recipe.parse("w8a16"), rng=np.random.default_rng(0))
    return Decoder(prepare_model(weights))


def cached(kind: str, isa: str = instruction_sets()[-1], layers: int = 2, kv_tokens: int = 2048) -> CachedModel:
    made = decoder(isa, layers)
    scales = find_scales(made, TEXT) if kind == "fp8" else None
    return CachedModel(
        made, kv_tokens=kv_tokens, vocab_size=made.config.vocab_size, kv=KV_FORMATS[kind], kv_scales=scales
    )


@cache
def plain(kind: str, isa: str = instruction_sets()[-1]) -> Tensor:
    """Logits of plain decoding, [LENGTH, V]."""
    model = cached(kind, isa)
    return torch.cat([model.forward([Feed(0, TEXT[i : i + 1], i, 0)]) for i in range(LENGTH)])


@dataclass(frozen=True)
class Step:
    """Feed so many tokens of the text, then so many wrong ones that are taken back.

    Attributes:
        count, wrong: tokens.
        beside: another request is fed in the same call. twin: go on in a fork, and leave the old request behind.
    """

    count: int
    wrong: int = 0
    beside: bool = False
    twin: bool = False


steps = st.builds(Step, st.integers(1, 200), st.integers(0, 64), st.booleans(), st.booleans())


def play(model: CachedModel, schedule: list[Step]) -> Tensor:
    """Feed the whole text by a schedule, over and over; the logits of its tokens, [LENGTH, V]."""
    rows, at, request, other = [], 0, 0, 1000
    for step in (schedule * LENGTH)[:LENGTH]:
        if at == LENGTH:
            break
        count = min(step.count, LENGTH - at)
        feeds = [Feed(request, (*TEXT[at : at + count], *WRONG[: step.wrong]), at, 0)]
        if step.beside:
            feeds.insert(0, Feed(other, WRONG[:20], model.length(other), 20))
            if model.length(other) > 300:
                model.release(other)
                feeds[0] = Feed(other, WRONG[:20], 0, 20)
        rows.append(model.forward(feeds)[:count])
        at += count
        model.truncate(request, at)
        if step.twin:
            model.fork(request, request + 1)
            if step.wrong % 2:  # the old one stays for a while and writes on
                model.forward([Feed(request, WRONG[:5], at, 5)])
            model.release(request)
            request += 1
    model.release(request)
    model.release(other)
    assert model.pool.num_free == model.pool.num_blocks
    if model.pool.format.bits:
        assert bool((model.pool.layers[0].coded.copies == -1).all())
    return torch.cat(rows)


@every_kind
@settings(max_examples=12, deadline=None)
@given(schedule=st.lists(steps, min_size=1, max_size=6))
def test_logits_do_not_depend_on_the_schedule(kind: str, schedule: list[Step]) -> None:
    assert torch.equal(play(cached(kind), schedule), plain(kind))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("kind", ["fp8", *CODED])
def test_a_long_prompt_in_one_call_reads_as_token_by_token(
    kind: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, isa)
    assert torch.equal(play(cached(kind, isa), [Step(LENGTH)]), plain(kind, isa))


@every_kind
def test_greedy_texts_are_those_of_plain_decoding(kind: str) -> None:
    """Two requests side by side, drafted by a part of the model in another cache."""
    outputs = {}
    for drafted in (False, True):
        drafter = ModelDrafter(cached("int4", layers=1), Fixed(5), ()) if drafted else None
        engine = Engine(cached(kind), drafter, eos_ids=(), max_draft=5 if drafted else 0, max_batch=2, max_rows=64)
        for number in (0, 1):
            prompt = TEXT[: 150 + 20 * number]
            engine.submit(Request(number, prompt, SamplingParams(temperature=0, max_tokens=60)))
        for emission in engine.run():
            outputs.setdefault((drafted, emission.request), []).extend(emission.tokens)
    assert all(outputs[False, number] == outputs[True, number] for number in (0, 1))
    assert len(outputs[True, 0]) == 60


@pytest.mark.parametrize("kind", CODED)
def test_codes_are_read_at_all(kind: str) -> None:
    """Rows before 144 are those of a plain bfloat16 cache to the bit; no later one is."""
    exact, coded = plain("bf16"), plain(kind)
    assert torch.equal(exact[:144], coded[:144])
    assert bool((exact[144:] != coded[144:]).any(-1).all())


# Bugs that these tests have to notice


def verify_reads_codes_a_block_early(patch: pytest.MonkeyPatch) -> None:
    honest = Native.run_layers

    def run(self: Native, x_RD: Tensor, stack: object, batch: object, rotary: object, cache: object, *more: object):
        for layer in cache.compiled.kv if cache.compiled else ():
            layer.coded.contents.window = 128 - 16 * (len(x_RD) > 1)
        return honest(self, x_RD, stack, batch, rotary, cache, *more)

    patch.setattr(Native, "run_layers", run)


def blocks_are_encoded_before_they_are_full(patch: pytest.MonkeyPatch) -> None:
    honest = kv.BlockTable._settle

    def settle(self: kv.BlockTable, count: int, kept: int) -> None:
        honest(self, count, kept)
        wanted = min((self.length + count) // 16, len(self.blocks))
        if wanted > self.encoded:
            kv.encode_blocks(self._pool.layers, self.blocks[self.encoded : wanted])
            self.encoded = wanted

    patch.setattr(kv.BlockTable, "_settle", settle)


def copies_are_given_up_one_block_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv, "LONGEST_ROLLBACK", -16)


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize(
    "plant",
    [verify_reads_codes_a_block_early, blocks_are_encoded_before_they_are_full, copies_are_given_up_one_block_early],
)
def test_a_planted_bug_is_noticed(
    kind: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, schedule = plain(kind), [Step(5, 8)]
    assert torch.equal(play(cached(kind), schedule), expected)
    plant(monkeypatch)
    try:
        got = play(cached(kind), schedule)
    except (ShapeError, UsageError):
        return
    assert not torch.equal(got, expected)


@pytest.mark.parametrize("kind", CODED)
def test_what_cannot_be_taken_back_is_refused(kind: str) -> None:
    """Anything up to the longest draft can; all can; and so can all of a call that failed."""
    model = cached(kind)
    model.forward([Feed(0, TEXT, 0, LENGTH)])
    model.truncate(0, 20)  # one call: nothing of it was settled
    model.forward([Feed(0, TEXT[20:], 20, LENGTH - 20)])
    model.forward([Feed(0, TEXT[:1], LENGTH, 1)])
    with pytest.raises(UsageError, match=f"311 of 331 tokens .*{kind}.* 64 can"):
        model.truncate(0, 20)
    model.truncate(0, LENGTH - 63)
    model.truncate(0, 0)
    assert torch.equal(model.forward([Feed(0, TEXT, 0, 0)]), plain(kind))


@pytest.mark.parametrize("kind", CODED)
def test_a_cache_that_is_full_half_way_is_as_it_was(kind: str) -> None:
    model = cached(kind, kv_tokens=256)
    model.forward([Feed(0, TEXT[:10], 0, 10)])
    with pytest.raises(kv.OutOfBlocks):
        model.forward([Feed(1, TEXT[:3], 0, 3), Feed(0, TEXT[10:], 10, 0)])
    assert (model.length(0), model.length(1), model.pool.num_free) == (10, 0, 15)
    assert torch.equal(model.forward([Feed(0, TEXT[10:200], 10, 0)]), plain(kind)[10:200])
