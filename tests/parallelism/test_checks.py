"""What sequence parallelism refuses, and why."""

import os
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from transformers import GptOssConfig

from trl_gptoss.parallelism import (
    check_accelerator,
    check_heads,
    check_sequence_parallel,
    fsdp2_plugin,
    load_sharded,
    sequence_group,
    shard_tokens,
)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64])
def test_sizes_that_share_the_heads_of_gpt_oss(size):
    check_heads(64, 8, size)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(64, 8, 3), (64, 8, 128), (12, 6, 4), (8, 3, 2)])
def test_sizes_that_do_not(heads, kv_heads, size):
    with pytest.raises(ValueError, match="Possible: \\[1"):
        check_heads(heads, kv_heads, size)


def config_of(attention, **settings):
    config = GptOssConfig(num_hidden_layers=2, **settings)
    config._attn_implementation = attention
    return config


def test_attention_that_would_see_one_share_only():
    check_sequence_parallel(config_of("sink_fa3"), 8)
    with pytest.raises(ValueError, match="inside each rank's share"):
        check_sequence_parallel(config_of("flash_attention_4"), 2)


def test_layers_with_a_state():
    config = config_of("sink_fa3")
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="linear_attention.*state"):
        check_sequence_parallel(config, 2)


def accelerator(kind=DistributedType.NO, processes=1, deepspeed=None, fsdp2=True, **sizes):
    theirs = SimpleNamespace(**{"cp_size": 1, "sp_size": 1, "tp_size": 1, **sizes})
    plugin = SimpleNamespace(deepspeed_config={} if deepspeed is None else {"sequence_parallel_size": deepspeed})
    return SimpleNamespace(
        distributed_type=kind,
        num_processes=processes,
        parallelism_config=theirs,
        is_fsdp2=fsdp2,
        state=SimpleNamespace(deepspeed_plugin=plugin),
    )


@pytest.mark.parametrize(
    ("found", "size", "message"),
    [
        (accelerator(cp_size=2), 1, "cp_size=2"),
        (accelerator(sp_size=2), 2, "sp_size=2"),
        (accelerator(tp_size=2), 2, "tensor parallelism"),
        (accelerator(processes=2), 1, "1 processes were started and Accelerate knows of 2"),
        (accelerator(DistributedType.DEEPSPEED, deepspeed=2), 2, "another number of ranks"),
        (accelerator(DistributedType.FSDP, fsdp2=False), 2, "fsdp_version: 2"),
        (accelerator(DistributedType.MEGATRON_LM), 2, "Megatron"),
    ],
)
def test_launches_that_are_refused(found, size, message):
    with pytest.raises(ValueError, match=message):
        check_accelerator(found, size)


@pytest.mark.parametrize("kind", [DistributedType.NO, DistributedType.FSDP, DistributedType.DEEPSPEED])
def test_launches_that_are_not(kind):
    check_accelerator(accelerator(kind), 2)


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_a_launch_that_accelerate_ignored(monkeypatch, variable):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match="nothing would be sharded"):
        check_accelerator(accelerator(), 1)


def test_a_world_without_whole_groups():
    with pytest.raises(ValueError, match="Start a multiple of 2"):
        sequence_group(2, "cpu")


def test_shares_are_equal_and_contiguous():
    group = SimpleNamespace(size=3, rank=1)
    assert shard_tokens(torch.arange(6), group).tolist() == [2, 3]
    assert shard_tokens(torch.arange(12).view(6, 2), group, dim=0).tolist() == [[4, 5], [6, 7]]
    with pytest.raises(ValueError, match="multiple"):
        shard_tokens(torch.arange(7), group)


def test_the_plugin_says_what_the_configuration_file_says(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the plugin writes into it
    plugin = fsdp2_plugin()
    assert plugin.fsdp_version == 2 and plugin.transformer_cls_names_to_wrap == ["GptOssDecoderLayer"]
    assert str(plugin.state_dict_type).endswith("SHARDED_STATE_DICT") and plugin.cpu_ram_efficient_loading
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    assert plugin.mixed_precision_policy.reduce_dtype == torch.float32


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="no complete sharded checkpoint"):
        load_sharded(tmp_path, torch.nn.Linear(1, 1), [])
