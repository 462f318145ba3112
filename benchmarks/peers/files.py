"""Where the peers' environments and model files lie. Imported in every environment: standard library only.

A converted file lies beside the one that it was made from, models/NAME/NAME.gguf of bitdraft's cache folder.
"""

import os
from pathlib import Path

GGUF_FORMATS = ("q4_0", "q8_0", "bf16")
"""What setup_peers.py makes for llama.cpp. 'stored' is the file that bitdraft fetched, as it is."""

IR_FORMATS = ("int4", "int8", "fp16")
"""What setup_peers.py makes for OpenVINO."""


def cache_folder() -> Path:
    """bitdraft's own: $BITDRAFT_CACHE, else ~/.cache/bitdraft."""
    return Path(os.environ.get("BITDRAFT_CACHE") or "~/.cache/bitdraft").expanduser()


def environments_folder() -> Path:
    """Where the peers' virtual environments lie, unless an option says otherwise."""
    return cache_folder() / "peers"


def stored_file(model: str) -> Path:
    """The .gguf file that `bitdraft pull MODEL` fetched."""
    return cache_folder() / "models" / model / f"{model}.gguf"


def gguf_file(model: str, form: str) -> Path:
    """The .gguf file of a model in a form of llama.cpp."""
    return stored_file(model) if form == "stored" else stored_file(model).with_name(f"{model}-{form}.gguf")


def hf_folder(model: str) -> Path:
    """The model in bf16 in Hugging Face's form, tokenizer included."""
    return stored_file(model).with_name("bf16")


def ir_folder(model: str, form: str) -> Path:
    """The model in OpenVINO's form with weights in int4, int8 or fp16."""
    return stored_file(model).with_name(f"openvino-{form}")
