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
from ctypes import addressof, byref, c_float, c_int64
from functools import cache
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError, ShapeError, UsageError
from . import abi
from .batch import KVCache, KVLayer, Ragged, Rotary
from .checks import check, check_kv
from .machine import Slab, thread_count
from .packed import Layer, Packed, Stack
from .panels import PanelKind, Panels, PanelWeight, panel_kind

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
            FormatError: a scale layout that no format of bitdraft has.
        """
        placed = tuple(self._pack(part) if part.blocks is None else self._pack_blocks(part) for part in parts)
        return PanelWeight(placed, sum(part.nbytes for part in parts))

    def _pack(self, packed: Packed) -> Panels:
        N, scales = packed.shape[0], packed.scales
        kind = panel_kind(packed)
        channel = None
        if scales is not None and kind.grid == "none":
            channel = torch.zeros(-(-N // 16) * 16)
            channel[:N] = scales[:, 0]
        made = self.place(kind, channel)
        codes = packed.codes.float() if packed.codes.dtype == torch.float16 else packed.codes.contiguous()
        scales = None if scales is None else scales.float().contiguous()
        zeros = None if packed.zeros is None else packed.zeros.contiguous()
        places = byref(made.struct()), made.panels.data_ptr(), codes.data_ptr()
        self._call("bd_pack", *places, _pointer(scales), _pointer(zeros))
        return made

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

    def linear_add(self, x_RK: Tensor, weight: PanelWeight, residual_RN: Tensor) -> Tensor:
        """Rounding of the inputs, matmul, residual."""
        out_RN = torch.empty_like(residual_RN)
        weights = byref(weight.struct)
        self._call("bd_linear_add", x_RK.data_ptr(), len(x_RK), weights, residual_RN.data_ptr(), out_RN.data_ptr())
        return out_RN

    def gated_inputs(self, x_RD: Tensor, norm_D: Tensor, eps: float, gate_up: PanelWeight) -> Tensor:
        """`silu(gate) * up` of the normalised rows."""
        out_RM = torch.empty(len(x_RD), gate_up.shape[0] // 2)
        rows = x_RD.data_ptr(), len(x_RD), norm_D.data_ptr(), eps
        self._call("bd_gated_inputs", *rows, byref(gate_up.struct), out_RM.data_ptr())
        return out_RM

    def gated_mlp(self, x_RD: Tensor, norm_D: Tensor, eps: float, gate_up: PanelWeight, down: PanelWeight) -> Tensor:
        """`x + down(silu(gate) * up)`."""
        out_RD = torch.empty_like(x_RD)
        rows = x_RD.data_ptr(), len(x_RD), norm_D.data_ptr(), eps
        self._call("bd_gated_mlp", *rows, byref(gate_up.struct), byref(down.struct), out_RD.data_ptr())
        return out_RD

    def logits(self, x_RD: Tensor, norm_D: Tensor, eps: float, head: PanelWeight) -> Tensor:
        """Final RMSNorm and the output head."""
        return self.norm_linear(x_RD, norm_D, eps, head, None)

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
        shape, rows = _attention(H, J, C, rotary, None, eps), _Batch(batch)
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

    def attention(self, q_RHC: Tensor, batch: Ragged, kv: KVLayer, window: int | None) -> Tensor:
        """Causal attention of every row to its own sequence's paged KV."""
        R, H, C = q_RHC.shape
        out_RN = torch.empty(R, H * C)
        shape, rows = _attention(H, kv.kv_heads, C, None, window, 0.0), _Batch(batch)
        q_RHC = q_RHC.contiguous()
        places = byref(rows.struct), byref(shape), byref(_kv(kv))
        self._call("bd_attend", q_RHC.data_ptr(), *places, out_RN.data_ptr())
        return out_RN

    def run_layers(
        self,
        x_RD: Tensor,
        stack: Stack,
        batch: Ragged,
        rotary: Rotary,
        cache: KVCache,
        eps: float,
        window: int | None,
    ) -> Tensor:
        """All layers in one call: `ops.run_layers` without Python between the operations."""
        if stack.compiled is None:
            stack.compiled = (abi.Layer * len(stack))(*(_layer(layer) for layer in stack))
        fixed = cache.compiled
        if fixed is None or fixed.rotary is not rotary or fixed.stack is not stack:
            fixed = cache.compiled = _Fixed(stack, rotary, cache, eps, window)
        rows = _Batch(batch)
        places = fixed.kv, byref(rows.struct), byref(fixed.shape)
        self._call("bd_decode", x_RD.data_ptr(), x_RD.shape[1], stack.compiled, len(stack), *places)
        return x_RD


class _Fixed:
    """What does not change from step to step: blocks and the shape of attention, as the C interface takes them."""

    def __init__(self, stack: Stack, rotary: Rotary, cache: KVCache, eps: float, window: int | None) -> None:
        for kv in cache:
            check_kv("run_layers", kv)
        J, C = cache[0].kv_heads, cache[0].head_dim
        self.stack, self.rotary = stack, rotary
        self.kv = (abi.KV * len(cache))(*(_kv(kv) for kv in cache))
        self.shape = _attention(stack[0].qkv.shape[0] // C - 2 * J, J, C, rotary, window, eps)


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


def _attention(H: int, J: int, C: int, rotary: Rotary | None, window: int | None, eps: float) -> abi.Attention:
    if rotary is None:
        return abi.Attention(H, J, C, window or 0, 0, None, None, eps)
    cos, sin = rotary.cos, rotary.sin
    return abi.Attention(H, J, C, window or 0, len(cos), cos.data_ptr(), sin.data_ptr(), eps)


def _kv(kv: KVLayer) -> abi.KV:
    check(kv.block_size == BLOCK_SIZE, "native", f"blocks of {kv.block_size} tokens", f"blocks of {BLOCK_SIZE}")
    dtype = abi.KV_DTYPES[str(kv.keys.dtype).removeprefix("torch.")]
    scales = _pointer(kv.key_scales), _pointer(kv.value_scales)
    return abi.KV(dtype, len(kv.keys), kv.keys.data_ptr(), kv.values.data_ptr(), *scales)


def _layer(layer: Layer) -> abi.Layer:
    weights: list[Any] = [layer.qkv, layer.o, layer.gate_up, layer.down]
    vectors = layer.input_norm, layer.mlp_norm, layer.qkv_bias, layer.q_norm, layer.k_norm
    return abi.Layer(*map(_pointer, vectors), *(weight.struct for weight in weights))


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
