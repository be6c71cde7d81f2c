"""`router_dtype`, `experts_token_chunk`, `fused_elementwise` and LoRA on experts, as the trainer applies them."""

import copy
import dataclasses

import pytest
import torch
from cpu_settings import ON_CPU
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_policy import byte_tokenizer, tiny_model
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from trl import GRPOTrainer, TrlParser

from trl_gptoss.experts import elementwise
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.trainers.experts_options import prepare_experts

TOKENIZER = byte_tokenizer()
DATA = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(16)])
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ALL = {"router_dtype": "float32", "router_deterministic_top_k": True, "experts_token_chunk": 5}


def config(tmp_path, **settings) -> GptOssGRPOConfig:
    defaults = {
        **ON_CPU,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_steps": 2,
        "max_rollout_tokens": 6,
        "learning_rate": 1e-2,
        "log_trajectories": 0,
    }
    return GptOssGRPOConfig(str(tmp_path), **{**defaults, **settings})


def length_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 11) for ids in completion_ids]


def policy(dtype: torch.dtype = torch.float32, implementation: str = "gptoss_fused", seed: int = 0) -> PreTrainedModel:
    model = tiny_model(seed, dtype)
    model.set_experts_implementation(implementation)
    return model


def build(tmp_path, model, peft_config=None, **settings) -> GptOssGRPOTrainer:
    return GptOssGRPOTrainer(
        model, length_reward, config(tmp_path, **settings), DATA, processing_class=TOKENIZER, peft_config=peft_config
    )


def lora(**settings) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj"], target_parameters=EXPERTS, init_lora_weights=False, **settings)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))
    return model.eval()(input_ids=ids).logits


def router_calls(model: torch.nn.Module) -> list[tuple[GptOssTopKRouter, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(router, hidden states, scores, indices) of one forward, per layer."""
    calls: list[tuple[GptOssTopKRouter, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    handles = [
        module.register_forward_hook(lambda m, i, o: calls.append((m, i[0], o[1], o[2])))
        for module in model.modules()
        if isinstance(module, GptOssTopKRouter)
    ]
    logits(model)
    for handle in handles:
        handle.remove()
    return calls


def score_error(call: tuple[GptOssTopKRouter, torch.Tensor, torch.Tensor, torch.Tensor]) -> float:
    """Largest difference of the scores from the formula in float64 on the same hidden states."""
    router, hidden, scores, indices = call
    exact = hidden.double() @ router.weight.double().T + router.bias.double()
    chosen = exact.sort(dim=-1, descending=True).values[:, : router.top_k].exp()
    expected = chosen / chosen.sum(dim=-1, keepdim=True)
    assert torch.allclose(exact.gather(1, indices).exp().sum(), chosen.sum(), rtol=1e-2)
    return (scores.double() - expected).abs().max().item()


# ---- router ----


@pytest.mark.parametrize("implementation", ["gptoss_fused", "grouped_mm", "eager"])
def test_router_in_float32_of_a_bf16_model(tmp_path, implementation):
    model = policy(torch.bfloat16, implementation)
    before = [score_error(call) for call in router_calls(model)]
    assert min(before) > 1e-4  # control: bf16 scores are not those of the formula
    trainer = build(tmp_path, model, router_dtype="float32")
    after = router_calls(trainer.model)
    assert len(after) == 2 and all(call[2].dtype == torch.float32 for call in after)
    assert max(score_error(call) for call in after) < 1e-6
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    trainer.train()


def test_equal_logits_go_to_the_lower_index(tmp_path):
    model = policy()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, GptOssTopKRouter):
                module.weight.zero_()
                module.bias.copy_(torch.tensor([0.0, 1.0, 1.0, 1.0]))
    trainer = build(tmp_path, model, router_deterministic_top_k=True)
    for _, _, _, indices in router_calls(trainer.model):
        assert indices.unique(dim=0).tolist() == [[1, 2]]


def test_a_model_that_was_set_up_by_hand_keeps_its_settings(tmp_path):
    from trl_gptoss.routing import set_router_options

    model = policy(torch.bfloat16)
    set_router_options(model, router_dtype="float32")
    trainer = build(tmp_path, model)
    assert all(call[2].dtype == torch.float32 for call in router_calls(trainer.model))


# ---- tiles ----


def test_chunked_training_equals_unchunked(tmp_path):
    trained = {}
    for chunk in (None, 5):
        trainer = build(tmp_path, policy(), experts_token_chunk=chunk, optim="sgd", learning_rate=1.0)
        initial = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        trainer.train()
        trained[chunk] = {n: p.detach() - initial[n] for n, p in trainer.model.named_parameters()}
        [found] = {
            vars(m.config).get("experts_token_chunk") for m in trainer.model.modules() if type(m) is GptOssExperts
        }
        assert found == chunk
    moved = [n for n, delta in trained[None].items() if delta.abs().max() > 0]
    assert any("gate_up_proj" in n for n in moved) and any("sinks" in n for n in moved)
    for name, delta in trained[None].items():
        error = (trained[5][name] - delta).norm() / delta.norm().clamp(min=1e-3)
        assert error < 1e-3, (name, error)


def test_tiles_reach_the_kernel(tmp_path, monkeypatch):
    from trl_gptoss.experts import forward

    seen, real = [], forward.fused_experts

    def spy(*args):
        seen.append(args[-1])
        return real(*args)

    monkeypatch.setattr(forward, "fused_experts", spy)
    logits(build(tmp_path, policy(), experts_token_chunk=5).model)
    logits(build(tmp_path, policy()).model)
    assert seen == [5, 5, 0, 0]


# ---- every way to hand over a model ----


@pytest.mark.parametrize("source", ["id", "instance", "peft_config", "peft_model"])
def test_options_reach_every_kind_of_model_before_the_optimizer(tmp_path, monkeypatch, source):
    model, peft_config = policy(torch.bfloat16), None
    if source == "id":
        model.save_pretrained(tmp_path / "model")
        model = str(tmp_path / "model")
    elif source == "peft_config":
        peft_config = lora()
    elif source == "peft_model":
        model = get_peft_model(model, lora())
    trainer = build(tmp_path / "out", model, peft_config, **ALL)
    assert trainer.optimizer is None and trainer.model_wrapped is trainer.model
    assert max(score_error(call) for call in router_calls(trainer.model)) < 1e-6
    experts = [m for m in trainer.model.modules() if isinstance(m, GptOssExperts)]
    assert len(experts) == 2 and all(m.config.experts_token_chunk == 5 for m in experts)


def test_the_reference_model_computes_like_the_policy(tmp_path):
    policy(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = type(policy()).from_pretrained(
        tmp_path / "model", dtype=torch.bfloat16, experts_implementation="gptoss_fused", attn_implementation="sink_fa3"
    )
    trainer = build(tmp_path / "out", model, beta=0.1, **ALL)
    assert trainer.ref_model is not None
    assert max(score_error(call) for call in router_calls(trainer.ref_model)) < 1e-6
    assert torch.equal(logits(trainer.ref_model), logits(trainer.model))
    trainer.train()
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kl[0] == 0.0 < kl[-1]


# ---- LoRA on experts ----


def test_lora_on_experts_trains_saves_loads_in_peft_and_merges(tmp_path):
    base = policy()
    trainer = build(tmp_path, copy.deepcopy(base), lora(), optim="sgd", learning_rate=1.0)
    wrappers = [m for m in trainer.model.modules() if type(m).__name__ == "ParamWrapper"]
    assert [type(m).__qualname__.split(".")[0] for m in wrappers] == ["_fused_wrapper"] * 4
    initial = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, initial[n])}
    assert moved and all("lora_" in n for n in moved)
    assert {n for n in initial if "experts" in n and "lora_" in n} <= moved

    trainer.save_model(tmp_path / "adapter")
    expected = logits(trainer.model)
    plain = copy.deepcopy(base)
    plain.set_experts_implementation("eager")
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-5)
    with loaded.disable_adapter():
        assert (logits(loaded) - expected).abs().max() > 1e-2  # control: the adapter matters
    merged = trainer.model.merge_and_unload()
    assert type(merged) is type(base) and merged.state_dict().keys() == base.state_dict().keys()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)


def test_lora_on_experts_resumes(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    whole = build(tmp_path, policy(), lora(), **settings)
    whole.train()
    again = build(tmp_path, policy(), lora(), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for (name, left), right in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(left, right), name


def test_other_experts_implementations_keep_pefts_own_path(tmp_path):
    trainer = build(tmp_path, policy(implementation="grouped_mm"), lora())
    assert all("_fused" not in type(m).__qualname__ for m in trainer.model.modules())
    trainer.train()


def log_ratios(tmp_path, monkeypatch, dtype: torch.dtype, on_policy: str) -> list[float]:
    """Largest |log ratio| in TRL's loss, per micro-batch before the first optimizer step; attention drops out."""
    ratios, loss, exp = [], GRPOTrainer._compute_loss, torch.exp

    def spy_loss(this, model, inputs):
        shape, seen = inputs["completion_ids"].shape, []

        def spy_exp(x, *args, **kwargs):
            if x.shape == shape:
                seen.append(x.detach())
            return exp(x, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "exp", spy_exp)
            result = loss(this, model, inputs)
        [log_ratio] = seen  # without a KL term the loss takes one exponential of this shape
        ratios.append((log_ratio * inputs["completion_mask"]).abs().max().item())
        return result

    model = tiny_model(dtype=dtype, attention_dropout=0.2)
    model.set_experts_implementation("gptoss_fused")
    schedule = {"steps_per_generation": 2, "gradient_accumulation_steps": 3, "max_steps": 1}  # TRL recomputes here
    settings = {**ALL, **schedule, "on_policy": on_policy, "bf16": dtype == torch.bfloat16}
    settings["gradient_checkpointing"] = True  # TRL's default
    trainer = build(tmp_path, model, lora(), **settings)
    with monkeypatch.context() as patch:
        patch.setattr(GRPOTrainer, "_compute_loss", spy_loss)
        trainer.train()
    return ratios


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ratio_stays_exactly_one(tmp_path, monkeypatch, dtype):
    assert log_ratios(tmp_path, monkeypatch, dtype, "auto") == [0.0, 0.0, 0.0]
    assert max(log_ratios(tmp_path, monkeypatch, dtype, "off")) > 1e-3  # control


# ---- refusals ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"router_dtype": "float16"}, "router_dtype is 'float16', expected 'float32'"),
        ({"experts_token_chunk": 0}, "experts_token_chunk is 0, it must be at least 1"),
        ({"experts_token_chunk": -8}, "experts_token_chunk is -8"),
    ],
)
def test_bad_values(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


@pytest.mark.parametrize(
    "option",
    [
        {"router_dtype": "float32"},
        {"router_deterministic_top_k": True},
        {"experts_token_chunk": 8},
        {"fused_elementwise": True},
    ],
)
@pytest.mark.parametrize("by_id", [False, True])
def test_other_models_are_refused(tmp_path, option, by_id):
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=300,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    )
    if by_id:
        model.save_pretrained(tmp_path / "model")
        model = str(tmp_path / "model")
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.* no effect on this model of type 'qwen3'"):
        build(tmp_path / "out", model, **option)
    build(tmp_path / "out", model)  # control: without it the model is welcome


def test_tiles_need_our_experts(tmp_path):
    with pytest.raises(ValueError, match="no effect on 'grouped_mm'"):
        build(tmp_path, policy(implementation="grouped_mm"), experts_token_chunk=8)


def test_fused_elementwise_says_that_it_needs_cuda(tmp_path):
    with pytest.raises(ValueError, match="needs a CUDA device"):
        build(tmp_path, policy(), fused_elementwise=True)


def test_fused_elementwise_looks_at_where_the_model_will_be(tmp_path, monkeypatch):
    """Under FSDP and DeepSpeed the model is still on the CPU when the trainer is made."""
    monkeypatch.setattr(elementwise, "_require_liger", lambda: None)
    monkeypatch.setattr(elementwise.modeling_gpt_oss, "apply_rotary_pos_emb", lambda: None)
    monkeypatch.setattr(elementwise, "_fused_rotary", lambda original: original)
    models = policy(), policy()
    prepare_experts(config(tmp_path, fused_elementwise=True), *models, torch.device("cuda", 0))
    for model in models:
        assert sum(isinstance(m, elementwise.FusedRMSNorm) for m in model.modules()) == 5


def test_fields_are_parsed_and_documented(tmp_path):
    arguments = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
    options = ["--router_dtype", "float32", "--router_deterministic_top_k", "true", "--experts_token_chunk", "4096"]
    [parsed] = TrlParser(GptOssGRPOConfig).parse_args_and_config([*arguments, *options])
    assert (parsed.router_dtype, parsed.router_deterministic_top_k, parsed.experts_token_chunk) == (
        "float32",
        True,
        4096,
    )
    [parsed] = TrlParser(GptOssGRPOConfig).parse_args_and_config(arguments)
    assert (parsed.router_dtype, parsed.experts_token_chunk, parsed.fused_elementwise) == (None, None, False)
    fields = {f.name: f for f in dataclasses.fields(GptOssGRPOConfig)}
    for name in (*ALL, "fused_elementwise"):
        assert fields[name].metadata["help"] and f"        {name} (`" in GptOssGRPOConfig.__doc__
