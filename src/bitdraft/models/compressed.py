"""The tensors of a quantised layer in compressed-tensors 0.20: from `Packed` and back.

    pack-quantized        weight_packed [N, words] int32, a dense little-endian stream of codes + 2^(bits - 1) per row
                          weight_scale [N, G]; weight_zero_point [words of N, G] int32, packed along N; weight_shape [2]
    int-, float-quantized weight [N, K] int8 or float8_e4m3fn; weight_scale [N, G]; weight_zero_point [N, G] int8
    nvfp4-pack-quantized  weight_packed [N, K / 2] uint8, E2M1, the first code low; weight_scale [N, K / 16] E4M3;
                          weight_global_scale [1] float32, which divides
    mxfp4-pack-quantized  weight_packed likewise; weight_scale [N, K / 32] uint8, E8M0

and, which is ours alone, for inputs that are kept in 16 bits:

    any of these          weight_outliers [N, k] bfloat16; weight_outlier_columns [k] int32

(its `compressors/*/base.py` and `compressors/pack_quantized/helpers.py`). Codes are signed there and count from 0 here,
so a zero point is 2^(bits - 1) less there; in the packed stream both are the same bits.

Shape suffixes: N outputs, K inputs, G groups along K.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError, ModelFileError
from ..ops.encoding import pack_bits, unpack_bits
from ..ops.packed import Outliers, Packed, float_matrix
from .scheme import Scheme

PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_global_scale",
    "weight_g_idx",
    "weight_outliers",
    "weight_outlier_columns",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
)
"""Names of tensors that a quantised layer may have beside `weight`, after the layer's name and a dot."""

_KNOWN = {
    "format", "shape", "bits", "activation", "codes", "scales", "zeros", "blocks", "element", "channel", "outliers"
}  # fmt: skip


def scheme_for(name: str, packed: Packed) -> Scheme | None:
    """How compressed-tensors describes a weight; None for plain floats.

    Where it has no words for all of it, the nearest description under which the weights are the same: what is left out
    is how inputs are rounded. A weight that keeps inputs apart is described without those: see `quantization_config`.

    Args:
        name: of the layer, for errors.
        packed: the weight.

    Raises:
        FormatError: the weights themselves have no counterpart there.
    """
    if packed.blocks is not None:
        raise _no_counterpart(name, packed, f"{packed.blocks.name} blocks", "w4a16, w4a16-asym or w8a16")
    for extra in fields(packed):
        if extra.name not in _KNOWN and getattr(packed, extra.name) is not None:
            raise _no_counterpart(name, packed, f"a weight with {extra.name}", "the format without that option")
    dtype, activation = packed.codes.dtype, packed.activation
    if packed.element == "e2m1":
        # Others round the inputs of these to 4-bit floats, or not at all: 8-bit integers are ours alone.
        if packed.channel is None:
            return Scheme("mxfp4-pack-quantized", "float", 4, 32)
        return Scheme("nvfp4-pack-quantized", "float", 4, 16)
    if packed.scales is not None and packed.scales.dtype == torch.float8_e8m0fnu:
        raise _no_counterpart(name, packed, "8-bit floats with a scale for each 32 inputs", "fp8_e4m3 or mxfp4")
    if packed.scales is None and dtype in (torch.float32, torch.float16, torch.bfloat16):
        return None
    if dtype == torch.float8_e5m2:
        raise _no_counterpart(name, packed, "8-bit floats of kind E5M2", "fp8_e4m3")
    if dtype == torch.float8_e4m3fn:
        return Scheme("float-quantized", "float", 8, None, True, "fp8_e4m3" if activation == "fp8_e4m3" else "bf16")
    if packed.scales is None or dtype.is_floating_point:
        raise _no_counterpart(name, packed, f"codes of {dtype} in this layout", "w4a16, w8a8 or fp8_e4m3")
    groups = packed.scales.shape[1]
    size = packed.shape[1] // groups if groups > 1 else None
    if activation == "int8" and packed.bits == 8 and size is None:
        return Scheme("int-quantized", "int", 8, None, True, "int8")
    # 8-bit inputs beside zero points are legal there, and no engine multiplies them.
    inputs = "int8" if activation == "int8" and packed.zeros is None else "bf16"
    return Scheme("pack-quantized", "int", packed.bits, size, packed.zeros is None, inputs)  # type: ignore[arg-type]


def _no_counterpart(name: str, packed: Packed, what: str, remedy: str) -> FormatError:
    return FormatError(
        f"{name}: {what} ({packed.format}) have no counterpart in compressed-tensors, so no folder can be written that "
        f"others read. Use {remedy}."
    )


def encode(name: str, packed: Packed) -> dict[str, Tensor]:
    """The tensors that stand for a weight in a folder, by their full names.

    Args:
        name: of the layer, without '.weight'.
        packed: the weight. Scales of groups are written as float16 and those of outputs as float32: both hold ours.

    Raises:
        FormatError: it has no counterpart in compressed-tensors.
    """
    if packed.outliers is not None:
        own = {"weight_outliers": packed.outliers.side, "weight_outlier_columns": packed.outliers.columns}
        return encode(name, replace(packed, outliers=None)) | {f"{name}.{k}": t.contiguous() for k, t in own.items()}
    scheme = scheme_for(name, packed)
    if scheme is None:
        return {f"{name}.weight": packed.codes.contiguous()}
    assert packed.scales is not None
    if packed.element == "e2m1":
        return _encode_fp4(name, packed)
    per_output = packed.bits == 8 and packed.scales.shape[1] == 1
    tensors = {f"{name}.weight_scale": packed.scales.to(torch.float32 if per_output else torch.float16).contiguous()}
    if scheme.storage != "pack-quantized":
        return tensors | {f"{name}.weight": packed.codes.contiguous()}
    tensors[f"{name}.weight_packed"] = _words(_stream(packed))
    tensors[f"{name}.weight_shape"] = torch.tensor(packed.shape, dtype=torch.int64)
    if packed.zeros is not None:
        zeros_GN = torch.nn.functional.pad(packed.zeros.T, (0, -packed.shape[0] % 32))
        tensors[f"{name}.weight_zero_point"] = _trimmed(pack_bits(zeros_GN, packed.bits), packed.shape[0], packed.bits)
    return tensors


def _encode_fp4(name: str, packed: Packed) -> dict[str, Tensor]:
    assert packed.scales is not None
    tensors = {f"{name}.weight_packed": packed.codes.contiguous()}
    if packed.channel is None:
        return tensors | {f"{name}.weight_scale": packed.scales.contiguous().view(torch.uint8)}
    whole = packed.channel[:1, 0]
    if bool((packed.channel != whole).any()):
        raise _no_counterpart(name, packed, "a scale for each output beside those of blocks", "it layer by layer")
    tensors[f"{name}.weight_scale"] = packed.scales.contiguous()
    return tensors | {f"{name}.weight_global_scale": 1 / whole}  # there it divides


def _stream(packed: Packed) -> Tensor:
    """The codes of each row as a stream of bits, [N, bytes] uint8."""
    if packed.bits < 8:
        return packed.codes
    return packed.codes.view(torch.uint8) ^ 128  # code + 128


def _words(stream: Tensor) -> Tensor:
    """[N, bytes] uint8 -> [N, words] int32, little-endian, the last word filled with zeros."""
    return torch.nn.functional.pad(stream, (0, -stream.shape[1] % 4)).contiguous().view(torch.int32)


def _trimmed(stream_G: Tensor, count: int, bits: int) -> Tensor:
    """[G, bytes] uint8 -> [words that `count` codes need, G] int32."""
    return _words(stream_G)[:, : -(-count * bits // 32)].T.contiguous()


def logical_shape(scheme: Scheme, parts: Mapping[str, tuple[int, ...]], inputs: int) -> tuple[int, ...] | None:
    """The shape [N, K] that the parts of a layer have room for; None if the part that holds the codes is missing.

    Args:
        scheme: how it is stored.
        parts: shapes of its tensors, by the name after the layer's.
        inputs: K as the model's settings have it: of packed codes only their words are known, not how many are used.
    """
    found = parts.get(_codes_part(scheme))
    if found is None or _codes_part(scheme) == "weight" or len(found) != 2:
        return found
    if scheme.storage == "pack-quantized":
        return (found[0], inputs if found[1] == -(-inputs * scheme.bits // 32) else found[1] * 32 // scheme.bits)
    return (found[0], 2 * found[1])


def _codes_part(scheme: Scheme) -> str:
    return "weight_packed" if scheme.storage.endswith("pack-quantized") else "weight"


def decode(name: str, parts: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], where: str) -> Packed:
    """The weight that a layer's tensors stand for.

    Args:
        name: of the layer, for errors.
        parts: its tensors by the name after the layer's: 'weight_packed', 'weight_scale'.
        scheme: how they are stored.
        shape: (N, K).
        where: the folder, for errors.

    Returns:
        codes as they are stored, scales float32. Scales of groups are those that float16 holds: a bfloat16 scale below
        2^-14 may be rounded. Codes that our layouts do not hold (7 bits, 8 bits with zero points) become the
        float32 values that they stand for.

    Raises:
        ModelFileError: a tensor is missing, or of another shape or kind than the others call for.
    """
    found = _decode_codes(name, parts, scheme, shape, where)
    if "weight_outliers" not in parts:
        return found
    side, columns = parts["weight_outliers"], _part(name, parts, "weight_outlier_columns", where)
    _expect(f"{name}.weight_outlier_columns", columns, torch.int32, (columns.numel(),), where)
    _expect(f"{name}.weight_outliers", side, torch.bfloat16, (shape[0], columns.numel()), where)
    if bool((columns[1:] <= columns[:-1]).any()) or not 0 <= int(columns[0]) <= int(columns[-1]) < shape[1]:
        raise ModelFileError(
            f"{where}: '{name}.weight_outlier_columns' are no ascending numbers of {shape[1]} inputs. The file is "
            "damaged: fetch the model again."
        )
    return replace(found, outliers=Outliers(columns, side))


def _decode_codes(name: str, parts: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], where: str) -> Packed:
    codes, scale = (_part(name, parts, part, where) for part in (_codes_part(scheme), "weight_scale"))
    if "weight_g_idx" in parts:
        raise ModelFileError(
            f"{where}: {name}.weight_g_idx puts inputs into groups in an order of its own, which bitdraft does not "
            "read. Choose a version of the model without activation order, or with actorder 'weight'."
        )
    if scheme.storage in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return _decode_fp4(name, parts, scheme, shape, where)
    scale_NG = _scales(name, scale, scheme, shape, where)
    if scheme.kind == "float":
        _expect(f"{name}.weight", codes, torch.float8_e4m3fn, shape, where)
        return Packed(scheme.format_name, shape, 8, scheme.activation, codes, scale_NG)
    if scheme.storage == "pack-quantized":
        _expect(f"{name}.weight_packed", codes, torch.int32, (shape[0], -(-shape[1] * scheme.bits // 32)), where)
        if "weight_shape" in parts and parts["weight_shape"].tolist() != list(shape):
            raise ModelFileError(
                f"{where}: '{name}.weight_shape' is {parts['weight_shape'].tolist()}. The model's own settings call "
                f"for {list(shape)}: the two are of different models; fetch both again."
            )
        stream = codes.contiguous().view(torch.uint8)[:, : -(-shape[1] * scheme.bits // 8)]
    else:
        _expect(f"{name}.weight", codes, torch.int8, shape, where)
        half = 2 ** (scheme.bits - 1)
        stream = (
            pack_bits(codes.to(torch.int16) + half, scheme.bits) if scheme.bits < 8 else codes.view(torch.uint8) ^ 128
        )
    zeros_NG = None if scheme.symmetric else _zeros(name, parts, scheme, scale_NG.shape, where)
    return integer_matrix(scheme, shape, stream, scale_NG, zeros_NG)


def own_facts(packed: Packed) -> dict[str, Any]:
    """What the tensors of a layer do not say of the weight that they were made of, fit for JSON.

    The factor of a whole tensor is among it: the inverse of its inverse may be another number.
    """
    facts: dict[str, Any] = {"format": packed.format, "activation": packed.activation}
    facts |= {"outliers": len(packed.columns)} if packed.outliers else {}
    return facts if packed.channel is None else facts | {"channel": float(packed.channel[0, 0])}


def with_own_facts(read: Packed, facts: Mapping[str, Any]) -> Packed:
    """The very weight that was written, from what its tensors and its `own_facts` say."""
    channel = read.channel
    if "channel" in facts:
        channel = torch.full((read.shape[0], 1), facts["channel"], dtype=torch.float32)
    return replace(read, format=facts["format"], activation=facts["activation"], channel=channel)


def integer_matrix(
    scheme: Scheme, shape: tuple[int, int], stream: Tensor, scale_NG: Tensor, zeros_NG: Tensor | None
) -> Packed:
    """A weight of integers.

    Args:
        scheme: its name, width and activation.
        shape: (N, K).
        stream: codes from 0 as a stream of bits per row, [N, K * bits / 8] uint8.
        scale_NG: float32.
        zeros_NG: uint8, or None.
    """
    if scheme.bits == 8 and zeros_NG is None:
        codes = (stream ^ 128).view(torch.int8)
        return Packed(scheme.format_name, shape, 8, scheme.activation, codes, scale_NG)
    if scheme.bits < 7:
        return Packed(scheme.format_name, shape, scheme.bits, scheme.activation, stream, scale_NG, zeros_NG)
    code_NGS = unpack_bits(stream, scheme.bits).to(torch.float32).view(shape[0], scale_NG.shape[1], -1)
    zero = 2.0 ** (scheme.bits - 1) if zeros_NG is None else zeros_NG.to(torch.float32)[..., None]
    return float_matrix(code_NGS.sub_(zero).mul_(scale_NG[..., None]).view(shape))


def _part(name: str, parts: Mapping[str, Tensor], part: str, where: str) -> Tensor:
    if part not in parts:
        raise ModelFileError(
            f"{where}: tensor '{name}.{part}' is missing. Its quantization_config says that {name} is quantised: fetch "
            "all files of the model again."
        )
    return parts[part]


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], where: str) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ModelFileError(
            f"{where}: tensor {name!r} is {tensor.dtype} of shape {list(tensor.shape)}. Its quantization_config calls "
            f"for {dtype} of shape {list(shape)}: the two are of different models; fetch both again."
        )


def _scales(name: str, scale: Tensor, scheme: Scheme, shape: tuple[int, int], where: str) -> Tensor:
    """Scales as [N, G] float32: those of groups in float16's range, one for the whole tensor repeated."""
    N, K = shape
    size = scheme.group_size
    if size and K % size:
        raise ModelFileError(f"{where}: {name} has {K} inputs, which do not divide into groups of {size}.")
    expected = 1 if not size else N * (K // size)
    if size is None:
        expected = N
    if scale.numel() != expected or not scale.dtype.is_floating_point:
        raise ModelFileError(
            f"{where}: tensor '{name}.weight_scale' is {scale.dtype} of shape {list(scale.shape)}. Expected {expected} "
            f"floats for a weight of shape {[N, K]} in groups of {size}: fetch the model again."
        )
    values = scale.to(torch.float32).reshape(-1, 1) if not size else scale.to(torch.float32).reshape(N, -1)
    if values.shape[1] > 1 or scheme.bits < 8:
        values = values.half().float()
    repeated: Tensor = values.expand(N, -1).contiguous()
    return repeated


def _zeros(name: str, parts: Mapping[str, Tensor], scheme: Scheme, groups: torch.Size, where: str) -> Tensor:
    """Zero points as codes from 0, [N, G] uint8."""
    stored, full = _part(name, parts, "weight_zero_point", where), f"{name}.weight_zero_point"
    N, G = groups
    if scheme.storage != "pack-quantized":
        _expect(full, stored, torch.int8, (N, G), where)
        shifted: Tensor = stored.to(torch.int16) + 2 ** (scheme.bits - 1)
        return shifted.to(torch.uint8)
    _expect(full, stored, torch.int32, (-(-N * scheme.bits // 32), G), where)
    stream = stored.T.contiguous().view(torch.uint8)
    whole = torch.nn.functional.pad(stream, (0, -stream.shape[1] % (4 * scheme.bits)))  # runs of 32 codes
    zeros_NG: Tensor = unpack_bits(whole, scheme.bits)[:, :N].T.contiguous()
    return zeros_NG


def _decode_fp4(name: str, parts: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], where: str) -> Packed:
    N, K = shape
    assert scheme.group_size
    codes, scale = parts["weight_packed"], parts["weight_scale"]
    _expect(f"{name}.weight_packed", codes, torch.uint8, (N, K // 2), where)
    nv = scheme.storage == "nvfp4-pack-quantized"
    _expect(
        f"{name}.weight_scale", scale, torch.float8_e4m3fn if nv else torch.uint8, (N, K // scheme.group_size), where
    )
    if not nv:
        exponents = scale.contiguous().view(torch.float8_e8m0fnu)
        return Packed(scheme.format_name, shape, 4, scheme.activation, codes, exponents, element="e2m1")
    divisor = _part(name, parts, "weight_global_scale", where)
    _expect(f"{name}.weight_global_scale", divisor, torch.float32, (1,), where)
    factor = (1 / divisor).expand(N, 1).contiguous()
    return Packed(scheme.format_name, shape, 4, scheme.activation, codes, scale, element="e2m1", channel=factor)
