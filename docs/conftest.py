"""Names that the chapters' code blocks may use without defining them. The blocks are run by pytest-markdown-docs."""

from typing import Any

import torch
from transformers import GptOssConfig, GptOssForCausalLM


def weather(city: str) -> str:
    """Look up the weather.

    Args:
        city: Where.
    """
    return f"sunny in {city}"


def tiny_model() -> GptOssForCausalLM:
    import trl_gptoss  # noqa: F401 (registers the implementations)

    config = GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        hidden_size=64,
        intermediate_size=64,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        sliding_window=16,
    )
    config._attn_implementation = "sink_fa3"
    config._experts_implementation = "gptoss_fused"
    return GptOssForCausalLM(config)


def pytest_markdown_docs_globals() -> dict[str, Any]:
    from trl_gptoss.harmony import HarmonyVocabulary
    from trl_gptoss.tiny.vocabulary import small_tokenizer

    tokenizer = small_tokenizer()
    call = HarmonyVocabulary.of(tokenizer)
    sampled = tokenizer.encode(
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
        add_special_tokens=False,
    )
    assert sampled[-1] in call.stop_ids
    heads, total = 4, 12
    return {
        "tokenizer": tokenizer,
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
        "weather": weather,
        "generate": lambda prompt: sampled,
        "run": lambda call: weather(**call.arguments),
        "model": tiny_model(),
        "ids": torch.randint(0, 256, (1, 8)),
        "q": torch.randn(total, heads, 32),
        "k": torch.randn(total, 2, 32),
        "v": torch.randn(total, 2, 32),
        "sinks": torch.zeros(heads),
        "cu": torch.tensor([0, 5, 12], dtype=torch.int32),
        "longest": 7,
    }
