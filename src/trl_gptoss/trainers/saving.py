"""Saving and publishing: the formats of `save_format`, sinks in adapter files, a card, and only what belongs to a model."""

import dataclasses
import json
import os
import re
import shutil
from concurrent.futures import Future
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from huggingface_hub import CommitInfo
from transformers import Trainer, is_wandb_available
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils.hub import PushInProgress
from trl.trainer.utils import get_comet_experiment_url, get_config_model_id, get_trackio_space_url

from ..hub.adapters import adapter_sinks, base_state_dict, merged_weights, sink_parameters
from ..hub.card import ModelCardFacts, hardware, write_card
from ..hub.publish import SaveFormat, merge_and_push, replace_mxfp4, save_tokenizer
from ..hub.scrub import SecretFound
from ..hub.upload import MXFP4_FOLDER, all_files, is_local, model_files, upload

logger = get_logger(__name__)

# Settings that say where a run was and not how it learned.
_NOT_RECIPE = re.compile(
    r"output_dir|run_name|project|trackio.*|hub_.*|push_to_hub|.*token|.*_path|report_to|logging_.*|log_.*|save_(?!format).*"
    r"|disable_tqdm|debug|accelerator_config|parallelism_config|dataloader_.*|use_cpu|ddp_.*|resume_from_checkpoint|vllm_server_.*|.*_(?:host|port|url)"
)
_TRL_CITATION = """@software{vonwerra2020trl,
  title   = {{TRL: Transformers Reinforcement Learning}},
  author  = {von Werra, Leandro and Belkada, Younes and Tunstall, Lewis and others},
  license = {Apache-2.0},
  url     = {https://github.com/huggingface/trl},
  year    = {2020}
}"""


class SavingMixin(Trainer):
    """The methods of a trainer that write a model to disk or to the Hub.

    Overridden, and why:
        `_save`: the quantised model of `save_format`, and trained sinks in the adapter's file.
        `create_model_card`: a card with the run's recipe, results, mismatch, hardware and versions.
        `push_to_hub`, `_push_from_checkpoint`: TRL's upload everything in the output directory, the pickled arguments with
            token and paths among it; here only the files of the model go, and each is looked at.
    """

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        model = self.accelerator.unwrap_model(self.model)
        adapters = is_peft_model(model)
        is_checkpoint = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", folder.name) is not None
        sharded_at_load = self.is_distributed_loading_by_transformers  # then every rank has to take part in saving
        only_mxfp4 = self.args.save_format == "mxfp4" and not adapters and not is_checkpoint
        if only_mxfp4 and self.args.should_save and not sharded_at_load:
            self._save_only_mxfp4(folder, state_dict)
            return
        # transformers empties the dict that it writes, if the model was made from an MXFP4 checkpoint
        super()._save(output_dir, None if state_dict is None else dict(state_dict))
        if not self.args.should_save:
            return
        if adapters:
            adapter_sinks(model, folder, state_dict or None)
        if self.args.save_format == "bf16":
            shutil.rmtree(folder / MXFP4_FOLDER, ignore_errors=True)  # of an earlier run, now out of date
            return
        try:
            self._save_mxfp4(folder / MXFP4_FOLDER, state_dict)
        except (ValueError, OSError) as error:
            if not is_checkpoint:
                raise
            logger.error(f"{folder.name} is complete, but was not quantised as well: {error}")

    def _save_mxfp4(self, folder: Path, state_dict: dict[str, torch.Tensor] | None) -> None:
        model = self.accelerator.unwrap_model(self.model)
        if is_peft_model(model):
            with merged_weights(model):
                replace_mxfp4(model.get_base_model(), folder, base_state_dict(model))
        else:
            replace_mxfp4(model, folder, state_dict or None)
        save_tokenizer(self.processing_class, folder)

    def _save_only_mxfp4(self, folder: Path, state_dict: dict[str, torch.Tensor] | None) -> None:
        """The quantised model in the folder itself, in place of unquantised weights of an earlier save."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._save_mxfp4(folder / MXFP4_FOLDER, state_dict)
        except ValueError:  # weights that cannot be quantised are not lost for that
            super()._save(str(folder), state_dict)
            raise
        for name, path in model_files(folder).items():
            if name.startswith("model"):
                path.unlink()
        for path in (folder / MXFP4_FOLDER).iterdir():
            os.replace(path, folder / path.name)
        (folder / MXFP4_FOLDER).rmdir()
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    # ---- card ----

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        task: str | None = None,
        license: str | None = None,
    ) -> None:
        """Write README.md, and the figures it shows, to the output directory.

        Args:
            model_name (`str`, *optional*): title.
            dataset_name (`str` or `list[str]`, *optional*): ids on the Hub; found out where the training set came from there.
            tags (`str` or `list[str]`, *optional*): further tags.
            task (`str`, *optional*): a sentence; said by tools and environments if not given.
            license (`str`, *optional*): of the Hub's list; that of openai/gpt-oss for a model made from it.
        """
        if not self.is_world_process_zero():
            return
        facts = self._card_facts(model_name)
        if dataset_name is not None:
            facts.datasets = [dataset_name] if isinstance(dataset_name, str) else list(dataset_name)
        facts.datasets = [Path(name).name if is_local(name) else name for name in facts.datasets]
        facts.tags += [tags] if isinstance(tags, str) else list(tags or [])
        facts.task = facts.task if task is None else task
        facts.license = license or facts.license
        token = self.args.hub_token
        try:
            write_card(facts, Path(self.args.output_dir), [token] if token else [], [self.args.output_dir])
        except OSError as error:  # a checkpoint goes on without its card
            logger.warning(f"The model card could not be written: {error}")

    def _card_facts(self, model_name: str | None) -> ModelCardFacts:
        model = self.accelerator.unwrap_model(self.model)
        adapters = is_peft_model(model)
        base = get_config_model_id(model.config)
        quantised = self.args.save_format != "bf16"
        sinks = sink_parameters(model).values()
        return ModelCardFacts(
            name=model_name or Path(self.args.output_dir).name,
            repo_id=self.hub_model_id or self.args.hub_model_id,
            base_model=base or None,
            datasets=_dataset_ids(self.train_dataset),
            task=self._describe_task(),
            trainer=type(self).__name__,
            rewards=self._reward_weights(),
            recipe=recipe(self.args),
            evaluations=self._evaluations(),
            history=list(self.state.log_history),
            hardware=hardware(),
            processes=self.args.world_size,
            kind="adapter" if adapters else "mxfp4" if self.args.save_format == "mxfp4" else "full",
            has_mxfp4=quantised and (adapters or self.args.save_format == "both"),
            trained_sinks=adapters and any(parameter.requires_grad for parameter in sinks),
            license="apache-2.0" if (base or "").startswith("openai/gpt-oss") else None,
            tags=list(self._tag_names),
            links=_tracker_links(),
            citations=[c for c in (self._paper.get("citation"), _TRL_CITATION) if c],
        )

    def _describe_task(self) -> str:
        """What the policy was asked to do, as far as the trainer knows."""
        return ""

    def _reward_weights(self) -> dict[str, float]:
        return {}

    def _evaluations(self) -> list[dict[str, Any]]:
        """Rows of evaluation.json, or the rewards of the last evaluation."""
        file = Path(self.args.output_dir) / "evaluation.json"
        if file.is_file():
            try:
                rows = json.loads(file.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                logger.warning(f"evaluation.json is left out of the model card: {error}")
                rows = []
            return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        several = self.eval_dataset if isinstance(self.eval_dataset, dict) else {None: self.eval_dataset}
        return [row for name, data in several.items() for row in self._rewards_of_evaluation(name, data)]

    def _rewards_of_evaluation(self, name: str | None, dataset: Any) -> list[dict[str, Any]]:
        """Rewards of the last evaluation; with several data sets (of the one that is called `name`) only the loss has the name."""
        loss = "eval_loss" if name is None else f"eval_{name}_loss"
        last = next((entry for entry in reversed(self.state.log_history) if loss in entry), {})
        problems = len(dataset) if isinstance(dataset, Dataset) else 0
        rows = []
        for key, mean in last.items():
            match = re.fullmatch(r"eval_rewards/(.+)/mean", key)
            if match:
                std = last.get(f"eval_rewards/{match[1]}/std")
                evaluation = match[1] if name is None else f"{name}: {match[1]}"
                rows.append({"evaluation": evaluation, "problems": problems, "mean": mean, "std": std})
        return rows

    # ---- the Hub ----

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save the model, write its card and upload what belongs to it, see docs/hub.md.

        Args:
            commit_message (`str`, *optional*, defaults to `"End of training"`): of the commit.
            blocking (`bool`, *optional*, defaults to `True`): whether to wait for the upload.
            token (`str`, *optional*), revision (`str`, *optional*), private (`bool`, *optional*): before those in `args`.
            kwargs: of [`create_model_card`].

        Returns:
            `CommitInfo`, a `Future` of one without `blocking`, `None` on other processes than the first.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = self.args.hub_token if token is None else token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        name = (self.args.hub_model_id or self.hub_model_id).split("/")[-1]
        self.create_model_card(**{"model_name": name, **kwargs})
        self._finish_current_push()
        return upload(
            self.hub_model_id,
            model_files(self.args.output_dir),
            commit_message=commit_message or "End of training",
            token=token,
            revision=revision or self.args.hub_revision,
            run_as_future=not blocking,
            replace=True,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if busy and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        folder = Path(self.args.output_dir)
        for name, path in model_files(
            checkpoint_folder
        ).items():  # copies: the checkpoint may be rotated away meanwhile
            if name != "README.md":
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copy(path, folder / name)
        settings = {"token": self.args.hub_token, "revision": self.args.hub_revision, "run_as_future": True}
        message = f"Training in progress, step {self.state.global_step}"
        try:
            jobs = [upload(self.hub_model_id, model_files(folder), commit_message=message, replace=True, **settings)]
            if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
                last = self.args.hub_strategy == HubStrategy.CHECKPOINT
                into = "last-checkpoint" if last else Path(checkpoint_folder).name
                files = all_files(checkpoint_folder)
                jobs.append(
                    upload(self.hub_model_id, files, commit_message=f"{message}, checkpoint", into=into, **settings)
                )
        except (SecretFound, OSError) as error:  # the run and its checkpoint on disk go on without the upload
            logger.error(f"{Path(checkpoint_folder).name} was not pushed: {error}")
            return
        for job in jobs:
            job.add_done_callback(_log_failure)
        if self.push_in_progress is None or not busy:
            self.push_in_progress = PushInProgress(jobs)
        else:
            self.push_in_progress.jobs.extend(jobs)

    def merge_and_push(
        self,
        repo_id: str | None = None,
        *,
        save_format: SaveFormat | None = None,
        token: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
    ) -> CommitInfo | None:
        """Upload the adapters merged into their base model, with the run's card; the trained model stays as it is.

        Args:
            repo_id (`str`, *optional*): `<hub_model_id>-merged` if not given.
            save_format (`str`, *optional*): that of the configuration if not given.
            token (`str`, *optional*), private (`bool`, *optional*), revision (`str`, *optional*): before those in `args`.

        Returns:
            `CommitInfo`, `None` on other processes than the first.

        Raises:
            `ValueError`: there are no adapters, or they are sharded.
        """
        model = self.accelerator.unwrap_model(self.model)
        if not is_peft_model(model):
            raise ValueError("merge_and_push: this model has no adapters; push_to_hub uploads it as it is")
        if not self.is_world_process_zero():
            return None
        default = f"{self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).name}-merged"
        repo_id = repo_id or default
        return merge_and_push(
            model,
            repo_id,
            processing_class=self.processing_class,
            save_format=save_format or self.args.save_format,
            facts=self._card_facts(repo_id.split("/")[-1]),
            token=self.args.hub_token if token is None else token,
            private=self.args.hub_private_repo if private is None else private,
            revision=revision,
        )


def _log_failure(job: Future) -> None:
    if not job.cancelled() and job.exception() is not None:
        logger.error(f"A push from a checkpoint failed: {job.exception()}", main_process_only=False)


def recipe(args: Any) -> dict[str, Any]:
    """The settings that differ from their default and say how a run learned, as plain values.

    Args:
        args ([`~transformers.TrainingArguments`]): after its `__post_init__`.
    """
    found = {}
    for field in dataclasses.fields(args):
        if _NOT_RECIPE.fullmatch(field.name):
            continue
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        value = _plain(getattr(args, field.name))
        if value != _plain(default):
            found[field.name] = value
    return dict(sorted(found.items()))


def _tracker_links() -> dict[str, str]:
    """Where the run's curves are on the web, by tracker."""
    links = {"Trackio": get_trackio_space_url(), "Comet": get_comet_experiment_url()}
    if is_wandb_available():
        import wandb

        links["Weights & Biases"] = wandb.run.url if wandb.run is not None else None
    return {name: url for name, url in links.items() if url}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _dataset_ids(dataset: Any) -> list[str]:
    """Ids of the Hub that a data set was downloaded from, by what `datasets` keeps about it."""
    if not isinstance(dataset, Dataset | IterableDataset):
        return []
    sources = " ".join(dataset.info.download_checksums or {})
    return sorted(set(re.findall(r"hf://datasets/([\w.-]+/[\w.-]+)@", sources)))
