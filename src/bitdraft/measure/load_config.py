"""What a server is asked to do: which lengths, how many at a time or at which times, how often, and in what order.

A *block* is what is measured at once: one server, one arm (as it is, plain, speculative), one load, one round. Blocks
that are compared follow one another, A B A B, so that a slow hour hits both.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import numpy as np

from ..errors import UsageError

Arm = Literal["as it is", "plain", "speculative"]
TRACE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Server:
    """A name for tables, and where the server is: its root, without /v1."""

    name: str
    url: str


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompt and output."""

    input: int
    output: int

    def __str__(self) -> str:
        return f"{self.input}/{self.output}"


@dataclass(frozen=True)
class LoadConfig:
    """One run of `bitdraft bench serve`.

    Attributes:
        servers: who is asked; several are compared.
        lengths: 'input/output' tokens of the requests; not used with a trace, which has its own.
        concurrency: closed loops: so many requests at a time, the next when one ends.
        rates: open loops: requests a second that arrive as a Poisson process, whether or not others have ended.
        trace: path of a CSV file with arrivals and lengths; '' for none.
        trace_speed: how many times as fast as recorded the trace is replayed.
        requests: of each block, at least; a closed loop has no fewer than two for each place.
        rounds: times that each load is run.
        compare: run every load with drafts and without, where a server can be asked so.
        workload: where the texts are from: a built-in workload or a file.
        model: asked for by name; '' takes the server's first.
        endpoint: which of the two endpoints is used.
        natural_stop: outputs may end by themselves; else the server is asked for all tokens, where it can be.
        temperature, seed: of the sampling; the seed also draws arrivals and texts.
        ttft_bound: seconds until the first token, for goodput. timeout: seconds without a word from the server.
    """

    servers: tuple[Server, ...]
    lengths: tuple[str, ...]
    concurrency: tuple[int, ...]
    rates: tuple[float, ...]
    trace: str
    trace_speed: float
    requests: int
    rounds: int
    compare: bool
    workload: str
    model: str
    endpoint: Literal["chat", "completions"]
    natural_stop: bool
    temperature: float
    seed: int
    ttft_bound: float
    timeout: float

    def __post_init__(self) -> None:
        names = [server.name for server in self.servers]
        for what, ok, expected in (
            ("servers", self.servers and len(set(names)) == len(names), "at least one, with different names"),
            ("concurrency", all(n >= 1 for n in self.concurrency), "counts from 1 on, such as 1,4,8"),
            ("rates", all(r > 0 for r in self.rates), "requests a second above 0"),
            ("trace_speed", self.trace_speed > 0, "a number above 0"),
            ("requests", self.requests >= 1, "1 or more"),
            ("rounds", self.rounds >= 1, "1 or more"),
            ("ttft_bound", self.ttft_bound > 0, "seconds above 0"),
            ("timeout", self.timeout > 0, "seconds above 0"),
        ):
            if not ok:
                raise UsageError(f"{what} is {getattr(self, what)!r}. Expected {expected}.")
        for text in self.lengths:
            parse_lengths(text)


def parse_lengths(text: str) -> Lengths:
    """Read '2000/200'.

    Raises:
        UsageError: it is not two counts from 1 on.
    """
    parts = text.split("/")
    if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"lengths {text!r}. Expected input/output tokens, such as 2000/200.")
    return Lengths(int(parts[0]), int(parts[1]))


@dataclass(frozen=True)
class Due:
    """One request that is to be made: its place, when (seconds from the block's start; None: when there is room)."""

    index: int
    at: float | None
    lengths: Lengths


@dataclass(frozen=True)
class Load:
    """What one block asks for.

    Attributes:
        name: for tables, such as 'concurrency 4'. lengths: for tables; 'trace' where they vary.
        level: concurrency or requests a second, for charts; 0 for a trace.
        places: requests at a time; 0 in an open loop.
        due: the requests.
    """

    name: str
    lengths: str
    level: float
    places: int
    due: tuple[Due, ...]


def loads(config: LoadConfig) -> Iterator[Load]:
    """Every load of a run, closed loops first. Arrivals are the same for all arms, servers and rounds.

    Raises:
        UsageError: a trace that cannot be read.
    """
    for text in config.lengths if config.concurrency or config.rates else ():
        lengths = parse_lengths(text)
        for places in config.concurrency:
            count = max(config.requests, 2 * places)
            due = tuple(Due(i, None, lengths) for i in range(count))
            yield Load(f"concurrency {places}", text, places, places, due)
        for rate in config.rates:
            rng = np.random.default_rng([config.seed, round(rate * 1000)])
            times = np.cumsum(rng.exponential(1 / rate, config.requests)) - 1 / rate
            due = tuple(Due(i, max(float(at), 0.0), lengths) for i, at in enumerate(times))
            yield Load(f"{rate:g} requests/s", text, rate, 0, due)
    if config.trace:
        arrivals = read_trace(Path(config.trace), config.requests)
        due = tuple(Due(i, at / config.trace_speed, lengths) for i, (at, lengths) in enumerate(arrivals))
        yield Load(f"trace {Path(config.trace).name}", "trace", 0.0, 0, due)


def read_trace(path: Path, limit: int) -> list[tuple[float, Lengths]]:
    """The first arrivals of a trace in the layout of the public Azure ones, in seconds after the first.

    Columns are TIMESTAMP (a date and time, or seconds), ContextTokens and GeneratedTokens, in any order; rows without
    generated tokens are left out.

    Raises:
        UsageError: no such file, a missing column, or a row that cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the trace {path} cannot be read ({error}). Expected a CSV file.") from None
    reader = csv.DictReader(lines)
    missing = [name for name in TRACE_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise UsageError(f"the trace {path} has no column {missing[0]}. Expected {', '.join(TRACE_COLUMNS)}.")
    found: list[tuple[float, Lengths]] = []
    for row in reader:
        try:
            at = _seconds(row["TIMESTAMP"])
            lengths = Lengths(max(int(row["ContextTokens"]), 1), int(row["GeneratedTokens"]))
        except (TypeError, ValueError):
            raise UsageError(
                f"{path}, line {reader.line_num}: {dict(row)} cannot be read. Expected a date and time or seconds, and "
                "two counts."
            ) from None
        if lengths.output > 0:
            found.append((at, lengths))
        if len(found) == limit:
            break
    if not found:
        raise UsageError(f"the trace {path} has no requests. Expected at least one row with generated tokens.")
    first = min(at for at, _ in found)
    return sorted(((at - first, lengths) for at, lengths in found), key=lambda arrival: arrival[0])


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # Azure writes seven digits of a second, Python reads six.
        head, _, fraction = text.strip().partition(".")
        return datetime.fromisoformat(head).timestamp() + float(f"0.{fraction or 0}")


@dataclass(frozen=True)
class Block:
    """What is measured at once."""

    server: Server
    arm: Arm
    load: Load
    round: int


def blocks(every: Sequence[Load], arms: Sequence[tuple[Server, Sequence[Arm]]], rounds: int) -> Iterator[Block]:
    """All blocks in the order in which they run: those that are compared one after the other, round after round."""
    for load in every:
        for number in range(rounds):
            for server, its in arms:
                for arm in its:
                    yield Block(server, arm, load, number)
