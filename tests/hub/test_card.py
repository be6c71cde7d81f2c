"""The model card: what it says of a run, what it leaves out, and that nothing in a run can break it."""

import pytest
from hub_metadata import card_errors
from huggingface_hub import ModelCard

from trl_gptoss.hub.card import ModelCardFacts, make_card, write_card
from trl_gptoss.hub.scrub import PATH, SECRET
from trl_gptoss.report.charts import Series, standalone_svg

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"


def test_a_card_of_nothing_but_a_name():
    card = make_card(ModelCardFacts(name="model"), {})
    assert card_errors(card) == [] and "# model" in card and "## Evaluation" not in card
    assert "a model of our own" in card


def test_secrets_and_paths_anywhere():
    """In every field that holds text, in keys as in values."""
    bad = f"/home/me/{TOKEN}/x and {TOKEN}"
    facts = ModelCardFacts(
        name=bad,
        repo_id="me/model",
        base_model="/home/me/model",
        datasets=[bad, "me/data"],
        task=bad,
        trainer=bad,
        rewards={bad: 1.0},
        recipe={"setting": {"nested": [bad]}, bad: 1},
        evaluations=[{"policy": bad, "problems": 4, "correct": 2}],
        history=[{"step": 1, f"on_policy/of {bad}": 0.5}],
        hardware=bad,
        license="apache-2.0",
        tags=["trl"],
        links={"tracker": f"https://me:{TOKEN}@example.com"},
        citations=[bad],
    )
    card = make_card(facts, {})
    assert TOKEN not in card and "/home/me" not in card
    assert SECRET in card and PATH in card and "- me/data" in card


def test_own_secrets_and_a_relative_output_directory():
    facts = ModelCardFacts(name="model", task="of outputs/run, key: correct-horse")
    card = make_card(facts, {}, secrets=["correct-horse"], places=["outputs/run"])
    assert f"of {PATH}, key: {SECRET}" in card


def test_evaluations_with_intervals():
    rows = [
        {"policy": "after RL", "environment": "python", "problems": 200, "correct": 180},  # Wilson
        {
            "policy": "two answers",
            "problems": 100,
            "answers": 2,
            "correct": 150,
            "accuracy": 0.75,
            "low": 0.69,
            "high": 0.8,
        },
        {"policy": "no interval", "problems": 100, "answers": 2, "correct": 150},
        {"evaluation": "math_reward", "problems": 100, "mean": 0.5, "std": 0.5},
        {"policy": "broken", "problems": 0, "correct": 0},
    ]
    card = make_card(ModelCardFacts(name="model", datasets=["me/data"], evaluations=rows), {})
    assert "| after RL, python | 200 | 0.900 | 0.851 to 0.934 |" in card
    assert "| two answers | 100 x 2 answers | 0.750 | 0.690 to 0.800 |" in card
    assert "| math_reward | 100 | 0.500 | 0.402 to 0.598 |" in card
    assert "broken" not in card and "no interval" not in card
    assert card_errors(card) == [] and card.count("type: accuracy") == 2


def test_a_policy_cannot_break_the_table():
    facts = ModelCardFacts(name="model", recipe={"stop": "a|b\n| c |\n## Heading"}, rewards={"a|b": 1.0})
    card = make_card(facts, {})
    assert "| `stop` | `a\\|b \\| c \\| ## Heading` |" in card and "\n## Heading" not in card


@pytest.mark.parametrize(
    "evil",
    ["x\n---\nlicense: mit\n---\n# other", "a: [b", "#no", "'\"", "me/data\ntags: [x]", "ключ: 值 🙂", "- x", "%", ""],
)
def test_names_cannot_break_the_metadata(evil):
    """Names of data sets, policies, models and tags that mean something in YAML or Markdown."""
    facts = ModelCardFacts(
        name=f"model {evil}",
        datasets=[evil, "me/data"],
        tags=[evil],
        license="apache-2.0",
        evaluations=[{"policy": evil, "problems": 4, "correct": 2}],
        rewards={evil: 1.0},
    )
    card = make_card(facts, {})
    data = ModelCard(card).data.to_dict()
    assert data["license"] == "apache-2.0" and data["datasets"] == ["me/data"]
    assert set(data["tags"]) == {"generated_from_trainer", "reinforcement-learning", evil} - {""}
    assert data["model-index"][0]["results"][0]["dataset"]["type"] == (evil or "me/data")
    assert card.count("\n# ") == 1 and "datasets/me/data)" in card


def test_on_policy_statistics():
    history = [
        {"step": 1, "on_policy/max_log_ratio_recomputed": 0.01, "rollout_weights/kl": 2e-4, "loss": 1.0},
        {"step": 2, "on_policy/max_log_ratio_recomputed": 0.03, "rollout_weights/kl": float("nan")},
        {"step": 3, "on_policy/max_log_ratio_recomputed": 0.02},
    ]
    card = make_card(ModelCardFacts(name="model", history=history), {})
    assert "| `on_policy/max_log_ratio_recomputed` | 0.01 | 0.02 | 0.03 |" in card
    assert "| `rollout_weights/kl` | 2e-4 | 2e-4 | 2e-4 |" in card and "`loss`" not in card


@pytest.mark.parametrize(
    ("kind", "library"), [("full", "transformers"), ("mxfp4", "transformers"), ("adapter", "peft")]
)
def test_kinds(kind, library):
    facts = ModelCardFacts(
        name="model", repo_id="me/model", base_model="openai/gpt-oss-20b", kind=kind, license="apache-2.0"
    )
    card = make_card(facts, {})
    assert card_errors(card) == [] and f"library_name: {library}" in card
    assert f"base_model_relation: {'adapter' if kind == 'adapter' else 'finetune'}" in card
    code = card.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")


def test_figures_are_files_of_their_own(tmp_path):
    history = [{"step": i, "reward": i / 10, "rewards/math_reward/mean": 0.5} for i in range(30)]
    card = write_card(ModelCardFacts(name="model", history=history), tmp_path).read_text()
    assert "![Reward](figures/reward.svg)" in card and "![Reward functions](figures/rewards.svg)" in card
    svg = (tmp_path / "figures/reward.svg").read_text()
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"') and "var(--" not in svg and "<script" not in svg
    assert standalone_svg("<b>", [Series(label="<i>", points=[(0, 1), (1, 2)])]).count("<i>") == 0
    assert standalone_svg("nothing", [Series(label="x", points=[(0, float("nan"))])]) == ""
