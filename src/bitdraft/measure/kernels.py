"""`bitdraft bench kernels`: how near each fused operation comes to what this machine can do at most.

Everything that an operation reads comes from memory, as it does in a model: there are so many copies of it, used in
turn, that none is in a cache any more when its turn comes again.

Shape suffixes: R rows, N outputs, K inputs, H query heads, J KV heads, C head dimension, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import ops
from ..engine.curve import backend
from ..formats import KV_FORMATS, KVFormat, get_format
from ..models.kv import BLOCK_SIZE, BlockPool
from ..ops import Ragged, hardware
from ..ops.hardware import Limits, Probe
from ..ops.packed import concatenate
from ..quantize.load import Progress

FORMATS = ("bf16", "fp8_e4m3-w", "w8a8", "w6a8", "w4a8", "w4a16", "w3a8", "w2a8")

FEWEST = 5
"""Samples of each figure, however slow."""


@dataclass(frozen=True)
class Sizes:
    """What the operations are timed on.

    Attributes:
        outputs, inputs: N and K of the weight; N a multiple of 16.
        rows: R of the matrix products. few_rows: R of attention and softmax.
        heads, kv_heads, head_dim: H, J and C. contexts: tokens that attention reads.
        vocabulary: V.
        distinct: bytes of all copies together, at least; None for three times the last cache.
        read: bytes of the buffer that the read limit is measured on.
    """

    outputs: int = 4096
    inputs: int = 4096
    rows: tuple[int, ...] = (1, 6, 64)
    few_rows: tuple[int, ...] = (1, 6)
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    contexts: tuple[int, ...] = (256, 4096)
    vocabulary: int = 151936
    distinct: int | None = None
    read: int = 512 << 20


@dataclass(frozen=True)
class KernelSpeed:
    """One operation on one kind of data.

    Attributes:
        operation: name of the operation. data: format of the weight, or of keys and values, or dtype of the logits.
        rows: R. context: tokens that attention reads; None for other operations.
        ms: median milliseconds of a call.
        gb_s: bytes in their packed form that have to come from memory, in 1e9 a second. gop_s: operations in 1e9 a
            second: 2 R N K of a product, 4 R H C context of attention, 4 R V of a softmax.
        of_read, of_fp32: these as shares of the machine's limits. 8-bit integer products may do more operations than
            FP32 ones, so that of_fp32 may exceed 1.
    """

    operation: str
    data: str
    rows: int
    context: int | None
    ms: float
    gb_s: float
    gop_s: float
    of_read: float
    of_fp32: float


@dataclass(frozen=True)
class _Case:
    """An operation that is timed: `calls` are the same work on different memory."""

    operation: str
    data: str
    rows: int
    context: int | None
    calls: Sequence[Callable[[], object]]
    bytes: int
    operations: int

    def speed(self, seconds: float, limits: Limits) -> KernelSpeed:
        read, done = self.bytes / seconds, self.operations / seconds
        figures = seconds * 1e3, read / 1e9, done / 1e9, read / limits.read, done / limits.operations
        return KernelSpeed(self.operation, self.data, self.rows, self.context, *figures)


def bench_kernels(
    clock: Callable[[], float], seconds: float, progress: Progress, sizes: Sizes | None = None
) -> dict[str, Any]:
    """Measure the machine's limits and the speed of every operation beside them.

    Args:
        clock: seconds.
        seconds: time to spend on timing; preparing the weights takes some more.
        progress: called with (done, total, what).
        sizes: shapes; None for those of a large layer.

    Returns:
        what `--json` prints: processor, isa, threads, limits and a list of `KernelSpeed` as objects.

    Raises:
        UsageError: there are no compiled kernels.
    """
    sizes, probe = sizes or Sizes(), Probe()
    distinct = sizes.distinct or 3 * (hardware.last_level_cache() or 32 << 20)
    families = [
        *(partial(_products, name, sizes, distinct) for name in FORMATS),
        *(partial(_attentions, kv, c, sizes, distinct) for kv in KV_FORMATS.values() for c in sizes.contexts),
        partial(_softmaxes, probe, sizes, distinct),
    ]
    progress(0, 1 + len(families), "kernels")
    limits = probe.limits(sizes.read, 5)
    speeds: list[KernelSpeed] = []
    for done, make in enumerate(families, start=1):
        progress(done, 1 + len(families), "kernels")
        speeds += _speeds(make(), seconds / len(families), limits, clock)
    progress(1 + len(families), 1 + len(families), "kernels")
    isa, threads = backend()
    return {
        "processor": hardware.processor(),
        "isa": isa,
        "threads": threads,
        "limits": {"read_gb_s": limits.read / 1e9, "fp32_gop_s": limits.operations / 1e9},
        "kernels": [asdict(speed) for speed in speeds],
    }


def _speeds(
    cases: Sequence[_Case], seconds: float, limits: Limits, clock: Callable[[], float]
) -> Iterator[KernelSpeed]:
    """Time cases in turns, each call on the next copy; the first turn warms up."""
    samples: list[list[float]] = [[] for _ in cases]
    end, turns = clock() + seconds, count()
    while len(samples[-1]) <= FEWEST or clock() < end:
        for case, taken in zip(cases, samples, strict=True):
            call = case.calls[next(turns) % len(case.calls)]
            started = clock()
            call()
            taken.append(clock() - started)
    for case, taken in zip(cases, samples, strict=True):
        yield case.speed(median(taken[1:]), limits)


def _products(name: str, sizes: Sizes, distinct: int) -> list[_Case]:
    """norm_linear with weights of a format."""
    N, K = sizes.outputs, sizes.inputs
    part = get_format(name).encode(torch.randn(16, K))
    packed = concatenate([part] * (N // 16))
    weights = [ops.prepare(packed) for _ in range(_copies(packed.nbytes, distinct))]
    norm = torch.ones(K)
    cases = []
    for R in sizes.rows:
        x_RK = torch.randn(R, K)
        calls = [partial(ops.norm_linear, x_RK, norm, 1e-6, weight) for weight in weights]
        cases.append(_Case("norm_linear", name, R, None, calls, packed.nbytes, 2 * R * N * K))
    return cases


def _attentions(kv_format: KVFormat, context: int, sizes: Sizes, distinct: int) -> list[_Case]:
    """Attention of the last rows of one sequence to `context` tokens."""
    H, J, C = sizes.heads, sizes.kv_heads, sizes.head_dim
    blocks = -(-context // BLOCK_SIZE)
    old = max(0, context - max(sizes.few_rows) - kv_format.window) // BLOCK_SIZE if kv_format.bits else blocks
    number = old * BLOCK_SIZE * kv_format.bits_per_number(C) / 8 + max(0, context - old * BLOCK_SIZE) * 2
    size = round(2 * J * C * number)
    pool = BlockPool(_copies(size, distinct), blocks, J, C, kv_format)
    table = torch.tensor([pool.take() for _ in range(blocks)])
    for block in table[:old].tolist() if kv_format.bits else ():
        pool.seal(block)
    for part in (p for kv in pool.layers for p in (kv.keys, kv.values, *kv.tensors())):
        part.fill_(1)  # memory that never was written is one page of zeros, and in the cache
    cases = []
    for R in sizes.few_rows:
        positions = torch.arange(context - R, context)
        slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = Ragged(positions, positions, slots, (R,), (table,), (context,))
        q_RHC = torch.randn(R, H, C)
        calls = [partial(ops.attention, q_RHC, batch, kv) for kv in pool.layers]
        cases.append(_Case("attention", kv_format.name, R, context, calls, size, 4 * R * H * C * context))
    return cases


def _softmaxes(probe: Probe, sizes: Sizes, distinct: int) -> list[_Case]:
    """Softmax of rows of logits."""
    V = sizes.vocabulary
    rows_TV = torch.ones(_copies(4 * V, distinct), V)
    cases = []
    for R in sizes.few_rows:
        calls = [partial(probe.softmax, logits_RV) for logits_RV in torch.split(rows_TV, R) if len(logits_RV) == R]
        cases.append(_Case("softmax", "float32", R, None, calls, 4 * R * V, 4 * R * V))
    return cases


def _copies(size: int, distinct: int) -> int:
    """How many copies of `size` bytes there have to be; some even of the largest."""
    return max(4, -(-distinct // size))


def render_kernels(result: Mapping[str, Any], console: Console) -> None:
    """Print what `bench_kernels` returned as a table."""
    limits = result["limits"]
    console.print(
        f"{result['processor']}, {result['isa']}, {result['threads']} threads. "
        f"At most {limits['read_gb_s']:.1f} GB/s read from memory, {limits['fp32_gop_s']:.0f} GOP/s in FP32.\n",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, header_style="bold")
    for heading in ("operation", "data"):
        table.add_column(heading)
    for heading in ("context", "rows", "ms", "GB/s", "of read", "GOP/s", "of FP32"):
        table.add_column(heading, justify="right")
    for k in result["kernels"]:
        table.add_row(
            k["operation"],
            k["data"],
            "" if k["context"] is None else str(k["context"]),
            str(k["rows"]),
            f"{k['ms']:.3f}",
            f"{k['gb_s']:.2f}",
            f"{k['of_read']:.0%}",
            f"{k['gop_s']:.1f}",
            f"{k['of_fp32']:.0%}",
        )
    console.print(table)
