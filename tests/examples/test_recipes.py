"""Every recipe is read by the example it names, and every field in it exists."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from trl import TrlParser

from trl_gptoss.tiny.cache import MARKER

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs/recipes").glob("*.yaml"))


def example(recipe):
    """The example that the first line names, as a module."""
    name = re.match(r"# examples/(\w+)\.py: ", recipe.read_text()).group(1)
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def parse(module, path, *arguments):
    """As the example does it: its own `parse`, or the classes that `main` is annotated with."""
    command_line = ["--config", str(path), "--use_cpu", "true", *arguments]
    if "parse" in vars(module):
        return module.parse(command_line)
    classes = tuple(a for name, a in module.main.__annotations__.items() if name != "return")
    return TrlParser(classes).parse_args_and_config(command_line)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_recipes_parse_and_every_field_arrives(recipe):
    parsed = parse(example(recipe), recipe)
    for name, value in yaml.safe_load(recipe.read_text()).items():
        [holder] = [p for p in parsed if name in type(p).__dataclass_fields__]
        if name not in ("report_to", "dtype", "lora_target_modules"):  # these are normalised
            assert getattr(holder, name) == value, name


def test_a_misspelt_field_is_an_error(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text((ROOT / "configs/recipes/tiny.yaml").read_text() + "max_turn: 3\n")
    with pytest.raises(ValueError, match="max_turn"):
        parse(example(ROOT / "configs/recipes/tiny.yaml"), bad)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_commands_in_the_comments_name_files_that_exist(recipe):
    comments = "\n".join(line for line in recipe.read_text().splitlines() if line.startswith("#"))
    for path in re.findall(r"(?:configs|examples|docs)/[\w/.]+\.(?:yaml|py|md)", comments):
        assert (ROOT / path).is_file(), path


def test_a_recipe_says_how_long_the_tiny_model_is_warm_started(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_GPTOSS_CACHE", str(tmp_path))
    recipe = ROOT / "configs/recipes/tiny_ppo.yaml"
    _, args, model_args = parse(example(recipe), recipe, "--tiny_model_steps", "0", "--seed", "3")
    made = json.loads((Path(model_args.prepare(args, task="retool")) / MARKER).read_text())["recipe"]
    assert (made["warm_start"]["steps"], made["seed"]) == (0, 3)
    with pytest.raises(ValueError, match="tiny_model_steps is -1"):
        parse(example(recipe), recipe, "--tiny_model_steps", "-1")


def test_there_is_a_recipe_for_each_size_and_task():
    assert {p.stem for p in RECIPES} >= {
        "tiny", "tiny_gsm8k", "tiny_verify_if", "tiny_sft", "gptoss_20b_1gpu", "gptoss_20b_1gpu_gsm8k",
        "gptoss_20b_1gpu_verify_if", "gptoss_20b_8gpu", "gptoss_20b_16nodes", "gptoss_120b", "qwen_control",
    }  # fmt: skip
