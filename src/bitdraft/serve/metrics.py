"""What the server counts, as Prometheus reads it. Ours are `bitdraft_*`; speculation's have vLLM's names as well."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from ..engine.engine import Load
from .progress import Progress
from .worker import Update

MOST_DOMAINS = 32
"""Domain tags with figures of their own; what comes after goes under 'other', so that clients cannot make labels
without end."""
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Bounds of the context buckets, tokens before the step."""
_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)


@dataclass
class Acceptance:
    """Sums over positions that the target looked at.

    Attributes:
        tested: positions.
        overlap: sum of `sum_v min(p, q)`: over `tested`, the conditional acceptance.
    """

    tested: int = 0
    overlap: float = 0.0


class _Speculation(Collector):
    """Counters of speculation, kept as plain numbers: a step must not wait for locks."""

    def __init__(self, *, vllm: bool) -> None:
        self._vllm = vllm
        self.drafts = self.drafted = self.accepted = 0
        self.accepted_at: list[int] = []
        self.drafted_at: list[int] = []
        self.domains: dict[str, Acceptance] = {}
        self.contexts: dict[str, Acceptance] = {}

    def collect(self) -> Iterator[Metric]:
        """The counters, ours and under vLLM's names."""
        prefixes = ["bitdraft_spec_decode", *(["vllm:spec_decode"] if self._vllm else [])]
        for prefix in prefixes:
            yield CounterMetricFamily(f"{prefix}_num_drafts", "Steps with drafted tokens.", value=self.drafts)
            yield CounterMetricFamily(f"{prefix}_num_draft_tokens", "Drafted tokens.", value=self.drafted)
            yield CounterMetricFamily(
                f"{prefix}_num_accepted_tokens", "Drafted tokens that were accepted.", value=self.accepted
            )
            at = CounterMetricFamily(
                f"{prefix}_num_accepted_tokens_per_pos", "Accepted tokens by place in the block.", labels=["position"]
            )
            for position, count in enumerate(self.accepted_at):
                at.add_metric([str(position)], count)
            yield at
        drafted = CounterMetricFamily(
            "bitdraft_spec_decode_num_draft_tokens_per_pos", "Drafted tokens by place.", labels=["position"]
        )
        for position, count in enumerate(self.drafted_at):
            drafted.add_metric([str(position)], count)
        yield drafted
        for label, sums in (("domain", self.domains), ("context", self.contexts)):
            tested = CounterMetricFamily(
                f"bitdraft_tested_tokens_by_{label}", "Positions that the target looked at.", labels=[label]
            )
            overlap = CounterMetricFamily(
                f"bitdraft_overlap_by_{label}",
                "Sum of the chances of acceptance there; over tested tokens, the conditional acceptance.",
                labels=[label],
            )
            for name, acceptance in sums.items():
                tested.add_metric([name], acceptance.tested)
                overlap.add_metric([name], acceptance.overlap)
            yield tested
            yield overlap


class Metrics:
    """All figures of one server, an `Observer` of its worker."""

    def __init__(self, *, vllm: bool = True) -> None:
        """Begin at zero; `vllm` adds vLLM's names for speculation's counters."""
        self.registry = CollectorRegistry()
        self._speculation = _Speculation(vllm=vllm)
        self.registry.register(self._speculation)

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"bitdraft_{name}_seconds", what, buckets=_SECONDS, registry=self.registry)

        self._first = histogram("time_to_first_token", "From arrival to the first tokens.")
        self._per_token = histogram("time_per_output_token", "Mean time of a token after the first ones, by request.")
        self._between = histogram("inter_token_latency", "Time between deliveries over tokens delivered, by token.")
        self._whole = histogram("request", "From arrival to the end.")
        self._step_seconds = Counter(
            "bitdraft_step_seconds", "Time of requests in steps, by part.", ["part"], registry=self.registry
        )
        self._requests = Counter("bitdraft_requests", "Requests by their end.", ["finish"], registry=self.registry)
        self._prompt = Counter("bitdraft_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self._cached = Counter(
            "bitdraft_cached_prompt_tokens", "Those that the prefix cache held.", registry=self.registry
        )
        self._generated = Counter("bitdraft_generation_tokens", "Tokens of outputs.", registry=self.registry)
        self._gauges = {
            name: Gauge(f"bitdraft_{name}", what, registry=self.registry)
            for name, what in (
                ("requests_running", "Requests in the batch."),
                ("requests_waiting", "Requests in the queue."),
                ("kv_blocks_used", "KV blocks in use."),
                ("kv_blocks", "KV blocks there are."),
                ("kv_blocks_cached", "Blocks that the prefix cache keeps."),
            )
        }
        self._preemptions = Counter(
            "bitdraft_preemptions", "Requests that were put back for want of blocks.", registry=self.registry
        )
        self._preempted = 0
        self._last_step: tuple[float, float, float, float] | None = None

    def step(self, progress: Progress, update: Update) -> None:
        """Count what a step did for one request."""
        emission, record = update.emission, update.record
        self._generated.inc(len(emission.tokens))
        if emission.tokens:
            if progress.gap is None:
                self._first.observe(update.time - progress.arrived)
            else:
                for _ in emission.tokens:
                    self._between.observe(progress.gap / len(emission.tokens))
        if record is None:
            return
        parts = (update.time, record.draft_seconds, record.verify_seconds, record.other_seconds)
        if parts != self._last_step:  # the sequences of a step share its time
            self._last_step = parts
            for part, seconds in zip(("draft", "verify", "other"), parts[1:], strict=True):
                self._step_seconds.labels(part).inc(seconds)
        if record.proposed:
            overlap = () if record.predicted else record.overlap  # acceptance is the draft's, not the client's
            self._add_block(progress, record.proposed, record.accepted, record.start, overlap)

    def _add_block(
        self, progress: Progress, drafted: int, accepted: int, start: int, overlap: tuple[float, ...]
    ) -> None:
        counts = self._speculation
        counts.drafts += 1
        counts.drafted += drafted
        counts.accepted += accepted
        for places, count in ((counts.drafted_at, drafted), (counts.accepted_at, accepted)):
            places.extend([0] * (drafted - len(places)))
            for position in range(count):
                places[position] += 1
        context = progress.prompt_tokens + start
        bucket = next((f"<={bound}" for bound in CONTEXTS if context <= bound), f">{CONTEXTS[-1]}")
        domain = progress.domain or "none"
        if domain not in counts.domains and len(counts.domains) >= MOST_DOMAINS:
            domain = "other"
        for sums, label in ((counts.domains, domain), (counts.contexts, bucket)):
            acceptance = sums.setdefault(label, Acceptance())
            acceptance.tested += len(overlap)
            acceptance.overlap += sum(overlap)

    def end(self, progress: Progress, time: float) -> None:
        """Count a request that ended."""
        self._requests.labels(progress.finish or "abort").inc()
        self._prompt.inc(progress.prompt_tokens)
        self._cached.inc(progress.cached)
        self._whole.observe(time - progress.arrived)
        if progress.first is not None and progress.last is not None and progress.tokens > 1:
            self._per_token.observe((progress.last - progress.first) / (progress.tokens - 1))

    def acceptance(self) -> dict[str, dict[str, float]]:
        """Conditional acceptance by domain and by context, where anything was tested."""
        kinds = {"domain": self._speculation.domains, "context": self._speculation.contexts}
        return {
            kind: {name: a.overlap / a.tested for name, a in sums.items() if a.tested} for kind, sums in kinds.items()
        }

    def forget_acceptance(self) -> None:
        """Begin to count acceptance by domain and context anew: another draft begins."""
        self._speculation.domains.clear()
        self._speculation.contexts.clear()

    def text(self, load: Load) -> bytes:
        """Everything in Prometheus' text format, with the engine's load of this moment."""
        for name, value in (
            ("requests_running", load.running),
            ("requests_waiting", load.waiting),
            ("kv_blocks_used", load.kv_blocks_used),
            ("kv_blocks", load.kv_blocks_total),
            ("kv_blocks_cached", load.cached_blocks),
        ):
            self._gauges[name].set(value)
        self._preemptions.inc(load.preemptions - self._preempted)
        self._preempted = load.preemptions
        return generate_latest(self.registry)
