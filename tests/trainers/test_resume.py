"""A run that was stopped, by its checkpoint schedule, by an error or by a signal, goes on as if it had not been."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from cpu_settings import ON_CPU
from datasets import Dataset, IterableDataset
from logged_curves import curves
from peft import LoraConfig
from safetensors.torch import load_file
from tiny_policy import byte_tokenizer, tiny_model
from transformers import TrainerCallback

from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.trainers.checkpointing import is_complete, last_complete_checkpoint

TOKENIZER = byte_tokenizer()


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first.
        b: second.
    """
    return a + b


def length_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 11) for ids in completion_ids]


def build(output_dir, reward=length_reward, rows=64, dropout=0.0, callbacks=None, **settings):
    settings = {
        **ON_CPU,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_steps": 6,
        "max_rollout_tokens": 6,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 3,
        "on_policy_check_steps": 2,
        **settings,
    }
    peft_config = None
    if dropout:
        peft_config = LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"])
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(rows)])
    return GptOssGRPOTrainer(
        tiny_model(),
        reward,
        GptOssGRPOConfig(str(output_dir), **settings),
        data,
        processing_class=TOKENIZER,
        peft_config=peft_config,
        tools=[add],
        callbacks=callbacks,
    )


def weights(trainer):
    return {k: v.clone() for k, v in trainer.model.state_dict().items()}


def assert_same(resumed, straight):
    assert curves(resumed) == curves(straight)
    for name, value in weights(straight).items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


_straight = {}


def straight_run(tmp_path_factory, **settings):
    """Six uninterrupted steps, run once for each settings."""
    key = repr(settings)
    if key not in _straight:
        trainer = build(tmp_path_factory.mktemp("straight"), **settings)
        trainer.train()
        _straight[key] = trainer
    return _straight[key]


CASES = {
    "plain": {},
    "in the middle of a generation batch": {"steps_per_generation": 2},  # 3 steps: slice 1 of the second batch is next
    "with iterations": {"steps_per_generation": 2, "num_iterations": 2},
    "with accumulation": {"steps_per_generation": 4, "gradient_accumulation_steps": 3},
    "with dropout": {"dropout": 0.1, "steps_per_generation": 2, "num_iterations": 2},
    "in the second epoch": {"rows": 2},
    "at the end of an epoch": {"rows": 3},
    "between logs": {"logging_steps": 2},
}


SLOW = ("plain", "with iterations", "at the end of an epoch")


@pytest.mark.parametrize(
    "settings",
    [pytest.param(v, id=k, marks=[pytest.mark.slow] if k in SLOW else []) for k, v in CASES.items()],
)
def test_three_steps_and_three_more_are_six(tmp_path, tmp_path_factory, settings):
    straight = straight_run(tmp_path_factory, **settings)
    # Another process would start from the checkpoint alone: nothing of the first trainer is used below.
    shutil.copytree(Path(straight.args.output_dir) / "checkpoint-3", tmp_path / "checkpoint-3")
    resumed = build(tmp_path, **settings)
    torch.manual_seed(12345)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert_same(resumed, straight)


@pytest.mark.parametrize("step", [2, pytest.param(3, marks=pytest.mark.slow), 4, 5])
def test_a_streamed_data_set_goes_on_where_it_was(tmp_path, tmp_path_factory, step):
    """Its passes have three steps, and the order of each is another one."""

    def stream():
        for i in range(3):
            yield {"prompt": [{"role": "user", "content": f"say {i}"}]}

    def run(output_dir, **settings):
        trainer = build(output_dir, **{"save_steps": 1, **settings})
        trainer.train_dataset = IterableDataset.from_generator(stream)
        trainer.args.accelerator_config.dispatch_batches = False
        trainer.accelerator.dataloader_config.dispatch_batches = False
        return trainer

    if "streamed" not in _straight:
        _straight["streamed"] = run(tmp_path_factory.mktemp("streamed"))
        _straight["streamed"].train()
    straight = _straight["streamed"]
    shutil.copytree(Path(straight.args.output_dir) / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    resumed = run(tmp_path, save_steps=100)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, straight)


def test_a_finished_run_trains_no_further_step(tmp_path):
    build(tmp_path, max_steps=2, save_steps=2).train()
    resumed = build(tmp_path, max_steps=2, save_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_without_the_loop_state_the_curves_would_part(tmp_path, tmp_path_factory):
    """The control: TRL alone samples anew in the middle of a generation batch."""
    settings = CASES["in the middle of a generation batch"]
    straight = straight_run(tmp_path_factory, **settings)
    shutil.copytree(Path(straight.args.output_dir) / "checkpoint-3", tmp_path / "checkpoint-3")
    resumed = build(tmp_path, **settings)
    resumed._restore_loop_state = lambda state: None
    resumed.train(resume_from_checkpoint=True)
    assert curves(resumed)[3:] != curves(straight)[3:]


class FailAt(TrainerCallback):
    """Fails in one of the places of step 5."""

    def __init__(self, place, failure):
        self.place, self.failure = place, failure

    def _maybe(self, place, state, step):
        if place == self.place and state.global_step == step:
            self.failure()

    def on_step_begin(self, args, state, control, **kwargs):
        self._maybe("step begin", state, 4)

    def on_log(self, args, state, control, **kwargs):
        self._maybe("log", state, 5)

    def on_substep_end(self, args, state, control, **kwargs):
        self._maybe("accumulation", state, 4)


def raise_error():
    raise OSError("disk full")


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("place", "failure", "raised", "saved"),
    [
        pytest.param("step begin", raise_error, OSError, 4, marks=pytest.mark.slow),
        pytest.param("accumulation", raise_error, OSError, 4, marks=pytest.mark.slow),
        ("log", raise_error, OSError, 5),
        ("accumulation", interrupt, KeyboardInterrupt, 4),
        pytest.param("accumulation", terminate, SystemExit, 4, marks=pytest.mark.slow),
    ],
)
def test_a_failure_loses_no_finished_step(tmp_path, tmp_path_factory, place, failure, raised, saved):
    straight = straight_run(tmp_path_factory, **CASES["with accumulation"])
    settings = {**CASES["with accumulation"], "save_steps": 100}
    failing = build(tmp_path / "failing", callbacks=[FailAt(place, failure)], **settings)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(raised):
        failing.train()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert [p.name for p in (tmp_path / "failing").glob("checkpoint-*")] == [f"checkpoint-{saved}"]
    resumed = build(tmp_path / "failing", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, straight)


def test_a_callback_that_fails_at_the_end_of_a_step_does_not_lose_it(tmp_path):
    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise_error()

    trainer = build(tmp_path, save_steps=100, callbacks=[Fail()])
    with pytest.raises(OSError, match="disk full"):
        trainer.train()
    assert is_complete(tmp_path / "checkpoint-3", 1)
    saved = load_file(tmp_path / "checkpoint-3/model.safetensors")
    assert saved.keys() == weights(trainer).keys()
    for name, value in weights(trainer).items():
        assert torch.equal(value, saved[name]), name


def test_without_optimizer_states_nobody_is_told_to_resume(tmp_path, caplog):
    trainer = build(tmp_path, save_steps=100, save_only_model=True, callbacks=[FailAt("step begin", raise_error)])
    with pytest.raises(OSError, match="disk full"):
        trainer.train()
    assert (tmp_path / "checkpoint-4/model.safetensors").is_file()
    assert "saved checkpoint-4. With save_only_model=True it is a model to begin with" in caplog.text


def test_an_interrupt_while_rewards_are_computed_loses_no_finished_step(tmp_path, tmp_path_factory):
    calls = [0]

    def reward(completion_ids, **kwargs):
        calls[0] += 1
        if calls[0] == 2:  # for the step after the fourth
            interrupt()
        return length_reward(completion_ids)

    settings = CASES["with iterations"]
    straight = straight_run(tmp_path_factory, **settings)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, reward=reward, **{**settings, "save_steps": 100}).train()
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    resumed = build(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    renamed = [{k.replace("/reward/", "/length_reward/"): v for k, v in e.items()} for e in curves(resumed)]
    assert renamed == curves(straight)


def test_a_signal_during_the_optimizer_step_waits_for_its_end(tmp_path):
    class Terminate(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 2:
                # Trainer's callbacks run in order, ours comes last here: this signal arrives inside of the step.
                interruption = trainer._interruption
                interruption.deferred = True
                terminate()

    trainer = build(tmp_path, callbacks=[Terminate()], save_steps=100)
    with pytest.raises(SystemExit) as stopped:
        trainer.train()
    assert stopped.value.code == 143
    assert trainer.state.global_step == 3 and trainer.state.log_history[-1]["step"] == 3
    assert is_complete(tmp_path / "checkpoint-3", 1)


def test_a_failure_inside_the_optimizer_step_saves_nothing(tmp_path):
    trainer = build(tmp_path, save_steps=100)

    class Break(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise_error()

    trainer.add_callback(Break())
    with pytest.raises(OSError):
        trainer.train()
    assert list(tmp_path.glob("checkpoint-*")) == []


@pytest.mark.parametrize(("failure", "raised"), [(raise_error, OSError), (interrupt, KeyboardInterrupt)])
def test_a_run_without_checkpoints_leaves_one_when_it_fails(tmp_path, tmp_path_factory, failure, raised):
    straight = straight_run(tmp_path_factory, **CASES["with accumulation"])
    settings = {**CASES["with accumulation"], "save_strategy": "no"}
    with pytest.raises(raised):
        build(tmp_path, callbacks=[FailAt("accumulation", failure)], **settings).train()
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    resumed = build(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, straight)
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]  # none where nothing failed


def test_a_checkpoint_of_an_earlier_run_in_the_same_folder_is_not_taken_for_ones_own(tmp_path):
    build(tmp_path, max_steps=4, save_steps=4, seed=1).train()
    before = torch.load(tmp_path / "checkpoint-4/optimizer.pt", weights_only=False)
    with pytest.raises(OSError):
        build(tmp_path, save_strategy="no", callbacks=[FailAt("step begin", raise_error)]).train()
    after = torch.load(tmp_path / "checkpoint-4/optimizer.pt", weights_only=False)
    moments = [state["state"][0]["exp_avg"] for state in (before, after)]
    assert not torch.equal(*moments)


def test_only_whole_checkpoints_are_resumed_from(tmp_path):
    build(tmp_path, save_steps=2).train()
    assert last_complete_checkpoint(str(tmp_path), 1) == str(tmp_path / "checkpoint-6")
    state = tmp_path / "checkpoint-6/trainer_state.json"
    state.write_text(state.read_text()[:-20])  # killed while it was written
    assert last_complete_checkpoint(str(tmp_path), 1) == str(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4/loop_state_0.pt").unlink()
    assert last_complete_checkpoint(str(tmp_path), 1) == str(tmp_path / "checkpoint-2")
    # another number of processes goes on from its weights
    assert last_complete_checkpoint(str(tmp_path), 2) == str(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2/loop_state_0.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="2 process.*checkpoint-2, checkpoint-4, checkpoint-6"):
        last_complete_checkpoint(str(tmp_path), 2)


def test_a_checkpoint_of_another_trainer_is_resumed_with_a_warning(tmp_path, caplog):
    build(tmp_path, max_steps=3).train()
    (tmp_path / "checkpoint-3/loop_state_0.pt").unlink()
    resumed = build(tmp_path, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 4 and "not on the same curves" in caplog.text


@pytest.mark.parametrize("saved", [True, False])
def test_a_reference_model_that_follows_the_policy_is_resumed(tmp_path, caplog, saved):
    tiny_model().save_pretrained(tmp_path / "model")
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(64)])

    def run(output_dir, **settings):
        settings = {
            **ON_CPU,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_steps": 4,
            "max_rollout_tokens": 6,
            "learning_rate": 1e-2,
            "beta": 0.1,
            "sync_ref_model": True,
            "ref_model_sync_steps": 2,
            "model_init_kwargs": {"dtype": "float32"},
            **settings,
        }
        config = GptOssGRPOConfig(str(output_dir), **settings)
        return GptOssGRPOTrainer(str(tmp_path / "model"), length_reward, config, rows, processing_class=TOKENIZER)

    straight = run(tmp_path / "straight", save_strategy="steps", save_steps=3)
    straight.train()
    (tmp_path / "resumed").mkdir()
    checkpoint = shutil.copytree(tmp_path / "straight/checkpoint-3", tmp_path / "resumed/checkpoint-3")
    if not saved:
        (checkpoint / "reference_model.pt").unlink()
    resumed = run(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=True)
    assert (curves(resumed) == curves(straight)) == saved
    assert ("does not hold the reference model" in caplog.text) != saved


@pytest.mark.parametrize(
    "changed",
    [
        {"gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "num_generations": 2},
    ],
)
def test_a_run_goes_on_with_batches_of_another_size(tmp_path, caplog, changed):
    """As after an out-of-memory error. Three steps are 6 micro-batches: the second generation batch is half used."""
    build(tmp_path, max_steps=3, steps_per_generation=4, gradient_accumulation_steps=2).train()
    resumed = build(tmp_path, **{"on_policy": "force", "steps_per_generation": 4, **changed})
    resumed.train(resume_from_checkpoint=True)
    assert [e["on_policy/forced"] for e in curves(resumed)[3:6]] == [1.0, 1.0, 1.0]
    assert "gradient_accumulation_steps=2 (now 4)" in caplog.text
    lengths = {len(rows["completion_ids"]) for rows in resumed._buffered_inputs}
    assert lengths == {resumed.args.per_device_train_batch_size}
    steps = [json.loads(line)["step"] for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and set(steps) == {1, 3, 4, 5, 6}


def test_the_trajectory_file_has_every_logged_step_once(tmp_path):
    build(tmp_path, max_steps=6, save_steps=2).train()
    file = Path(tmp_path / "trajectories.jsonl")
    whole = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["step"] for r in whole] == [s for s in range(1, 7) for _ in range(4)]
    shutil.rmtree(tmp_path / "checkpoint-6")
    with file.open("a") as torn:
        torn.write('{"step": 7, "ind')
    build(tmp_path, max_steps=6, save_steps=2).train(resume_from_checkpoint=True)
    again = [json.loads(line) for line in file.read_text().splitlines()]
    assert again == whole


def test_a_new_run_in_the_same_folder_starts_its_own_trajectory_file(tmp_path):
    build(tmp_path, max_steps=3, save_strategy="no").train()
    build(tmp_path, max_steps=2, save_strategy="no").train()
    steps = [json.loads(line)["step"] for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()]
    assert steps == [s for s in (1, 2) for _ in range(4)]


def test_a_second_call_of_train_generates_its_own_batch(tmp_path):
    trainer = build(tmp_path, max_steps=3, save_strategy="no", steps_per_generation=2, gradient_accumulation_steps=1)
    trainer.train()  # ends with half of its second batch unused
    trainer.train()
    forced = [e["on_policy/forced"] for e in trainer.state.log_history if "on_policy/forced" in e]
    assert forced == [1.0, 0.0, 1.0]
