"""A loaded pair behind a port, until somebody asks it to stop."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import uvicorn

from ..drafters.predicted import PredictedDrafter
from ..engine.engine import Engine
from ..errors import UsageError
from ..types import StepRecord
from .app import Service, create_app
from .drafting import Drafting, show
from .info import Runs
from .metrics import Metrics
from .prepare import Model
from .response_format import Compiler
from .settings import Settings
from .tracing import Tracing, configured_tracer
from .worker import Worker, streams


def bind(host: str, port: int) -> socket.socket:
    """A socket with an address, on which nobody listens yet; port 0 takes a free one.

    Raises:
        UsageError: the address is taken, or is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--host {host} --port {port} cannot be listened on ({error}). Choose another port; 0 takes a free one."
        ) from None
    return bound


def make_service(drafting: Drafting, settings: Settings, runs: Runs) -> Service:
    """An engine for a pair, under a worker, with all that serving takes.

    Args:
        drafting: what runs, and what drafts.
        settings: how to serve.
        runs: how to set up the engine.
    """
    records: list[StepRecord] = []
    pair = drafting.pair
    tokenizer = pair.opened.target.tokenizer
    engine = Engine(
        pair.target,
        PredictedDrafter(pair.drafter),
        eos_ids=tokenizer.eos_ids,
        max_draft=runs.max_draft,
        max_batch=runs.max_batch,
        max_rows=runs.max_rows,
        lengths=drafting.lengths,
        randomness=streams,
        on_record=records.append,
    )
    tracer = configured_tracer()
    metrics = Metrics(vllm=settings.vllm_metrics)
    worker = Worker(engine, records, metrics, perf_counter)
    service = Service(
        worker=worker,
        model=Model(tokenizer, pair.target.vocab_size, pair.target.context_length, 0),
        settings=settings,
        metrics=metrics,
        info=dict,
        compile_grammar=Compiler(tokenizer, pair.target.vocab_size),
        max_batch=runs.max_batch,
        clock=perf_counter,
        tracing=Tracing.starting(tracer, perf_counter()) if tracer else None,
    )
    show(service, drafting, runs)
    return service


class _Server(uvicorn.Server):
    """An HTTP server that stops in order at the first signal, and at once at the second."""

    def __init__(self, config: uvicorn.Config, service: Service, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._announce = service, announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for one in signals:
            loop.add_signal_handler(one, self._stop)
        try:
            yield
        finally:
            for one in signals:
                loop.remove_signal_handler(one)

    def _stop(self) -> None:
        service = self._service
        if service.draining:
            service.worker.cut()
            return
        service.draining = self.should_exit = True
        asyncio.get_running_loop().call_later(service.settings.drain, service.worker.cut)


def serve(service: Service, listening: socket.socket, announce: Callable[[], None]) -> None:
    """Serve until SIGTERM or Ctrl-C: running requests get `Settings.drain` seconds, then they are cut off.

    Args:
        service: what to serve.
        listening: the socket.
        announce: called when clients can come.
    """
    config = uvicorn.Config(
        create_app(service),
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(service.settings.drain) + 5,
    )
    asyncio.run(_Server(config, service, announce).serve(sockets=[listening]))
