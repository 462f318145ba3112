"""The older layouts of 4-bit models, GPTQ's and AWQ's: config.json and tensors, read into `Packed`.

Both keep a weight as [K, N], in int32 words, with scales [G, N]:

    GPTQ  qweight [K * bits / 32, N], a dense stream along K; qzeros [G, N * bits / 32], a dense stream along N, holding
          zero - 1 (format 'gptq') or the zero itself ('gptq_v2'); g_idx [K], the group of each input
    AWQ   qweight [K, N / 8], qzeros [G, N / 8]: nibble i of a word is output 0, 2, 4, 6, 1, 3, 5, 7 of its eight

(AutoGPTQ's `qlinear` modules and GPTQModel's `convert_gptq_v1_to_v2_format`; AutoAWQ's `WQLinear_GEMM`.)

Shape suffixes: N outputs, K inputs, G groups along K.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelFileError
from ..ops.encoding import pack_bits, unpack_bits
from ..ops.packed import Packed
from .compressed import integer_matrix
from .scheme import Layout, Scheme, field, refused

OLDER_PARTS = ("qweight", "qzeros", "scales", "g_idx")
"""Names of a layer's tensors after its name and a dot."""

_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


def older_layout(method: str, raw: Mapping[str, Any], where: str) -> Layout:
    """Read a `quantization_config` of GPTQ or AWQ: all linear layers but those that are named are quantised alike.

    Args:
        method: 'gptq' or 'awq'.
        raw: the object.
        where: the file, for errors.

    Raises:
        ModelFileError: it is damaged, or describes what is not read.
    """
    bits = field(raw, "bits", int, field(raw, "w_bit", int, 4, where), where)
    size = field(raw, "group_size", int, field(raw, "q_group_size", int, 128, where), where)
    if method == "awq":
        version = field(raw, "version", str, "gemm", where).lower()
        if version != "gemm" or bits != 4:
            raise refused(where, f"AWQ of {bits} bits in the version {version!r}", "Expected 4 bits, version 'gemm'.")
        kept = tuple(f"re:.*{name}" for name in field(raw, "modules_to_not_convert", list, [], where))
    else:
        if bits not in (2, 3, 4, 8):
            raise refused(where, f"GPTQ of {bits} bits", "Expected 2, 3, 4 or 8.")
        if raw.get("dynamic"):
            raise refused(where, "GPTQ with settings for single layers ('dynamic')")
        if field(raw, "checkpoint_format", str, "gptq", where) not in ("gptq", "gptq_v2"):
            raise refused(where, f"GPTQ in the format {raw['checkpoint_format']!r}", "Expected 'gptq' or 'gptq_v2'.")
        kept = () if raw.get("lm_head") else ("lm_head",)
    if size < 1 and size != -1:
        raise refused(where, f"groups of {size} inputs", "Expected a positive group_size, or -1 for one group.")
    # Zero points are stored in either kind: a symmetric file has the middle of the range in all of them.
    storage: Any = "awq" if method == "awq" else field(raw, "checkpoint_format", str, "gptq", where)
    scheme = Scheme(storage, "int", bits, None if size == -1 else size, False)
    return Layout(method, ((("Linear",), scheme),), (*kept, *(("lm_head",) if method == "awq" else ())))


def older_shape(scheme: Scheme, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape [N, K] that qweight has room for; None if it is missing."""
    found = parts.get("qweight")
    if found is None or len(found) != 2:
        return found
    return (found[1] * 8, found[0]) if scheme.storage == "awq" else (found[1], found[0] * 32 // scheme.bits)


def decode_older(name: str, parts: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], where: str) -> Packed:
    """The weight that a layer's tensors stand for; it reads 16-bit inputs.

    Where all zero points are the middle of the range, it is one without zero points.

    Args:
        name: of the layer, for errors.
        parts: its tensors by the name after the layer's: 'qweight', 'qzeros', 'scales', 'g_idx'.
        scheme: how they are stored.
        shape: (N, K).
        where: the folder, for errors.

    Raises:
        ModelFileError: a tensor is missing or of another shape, or groups are in an order of their own.
    """
    (N, K), bits, size = shape, scheme.bits, scheme.group_size or shape[1]
    if K % size:
        raise ModelFileError(f"{where}: {name} has {K} inputs, which do not divide into groups of {size}.")
    G = K // size
    awq = scheme.storage == "awq"
    words = {"qweight": (K, N // 8) if awq else (K * bits // 32, N), "qzeros": (G, N * bits // 32), "scales": (G, N)}
    for part, expected in words.items():
        _expect(name, parts, part, expected, where)
    if not awq and "g_idx" in parts:
        _check_order(name, parts["g_idx"], size, where)
    code_NK = (_awq(parts["qweight"]) if awq else _gptq(parts["qweight"].T, bits).T).T
    zero_GN = _awq(parts["qzeros"]) if awq else _gptq(parts["qzeros"], bits)
    if scheme.storage == "gptq":
        zero_GN = zero_GN + 1 & 2**bits - 1
    zeros_NG = zero_GN.T.contiguous()
    symmetric = bool((zeros_NG == 2 ** (bits - 1)).all())
    code_NK = code_NK.contiguous()
    stream = code_NK if bits == 8 else pack_bits(code_NK, bits)
    scale_NG = parts["scales"].T.to(torch.float16).to(torch.float32).contiguous()
    read = Scheme("pack-quantized", "int", bits, scheme.group_size, symmetric)
    return integer_matrix(read, shape, stream, scale_NG, None if symmetric else zeros_NG)


def _gptq(words: Tensor, bits: int) -> Tensor:
    """[rows, words] int32 -> the codes of each row's stream, [rows, words * 32 / bits] uint8."""
    return unpack_bits(words.contiguous().view(torch.uint8), bits)


def _awq(words: Tensor) -> Tensor:
    """[rows, words] int32 -> codes [rows, 8 * words] uint8, in the order of the outputs."""
    nibbles = unpack_bits(words.contiguous().view(torch.uint8), 4).view(len(words), -1, 8)
    ordered = torch.empty_like(nibbles)
    ordered[..., list(_AWQ_OUTPUTS)] = nibbles
    return ordered.view(len(words), -1)


def _expect(name: str, parts: Mapping[str, Tensor], part: str, shape: tuple[int, ...], where: str) -> None:
    if part not in parts:
        raise ModelFileError(
            f"{where}: tensor '{name}.{part}' is missing. Its quantization_config says that {name} is quantised: fetch "
            "all files of the model again."
        )
    found = parts[part]
    kind = found.dtype.is_floating_point if part == "scales" else found.dtype == torch.int32
    if not kind or tuple(found.shape) != shape:
        expected = "floats" if part == "scales" else "int32"
        raise ModelFileError(
            f"{where}: tensor '{name}.{part}' is {found.dtype} of shape {list(found.shape)}. Its quantization_config "
            f"calls for {expected} of shape {list(shape)}: the two are of different models; fetch both again."
        )


def _check_order(name: str, g_idx_K: Tensor, size: int, where: str) -> None:
    if not torch.equal(g_idx_K.long(), torch.arange(len(g_idx_K)) // size):
        raise ModelFileError(
            f"{where}: '{name}.g_idx' puts inputs into groups in the order of their activations (desc_act), which "
            "bitdraft does not read. Choose a version with desc_act false, or one made with static groups; or quantise "
            "the original: --format w4a16-awq."
        )
