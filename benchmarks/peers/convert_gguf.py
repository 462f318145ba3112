"""Write a model's GGUF file anew in the forms that llama.cpp is measured in. Runs in the environment 'llama-cpp'.

The file that was fetched is of about 5 bits a weight already, so what comes out is right for speed, not for loss.

    python convert_gguf.py MODEL...
"""

import ctypes
import os
import sys

from files import GGUF_FORMATS, gguf_file, stored_file
from llama_cpp import llama_cpp as api

TYPES = {
    "q4_0": api.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q8_0": api.LLAMA_FTYPE_MOSTLY_Q8_0,
    "bf16": api.LLAMA_FTYPE_MOSTLY_BF16,
}


def convert(model: str, form: str) -> None:
    wanted = gguf_file(model, form)
    if wanted.exists():
        return
    unfinished = wanted.with_name(f".{wanted.name}")
    settings = api.llama_model_quantize_default_params()
    settings.ftype = TYPES[form]
    settings.allow_requantize = True
    settings.nthread = 1
    status = api.llama_model_quantize(os.fsencode(stored_file(model)), os.fsencode(unfinished), ctypes.byref(settings))
    if status:
        raise RuntimeError(f"{model} cannot be written in {form}: llama_model_quantize returned {status}")
    unfinished.rename(wanted)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for form in GGUF_FORMATS:
            convert(name, form)
            print(gguf_file(name, form))
