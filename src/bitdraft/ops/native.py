"""The compiled kernels (csrc/): the only place that loads them, and the operations of `reference.py` through them.

`find` is the dispatch point: `ops/__init__.py` asks it for every operation and falls back to `reference.py`, which is
the specification. Without the library (no compiler at installation, another processor) every operation runs as plain
PyTorch, and `why_none` says so to whoever prints figures.

Environment: `BITDRAFT_ISA` is scalar, avx2, avx512 or reference, and empty for the best that the machine runs;
`BITDRAFT_THREADS` is the number of threads.

Shape suffixes: R rows, S sequences, D hidden size, N outputs, K inputs, H query heads, J KV heads, C head dimension,
M inner size of the MLP, V vocabulary, G groups along K.
"""

import ctypes
import importlib.util
import os
from array import array
from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_float, c_int64, pointer
from dataclasses import replace
from functools import cache
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError, ShapeError, UsageError
from . import abi
from .batch import AttentionKind, CodedBlocks, KVCache, KVLayer, Ragged, Rotary
from .checks import check, check_kv
from .machine import Slab, thread_count
from .packed import Gate, Layer, Packed, Stack, float_matrix
from .panels import PanelKind, Panels, PanelWeight, panel_source

BLOCK_SIZE = 16
"""Tokens of a KV block: as many as a vector has lanes."""

_ERRORS: dict[int, type[Exception]] = {1: ShapeError, 2: ShapeError, 3: MemoryError, 4: UsageError}


class Native:
    """The kernels of one instruction set with threads of their own: every operation of `reference.py`, as a method.

    Attributes:
        isa: scalar, avx2 or avx512.
        threads: how many threads compute.
    """

    def __init__(self, library: ctypes.CDLL, isa: str = "", threads: int = 1) -> None:
        """Start the threads.

        Raises:
            UsageError: the machine does not run that instruction set.
        """
        self._library = library
        self._pool = library.bd_pool_new(isa.encode() or None, threads)
        if not self._pool:
            raise UsageError(f"BITDRAFT_ISA={isa}: {library.bd_error().decode()}")
        self.isa: str = library.bd_pool_isa(self._pool).decode()
        self.threads: int = library.bd_pool_threads(self._pool)
        self._slab = Slab()

    def __del__(self) -> None:
        if getattr(self, "_pool", None):
            self._library.bd_pool_free(self._pool)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(self._pool, *arguments)
        if code:
            raise _ERRORS[code](f"{name[3:]}: {self._library.bd_error().decode()}")

    def prepare(self, *parts: Packed) -> PanelWeight:
        """Repack a weight, or the parts of one, into panels.

        Raises:
            FormatError: a scale layout that no format of bitdraft has, or values that the kernels cannot hold.
        """
        placed = tuple(self._pack(part) if part.blocks is None else self._pack_blocks(part) for part in parts)
        placed = tuple(self._with_outliers(made, part) for made, part in zip(placed, parts, strict=True))
        return PanelWeight(placed, sum(part.nbytes for part in parts))

    def _pack(self, packed: Packed) -> Panels:
        N, source = packed.shape[0], panel_source(packed)
        channel = None
        if source.channel is not None:
            channel = torch.zeros(-(-N // 16) * 16)
            channel[:N] = source.channel
        made = self.place(source.kind, channel)
        places = byref(made.struct()), made.panels.data_ptr(), source.codes.data_ptr()
        self._call("bd_pack", *places, _pointer(source.scales), _pointer(source.zeros))
        return made

    def _with_outliers(self, made: Panels, packed: Packed) -> Panels:
        if packed.outliers is None:
            return made
        side = self._pack(float_matrix(packed.outliers.side))
        return replace(made, columns=packed.outliers.columns.contiguous(), side=side)

    def _pack_blocks(self, packed: Packed) -> Panels:
        """Codes and scales of a GGUF file's blocks go into panels as they are."""
        assert packed.blocks is not None
        (N, K), number = packed.shape, packed.blocks.kind
        struct = abi.Weight(outputs=N, inputs=K)
        if self._library.bd_gguf_form(number, byref(struct)):
            raise FormatError(f"{packed.blocks.name} blocks for {K} inputs. Expected quantised ones, and whole blocks.")
        codec, grid = list(abi.CODECS)[struct.codec], list(abi.GRIDS)[struct.grid]
        made = self.place(PanelKind(codec, grid, struct.group, packed.activation, packed.shape), None)
        codes = packed.codes.contiguous()
        self._call("bd_pack_gguf", byref(made.struct()), made.panels.data_ptr(), number, codes.data_ptr())
        return made

    def place(self, kind: PanelKind, channel: Tensor | None) -> Panels:
        """A part of a weight, in large pages, whose panels are still to be written.

        Args:
            kind: its sizes and layout.
            channel: a scale for each output, [N padded to 16] float32, or None.
        """
        codec, grid = abi.CODECS[kind.codec], abi.GRIDS[kind.grid]
        size = self._library.bd_weight_bytes(codec, grid, kind.group, *kind.shape)
        return Panels(kind, self._slab.take(size), channel)

    def embed(self, ids_R: Tensor | Sequence[int], table: PanelWeight) -> Tensor:
        """Rows of the embedding table."""
        ids = array("q", ids_R.tolist() if isinstance(ids_R, Tensor) else ids_R)
        out_RD = torch.empty(len(ids), table.shape[1])
        self._call("bd_unpack_rows", byref(table.struct), ids.buffer_info()[0], len(ids), out_RD.data_ptr())
        return out_RD

    def norm_linear(
        self, x_RD: Tensor, norm_D: Tensor, eps: float, weight: PanelWeight, bias_N: Tensor | None
    ) -> Tensor:
        """RMSNorm, rounding of the inputs, matmul, bias."""
        rows = x_RD.shape[0]  # len() of a tensor goes through Python
        out_RN = torch.empty(rows, weight.shape[0])
        self._call(
            "bd_norm_linear",
            x_RD.data_ptr(),
            rows,
            norm_D.data_ptr(),
            eps,
            byref(weight.struct),
            _pointer(bias_N),
            out_RN.data_ptr(),
        )
        return out_RN

    def linear_add(
        self,
        x_RK: Tensor,
        weight: PanelWeight,
        residual_RN: Tensor,
        norm_N: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Rounding of the inputs, matmul, norm where there is one, residual."""
        out_RN = torch.empty_like(residual_RN)
        rows, places = (x_RK.data_ptr(), len(x_RK), byref(weight.struct)), (residual_RN.data_ptr(), out_RN.data_ptr())
        if norm_N is None:
            self._call("bd_linear_add", *rows, *places)
        else:
            self._call("bd_linear_norm_add", *rows, norm_N.data_ptr(), eps, *places)
        return out_RN

    def gated_inputs(
        self, x_RD: Tensor, norm_D: Tensor, eps: float, gate_up: PanelWeight, gate: Gate = "silu"
    ) -> Tensor:
        """`act(gate) * up` of the normalised rows."""
        out_RM = torch.empty(len(x_RD), gate_up.shape[0] // 2)
        rows = x_RD.data_ptr(), len(x_RD), norm_D.data_ptr(), eps
        self._call("bd_gated_inputs", *rows, byref(gate_up.struct), abi.GATES[gate], out_RM.data_ptr())
        return out_RM

    def gated_mlp(
        self,
        x_RD: Tensor,
        norm_D: Tensor,
        eps: float,
        gate_up: PanelWeight,
        down: PanelWeight,
        gate: Gate = "silu",
        down_norm_D: Tensor | None = None,
    ) -> Tensor:
        """`x + down(act(gate) * up)`, the product normalised where asked."""
        if down_norm_D is not None:
            return self.linear_add(self.gated_inputs(x_RD, norm_D, eps, gate_up, gate), down, x_RD, down_norm_D, eps)
        out_RD = torch.empty_like(x_RD)
        rows, first = (x_RD.data_ptr(), len(x_RD), norm_D.data_ptr(), eps), (byref(gate_up.struct), abi.GATES[gate])
        self._call("bd_gated_mlp", *rows, *first, byref(down.struct), out_RD.data_ptr())
        return out_RD

    def logits(self, x_RD: Tensor, norm_D: Tensor, eps: float, head: PanelWeight, cap: float | None = None) -> Tensor:
        """Final RMSNorm and the output head, capped where asked."""
        out_RV = self.norm_linear(x_RD, norm_D, eps, head, None)
        if cap is not None:
            self._call("bd_softcap", out_RV.data_ptr(), *out_RV.shape, cap)
        return out_RV

    def top(self, logits_RV: Tensor) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Place and size of the largest logit of each row."""
        R, V = logits_RV.shape
        places, largest = (c_int64 * R)(), (c_float * R)()
        rows = logits_RV.data_ptr(), R, V, logits_RV.stride(0)
        self._call("bd_top", *rows, addressof(places), addressof(largest))
        return tuple(places), tuple(largest)

    def rope_append(
        self,
        qkv_RN: Tensor,
        batch: Ragged,
        rotary: Rotary,
        kv: KVLayer,
        q_norm_C: Tensor | None,
        k_norm_C: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Normalise and rotate q and k, write k and v to the cache."""
        J, C = kv.kv_heads, kv.head_dim
        H = qkv_RN.shape[1] // C - 2 * J
        q_RHC = torch.empty(len(qkv_RN), H, C)
        shape, rows = _attention(H, J, C, AttentionKind(rotary), eps), _Batch(batch)
        self._call(
            "bd_rope_append",
            qkv_RN.data_ptr(),
            byref(rows.struct),
            byref(shape),
            byref(_kv(kv)),
            _pointer(q_norm_C),
            _pointer(k_norm_C),
            q_RHC.data_ptr(),
        )
        return q_RHC

    def attention(
        self, q_RHC: Tensor, batch: Ragged, kv: KVLayer, window: int | None, scale: float | None = None
    ) -> Tensor:
        """Causal attention of every row to its own sequence's paged KV."""
        R, H, C = q_RHC.shape
        out_RN = torch.empty(R, H * C)
        shape = abi.Attention(H, kv.kv_heads, C, window or 0, 0, None, None, 0.0, scale or 0.0, 0)
        rows = _Batch(batch)
        q_RHC = q_RHC.contiguous()
        places = byref(rows.struct), byref(shape), byref(_kv(kv))
        self._call("bd_attend", q_RHC.data_ptr(), *places, out_RN.data_ptr())
        return out_RN

    def run_layers(
        self,
        x_RD: Tensor,
        stack: Stack,
        batch: Ragged,
        kinds: Sequence[AttentionKind],
        cache: KVCache,
        eps: float,
    ) -> Tensor:
        """All layers in one call: `ops.run_layers` without Python between the operations."""
        if stack.compiled is None:
            stack.compiled = (abi.Layer * len(stack))(*(_layer(layer) for layer in stack))
        fixed = cache.compiled
        if fixed is None or fixed.kinds is not kinds or fixed.stack is not stack:
            fixed = cache.compiled = _Fixed(stack, kinds, cache, eps)
        rows = _Batch(batch)
        places = fixed.kv, byref(rows.struct), fixed.shapes, len(kinds)
        self._call("bd_decode", x_RD.data_ptr(), x_RD.shape[1], stack.compiled, len(stack), *places)
        return x_RD


class _Fixed:
    """What does not change from step to step: blocks and the shape of attention, as the C interface takes them."""

    def __init__(self, stack: Stack, kinds: Sequence[AttentionKind], cache: KVCache, eps: float) -> None:
        for kv in cache:
            check_kv("run_layers", kv)
        J, C = cache[0].kv_heads, cache[0].head_dim
        H = stack[0].qkv.shape[0] // C - 2 * J
        self.stack, self.kinds = stack, kinds
        self.kv = (abi.KV * len(cache))(*(_kv(kv) for kv in cache))
        self.shapes = (abi.Attention * len(kinds))(*(_attention(H, J, C, kind, eps) for kind in kinds))


class _Batch:
    """A ragged batch as the C interface takes it, and the array of numbers that it points into."""

    def __init__(self, batch: Ragged) -> None:
        _, positions, slots, tables = batch.numbers
        starts = accumulate(batch.row_counts, initial=0)
        table_starts = accumulate(map(len, tables), initial=0)
        parts = [positions, slots, [*starts], *tables, [*table_starts], batch.lengths]
        self._kept = array("q", [*chain.from_iterable(parts)])
        R, S = len(positions), len(batch.row_counts)
        first = self._kept.buffer_info()[0]
        blocks = first + 8 * (2 * R + S + 1)
        ends = first + 8 * (len(self._kept) - 2 * S - 1)
        self.struct = abi.Batch(R, S, first, first + 8 * R, first + 16 * R, blocks, ends, ends + 8 * (S + 1))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _attention(H: int, J: int, C: int, kind: AttentionKind, eps: float) -> abi.Attention:
    cos, sin = kind.rotary.cos, kind.rotary.sin
    table = len(cos), cos.data_ptr(), sin.data_ptr()
    return abi.Attention(H, J, C, kind.window or 0, *table, eps, kind.scale or 0.0, 2 * cos.shape[1])


def _kv(kv: KVLayer) -> abi.KV:
    check(kv.block_size == BLOCK_SIZE, "native", f"blocks of {kv.block_size} tokens", f"blocks of {BLOCK_SIZE}")
    dtype = abi.KV_DTYPES[str(kv.keys.dtype).removeprefix("torch.")]
    scales = _pointer(kv.key_scales), _pointer(kv.value_scales)
    coded = None if kv.coded is None else pointer(_coded(kv.coded))
    return abi.KV(dtype, len(kv.keys), kv.keys.data_ptr(), kv.values.data_ptr(), *scales, coded)


def _coded(c: CodedBlocks) -> abi.Coded:
    tensors = c.copies, c.keys, c.values, c.key_grid, c.value_grid, c.key_outliers, c.value_outliers
    return abi.Coded(c.bits, c.key_outliers.shape[2], c.window, len(c.copies), *map(_pointer, tensors))


def _layer(layer: Layer) -> abi.Layer:
    weights: list[Any] = [layer.qkv, layer.o, layer.gate_up, layer.down]
    vectors = (
        layer.input_norm,
        layer.mlp_norm,
        layer.qkv_bias,
        layer.q_norm,
        layer.k_norm,
        layer.o_norm,
        layer.down_norm,
    )
    switches = abi.GATES[layer.gate], layer.attention
    return abi.Layer(*map(_pointer, vectors), *switches, *(weight.struct for weight in weights))


@cache
def load() -> tuple[ctypes.CDLL | None, str | None]:
    """The compiled library, or why there is none."""
    spec = importlib.util.find_spec("bitdraft._kernels")
    if spec is None or spec.origin is None:
        return None, (
            "bitdraft was installed without its compiled kernels, because there was no C++ compiler: install g++ or "
            "clang++ and then bitdraft again"
        )
    try:
        library = ctypes.CDLL(spec.origin)
        abi.declare(library)
    except (OSError, AttributeError) as error:
        return None, f"{spec.origin} cannot be used ({error}): install bitdraft again"
    if library.bd_abi() != abi.VERSION:
        return None, f"{spec.origin} is of version {library.bd_abi()}, not {abi.VERSION}: install bitdraft again"
    return library, None


@cache
def default() -> Native | None:
    """The kernels that operations run on: as the environment asks, or the machine's best; None for the reference.

    Raises:
        UsageError: the environment asks for what there is not.
    """
    isa = os.environ.get("BITDRAFT_ISA", "")
    if isa == "reference":
        return None
    library, why = load()
    if library is None:
        if isa:
            raise UsageError(f"BITDRAFT_ISA={isa}: {why}.")
        return None
    torch.set_num_threads(1)  # see machine.torch_on_all_cores
    return Native(library, isa, thread_count(os.environ))


def find(operation: str) -> Callable[..., Any] | None:
    """The compiled version of `operation`, with the arguments and the result of the reference; None without one."""
    return getattr(default(), operation, None)


def why_none() -> str | None:
    """Why no compiled kernel runs, in a sentence; None when they do."""
    if default() is not None:
        return None
    why = load()[1] or "BITDRAFT_ISA=reference asks for it"
    return f"{why}: every format runs as plain PyTorch in FP32, at the speed of FP32"


def describe() -> str:
    """The backend in words, for reports: 'native (avx2, 2 threads)'."""
    kernels = default()
    if kernels is None:
        return f"reference (plain PyTorch, FP32): {why_none()}"
    return f"native ({kernels.isa}, {kernels.threads} threads)"
