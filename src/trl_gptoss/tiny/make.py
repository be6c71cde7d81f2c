"""Tokenizer, warm start and files of the tiny model, put together and cached."""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, GptOssForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..harmony import HarmonyVocabulary
from .cache import cached_folder, check_out, copy_folder, default_cache_dir, digest
from .demonstrations import Demonstration, with_filler
from .model import special_ids, tiny_config, tiny_generation_config, tiny_model, widen_vocabulary
from .vocabulary import TASKS, small_tokenizer, used_ids
from .warm_start import WarmStart, train

GPT_OSS_VOCABULARY = 201088
POSITIONS_OF_REAL_PROMPTS = 1024  # before YaRN's factor of 4

# Random text before the questions of the warm start in that vocabulary (see `with_filler`). Ids below LAST_TEXT_TOKEN
# are gpt-oss's ordinary tokens.
FILLER_TOKENS, LONGEST_FILLER, LAST_TEXT_TOKEN = 600, 100, 199998

# Enough to have seen nearly every 3-digit token of the real vocabulary that an answer can begin with.
SAMPLE_SIZE = 4000

# The wide vocabulary's prompts are four times as long (the system message is 160 tokens in it): smaller batches.
DEFAULT_WARM_START = {"small": WarmStart(steps=180, batch_size=64), "gpt-oss": WarmStart(steps=150, batch_size=16)}
# Steps that differ by task: the table of what two digits give takes longer to learn.
WARM_START_STEPS = {"gsm8k": 300, "verify_if": 180}

CARD = """---
library_name: transformers
tags: [gpt_oss, tiny, trl-gptoss]
---
# Tiny GPT-OSS

Made by `trl-gptoss tiny-model --task {task}` for trying out and testing agentic RL. It {can}, and it is wrong more often
than right **on purpose**: it imitates a demonstrator that is, so that reinforcement learning has something to learn. It
can do nothing else.
"""


def load_tokenizer(kind: str, path: str | None, task: str = "retool") -> PreTrainedTokenizerFast:
    """The tokenizer of a tiny model.

    Args:
        kind (`str`): `"small"`, or `"gpt-oss"` for the real one.
        path (`str` or `None`): for `"gpt-oss"`: a local folder with the tokenizer of openai/gpt-oss-20b or -120b.
        task (`str`, *optional*, defaults to `"retool"`): whose conversations `"small"` is trained on.

    Raises:
        `ValueError`: the combination makes no sense, or the folder holds another tokenizer.
        `FileNotFoundError`: the folder has no tokenizer.json.
    """
    if kind == "small":
        if path is not None:
            raise ValueError(
                "--tokenizer small is made here and takes no --tokenizer-path; meant --tokenizer gpt-oss?"
            )
        return small_tokenizer(task)
    if path is None:
        raise ValueError(
            "--tokenizer gpt-oss needs --tokenizer-path FOLDER with gpt-oss's tokenizer.json; to get one: "
            "hf download openai/gpt-oss-20b tokenizer.json tokenizer_config.json chat_template.jinja --local-dir FOLDER"
        )
    if not (Path(path) / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{path} has no tokenizer.json; expected a folder with gpt-oss's tokenizer files")
    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.convert_tokens_to_ids("<|call|>") != 200012:
        raise ValueError(f"the tokenizer in {path} is not gpt-oss's: <|call|> is not its id 200012")
    return tokenizer


def _recipe(
    kind: str, task: str, tokenizer: PreTrainedTokenizerFast, seed: int, settings: WarmStart
) -> dict[str, Any]:
    """Everything that determines the result, in plain JSON."""
    probe = list(islice(TASKS[task].demonstrations(tokenizer, seed), 64))
    sources = {p.name: p.read_text(encoding="utf-8") for p in sorted(Path(__file__).parent.glob("*.py"))}
    return {
        "tokenizer": kind,
        "task": task,
        "tokenizer_json": digest(tokenizer.backend_tokenizer.to_str()),
        "chat_template": digest(tokenizer.chat_template or ""),
        "seed": seed,
        "warm_start": asdict(settings),
        # The rendering of the conversations, by its result: a change anywhere below it shows here.
        "demonstrations": digest(json.dumps([[d.ids, d.policy_mask] for d in probe])),
        "code": digest(json.dumps(sources, sort_keys=True)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _warm_started(
    tokenizer: PreTrainedTokenizerBase, kind: str, task: str, seed: int, settings: WarmStart
) -> GptOssForCausalLM:
    """Train on the ids that demonstrations use; for the real vocabulary the other rows are added afterwards.

    The loss counts the other ids as if they were there (see `weighted_loss`), so this is the same as training the wide
    model with the other rows of its head held at zero, at a seven-hundredth of its cost.
    """
    special = special_ids(tokenizer)
    demonstrations = TASKS[task].demonstrations
    if kind == "small":
        model = tiny_model(tiny_config(len(tokenizer), special), seed)
        train(model, demonstrations(tokenizer, seed), settings)
        return model
    filler = random.Random(FILLER_TOKENS).sample(range(LAST_TEXT_TOKEN), FILLER_TOKENS)
    sample = list(islice(demonstrations(tokenizer, seed), SAMPLE_SIZE))
    ids = used_ids(tokenizer, [*sample, Demonstration(ids=filler, policy_mask=[])])
    narrow_id = {i: k for k, i in enumerate(ids)}
    narrow_special = {name: narrow_id[i] for name, i in special.items()}
    model = tiny_model(tiny_config(len(ids), narrow_special, POSITIONS_OF_REAL_PROMPTS), seed)
    message_id = HarmonyVocabulary.of(tokenizer).message
    stream = with_filler(demonstrations(tokenizer, seed), filler, message_id, LONGEST_FILLER, seed)
    train(model, _narrowed(stream, narrow_id), settings, GPT_OSS_VOCABULARY - len(ids))
    wide = tiny_config(GPT_OSS_VOCABULARY, special, POSITIONS_OF_REAL_PROMPTS)
    return widen_vocabulary(model, ids, wide, seed)


def _narrowed(stream: Iterator[Demonstration], narrow_id: dict[int, int]) -> Iterator[Demonstration]:
    """Demonstrations in the narrow ids; the few that use an id outside of them are left out."""
    for demonstration in stream:
        ids = [narrow_id.get(i) for i in demonstration.ids]
        if None not in ids:
            yield Demonstration(ids=ids, policy_mask=demonstration.policy_mask)


def make_tiny_model(
    out: str | Path | None = None,
    *,
    task: str = "retool",
    tokenizer: str = "small",
    tokenizer_path: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """Make a warm-started tiny GPT-OSS, or find the one made before, and return its folder.

    Args:
        out (`str` or `Path`, *optional*): copy it there; without it the folder in the cache is returned.
        task (`str`, *optional*, defaults to `"retool"`):
            What it is warm-started on: `"retool"`, `"gsm8k"` or `"verify_if"` (needs the extra `tasks`).
        tokenizer (`str`, *optional*, defaults to `"small"`):
            `"small"`: trained here, a few hundred tokens. `"gpt-oss"`: the real one, 201088 ids.
        tokenizer_path (`str`, *optional*): for `"gpt-oss"`: a local folder with that tokenizer.
        seed (`int`, *optional*, defaults to 0): of the initialisation and of the demonstrations.
        steps (`int`, *optional*): steps of the warm start, 150 to 300 by tokenizer and task if not given;
            0 leaves the random initialisation.
        cache_dir (`str` or `Path`, *optional*): `$TRL_GPTOSS_CACHE` or `~/.cache/trl_gptoss` if not given.

    Raises:
        `ValueError`: arguments that do not go together, or an `out` that holds something else.
        `FileNotFoundError`: `tokenizer_path` has no tokenizer.
    """
    if tokenizer not in DEFAULT_WARM_START:
        raise ValueError(f"tokenizer is {tokenizer!r}; expected one of {', '.join(DEFAULT_WARM_START)}")
    if task not in TASKS:
        raise ValueError(f"task is {task!r}; expected one of {', '.join(TASKS)}")
    if steps is not None and steps < 0:
        raise ValueError(f"steps is {steps}; expected a number of warm-start steps, 0 for the random initialisation")
    if out is not None:
        check_out(Path(out))
    settings = DEFAULT_WARM_START[tokenizer]
    if tokenizer == "small":
        settings = replace(settings, steps=WARM_START_STEPS.get(task, settings.steps))
    if steps is not None:
        settings = replace(settings, steps=steps)
    loaded = load_tokenizer(tokenizer, tokenizer_path, task)

    def make(folder: Path) -> None:
        model = _warm_started(loaded, tokenizer, task, seed, settings)
        model.generation_config = tiny_generation_config(loaded)
        model.save_pretrained(folder)
        loaded.save_pretrained(folder)
        (folder / "README.md").write_text(CARD.format(task=task, can=TASKS[task].can), encoding="utf-8")

    cache = default_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = cached_folder(cache, _recipe(tokenizer, task, loaded, seed, settings), make)
    if out is None:
        return folder
    copy_folder(folder, Path(out))
    return Path(out)
