"""The critic's values: which state they are of, their precision, and that the policy does not know of them."""

import inspect

import pytest
import torch
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from tiny_policy import VOCABULARY, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from trl_gptoss.advantages import gae_advantages, token_rewards
from trl_gptoss.losses import LossNormalizer, value_loss
from trl_gptoss.trainers.value_head import SeparateCritic, SharedCritic, ValueHead, split_values

LENGTH = 5  # of the completion; prompts have 4 tokens


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Second prompt padded on the left, second completion padded on the right."""
    generator = torch.Generator().manual_seed(0)
    attention_mask = torch.ones(2, 9, dtype=torch.long)
    attention_mask[1, :2] = attention_mask[1, 8:] = 0
    return {
        "input_ids": torch.randint(0, VOCABULARY, (2, 9), generator=generator),
        "attention_mask": attention_mask,
    }


def randomise(head: ValueHead) -> None:
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(1))
        head.bias.fill_(0.5)


def separate_critic() -> SeparateCritic:
    return SeparateCritic(tiny_model(seed=3).model)


def shared_values(critic: SharedCritic, policy, batch: dict[str, torch.Tensor], **kwargs) -> torch.Tensor:
    with critic.record(policy) as states:
        policy(**batch, use_cache=False, **kwargs)
    return critic(states.hidden, LENGTH)


def test_decoder_lookup_is_the_one_we_rely_on() -> None:
    assert list(inspect.signature(PreTrainedModel.get_decoder).parameters) == ["self"]
    model = tiny_model()
    assert model.get_decoder() is model.model


def test_values_start_at_zero_and_the_head_learns_first(batch) -> None:
    critic = separate_critic()
    values = critic(**batch, completion_length=LENGTH)
    assert values.shape == (2, LENGTH + 1) and values.dtype == torch.float32 and not values.any()
    (values - 1).square().sum().backward()
    assert critic.head.weight.grad.any() and critic.head.bias.grad != 0
    assert not any(p.grad.any() for p in critic.backbone.parameters() if p.grad is not None)


def test_a_value_knows_what_came_before_its_token_and_nothing_else(batch) -> None:
    critic = separate_critic().eval()
    randomise(critic.head)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    with torch.no_grad():
        before, _ = split_values(critic(**batch, completion_length=LENGTH), mask)
        changed = batch["input_ids"].clone()
        changed[:, 4 + 2] = (changed[:, 4 + 2] + 1) % VOCABULARY
        after, _ = split_values(critic(changed, batch["attention_mask"], LENGTH), mask)
    torch.testing.assert_close(after[:, :3], before[:, :3], rtol=0, atol=1e-6)
    assert ((after[:, 3] - before[:, 3]).abs() > 1e-4).all()  # control: the next state has read the token


def test_padding_changes_no_value(batch) -> None:
    critic = separate_critic().eval()
    randomise(critic.head)
    padded = critic(**batch, completion_length=LENGTH)[1, :LENGTH]
    alone = {name: tensor[1:, 2:8] for name, tensor in batch.items()}
    torch.testing.assert_close(critic(**alone, completion_length=4)[0], padded, atol=1e-5, rtol=1e-5)
    unmasked = critic(batch["input_ids"], torch.ones_like(batch["attention_mask"]), LENGTH)[1, :LENGTH]
    assert (unmasked - padded).abs().max() > 1e-3  # control: with the padding seen, they differ


def test_split_values_on_tool_spans_and_truncations() -> None:
    values = torch.arange(12.0).view(3, 4)
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
    values_BT, final = split_values(values, mask)
    assert values_BT.tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert final.tolist() == [3, 5, 8]
    with pytest.raises(ValueError, match="one more than the mask"):
        split_values(values[:, :3], mask)


def test_shared_and_separate_agree_on_the_same_backbone(batch) -> None:
    """Also when TRL asks for the logits of the completion only."""
    policy = tiny_model(seed=3).eval()
    separate, shared = separate_critic().eval(), SharedCritic(32, detach=True)
    randomise(separate.head)
    randomise(shared.head)
    expected = separate(**batch, completion_length=LENGTH)
    for kwargs in ({}, {"logits_to_keep": LENGTH + 1}):
        assert torch.equal(shared_values(shared, policy, batch, **kwargs), expected)


@pytest.mark.parametrize("detach", [True, False])
def test_the_value_loss_reaches_the_policy_only_if_asked(batch, detach: bool) -> None:
    policy, critic = tiny_model(), SharedCritic(32, detach=detach)
    randomise(critic.head)
    shared_values(critic, policy, batch).square().sum().backward()
    assert critic.head.weight.grad.any()
    assert any(p.grad is not None and p.grad.any() for p in policy.parameters()) is not detach


def test_the_policy_does_not_know_of_its_critic(batch, tmp_path) -> None:
    policy, critic = tiny_model(), SharedCritic(32, detach=False)
    keys, parameters = list(policy.state_dict()), len(list(policy.parameters()))
    with critic.record(policy) as states:
        policy(**batch, use_cache=False)
        assert list(policy.state_dict()) == keys
    critic(states.hidden, LENGTH)
    assert list(policy.state_dict()) == keys and len(list(policy.parameters())) == parameters
    assert list(critic.state_dict()) == ["head.weight", "head.bias"]
    assert not policy.model._forward_hooks
    policy.save_pretrained(tmp_path)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]


def test_the_hook_goes_when_the_forward_fails(batch) -> None:
    policy, critic = tiny_model(), SharedCritic(32, detach=True)
    with pytest.raises(ZeroDivisionError), critic.record(policy):
        _ = 1 / 0
    assert not policy.model._forward_hooks
    with critic.record(policy) as states, pytest.raises(RuntimeError, match="no forward of the policy"):
        _ = states.hidden


def test_shared_critic_on_a_peft_policy(batch) -> None:
    critic = SharedCritic(32, detach=True)
    randomise(critic.head)
    policy = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).eval()
    before = shared_values(critic, policy, batch)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert (shared_values(critic, policy, batch) - before).abs().max() > 1e-3  # the adapter is in the states


def test_gradient_checkpointing_changes_nothing(batch) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy, critic = tiny_model(), SharedCritic(32, detach=False)
        randomise(critic.head)
        if checkpointing:
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy.train()
        shared_values(critic, policy, batch).square().sum().backward()
        gradients.append([policy.model.layers[0].self_attn.q_proj.weight.grad, critic.head.weight.grad])
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(plain, checkpointed)


def test_float32_under_bf16_and_autocast() -> None:
    head = ValueHead(2880)
    randomise(head)
    hidden = torch.randn(3, 2880, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = hidden.double() @ head.weight.double() + 0.5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = head(hidden)
        control = hidden @ head.weight
    assert values.dtype == torch.float32
    assert (values - exact).abs().max() < 1e-4
    assert (control + 0.5 - exact).abs().max() > 1e-2


def test_bad_input_is_named(batch) -> None:
    with pytest.raises(ValueError, match="has a language head"):
        SeparateCritic(tiny_model())
    with pytest.raises(ValueError, match="expects hidden size 8, found 4"):
        ValueHead(8)(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="must stay float32"):
        separate_critic().bfloat16()(**batch, completion_length=LENGTH)
    for length in (0, 9):
        with pytest.raises(ValueError, match=f"completion_length={length}"):
            separate_critic()(**batch, completion_length=length)


def test_a_critic_learns_the_return(batch) -> None:
    """The whole chain: values, GAE, value loss, step. The two completions have different rewards."""
    set_seed(0)
    critic, mask = separate_critic(), torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]])
    rewards = token_rewards(torch.tensor([1.0, -1.0]), mask)
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        values, _ = split_values(critic(**batch, completion_length=LENGTH), mask)
        target = gae_advantages(rewards, values.detach(), mask)
        loss = LossNormalizer.from_mask(target.value_mask, "token_mean")(
            value_loss(values, None, target.returns, target.value_mask).loss, target.value_mask
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(0.5) and losses[-1] < 0.02
