"""The engine on a thread of its own, and how everything else talks to it.

Submissions and cancellations go to the engine's thread through a queue that it reads between steps. What a step made
true goes back to the event loop in one call per step. A step that fails ends the requests it was for, not the process.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from ..decoding.streams import Streams
from ..engine.engine import Emission, Engine, Load
from ..engine.sequence import Request
from ..types import StepRecord
from .progress import Progress

CHOICES = 1 << 12
"""Answers that one prompt can be asked for. A request's number is serial * CHOICES + choice."""

STOPPING = "the server is stopping"
"""The error of requests that were cut off."""

_log = logging.getLogger(__name__)
_Made = TypeVar("_Made")


def streams(seed: int, number: int) -> Streams:
    """The random decisions of a request, named by its seed and which answer to its prompt it is.

    Not by its number: the same seed gives the same answer however many requests came before.
    """
    return Streams(seed, number % CHOICES)


@dataclass(frozen=True)
class Update:
    """What one step did to one request.

    Attributes:
        emission: what it added.
        record: how; None where no step was made, as for an error.
        time: when, in seconds of the worker's clock.
        admitted: when the request's first step began; None where it had none.
    """

    emission: Emission
    record: StepRecord | None
    time: float
    admitted: float | None = None


class Ticket:
    """The requests of one caller, and what became of them that the caller has not taken yet.

    Updates wait here as long as the caller does not take them. They cannot outgrow the requests' outputs, and whoever
    takes gets all of them at once: a slow reader gets fewer and larger pieces.

    Attributes:
        progress: by request number.
        running: numbers of requests that have not ended.
    """

    def __init__(self, progress: Mapping[int, Progress]) -> None:
        """Wait for the requests that `progress` follows."""
        self.progress = dict(progress)
        self.running = set(progress)
        self._updates: list[Update] = []
        self._ready = asyncio.Event()

    def push(self, update: Update) -> None:
        """Take note of an update."""
        self._updates.append(update)
        if update.emission.finish:
            self.running.discard(update.emission.request)
        self._ready.set()

    async def take(self) -> list[Update]:
        """Everything that happened since the last call, at least one update; [] when all requests have ended."""
        if not self._updates and not self.running:
            return []
        await self._ready.wait()
        self._ready.clear()
        taken, self._updates = self._updates, []
        return taken


class Observer(Protocol):
    """Sees, on the event loop, what becomes of requests."""

    def step(self, progress: Progress, update: Update) -> None:
        """Something came, which `progress` already counts."""
        ...

    def end(self, progress: Progress, time: float) -> None:
        """A request ended, or was given up by its caller."""
        ...


class Worker:
    """Runs an engine on a thread of its own.

    Everything but `load` is for the event loop's thread.

    Attributes:
        load: what the engine held after its last step.
    """

    def __init__(
        self, engine: Engine, records: list[StepRecord], observer: Observer, clock: Callable[[], float]
    ) -> None:
        """Put an engine under a worker; nobody else may touch it from here on.

        Args:
            engine: makes the steps; its randomness is `streams`.
            records: where the engine's `on_record` puts its records; emptied after each step.
            observer: sees every update.
            clock: seconds.
        """
        self.load: Load = engine.load()
        self._engine, self._records, self._observer, self._clock = engine, records, observer, clock
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._admitted: dict[int, float] = {}  # when first steps began; the engine's thread's own
        self._serials = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End all requests and the thread."""
        self.cut()
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def open(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._tickets)

    async def submit(self, groups: Iterable[Sequence[tuple[Request, Progress]]]) -> Ticket:
        """Queue requests, all or none of them, and wait until the engine has taken them in.

        Args:
            groups: requests for answers to the same prompt, and what follows them; their numbers are given here.

        Returns:
            what to wait with; its numbers are in the order of the requests.

        Raises:
            UsageError: the engine refuses one of them.
        """
        requests, progress = [], {}
        for group in groups:
            serial = next(self._serials)
            for choice, (request, its) in enumerate(group):
                number = serial * CHOICES + choice
                requests.append(replace(request, number=number))
                progress[number] = its
        ticket = Ticket(progress)
        self._tickets |= dict.fromkeys(progress, ticket)
        try:
            await self.change(lambda _: self._take_in(requests))
        except BaseException:
            self.cancel(ticket)
            raise
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stop what still runs of a ticket, before the next step. Nothing more comes of it."""
        numbers = [number for number in ticket.progress if self._tickets.pop(number, None)]
        for number in numbers:
            ticket.progress[number].finish = "abort"
            self._observer.end(ticket.progress[number], self._clock())
        if numbers:
            self._commands.put(lambda: self._cancel(numbers))

    async def change(self, change: Callable[[Engine], _Made]) -> _Made:
        """Do something to the engine between two steps. Requests wait while it is done, and go on after it.

        Returns:
            what `change` returns.

        Raises:
            Exception: what it raises.
        """
        assert self._loop
        made: asyncio.Future[_Made] = self._loop.create_future()
        self._commands.put(lambda: self._change(change, made))
        return await made

    def cut(self) -> None:
        """End every request with the error `STOPPING`."""
        numbers, now = list(self._tickets), self._clock()
        self._commands.put(lambda: self._cancel(numbers))
        self._deliver([Update(_failure(number, STOPPING), None, now) for number in numbers])

    async def drained(self) -> None:
        """Wait until no request is left."""
        while self._tickets:
            await asyncio.sleep(0.02)

    # On the engine's thread

    def _run(self) -> None:
        scheduler = self._engine.scheduler
        while True:
            busy = bool(scheduler.running or scheduler.waiting)
            while not busy or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command()
                busy = True  # at most one empty turn
            if scheduler.running or scheduler.waiting:
                started = self._clock()
                emissions = self._step()
                for number in (*(s.request.number for s in scheduler.running), *(e.request for e in emissions)):
                    self._admitted.setdefault(number, started)
                self.load = self._engine.load()
                self._hand_over(emissions)

    def _step(self) -> Sequence[Emission]:
        try:
            return self._engine.step()
        except Exception as error:
            _log.exception("a step failed")
            scheduler = self._engine.scheduler
            numbers = [s.request.number for s in scheduler.running or scheduler.waiting]
            self._cancel(numbers)
            return [_failure(number, f"{type(error).__name__}: {error}") for number in numbers]

    def _change(self, change: Callable[[Engine], _Made], made: "asyncio.Future[_Made]") -> None:
        try:
            settle = partial(_settle, made, change(self._engine))
        except Exception as error:
            settle = partial(_fail, made, error)
        self._call(settle)

    def _take_in(self, requests: Sequence[Request]) -> None:
        try:
            for request in requests:
                self._engine.submit(request)
        except Exception:
            self._cancel(request.number for request in requests)
            raise

    def _cancel(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._engine.cancel(number)
            self._admitted.pop(number, None)
        self.load = self._engine.load()

    def _hand_over(self, emissions: Sequence[Emission]) -> None:
        records = {record.request: record for record in self._records}
        self._records.clear()
        now = self._clock()
        updates = [Update(e, records.get(e.request), now, self._admitted.get(e.request)) for e in emissions]
        for emission in emissions:
            if emission.finish:
                self._admitted.pop(emission.request, None)
        if updates:
            self._call(lambda: self._deliver(updates))

    def _call(self, function: Callable[[], None]) -> None:
        assert self._loop
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    # On the event loop's thread again

    def _deliver(self, updates: Sequence[Update]) -> None:
        for update in updates:
            number = update.emission.request
            ticket = self._tickets.get(number)
            if ticket is None:  # cancelled during the step
                continue
            if update.emission.finish:
                del self._tickets[number]
            progress = ticket.progress[number]
            progress.add(update.emission, update.record, update.time)
            progress.admitted = update.admitted
            self._observer.step(progress, update)
            if update.emission.finish:
                self._observer.end(progress, update.time)
            ticket.push(update)


def _settle(future: "asyncio.Future[_Made]", result: _Made) -> None:
    if not future.done():  # else whoever waited is gone
        future.set_result(result)


def _fail(future: "asyncio.Future[_Made]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _failure(number: int, reason: str) -> Emission:
    return Emission(number, (), (), "", "error", error=reason)
