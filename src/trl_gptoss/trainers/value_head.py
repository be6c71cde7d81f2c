"""The critic's model: a linear head on hidden states, of a backbone of its own or of the policy's forward.

B completions, S tokens of prompt and completion, T tokens of the completion, D hidden size. The state in which a token is
sampled is everything before it, so its value is the head's output one position earlier. With a prompt that ends in p:

    position        p     a0    a1    pad
    values_BT1      v0    v1    v2    v3          (B, T + 1): what a critic returns
    mask                  1     1     0
    values_BT             v0    v1    v2          of a0, a1, pad: what GAE and the value loss take
    final_values_B  v2                            the state after the last policy token, for truncated completions
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel


class ValueHead(nn.Module):
    """`hidden @ weight + bias` in float32, whatever type the backbone has and whatever autocast is on.

    Weight and bias start at 0: the first values are 0, the first advantages are the returns, and no random direction
    has to be unlearned. (The backbone gets its first gradient from the second step on.)

    Args:
        hidden_size (`int`): D.
        device (`torch.device`, *optional*): where to put the two parameters.
    """

    def __init__(self, hidden_size: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.zeros((), dtype=torch.float32, device=device))

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Values, in units of the reward.

        Args:
            hidden_BTD (`torch.Tensor`): (..., D), floating.

        Returns:
            `torch.Tensor`: (...), float32.

        Raises:
            ValueError: another hidden size, or a head that was cast out of float32.
        """
        if hidden_BTD.shape[-1] != self.weight.shape[0]:
            raise ValueError(
                f"the value head expects hidden size {self.weight.shape[0]}, found {hidden_BTD.shape[-1]}"
            )
        if self.weight.dtype != torch.float32:
            raise ValueError(
                f"the value head is {self.weight.dtype}; it must stay float32, because one update moves a value by less "
                "than a step of a shorter type. Cast the backbone, not the critic"
            )
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            return hidden_BTD.float() @ self.weight + self.bias


class SeparateCritic(nn.Module):
    """A critic with a backbone of its own: `critic="separate"`.

    Args:
        backbone ([`~transformers.PreTrainedModel`]): a model without language head, that is
            `AutoModel.from_pretrained(...)`, mostly of the checkpoint that the policy starts from. Nothing may be
            shared with the policy.

    Raises:
        ValueError: a backbone with a language head, whose forward gives logits.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        if backbone.get_output_embeddings() is not None:
            raise ValueError(
                f"{type(backbone).__name__} has a language head; a critic needs hidden states. Load the checkpoint with "
                "AutoModel.from_pretrained, or pass the decoder of a model that nothing else uses"
            )
        self.backbone = backbone
        self.head = ValueHead(backbone.config.get_text_config().hidden_size, backbone.device)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_length: int) -> torch.Tensor:
        """Values of the states from the end of the prompt on.

        Args:
            input_ids (`torch.Tensor`): (B, S), int64; prompts padded on the left, completions on the right.
            attention_mask (`torch.Tensor`): (B, S), 1 on tokens, tool results included.
            completion_length (`int`): T, 1 <= T < S.

        Returns:
            `torch.Tensor`: values_BT1, (B, T + 1), float32.

        Raises:
            ValueError: `completion_length` out of range.
        """
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return self.head(completion_states(hidden, completion_length))


class SharedCritic(nn.Module):
    """A head on the hidden states of the policy's own forward: `critic="shared"`. No second forward, no second backbone.

        with critic.record(policy) as states:
            logps = ...                               # any forward of the policy, wrapped or not
        values_BT1 = critic(states.hidden, completion_length)

    The policy is no submodule of the critic nor the critic of the policy: `policy.state_dict()`, what is saved and pushed
    and what goes to the sampler are what they were.

    Args:
        hidden_size (`int`): D of the policy.
        detach (`bool`): `True` trains the head only; `False` lets the value loss train the policy's backbone too, with
            `value_coef` as the weight between the two.
    """

    def __init__(self, hidden_size: int, *, detach: bool) -> None:
        super().__init__()
        self.head = ValueHead(hidden_size)
        self.detach = detach

    @contextmanager
    def record(self, policy: PreTrainedModel) -> Iterator["RecordedStates"]:
        """Keep the last hidden states of the latest forward in this context.

        Args:
            policy ([`~transformers.PreTrainedModel`] or a `PeftModel` of one): unwrapped (`accelerator.unwrap_model`);
                calls may go through the wrapper.
        """
        states = RecordedStates()

        def keep(_module: nn.Module, _inputs: tuple, output) -> None:
            states.hidden = output.last_hidden_state

        handle = policy.get_decoder().register_forward_hook(keep)
        try:
            yield states
        finally:
            handle.remove()

    def forward(self, hidden_BSD: torch.Tensor, completion_length: int) -> torch.Tensor:
        """Values of the states from the end of the prompt on.

        Args:
            hidden_BSD (`torch.Tensor`): (B, S, D), `hidden` of [`RecordedStates`].
            completion_length (`int`): T, 1 <= T < S.

        Returns:
            `torch.Tensor`: values_BT1, (B, T + 1), float32.

        Raises:
            ValueError: shape, or `completion_length` out of range.
        """
        hidden = hidden_BSD.detach() if self.detach else hidden_BSD
        return self.head(completion_states(hidden, completion_length))


@dataclass(slots=True)
class RecordedStates:
    """What [`SharedCritic.record`] saw."""

    _hidden: torch.Tensor | None = None

    @property
    def hidden(self) -> torch.Tensor:
        """(B, S, D) last hidden states, after the final norm, with their graph."""
        if self._hidden is None:
            raise RuntimeError("no forward of the policy ran inside `with critic.record(policy)`")
        return self._hidden

    @hidden.setter
    def hidden(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden


def split_values(values_BT1: torch.Tensor, mask_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the completion's tokens, and the one behind the last policy token; see the head of this file.

    Args:
        values_BT1 (`torch.Tensor`): (B, T + 1), a critic's output.
        mask_BT (`torch.Tensor`): (B, T), bool or integer, 1 on policy tokens.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `values_BT` (B, T) and `final_values_B` (B,), both with gradient. A completion
        without policy tokens has the value of its prompt as final value.

    Raises:
        ValueError: shapes.
    """
    rows, length = mask_BT.shape
    if values_BT1.shape != (rows, length + 1):
        raise ValueError(
            f"expected values of shape {(rows, length + 1)}, one more than the mask; found {tuple(values_BT1.shape)}"
        )
    positions = torch.arange(1, length + 1, device=mask_BT.device)
    last = torch.where(mask_BT.bool(), positions, 0).amax(1, keepdim=True)
    return values_BT1[:, :-1], values_BT1.gather(1, last).squeeze(1)


def completion_states(hidden_BSD: torch.Tensor, completion_length: int) -> torch.Tensor:
    """Hidden states from the last prompt token on: (B, T + 1, D).

    Raises:
        ValueError: shape, or `completion_length` out of range.
    """
    if hidden_BSD.ndim != 3 or not 1 <= completion_length < hidden_BSD.shape[1]:
        raise ValueError(
            f"found hidden states {tuple(hidden_BSD.shape)} with completion_length={completion_length}; expected (B, S, D) "
            "and 1 <= completion_length < S, so that the first token has a state it was sampled in"
        )
    return hidden_BSD[:, -(completion_length + 1) :]
