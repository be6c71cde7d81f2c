"""`trl-gptoss export`: adapters and checkpoints become models; what cannot work is one line."""

import httpx2
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_policy import byte_tokenizer, tiny_model
from transformers import AutoTokenizer, GptOssForCausalLM, Mxfp4Config

from trl_gptoss import merge_and_push
from trl_gptoss.cli import main
from trl_gptoss.hub.adapters import merged_weights
from trl_gptoss.trainers.rollout_weights import quantised

IDS = torch.tensor([[5, 77, 99, 3, 3, 142, 210, 7, 64, 31, 12, 8]])


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture
def base(tmp_path):
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_an_adapter_becomes_a_model_in_both_formats(base, tmp_path, capsys):
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, init_lora_weights=False, target_modules=["q_proj"], target_parameters=["mlp.router.weight"]
    )
    model = get_peft_model(GptOssForCausalLM.from_pretrained(base), config)
    model.save_pretrained(tmp_path / "adapter")
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "out"), "--save-format", "both"]) == 0
    assert capsys.readouterr().out.strip().endswith(str(tmp_path / "out"))
    with merged_weights(model):
        expected = logits(model)
    assert torch.equal(logits(GptOssForCausalLM.from_pretrained(tmp_path / "out")), expected)
    with merged_weights(model, quantised):
        expected = logits(model)
    place = tmp_path / "out/mxfp4"
    again = GptOssForCausalLM.from_pretrained(place, quantization_config=Mxfp4Config(dequantize=True))
    assert torch.equal(logits(again), expected)
    assert len(AutoTokenizer.from_pretrained(place)) == len(byte_tokenizer())


@pytest.mark.slow
def test_there_and_back(base, tmp_path, caplog):
    assert main(["export", str(base), str(tmp_path / "small"), "--save-format", "mxfp4"]) == 0
    assert main(["export", str(tmp_path / "small"), str(tmp_path / "large")]) == 0
    assert "MXFP4 weights are dequantised" in caplog.text
    with merged_weights(model := GptOssForCausalLM.from_pretrained(base), quantised):
        assert torch.equal(logits(GptOssForCausalLM.from_pretrained(tmp_path / "large")), logits(model))


def test_problems_are_one_line(base, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert main(["export", str(base), str(tmp_path / "full")]) == 1
    assert "not an empty folder" in capsys.readouterr().err
    assert main(["export", str(base), str(tmp_path / "out"), "--base", "x"]) == 1
    assert "--base is for adapters" in capsys.readouterr().err
    for device, problem in (
        ("gpu0", "no device of torch"),
        ("meta", "cannot hold the weights"),
        ("cuda", "finds no CUDA GPU"),
    ):
        if device != "cuda" or not torch.cuda.is_available():
            with pytest.raises(SystemExit):
                main(["export", str(base), str(tmp_path / "out"), "--device", device])
            assert problem in capsys.readouterr().err
    config = LoraConfig(r=4, target_modules=["q_proj"])
    get_peft_model(tiny_model(), config).save_pretrained(tmp_path / "lost")
    assert main(["export", str(tmp_path / "lost"), str(tmp_path / "out")]) == 1
    assert "say where its base model is" in capsys.readouterr().err


def test_an_mxfp4_checkpoint_becomes_both(base, tmp_path):
    """transformers empties the state dict of such a model while it saves it."""
    assert main(["export", str(base), str(tmp_path / "small"), "--save-format", "mxfp4"]) == 0
    assert main(["export", str(tmp_path / "small"), str(tmp_path / "out"), "--save-format", "both"]) == 0
    small = GptOssForCausalLM.from_pretrained(tmp_path / "small", quantization_config=Mxfp4Config(dequantize=True))
    place = tmp_path / "out/mxfp4"
    again = GptOssForCausalLM.from_pretrained(place, quantization_config=Mxfp4Config(dequantize=True))
    assert torch.equal(logits(again), logits(small))
    assert torch.equal(logits(GptOssForCausalLM.from_pretrained(tmp_path / "out")), logits(small))


def test_half_written_files_and_adapters_of_other_models_are_one_line(base, tmp_path, capsys):
    def error(source, *arguments):
        assert main(["export", str(source), str(tmp_path / "out"), *arguments]) == 1
        return capsys.readouterr().err

    config = LoraConfig(r=4, target_modules=["q_proj"])
    adapter = tmp_path / "adapter"
    get_peft_model(GptOssForCausalLM.from_pretrained(base), config).save_pretrained(adapter)
    tiny_model(hidden_size=96, dtype=torch.bfloat16).save_pretrained(tmp_path / "wider")
    found = error(adapter, "--base", str(tmp_path / "wider"))
    assert f"does not fit its base model {tmp_path / 'wider'}" in found and "size mismatch" in found

    for folder, name in ((base, "model.safetensors"), (adapter, "adapter_model.safetensors")):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])
        assert "is damaged, or was not written to its end" in error(folder)
        (folder / name).write_bytes(whole)
    (adapter / "adapter_model.safetensors").unlink()
    assert "but no adapter_model.safetensors" in error(adapter)
    (adapter / "adapter_model.safetensors").touch()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LO')
    assert f"the adapter_config.json of {adapter} is no JSON" in error(adapter)
    assert not (tmp_path / "out").exists()


def test_an_id_without_a_connection_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["export", "someone/something", str(tmp_path / "out")]) == 1
    assert "couldn't find them in the cached files" in capsys.readouterr().err


def test_a_repository_that_cannot_be_made_is_found_out_before_the_work(base, tmp_path, capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise httpx2.ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    assert main(["export", str(base), str(tmp_path / "out"), "--push-to-hub", "me/model"]) == 1
    assert "there is no connection (Name or service not known)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        main(["export", str(base), str(tmp_path / "out"), "--private"])
    assert "--push-to-hub, which is not given" in capsys.readouterr().err


def test_what_has_no_adapters_is_refused_before_a_repository_is_made(base, monkeypatch):
    def make(*args, **kwargs):
        raise AssertionError("a repository was made")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", make)
    with pytest.raises(ValueError, match="no adapter_config.json; a whole model is uploaded by trl-gptoss export"):
        merge_and_push(base, "me/model")
    with pytest.raises(ValueError, match="needs a PeftModel, found GptOssForCausalLM"):
        merge_and_push(GptOssForCausalLM.from_pretrained(base), "me/model")
