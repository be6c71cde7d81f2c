"""A small PPO run on the random tiny model."""

import random

from cpu_settings import ON_CPU
from datasets import Dataset
from peft import LoraConfig
from scripted_backend import ScriptedBackend
from tiny_policy import byte_tokenizer, tiny_model

from trl_gptoss.trainers import GptOssPPOConfig, GptOssPPOTrainer

TOKENIZER = byte_tokenizer()
CRITICS = ("separate", "shared", "lora")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first.
        b: second.
    """
    return a + b


def some_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 11) / 10 for ids in completion_ids]


def random_bytes(prompt: list[int], rng: random.Random) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randrange(1, 9))]


def settings_of(output_dir, **settings):
    return GptOssPPOConfig(
        str(output_dir),
        **{
            **ON_CPU,
            "per_device_train_batch_size": 4,
            "max_steps": 6,
            "max_rollout_tokens": 6,
            "learning_rate": 1e-2,
            "on_policy_check_steps": 2,
            **settings,
        },
    )


def build(
    output_dir,
    reward=some_reward,
    rows=64,
    script=None,
    model=None,
    callbacks=None,
    lora=None,
    tools=(add,),
    **settings,
):
    """`critic="lora"` brings a LoRA policy along; `script` replaces the sampling."""
    if lora is None and settings.get("critic") == "lora":
        lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(rows)])
    trainer = GptOssPPOTrainer(
        model or tiny_model(),
        reward,
        settings_of(output_dir, **settings),
        data,
        processing_class=TOKENIZER,
        peft_config=lora or None,
        tools=list(tools),
        callbacks=callbacks,
    )
    if script is not None:
        trainer._engine.backend = ScriptedBackend(script)
    return trainer


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def policy_weights(trainer):
    """Without the critic's adapter."""
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if ".critic." not in n}


def critic_weights(trainer):
    critic = trainer.critic
    weights = dict(critic.local_parameters())
    if trainer._critic_kind == "separate":
        weights |= dict(critic.backbone.named_parameters())
    return {n: p.detach().clone() for n, p in weights.items()}
