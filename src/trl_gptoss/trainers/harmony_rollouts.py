"""From a batch of data set rows to finished Harmony rollouts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from trl.data_utils import is_conversational

from ..environments import Environment
from ..harmony import HarmonyVocabulary, render_prompt
from ..rollouts import Episode, GenerationBackend, RolloutLimits, RouterShape, Toolbox, ToolRunner, run_episodes
from ..rollouts.harmony_format import HarmonyFormat
from ..trajectory import Trajectory
from .config import GptOssGRPOConfig

# What the fields of the configuration say, and what the loop decides by itself.
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OF_THE_TEMPLATE = ("reasoning_effort", "model_identity", "builtin_tools")  # of GPT-OSS's chat template
_OF_THE_LOOP = ("do_sample", "max_length", "max_new_tokens", "num_beams", "num_return_sequences", "stop_strings")


def check_generation_kwargs(args: GptOssGRPOConfig, stop_ids: list[int]) -> None:
    """Refuse what would make rollouts end elsewhere, or come from another distribution than the loss thinks.

    Args:
        args ([`GptOssGRPOConfig`]): with `generation_kwargs`. What vLLM refuses beyond the stop ids is checked with its engine.
        stop_ids (`list[int]`): of Harmony turns.

    Raises:
        ValueError: names what to remove.
    """
    found = args.generation_kwargs or {}
    for name in ("eos_token_id", "stop_token_ids"):
        if name in found:
            raise ValueError(
                f"generation_kwargs sets {name}={found[name]}, but Harmony turns end with {stop_ids} (<|return|>, "
                "<|endoftext|>, <|call|>). Remove it."
            )
    wrong = [name for name in found if name in (*_FIELDS, *_OF_THE_LOOP)]
    if wrong and not args.use_vllm:
        raise ValueError(
            f"generation_kwargs sets {wrong}; {', '.join(_FIELDS)} are fields of the configuration, which the loss reads too, "
            "the budget is max_rollout_tokens, and the rest belongs to the rollouts. Remove them."
        )


def check_template_kwargs(args: GptOssGRPOConfig, reward_funcs: list[Any]) -> None:
    """Refuse `chat_template_kwargs`, which would have no effect: `{"reasoning_effort": "high"}` is how TRL alone says it.

    Args:
        args ([`GptOssGRPOConfig`]): with `chat_template_kwargs`.
        reward_funcs (`list`): reward models among them render conversations with these arguments.

    Raises:
        ValueError: says which field to set.
    """
    given = args.chat_template_kwargs or {}
    reads_them = any(isinstance(f, (str, nn.Module)) for f in reward_funcs)
    lost = {name: value for name, value in given.items() if not reads_them or name in _OF_THE_TEMPLATE}
    if lost:
        raise ValueError(
            f"chat_template_kwargs={lost} has no effect on Harmony rollouts, whose prompts are rendered without a chat template. "
            f"Remove it; the effort is the field reasoning_effort (now {args.reasoning_effort!r}), the date is prompt_date."
        )


class HarmonyRollouts:
    """Renders prompts, runs the loop, and keeps a batch's rollouts in the order of its rows.

    Args:
        args ([`GptOssGRPOConfig`]): budgets, limits, date and effort.
        tokenizer (`PreTrainedTokenizerBase`): a Harmony tokenizer.
        backend ([`GenerationBackend`]): what samples.
        tools ([`ToolRunner`]): what executes calls.
        limits ([`RolloutLimits`]): budgets of one rollout.
        any_rank_running (`Callable[[bool], bool]`): logical or over all ranks.
        router ([`RouterShape`], *optional*): the trainer replays the experts that the backend reports.
    """

    def __init__(
        self,
        args: GptOssGRPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        backend: GenerationBackend,
        tools: ToolRunner,
        limits: RolloutLimits,
        any_rank_running: Callable[[bool], bool],
        router: RouterShape | None = None,
    ) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.backend = backend
        self.tools = tools
        self.limits = limits
        self.any_rank_running = any_rank_running
        self.router = router
        self.turn_format = HarmonyFormat(tokenizer)
        self.stop_ids = HarmonyVocabulary.of(tokenizer).stop_ids

    def run(
        self,
        prompts: list[list[dict[str, Any]]],
        rows: list[dict[str, Any]],
        functions: list[dict[str, Callable[..., Any]]],
        environments: list[Any] | None,
    ) -> list[Episode]:
        """Run one rollout per row.

        Args:
            prompts (`list[list[dict]]`): messages of each row.
            rows (`list[dict]`): the data set rows; a column `reasoning_effort` goes before the configured one.
            functions (`list[dict[str, Callable]]`): the tools of each rollout by name.
            environments (`list` or `None`): the environment of each rollout.

        Returns:
            `list[Episode]`: in the order of the rows.
        """
        # Saved with the random states, so that a resumed run samples the same.
        seed = int(torch.randint(2**62, ()))
        boxes = [
            self._toolbox(tools, environments[i] if environments is not None else None)
            for i, tools in enumerate(functions)
        ]
        rendered: dict[str, list[int]] = {}  # the rollouts of a group share their prompt
        episodes = []
        for i, (messages, row, toolbox) in enumerate(zip(prompts, rows, boxes, strict=True)):
            effort = row.get("reasoning_effort") or self.args.reasoning_effort
            environment = environments[i] if environments is not None else None
            # Two environment classes may describe tools of one name differently.
            kinds = [
                (name, tool if isinstance(tool, str) else "")
                for name, tool in zip(toolbox.functions, toolbox.declared)
            ]
            key = repr((messages, effort, id(type(environment)), kinds))
            if key not in rendered:
                rendered[key] = self._render(messages, toolbox, effort)
            episodes.append(
                Episode(
                    trajectory=Trajectory(prompt_ids=list(rendered[key])),
                    toolbox=toolbox,
                    environment=environment if isinstance(environment, Environment) else None,
                    seed=seed + i,
                )
            )
        run_episodes(
            episodes,
            self.backend,
            self.turn_format,
            self.tools,
            self.limits,
            self.stop_ids,
            self.any_rank_running,
            self.router,
            self.args.wait_for_tools,
        )
        return episodes

    def _toolbox(self, functions: dict[str, Callable[..., Any]], environment: Any) -> Toolbox:
        """Built-in tools are declared by their Harmony name, the others by their signature."""
        timeout, builtin, output_limit = self.args.tool_timeout, (), None
        if isinstance(environment, Environment):
            builtin, output_limit = environment.builtin_tools, environment.tool_output_limit
            if environment.tool_timeout is not None:
                timeout = environment.tool_timeout
        declared = [name if name in builtin else function for name, function in functions.items()]
        return Toolbox(functions=functions, declared=declared, timeout=timeout, output_limit=output_limit)

    def _render(self, messages: list[dict[str, Any]], toolbox: Toolbox, effort: str) -> list[int]:
        if not messages or not is_conversational({"prompt": messages}):
            raise ValueError(
                f"Harmony prompts are lists of messages ([{{'role': 'user', 'content': ...}}]), the column `prompt` "
                f"holds {type(messages).__name__}: {str(messages)[:80]!r}."
            )
        return render_prompt(
            messages,
            self.tokenizer,
            tools=toolbox.declared,
            reasoning_effort=effort,
            date=self.args.prompt_date,
        )
