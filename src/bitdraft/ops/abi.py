"""The C interface of the compiled kernels as ctypes sees it: csrc/bitdraft.h, structure by structure.

Kept apart from `native.py`, which says what is done with it. `VERSION` is compared when the library is loaded.
"""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p

VERSION = 4

CODECS = {
    name: i
    for i, name in enumerate(("f32", "bf16", "e4m3", "e5m2", "int2", "int3", "int4", "int5", "int6", "int8", "fp4"))
}
GRIDS = {name: i for i, name in enumerate(("none", "sym", "asym", "min", "k", "k16", "sym16"))}
ACTIVATIONS = {name: i for i, name in enumerate(("f32", "bf16", "int8", "fp8_e4m3", "fp8_e5m2", "int8_g32"))}
GATES = {name: i for i, name in enumerate(("silu", "gelu_tanh"))}
KV_DTYPES = {"float32": 0, "bfloat16": 1, "int8": 2, "float8_e4m3fn": 3}


class Weight(Structure):
    """bd_weight."""


Weight._fields_ = (
    ("codec", c_int32),
    ("grid", c_int32),
    ("activation", c_int32),
    ("group", c_int32),
    ("rotation", c_int32),
    ("outliers", c_int32),
    ("outputs", c_int64),
    ("inputs", c_int64),
    ("panels", c_void_p),
    ("channel", c_void_p),
    ("columns", c_void_p),
    ("side", POINTER(Weight)),
    ("next", POINTER(Weight)),
)


class Batch(Structure):
    """bd_batch."""

    _fields_ = (
        ("rows", c_int64),
        ("sequences", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("row_starts", c_void_p),
        ("blocks", c_void_p),
        ("table_starts", c_void_p),
        ("lengths", c_void_p),
    )


class Coded(Structure):
    """bd_coded."""

    _fields_ = (
        ("bits", c_int32),
        ("outliers", c_int32),
        ("window", c_int64),
        ("blocks", c_int64),
        ("copies", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_grid", c_void_p),
        ("value_grid", c_void_p),
        ("key_outliers", c_void_p),
        ("value_outliers", c_void_p),
    )


class KV(Structure):
    """bd_kv."""

    _fields_ = (
        ("dtype", c_int32),
        ("blocks", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("coded", POINTER(Coded)),
    )


class Attention(Structure):
    """bd_attention."""

    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("window", c_int64),
        ("rotary_positions", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("eps", c_float),
        ("scale", c_float),
        ("rotated", c_int64),
    )


class Layer(Structure):
    """bd_layer."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("o_norm", c_void_p),
        ("down_norm", c_void_p),
        ("gate", c_int32),
        ("attention", c_int32),
        ("qkv", Weight),
        ("o", Weight),
        ("gate_up", Weight),
        ("down", Weight),
    )


_P = c_void_p
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "bd_abi": (c_int, ()),
    "bd_error": (c_char_p, ()),
    "bd_isas": (c_char_p, ()),
    "bd_pool_new": (_P, (c_char_p, c_int)),
    "bd_pool_free": (None, (_P,)),
    "bd_pool_threads": (c_int, (_P,)),
    "bd_pool_isa": (c_char_p, (_P,)),
    "bd_weight_bytes": (c_int64, (c_int, c_int, c_int, c_int64, c_int64)),
    "bd_pack": (c_int, (_P, POINTER(Weight), _P, _P, _P, _P)),
    "bd_gguf_form": (c_int, (c_int, POINTER(Weight))),
    "bd_pack_gguf": (c_int, (_P, POINTER(Weight), _P, c_int, _P)),
    "bd_unpack_rows": (c_int, (_P, POINTER(Weight), _P, c_int64, _P)),
    "bd_norm_linear": (c_int, (_P, _P, c_int64, _P, c_float, POINTER(Weight), _P, _P)),
    "bd_linear_add": (c_int, (_P, _P, c_int64, POINTER(Weight), _P, _P)),
    "bd_linear_norm_add": (c_int, (_P, _P, c_int64, POINTER(Weight), _P, c_float, _P, _P)),
    "bd_gated_inputs": (c_int, (_P, _P, c_int64, _P, c_float, POINTER(Weight), c_int, _P)),
    "bd_gated_mlp": (c_int, (_P, _P, c_int64, _P, c_float, POINTER(Weight), c_int, POINTER(Weight), _P)),
    "bd_rope_append": (c_int, (_P, _P, POINTER(Batch), POINTER(Attention), POINTER(KV), _P, _P, _P)),
    "bd_attend": (c_int, (_P, _P, POINTER(Batch), POINTER(Attention), POINTER(KV), _P)),
    "bd_decode": (
        c_int,
        (_P, _P, c_int64, POINTER(Layer), c_int64, POINTER(KV), POINTER(Batch), POINTER(Attention), c_int64),
    ),
    "bd_top": (c_int, (_P, _P, c_int64, c_int64, c_int64, _P, _P)),
    "bd_softmax": (c_int, (_P, _P, c_int64, c_int64, c_float, _P)),
    "bd_softcap": (c_int, (_P, _P, c_int64, c_int64, c_float)),
    "bd_measure_read": (c_double, (_P, _P, c_int64)),
    "bd_measure_ops": (c_double, (_P,)),
}


def declare(library: ctypes.CDLL) -> None:
    """Give every function of the library its result and argument types.

    Raises:
        AttributeError: the library lacks one: it is not of this version.
    """
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
