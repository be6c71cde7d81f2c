"""The tiny model: every architectural feature of GPT-OSS in about a million parameters."""

import torch
from transformers import GenerationConfig, GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerBase

from .tokenizer import TERMINATORS

# A window smaller than a conversation, so that the sliding layers really slide; YaRN really stretches: 4 x 64 positions
# hold the conversations of the tiny task, 4 x 1024 those of real problems in the real vocabulary.
ARCHITECTURE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "router_aux_loss_coef": 0.0,
}


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The special ids that a model's configuration names."""
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def tiny_config(vocab_size: int, special_ids: dict[str, int], original_positions: int = 64) -> GptOssConfig:
    """The configuration of the tiny model.

    Args:
        vocab_size (`int`): rows of the embedding and of the head.
        special_ids (`dict[str, int]`): see `special_ids`.
        original_positions (`int`, *optional*, defaults to 64): positions before YaRN's factor of 4.
    """
    return GptOssConfig(
        **ARCHITECTURE,
        vocab_size=vocab_size,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": original_positions,
        },
        max_position_embeddings=4 * original_positions,
        **special_ids,
    )


def tiny_generation_config(tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Sampling ends at <|return|>, <|endoftext|> and <|call|>, as in gpt-oss's own generation_config.json."""
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(list(TERMINATORS)),
        do_sample=True,
    )


def tiny_model(config: GptOssConfig, seed: int) -> GptOssForCausalLM:
    """A randomly initialised float32 model on the CPU; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # grouped_mm: on the CPU transformers' default for experts (batched_mm) is 35 times slower.
        return GptOssForCausalLM._from_config(config, dtype=torch.float32, experts_implementation="grouped_mm")


def widen_vocabulary(model: GptOssForCausalLM, ids: list[int], config: GptOssConfig, seed: int) -> GptOssForCausalLM:
    """Put a model trained on a few ids into a larger vocabulary.

    Row `k` of the narrow embedding and head becomes row `ids[k]` of the wide ones. The other rows of the head are zero,
    exactly as the warm start's loss assumed (their logits are 0), those of the embedding keep their initialisation.

    Args:
        model (`GptOssForCausalLM`): with `len(ids)` rows.
        ids (`list[int]`): the id in the wide vocabulary of every narrow one.
        config (`GptOssConfig`): the wide configuration.
        seed (`int`): initialises the embeddings of the other ids.
    """
    wide = tiny_model(config, seed)
    rows = torch.tensor(ids)
    narrow = model.state_dict()
    state = wide.state_dict()
    for name, value in narrow.items():
        if name == "lm_head.weight":
            state[name].zero_()
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            state[name][rows] = value
        else:
            state[name].copy_(value)
    return wide
