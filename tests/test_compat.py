"""Every workaround is still needed, and does what it says."""

import inspect
import warnings

import trl.models.utils
from transformers import GptOssConfig, GptOssForCausalLM

from trl_gptoss._compat import silence_renamed_attributes


def test_trl_still_reads_the_old_name_and_the_warning_is_silenced():
    assert ".is_gradient_checkpointing" in inspect.getsource(trl.models.utils)
    config = GptOssConfig(
        num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=1, hidden_size=32, intermediate_size=32,
        head_dim=16, num_attention_heads=2, num_key_value_heads=1, vocab_size=32,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert model.is_gradient_checkpointing is False
        assert [w.category for w in caught] == [FutureWarning]  # the control: without the filter it warns
        silence_renamed_attributes()
        assert model.is_gradient_checkpointing is False
        assert len(caught) == 1
