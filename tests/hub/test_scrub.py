"""Secrets and local paths: what is found, and what must not be taken for one."""

import os
from pathlib import Path

import pytest

from trl_gptoss.hub.scrub import PATH, SECRET, SecretFound, check_no_secret, redact
from trl_gptoss.hub.upload import additions, is_local, model_files

# in pieces, so that no scanner of this repository takes them for real ones
SECRETS = {
    "Hugging Face": "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
    "Hugging Face organisation": "api_org_" + "AbCdEfGhIjKlMnOpQrStUvWx",
    "OpenAI": "sk-" + "proj-Abc123Abc123Abc123Abc123",
    "GitHub": "ghp_" + "0123456789abcdefghij0123456789abcdef",
    "GitHub fine-grained": "github_pat_" + "11ABCDEFG0abcdefghijkl_mnopqrstuv",
    "GitLab": "glpat-" + "abcdefghij0123456789",
    "AWS": "AKIA" + "IOSFODNN7EXAMPLE",
    "Google": "AIza" + "SyA-1234567890abcdefghijklmnopqrstu",
    "Slack": "xoxb-" + "123456789012-abcdefghij",
    "W&B": "wandb_v1_" + "abcdefghijklmnopqrstuvwx",
    "JWT": "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc123def456",
    "private key": "-----BEGIN RSA PRIVATE " + "KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
}
PATHS = (
    "/home/me/data/train.jsonl",
    "/root/.cache/trl_gptoss",
    "/mnt/disk-1/runs/",
    "~/models/tiny",
    "~other/models",
    "file:///scratch/x",
    r"C:\Users\me\model",
    r"\\server\share\model",
)
HARMLESS = (
    "https://huggingface.co/openai/gpt-oss-20b/resolve/main/config.json",
    "openai/gpt-oss-20b",
    "[chart](figures/reward.svg)",
    "on_policy/max_log_ratio and rewards/math_reward/mean",
    "180/200, tokens/s, and/or, 1/2/3",
    "hf_transfer, hf_hub_download, sk-learn",
    "<|start|>assistant<|channel|>analysis</b></i>",
    "![Largest |log ratio|](figures/on_policy.svg)",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "a ~ b / c",
)


@pytest.mark.parametrize("kind", SECRETS)
def test_secrets_are_removed_and_refused(kind):
    text = f"learning_rate: 1e-6\nkey: {SECRETS[kind]} # do not share"
    assert redact(text) == f"learning_rate: 1e-6\nkey: {SECRET} # do not share"
    with pytest.raises(SecretFound, match="config.json, line 2") as raised:
        check_no_secret("config.json", text)
    assert SECRETS[kind] not in str(raised.value)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("around", ["{}", "from `{}` on", '"{}",', "({})", "| {} |", "x={}"])
def test_paths_are_removed(path, around):
    before, after = around.split("{}")
    assert redact(f"{before}{path}{after}") == f"{before}{PATH}{after}"


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_stays(text):
    assert redact(text) == text
    check_no_secret("README.md", text)


def test_values_of_secret_variables_are_secrets(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "correct-horse-battery")
    monkeypatch.setenv("PIN_TOKEN", "1234")  # too short to be told from a number
    assert redact("correct-horse-battery 1234") == f"{SECRET} 1234"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "correct-horse")
    assert redact("correct-horse") == "correct-horse"


def test_own_secrets_and_places():
    assert redact("my own secret, in outputs/run 7", ["own secret"], ["outputs"]) == f"my {SECRET}, in {PATH} 7"
    assert redact(f"in {os.getcwd()} and {Path.home()}/x") == f"in {PATH} and {PATH}"
    assert redact("user:pw", []) == "user:pw"
    assert "hunter2" not in redact("https://me:hunter2@example.com/x.git")


def test_only_the_model_is_uploaded_and_text_is_cleaned(tmp_path):
    inside = {
        "config.json": f'{{"_name_or_path": "{tmp_path}", "hidden_size": 64}}',
        "adapter_config.json": '{"base_model_name_or_path": "/home/me/model", "r": 4}',
        "model.safetensors": "weights of /home/me",
        "tokenizer.json": '{"vocab": {"/usr/bin/env": 1}}',
        "chat_template.jinja": "{# /usr/share/x #}",
        "README.md": f"token {SECRETS['Hugging Face']} of /home/me/x",
        "mxfp4/model.safetensors": "w",
        "figures/reward.svg": "<svg/>",
    }
    outside = (
        "training_args.bin",
        "trajectories.jsonl",
        "report.html",
        "optimizer.pt",
        "runs/events",
        ".env",
        "x/config.json",
    )
    for name in (*inside, *outside):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(inside.get(name, SECRETS["OpenAI"]))
    files = model_files(tmp_path)
    assert set(files) == set(inside)
    content = {}
    for operation in additions(files):
        with operation.as_file() as opened:
            content[operation.path_in_repo] = opened.read().decode()
    assert '"_name_or_path": null' in content["config.json"] and '"hidden_size": 64' in content["config.json"]
    assert '"base_model_name_or_path": null' in content["adapter_config.json"]
    assert content["README.md"] == f"token {SECRET} of {PATH}"
    assert content["chat_template.jinja"] == inside["chat_template.jinja"]
    assert content["model.safetensors"] == inside["model.safetensors"]
    assert content["tokenizer.json"] == inside["tokenizer.json"]


def test_a_secret_in_a_configuration_stops_the_upload(tmp_path):
    (tmp_path / "config.json").write_text(f'{{"note": "{SECRETS["GitHub"]}"}}')
    with pytest.raises(SecretFound, match="config.json, line 1"):
        additions(model_files(tmp_path))


def test_local_model_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    assert all(map(is_local, ("outputs", "/data/models/x", "~/models/x", "./x", "../x")))
    assert not any(map(is_local, ("openai/gpt-oss-20b", "gpt2", "")))
