"""What every backend may rely on: sizes and places are checked before an operation is dispatched.

Compiled code does not look again. After these checks nothing that a batch says makes it read or write outside the
tensors that it was given.

Shape suffixes: R rows, S sequences, J KV heads, C head dimension.
"""

from itertools import pairwise

import torch
from torch import Tensor

from ..errors import ShapeError
from .batch import CodedBlocks, KVLayer, Listed, Ragged, Rotary
from .packed import Packed

KV_DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)


def check(ok: bool, operation: str, given: str, expected: str) -> None:
    """Raise the error that names what an operation was given and what it expected.

    Raises:
        ShapeError: unless `ok`.
    """
    if not ok:
        raise ShapeError(f"{operation}: given {given}. Expected {expected}.")


def check_rows(operation: str, name: str, x: Tensor, width: int) -> None:
    """Contiguous float32 rows, [any, width].

    Raises:
        ShapeError: they are not.
    """
    if x.ndim == 2 and x.shape[1] == width and x.dtype == torch.float32 and x.is_contiguous():
        return  # at every step: before any text is made
    given = f"{name} {x.dtype} {list(x.shape)}{'' if x.is_contiguous() else ', not contiguous'}"
    check(False, operation, given, f"contiguous float32 rows of {width}")


def check_vector(operation: str, name: str, v: Tensor | None, size: int) -> None:
    """None, or a contiguous float32 vector, [size].

    Raises:
        ShapeError: it is neither.
    """
    if v is None or (v.shape == (size,) and v.dtype == torch.float32 and v.is_contiguous()):
        return
    check(False, operation, f"{name} {v.dtype} {list(v.shape)}", f"contiguous float32 [{size}]")


def check_outliers(operation: str, packed: Packed) -> None:
    """Columns that are ascending inputs, with bfloat16 weights for each, of a weight that is not rotated.

    Raises:
        ShapeError: they are not.
    """
    if packed.outliers is None:
        return
    columns, side, numbers = packed.outliers.columns, packed.outliers.side, packed.columns
    given = f"outliers {columns.dtype} {list(columns.shape)} with weights {side.dtype} {list(side.shape)}"
    ok = columns.ndim == 1 and columns.dtype == torch.int32 and side.dtype == torch.bfloat16
    expected = f"int32 columns and bfloat16 weights [{packed.shape[0]}, as many]"
    check(ok and side.shape == (packed.shape[0], len(columns)) and len(columns) > 0, operation, given, expected)
    ascending = all(a < b for a, b in pairwise((-1, *numbers, packed.shape[1])))
    check(ascending, operation, f"columns {list(numbers[:8])}", f"ascending ones below {packed.shape[1]}")
    check(packed.rotation is None, operation, "outliers of rotated inputs", "one of the two")


def check_kv(operation: str, kv: KVLayer) -> None:
    """Tensors that fit together, as `KVLayer` describes them.

    Raises:
        ShapeError: they do not.
    """
    keys, values, scales = kv.keys, kv.values, (kv.key_scales, kv.value_scales)
    given = f"keys {keys.dtype} {list(keys.shape)}, values {values.dtype} {list(values.shape)}"
    check(
        keys.ndim == 4
        and min(keys.shape[1:]) > 0
        and values.shape == (*keys.shape[:2], keys.shape[3], keys.shape[2])
        and keys.dtype == values.dtype
        and keys.dtype in KV_DTYPES
        and keys.is_contiguous()
        and values.is_contiguous(),
        operation,
        given,
        "contiguous keys [blocks, J, C, block size] and values [blocks, J, block size, C] in float32, bfloat16, int8 "
        "or float8_e4m3fn",
    )
    if kv.coded is not None:
        _check_coded(operation, kv, kv.coded, given)
    if keys.dtype.itemsize > 1:
        check(scales == (None, None), operation, f"{given}, with scales", "scales beside 8-bit codes only")
        return
    for name, scale in zip(("key_scales", "value_scales"), scales, strict=True):
        shape = (*keys.shape[:2], keys.shape[3]) if keys.dtype == torch.int8 else (keys.shape[1],)
        ok = scale is not None and scale.shape == shape and scale.dtype == torch.float32 and scale.is_contiguous()
        found = None if scale is None else f"{scale.dtype} {list(scale.shape)}"
        check(ok, operation, f"{name} {found} beside {given}", f"contiguous float32 {list(shape)}")


def _check_coded(operation: str, kv: KVLayer, coded: CodedBlocks, given: str) -> None:
    check(kv.keys.dtype == torch.bfloat16, operation, f"{given} beside blocks in codes", "full copies in bfloat16")
    blocks, J, C, size, bits = len(coded.copies), kv.kv_heads, kv.head_dim, kv.block_size, coded.bits
    outliers = coded.key_outliers.shape[2] if coded.key_outliers.ndim == 4 else 0
    width = C * bits // 8
    expected = {
        "keys": (torch.uint8, [blocks, J, width, size]),
        "values": (torch.uint8, [blocks, J, size, width]),
        "key_grid": (torch.bfloat16, [blocks, J, 2, C]),
        "value_grid": (torch.bfloat16, [blocks, J, 2, size]),
        "key_outliers": (torch.int16, [blocks, J, outliers, 2]),
        "value_outliers": (torch.int16, [blocks, J, outliers, 2]),
        "copies": (torch.int64, [blocks]),
    }
    for name, (dtype, shape) in expected.items():
        tensor: Tensor = getattr(coded, name)
        ok = tensor.dtype == dtype and list(tensor.shape) == shape and tensor.is_contiguous()
        check(ok, operation, f"coded {name} {tensor.dtype} {list(tensor.shape)}", f"contiguous {dtype} {shape}")
    check(
        bits in (4, 8) and C % 2 == 0 and coded.window > 0 and coded.window % size == 0,
        operation,
        f"codes of {bits} bits, a head dimension of {C}, a window of {coded.window}",
        f"4 or 8 bits, an even head dimension, and a window of whole blocks of {size}",
    )


def check_batch(operation: str, batch: Ragged, kv: KVLayer, rows: int) -> None:
    """A batch of `rows` rows whose positions, tables and slots lie in the sequences and the blocks that there are.

    O(rows + table entries).

    Raises:
        ShapeError: it is not.
    """
    blocks, size = kv.num_blocks, kv.block_size
    counts, lengths, tables = batch.row_counts, batch.lengths, batch.tables
    check_arrays(operation, batch, rows)
    for table, length in zip(tables, lengths, strict=True):
        check(
            0 <= length <= len(table) * size,
            operation,
            f"a length of {length} with a table of {len(table)} blocks of {size}",
            f"lengths from 0 to {len(table) * size}",
        )
    _check_range(operation, "slots", batch.slots, blocks * size)
    if tables:
        _check_range(operation, "blocks", torch.cat(tables), blocks)
        held_R = torch.repeat_interleave(torch.tensor(lengths), torch.tensor(counts))
        outside_R = (batch.positions < 0) | (batch.positions >= held_R)
        if bool(outside_R.any()):
            row = int(outside_R.nonzero()[0])
            given = f"position {int(batch.positions[row])} in a sequence of length {int(held_R[row])}"
            check(False, operation, given, "positions from 0 to length - 1")
    if kv.coded is not None:
        _check_copies(operation, batch, kv, kv.coded)


def _check_copies(operation: str, batch: Ragged, kv: KVLayer, coded: CodedBlocks) -> None:
    """Full copies of the blocks that rows write to, and of those that they do not read in codes."""
    size, needed, row = kv.block_size, [batch.slots // kv.block_size], 0
    for count, table in zip(batch.row_counts, batch.tables, strict=True):
        positions = batch.positions[row : row + count].tolist()
        row += count
        if positions:
            needed.append(table[coded.coded_tokens(min(positions)) // size : max(positions) // size + 1])
    copies = coded.copies[torch.cat(needed)]
    bad = (copies < 0) | (copies >= len(kv.keys))
    if bool(bad.any()):
        block = int(torch.cat(needed)[bad][0])
        check(False, operation, f"block {block} without its full copy", "one for each block that rows write or read so")


def check_arrays(operation: str, batch: Ragged, rows: int) -> None:
    """A batch of `rows` rows whose arrays are of the right kind and length, whatever they hold.

    Raises:
        ShapeError: it is not.
    """
    counts, listed = batch.row_counts, isinstance(batch, Listed)
    tables = len(batch.numbers[3] if listed else batch.tables)
    if not (sum(counts) == rows and min(counts, default=0) >= 0 and len(counts) == tables == len(batch.lengths)):
        given = f"{rows} rows, counts {counts}, {tables} tables, {len(batch.lengths)} lengths"
        check(False, operation, given, "counts that sum to the rows, and a table and a length for each")
    if listed:
        for name, numbers in zip(("ids", "positions", "slots"), batch.numbers, strict=False):
            if len(numbers) != rows:
                check(False, operation, f"{len(numbers)} {name} for {rows} rows", "one for each row")
        return
    for name, places in (("positions", batch.positions), ("slots", batch.slots)):
        _check_numbers(operation, name, places)
        check(len(places) == rows, operation, f"{len(places)} {name} for {rows} rows", "one for each row")
    for table in batch.tables:
        _check_numbers(operation, "a table", table)


def check_rotary(operation: str, batch: Ragged, rotary: Rotary, head_dim: int) -> None:
    """Angles for every position of a batch that `check_batch` has passed.

    Raises:
        ShapeError: there are none for some, or not for this head dimension.
    """
    check_angles(operation, rotary, head_dim)
    last = int(batch.positions.max()) if len(batch.positions) else -1
    check(last < len(rotary.cos), operation, f"position {last}", f"positions below {len(rotary.cos)}")


def check_angles(operation: str, rotary: Rotary, head_dim: int) -> None:
    """Cosines and sines for this head dimension, or for the first channels of it.

    Raises:
        ShapeError: they are not.
    """
    check(head_dim % 2 == 0, operation, f"a head dimension of {head_dim}", "an even one")
    check(
        rotary.cos.ndim == 2
        and rotary.cos.shape == rotary.sin.shape
        and 0 < rotary.cos.shape[1] <= head_dim // 2
        and rotary.cos.dtype == rotary.sin.dtype == torch.float32
        and rotary.cos.is_contiguous()
        and rotary.sin.is_contiguous(),
        operation,
        f"cosines {rotary.cos.dtype} {list(rotary.cos.shape)}, sines {rotary.sin.dtype} {list(rotary.sin.shape)}",
        f"contiguous float32 [positions, at most {head_dim // 2}] both",
    )


def _check_numbers(operation: str, name: str, numbers: Tensor) -> None:
    check(
        numbers.ndim == 1 and numbers.dtype == torch.int64 and numbers.is_contiguous(),
        operation,
        f"{name} {numbers.dtype} {list(numbers.shape)}{'' if numbers.is_contiguous() else ', not contiguous'}",
        "contiguous int64 numbers",
    )


def _check_range(operation: str, name: str, numbers: Tensor, limit: int) -> None:
    if len(numbers):
        low, high = (int(bound) for bound in torch.aminmax(numbers))
        check(low >= 0 and high < limit, operation, f"{name} from {low} to {high}", f"{name} below {limit}")
