"""Writing a quantised model as a folder, layer by layer, so that an interrupted run can go on.

The folder is `NAME.partial` until it is whole, and only then gets its name. A layer is one file,
`model-00001-of-000NN.safetensors`, written beside its place and moved there, so what has a name is whole. Each file
says in its header how its layers are stored.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import UsageError
from ..ops.packed import Packed, float_matrix
from .checkpoint import Checkpoint
from .compressed import decode, encode, own_facts, scheme_for, with_own_facts
from .compressed_config import quantization_config
from .hf_folder import folder_settings, model_card, write_json, write_tokenizer_files
from .safetensors_files import INDEX, SafetensorsFiles
from .scheme import Scheme
from .tensor_names import FINAL_NORM
from .tokenizer_folder import read_json

HEAD_FILE = "bitdraft-head.safetensors"
_STATE = "bitdraft-progress.json"


class FolderWriter:
    """Writes one model folder, a layer at a time.

    Attributes:
        folder: what it will be called.
        partial: where it lies until it is whole.
    """

    def __init__(self, folder: Path, source: Checkpoint, recipe_name: str) -> None:
        """Begin a folder, or go on with one that was begun alike.

        Args:
            folder: must not exist, or be empty.
            source: the model that is quantised; config and tokenizer come from it.
            recipe_name: how it is brought into its format.

        Raises:
            UsageError: the folder is there already, or another model or recipe was begun under its name.
            ModelFileError: the source is of a kind for which no folder can be written.
        """
        self.folder, self.partial = folder, folder.with_name(f"{folder.name}.partial")
        self._source, self._recipe = source, recipe_name
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is there already, and is not overwritten. Choose another name, or remove it.")
        self._tokenizer = source.tokenizer()
        self._settings = folder_settings(source.origin, source.config, self._tokenizer)
        begun = {
            "source": str(Path(source.origin).resolve()),
            "stored_as": source.stored_as,
            "recipe": recipe_name,
            "layers": source.config.num_layers,
        }
        state = self.partial / _STATE
        if state.exists():
            found = read_json(state)
            if found != begun:
                differing = ", ".join(f"{k} {found.get(k)!r}, not {v!r}" for k, v in begun.items() if found.get(k) != v)
                raise UsageError(
                    f"{self.partial} was begun with {differing}. Choose another name for this one, or remove the "
                    "folder to begin anew."
                )
            return
        with _writing(self.partial):
            self.partial.mkdir(parents=True, exist_ok=True)
            write_json(state, begun)

    @property
    def layers_done(self) -> int:
        """Layers that are written, from the first on without a gap."""
        done = 0
        while done < self._source.config.num_layers and (self.partial / self._shard(done)).exists():
            done += 1
        return done

    def _shard(self, i: int) -> str:
        count = self._source.config.num_layers + 1
        return f"model-{i + 1:05}-of-{count:05}.safetensors"

    def write_layer(self, i: int, packed: Mapping[str, Packed], tensors: Mapping[str, Tensor]) -> None:
        """Write a decoder layer.

        Args:
            i: its number.
            packed: its linear layers by name without '.weight', 'model.layers.0.self_attn.q_proj'.
            tensors: its norms and biases by name, float32.

        Raises:
            FormatError: a weight has no counterpart in compressed-tensors; nothing was written.
            UsageError: the disk is full or cannot be written; the layers before are kept.
        """
        encoded = {k: t for name, weight in packed.items() for k, t in encode(name, weight).items()}
        self._save(self._shard(i), encoded | {k: t.contiguous() for k, t in tensors.items()}, packed)

    def read_layer(self, i: int) -> tuple[dict[str, Packed], dict[str, Tensor]]:
        """A layer that was written, as it was given to `write_layer`.

        Raises:
            ModelFileError: its file is damaged.
        """
        files = SafetensorsFiles(self.partial, [self.partial / self._shard(i)])
        facts = json.loads(files.metadata[0]["bitdraft"])
        shapes = self._source.config.linear_shapes()
        packed = {name: _packed(name, files, fact, shapes[name]) for name, fact in facts.items()}
        parts = tuple(f"{name}.weight" for name in facts)
        tensors = {name: files.tensor(name).clone() for name in files.shapes if not name.startswith(parts)}
        return packed, tensors

    def finish(
        self, head: Packed, embedding: Packed, final_norm: Tensor, kv_scales: Mapping[str, Tensor] | None = None
    ) -> Path:
        """Write what is not in a layer, and give the folder its name.

        Args:
            head: the output head.
            embedding: the very same object where the head is tied.
            final_norm: [D] float32.
            kv_scales: of the layers' keys and values by full name, [1] float32, where the folder is to have such.

        Returns:
            the folder.

        Raises:
            FormatError: head or embedding has no counterpart in compressed-tensors.
            UsageError: layers are missing, or the disk is full or cannot be written; what was written is kept.
        """
        if self.layers_done < self._source.config.num_layers:
            raise UsageError(
                f"{self.partial}: layer {self.layers_done} is not written yet. Write all "
                f"{self._source.config.num_layers} layers before the folder is finished."
            )
        outer = {"model.embed_tokens": embedding} | ({} if self._source.config.tied_head else {"lm_head": head})
        plain = {name: weight for name, weight in outer.items() if scheme_for(name, weight) is None}
        own = {name: weight for name, weight in outer.items() if name not in plain}
        tensors = {k: t for name, weight in plain.items() for k, t in encode(name, weight).items()}
        tensors |= {f"{name}.weight": self._source.tensor(f"{name}.weight").bfloat16() for name in own}
        tensors |= {FINAL_NORM: final_norm, **(kv_scales or {})}
        self._save(self._shard(self._source.config.num_layers), tensors, plain)
        if own:
            self._save(HEAD_FILE, {k: t for name, weight in own.items() for k, t in encode(name, weight).items()}, own)
        with _writing(self.partial):
            self._write_small_files({name: scheme_for(name, weight) for name, weight in own.items()}, bool(kv_scales))
            (self.partial / _STATE).unlink()
            if self.folder.exists():
                self.folder.rmdir()  # an empty one
            os.replace(self.partial, self.folder)
        return self.folder

    def _write_small_files(self, own_head: Mapping[str, Scheme | None], kv_scales: bool) -> None:
        """Index, config.json, the tokenizer's files and the model card."""
        shards = [self._shard(i) for i in range(self._source.config.num_layers + 1)]
        places: dict[str, str] = {}
        facts: dict[str, dict[str, Any]] = {}
        size = 0
        for shard in [*shards, HEAD_FILE] if own_head else shards:
            files = SafetensorsFiles(self.partial, [self.partial / shard])
            facts |= json.loads(files.metadata[0]["bitdraft"])
            if shard != HEAD_FILE:
                places |= dict.fromkeys(files.shapes, shard)
                size += (self.partial / shard).stat().st_size
        write_json(self.partial / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))})
        linear = {n: f for n, f in facts.items() if n not in ("lm_head", "model.embed_tokens")}
        schemes = {name: _scheme(fact) for name, fact in linear.items()} | {"lm_head": None}
        settings = dict(self._settings)
        outliers = any("outliers" in fact["own"] for fact in facts.values())
        if found := quantization_config(schemes, outliers=outliers, kv_scales=kv_scales):
            settings["quantization_config"] = found
        settings["bitdraft"] = {"recipe": self._recipe, "formats": _formats(facts)}
        if own_head:
            settings["bitdraft"] |= {"head": HEAD_FILE, "head_config": quantization_config(own_head)}
        write_tokenizer_files(self._source.origin, self._tokenizer, self._source.config.context_length, self.partial)
        counts = Counter(fact["own"]["format"] for fact in linear.values())
        weights = sum(n * k for name, (n, k) in self._source.config.linear_shapes().items() if name in linear)
        bits = 8 * sum(fact["nbytes"] for fact in linear.values()) / weights
        name = Path(self._source.origin).stem
        card = model_card(name, self._recipe, counts, bits, bool(found), bool(own_head), outliers)
        (self.partial / "README.md").write_text(card, encoding="utf-8")
        write_json(self.partial / "config.json", settings)  # last: what has it is whole

    def _save(self, name: str, tensors: Mapping[str, Tensor], packed: Mapping[str, Packed]) -> None:
        """Write a file under another name and move it to its own."""
        facts = {layer: _fact(layer, weight) for layer, weight in packed.items()}
        place = self.partial / f".{name}"
        with _writing(self.partial, place):
            save_file(dict(tensors), place, metadata={"format": "pt", "bitdraft": json.dumps(facts)})
            os.replace(place, self.partial / name)


@contextmanager
def _writing(folder: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Say what to do when a file cannot be written; whatever happens, leave nothing of it that is not whole."""
    try:
        yield
    except BaseException as error:
        if unfinished is not None:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise UsageError(
            f"{folder}: cannot be written ({error}). What was written before is kept: free some space or give write "
            "permission, and go on with --resume."
        ) from None


def _fact(name: str, weight: Packed) -> dict[str, Any]:
    """What a file's header says of a weight: enough for the same weight to come back."""
    scheme = scheme_for(name, weight)
    return {
        "own": own_facts(weight),
        "nbytes": weight.nbytes,
        "scheme": None if scheme is None else asdict(scheme),
    }


def _scheme(fact: Mapping[str, Any]) -> Scheme | None:
    return None if fact["scheme"] is None else Scheme(**fact["scheme"])


def _packed(name: str, files: SafetensorsFiles, fact: Mapping[str, Any], shape: tuple[int, int]) -> Packed:
    prefix, scheme = f"{name}.weight", _scheme(fact)
    parts = {n.removeprefix(f"{name}."): files.tensor(n).clone() for n in files.shapes if n.startswith(prefix)}
    found = float_matrix(parts["weight"]) if scheme is None else decode(name, parts, scheme, shape, str(files.folder))
    return with_own_facts(found, fact["own"])


def _formats(facts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is known of layers beside their tensors, and the layers that it is alike of."""
    layers: dict[str, list[str]] = {}
    for name, fact in facts.items():
        layers.setdefault(json.dumps(fact["own"]), []).append(name)
    return [json.loads(own) | {"layers": names} for own, names in layers.items()]
