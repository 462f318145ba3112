"""Ask servers as a configuration says, and keep every answer as soon as it is there.

A closed loop keeps so many requests open; an open loop makes them when they are due, whoever has not ended yet. Every
answer is on disk as soon as it is there, whole blocks are never measured twice, and half ones are measured again: how
long an answer took depends on what else was open.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx2

from ..errors import UsageError
from .files import mend, read_lines, writable, write_atomically
from .load_client import Heard, Kind, ask, body_of, client, recognise
from .load_config import Arm, Block, Due, LoadConfig, Server, blocks, loads
from .load_prompts import Fit, Prompts
from .records import from_json, parse, to_json
from .stats import distinct_bigram_ratio

Progress = Callable[[int, int | None, str], None]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
ARMS: tuple[Arm, ...] = ("plain", "speculative")
_LONGEST_WAIT = 5.0  # seconds that a closed loop pauses when it is refused


@dataclass(frozen=True)
class Answer:
    """One request and what came of it. `due`, `sent` and `ended` are seconds after its block's start.

    Attributes:
        server, arm, load, lengths, round, index: which request of which block.
        level: requests at a time, or a second; 0 for a trace.
        due: when it should have been made; equal to `sent` in a closed loop.
        sent, ended: when it was made, and when the answer was over.
        gaps: seconds to each piece of text, from `sent` and then from the piece before.
        tokens: output tokens in each piece; 0 where the server did not say.
        prompt_tokens, output_tokens, cached_tokens: as the server counted; None if it did not.
        finish: why it ended. error: what went wrong; '' for nothing.
        drafted, accepted: tokens; None where the server did not say.
        distinct: different pairs of neighbouring tokens (or words) over all pairs.
    """

    server: str
    arm: str
    load: str
    lengths: str
    round: int
    index: int
    level: float
    due: float
    sent: float
    ended: float
    gaps: tuple[float, ...]
    tokens: tuple[int, ...]
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    finish: str
    error: str
    drafted: int | None
    accepted: int | None
    distinct: float


_KEY = ("server", "arm", "load", "lengths", "round", "index")


class Results:
    """Answers, in memory and in FOLDER/results.jsonl if there is a folder.

    Attributes:
        answers: all of them, in the order in which they ended.
    """

    def __init__(self, folder: Path | None, config: LoadConfig, resume: bool) -> None:
        """Open a folder, or none.

        Raises:
            UsageError: it holds another run's results, or this one's without `resume`; or it cannot be written.
        """
        self.answers: list[Answer] = []
        self._path = folder / "results.jsonl" if folder else None
        if folder is None or self._path is None:
            return
        about = folder / "run.json"
        with writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if about.is_file():
                _check_same(about, config, resume)
                self.answers = read_lines(self._path, Answer, _KEY)
                mend(self._path)
            elif self._path.exists():
                raise UsageError(f"{folder} has results without run.json. Expected a new folder; choose another.")
            write_atomically(about, json.dumps(to_json(config), indent=1, ensure_ascii=False) + "\n")

    def keep_whole(self, whole: Iterable[Block]) -> None:
        """Drop the answers of blocks that are not whole."""
        kept = {_name(block) for block in whole}
        self.answers = [a for a in self.answers if (a.server, a.arm, a.load, a.lengths, a.round) in kept]
        if self._path and self._path.exists():
            with writable(self._path.parent):
                write_atomically(self._path, "".join(_line(answer) for answer in self.answers))

    def has(self, block: Block) -> bool:
        """Whether every request of a block was answered, or refused."""
        name = _name(block)
        found = {a.index for a in self.answers if (a.server, a.arm, a.load, a.lengths, a.round) == name}
        return found >= {due.index for due in block.load.due}

    def add(self, answer: Answer) -> None:
        """Keep one answer."""
        self.answers.append(answer)
        if self._path:
            with writable(self._path.parent), self._path.open("a", encoding="utf-8") as file:
                file.write(_line(answer))


def _line(answer: Answer) -> str:
    return json.dumps(to_json(answer), ensure_ascii=False) + "\n"


def _name(block: Block) -> tuple[str, str, str, str, int]:
    return block.server.name, block.arm, block.load.name, block.load.lengths, block.round


def _check_same(about: Path, config: LoadConfig, resume: bool) -> None:
    before = from_json(LoadConfig, parse(about.read_text(encoding="utf-8"), str(about)), str(about))
    if not resume:
        raise UsageError(
            f"{about.parent} holds a run already. Add --resume to go on with it, or choose another folder."
        )
    then, now = to_json(before), json.loads(json.dumps(to_json(config)))
    different = [name for name in now if then[name] != now[name]]
    if different:
        raise UsageError(
            f"{about.parent} holds a run with {different[0]} {then[different[0]]!r}, now it is {now[different[0]]!r}. "
            "Expected the same question; choose another folder for another one."
        )


@dataclass(frozen=True)
class Peer:
    """A server that is being asked, the client that asks it, and who it is."""

    server: Server
    http: httpx2.AsyncClient
    kind: Kind


async def run_load(
    config: LoadConfig, results: Results, clock: Callable[[], float], progress: Progress, key: str = ""
) -> dict[str, Kind]:
    """Run every block that `results` does not have, and return who the servers are.

    Args:
        config: what to ask. results: where answers go. clock: seconds.
        progress: called after each answer.
        key: the API key; '' for none.

    Raises:
        UsageError: a server that does not answer, an unreadable workload or trace, or a folder that cannot be written.
    """
    every, prompts = list(loads(config)), Prompts.of(config.workload, config.seed)
    if not every:
        raise UsageError("there is nothing to ask. Give --concurrency or --rate with --lengths, or a --trace.")
    async with AsyncExitStack() as stack:
        peers = {}
        for server in config.servers:
            http = await stack.enter_async_context(client(server.url, key, config.timeout))
            peers[server.name] = Peer(server, http, await recognise(http, server.url, config.model))
        arms = [(peer.server, _arms(config, peer.kind)) for peer in peers.values()]
        order = list(blocks(every, arms, config.rounds))
        results.keep_whole(block for block in order if results.has(block))
        fit: Fit | None = None
        for number, block in enumerate(order):
            if results.has(block):
                continue
            if fit is None:
                fit = await _fit(peers[config.servers[0].name], config.endpoint, prompts, clock)
            runner = _Runner(config, peers[block.server.name], block, number, prompts, fit, clock)
            label = f"{block.load.name}, {block.load.lengths}, {block.server.name} {block.arm}"
            label += f", round {block.round + 1} of {config.rounds}" if config.rounds > 1 else ""
            done = 0
            progress(done, len(block.load.due), label)
            async for answer in runner.run():
                results.add(answer)
                done += 1
                progress(done, len(block.load.due), label)
    return {name: peer.kind for name, peer in peers.items()}


def _arms(config: LoadConfig, kind: Kind) -> Sequence[Arm]:
    return ARMS if config.compare and kind.drafts and kind.knows("speculative") else ("as it is",)


async def _fit(peer: Peer, endpoint: str, prompts: Prompts, clock: Callable[[], float]) -> Fit:
    """Let the server count two texts. It also answers its first requests here, which are slow, and not counted."""
    counts = []
    for characters in (400, 2000):
        text = prompts.sample(characters)
        body = body_of(peer.kind, endpoint, text, 1, all_of_it=False, temperature=0)
        heard = await ask(peer.http, PATHS[endpoint], body, clock)
        if heard.error and heard.status != 200:
            raise UsageError(
                f"{peer.server.url} refuses a short request ({heard.error}). Expected an answer; does it offer "
                f"{PATHS[endpoint]}, and does it want an API key?"
            )
        counts.append((len(text), heard.prompt_tokens))
    (first, one), (second, two) = counts
    return Fit.of((first, one), (second, two)) if one is not None and two is not None else Fit()


class _Runner:
    """Asks the requests of one block."""

    def __init__(
        self,
        config: LoadConfig,
        peer: Peer,
        block: Block,
        number: int,
        prompts: Prompts,
        fit: Fit,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._peer, self._block, self._number = config, peer, block, number
        self._prompts, self._fit, self._clock = prompts, fit, clock
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._start = 0.0

    async def run(self) -> AsyncIterator[Answer]:
        """The answers, as they end."""
        load, self._start = self._block.load, self._clock()
        waiting = iter(load.due)
        loops = [self._closed(waiting) for _ in range(load.places)] or [self._open(due) for due in load.due]
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            for _ in load.due:
                answer = asyncio.create_task(self._answers.get())
                while not answer.done():
                    running = [task for task in tasks if not task.done()]
                    await asyncio.wait([answer, *running], return_when=asyncio.FIRST_COMPLETED)
                    for task in running:
                        if task.done():
                            task.result()  # raises what it raised
                yield answer.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _closed(self, waiting: Iterable[Due]) -> None:
        for due in waiting:
            heard = await self._ask(due, None)
            if heard.status in (429, 503):
                await asyncio.sleep(min(heard.retry_after, _LONGEST_WAIT))

    async def _open(self, due: Due) -> None:
        at = due.at or 0.0
        await asyncio.sleep(max(self._start + at - self._clock(), 0))
        await self._ask(due, at)

    async def _ask(self, due: Due, at: float | None) -> Heard:
        config, kind = self._config, self._peer.kind
        prompt = self._prompts.prompt([self._number], due.index, self._fit.characters(due.lengths.input))
        body = body_of(
            kind,
            config.endpoint,
            prompt,
            due.lengths.output,
            all_of_it=not config.natural_stop,
            temperature=config.temperature,
        )
        if self._block.arm == "plain":
            body["speculative"] = {"enabled": False}
        sent = self._clock()
        heard = await ask(self._peer.http, PATHS[config.endpoint], body, self._clock)
        ended = self._clock()
        self._answers.put_nowait(self._answer(due, at, sent, ended, heard))
        return heard

    def _answer(self, due: Due, at: float | None, sent: float, ended: float, heard: Heard) -> Answer:
        block, speculation = self._block, heard.speculation
        return Answer(
            server=block.server.name,
            arm=block.arm,
            load=block.load.name,
            lengths=block.load.lengths,
            round=block.round,
            index=due.index,
            level=block.load.level,
            due=sent - self._start if at is None else at,
            sent=sent - self._start,
            ended=ended - self._start,
            gaps=tuple(after - before for before, after in pairwise([sent, *heard.times])),
            tokens=tuple(heard.tokens),
            prompt_tokens=heard.prompt_tokens,
            output_tokens=heard.output_tokens,
            cached_tokens=heard.cached_tokens,
            finish=heard.finish,
            error=heard.error,
            drafted=_count(speculation, "num_draft_tokens"),
            accepted=_count(speculation, "num_accepted_draft_tokens"),
            distinct=distinct_ratio(heard.text, heard.ids),
        )


def _count(speculation: Mapping[str, object], name: str) -> int | None:
    found = speculation.get(name)
    return found if isinstance(found, int) else None


def distinct_ratio(text: str, ids: Sequence[int]) -> float:
    """Distinct bigram ratio of an output: of its token ids, else of its words, else (one long word) its characters."""
    if not ids:
        words = text.split()
        parts = words if len(words) > len(text) / 20 else list(text)
        numbers = {part: i for i, part in enumerate(dict.fromkeys(parts))}
        ids = [numbers[part] for part in parts]
    return distinct_bigram_ratio(ids)
