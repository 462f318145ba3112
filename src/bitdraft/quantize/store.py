"""Repacked weights kept on disk beside the model, so that the next load reads them instead of making them.

A file is named after what made it: the model's file, the recipe, the calibration set, the layout. It holds the panels
of every layer with a SHA-256 of each, and is used only if all of that still fits. Whatever is wrong with it, the
weights are made anew: a cache can cost time, never correctness.

Shape suffixes: D hidden size, C head dimension.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import __version__
from ..formats import Recipe
from ..models.config import ModelConfig
from ..models.decoder import PreparedModel, layer_switches
from ..models.hub import cache_folder
from ..ops import abi, native
from ..ops.native import Native
from ..ops.packed import Layer, Stack
from ..ops.panels import PanelKind, Panels, PanelWeight

_EDGE = 1 << 20
"""Bytes at either end of a model's file that its identity is made from, with its size and time of change."""

_HALF = ".half-"
"""What names of folders begin with in which files are written."""
_HALF_LASTS = 3600
"""Seconds after which such a folder was left by a process that is gone."""

_DTYPES = {torch.uint8: "U8", torch.int32: "I32", torch.float32: "F32"}
_WEIGHTS = ("qkv", "o", "gate_up", "down")
_VECTORS = ("input_norm", "mlp_norm", "qkv_bias", "q_norm", "k_norm", "o_norm", "down_norm")


def key_of(model: Path, recipe: Recipe, calibration: Sequence[Sequence[int]] | None, rng: np.random.Generator) -> str:
    """The name of what comes out of bringing a model's file into a recipe: equal names, equal weights.

    Args:
        model: a .gguf file or a folder of safetensors.
        recipe: the recipe.
        calibration: token ids of texts, if the recipe reads them.
        rng: what chooses the rows that calibration keeps; its state is a part of the name, and is not moved.
    """
    own = sorted((layer, form.name) for layer, form in recipe.formats.items())
    found = hashlib.sha256(f"{__version__} {abi.VERSION} {recipe.name} {own}".encode())
    files = [*sorted(model.glob("*.safetensors")), model / "config.json"] if model.is_dir() else [model]
    for file in files:
        stat = file.stat()
        found.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode())
        with file.open("rb") as stream:
            found.update(stream.read(_EDGE))
            stream.seek(max(0, stat.st_size - _EDGE))
            found.update(stream.read())
    if recipe.calibrated:
        found.update(json.dumps([list(text) for text in calibration or ()]).encode())
        found.update(json.dumps(rng.bit_generator.state, default=_plain).encode())
    return found.hexdigest()


class Store:
    """The cached weights of one model in one recipe."""

    def __init__(self, model: Path, recipe: Recipe, key: str) -> None:
        """Name the place.

        Args:
            model: the model's file or folder; the cache lies beside it, or in the cache folder where that is read-only.
            recipe: the recipe.
            key: from `key_of`.
        """
        beside = model if model.is_dir() else model.parent
        folder = beside / "repacked" if os.access(beside, os.W_OK) else cache_folder() / "repacked"
        self._stem = f"{model.stem}-{recipe.name}-"
        self.path = folder / f"{self._stem}{key[:16]}.safetensors"
        self._key = key

    def load(self) -> PreparedModel | None:
        """The weights, in large pages; None if there are none, or not these, or not whole."""
        kernels = native.default()
        if kernels is None or not self.path.exists():
            return None
        faults = SafetensorError, OSError, ValueError, KeyError, TypeError
        with suppress(*faults), safe_open(self.path, framework="pt") as opened:
            about = json.loads(opened.metadata()["bitdraft"])
            if about["key"] == self._key:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (it is no mapping)
                return _restored(about, tensors, kernels)
        return None

    def save(self, model: PreparedModel) -> bool:
        """Keep the weights, instead of older ones of the same recipe; False if the disk does not take them."""
        if native.default() is None:
            return False
        tensors = dict(_tensors(model))
        about = {
            "key": self._key,
            "config": asdict(model.config),
            "packed_bytes": model.packed_bytes,
            "tied": model.head is model.embedding,
            "weights": {name: _about(weight) for name, weight in _weights(model)},
            "sha256": dict(zip(tensors, _digests(list(tensors.values())), strict=True)),
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_HALF, dir=self.path.parent) as folder:
                _clear_away(Path(folder))
                made = Path(folder) / self.path.name
                _write(made, tensors, json.dumps(about, default=_plain))
                os.replace(made, self.path)
        except OSError:
            return False
        for old in self.path.parent.glob(f"{self._stem}{'[0-9a-f]' * 16}.safetensors"):
            if old != self.path:
                with suppress(OSError):
                    old.unlink()
        return True


def _clear_away(mine: Path) -> None:
    """Remove what processes that were killed left half written, beside `mine`; others may be writing now."""
    now = mine.stat().st_mtime
    for half in mine.parent.glob(f"{_HALF}*"):
        with suppress(OSError):
            if now - half.stat().st_mtime > _HALF_LASTS:
                shutil.rmtree(half)


def _plain(value: Any) -> Any:
    """What json does not know: numpy's arrays and numbers."""
    return value.tolist()


def _weights(model: PreparedModel) -> Iterator[tuple[str, PanelWeight]]:
    named = [(f"layers.{i}.{name}", getattr(layer, name)) for i, layer in enumerate(model.layers) for name in _WEIGHTS]
    named.append(("head", model.head))
    if model.embedding is not model.head:
        named.append(("embedding", model.embedding))
    for name, weight in named:
        assert isinstance(weight, PanelWeight)
        yield name, weight


def _tensors(model: PreparedModel) -> Iterator[tuple[str, Tensor]]:
    for name, weight in _weights(model):
        for i, part in enumerate(weight.parts):
            yield f"{name}.{i}.panels", part.panels
            if part.channel is not None:
                yield f"{name}.{i}.channel", part.channel
            if part.columns is not None and part.side is not None:
                yield f"{name}.{i}.columns", part.columns
                yield f"{name}.{i}.side", part.side.panels
    for i, layer in enumerate(model.layers):
        for name in _VECTORS:
            if (vector := getattr(layer, name)) is not None:
                yield f"layers.{i}.{name}", vector.contiguous()
    yield "final_norm", model.final_norm.contiguous()


def _write(path: Path, tensors: dict[str, Tensor], about: str) -> None:
    """A safetensors file, tensor by tensor: the library's own writer first makes a copy of them all."""
    header: dict[str, Any] = {"__metadata__": {"bitdraft": about}}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        dtype = _DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)  # so that the first tensor is 64-byte aligned in the file
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            tensor.numpy().tofile(file)


def _about(weight: PanelWeight) -> dict[str, Any]:
    return {"parts": [asdict(part.kind) for part in weight.parts], "packed_bytes": weight.packed_bytes}


def _digests(tensors: Sequence[Tensor]) -> list[str]:
    """SHA-256 of each tensor's bytes, several at a time: hashing lets other threads run."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda t: hashlib.sha256(t.view(torch.uint8).numpy()).hexdigest(), tensors))


def _restored(about: dict[str, Any], tensors: dict[str, Tensor], kernels: Native) -> PreparedModel:
    """Rebuild the model from a file's tensors, which lie in the file's own pages.

    Raises:
        ValueError: a tensor's bytes are not those that were written.
    """
    if _digests([tensors[name] for name in about["sha256"]]) != list(about["sha256"].values()):
        raise ValueError("the bytes changed")

    def part(name: str, entry: dict[str, Any]) -> Panels:
        kind = PanelKind(**(entry | {"shape": tuple(entry["shape"])}))
        channel = tensors.get(f"{name}.channel")
        placed = kernels.place(kind, None if channel is None else channel.clone())
        placed.panels.copy_(tensors[f"{name}.panels"])
        columns = tensors.get(f"{name}.columns")
        if columns is None:
            return placed
        side = kernels.place(PanelKind("bf16", "none", 0, "bf16", (kind.shape[0], len(columns))), None)
        side.panels.copy_(tensors[f"{name}.side"])
        return replace(placed, columns=columns.clone(), side=side)

    def weight(name: str) -> PanelWeight:
        entry = about["weights"][name]
        parts = tuple(part(f"{name}.{i}", kind) for i, kind in enumerate(entry["parts"]))
        return PanelWeight(parts, entry["packed_bytes"])

    def layer(i: int) -> Layer:
        vectors = {name: tensors.get(f"layers.{i}.{name}") for name in _VECTORS}
        parts: dict[str, Any] = {name: v if v is None else v.clone() for name, v in vectors.items()}
        parts |= {name: weight(f"layers.{i}.{name}") for name in _WEIGHTS}
        return Layer(**parts, **layer_switches(config, i))

    sizes: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in about["config"].items()}
    config = ModelConfig(**sizes)
    head = weight("head")
    return PreparedModel(
        config=config,
        layers=Stack(layer(i) for i in range(config.num_layers)),
        final_norm=tensors["final_norm"].clone(),
        head=head,
        embedding=head if about["tied"] else weight("embedding"),
        packed_bytes=about["packed_bytes"],
    )
