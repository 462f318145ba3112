"""Set up the peers: a virtual environment for each, and the models in the forms that they read.

What is there already is kept. Building llama.cpp takes about twenty minutes on two cores; converting the three models
takes about as long, and 30 GB of disk.

    .venv/bin/python benchmarks/peers/setup_peers.py
    .venv/bin/python benchmarks/peers/setup_peers.py llama-cpp --models smollm2-135m
"""

import argparse
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from files import IR_FORMATS, environments_folder, hf_folder, ir_folder

from bitdraft.models import hub

HERE = Path(__file__).parent
PEERS = ("llama-cpp", "openvino", "transformers")
MODELS = ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m")

ROUNDING = {"int4": ("--weight-format", "int4", "--group-size", "64", "--ratio", "1.0")}
"""Options of optimum-cli, by OpenVINO's form; groups of 64 divide every layer of the three models."""


def main() -> None:
    options = _options()
    for model in options.models:
        print(hub.resolve(model))
    for peer in PEERS:  # transformers writes what OpenVINO is made from, whichever of the two was asked for
        if peer in options.peers or (peer == "transformers" and "openvino" in options.peers):
            _environment(options.environments / peer)
    if "llama-cpp" in options.peers:
        _run(options.environments, "llama-cpp", "python", HERE / "convert_gguf.py", *options.models)
    if {"openvino", "transformers"} & set(options.peers):
        _run(options.environments, "transformers", "python", HERE / "convert_folder.py", *options.models)
    if "openvino" in options.peers:
        for model in options.models:
            for form in IR_FORMATS:
                _convert_ir(options.environments, model, form)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", default=PEERS, help=f"which of {', '.join(PEERS)}; all by default")
    parser.add_argument("--models", nargs="+", default=MODELS, help="names that `bitdraft pull` knows")
    parser.add_argument("--environments", type=Path, default=environments_folder(), help="where environments lie")
    options = parser.parse_args()
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}. Expected some of {', '.join(PEERS)}.")
    return options


def _environment(folder: Path) -> None:
    """A virtual environment with what requirements/NAME.txt lists; left alone if that is what it was made from."""
    wanted, made = HERE / "requirements" / f"{folder.name}.txt", folder / "requirements.txt"
    if made.exists() and made.read_bytes() == wanted.read_bytes():
        return
    print(f"setting up {folder}")
    venv.create(folder, with_pip=True, symlinks=True)
    build = {"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())}
    ours = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}  # `make` sets bitdraft's
    pip = [folder / "bin" / "pip", "--quiet"]
    subprocess.run([*pip, "install", "--requirement", wanted], check=True, env={**ours, **build})
    # optimum-intel wants torchvision, whose build need not fit torch's; for text it is not needed, and off the list it
    # is not imported.
    subprocess.run([*pip, "uninstall", "--yes", "torchvision"], check=True)
    shutil.copy(wanted, made)


def _convert_ir(environments: Path, model: str, form: str) -> None:
    folder = ir_folder(model, form)
    if not folder.exists():
        unfinished = folder.with_name(f".{folder.name}")
        rounding = ROUNDING.get(form, ("--weight-format", form))
        task = ("--task", "text-generation-with-past")
        _run(
            environments,
            "openvino",
            "optimum-cli",
            "export",
            "openvino",
            "-m",
            hf_folder(model),
            *task,
            *rounding,
            unfinished,
        )
        unfinished.rename(folder)
    print(folder)


def _run(environments: Path, peer: str, program: str, *arguments: str | Path) -> None:
    command: Sequence[str | Path] = (environments / peer / "bin" / program, *arguments)
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


if __name__ == "__main__":
    sys.exit(main())
