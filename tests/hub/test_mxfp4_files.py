"""Checkpoints in MXFP4: what stock transformers reads from them, how they are written, what is refused."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from transformers import GptOssConfig, GptOssForCausalLM, GptOssModel, Mxfp4Config

import trl_gptoss
from trl_gptoss.experts.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from trl_gptoss.hub import mxfp4_files, mxfp4_loading_cost, save_pretrained_mxfp4
from trl_gptoss.hub.publish import replace_mxfp4

# hidden and intermediate sizes differ, so that a wrong transpose has a wrong shape
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "vocab_size": 113,
    "sliding_window": 8,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
GPT_OSS_20B = GptOssConfig(num_hidden_layers=24, num_local_experts=32)
EXPERTS = ("gate_up_proj", "down_proj")
SHARD = "31KB"  # just below the blocks and scales of one gate_up_proj
IDS = [[5, 17, 99, 3, 3, 42, 110, 7, 64, 31, 12, 8]]


def tiny(**changes) -> GptOssForCausalLM:
    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(**{**SIZES, **changes})).eval()


def dequantised(model: GptOssForCausalLM) -> GptOssForCausalLM:
    """`model` with its experts' matrices replaced by what MXFP4 makes of them."""
    for layer in model.model.layers:
        for name in EXPERTS:
            weight = layer.mlp.experts.get_parameter(name)
            packed = quantize_mxfp4(weight.transpose(1, 2))
            weight.data = dequantize_mxfp4(*packed, dtype=weight.dtype).transpose(1, 2).contiguous()
    return model


def load(directory: Path, **kwargs) -> GptOssForCausalLM:
    config = Mxfp4Config(dequantize=True)
    return GptOssForCausalLM.from_pretrained(directory, quantization_config=config, **kwargs).eval()


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {name: opened.get_tensor(name) for name in opened.keys()}
    return found


SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM, Mxfp4Config
directory, ids, out = sys.argv[1], eval(sys.argv[2]), sys.argv[3]
model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=Mxfp4Config(dequantize=True)).eval()
assert not [name for name in sys.modules if name.startswith("trl_gptoss")]
with torch.no_grad():
    torch.save(model(torch.tensor(ids)).logits, out)
"""


def test_stock_transformers_computes_the_logits_of_the_dequantised_weights(tmp_path):
    model = tiny()
    directory = save_pretrained_mxfp4(model, tmp_path / "out", max_shard_size=SHARD)
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(directory), str(IDS), str(tmp_path / "logits")]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    theirs = torch.load(tmp_path / "logits")
    with torch.no_grad():
        unquantised = model(torch.tensor(IDS)).logits
        ours = dequantised(model)(torch.tensor(IDS)).logits
    # another process may sum in another order; that the weights are equal bit for bit is the next test's business
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    assert not torch.allclose(theirs, unquantised, atol=1e-3)


def test_loaded_weights_are_the_dequantised_ones_and_save_again_unchanged(tmp_path):
    model = tiny().to(torch.bfloat16)
    first = save_pretrained_mxfp4(model, tmp_path / "first")
    loaded = load(first)
    assert loaded.dtype == torch.bfloat16
    expected = dequantised(model).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    again = load(save_pretrained_mxfp4(loaded, tmp_path / "second"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_the_layout_is_that_of_gpt_oss(tmp_path):
    saved = tensors(save_pretrained_mxfp4(tiny(), tmp_path / "out", dtype=torch.bfloat16))
    prefix = "model.layers.1.mlp.experts."
    layout = {name.removeprefix(prefix): (t.shape, t.dtype) for name, t in saved.items() if name.startswith(prefix)}
    assert layout == {
        "gate_up_proj_blocks": ((5, 128, 3, 16), torch.uint8),
        "gate_up_proj_scales": ((5, 128, 3), torch.uint8),
        "gate_up_proj_bias": ((5, 128), torch.bfloat16),
        "down_proj_blocks": ((5, 96, 2, 16), torch.uint8),
        "down_proj_scales": ((5, 96, 2), torch.uint8),
        "down_proj_bias": ((5, 96), torch.bfloat16),
    }
    others = {name: tensor for name, tensor in saved.items() if not name.endswith(("_blocks", "_scales"))}
    expected = tiny().state_dict()
    assert others.keys() == {name for name in expected if not name.endswith(EXPERTS)}
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in others.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["GptOssForCausalLM"]
    assert config["quantization_config"] == {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    assert (tmp_path / "out" / "generation_config.json").is_file()


def test_shards_hold_what_the_index_says(tmp_path):
    directory = save_pretrained_mxfp4(tiny(), tmp_path / "out", max_shard_size=SHARD)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 3 and {file.name for file in files} == set(index["weight_map"].values())
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert set(opened.keys()) == {name for name, place in index["weight_map"].items() if place == file.name}
    whole = tensors(save_pretrained_mxfp4(tiny(), tmp_path / "whole"))
    sharded = tensors(directory)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in sharded.values())
    assert whole.keys() == sharded.keys() and all(torch.equal(t, sharded[name]) for name, t in whole.items())
    blocks = {name for name in whole if name.endswith("_blocks")}
    apart = [n for n in blocks if index["weight_map"][n] != index["weight_map"][n.replace("_blocks", "_scales")]]
    assert apart, "no matrix had its blocks and scales in different shards: the case was not tested"


def test_the_model_is_left_as_it_is(tmp_path):
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    save_pretrained_mxfp4(model, tmp_path / "out", dtype=torch.bfloat16)
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_gathered_state_dict_is_what_is_saved(tmp_path):
    other = {name: 2 * tensor for name, tensor in tiny().state_dict().items()}
    loaded = load(save_pretrained_mxfp4(tiny(), tmp_path / "out", state_dict=other))
    assert torch.equal(loaded.lm_head.weight, other["lm_head.weight"])
    assert torch.equal(
        loaded.model.layers[0].mlp.experts.down_proj, 2 * dequantised(tiny()).model.layers[0].mlp.experts.down_proj
    )


def test_tied_embeddings(tmp_path):
    model = tiny(tie_word_embeddings=True)
    directory = save_pretrained_mxfp4(model, tmp_path / "out")
    assert "lm_head.weight" not in tensors(directory)
    assert torch.equal(load(directory).lm_head.weight, model.model.embed_tokens.weight)


def test_files_are_readable_like_any_other(tmp_path):
    directory = save_pretrained_mxfp4(tiny(), tmp_path / "out")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").touch()
    assert stat.S_IMODE(directory.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    plain = stat.S_IMODE((tmp_path / "plain" / "file").stat().st_mode)
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {plain}


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    model = tiny()
    model.model.layers[1].mlp.experts.down_proj.data[4, 63, 95] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\.down_proj: found 1 NaN"):
        save_pretrained_mxfp4(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []

    def disk_full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(mxfp4_files, "save_file", disk_full)
    with pytest.raises(OSError, match="No space"):
        save_pretrained_mxfp4(tiny(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from transformers import GptOssForCausalLM
from trl_gptoss.hub import mxfp4_files, publish
save = mxfp4_files.save_file
def killed_at_the_third(*args, **kwargs):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    save(*args, **kwargs)
calls = []
mxfp4_files.save_file = killed_at_the_third
plan = mxfp4_files._plan_shards
mxfp4_files._plan_shards = lambda weights, dtype, size: plan(weights, dtype, "31KB")
model = GptOssForCausalLM.from_pretrained(sys.argv[1])
publish.replace_mxfp4(model, Path(sys.argv[2]), None)
"""


def test_a_save_that_is_killed_leaves_the_former_checkpoint_and_the_next_one_cleans_up(tmp_path):
    old, new = tiny(), tiny()
    new.lm_head.weight.data += 1
    new.save_pretrained(tmp_path / "source")
    replace_mxfp4(old, tmp_path / "run/mxfp4", None)
    before = tensors(tmp_path / "run/mxfp4")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "source"), str(tmp_path / "run/mxfp4")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    after = tensors(tmp_path / "run/mxfp4")
    assert after.keys() == before.keys() and all(torch.equal(t, before[name]) for name, t in after.items())
    assert len(list((tmp_path / "run").iterdir())) > 1  # what the killed process had written
    replace_mxfp4(new, tmp_path / "run/mxfp4", None)
    assert torch.equal(load(tmp_path / "run/mxfp4").lm_head.weight, new.lm_head.weight)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mxfp4"]


def test_existing_directories(tmp_path):
    (tmp_path / "empty").mkdir()
    assert load(save_pretrained_mxfp4(tiny(), tmp_path / "empty")).config.hidden_size == 96
    with pytest.raises(FileExistsError, match="not an empty directory"):
        save_pretrained_mxfp4(tiny(), tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="not an empty directory"):
        save_pretrained_mxfp4(tiny(), tmp_path / "file")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save_pretrained_mxfp4(tiny(), tmp_path / "link" / "deep" / "out")
    assert (tmp_path / "real" / "deep" / "out" / "config.json").is_file()


def test_other_models_are_refused(tmp_path):
    for model in (nn.Linear(32, 32), GptOssModel(GptOssConfig(**SIZES)), nn.DataParallel(tiny())):
        with pytest.raises(TypeError, match=f"expected a GptOssForCausalLM, found {type(model).__name__}"):
            save_pretrained_mxfp4(model, tmp_path / "out")


def test_adapters_are_refused_until_merged(tmp_path):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(tiny(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TypeError, match="merge_and_unload"):
        save_pretrained_mxfp4(wrapped, tmp_path / "out")
    with pytest.raises(ValueError, match="unknown .*q_proj.*merge adapters"):
        save_pretrained_mxfp4(wrapped.get_base_model(), tmp_path / "out")
    save_pretrained_mxfp4(wrapped.merge_and_unload(), tmp_path / "out")


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size"])
def test_sizes_that_do_not_divide_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"needs a {name} divisible by 32, found 80"):
        save_pretrained_mxfp4(tiny(**{name: 80}), tmp_path / "out")


def test_weights_that_are_not_there_are_refused(tmp_path):
    with torch.device("meta"):
        empty = GptOssForCausalLM(GptOssConfig(**SIZES))
    with pytest.raises(ValueError, match="meta device"):
        save_pretrained_mxfp4(empty, tmp_path / "out")
    weights = tiny().state_dict()
    weights["lm_head.weight"] = torch.empty(0)  # what ZeRO-3 leaves on a rank
    with pytest.raises(ValueError, match=r"expected the whole of lm_head.weight, \(113, 96\), found a Tensor \(0,\)"):
        save_pretrained_mxfp4(tiny(), tmp_path / "out", state_dict=weights)
    del weights["lm_head.weight"]
    with pytest.raises(ValueError, match=r"1 missing \['lm_head.weight'\]"):
        save_pretrained_mxfp4(tiny(), tmp_path / "out", state_dict=weights)


def test_sharded_weights_are_refused(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = tiny()
        model.lm_head = distribute_module(model.lm_head, init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="whole of lm_head.weight, .* found a DTensor .*get_state_dict"):
            save_pretrained_mxfp4(model, tmp_path / "out")
    finally:
        dist.destroy_process_group()


def test_the_sizes_are_those_openai_published():
    with torch.device("meta"):
        weights = GptOssForCausalLM(GPT_OSS_20B).state_dict()
    # `total_size` in the index of openai/gpt-oss-20b
    assert mxfp4_files._plan_shards(weights, torch.bfloat16, "5GB").metadata["total_size"] == 13_761_264_768
    cost = mxfp4_loading_cost(GPT_OSS_20B)
    assert "12.8 GiB in the checkpoint become 39.0 GiB in bfloat16 (20.9 B parameters)" in cost
    assert "up to 4.0 GiB more" in cost
    assert "77.9 GiB in float32" in mxfp4_loading_cost(GPT_OSS_20B, torch.float32)


def test_it_is_exported():
    assert trl_gptoss.save_pretrained_mxfp4 is save_pretrained_mxfp4
