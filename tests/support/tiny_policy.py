"""A random GPT-OSS of 40 thousand parameters, a byte-level Harmony tokenizer, and policies that are made to call tools."""

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast
from trl.chat_template_utils import gptoss_chat_template

SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
# Lines that every prompt repeats become one ordinary token each, so that prompts stay short.
PHRASES = (
    "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n",
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.",
    "\nCalls to these tools must go to the commentary channel: 'functions'.",
)
VOCABULARY = 256 + len(SPECIAL_TOKENS) + len(PHRASES)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and the control tokens of Harmony."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|startoftext|>", eos_token="<|return|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens([AddedToken(p, special=False, normalized=False) for p in PHRASES])
    tokenizer.chat_template = gptoss_chat_template
    return tokenizer


def tiny_model(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    experts_implementation: str = "grouped_mm",
    **overrides,
) -> GptOssForCausalLM:
    """Sinks, sliding and full layers, GQA, experts and YaRN, everything as small as it gets."""
    torch.manual_seed(seed)
    config = GptOssConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "initializer_range": 0.1,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 512,
            },
            "pad_token_id": 257,
            "eos_token_id": 258,
            "bos_token_id": 256,
            **overrides,
        }
    )
    return GptOssForCausalLM._from_config(
        config, dtype=dtype, attn_implementation=attn_implementation, experts_implementation=experts_implementation
    )
