"""Pushing to a Hub over HTTP and loading from there without this package: full weights, MXFP4, adapter, merged adapter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hub_metadata import card_errors
from hub_server import HubServer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REPOSITORIES = ("tester/full", "tester/quantised", "tester/adapter", "tester/merged")
PLANTED = "hf_PlantedTokenOfAUser0123456789abcd"


def run(script: str, folder: Path, environment: dict[str, str], path: str) -> str:
    environment = {**os.environ, **environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(HERE / script), str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with HubServer() as server:
        environment = server.environment(str(folder / "home"))
        run("push_script.py", folder, environment, f"{ROOT / 'src'}:{ROOT / 'tests/support'}")
        server.loaded = run("load_script.py", folder, environment, "")
        server.folder = folder
        yield server


def test_everything_loads_and_generates_without_this_package(hub):
    rows = [line.split() for line in hub.loaded.splitlines() if line]
    assert {name for name, _, _ in rows} == {
        *("full", "full#mxfp4", "quantised", "adapter", "merged", "merged#mxfp4"),
    }
    for name, difference, generated in rows:
        # merged weights sum in another order than weights and factors apart; everything else is the same arithmetic
        assert float(difference) <= (1e-5 if name.startswith("merged") else 1e-6), (name, difference)
        assert int(generated) == 4


def test_what_is_in_the_repositories(hub):
    names = {repo: set(hub.files(repo)) for repo in REPOSITORIES}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names["tester/full"]
    assert {"mxfp4/model.safetensors", "mxfp4/config.json", "mxfp4/tokenizer.json"} <= names["tester/full"]
    assert {"evaluation.json", "figures/reward.svg", "last-checkpoint/optimizer.pt"} <= names["tester/full"]
    assert "last-checkpoint/loop_state_0.pt" in names["tester/full"]
    assert b'"quant_method": "mxfp4"' in hub.files("tester/quantised")["config.json"]
    assert not [name for name in names["tester/quantised"] if name.startswith("mxfp4/")]  # of the pushed checkpoints
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names["tester/adapter"]
    assert "model.safetensors" not in names["tester/adapter"]
    for repo in REPOSITORIES:
        beside = [n for n in names[repo] if re.search(r"training_args|trajectories|report\.html|runs/|tfevents", n)]
        assert not beside, beside


def test_no_path_and_no_secret_is_in_any_file(hub):
    forbidden = [PLANTED, hub.token, str(hub.folder), str(Path.home()), "/home/somebody", "somehost"]
    for repo in REPOSITORIES:
        for name, content in hub.files(repo).items():
            found = [word for word in forbidden if word.encode() in content]
            assert not found, (repo, name, found)
    # the control: what the runs left on disk has them
    assert PLANTED.encode() in (hub.folder / "full/training_args.bin").read_bytes()
    assert b"[secret removed] from [local path removed]" in hub.files("tester/full")["README.md"]


@pytest.mark.parametrize("repo", REPOSITORIES)
def test_cards_satisfy_the_hub(hub, repo):
    card = hub.files(repo)["README.md"].decode()
    assert card_errors(card) == []
    for heading in (
        "Use",
        "Task and data",
        "Rewards",
        "Training curves",
        "Recipe",
        "Hardware and versions",
        "Citation",
    ):
        assert f"\n## {heading}\n" in card, heading
    assert "`on_policy/max_log_ratio_recomputed`" in card and "| transformers |" in card
    for picture in re.findall(r"!\[.*\]\((.*)\)", card):
        assert hub.files(repo)[picture].startswith(b"<svg"), picture


def test_cards_say_what_is_known(hub):
    full, quantised, adapter, merged = (hub.files(repo)["README.md"].decode() for repo in REPOSITORIES)
    assert "Grade-school mathematics." in full and "- openai/gsm8k" in full and "license: apache-2.0" in full
    assert "| after RL, python | 200 | 0.900 | 0.851 to 0.934 |" in full
    assert "| `learning_rate` | `0.01` |" in full and "output_dir" not in full
    assert 'in `subfolder="mxfp4"`' in full and 'in `subfolder="mxfp4"`' in merged
    assert "Mxfp4Config(dequantize=True)" in quantised and "`rollout_weights/abs_log_ratio`" in quantised
    assert (
        "library_name: peft" in adapter and "PeftModel.from_pretrained" in adapter and "sinks were trained" in adapter
    )
    assert "library_name: transformers" in merged and "PeftModel" not in merged


def test_the_hub_refuses_what_the_hub_would_refuse():
    assert card_errors("# no metadata") == ["there is no YAML block"]
    bad = "---\nlicense: my own\nbase_model: /home/me/model\ntags: [1]\nmodel-index: [{name: x, results: [{}]}]\n---\n"
    assert len(card_errors(bad)) == 6
