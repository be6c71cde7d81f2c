"""Bandits in Harmony format, with a known optimum: a policy that answers at random has to find the one right answer.

A step is a letter of the final message, one of four that only this step has; the reward is the fraction of the letters that are
right, so the best policy has 1 and a random one 1/4. (With the same four at every step a policy that does not look at the place
soon says everywhere what is right most often, and has nothing left to explore with.) Both trainers start from the same tiny
GPT-OSS, which has learned the format and nothing else.
"""

import copy
import random

import pytest
import torch
from datasets import Dataset
from ppo_run import TOKENIZER
from scripted_backend import HarmonyWriter
from tiny_policy import tiny_model

from trl_gptoss.harmony import render_prompt
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer, GptOssPPOConfig, GptOssPPOTrainer

ARMS = ("abcd", "efgh", "ijkl", "mnop", "qrst")  # of each step
PROMPT = [{"role": "user", "content": "play"}]
WRITE = HarmonyWriter(TOKENIZER)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=[1, 5], ids=["1 step", "5 steps"])
def players(request):
    """Number of letters, and a model that answers with as many random ones."""
    steps, rng = request.param, random.Random(0)
    prompt = render_prompt(PROMPT, TOKENIZER, tools=[], reasoning_effort="medium", date=None)
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        answers = [WRITE.final("".join(map(rng.choice, ARMS[:steps]))) for _ in range(16)]
        ids = torch.tensor([prompt + answer for answer in answers])
        logps = model(ids).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        loss = -logps.gather(-1, ids[:, len(prompt) :, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return steps, model


def rewards_of_a_run(output_dir, algorithm, steps, model, seed, informative=True):
    rng = random.Random(seed)
    secret = "".join(map(rng.choice, ARMS[:steps]))

    def fraction_right(trajectories, **kwargs):
        texts = [t.final_text or "" for t in trajectories]
        scores = [sum(a == b for a, b in zip(x, secret)) / steps if len(x) == steps else 0.0 for x in texts]
        measured.append(sum(scores) / len(scores))
        if not informative:
            rng.shuffle(scores)
        return scores

    measured = []
    settings = {
        "per_device_train_batch_size": 32,
        "max_steps": 300,
        "max_rollout_tokens": len(WRITE.final("x" * steps)) + 2,
        "learning_rate": 1.5e-3,
        "lr_scheduler_type": "cosine",
        "num_iterations": 2,
        "seed": seed,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "log_trajectories": 0,
    }
    if algorithm == "ppo":
        config, trainer = GptOssPPOConfig(str(output_dir), critic_learning_rate=3e-3, **settings), GptOssPPOTrainer
    else:
        config, trainer = GptOssGRPOConfig(str(output_dir), num_generations=8, **settings), GptOssGRPOTrainer
    data = Dataset.from_list([{"prompt": PROMPT}] * 64)
    trainer(copy.deepcopy(model), fraction_right, config, data, processing_class=TOKENIZER).train()
    return measured


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_optimum_is_found(tmp_path, players, algorithm, seed):
    steps, model = players
    measured = rewards_of_a_run(tmp_path, algorithm, steps, model, seed)
    assert measured[0] < 0.6
    assert sum(measured[-5:]) / 5 > 0.95, measured


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_nothing_is_found_without_information(tmp_path, players, algorithm):
    """The control: the same rewards, dealt out at random."""
    steps, model = players
    measured = rewards_of_a_run(tmp_path, algorithm, steps, model, 0, informative=False)
    assert sum(measured[-5:]) / 5 < 0.8, measured
