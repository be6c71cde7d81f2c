"""Train for two steps and push: full weights, MXFP4, an adapter, the adapter merged. Run with the local Hub as endpoint.

    python push_script.py OUTPUT_DIR

Writes the logits that each repository should give.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_policy import byte_tokenizer, tiny_model

from trl_gptoss.hub.adapters import merged_weights
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.trainers.rollout_weights import quantised

IDS = torch.tensor([[5, 77, 99, 3, 3, 142, 210, 7, 64, 31, 12, 8]])
PLANTED = "hf_" + "PlantedTokenOfAUser0123456789abcd"
out = Path(sys.argv[1])
expected = {}


def length_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 11) for ids in completion_ids]


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(IDS).logits


def build(name, peft_config=None, **settings):
    tiny_model().save_pretrained(out / "base")  # a local folder: must not show up anywhere
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)])
    args = GptOssGRPOConfig(
        str(out / name),
        per_device_train_batch_size=4,
        num_generations=4,
        max_steps=2,
        max_rollout_tokens=6,
        learning_rate=1e-2,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_steps=2,
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        on_policy_check_steps=1,
        push_to_hub=True,
        hub_model_id=f"tester/{name}",
        model_init_kwargs={"dtype": "float32", "experts_implementation": "grouped_mm", "attn_implementation": "eager"},
        **settings,
    )
    # somebody's slip: a token and a path among the settings that the card shows
    args.generation_kwargs = {"seed_note": f"{PLANTED} from /home/somebody/data"}
    trainer = GptOssGRPOTrainer(
        str(out / "base"), length_reward, args, data, processing_class=byte_tokenizer(), peft_config=peft_config
    )
    trainer.args.generation_kwargs = args.generation_kwargs
    return trainer


def run(trainer):
    held = trainer.args.generation_kwargs
    trainer.args.generation_kwargs = None
    trainer.train()
    trainer.args.generation_kwargs = held


trainer = build("full", save_format="both", hub_strategy="checkpoint")
run(trainer)
rows = [{"policy": "after RL", "tool": "python", "problems": 200, "correct": 180, "accuracy": 0.9}]
(out / "full/evaluation.json").write_text(json.dumps(rows))
(out / "full/runs").mkdir()
(out / "full/runs/events.out.tfevents.0.somehost").write_text("host")
trainer.push_to_hub(dataset_name="openai/gsm8k", task="Grade-school mathematics.", license="apache-2.0")
expected["full"] = logits(trainer.model)
with merged_weights(trainer.model, quantised):
    expected["full#mxfp4"] = logits(trainer.model)

trainer = build("quantised", save_format="mxfp4", rollout_weights="mxfp4")
run(trainer)
assert any("rollout_weights/abs_log_ratio" in entry for entry in trainer.state.log_history)
trainer.push_to_hub()
with merged_weights(trainer.model, quantised):
    expected["quantised"] = logits(trainer.model)

lora = LoraConfig(
    r=4,
    target_modules=["q_proj", "v_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight"],
)
trainer = build("adapter", lora, train_sinks=True)
run(trainer)
trainer.push_to_hub()
expected["adapter"] = logits(trainer.model)
trainer.merge_and_push("tester/merged", save_format="both")
assert torch.equal(logits(trainer.model), expected["adapter"])  # left as it is
expected["merged"] = expected["adapter"]
with merged_weights(trainer.model, quantised):
    expected["merged#mxfp4"] = logits(trainer.model)
torch.save(expected, out / "expected.pt")
