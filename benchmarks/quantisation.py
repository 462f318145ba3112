"""How much of the 16-bit draft's acceptance does a recipe keep? The table of docs/log.md, for the Qwen pair.

    python benchmarks/quantisation.py table FOLDER      each recipe on the texts of a measurement, to a table
    python benchmarks/quantisation.py prices FOLDER     prices against true single changes, and sums against the whole
    python benchmarks/quantisation.py traffic FOLDER    the target answers the other prompts of the same workloads, to a
                                                        file for --calibration

FOLDER is what `bitdraft measure -o` wrote, or a saved probe. The first two go on where they stopped: lines are
kept in benchmarks/results.
Recipes are those of `bitdraft quantize`; `mixed-BITS` is an allocation within so many bits a weight, the head counted,
and `mixed-BITS-head8` one of the layers beside an 8-bit head; both are rounded by method clip, or by the one that
follows a plus: `mixed-3.5-head8+awq-gptq`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitdraft.formats import METHODS, Format, Recipe, get_format
from bitdraft.measure.probe_texts import probe_of_folder
from bitdraft.measure.stats import combine, ratio_of_sums, resample
from bitdraft.measure.texts import calibration_ids, tokenise, write_texts
from bitdraft.measure.workload import calibration_texts, conversations, load_workload
from bitdraft.models.cached import CachedModel
from bitdraft.models.checkpoint import Weights
from bitdraft.models.decoder import Decoder, prepare_model
from bitdraft.models.tokenizer import check_pair
from bitdraft.quantize.allocate import HEAD, allocate, candidates
from bitdraft.quantize.load import load_model, open_source
from bitdraft.quantize.mixed import layer_rows, save_allocation, summary_rows, uniform_kl
from bitdraft.quantize.objective import Budget, Response
from bitdraft.quantize.pipeline import LINEAR, quantize
from bitdraft.quantize.probe import AcceptanceProbe
from bitdraft.quantize.sensitivity import Sensitivities, least_squares, sensitivities
from bitdraft.quantize.teacher_forced import TeacherForced
from bitdraft.types import SamplingParams

RESULTS = Path(__file__).parent / "results"
RECIPES = (
    "bf16,fp8,w8a8,w4a16,w4a16-clip,w4a16-g64-asym-clip,w4a8,w3a16-asym,w3a16-asym-clip,w2a16-asym-clip,"
    "mixed-4.25-head8,mixed-4.25,mixed-3.5-head8,mixed-3.5"
)
ANCHORS = ("w4a16-g64-asym", "w3a16-g64-asym")
PRICED_TEXTS, PRICED_TOKENS, SEED = 3, 32, 0
ANSWER_TOKENS, SIDE_BY_SIDE = 112, 16


def say(done: int, total: int | None, what: str) -> None:
    if done == total:
        print(f"  {what}", file=sys.stderr, flush=True)


class Pair:
    """A draft, the probe of a folder, and the prices of the draft's tensors."""

    def __init__(self, folder: Path, draft: str, texts: int, tokens: int, calibration: Path | None, read: int) -> None:
        whole = AcceptanceProbe.load(folder) if (folder / "probe.json").exists() else probe_of_folder(folder)
        self.probe = whole.short(texts, tokens)
        self.priced = whole.short(PRICED_TEXTS, PRICED_TOKENS)
        self.draft, target = open_source(draft), open_source(whole.target.model)
        self.width, self.usable = target.tokenizer.vocab_size, check_pair(target.tokenizer, self.draft.tokenizer)
        self.path = RESULTS / f"quantisation-{self.probe.digest[:8]}.jsonl"
        self.notes = RESULTS / f"quantisation-{self.priced.digest[:8]}-prices.jsonl"
        self._calibration, self._read = calibration, read
        self._reference: TeacherForced | None = None

    @property
    def reference(self) -> TeacherForced:
        """The draft in FP32 on the texts that prices are taken on."""
        self._reference = self._reference or TeacherForced(self.draft.checkpoint, self.priced, self.usable, say)
        return self._reference

    def prices(self) -> Sensitivities:
        """What every candidate costs in every tensor."""
        path = RESULTS / f"quantisation-{self.priced.digest[:8]}-sensitivity.jsonl"
        rng = np.random.default_rng(SEED)
        return sensitivities(self.reference, candidates(), rng=rng, path=path, progress=print_progress)

    def uniform(self, name: str) -> dict[str, Any]:
        """A uniform format with an 8-bit head, run in FP32 on the texts that prices are taken on."""
        form = get_format(name)

        def change(tensor: str, weight: torch.Tensor) -> torch.Tensor:
            return least_squares(weight, get_format("w8a16") if tensor == HEAD else form)

        return kept(self.notes, f"whole {name}", lambda: vars(self.reference.changed(change, progress=say)))

    def response(self, prices: Sensitivities) -> Response:
        """Acceptance by KL, through uniform formats."""
        points = [(uniform_kl(prices, get_format(name), "w8a16"), self.uniform(name)["acceptance"]) for name in ANCHORS]
        return Response.fit(prices.acceptance, points)

    def mixed(self, name: str) -> Recipe:
        """The allocation of a name such as 'mixed-3.5-head8', printed and kept."""
        allocation, _, method = name.partition("+")
        _, bits, *head = allocation.split("-")
        prices, config = self.prices(), self.draft.checkpoint.config
        budget = Budget.parse(f"{bits}bits", with_head=not head)
        fixed = "w8a16" if head else None
        found = allocate(config, prices, candidates(), budget, self.response(prices), head=fixed)
        save_allocation(found, RESULTS / f"quantisation-{self.priced.digest[:8]}-{allocation}.json")
        for headings, rows in (summary_rows(found), layer_rows(found)):
            print("\n".join("  ".join(f"{cell:>9}" for cell in row) for row in (headings, *rows)), flush=True)
        return found.recipe(method) if method in METHODS else found.recipe()

    def weights(self, name: str) -> Weights:
        """The draft in a recipe of this file."""
        recipe = self.mixed(name) if name.startswith("mixed-") else Recipe.parse(name)
        said = conversations(str(self._calibration), None) if self._calibration else calibration_texts()
        ids = calibration_ids(said, self.draft.tokenizer)
        rng = np.random.default_rng(SEED)
        return quantize(self.draft.checkpoint, recipe, rng=rng, calibration=ids, tokens=self._read)

    def label(self, name: str) -> str:
        """What a line is kept under: the recipe, and what it was calibrated on unless that is the built-in set."""
        plain = f"w4a16-{name.partition('+')[2] or 'clip'}" if name.startswith("mixed-") else name
        if not (self._calibration and Recipe.parse(plain).calibrated):
            return name
        return f"{name} ({self._calibration.stem}, {self._read} tokens)"

    def judge(self, name: str) -> dict[str, Any]:
        """Bits, and the overlaps of every text."""
        weights = self.weights(name)
        layers = {n: w for n, w in weights.packed.items() if n.startswith("model.layers.")}
        counts = [w.shape[0] * w.shape[1] for w in layers.values()]
        head = weights.packed["lm_head"]
        sizes = sum(w.nbytes for w in layers.values())
        longest = max(len(text.context) for text in self.probe.texts)
        decoder = Decoder(prepare_model(weights))
        model = CachedModel(decoder, kv_tokens=longest, vocab_size=self.width, usable=self.usable)
        overlaps = self.probe.judge(model, say, name)
        return {
            "bits": 8 * (sizes + head.nbytes) / (sum(counts) + head.shape[0] * head.shape[1]),
            "bits_without_head": 8 * sizes / sum(counts),
            "overlaps": [[round(v, 6) for v in overlap.tolist()] for overlap in overlaps],
        }


def print_progress(done: int, total: int | None, what: str) -> None:
    print(f"  {what} {done}/{total}", file=sys.stderr, flush=True)


def kept(path: Path, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a line of a .jsonl file says under a name, or what is made now and appended."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for line in lines:
        if line["name"] == name:
            return dict(line)
    found = {"name": name, **make()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    return found


def table(pair: Pair, names: list[str]) -> None:
    lines = {}
    for name in names:
        label = pair.label(name)
        lines[label] = kept(pair.path, label, lambda name=name: pair.judge(name))  # type: ignore[misc]
    probe = pair.probe
    print(f"\n{len(probe.texts)} texts, {probe.tokens} tokens, {pair.draft.name} for {probe.target.model}\n")
    print(
        "| recipe | bits | layers | "
        + " | ".join(f"{w}: acceptance, share" for w in pair.probe.workloads)
        + " | both |"
    )
    print("|---|---|---|" + "---|" * (len(pair.probe.workloads) + 1))
    for name, line in lines.items():
        cells = [cell(pair.probe, line, lines["bf16"], [w]) for w in pair.probe.workloads]
        cells.append(cell(pair.probe, line, lines["bf16"], list(pair.probe.workloads)))
        print(f"| {name} | {line['bits']:.2f} | {line['bits_without_head']:.2f} | {' | '.join(cells)} |")
    for better, worse in pairs_to_compare(lines):
        found = " | ".join(
            f"{w} {difference(pair.probe, lines[better], lines[worse], [w])}" for w in pair.probe.workloads
        )
        both = difference(pair.probe, lines[better], lines[worse], list(pair.probe.workloads))
        print(f"{better} less {worse}, points of acceptance: {found} | both {both}")


def write_traffic(probe: AcceptanceProbe, path: Path) -> None:
    """Let the target answer the prompts that the probe's texts do not answer, and write the conversations as JSONL."""
    target, sampling = open_source(probe.target.model), SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    probed = {(text.workload, text.index) for text in probe.texts}
    prompts = [p for w in probe.workloads for p in load_workload(w, None) if (p.workload, p.index) not in probed]
    ids = tokenise(prompts, target.tokenizer, ANSWER_TOKENS, target.checkpoint.config.context_length)
    room = SIDE_BY_SIDE * (max(map(len, ids.values())) + 2 * ANSWER_TOKENS)
    model = load_model(target, Recipe.parse("w8a8-ag32"), kv_tokens=room, rng=np.random.default_rng(SEED))
    asked = {(p.workload, p.index): p for p in prompts}
    end = tuple(target.tokenizer.eos_ids)
    with path.open("w", encoding="utf-8") as file:
        written = write_texts(model, ids, sampling, end, SIDE_BY_SIDE, time.perf_counter)
        for done, (text, _) in enumerate(written, start=1):
            prompt, answer = asked[text.workload, text.index], target.tokenizer.decode(text.ids)
            said = [*(prompt.messages or ()), {"role": "assistant", "content": answer}]
            record = {"messages": said} if prompt.text is None else {"text": prompt.text + answer}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            print_progress(done, len(ids), "target answers")


def pairs_to_compare(lines: dict[str, Any]) -> Iterator[tuple[str, str]]:
    uniform = {"4.25": ("w4a16", "w4a16-clip", "w4a16-g64-asym-clip"), "3.5": ("w3a16-asym", "w3a16-asym-clip")}
    for name in lines:
        if name.startswith("mixed-"):
            yield from ((name, other) for other in uniform.get(name.split("-")[1], ()) if other in lines)


def sums(probe: AcceptanceProbe, line: dict[str, Any], workloads: list[str]) -> tuple[np.ndarray, np.ndarray]:
    chosen = [o for text, o in zip(probe.texts, line["overlaps"], strict=True) if text.workload in workloads]
    return np.array([sum(o) for o in chosen]), np.array([float(len(o)) for o in chosen])


def cell(probe: AcceptanceProbe, line: dict[str, Any], base: dict[str, Any], workloads: list[str]) -> str:
    (mine, tokens), (full, _) = sums(probe, line, workloads), sums(probe, base, workloads)
    weights = resample(len(mine), np.random.default_rng(0))
    share = ratio_of_sums(mine, full, weights).interval()
    assert share.low is not None
    assert share.high is not None
    return f"{mine.sum() / tokens.sum():.3f}, {100 * share.value:.1f} ({100 * share.low:.1f} to {100 * share.high:.1f})"


def difference(probe: AcceptanceProbe, a: dict[str, Any], b: dict[str, Any], workloads: list[str]) -> str:
    (mine, tokens), (other, _) = sums(probe, a, workloads), sums(probe, b, workloads)
    weights = resample(len(mine), np.random.default_rng(0))
    both = [ratio_of_sums(values, tokens, weights) for values in (mine, other)]
    found = combine(lambda x, y: 100 * (x - y), *both).interval()
    return f"{found.value:+.2f} ({found.low:+.2f} to {found.high:+.2f})"


def check_prices(pair: Pair, count: int) -> None:
    """Prices beside the KL of true single changes, drawn over layers, classes and widths; and sums beside the whole."""
    prices, config = pair.prices(), pair.draft.checkpoint.config
    rng, found = np.random.default_rng(7), []
    for i in range(count):
        # Upper layers are cheaper to run: every class and width still comes as often.
        layer = int(rng.integers(config.num_layers // 3, config.num_layers))
        tensor, form = f"model.layers.{layer}.{LINEAR[i % 7]}", f"w{(2, 3, 4)[i % 3]}a16-g64-asym"
        outcome = kept(
            pair.notes,
            f"{tensor} {form}",
            lambda t=tensor, f=form, n=layer: vars(  # type: ignore[misc]
                pair.reference.changed(single(t, get_format(f)), n)
            ),
        )
        found.append((prices.kl[tensor, form], outcome["kl"], prices.acceptance - outcome["acceptance"]))
        print(
            f"{tensor} {form}: priced {found[-1][0]:.5f}, true {found[-1][1]:.5f}, lost {found[-1][2]:+.5f}", flush=True
        )
    priced, true, lost = np.array(found).T
    print(f"rank correlation of price and KL {rank(priced, true):.3f}, of price and loss {rank(priced, lost):.3f}")
    ratios = np.log(priced / true)
    print(f"price over KL: geometric mean {np.exp(ratios.mean()):.2f}, spread by a factor {np.exp(ratios.std()):.2f}")
    for name in ANCHORS:
        total, outcome = uniform_kl(prices, get_format(name), "w8a16"), pair.uniform(name)
        print(f"{name}: sum of prices {total:.4f}, KL of the whole {outcome['kl']:.4f}, {outcome['acceptance']:.4f}")


def single(tensor: str, form: Format) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda name, weight: least_squares(weight, form) if name == tensor else weight


def rank(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "prices", "traffic"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b")
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--texts", type=int, default=24, help="of each workload")
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--calibration", type=Path, help="conversations, in place of the built-in set")
    parser.add_argument("--read", type=int, default=2048, help="tokens of them")
    parser.add_argument("-o", "--output", type=Path, default=Path("traffic.jsonl"), help="for traffic")
    parser.add_argument("--changes", type=int, default=21, help="single changes that prices are held against")
    asked = parser.parse_args()
    pair = Pair(asked.folder, asked.draft, asked.texts, asked.tokens, asked.calibration, asked.read)
    if asked.what == "traffic":
        write_traffic(pair.probe, asked.output)
    elif asked.what == "table":
        table(pair, asked.recipes.split(","))
    else:
        check_prices(pair, asked.changes)


if __name__ == "__main__":
    main()
