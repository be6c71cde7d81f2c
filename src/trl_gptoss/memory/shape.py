"""The sizes of a GPT-OSS, and its parameters counted from them."""

from dataclasses import dataclass, fields
from typing import Any

GIB = 2**30
HALF, FLOAT = 2, 4  # bytes of a number
_KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "num_local_experts", "num_experts_per_tok", "vocab_size",
)  # fmt: skip


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelShape:
    """What the memory of a GPT-OSS depends on.

    Args:
        hidden_size (`int`): H.
        num_layers (`int`): Decoder layers.
        num_heads (`int`): Query heads.
        num_kv_heads (`int`): Key/value heads.
        head_dim (`int`): Width of a head.
        intermediate_size (`int`): I, width of an expert.
        num_experts (`int`): Experts per layer.
        top_k (`int`): Experts per token.
        vocab_size (`int`): V.
        tied (`bool`, *optional*, defaults to `False`): Input and output embeddings are one parameter.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int
    top_k: int
    vocab_size: int
    tied: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "tied" and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{item.name} is {value!r}; expected a positive integer.")

    @classmethod
    def from_config(cls, config: Any) -> "ModelShape":
        """Read a `GptOssConfig`, or a dict with the same keys (`config.json`)."""
        values = config if isinstance(config, dict) else config.to_dict()
        if values.get("model_type") != "gpt_oss":
            raise ValueError(
                f"The planner knows GPT-OSS; the model_type of this config is {values.get('model_type')!r}."
            )
        missing = [key for key in _KEYS if key not in values]
        if missing:
            raise ValueError(f"This config of a GPT-OSS has no {', '.join(missing)}.")
        return cls(
            hidden_size=values["hidden_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values["num_key_value_heads"],
            head_dim=values["head_dim"],
            intermediate_size=values["intermediate_size"],
            num_experts=values["num_local_experts"],
            top_k=values["num_experts_per_tok"],
            vocab_size=values["vocab_size"],
            tied=bool(values.get("tie_word_embeddings", False)),
        )

    @property
    def attention_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def expert_parameters(self) -> int:
        """Parameters of the experts of one layer."""
        up = (self.hidden_size + 1) * 2 * self.intermediate_size
        return self.num_experts * (up + (self.intermediate_size + 1) * self.hidden_size)

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention of one layer, sinks included."""
        h, a, kv = self.hidden_size, self.attention_width, self.kv_width
        return h * (a + 2 * kv) + a + 2 * kv + (a + 1) * h + self.num_heads

    @property
    def layer_parameters(self) -> int:
        router = (self.hidden_size + 1) * self.num_experts
        return self.expert_parameters + self.attention_parameters + router + 2 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one embedding matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters: 20.9e9 for gpt-oss-20b."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.num_layers * self.layer_parameters + embeddings + self.hidden_size
