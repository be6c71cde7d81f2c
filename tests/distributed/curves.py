"""GRPO of two ranks, once each with its own sequences and once sharing them; run by torchrun.

Arguments: a folder for `<what>_<rank>.json`, then what to do.
"""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import ppo_run
import torch
import torch.distributed as dist
from datasets import Dataset
from fsdp2_without_gpu import fsdp2_without_gpu
from peft import LoraConfig
from tiny_policy import byte_tokenizer, tiny_model

from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer

torch.set_num_threads(1)
RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[1])
ON_GPU = torch.cuda.is_available()  # in benchmarks/multi_gpu; the tests hide it


def trainer(folder, lora=False, model=None, prompts=None, **settings):
    prompts = prompts or ["say " + "x" * (i % 9) for i in range(64)]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts])
    args = GptOssGRPOConfig(
        str(folder),
        **{
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_rollout_tokens": 8,
            "learning_rate": 1e-2,
            "bf16": False,
            "use_cpu": not ON_GPU,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "log_trajectories": 0,
            **settings,
        },
    )
    if model is None:
        model = tiny_model(attn_implementation="sink_fa3", experts_implementation="gptoss_fused")
    peft_config = None
    if lora:
        peft_config = LoraConfig(
            r=4,
            target_modules=["q_proj", "v_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            init_lora_weights=False,
        )
    return GptOssGRPOTrainer(
        model,
        lambda completion_ids, **_: [float(sum(ids) % 11) for ids in completion_ids],
        args,
        data,
        processing_class=byte_tokenizer(),
        peft_config=peft_config,
    )


def curve(size, budget, lora):
    settings = {"sequence_parallel_size": size, "max_tokens_per_micro_batch": budget}
    if lora:  # the reference is the model without its adapter; the second visit of a batch needs old log-probs
        settings |= {"beta": 0.05, "num_iterations": 2, "gradient_accumulation_steps": 1}
    t = trainer(FOLDER / "curve", lora=lora, max_steps=20, **settings)
    t.train()
    return t.state.log_history


def ppo_curve(size):
    """An adapter of the policy's model is the critic."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    t = ppo_run.build(
        FOLDER / "ppo",
        model=tiny_model(attn_implementation="sink_fa3", experts_implementation="gptoss_fused"),
        critic="lora",
        lora=lora,
        tools=(),
        max_steps=20,
        critic_warmup_steps=2,
        sequence_parallel_size=size,
    )
    t.train()
    return t.state.log_history


def visits():
    """Every batch twice, with whatever sharding and precision the launcher asks for."""
    t = trainer(FOLDER / "visits", max_steps=6, num_iterations=2, max_grad_norm=0.5, padding_free=True)
    t.train()
    fsdp2 = t.accelerator.is_fsdp2
    root = t.model._get_fsdp_state()._fsdp_param_group.fsdp_params if fsdp2 else []
    return {
        "log": [e for e in t.state.log_history if "loss" in e],
        "logps": str(t._training_logps.dtype),
        "root": sorted(p._param_fqn for p in root),
    }


def killed():
    """Rank 1 disappears in the middle of the third step's forward pass."""
    t = trainer(FOLDER / "killed", max_steps=5, save_strategy="steps", save_steps=1, sequence_parallel_size=2)

    def die(*_):
        if RANK == 1 and t.state.global_step == 2 and t.model.training:
            os.kill(os.getpid(), signal.SIGKILL)

    t.model.model.layers[1].register_forward_pre_hook(die)
    t.train()


def resumed():
    """The same run with one process."""
    t = trainer(FOLDER / "killed", max_steps=5, save_strategy="no")
    steps = []
    original = t.training_step
    t.training_step = lambda *args, **kwargs: steps.append(t.state.global_step) or original(*args, **kwargs)
    t.train(resume_from_checkpoint=True)
    return {"steps": steps, "logged": [e["step"] for e in t.state.log_history if "loss" in e]}


if __name__ == "__main__":
    if "ACCELERATE_USE_FSDP" in os.environ:
        fsdp2_without_gpu()
    done = {
        "own": lambda: curve(1, None, False),
        "shared": lambda: curve(2, None, False),
        "own_lora": lambda: curve(1, None, True),
        "shared_lora": lambda: curve(2, 300, True),
        "own_ppo": lambda: ppo_curve(1),
        "shared_ppo": lambda: ppo_curve(2),
        "visits": visits,
        "killed": killed,
        "resumed": resumed,
    }
    for what in sys.argv[2:]:
        (FOLDER / f"{what}_{RANK}.json").write_text(json.dumps(done[what]()))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # under load a C++ thread that outlives the group aborts the interpreter's exit
