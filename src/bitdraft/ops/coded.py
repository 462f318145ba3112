"""Blocks of the cache in codes whose scales tokens share: how they are made and what they stand for, in plain PyTorch.

Keys are coded channel by channel and values token by token, because a key has channels that are large for every token
and a value has none (KIVI, Liu et al., 2402.02750). The grid is asymmetric: a rotated key hardly changes within a block
in its slow channels, so that a grid from its least to its largest value is much finer than one around zero. The few
numbers that are farthest from the middle of their group are kept by themselves (KVQuant, Hooper et al., 2401.18079).

Shape suffixes: N blocks (of all layers), J KV heads, C head dimension, T tokens of a block, G groups, M numbers of one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .batch import CodedBlocks, KVCache, KVLayer


def encode_blocks(cache: KVCache, blocks: Sequence[int]) -> None:
    """Write the codes of blocks that are full, in every layer, from their full copies.

    Args:
        cache: all layers, with codes; changed in place.
        blocks: block numbers, each with a full copy.
    """
    at = torch.tensor(blocks, dtype=torch.int64)
    layers = [(layer, layer.coded) for layer in cache if layer.coded is not None]
    if not blocks or not layers:
        return
    first = layers[0][1]
    copies, outliers = first.copies[at], first.key_outliers.shape[2]
    assert int(copies.min()) >= 0, f"blocks {list(blocks)} at {copies.tolist()}: one has no full copy to encode"
    keys_NJCT = torch.cat([layer.keys[copies] for layer, _ in layers]).float()
    values_NJTC = torch.cat([layer.values[copies] for layer, _ in layers]).float()
    keys, values = _encode(keys_NJCT, first.bits, outliers), _encode(values_NJTC, first.bits, outliers)
    keys = (_pack(keys[0], 2, first.bits), *keys[1:])
    values = (_pack(values[0], 3, first.bits), *values[1:])
    for i, (_, coded) in enumerate(layers):
        mine = slice(i * len(blocks), (i + 1) * len(blocks))
        for tensor, made in zip((coded.keys, coded.key_grid, coded.key_outliers), keys, strict=True):
            tensor[at] = made[mine]
        for tensor, made in zip((coded.values, coded.value_grid, coded.value_outliers), values, strict=True):
            tensor[at] = made[mine]


def read_blocks(kv: KVLayer, coded: CodedBlocks, table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The blocks of a table as a row reads them: the first `tokens` tokens in codes, the others from full copies.

    Returns:
        keys [blocks, J, C, T] and values [blocks, J, T, C], float32.
    """
    old, new = table[: tokens // kv.block_size], coded.copies[table[tokens // kv.block_size :]]
    old_keys = _decode(_unpack(coded.keys[old], 2, coded.bits), coded.key_grid[old], coded.key_outliers[old])
    old_values = _decode(_unpack(coded.values[old], 3, coded.bits), coded.value_grid[old], coded.value_outliers[old])
    return torch.cat((old_keys, kv.keys[new].float())), torch.cat((old_values, kv.values[new].float()))


def _encode(x_NJGM: Tensor, bits: int, outliers: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, J, G, M] uint8, grid [N, J, 2, G] bfloat16 and outliers [N, J, outliers, 2] int16 of groups."""
    levels = 2**bits - 1
    place_NJO = _farthest(x_NJGM, outliers)
    x_NJF = x_NJGM.flatten(2)
    apart_NJGM = torch.zeros_like(x_NJF, dtype=torch.bool).scatter_(2, place_NJO, True).view_as(x_NJGM)
    least = torch.where(apart_NJGM, torch.inf, x_NJGM).amin(-1)
    most = torch.where(apart_NJGM, -torch.inf, x_NJGM).amax(-1)
    least = _bf16(torch.where(least == torch.inf, 0.0, least), up=False)  # a group of nothing but outliers
    step = _bf16((most - least).clamp(min=0) / levels, up=True)
    step = torch.where(step == 0, 1.0, step)
    codes = ((x_NJGM - least[..., None]) / step[..., None]).round().clamp(0, levels).to(torch.uint8)
    apart = x_NJF.gather(2, place_NJO).bfloat16().view(torch.int16)
    return codes, torch.stack((step, least), 2).bfloat16(), torch.stack((place_NJO.to(torch.int16), apart), -1)


def _farthest(x_NJGM: Tensor, count: int) -> Tensor:
    """Places of the numbers that are farthest from their group's median, [N, J, count]; the first of equals.

    Not from its mean: an outlier would move that, and with it seem to set all others of its group apart.
    """
    far_NJF = (x_NJGM - x_NJGM.median(-1, keepdim=True).values).abs().flatten(2)
    order_NJF: Tensor = torch.sort(far_NJF, dim=-1, descending=True, stable=True).indices
    return order_NJF[..., :count]


def _decode(codes_NJGM: Tensor, grid_NJ2G: Tensor, outliers_NJO2: Tensor) -> Tensor:
    step, least = grid_NJ2G.float().unsqueeze(-1).unbind(2)
    x_NJGM = codes_NJGM.float() * step + least
    apart_NJO = outliers_NJO2[..., 1].contiguous().view(torch.bfloat16).float()
    return x_NJGM.flatten(2).scatter(2, outliers_NJO2[..., 0].long(), apart_NJO).view_as(x_NJGM)


def _pack(codes: Tensor, channels: int, bits: int) -> Tensor:
    """Two 4-bit codes a byte, of channels that are half the head dimension apart."""
    if bits == 8:
        return codes
    low, high = codes.chunk(2, channels)
    return low | high << 4


def _unpack(codes: Tensor, channels: int, bits: int) -> Tensor:
    return codes if bits == 8 else torch.cat((codes & 15, codes >> 4), channels)


def _bf16(x: Tensor, up: bool) -> Tensor:
    """The next bfloat16 number, upwards or downwards, as float32: a grid has to reach over all of its group."""
    bits = x.float().contiguous().view(torch.int32)
    away = (bits < 0) != up  # from zero
    return torch.where(away, bits + 0xFFFF, bits).bitwise_and(-0x10000).view(torch.float32)
