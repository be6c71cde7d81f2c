"""Private methods and names of TRL and transformers that this package overrides, calls or reads.

A new minor version that changes one of them must fail here and not in somebody's run.
"""

import inspect
import re
from pathlib import Path

import pytest
from peft.tuners.lora import ParamWrapper
from transformers import Trainer
from transformers.trainer_optimizer import _BITSANDBYTES_OPTIMIZERS
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import RepeatSampler

import trl_gptoss.trainers
from trl_gptoss.trainers import GptOssGRPOTrainer
from trl_gptoss.trainers.vllm_rollouts import TrlGeneration

OVERRIDDEN = {
    "_generate": "(self, prompts: list)",
    "_generate_and_score_completions": (
        "(self, inputs: list[dict[str, torch.Tensor | typing.Any]]) -> dict[str, torch.Tensor | typing.Any]"
    ),
    "_calculate_rewards": "(self, inputs, prompts, completions, completion_ids_list)",
    "_get_train_sampler": (
        "(self, dataset: datasets.arrow_dataset.Dataset | None = None) -> torch.utils.data.sampler.Sampler"
    ),
    "compute_loss": "(self, model, inputs, return_outputs=False, num_items_in_batch=None)",
    "training_step": "(self, model, inputs, num_items_in_batch)",
    "log": "(self, logs: dict[str, float], start_time: float | None = None) -> None",
    "_prepare_for_training": "(self, max_steps, train_dataloader, resume_from_checkpoint)",
    "_save_optimizer_and_scheduler": "(self, output_dir: str) -> None",
    "_init_training_state": (
        "(self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial) -> tuple[int, int]"
    ),
    "_run_epoch": (
        "(self, model, epoch, train_dataloader, "
        "steps_in_epoch, num_update_steps_per_epoch, trial, ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch)"
    ),
    "_save_rng_state": "(self, output_dir: str) -> None",
    "_load_rng_state": "(self, checkpoint: str | None) -> None",
    "_save": "(self, output_dir: str | None = None, state_dict: dict | None = None) -> None",
    "_push_from_checkpoint": "(self, checkpoint_folder: str) -> None",
    "create_accelerator_and_postprocess": "(self) -> None",
}
CALLED = {
    "_save_checkpoint": "(self, model, trial)",
    "_finish_current_push": "(self) -> None",
    "_compute_loss": "(self, model, inputs)",
    "_prepare_inputs": (
        "(self, generation_batch: dict[str, torch.Tensor | typing.Any]) -> dict[str, torch.Tensor | typing.Any]"
    ),
}


@pytest.mark.parametrize(("name", "signature"), {**OVERRIDDEN, **CALLED}.items())
def test_private_signatures(name, signature):
    assert str(inspect.signature(getattr(GRPOTrainer, name))) == signature


def test_log_prob_signature():
    parameters = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert parameters == [
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
        *("compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask"),
        *("spatial_shapes", "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
    ]


def test_the_constructors_take_the_same_arguments():
    ours = list(inspect.signature(GptOssGRPOTrainer.__init__).parameters)
    assert ours == list(inspect.signature(GRPOTrainer.__init__).parameters)
    ours = list(inspect.signature(GptOssGRPOTrainer.train).parameters)
    assert ours == list(inspect.signature(Trainer.train).parameters)


def test_the_docstring_lists_what_is_overridden():
    overridden = {
        name
        for cls in GptOssGRPOTrainer.__mro__[: GptOssGRPOTrainer.__mro__.index(GRPOTrainer)]
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and any(name in vars(base) for base in GRPOTrainer.__mro__[:-1])
    }
    documented = "".join(
        cls.__doc__ for cls in GptOssGRPOTrainer.__mro__[: GptOssGRPOTrainer.__mro__.index(GRPOTrainer)]
    )
    assert overridden and all(f"`{name}`" in documented for name in overridden), overridden


def test_attributes_that_are_read():
    source = inspect.getsource(GRPOTrainer)
    for name in (
        "self._step = 0",
        "self._buffered_inputs = None",
        "self._environment_pool",
        "self._env_tools[name] = tools + methods",
        "self._standalone_tools = tools",
        "self._sync_tool_dicts = []",
        "self._async_tool_dicts = []",
        "self.async_loop",
        "self._has_async_funcs",
        "self._last_loaded_step = -1",
        "self.eos_token_ids = eos_token_ids",
        "self.generation_config = GenerationConfig",
        "self.num_completions_to_print",
        "self._dist = DistributedBackend",
        "self._tokenizer = processing_class",
        'self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}',
        "self._logs = {",
        'self._last_world_entropy = float("inf")',
        "self._entropy_window_stats = None",
        "self._current_train_step_time = 0.0",
        "self._pending_extra_logs = defaultdict(list)",
        "self._pending_metrics = defaultdict(list)",
        '_tag_names = ["trl", "grpo"]',
        '_name = "GRPO"',
        "_paper = {",
    ):
        assert name in source, name
    # The two lines that the ratio rests on.
    assert "self.args.gradient_accumulation_steps % generate_every != 0" in source
    assert "per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps" in source
    assert inspect.getsource(GRPOTrainer._generate_and_score_completions).count("gradient_accumulation_steps") == 2
    source = inspect.getsource(Trainer)
    for name in ("self._tr_loss", "self._globalstep_last_logged", "self.is_in_train"):
        assert name in source, name


def test_every_private_name_is_in_this_file():
    names = re.compile(r"\b(?:self|trainer|super\(\))\.(_[a-z]\w*)")
    files = Path(trl_gptoss.trainers.__file__).parent.glob("*.py")
    used = {name for file in files for name in names.findall(file.read_text(encoding="utf-8"))}
    theirs = {name for source in map(inspect.getsource, (GRPOTrainer, Trainer)) for name in names.findall(source)}
    theirs |= {name for cls in GRPOTrainer.__mro__[:-1] for name in vars(cls) if not name.startswith("__")}
    pinned = set(re.findall(r"\b_[a-z]\w*", Path(__file__).read_text(encoding="utf-8")))
    assert "_buffered_inputs" in used & theirs
    assert not (used & theirs) - pinned


def test_the_loss_is_divided_inside_of_compute_loss():
    """Turns are back-propagated there; a caller that divided what is returned would miss all but the last."""
    assert GRPOTrainer.loss_is_scaled_for_ga is True


def test_the_sampler_and_the_default_that_are_relied_upon():
    parameters = list(inspect.signature(RepeatSampler.__init__).parameters)
    assert parameters == ["self", "data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed"]
    assert GRPOConfig.__dataclass_fields__["max_tool_calling_iterations"].default is None


def test_trl_makes_and_uses_its_vllm_engine_where_ours_takes_its_place():
    constructor = inspect.getsource(GRPOTrainer.__init__)
    assert "self.use_vllm = args.use_vllm" in constructor and "self.vllm_generation = VLLMGeneration(" in constructor
    for name in ("generate", "sync_weights"):
        ours = list(inspect.signature(getattr(TrlGeneration, name)).parameters)
        assert ours == list(inspect.signature(getattr(VLLMGeneration, name)).parameters)
    turn = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert "_, completion_ids, logprobs, _ = self.vllm_generation.generate(" in turn
    assert "self._last_loaded_step = self.state.global_step" in turn


def test_the_optimizers_of_bitsandbytes_that_transformers_lists():
    """With FSDP2 `check_optimizer` refuses these and no others."""
    named = [f"{name}{bits}" for name in ("adamw", "ademamix", "lion") for bits in ("_32bit", "_8bit")]
    others = ["adamw_bnb_8bit", "adamw_8bit", "ademamix", "ademamix_8bit", "lion_32bit", "lion_8bit"]
    others += ["rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"]
    assert {optim.value for optim in _BITSANDBYTES_OPTIMIZERS} == {*others, *(f"paged_{name}" for name in named)}


def test_peft_keeps_which_way_round_expert_parameters_are():
    assert "_did_swap_in_out_features" in inspect.getsource(ParamWrapper)
