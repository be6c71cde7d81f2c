"""Secrets and local paths: what is found, and what must not be taken for one."""

import json
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
    "Hugging Face in a word": "hf_" + "jwt_AbCdEfGhIjKlMnOpQrStUvWx",
    "Stripe": "sk_live_" + "abcdefghijklmnop1234",
    "npm": "npm_" + "abcdefghijklmnopqrstuvwxyz0123456789",
    "PyPI": "pypi-" + "AgEIcHlwaS5vcmcCJDEyMzQ1Njc4",
    "HTTP header": "Bearer " + "abcdefghijkl0123456789",
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
    "C:/Users/me/model",
    "file:/scratch/x",
    "/home/münch/модель/x",
)
NAMED = (  # (before, value, after)
    ("WANDB_API_KEY=", "0123456789abcdef0123456789abcdef01234567", " python train.py"),
    ('{"aws_secret_access_key": "', "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLE", '"}'),
    ("aws_secret_access_key = ", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLE", ""),
    ("https://example.com/x?access_token=", "abcdefgh12345678", "&page=2"),
    ("password: ", "hunter2hunter2", ", user: me"),
    ("| `api_key` | `", "0123456789abcdef", "` |"),
    ('{\\"api_key\\": \\"', "0123456789abcdef", '\\"}'),  # JSON in JSON
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
    "password: string, api_key=YOUR_API_KEY, access_token: null",
    '{"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token_id": 199999}',
    "https://example.com:8443/a/b/c and s3://bucket/a/b",
    "hub_token of the Bearer, num_tokens=12345678",
)


@pytest.mark.parametrize("kind", SECRETS)
def test_secrets_are_removed_and_refused(kind):
    text = f"learning_rate: 1e-6\nkey: {SECRETS[kind]} # do not share"
    assert redact(text) == f"learning_rate: 1e-6\nkey: {SECRET} # do not share"
    with pytest.raises(SecretFound, match="config.json, line 2") as raised:
        check_no_secret("config.json", text)
    assert SECRETS[kind] not in str(raised.value)


@pytest.mark.parametrize(("before", "value", "after"), NAMED)
def test_values_are_secrets_by_the_name_before_them(before, value, after):
    assert redact(before + value + after) == before + SECRET + after
    with pytest.raises(SecretFound):
        check_no_secret("x.json", before + value + after)


def test_a_token_inside_a_word():
    assert redact("my" + SECRETS["Hugging Face"] + "!") == f"my{SECRET}!"


@pytest.mark.parametrize("quote", "\"'`")
@pytest.mark.parametrize("path", ["/home/John Smith/models/x y", r"C:\Users\John Smith\x", "~/my models/x"])
def test_a_path_with_spaces_in_quotation_marks(path, quote):
    assert redact(f"from {quote}{path}{quote} on") == f"from {quote}{PATH}{quote} on"


def test_a_path_behind_a_host_name():
    assert redact("rsync me@myhost:/data/x/y") == f"rsync me@myhost:{PATH}"


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


def clean(folder: Path) -> str:
    (operation,) = additions(model_files(folder))
    with operation.as_file() as opened:
        return opened.read().decode()


def test_json_is_looked_at_without_its_escapes(tmp_path):
    """A slash, a letter or a quotation mark of a JSON string may be written as an escape; the file stays JSON."""
    file = tmp_path / "config.json"
    file.write_text(
        r'{"a": "\/home\/me\/x", "b": ["{\"p\": \"/home/me/y\"}", "/home/John Smith/z", 7], "_name": null}'
    )
    assert json.loads(clean(tmp_path)) == {"a": PATH, "b": [f'{{"p": "{PATH}"}}', PATH, 7], "_name": None}
    file.write_text(r'{"a": "\u002fhome\u002fme\u002fx", "inner": {"base_model_name_or_path": "./here"}}')
    assert json.loads(clean(tmp_path)) == {"a": PATH, "inner": {"base_model_name_or_path": None}}
    untouched = '{"layer_types":["full_attention"],   "rope_theta":1e4,"x":1.10}'
    file.write_text(untouched)
    assert clean(tmp_path) == untouched
    file.write_text('{"note": "\\u0068' + SECRETS["Hugging Face"][1:] + '"}')
    with pytest.raises(SecretFound, match="config.json, decoded, line 2"):
        clean(tmp_path)
    file.write_text("{broken, /home/me/x")
    assert clean(tmp_path) == f"{{broken, {PATH}"


def test_a_secret_in_a_configuration_stops_the_upload(tmp_path):
    (tmp_path / "config.json").write_text(f'{{"note": "{SECRETS["GitHub"]}"}}')
    with pytest.raises(SecretFound, match="config.json, line 1"):
        additions(model_files(tmp_path))


def test_local_model_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    assert all(map(is_local, ("outputs", "/data/models/x", "~/models/x", "./x", "../x")))
    assert not any(map(is_local, ("openai/gpt-oss-20b", "gpt2", "")))
