"""Write the model of a GGUF file as a folder in bf16 with transformers. Runs in the environment 'transformers'.

python convert_folder.py MODEL...
"""

import sys
from pathlib import Path

import torch
from files import hf_folder, stored_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging


def convert(model: str) -> Path:
    source, folder = stored_file(model), hf_folder(model)
    if (folder / "config.json").exists():
        return folder
    unfinished = folder.with_name(f".{folder.name}")
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(unfinished)
    dense = GgufConfig(dequantize=True)
    AutoModelForCausalLM.from_pretrained(**where, quantization_config=dense, dtype=torch.bfloat16).save_pretrained(
        unfinished
    )
    return unfinished.rename(folder)


if __name__ == "__main__":
    logging.disable_progress_bar()
    for name in sys.argv[1:]:
        print(convert(name))
