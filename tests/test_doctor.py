"""Twelve planted faults, each of which has to be named; a healthy pair, which has to pass; and the command."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

sys.path.insert(0, str(Path(__file__).parent / "support"))
from tiny_policy import byte_tokenizer, tiny_model  # noqa: E402

from trl_gptoss import cli  # noqa: E402
from trl_gptoss.doctor import ModelEngine, RecordedEngine, diagnose  # noqa: E402
from trl_gptoss.doctor.scoring import Reading, score  # noqa: E402
from trl_gptoss.harmony import render_prompt  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint():
    """A tiny model in which sinks and biases matter as they do in a trained one."""
    model = tiny_model(initializer_range=0.2).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "router.bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) + 1.0)
    return model


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (80,)]


def parameters(model, ending):
    return [p for name, p in model.named_parameters() if name.endswith(ending)]


@torch.no_grad()
def change(model, ending, value):
    for parameter in parameters(model, ending):
        parameter.copy_(value(parameter))


def pair(checkpoint):
    """Trainer and engine, equal."""
    return copy.deepcopy(checkpoint), copy.deepcopy(checkpoint)


def sinks_zeroed_in_the_trainer(trainer, engine):
    change(trainer, "sinks", torch.zeros_like)


def sinks_stale_in_the_engine(trainer, engine):
    change(trainer, "sinks", lambda p: p + 0.7)


def window_one_short(trainer, engine):
    engine.config.sliding_window = 31
    engine.model.layers[0].self_attn.sliding_window = 31


def rope_base(trainer, engine):
    config = copy.deepcopy(engine.config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 150000.0}
    engine.model.rotary_emb = GptOssRotaryEmbedding(config)


def router_bias_dropped(trainer, engine):
    change(engine, "router.bias", torch.zeros_like)


def router_bias_stale(trainer, engine):
    change(trainer, "router.bias", lambda p: p.flip(0))


def experts_swapped(trainer, engine):
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        change(engine, f"layers.1.mlp.experts.{name}", lambda p: p[[0, 3, 2, 1]])


MODEL_FAULTS = {
    sinks_zeroed_in_the_trainer: ("sinks", "the trainer's sinks are all zero"),
    sinks_stale_in_the_engine: ("sinks", "still has the sinks of the checkpoint"),
    window_one_short: ("window", "sliding window is 31"),
    rope_base: ("rope", "rope base is 150000"),
    router_bias_dropped: ("router bias", "has no bias"),
    router_bias_stale: ("router bias", "still has the router bias of the checkpoint"),
    experts_swapped: ("experts", "experts 1 and 3 of layer 1"),
}


def slow_but(quick, names):
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("plant", slow_but((sinks_stale_in_the_engine, experts_swapped), MODEL_FAULTS))
def test_faults_of_the_model_are_named(checkpoint, rows, plant):
    trainer, engine = pair(checkpoint)
    plant(trainer, engine)
    found = diagnose(trainer, ModelEngine(engine), rows, reference=checkpoint.state_dict())
    culprit, finding = MODEL_FAULTS[plant]
    assert not found.healthy and found.names == [culprit]
    assert finding in found.culprits[0].fault.finding and found.culprits[0].difference < found.threshold
    assert f"culprit: {culprit}" in found.report() and "fix: " in found.report()


READINGS = {
    "lm_head in bf16": (
        Reading(head_dtype=torch.bfloat16),
        Reading(),
        "LM head dtype",
        "LM head computes in bfloat16",
    ),
    "temperature not divided": (Reading(), Reading(temperature=0.7), "temperature", "are those of temperature 1 "),
    "top-p truncation": (Reading(top_p=0.9), Reading(), "top-p", "the nucleus of 0.9"),
}


@pytest.mark.parametrize("kind", slow_but(("top-p truncation",), READINGS))
def test_faults_of_the_reading_are_named(checkpoint, rows, kind):
    theirs, own, culprit, finding = READINGS[kind]
    trainer, engine = pair(checkpoint)
    found = diagnose(trainer, ModelEngine(engine, theirs), rows, reference=checkpoint.state_dict(), reading=own)
    assert found.names == [culprit] and finding in found.culprits[0].fault.finding


def test_bf16_against_fp32_is_named(checkpoint, rows):
    trainer, engine = pair(checkpoint)
    for parameter in engine.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    found = diagnose(trainer, ModelEngine(engine), rows, reference=checkpoint.state_dict())
    assert found.names == ["dtype"] and "computes in bfloat16" in found.culprits[0].fault.finding


@pytest.mark.slow
def test_a_stale_adapter_is_named(checkpoint, rows):
    trainer, engine = pair(checkpoint)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    trainer = get_peft_model(trainer, lora)
    found = diagnose(trainer, ModelEngine(engine), rows, reference=checkpoint.state_dict())
    assert found.names == ["LoRA"] and "without the adapter" in found.culprits[0].fault.finding


MESSAGES = {"tokenizer": byte_tokenizer()}


def rendered(**options):
    return lambda messages: render_prompt(messages, MESSAGES["tokenizer"], **options)


def test_template_drift_is_named(checkpoint, rows):
    trainer, engine = pair(checkpoint)
    ours = rendered(date="2026-01-02")
    drifted = ModelEngine(engine, render=rendered(date="2026-01-03"))
    found = diagnose(trainer, drifted, rows, render=ours)
    assert not found.healthy and found.names == ["chat template"]
    assert "differ from token" in found.report() and found.culprits == []
    assert diagnose(trainer, ModelEngine(engine, render=ours), rows, render=ours).healthy


def test_a_healthy_pair_passes(checkpoint, rows):
    trainer, engine = pair(checkpoint)
    found = diagnose(trainer, ModelEngine(engine), rows, reference=checkpoint.state_dict())
    assert found.healthy and found.names == [] and found.difference == 0.0
    assert "healthy" in found.report() and "culprit" not in found.report()


@pytest.mark.slow
def test_two_faults_at_once_are_both_named(checkpoint, rows):
    trainer, engine = pair(checkpoint)
    router_bias_dropped(trainer, engine)
    sinks_stale_in_the_engine(trainer, engine)
    found = diagnose(trainer, ModelEngine(engine), rows, reference=checkpoint.state_dict())
    assert not found.healthy
    # One hides the other where neither explains four fifths alone; then the table still has both at its top.
    assert {"sinks", "router bias"} <= {*found.names, *(t.fault.culprit for t in found.trials[:6])}


def test_what_it_does_not_know_is_said_not_to_be_explained(checkpoint, rows):
    trainer, engine = pair(checkpoint)
    torch.manual_seed(0)
    change(engine, "o_proj.bias", lambda p: torch.randn_like(p))
    found = diagnose(trainer, ModelEngine(engine), rows, reference=checkpoint.state_dict())
    assert not found.healthy and "not explained" in found.report()
    assert any("o_proj.bias" in name for name in found.weights)


@pytest.mark.slow
def test_the_trainer_is_left_as_it_was(checkpoint, rows):
    trainer, engine = pair(checkpoint)
    before = {name: p.clone() for name, p in trainer.state_dict().items()}
    rope = trainer.model.rotary_emb
    window_one_short(trainer, engine)
    router_bias_dropped(trainer, engine)
    diagnose(trainer, ModelEngine(engine), rows, reference=checkpoint.state_dict())
    assert all(torch.equal(p, before[name]) for name, p in trainer.state_dict().items())
    assert trainer.config.sliding_window == 32 and trainer.model.rotary_emb is rope


def test_scores_against_a_plain_forward(checkpoint, rows):
    [own] = score(checkpoint, rows, Reading(temperature=0.7))
    with torch.no_grad():
        logits = checkpoint(torch.tensor([rows[0]])).logits[0].double() / 0.7
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(rows[0])[1:, None])[:, 0]
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)


def test_recorded_log_probs(checkpoint, rows, tmp_path):
    path = tmp_path / "engine.jsonl"
    theirs = [p.tolist() for p in score(checkpoint, rows, Reading())]
    lines = [json.dumps({"ids": ids, "logps": logps}) for ids, logps in zip(rows, theirs)]
    path.write_text("\n".join(lines), encoding="utf-8")
    engine = RecordedEngine(path)
    assert engine.rows == rows and diagnose(checkpoint, engine, engine.rows).healthy
    path.write_text(json.dumps({"ids": [1, 2], "logps": [0.0, 0.0]}), encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: 2 ids need 1 log-probs, found 2"):
        RecordedEngine(path)
    path.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: expected an object with ids and logps"):
        RecordedEngine(path)


@pytest.fixture
def saved(checkpoint, tmp_path):
    checkpoint.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_the_command(saved, checkpoint, rows, tmp_path, capsys):
    same = ["--attention", "eager", "--experts", "grouped_mm", "--dtype", "float32", "--tokens", "96"]
    assert cli.main(["doctor", saved, *same, "--engine-experts", "eager"]) == 0
    assert "healthy" in capsys.readouterr().out
    assert cli.main(["doctor", saved, *same, "--engine-dtype", "bfloat16"]) == 1
    assert "culprit: dtype" in capsys.readouterr().out
    path = tmp_path / "engine.jsonl"
    logps = [p.tolist() for p in score(checkpoint, rows, Reading(top_p=0.8))]
    path.write_text("\n".join(json.dumps({"ids": i, "logps": p}) for i, p in zip(rows, logps)), encoding="utf-8")
    assert cli.main(["doctor", saved, *same, "--engine-logps", str(path)]) == 1
    assert "the nucleus of 0.8" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["doctor", saved, "--engine-logps", str(path), "--engine-url", "http://localhost:1"])
    with pytest.raises(SystemExit):
        cli.main(["doctor", saved, "--engine-logps", str(path), "--engine-dtype", "bfloat16"])


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (["--temperature", "0"], "--temperature is 0.0"),
        (["--top-p", "2"], "--top-p is 2.0"),
        (["--threshold", "-1"], "--threshold is -1.0"),
        (["--engine-url", "localhost:8000"], "expected something like http://localhost:8000"),
    ],
)
def test_numbers_and_addresses_that_mean_nothing_are_one_line(wrong, problem, capsys):
    assert cli.main(["doctor", "anything", *wrong]) == 1
    err = capsys.readouterr().err
    assert problem in err and err.count("\n") == 1


def test_files_of_another_model_are_one_line(saved, tmp_path, capsys):
    path = tmp_path / "engine.jsonl"
    path.write_text(json.dumps({"ids": [1, 2, 10**6], "logps": [-1.0, -2.0]}), encoding="utf-8")
    same = ["--attention", "eager", "--experts", "grouped_mm", "--dtype", "float32"]
    assert cli.main(["doctor", saved, *same, "--engine-logps", str(path)]) == 1
    assert "has ids that" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["doctor", saved, "--device", "gpu"])
    assert "is no device of torch" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_with_a_server(saved, checkpoint, capsys, monkeypatch):
    """The client stands for a server with another rope; tests/vllm has a real one."""
    engine = copy.deepcopy(checkpoint)
    rope_base(None, engine)

    class Client:
        def __init__(self, url, server_timeout, request_timeout):
            assert url == "http://localhost:8000"

        def wait(self):
            pass

        def score(self, ids):
            return score(engine, [ids], Reading())[0].tolist()

    monkeypatch.setattr("trl_gptoss.rollouts.vllm.client.VllmClient", Client)
    same = ["--attention", "eager", "--experts", "grouped_mm", "--dtype", "float32", "--tokens", "96"]
    # The engine computes at temperature 1 whatever the run's temperature is, and so does the trainer's side then.
    line = ["doctor", saved, *same, "--temperature", "0.7", "--engine-url", "http://localhost:8000"]
    assert cli.main(line) == 1
    assert "culprit: rope: the engine's rope base is 150000" in capsys.readouterr().out
