"""The trainer around the loop: what reaches the loss, the reward functions, the logs and the disk."""

import asyncio
import functools
import json
import math
import random
import threading

import pandas
import pytest
import torch
from cpu_settings import ON_CPU
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from scripted_backend import HarmonyWriter, ScriptedBackend
from tiny_policy import byte_tokenizer, tiny_model
from transformers import (
    AutoConfig,
    GptOssForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)
from transformers.utils import DocstringParsingException
from trl import GRPOConfig, GRPOTrainer

from trl_gptoss.environments import Environment, PythonTool, not_a_tool
from trl_gptoss.harmony import HarmonyVocabulary
from trl_gptoss.rollouts import tools as rollout_tools
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer, loading
from trl_gptoss.trainers.environments import bind_environments
from trl_gptoss.trainers.harmony_rollouts import check_template_kwargs
from trl_gptoss.trajectory import StopReason

TOKENIZER = byte_tokenizer()
VOCABULARY = HarmonyVocabulary.of(TOKENIZER)
WRITE = HarmonyWriter(TOKENIZER)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first.
        b: second.
    """
    return a + b


def length_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 11) for ids in completion_ids]


def config(output_dir, cls=GptOssGRPOConfig, **settings):
    settings = {
        **ON_CPU,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_steps": 2,
        "learning_rate": 1e-2,
        **settings,
    }
    return cls(str(output_dir), **settings)


def rows(n=16, **columns):
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"add {i}"}], **{k: v(i) for k, v in columns.items()}}
            for i in range(n)
        ]
    )


def build(output_dir, reward=length_reward, script=None, data=None, model=None, **kwargs):
    names = ("tools", "environment_factory", "eval_dataset", "peft_config", "processing_class", "rollout_func")
    settings = {k: v for k, v in kwargs.items() if k not in names}
    rest = {"processing_class": TOKENIZER, **{k: v for k, v in kwargs.items() if k in names}}
    if script is None:
        settings.setdefault("max_rollout_tokens", 6)
    else:
        settings.setdefault("max_rollout_tokens", 400)
    trainer = GptOssGRPOTrainer(model or tiny_model(), reward, config(output_dir, **settings), data or rows(), **rest)
    if script is not None:
        trainer._engine.backend = ScriptedBackend(script)
    return trainer


def tool_results(prompt):
    starts = [i for i, t in enumerate(prompt) if t == VOCABULARY.start]
    return sum(VOCABULARY.decode(prompt[i + 1 : i + 10]).startswith("functions") for i in starts)


def call_then_answer(prompt, rng: random.Random):
    done = tool_results(prompt)
    if done < rng.choice((1, 2)):
        return WRITE.analysis("hm") + WRITE.call("add", a=rng.randrange(99), b=done)
    return WRITE.final(str(rng.randrange(200)))


def logged(trainer, key):
    return [e[key] for e in trainer.state.log_history if key in e]


def test_what_is_trained_on_is_what_was_sampled(tmp_path, monkeypatch):
    trained = []
    loss = GRPOTrainer._compute_loss

    def keep(this, model, inputs):
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        for i in range(len(mask)):
            prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
            completion = inputs["completion_ids"][i]
            width = int(inputs["completion_mask"][i].sum())
            trained.append((prompt, completion[:width].tolist(), mask[i][:width].tolist()))
        return loss(this, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", keep)
    trainer = build(tmp_path, script=call_then_answer, tools=[add], steps_per_generation=2, max_steps=4)
    trainer.train()
    backend = trainer._engine.backend
    assert len(trained) == 4 * 8
    # Each row is the chain of one record per turn: prompt + mask-1 ids of the first turn, and so on.
    records = {(prompt, ids) for calls in backend.calls for prompt, _, ids in calls}
    used = set()
    for prompt, completion, mask in trained:
        position = 0
        while position < len(completion):
            assert mask[position] == 1
            end = position
            while end < len(mask) and mask[end] == 1:
                end += 1
            record = (tuple(prompt + completion[:position]), tuple(completion[position:end]))
            assert record in records
            used.add(record)
            position = end
            while position < len(mask) and mask[position] == 0:
                position += 1
        assert mask[-1] == 1
    assert used == records  # everything sampled is trained on
    assert any(0 in mask for _, _, mask in trained)


def test_reward_functions_get_trajectories_and_messages(tmp_path):
    seen = []

    def reward(prompts, completions, completion_ids, trajectories, answer, trainer_state, **kwargs):
        seen.append((prompts, completions, completion_ids, trajectories, answer))
        return [1.0] * len(prompts)

    data = rows(answer=lambda i: f"a{i}")
    build(tmp_path, reward, script=call_then_answer, tools=[add], data=data, max_steps=1).train()
    [(prompts, completions, completion_ids, trajectories, answer)] = seen
    assert [t.completion_ids for t in trajectories] == completion_ids
    for prompt, completion, trajectory, expected in zip(prompts, completions, trajectories, answer):
        assert prompt[0]["content"].removeprefix("add ") == expected.removeprefix("a")
        assert f"{prompt[0]['content']}<|end|><|start|>assistant" in VOCABULARY.decode(trajectory.prompt_ids)
        roles = [(m["role"], m.get("channel")) for m in completion]
        turns = len(trajectory.turns) - 1
        assert roles == [("assistant", "analysis"), ("assistant", "commentary"), ("tool", None)] * turns + [
            ("assistant", "final")
        ]
        assert trajectory.stop_reason == StopReason.FINAL and completion[-1]["content"] == trajectory.final_text


def test_metrics_of_a_known_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_tools, "GRACE", 0.05)
    release = threading.Event()

    def wait() -> str:
        """Never answers."""
        release.wait(30)
        return "late"

    scripts = [
        lambda p: WRITE.call("add", a=1, b=2) if not tool_results(p) else WRITE.final("3"),  # a call and an answer
        lambda p: WRITE.call("nothing") if not tool_results(p) else WRITE.final("3"),  # a failed call
        lambda p: WRITE.call("wait") if not tool_results(p) else WRITE.final("3"),  # a call that hangs
        lambda p: WRITE.final("3"),
        lambda p: WRITE.text("prose"),  # malformed and cut off
        lambda p: WRITE.text("z" * 500),  # the same, at the limit
        lambda p: WRITE.call("add", a=1, b=2),  # calls until its turns are used up
        lambda p: WRITE.analysis("thinks") + WRITE.final("3"),
    ]
    order = iter(scripts)
    assigned = {}

    def script(prompt, rng):
        # one group of prompts only: rollouts are told apart by the order of the first round
        number = len(assigned)
        if number < 8:
            assigned[number] = next(order)
            return assigned[number](prompt)
        # later rounds hold the running rollouts in order: 0, 1, 2, 6
        later = [0, 1, 2, 6]
        index = script.later % 4
        script.later += 1
        return assigned[later[index]](prompt)

    script.later = 0
    trainer = build(
        tmp_path,
        script=script,
        tools=[add, wait],
        max_steps=1,
        max_turns=2,
        max_rollout_tokens=300,
        tool_timeout=0.2,
        num_generations=8,
    )
    trainer.train()
    release.set()
    [entry] = [e for e in trainer.state.log_history if "reward" in e]
    assert entry["tools/call_frequency"] == pytest.approx(4 / 8)
    assert entry["tools/failure_frequency"] == pytest.approx(2 / 4)
    assert entry["tools/timeout_frequency"] == pytest.approx(1 / 4)
    assert entry["harmony/malformed_frequency"] == pytest.approx(2 / 8)
    assert entry["completions/truncated_frequency"] == pytest.approx(2 / 8)
    assert entry["completions/clipped_ratio"] == pytest.approx(2 / 8)
    assert entry["completions/mean_turns"] == pytest.approx((4 * 2 + 4) / 8)
    assert entry["completions/max_length"] == 300
    assert entry["completions/min_length"] == len(WRITE.text("prose"))


def test_everything_trl_logs_is_logged(tmp_path):
    stock = GRPOTrainer(
        tiny_model(),
        length_reward,
        config(tmp_path / "trl", GRPOConfig, max_completion_length=6, router_aux_loss_coef=0.0),
        rows(),
        processing_class=TOKENIZER,
        tools=[add],
    )
    stock.train()
    ours = build(tmp_path / "ours", tools=[add])
    ours.train()
    names = [set().union(*t.state.log_history) for t in (stock, ours)]
    assert names[0] - names[1] == set()
    new = {n for n in names[1] - names[0]}
    assert {"tools/timeout_frequency", "harmony/malformed_frequency", "completions/truncated_frequency"} < new
    assert {"on_policy/forced", "on_policy/max_log_ratio_recomputed", "on_policy/max_log_ratio"} < new


class Counter(Environment):
    """Counts, ends at two."""

    built = 0

    def __init__(self):
        type(self).built += 1
        self.count = 0

    def reset(self, **kwargs):
        super().reset()
        self.count = 0
        return f" [{kwargs['tag']}]"

    def up(self) -> int:
        """Count one up."""
        self.count += 1
        self.done = self.count == 2
        return self.count


def test_environments_are_reset_shown_and_end_their_episode(tmp_path):
    Counter.built = 0
    seen = []

    def reward(environments, trajectories, **kwargs):
        seen.extend(zip((e.count for e in environments), trajectories))
        return [0.0] * len(environments)

    trainer = build(
        tmp_path,
        reward,
        script=lambda prompt, rng: WRITE.call("up"),
        environment_factory=Counter,
        data=rows(tag=lambda i: f"tag{i}"),
    )
    trainer.train()
    assert len(seen) == 16 and Counter.built == 8  # built once, reset often
    for count, trajectory in seen:
        text = VOCABULARY.decode(trajectory.prompt_ids)
        assert count == 2 and trajectory.stop_reason == StopReason.ENVIRONMENT
        assert "type up = " in text and "close" not in text and "[tag" in text


def test_an_environment_that_hangs_is_not_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_tools, "GRACE", 0.05)
    release = threading.Event()

    class Slow(Environment):
        tool_timeout = 0.1

        def wait(self) -> str:
            """Wait."""
            release.wait(30)
            return "late"

    trainer = build(
        tmp_path,
        script=lambda p, rng: WRITE.final("x") if tool_results(p) else WRITE.call("wait"),
        environment_factory=Slow,
        max_concurrent_tools=8,
    )
    used = []
    run = trainer._engine.run
    trainer._engine.run = lambda *args: used.append([id(e) for e in args[3]]) or run(*args)
    trainer.train()
    release.set()
    assert len(used) == 2 and not set(used[0]) & set(used[1])
    assert logged(trainer, "tools/timeout_frequency") == [1.0, 1.0]


def test_the_python_tool_is_built_from_the_configuration(tmp_path):
    args = config(tmp_path, executor="unsafe_subprocess", tool_timeout=3.0, tool_output_limit=200)
    tool = bind_environments(PythonTool, args)()
    assert (tool.tool_timeout, tool.tool_output_limit) == (3.0, 200)
    assert type(tool._executor).__name__ == "UnsafeSubprocessExecutor"
    bound = bind_environments({"a": PythonTool, "b": Counter}, args)
    assert bound["a"]().tool_timeout == 3.0 and bound["b"] is Counter
    assert bind_environments(None, args) is None
    with pytest.raises(ValueError, match="nowhere"):
        bind_environments(PythonTool, config(tmp_path, executor="nowhere"))()


def test_partials_of_the_python_tool_take_what_they_do_not_set(tmp_path):
    class Named(functools.partial):
        """Partials of a partial's subclass stay nested."""

    class Bare(PythonTool):
        def __init__(self, tool_timeout):
            super().__init__(stateful=True, executor="unsafe_subprocess", tool_timeout=tool_timeout)

    args = config(tmp_path, executor="unsafe_subprocess", tool_timeout=3.0, tool_output_limit=200)
    for outer in (functools.partial, Named):
        inner = Named(PythonTool, stateful=True, tool_timeout=7.0)
        tool = bind_environments({"a": outer(inner, tool_output_limit=300)}, args)["a"]()
        assert (tool.stateful, tool.tool_timeout, tool.tool_output_limit) == (True, 7.0, 300)
        assert type(tool._executor).__name__ == "UnsafeSubprocessExecutor"
    assert bind_environments(Bare, args)().tool_timeout == 3.0
    counter = bind_environments(functools.partial(Counter), args)()
    assert isinstance(counter, Counter)


def test_the_environments_own_output_limit_goes_before_the_configured_one(tmp_path):
    class Long(Environment):
        tool_output_limit = 600

        def talk(self) -> str:
            """Talks."""
            return "x" * 1000

    def script(prompt, rng):
        return WRITE.final("x") if tool_results(prompt) else WRITE.call("talk")

    shown = []

    def reward(trajectories, **kwargs):
        shown.extend(len(r.text) for t in trajectories for r in t.tool_results)
        return [0.0] * len(trajectories)

    settings = {"environment_factory": Long, "max_rollout_tokens": 900, "max_steps": 1}
    build(tmp_path, reward, script=script, tool_output_limit=200, **settings).train()
    assert set(shown) == {600}


def test_a_builtin_tool_runs_the_text_of_the_call(tmp_path):
    def script(prompt, rng):
        v = VOCABULARY
        if VOCABULARY.decode(prompt).endswith("<|start|>assistant") and "to=assistant" in VOCABULARY.decode(prompt):
            return WRITE.final("done")
        header = [v.channel, *WRITE.text("analysis to=python code"), v.message]
        return [*header, *WRITE.text("print(6 * 7)"), v.call]

    seen = []

    def reward(trajectories, **kwargs):
        seen.extend(trajectories)
        return [0.0] * len(trajectories)

    trainer = build(
        tmp_path,
        reward,
        script=script,
        environment_factory=PythonTool,
        executor="unsafe_subprocess",
        max_steps=1,
        per_device_train_batch_size=4,
        max_rollout_tokens=4000,
    )
    trainer.train()
    for trajectory in seen:
        [result] = trajectory.tool_results
        assert result.name == "python" and result.text.strip() == "42" and not result.failed
        assert "<|start|>python to=assistant" in VOCABULARY.decode(trajectory.turns[0].observation_ids)


def test_effort_and_date_of_the_prompt(tmp_path):
    data = rows(reasoning_effort=lambda i: ("low", "high", None)[i % 3])
    trainer = build(tmp_path, data=data, prompt_date="2026-02-03", reasoning_effort="medium", max_steps=4)
    seen = {}
    run = trainer._engine.run

    def keep(prompts, batch, *rest):
        episodes = run(prompts, batch, *rest)
        for prompt, episode in zip(prompts, episodes):
            seen[int(prompt[0]["content"].split()[1])] = VOCABULARY.decode(episode.trajectory.prompt_ids)
        return episodes

    trainer._engine.run = keep
    trainer.train()
    for i, text in seen.items():
        assert f"Reasoning: {('low', 'high', 'medium')[i % 3]}\n" in text
        assert "Current date: 2026-02-03" in text


def test_adapters_may_train_tokens(tmp_path):
    peft_config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[VOCABULARY.call])
    trainer = build(tmp_path, peft_config=peft_config, max_steps=1)
    names = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert any("trainable_tokens_delta" in name for name in names)
    trainer.train()


def test_stop_ids_end_up_everywhere(tmp_path):
    trainer = build(tmp_path, max_steps=1)
    trainer.train()
    stop_ids = VOCABULARY.stop_ids
    assert trainer.generation_config.eos_token_id == stop_ids == trainer.eos_token_ids
    assert trainer.model.generation_config.eos_token_id == stop_ids
    trainer.save_model(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved/generation_config.json").read_text())["eos_token_id"] == stop_ids


# ---- rewards ----


def test_a_failing_reward_costs_its_batch_and_three_in_a_row_end_the_run(tmp_path, caplog):
    calls = [0]

    def sometimes(completion_ids, **kwargs):
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("judge is down")
        return length_reward(completion_ids)

    trainer = build(tmp_path, [sometimes, length_reward], max_steps=3)
    trainer.train()
    name = "rewards/sometimes/failure_frequency"
    assert logged(trainer, name) == [0.0, 1.0, 0.0]
    gradients = logged(trainer, "grad_norm")
    assert gradients[1] == 0.0 and gradients[0] > 0 and gradients[2] > 0  # although the other reward was fine
    assert logged(trainer, "reward")[1] is None
    assert "judge is down" in caplog.text

    def never(**kwargs):
        raise ValueError("judge is down")

    trainer = build(tmp_path, [never, length_reward], max_steps=5)
    with pytest.raises(RuntimeError, match="'never' failed 3 times in a row.*judge is down"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_columns_that_only_some_batches_log_stay_beside_their_rollouts(tmp_path):
    calls = []

    def reward(completion_ids, log_extra, **kwargs):
        calls.append(len(completion_ids))
        if len(calls) == 1:
            raise OSError("judge unreachable")
        log_extra("length", [len(ids) for ids in completion_ids])
        if len(calls) == 3:
            log_extra("third", ["yes"] * len(completion_ids))
        return [1.0] * len(completion_ids)

    settings = {"per_device_eval_batch_size": 4, "num_generations_eval": 1, "num_completions_to_print": 0}
    trainer = build(tmp_path, reward, eval_dataset=rows(8), log_completions=True, max_steps=1, **settings)
    trainer.evaluate()  # two batches of four
    trainer.train()  # one of eight: calls 1 and 2 are no longer in the table
    trainer.evaluate()
    [before, after] = [pandas.read_parquet(file) for file in sorted((tmp_path / "completions").glob("*.parquet"))]
    assert before["length"].isna().tolist() == [True] * 4 + [False] * 4
    assert len(after) == 8 and after["third"].isna().all() and not after["length"].isna().any()
    assert trainer._logs["extra"].keys() == {"length", "third"}


def test_rewards_that_do_not_apply_are_not_failures(tmp_path):
    def half(completion_ids, **kwargs):
        return [None if i % 2 else 1.0 for i in range(len(completion_ids))]

    async def later(completion_ids, **kwargs):
        await asyncio.sleep(0)
        return length_reward(completion_ids)

    async def broken(**kwargs):
        raise ValueError("no")

    trainer = build(tmp_path, [half, later], max_steps=1)
    trainer.train()
    assert trainer.reward_func_names == ["half", "later"]
    assert logged(trainer, "grad_norm")[0] > 0 and not math.isnan(logged(trainer, "reward")[0])
    trainer = build(tmp_path, [broken, length_reward], max_steps=1)
    trainer.train()
    assert logged(trainer, "rewards/broken/failure_frequency") == [1.0]


@pytest.mark.parametrize("adapter", [None, {"target_modules": ["q_proj"]}])
def test_the_policy_samples_in_the_precision_it_trains_in(tmp_path, adapter):
    """Before training, during it and afterwards; with a reference model, and around PEFT's wrapper."""
    tiny_model().save_pretrained(tmp_path / "model")
    trainer = build(
        tmp_path,
        model=str(tmp_path / "model"),
        model_init_kwargs={"dtype": "float32"},
        bf16=True,
        beta=0.1,
        max_steps=1,
        peft_config=None if adapter is None else LoraConfig(r=2, **adapter),
        eval_dataset=rows(4),
        num_generations_eval=4,
    )
    assert (trainer.ref_model is not None) == (adapter is None)
    seen, generate = {True: [], False: []}, trainer._engine.backend.generate
    sampling = False

    def watched(*args, **kwargs):
        nonlocal sampling
        sampling = True
        try:
            return generate(*args, **kwargs)
        finally:
            sampling = False

    trainer._engine.backend.generate = watched
    trainer._base_model.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda module, inputs, output: seen[sampling].append(output.dtype)
    )
    for run in (trainer.evaluate, trainer.train, trainer.evaluate):
        run()
        assert set(seen[True]) == set(seen[False]) == {torch.bfloat16}, run
        seen[True].clear(), seen[False].clear()


# ---- models and data ----


def test_a_model_id_is_loaded_in_bf16_without_auxiliary_loss(tmp_path):
    model = tiny_model(router_aux_loss_coef=0.9)
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    trainer = build(tmp_path, model=str(tmp_path / "model"), processing_class=None, bf16=True, max_steps=1)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert trainer.router_aux_loss_coef == 0.0 and not trainer.aux_loss_enabled
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    wanted = {"dtype": "float32", "attn_implementation": "eager", "experts_implementation": "eager"}
    trainer = build(tmp_path, model=str(tmp_path / "model"), model_init_kwargs=wanted, router_aux_loss_coef=0.1)
    assert trainer.model.dtype == torch.float32 and trainer.model.config._attn_implementation == "eager"
    assert trainer.aux_loss_enabled


def test_a_reward_model_of_another_family_does_not_get_the_policys_kernels(tmp_path):
    tiny_model().save_pretrained(tmp_path / "policy")
    TOKENIZER.save_pretrained(tmp_path / "policy")
    judge = Qwen2Config(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=257,
    )
    Qwen2ForSequenceClassification(judge).save_pretrained(tmp_path / "judge")
    TOKENIZER.save_pretrained(tmp_path / "judge")
    trainer = build(
        tmp_path, str(tmp_path / "judge"), model=str(tmp_path / "policy"), model_init_kwargs={"dtype": "float32"}
    )
    [reward_model] = trainer.reward_funcs
    assert trainer.reward_func_names == ["judge"]
    assert reward_model.config._attn_implementation == "sdpa"
    assert trainer.model.config._attn_implementation in ("sink_fa3", "eager")


def test_our_kernels_are_used_once_they_are_registered(tmp_path, monkeypatch):
    AutoConfig.for_model("gpt_oss").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(loading, "ALL_ATTENTION_FUNCTIONS", {})
    monkeypatch.setattr(loading, "ALL_EXPERTS_FUNCTIONS", {})
    assert loading.model_init_kwargs(str(tmp_path / "model"), None, False) == {"dtype": torch.bfloat16}
    monkeypatch.setattr(loading, "ALL_ATTENTION_FUNCTIONS", {"sink_fa3": None})
    monkeypatch.setattr(loading, "ALL_EXPERTS_FUNCTIONS", {"gptoss_fused": None})
    ours = {"dtype": torch.bfloat16, "attn_implementation": "sink_fa3", "experts_implementation": "gptoss_fused"}
    assert loading.model_init_kwargs(str(tmp_path / "model"), None, False) == ours
    given = {"dtype": "float32", "attn_implementation": "eager"}
    assert loading.model_init_kwargs(str(tmp_path / "model"), given, False) == {**ours, **given}


def test_mxfp4_weights_are_dequantised(tmp_path):
    config = AutoConfig.for_model("gpt_oss")
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    config.save_pretrained(tmp_path / "model")
    kwargs = loading.model_init_kwargs(str(tmp_path / "model"), None, False)
    assert kwargs["quantization_config"].dequantize is True


def test_other_models_are_loaded_as_trl_does(tmp_path):
    Qwen2Config().save_pretrained(tmp_path / "model")
    assert loading.model_init_kwargs(str(tmp_path / "model"), None, False) is None
    given = {"attn_implementation": "sdpa"}
    assert loading.model_init_kwargs(str(tmp_path / "model"), given, False) is given


def test_a_model_of_another_family_takes_trls_own_path(tmp_path):
    backend = byte_tokenizer().backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": []})
    plain = json.loads(backend.to_str())
    plain["added_tokens"] = [t for t in plain["added_tokens"] if t["content"] in ("<|endoftext|>", "<|end|>")]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=type(backend).from_str(json.dumps(plain)), eos_token="<|endoftext|>", pad_token="<|end|>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=None,
        )
    )
    seen = []

    def reward(completion_ids, completions, **kwargs):
        seen.append("trajectories" in kwargs)
        assert isinstance(completions[0][0]["content"], str)
        return length_reward(completion_ids)

    trainer = build(
        tmp_path,
        reward,
        model=model,
        processing_class=tokenizer,
        steps_per_generation=2,
        num_iterations=2,
        max_steps=4,
        log_completions=True,
    )
    trainer.train()
    assert trainer._engine is None and seen == [False]
    assert logged(trainer, "on_policy/forced") == [1.0, 0.0, 0.0, 0.0]
    assert logged(trainer, "on_policy/max_log_ratio")[0] == 0.0
    assert not (tmp_path / "trajectories.jsonl").exists()


def test_streamed_data_and_evaluation(tmp_path):
    def stream():
        row = {"prompt": [{"role": "user", "content": "always the same object"}]}
        while True:
            yield row

    seen = []

    def reward(trajectories, completion_ids, **kwargs):
        seen.append(([t.completion_ids for t in trajectories], completion_ids))
        return length_reward(completion_ids)

    trainer = build(
        tmp_path,
        reward,
        data=IterableDataset.from_generator(stream),
        eval_dataset=rows(4),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )
    trainer.train()
    assert all(ours == trls for ours, trls in seen) and len({str(ids) for ids in seen[0][1]}) > 1
    assert (
        len(logged(trainer, "eval_reward")) == 2 and len(logged(trainer, "eval_completions/truncated_frequency")) == 2
    )
    assert logged(trainer, "on_policy/forced") == [1.0, 1.0]


def test_conversations_are_printed_and_written(tmp_path, capsys):
    trainer = build(
        tmp_path, script=call_then_answer, tools=[add], max_steps=1, log_completions=True, num_completions_to_print=2
    )
    trainer.train()
    printed = capsys.readouterr().out
    assert printed.count("step 1 | reward") == 2 and "analysis" in printed and "functions.add" in printed
    assert list((tmp_path / "completions").glob("*.parquet"))
    lines = [json.loads(line) for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and {line["step"] for line in lines} == {1}
    for line in lines:
        ids, mask = line["completion_ids"], line["loss_mask"]
        sampled = [t for turn in line["turns"] for t in turn["policy_ids"]]
        assert [t for t, m in zip(ids, mask) if m] == sampled
        assert line["reward"] == line["rewards"]["length_reward"] == float(sum(ids) % 11)
        assert line["turns"][0]["tool_results"][0]["name"] == "add"
        assert line["prompt"][0]["role"] == "user" and line["prompt_text"].endswith("<|start|>assistant")


def test_a_disk_error_costs_the_trajectory_log_and_not_the_run(tmp_path, caplog):
    (tmp_path / "trajectories.jsonl").mkdir()
    trainer = build(tmp_path, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1 and "No trajectories of step 1" in caplog.text


def test_settings_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(ValueError, match="continuous batching"):
        build(tmp_path, use_transformers_continuous_batching=True)
    with pytest.raises(ValueError, match="generation_kwargs sets eos_token_id=3"):
        build(tmp_path, generation_kwargs={"eos_token_id": 3})
    for name in ("temperature", "max_new_tokens", "num_beams"):
        with pytest.raises(ValueError, match=f"generation_kwargs sets \\['{name}'\\].*Remove"):
            build(tmp_path, generation_kwargs={name: 2})
    with pytest.raises(ValueError, match="chat_template_kwargs=.*'high'.*field reasoning_effort \\(now 'medium'\\)"):
        build(tmp_path, chat_template_kwargs={"reasoning_effort": "high"})
    with pytest.raises(ValueError, match="Several tools are called add"):
        build(tmp_path, tools=[add, functools.wraps(add)(lambda a, b: a - b)])
    with pytest.raises(ValueError, match=r"Counter\.up and one of `tools` have one name"):
        build(tmp_path, tools=[functools.wraps(Counter.up)(lambda a: a)], environment_factory={"a": lambda: Counter()})
    with pytest.raises(ValueError, match="has only 200 rows"):
        build(tmp_path, model=tiny_model(vocab_size=200, pad_token_id=0))
    with pytest.raises(ValueError, match="lists of messages"):
        build(tmp_path, data=Dataset.from_list([{"prompt": "add 1"}] * 8), max_steps=1).train()


def test_template_arguments_are_for_reward_models_only(tmp_path):
    args = config(tmp_path, chat_template_kwargs={"enable_thinking": False, "reasoning_effort": "low"})
    with pytest.raises(ValueError, match="chat_template_kwargs={'reasoning_effort': 'low'} has no effect"):
        check_template_kwargs(args, ["judge"])
    check_template_kwargs(config(tmp_path, chat_template_kwargs={"enable_thinking": False}), ["judge"])


@pytest.mark.parametrize("factory", [Counter, functools.partial(Counter), {"a": Counter}])
def test_tools_of_one_name_are_refused_before_the_model_is_loaded(tmp_path, monkeypatch, factory):
    def load(*args, **kwargs):
        raise AssertionError("the model is being loaded")

    monkeypatch.setattr(GptOssForCausalLM, "from_pretrained", load)
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    up = functools.wraps(Counter.up)(lambda a: a)
    with pytest.raises(ValueError, match=r"Counter\.up and one of `tools` have one name"):
        build(tmp_path, model=str(folder), tools=[up], environment_factory=factory)
    with pytest.raises(AssertionError, match="being loaded"):  # control
        build(tmp_path, model=str(folder), environment_factory=factory)


def test_a_rollout_function_of_the_user_goes_before_the_loop(tmp_path, capsys):
    def rollouts(prompts, trainer):
        ids = [WRITE.final("x")] * len(prompts)
        theirs = {"trajectories": ["their own"] * len(prompts)}
        return {"prompt_ids": [[1, 2]] * len(prompts), "completion_ids": ids, "logprobs": None, **theirs}

    trainer = build(tmp_path, rollout_func=rollouts, max_steps=1, log_completions=True, num_completions_to_print=1)
    trainer.train()
    assert "Prompt" in capsys.readouterr().out  # TRL's table: there is no conversation of ours to print
    assert not (tmp_path / "trajectories.jsonl").exists()
    assert trainer._engine is None and logged(trainer, "completions/mean_length") == [len(WRITE.final("x"))]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda n: None, "it returned None; expected a list of 4 numbers"),
        (lambda n: 1.0, "it returned 1.0; expected"),
        (lambda n: [1.0], "it returned 1 rewards; expected"),
        (lambda n: ["a"] * n, "it returned 'a' as a reward; expected"),
        (lambda n: [-math.inf] + [1.0] * (n - 1), "it returned an infinite reward; expected"),
    ],
)
def test_what_a_reward_function_returns_is_checked(tmp_path, caplog, returned, reason):
    trainer = build(tmp_path, lambda prompts, **kwargs: returned(len(prompts)), per_device_train_batch_size=4)
    with pytest.raises(RuntimeError, match="failed 3 times in a row"):
        trainer.args.max_steps = 3
        trainer.train()
    assert reason in caplog.text


def test_tensors_and_missing_values_are_rewards(tmp_path):
    trainer = build(tmp_path, lambda prompts, **kwargs: torch.arange(len(prompts)), max_steps=1)
    trainer.train()
    assert logged(trainer, "reward") == [3.5]
    trainer = build(tmp_path, lambda prompts, **kwargs: [2.0, None] * (len(prompts) // 2), max_steps=1)
    trainer.train()
    assert logged(trainer, "reward") == [2.0]


def test_an_async_judge_with_some_arguments_set_is_awaited(tmp_path):
    class Judge:
        async def __call__(self, completions, value, **kwargs):
            return [value] * len(completions)

    trainer = build(tmp_path, functools.partial(Judge(), value=2.0), max_steps=1)
    trainer.train()
    assert logged(trainer, "reward") == [2.0]


def test_a_data_set_without_prompts_says_what_it_has(tmp_path):
    with pytest.raises(ValueError, match=r"has the columns \['question'\].*`prompt`"):
        build(tmp_path, data=rows().rename_column("prompt", "question")).train()


def test_an_environment_may_own_the_prompt(tmp_path):
    class Asks(Environment):
        def reset(self, **row):
            super().reset(**row)
            return f"add {row['level']}"

        def wait(self) -> str:
            """Does nothing."""
            return ""

    data = Dataset.from_list([{"level": i} for i in range(16)])
    trainer = build(tmp_path, data=data, environment_factory=Asks, max_steps=1)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()]
    assert lines and all("<|start|>user<|message|>add " in line["prompt_text"] for line in lines)


def test_a_data_set_smaller_than_a_generation_batch_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has 1 row\(s\).*2 different prompts.*num_generations=4"):
        build(tmp_path, data=rows(1)).train()


def test_columns_under_the_names_of_the_rollouts_are_refused(tmp_path):
    for name in ("completions", "trajectories"):
        with pytest.raises(ValueError, match=f"columns \\['{name}'\\].*Rename"):
            build(tmp_path, data=rows(8, **{name: lambda i: "x"}), max_steps=1).train()


def test_a_lone_surrogate_from_the_policy_reaches_no_file(tmp_path):
    def echo(text: str) -> str:
        """Repeat.

        Args:
            text: what to repeat.
        """
        return text

    def script(prompt, rng):
        return WRITE.final("x") if tool_results(prompt) else WRITE.call("echo", text="\ud800!")

    settings = {"max_steps": 1, "log_completions": True, "num_completions_to_print": 1}
    build(tmp_path, script=script, tools=[echo], **settings).train()
    record = json.loads((tmp_path / "trajectories.jsonl").read_text().splitlines()[0])
    assert record["turns"][0]["tool_results"][0]["text"] == "\ufffd!"
    assert list((tmp_path / "completions").glob("*.parquet"))


def test_tools_of_one_name_are_described_by_their_own_environment(tmp_path):
    class Alpha(Environment):
        def go(self) -> str:
            """First description."""
            return ""

    class Beta(Environment):
        def go(self) -> str:
            """Second description."""
            return ""

    seen = set()

    def reward(trajectories, environment, **kwargs):
        for name, trajectory in zip(environment, trajectories):
            text = VOCABULARY.decode(trajectory.prompt_ids)
            seen.add((name, "First description" in text, "Second description" in text))
        return [0.0] * len(trajectories)

    prompt = [{"role": "user", "content": "the same"}]
    data = Dataset.from_list([{"prompt": prompt, "environment": "ab"[i % 2]} for i in range(8)])
    build(tmp_path, reward, environment_factory={"a": Alpha, "b": Beta}, data=data, max_steps=1).train()
    assert seen == {("a", True, False), ("b", False, True)}


def test_an_empty_prompt_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds list: '\\[\\]'"):
        build(tmp_path, data=rows(4).map(lambda row: {"prompt": []}), max_steps=1).train()


def test_environments_are_closed_at_the_end_and_made_anew_for_an_evaluation(tmp_path):
    class Closing(Environment):
        built = closed = 0

        def __init__(self):
            type(self).built += 1

        def wait(self) -> str:
            """Does nothing."""
            return ""

        @not_a_tool
        def close(self):
            type(self).closed += 1

    trainer = build(tmp_path, environment_factory=Closing, max_steps=1, eval_dataset=rows(4), num_generations_eval=4)
    trainer.train()
    built = Closing.built
    assert Closing.closed == built > 0
    trainer.evaluate()
    assert Closing.built > built


def test_an_environment_that_cannot_be_closed_does_not_cost_the_run(tmp_path, caplog):
    class Gone(Environment):
        def wait(self) -> str:
            """Does nothing."""
            return ""

        @not_a_tool
        def close(self):
            raise ConnectionError("no such container")

    build(tmp_path, environment_factory=Gone, max_steps=1).train()
    assert "Gone.close() raised ConnectionError: no such container" in caplog.text


def test_a_loss_that_keeps_its_log_probs_to_itself_is_no_error(tmp_path, monkeypatch):
    def fused(this, model, inputs):
        assert "old_per_token_logps" not in inputs
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        return model(input_ids=ids).logits.float().pow(2).mean()

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", fused)
    trainer = build(tmp_path)
    trainer.train()
    assert logged(trainer, "on_policy/forced") == [1.0, 1.0] and logged(trainer, "on_policy/max_log_ratio") == []


def test_tools_and_factories_are_checked_when_the_trainer_is_built(tmp_path):
    def bare(a):
        return a

    with pytest.raises(DocstringParsingException, match="bare"):
        build(tmp_path, tools=[bare])
    with pytest.raises(TypeError, match="Counter object.*functools.partial"):
        build(tmp_path, environment_factory=Counter())
