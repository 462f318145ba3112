"""The step-cost curve of a model on this machine: T(rows, context, batch), measured at load and kept on disk.

Whether another drafted token pays depends on what one more row costs, and that depends on the machine, the format, how
long the contexts are and how many sequences share the step. So it is measured, in a time that nobody minds at load.

Letters: R rows of each sequence (K drafted tokens make K + 1), S sequences of the batch, C tokens in each cache.
"""

import hashlib
import json
import math
import os
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median

import torch

from .. import __version__
from ..errors import UsageError
from ..models.cached import CachedModel
from ..models.kv import BlockPool
from ..ops import Ragged, hardware, native

Progress = Callable[[int, int | None, str], None]
"""Called with (steps done, steps at most, what is being done)."""


@dataclass(frozen=True)
class StepCost:
    """One point of a curve.

    Attributes:
        rows: rows of each sequence.
        context: tokens that each sequence's cache holds before the step.
        batch: sequences in the step, each with `rows` rows.
        ms: median of the step's timings, in milliseconds.
    """

    rows: int
    context: int
    batch: int
    ms: float

    def __post_init__(self) -> None:
        counts = self.rows, self.context, self.batch
        if not all(type(n) is int and n >= 1 for n in counts) or not _positive(self.ms):
            raise UsageError(f"a step cost of {self}. Expected counts from 1 on and milliseconds above 0.")


def _positive(number: object) -> bool:
    return isinstance(number, int | float) and math.isfinite(number) and number > 0


@dataclass(frozen=True)
class Grid:
    """Which steps to time; each ascending.

    Attributes:
        rows: of each sequence. contexts: tokens in each cache. batches: sequences in a step.
        repeats: timings of each step at most, after one that warms up.
        most: rows of all sequences of a step together, at most; one row of each is timed all the same.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    repeats: int
    most: int = sys.maxsize

    def rows_of(self, batch: int) -> tuple[int, ...]:
        """The rows that steps of so many sequences are timed with."""
        return tuple(rows for rows in self.rows if rows * batch <= self.most) or self.rows[:1]

    def fitted(self, model: CachedModel) -> "Grid":
        """The same steps as far as the model's context and the free part of its cache reach, nearer where not.

        Raises:
            UsageError: they do not even hold one block of tokens for each sequence beside the rows.
        """
        pool = model.pool
        held = pool.num_free // max(self.batches) * pool.block_size
        longest = min(model.context_length, held) - max(self.rows)
        if longest < 1:
            raise UsageError(
                f"steps of {max(self.batches)} sequences with {max(self.rows)} rows cannot be timed: the cache holds "
                f"{held} tokens for each, the model's context is {model.context_length}. Expected more than the rows; "
                "give the model a larger cache, or time smaller steps."
            )
        contexts = tuple(sorted({min(context, longest) for context in self.contexts}))
        return replace(self, contexts=contexts)


AT_LOAD = Grid(rows=(1, 2, 3, 4, 6, 8), contexts=(128, 2048), batches=(1, 4), repeats=3)
"""Few enough for the second or two that a load may take."""

AT_SERVE = Grid(rows=(1, 2, 4, 8), contexts=(128, 2048), batches=(1, 4, 16), repeats=2, most=32)
"""For a server, whose batches are larger. Single sequences come first, so that a short time still tells something."""

AT_READING = Grid(rows=(64,), contexts=(64,), batches=(1,), repeats=2)
"""For a draft that reads a text: a row among many costs a part of what it costs in a step of few."""

QUIET = 0.15
"""Of the machine: what others may use while a curve is measured that is to be kept."""


@dataclass(frozen=True)
class StepCurve:
    """What a step costs, by rows, context and batch.

    Attributes:
        steps: the measured points, at least one of a single sequence; any order.
    """

    steps: tuple[StepCost, ...]

    def __post_init__(self) -> None:
        if all(step.batch > 1 for step in self.steps):
            raise UsageError("a step-cost curve without a step of one sequence. Expected at least that.")

    @cached_property
    def _lines(self) -> dict[int, dict[int, dict[int, float]]]:
        """Milliseconds by batch, context and rows."""
        lines: dict[int, dict[int, dict[int, float]]] = {}
        for step in self.steps:
            lines.setdefault(step.batch, {}).setdefault(step.context, {})[step.rows] = step.ms
        return lines

    def seconds(self, rows: int, context: int, batch: int = 1) -> float:
        """What a step costs: measured points to the bit, straight lines between them.

        Outside of them the answer is rather too much than too little, so that nobody drafts on a hope: below the
        smallest measured value, the cost there; above the largest, rows and sequences cost as much each as on average
        up to there (one could split the step into such parts), and context goes on as it rose last.

        Args:
            rows: of each sequence.
            context: tokens in each cache before the step.
            batch: sequences.
        """
        by_batch = {
            size: _at({at: _at(line, rows, True) for at, line in contexts.items()}, context, len(contexts) < 2)
            for size, contexts in self._lines.items()
        }
        return _at(by_batch, batch, True) / 1000


def _at(known: Mapping[int, float], place: int, proportional: bool) -> float:
    """The value at `place` on straight lines between known ones; see `StepCurve.seconds` for what lies outside."""
    places = sorted(known)
    i = bisect_left(places, place)
    if i == 0 or (i < len(places) and places[i] == place):
        return known[places[i]]
    if i < len(places):
        low, high = places[i - 1], places[i]
        share = (place - low) / (high - low)
        return known[low] * (1 - share) + known[high] * share
    last = places[-1]
    if proportional:
        return known[last] * place / last
    slope = (known[last] - known[places[-2]]) / (last - places[-2])
    return known[last] + max(0.0, slope) * (place - last)


def measure_curve(
    model: CachedModel,
    clock: Callable[[], float],
    budget_s: float,
    grid: Grid = AT_LOAD,
    progress: Progress | None = None,
) -> StepCurve:
    """Time steps of a loaded model, the most telling first, until the time is up.

    The contexts are made up: free blocks of the cache are filled and read, because a step's cost depends on how much it
    reads and not on what that says. They are given back in the end; requests that the model holds are not touched.

    Args:
        model: the model; nobody else may use it meanwhile.
        clock: seconds.
        budget_s: seconds to spend. Steps that are likely to exceed it are left out, but for the first.
        grid: what to time; as far as the model and its cache reach.
        progress: called after each step.

    Raises:
        UsageError: the cache is too small for any step.
    """
    grid, end = grid.fitted(model), clock() + budget_s
    taken: dict[tuple[int, int, int], list[float]] = {}
    with _Stage(model, grid, clock) as stage:
        stage.time(1, max(grid.contexts) + max(grid.rows) - 1, 1)  # memory and tables that are made at first use
        turns = _order(grid) * (grid.repeats + 1)  # round after round: a slow moment is shared by different steps
        for done, place in enumerate(turns, start=1):
            if not taken or clock() + _likely(taken, place) <= end:
                taken.setdefault(place, []).append(stage.time(*place))
            if progress:
                progress(done, len(turns), "timing steps")
    # The first timing of a step warms up, and counts only where there is no other.
    steps = [StepCost(*place, median(times[1:] or times) * 1000) for place, times in taken.items()]
    return StepCurve(tuple(_whole(steps, grid)))


def _order(grid: Grid) -> list[tuple[int, int, int]]:
    """All (rows, context, batch): of each batch the corners first, then what lies between them."""
    return [
        (rows, context, batch)
        for batch in grid.batches
        for part in (_ends(grid, batch), grid.rows_of(batch)[1:-1])
        for context, rows in product(grid.contexts, part)
    ]


def _ends(grid: Grid, batch: int) -> tuple[int, ...]:
    """The fewest and the most rows of so many sequences; one number where they are the same."""
    return (rows := grid.rows_of(batch))[:: max(1, len(rows) - 1)]


def _likely(taken: Mapping[tuple[int, int, int], Sequence[float]], place: tuple[int, int, int]) -> float:
    """Seconds that a step will take, rather too many: as before; or as the nearest smaller one, row by row."""
    if place in taken:
        return max(taken[place])
    rows, context, batch = place
    smaller = [p for p in taken if p[0] <= rows and p[2] <= batch]
    near = max(smaller, key=lambda p: (p[0] * p[2], p[1] <= context))
    return max(taken[near]) * rows * batch / (near[0] * near[2])


def _whole(steps: Sequence[StepCost], grid: Grid) -> Iterator[StepCost]:
    """Without larger batches whose corners were not all reached: a guess from one sequence is better than from half."""
    reached = {(s.rows, s.context, s.batch) for s in steps}
    for step in sorted(steps, key=lambda s: (s.batch, s.context, s.rows)):
        corners = product(_ends(grid, step.batch), grid.contexts)
        if step.batch == 1 or all((r, c, step.batch) in reached for r, c in corners):
            yield step


class _Stage:
    """Made-up sequences in the free blocks of a model's cache, and steps over them."""

    def __init__(self, model: CachedModel, grid: Grid, clock: Callable[[], float]) -> None:
        self._model, self._clock = model, clock
        self._blocks = -(-(max(grid.contexts) + max(grid.rows)) // model.pool.block_size)
        self._sequences: list[list[int]] = []
        self._sealed: set[int] = set()
        pool = model.pool
        self._copied = {  # places of blocks that a step reads or writes as they were written
            i
            for context in grid.contexts
            for i in range(pool.first_copied(context), (context + max(grid.rows)) // pool.block_size + 1)
        }

    def __enter__(self) -> "_Stage":
        return self

    def __exit__(self, *_: object) -> None:
        for block in (block for sequence in self._sequences for block in sequence):
            self._model.pool.give_back(block, copied=block not in self._sealed)

    def time(self, rows: int, context: int, batch: int) -> float:
        """Seconds of one step: all layers, and the logits of all rows."""
        call = self._call(rows, context, batch)
        started = self._clock()
        self._model.logits(self._model.decoder.hidden(call, self._model.pool.layers))
        return self._clock() - started

    def _add_sequence(self, pool: BlockPool) -> None:
        """Free blocks, taken and written: memory that never was is one page of zeros, and costs nothing to read."""
        blocks = []
        for i in range(self._blocks):
            blocks.append(pool.take())
            if pool.format.bits and i not in self._copied:
                pool.seal(blocks[-1])
                self._sealed.add(blocks[-1])
        index = torch.tensor(blocks, dtype=torch.int64)
        for layer in pool.layers:
            for part in layer.tensors():
                part[index] = 0
        self._sequences.append(blocks)

    def _call(self, rows: int, context: int, batch: int) -> Ragged:
        while len(self._sequences) < batch:
            self._add_sequence(self._model.pool)
        size = self._model.pool.block_size
        positions = range(context, context + rows)
        used = self._sequences[:batch]
        vocabulary = self._model.decoder.config.vocab_size
        return Ragged(
            ids=torch.arange(rows * batch, dtype=torch.int64) * 7919 % vocabulary,  # rows of the table far from another
            positions=torch.tensor([*positions] * batch, dtype=torch.int64),
            slots=torch.tensor([b[p // size] * size + p % size for b in used for p in positions], dtype=torch.int64),
            row_counts=(rows,) * batch,
            tables=tuple(torch.tensor(b[: -(-(context + rows) // size)], dtype=torch.int64) for b in used),
            lengths=(context + rows,) * batch,
        )


@dataclass(frozen=True)
class CurveKey:
    """What a curve depends on: it is measured anew when any of this is different.

    Attributes:
        processor, isa, threads, bitdraft: the machine, the instruction set in use, how many threads, our version.
        model, model_bytes, model_modified_ns: the file or folder by name, size of its weights, and their last change.
        format, kv: what weights, and keys and values, are kept in.
    """

    processor: str
    isa: str
    threads: int
    bitdraft: str
    model: str
    model_bytes: int
    model_modified_ns: int
    format: str
    kv: str

    @classmethod
    def of(cls, model: CachedModel, path: Path, format: str) -> "CurveKey":
        """The key of a model that was loaded from `path`, a file or a folder, in the format of that name."""
        isa, threads = backend()
        files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("config.json")]
        stats = [file.stat() for file in files]
        return cls(
            processor=hardware.processor(),
            isa=isa,
            threads=threads,
            bitdraft=__version__,
            model=path.name,
            model_bytes=sum(s.st_size for s in stats),
            model_modified_ns=max((s.st_mtime_ns for s in stats), default=0),
            format=format,
            kv=model.pool.format.name,
        )


def backend() -> tuple[str, int]:
    """The instruction set in use, or 'reference', and how many threads compute."""
    kernels = native.default()
    return ("reference", torch.get_num_threads()) if kernels is None else (kernels.isa, kernels.threads)


def cached_curve(
    model: CachedModel,
    key: CurveKey,
    folder: Path,
    clock: Callable[[], float],
    budget_s: float,
    grid: Grid = AT_LOAD,
    ticks: Callable[[], hardware.Ticks | None] = hardware.Ticks.now,
) -> StepCurve:
    """The curve that was measured before, or one that is measured now and kept.

    A file that is missing, damaged or about something else is measured anew. A folder that cannot be written is no
    error: the next load measures again. So it does where others used more than `QUIET` of the machine meanwhile: what
    steps cost beside them is no use later.

    Args:
        model, clock, budget_s, grid: see `measure_curve`.
        key: what the curve is about.
        folder: where curves are kept, such as `cache_folder() / "curves"`.
        ticks: time of the processors so far.

    Raises:
        UsageError: the cache of the model is too small for any step.
    """
    wanted = grid.fitted(model)
    about = json.loads(json.dumps({"key": asdict(key), "grid": asdict(wanted)}))
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    path = folder / f"{name}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):  # UsageError is a ValueError
        kept = json.loads(path.read_text(encoding="utf-8"))
        if {part: kept[part] for part in about} == about:
            return StepCurve(tuple(StepCost(**step) for step in kept["steps"]))
    before = ticks()
    curve = measure_curve(model, clock, budget_s, wanted)
    after = ticks()
    if before and after and after.others_since(before) > QUIET:
        return curve
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        _replace(path, json.dumps({**about, "steps": [asdict(step) for step in curve.steps]}, indent=1) + "\n")
    return curve


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all, whoever else writes it at the same time."""
    handle, half = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(half, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(half)
