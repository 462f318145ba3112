"""What a measurement leaves on disk. Everything right of it is pure: it can be run again without a model.

A trace is a folder:

    run.json        what was asked, and where                     one `Run`
    texts.jsonl     what the target wrote                         a `Text` a line
    scores.jsonl    how well each draft would have guessed it     a `Score` a line
    costs.jsonl     how long the parts of a step take             a `CostSample` a line
    sizes.jsonl     how large the draft is in each format         a `Size` a line
    confirm.jsonl   runs from end to end                          a `Confirmation` a line

The lines are only ever appended, each flushed as a whole, so an interrupted measurement keeps what it has and can go
on. A last line that was cut short is dropped.
"""

import json
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..errors import UsageError
from .files import digest, mend, read_lines, writable, write_atomically
from .records import from_json, parse, to_json

RUN_FILE = "run.json"


@dataclass(frozen=True)
class StoredModel:
    """A model as its file holds it.

    Attributes:
        name: what the user called it.
        stored_as: the file's own format, for example 'GGUF Q4_K_M' or 'safetensors BF16'.
        stored_bits: bits a weight in the file. Below 16, a 'bf16' model made from it is a dequantised reference.
        parameters: number of weights.
    """

    name: str
    stored_as: str
    stored_bits: float
    parameters: int

    @property
    def dequantised(self) -> bool:
        """Whether 16-bit weights made from this file are not the ones that the model was trained with."""
        return self.stored_bits < 15.5


@dataclass(frozen=True)
class Machine:
    """Where a measurement was made.

    Attributes:
        cpu: the processor's name. cores: those that were used. memory_bytes: main memory.
        system: operating system. python, torch, bitdraft: versions.
    """

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    torch: str
    bitdraft: str

    @property
    def fingerprint(self) -> str:
        """What step costs depend on, readable and comparable: processor, cores and memory in GiB."""
        return f"{self.cpu}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB"


@dataclass(frozen=True)
class Sampling:
    """The sampling values that texts, scores and confirmations share; meanings as in `types.SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Run:
    """What was asked, and where.

    Attributes:
        target, draft: the pair. target_format: what the target was run in. kv: keys and values of both; None is bf16.
        formats: draft formats, in the order asked for. workloads: likewise. prompts: per workload.
        k_values: draft lengths to consider, ascending.
        sampling: how logits become tokens.
        rule: how blocks are verified in the confirmations, 'token' or 'block'.
        backend: what computes, for example 'reference (plain PyTorch, FP32)'.
        machine: where.
        command: the command line. started: ISO 8601 time.
    """

    target: StoredModel
    draft: StoredModel
    target_format: str
    formats: tuple[str, ...]
    workloads: tuple[str, ...]
    prompts: int
    k_values: tuple[int, ...]
    sampling: Sampling
    rule: Literal["token", "block"]
    backend: str
    machine: Machine
    command: str
    started: str
    kv: str | None = None

    def __post_init__(self) -> None:
        _check("formats", bool(self.formats), self.formats, "at least one format")
        _check("workloads", bool(self.workloads), self.workloads, "at least one workload")
        rising = all(a < b for a, b in pairwise(self.k_values))
        good = bool(self.k_values) and rising and self.k_values[0] > 0
        _check("k_values", good, self.k_values, "ascending draft lengths from 1 up")


@dataclass(frozen=True)
class Text:
    """What the target wrote for one prompt.

    Attributes:
        workload, index: which prompt. prompt_tokens: its length in tokens.
        ids: output token ids. finish: 'stop' or 'length'. seconds: to write it.
    """

    workload: str
    index: int
    prompt_tokens: int
    ids: tuple[int, ...]
    finish: Literal["stop", "length"]
    seconds: float


@dataclass(frozen=True)
class Score:
    """One draft's distributions q beside the target's p, at each token x of one text (teacher-forced).

    Attributes:
        format, workload, index: which draft, which text.
        overlap: sum_v min(p, q) at the serving temperature and filters: the chance that a drafted token is accepted.
        ratio: min(1, q(x) / p(x)), likewise: that chance, given that the target's token in the end is x.
        overlap_t1: sum_v min(p, q) of the raw distributions (temperature 1, no filters). 1 - overlap_t1 is their
            total variation distance.
        kl_pq, kl_qp: KL(p || q) and KL(q || p) of the raw distributions, in nats.
        top1: whether p and q are largest at the same token.
    """

    format: str
    workload: str
    index: int
    overlap: tuple[float, ...]
    ratio: tuple[float, ...]
    overlap_t1: tuple[float, ...]
    kl_pq: tuple[float, ...]
    kl_qp: tuple[float, ...]
    top1: tuple[bool, ...]

    def __post_init__(self) -> None:
        lists = (self.overlap, self.ratio, self.overlap_t1, self.kl_pq, self.kl_qp, self.top1)
        lengths = tuple(len(values) for values in lists)
        _check("the length of the lists", len(set(lengths)) == 1, lengths, "one length: one entry a token")
        for name in ("overlap", "ratio", "overlap_t1"):
            bad = next((v for v in getattr(self, name) if not -1e-6 <= v <= 1 + 1e-5), None)
            _check(name, bad is None, bad, "numbers from 0 to 1")
        for name in ("kl_pq", "kl_qp"):
            bad = next((v for v in getattr(self, name) if not -1e-4 <= v < math.inf), None)
            _check(name, bad is None, bad, "finite numbers of at least 0")


@dataclass(frozen=True)
class CostSample:
    """One timing.

    Attributes:
        kind: 'target' (a forward pass over `rows` rows), 'draft' (one drafted token, all that it takes) or
            'overhead' (what a speculative step takes beyond drafting and verifying, less what a plain step takes
            beyond its forward pass).
        format: the draft's format; None for the other kinds.
        rows: rows of tokens in the call; 1 for draft and overhead.
        round: which round of timings; everything is timed once a round, so that slow drift hits all alike.
        ms: milliseconds.
    """

    kind: Literal["target", "draft", "overhead"]
    format: str | None
    rows: int
    round: int
    ms: float

    def __post_init__(self) -> None:
        _check("format", (self.format is None) == (self.kind != "draft"), self.format, "a name for 'draft', else null")
        _check("rows", self.rows > 0, self.rows, "at least 1")
        _check("ms", math.isfinite(self.ms) and (self.ms > 0 or self.kind == "overhead"), self.ms, "a positive number")


@dataclass(frozen=True)
class Size:
    """How large the draft is in one format: packed on disk, resident in memory, bits a weight all in."""

    format: str
    disk_bytes: int
    resident_bytes: int
    bits_per_weight: float


@dataclass(frozen=True)
class Confirmation:
    """One request run from end to end, with a draft or (k = 0, format None) plain.

    Attributes:
        format, k, workload, index, round: what ran. A round holds each candidate and the plain run once, interleaved.
        seconds: the whole request, reading the prompt included. tokens: its output.
        first_seconds, first_tokens: until the end of the step that gave the first tokens (it reads the prompt), and
            how many those were.
        steps: steps that emitted tokens.
        proposed, tested, accepted: drafted tokens by position in their block. A position is tested when every earlier
            one was accepted: nothing is known about those behind a rejection (`stats.BlockCounts` counts all three).
        draft_seconds, verify_seconds, other_seconds: where the time went, all steps together.
        same_ids: whether the output is the plain run's, token for token; None when sampled, and for the plain run.
        first_difference: the first output position that differs, if any.
        margin: the target's top-1 less top-2 logit there, in nats: near 0 means a tie that rounding may break.
    """

    format: str | None
    k: int
    workload: str
    index: int
    round: int
    seconds: float
    tokens: int
    first_seconds: float
    first_tokens: int
    steps: int
    proposed: tuple[int, ...]
    tested: tuple[int, ...]
    accepted: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    same_ids: bool | None = None
    first_difference: int | None = None
    margin: float | None = None

    def __post_init__(self) -> None:
        paired = self.k > 0 if self.format else self.k == 0
        _check("format and k", paired, (self.format, self.k), "a format and k >= 1, or none and k 0")
        _check("seconds", 0 < self.seconds < math.inf, self.seconds, "a positive number")
        _check("tokens", 0 < self.steps <= self.tokens, (self.steps, self.tokens), "1 <= steps <= tokens")
        counts = (self.proposed, self.tested, self.accepted)
        _check("counts", len({len(c) for c in counts}) == 1, counts, "three lists of one length: one entry a position")
        nested = all(p >= t >= a >= 0 for p, t, a in zip(*counts, strict=True))
        _check("counts", nested, counts, "proposed >= tested >= accepted at every position")


Line = Text | Score | CostSample | Size | Confirmation
L = TypeVar("L", Text, Score, CostSample, Size, Confirmation)
LINES: Mapping[type[Line], tuple[str, tuple[str, ...]]] = {
    Text: ("texts.jsonl", ("workload", "index")),
    Score: ("scores.jsonl", ("format", "workload", "index")),
    CostSample: ("costs.jsonl", ("kind", "format", "rows", "round")),
    Size: ("sizes.jsonl", ("format",)),
    Confirmation: ("confirm.jsonl", ("format", "k", "workload", "index", "round")),
}
"""For each kind of line its file, and the fields that name a line in it."""


@dataclass(frozen=True)
class Trace:
    """A whole trace in memory.

    Attributes:
        run: what was asked. texts, scores, sizes: by the fields that name them. costs, confirmations: as written.
        digest: SHA-256 over the folder's files, which names this evidence.
    """

    run: Run
    texts: Mapping[tuple[str, int], Text] = field(default_factory=dict)
    scores: Mapping[tuple[str, str, int], Score] = field(default_factory=dict)
    costs: tuple[CostSample, ...] = ()
    sizes: Mapping[str, Size] = field(default_factory=dict)
    confirmations: tuple[Confirmation, ...] = ()
    digest: str = ""

    @classmethod
    def load(cls, folder: Path) -> "Trace":
        """Read a folder that `TraceWriter` wrote. Files that are not there yet count as empty.

        Raises:
            UsageError: no run.json, a broken line other than a cut last one, a line that is there twice, or a score
                that does not fit its text.
        """
        path = folder / RUN_FILE
        if not path.is_file():
            raise UsageError(
                f"{folder} is not a trace: it has no {RUN_FILE}. Expected a folder that `bitdraft measure -o` wrote."
            )
        run = from_json(Run, parse(path.read_text(encoding="utf-8"), str(path)), str(path))
        texts = {(text.workload, text.index): text for text in _read(folder, Text)}
        scores = {(score.format, score.workload, score.index): score for score in _read(folder, Score)}
        for score in scores.values():
            text = texts.get((score.workload, score.index))
            if text is None or len(text.ids) != len(score.overlap):
                raise UsageError(
                    f"{folder}: the score of {score.format} on {score.workload} prompt {score.index} has "
                    f"{len(score.overlap)} tokens. Expected {len(text.ids) if text else 'a text of that prompt'}. "
                    "The files are of different measurements; measure again in a new folder."
                )
        return cls(
            run=run,
            texts=texts,
            scores=scores,
            costs=tuple(_read(folder, CostSample)),
            sizes={size.format: size for size in _read(folder, Size)},
            confirmations=tuple(_read(folder, Confirmation)),
            digest=digest(folder, (RUN_FILE, *(name for name, _ in LINES.values()))),
        )


class TraceWriter:
    """Appends to a trace, and knows what is already there so that an interrupted measurement can go on."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`, making it if need be; a last line that was cut short is taken away.

        Raises:
            UsageError: the folder cannot be written, or holds a broken line.
        """
        self.folder = folder
        with writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, _ in LINES.values():
                mend(folder / name)
        self._keys = {
            kind: {_key(line) for line in read_lines(folder / file, kind, fields)}
            for kind, (file, fields) in LINES.items()
        }

    def begin(self, run: Run) -> None:
        """Write run.json, or check that the folder is of the same run; command and start time may differ.

        Raises:
            UsageError: the folder holds a measurement that was asked for differently, or cannot be written.
        """
        path = self.folder / RUN_FILE
        if not path.exists():
            with writable(self.folder):
                write_atomically(path, json.dumps(to_json(run), indent=2, ensure_ascii=False) + "\n")
            return
        old = from_json(Run, parse(path.read_text(encoding="utf-8"), str(path)), str(path))
        before, now = to_json(old), to_json(replace(run, command=old.command, started=old.started))
        changed = [name for name in before if before[name] != now[name]]
        if changed:
            raise UsageError(
                f"{self.folder} holds a measurement with {changed[0]} = {before[changed[0]]}. Now it is "
                f"{now[changed[0]]}. Mixed figures would mean nothing: ask for the same, or choose another folder."
            )

    def has(self, kind: type[Line], *key: str | int | None) -> bool:
        """Whether a line is there. The key's parts are those that `LINES` names, for example `has(Text, "code", 3)`."""
        return key in self._keys[kind]

    def append(self, line: Line) -> None:
        """Write one line and flush it.

        Raises:
            UsageError: the line is there already, or the folder cannot be written.
        """
        keys, key = self._keys[type(line)], _key(line)
        path = self.folder / LINES[type(line)][0]
        if key in keys:
            raise UsageError(f"{path}: {key} is there already. Ask `has` before measuring something again.")
        text = json.dumps(to_json(line), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        with writable(self.folder), path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        keys.add(key)


def _read(folder: Path, kind: type[L]) -> list[L]:
    return read_lines(folder / LINES[kind][0], kind, LINES[kind][1])


def _key(line: Line) -> tuple[Hashable, ...]:
    return tuple(getattr(line, name) for name in LINES[type(line)][1])


def _check(name: str, ok: bool, given: Any, expected: str) -> None:
    if not ok:
        raise UsageError(f"{name} is {given!r}. Expected {expected}.")
