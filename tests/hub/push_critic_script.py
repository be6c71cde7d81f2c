"""Two steps of PPO with each critic, pushed to the local Hub: python push_critic_script.py OUTPUT_DIR

Writes the logits of the policies as they were trained.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from ppo_run import TOKENIZER, some_reward
from tiny_policy import tiny_model

from trl_gptoss.trainers import GptOssPPOConfig, GptOssPPOTrainer

IDS = torch.tensor([[5, 77, 99, 3, 3, 142, 210, 7, 64, 31, 12, 8]])
out = Path(sys.argv[1])
expected = {}


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(IDS).logits


tiny_model().save_pretrained(out / "base")
data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)])
for critic in ("separate", "shared", "lora"):
    args = GptOssPPOConfig(
        str(out / critic),
        critic=critic,
        critic_learning_rate=2e-2,
        per_device_train_batch_size=4,
        max_steps=2,
        max_rollout_tokens=6,
        learning_rate=1e-2,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_steps=1,
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        push_to_hub=True,
        hub_model_id=f"tester/ppo-{critic}",
        model_init_kwargs={"dtype": "float32", "experts_implementation": "grouped_mm", "attn_implementation": "eager"},
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if critic == "lora" else None
    trainer = GptOssPPOTrainer(
        str(out / "base"), some_reward, args, data, processing_class=TOKENIZER, peft_config=lora
    )
    trainer.train()
    assert trainer.critic.head.weight.abs().max() > 1e-3  # there is something that could leak
    trainer.push_to_hub()
    expected[critic] = logits(trainer.model)
    if critic == "lora":
        trainer.merge_and_push("tester/ppo-merged")
        expected["merged"] = expected[critic]
torch.save(expected, out / "expected.pt")
