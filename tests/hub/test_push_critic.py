"""What PPO pushes is the policy: no file, no tensor and no adapter of any critic."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_metadata import card_errors
from hub_server import HubServer
from peft import LoraConfig, get_peft_model
from safetensors.torch import load
from tiny_policy import tiny_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IDS = torch.tensor([[5, 77, 99, 3, 3, 142, 210, 7, 64, 31, 12, 8]])
CRITICS = ("separate", "shared", "lora")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with HubServer() as server:
        path = f"{ROOT / 'src'}:{ROOT / 'tests/support'}"
        environment = {**os.environ, **server.environment(str(folder / "home")), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "push_critic_script.py"), str(folder)]
        done = subprocess.run(
            command, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, cwd=folder, timeout=900
        )
        assert done.returncode == 0, done.stderr[-3000:]
        server.folder = folder
        yield server


def test_the_critic_is_beside_the_policy_on_disk(hub):
    """The control: it was trained and saved."""
    for critic in CRITICS:
        assert (hub.folder / critic / "checkpoint-2/critic/critic_state.pt").is_file()


@pytest.mark.parametrize("repo", [*CRITICS, "merged"])
def test_nothing_of_a_critic_is_pushed(hub, repo):
    files = hub.files(f"tester/ppo-{repo}")
    assert files
    assert not [name for name in files if "critic" in name or "value_head" in name], sorted(files)
    named = {key for name, content in files.items() if name.endswith(".safetensors") for key in load(content)}
    assert named and not [name for name in named if "critic" in name or "head.bias" in name or name == "head.weight"]
    model = tiny_model()
    if repo == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        adapter = {n.replace(".default", "") for n, _ in model.named_parameters() if "lora_" in n}
        assert named == adapter
        assert json.loads(files["adapter_config.json"])["r"] == 4
    else:
        assert named == set(model.state_dict())


@pytest.mark.parametrize("repo", [*CRITICS, "merged"])
def test_the_pushed_policy_is_the_trained_one(hub, repo):
    files = hub.files(f"tester/ppo-{repo}")
    expected = torch.load(hub.folder / "expected.pt")[repo]
    model = tiny_model()
    if repo == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        weights = {
            n.replace("lora_A", "lora_A.default").replace("lora_B", "lora_B.default"): w
            for n, w in load(files["adapter_model.safetensors"]).items()
        }
        assert not model.load_state_dict(weights, strict=False).unexpected_keys
    else:
        model.load_state_dict(load(files["model.safetensors"]))
    with torch.no_grad():
        difference = (model.eval()(IDS).logits - expected).abs().max().item()
    print(repo, difference)
    assert difference < (1e-5 if repo == "merged" else 1e-6)


@pytest.mark.parametrize("repo", [*CRITICS, "merged"])
def test_the_card_is_a_policys(hub, repo):
    card = hub.files(f"tester/ppo-{repo}")["README.md"].decode()
    assert card_errors(card) == []
    assert "Proximal Policy Optimization" in card
    use, _, recipe = card.partition("\n## Recipe\n")
    assert "value head" not in card.lower() and "AutoModelForTokenClassification" not in card
    assert "critic" not in use.partition("\n## Use\n")[2].partition("\n## ")[0]  # how to load says nothing of it
    assert f"`critic` | `{'lora' if repo == 'merged' else repo}`" in recipe  # a setting of the run, nothing more
