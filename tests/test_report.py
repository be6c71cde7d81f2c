"""report.html: what it shows, what it escapes, and that it needs nothing but itself."""

import json
import math
import random
import re
from html.parser import HTMLParser

import pytest

from trl_gptoss.report import make_report
from trl_gptoss.report.charts import Series, chart, number, smooth, ticks
from trl_gptoss.report.run import find_trainer_state
from trl_gptoss.report.sections import points, render_sections
from trl_gptoss.tiny.tokenizer import byte_tokenizer

EVIL = "<script>alert(1)</script><img src=https://evil.example/x onerror=alert(1)>\"'&"


def history(steps):
    rng = random.Random(0)
    for step in range(1, steps + 1):
        share = step / steps
        yield {
            "step": step,
            "epoch": share,
            "loss": rng.gauss(0, 0.05),
            "learning_rate": 3e-4,
            "grad_norm": 0.4 + rng.random(),
            "entropy": 0.5 - 0.3 * share + 0.05 * rng.random(),
            "reward": 0.3 + 0.6 * share + rng.gauss(0, 0.08),
            "reward_std": 0.4,
            "rewards/math_reward/mean": 0.2 + 0.6 * share,
            "rewards/math_reward/std": 0.4,
            "rewards/format_reward/mean": 0.1,
            "frac_reward_zero_std": 0.2 + 0.2 * share,
            "on_policy/forced": 1.0,
            "tools/call_frequency": 0.97,
            "tools/failure_frequency": 0.02,
            "harmony/malformed_frequency": 0.03 * (1 - share),
            "completions/mean_length": 32 + rng.random(),
            "completions/min_length": 20,
            "completions/max_length": 48,
            "step_time": 1.7,
            "num_tokens": 7000 * step,
            "my_own/metric": share,
        } | ({"on_policy/max_log_ratio_recomputed": 1e-6 * rng.random()} if step % 10 == 0 else {})


def record(tokenizer, step, index, reward, answer="38"):
    """A line of trajectories.jsonl: one tool call, one final answer."""

    def turn(policy, observation, results):
        return {
            "policy_ids": tokenizer.encode(policy),
            "policy_text": policy,
            "observation_ids": tokenizer.encode(observation),
            "observation_text": observation,
            "messages": [],
            "anomalies": [],
            "tool_results": results,
        }

    result = {
        "name": "python",
        "arguments": "10+28",
        "text": "38",
        "failed": False,
        "timed_out": False,
        "seconds": 0.04,
    }
    tool_text = "<|start|>python to=assistant<|channel|>analysis<|message|>38<|end|><|start|>assistant"
    turns = [
        turn("<|channel|>analysis to=python code<|message|>10+28<|call|>", tool_text, [result]),
        turn(f"<|channel|>final<|message|>{answer}<|return|>", "", []),
    ]
    prompt = "<|start|>user<|message|>Add 10 and 28.<|end|><|start|>assistant"
    ids = [
        (i, m) for t in turns for i, m in [(i, 1) for i in t["policy_ids"]] + [(i, 0) for i in t["observation_ids"]]
    ]
    return {
        "step": step,
        "index": index,
        "reward": reward,
        "rewards": {"math_reward": reward, "format_reward": 0.0},
        "advantage": reward - 0.5,
        "prompt": [{"role": "user", "content": "Add 10 and 28."}],
        "stop_reason": "final",
        "final_text": answer,
        "prompt_ids": tokenizer.encode(prompt),
        "prompt_text": prompt,
        "completion_ids": [i for i, _ in ids],
        "loss_mask": [m for _, m in ids],
        "turns": turns,
    }


@pytest.fixture
def run_dir(tmp_path):
    run_dir = tmp_path / "run <1>"
    run_dir.mkdir()
    state = {"global_step": 60, "log_history": list(history(60))}
    (run_dir / "trainer_state.json").write_text(json.dumps(state))
    (run_dir / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    rows = [{"policy": "after RL", "tool": "python", "problems": 200, "correct": 178, "accuracy": 0.89}]
    (run_dir / "evaluation.json").write_text(json.dumps(rows))
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(run_dir)
    records = [record(tokenizer, step, i, float(i % 2)) for step in range(1, 61) for i in range(4)]
    records[-1] = record(tokenizer, 60, 3, 1.0, answer=EVIL)
    lines = "".join(json.dumps(r) + "\n" for r in records)
    (run_dir / "trajectories.jsonl").write_text(lines + '{"step": 61, "torn')
    return run_dir


class Page(HTMLParser):
    """Collects tags, attributes and text by the class of the innermost element."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.stack, self.text = [], [], [], {}
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *a) for a in attrs]
        if tag not in ("meta", "line", "circle", "polyline", "polygon", "i", "img"):
            self.stack.append((tag, dict(attrs).get("class")))

    def handle_endtag(self, tag):
        if tag not in ("line", "circle", "polyline", "polygon", "i"):
            assert self.stack.pop()[0] == tag, f"</{tag}> closes another element"

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *a) for a in attrs]

    def handle_data(self, data):
        key = self.stack[-1][1] if self.stack else None
        self.text.setdefault(key, []).append(data)


def test_page_is_well_formed_and_self_contained(run_dir):
    page = Page(make_report(run_dir).read_text())
    assert page.stack == []
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(page.tags)
    assert [a for a in page.attributes if a[1] in ("src", "href", "srcset", "data") or a[1].startswith("on")] == []
    assert "url(" not in (run_dir / "report.html").read_text()
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_untrusted_text_is_escaped(run_dir):
    html = make_report(run_dir).read_text()
    assert "<script" not in html and "<img" not in html
    assert "&lt;script&gt;" in html
    page = Page(html)
    assert EVIL in page.text[None]  # the fact "final text", as text
    assert "".join(page.text["policy"]).count(EVIL) == 1  # and as tokens
    assert page.text[None].count("run <1>") == 2  # title and heading


def test_tokens_are_coloured_by_the_loss_mask(run_dir):
    page = Page(make_report(run_dir).read_text())
    policy = "".join(page.text["policy"] + page.text["policy s"])
    environment = "".join(page.text["env"] + page.text["env s"])
    assert "10+28" in policy and "to=assistant" not in policy
    assert "to=assistant" in environment and "10+28" not in environment
    assert set(page.text["policy s"]) == {"<|channel|>", "<|message|>", "<|call|>", "<|return|>"}
    assert {"<|start|>", "<|end|>"} <= set(page.text["env s"])


def test_a_spelled_special_token_is_not_marked_as_one(run_dir):
    tokenizer = byte_tokenizer()
    line = record(tokenizer, 1, 0, 1.0)
    spelled = tokenizer.encode("<|call|>", split_special_tokens=True)
    line["turns"] = line["turns"][:1]
    line["completion_ids"], line["loss_mask"] = spelled, [1] * len(spelled)
    (run_dir / "trajectories.jsonl").write_text(json.dumps(line))
    page = Page(make_report(run_dir).read_text())
    assert "policy s" not in page.text
    assert "".join(page.text["policy"]).endswith("<|call|>")


def test_every_metric_gets_its_chart_and_absent_ones_none(run_dir):
    page = Page(make_report(run_dir).read_text())
    titles = "".join(page.text[None])
    for title in (
        "Reward",
        "Reward functions",
        "Entropy",
        "Gradient norm",
        "Tool calls per rollout",
        "Completion length",
    ):
        assert title in titles
    assert "my_own/metric" in titles  # unknown metrics are shown too
    assert "KL to the reference" not in titles  # this run logged none
    assert "178" in titles and "0.890" in titles  # the evaluation table


def test_first_and_last_step_are_shown_and_lost_steps_are_not(run_dir):
    page = Page(make_report(run_dir).read_text())
    steps = [t for t in page.text["hint"] if t.startswith("Step")]
    assert steps[0] == "Step 1" and steps[-1] == "Step 60" and len(steps) == 6


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        (
            [{"role": "user", "content": [{"type": "text", "text": "Add 1 "}, {"type": "text", "text": "and 2."}]}],
            "Add 1 and 2.",
        ),
        (None, "(of the environment)"),
    ],
)
def test_the_question_of_every_kind_of_prompt(run_dir, prompt, shown):
    lines = (run_dir / "trajectories.jsonl").read_text().splitlines()
    (run_dir / "trajectories.jsonl").write_text(json.dumps({**json.loads(lines[0]), "prompt": prompt}) + "\n")
    assert Page(make_report(run_dir).read_text()).text["q"] == [shown]


def test_any_trl_run_works(tmp_path):
    """An SFT run: a loss, nothing else."""
    state = {"global_step": 3, "log_history": [{"step": s, "loss": 1 / s, "epoch": 0.1} for s in (1, 2, 3)]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    page = Page(make_report(tmp_path, tmp_path / "other.html").read_text())
    assert page.tags.count("figure") == 1 and "tokens" not in page.text


def test_completions_that_trl_logged(run_dir):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (run_dir / "trajectories.jsonl").unlink()
    (run_dir / "completions").mkdir()
    completion = [
        {"role": "assistant", "content": "calling"},
        {"role": "tool", "content": EVIL},
        {"role": "assistant", "content": "38"},
    ]
    table = {"step": [5], "prompt": ["Add 10 and 28."], "completion": [completion], "f": [1.0], "advantage": [0.5]}
    pq.write_table(pa.table(table), run_dir / "completions" / "completions_00005.parquet")
    page = Page(make_report(run_dir).read_text())
    assert "calling\n" in "".join(page.text["policy"]).replace("↵", "")
    assert "alert(1)" in "".join(page.text["env"]) and "alert(1)" not in "".join(page.text["policy"])


def test_the_newest_state_is_read(tmp_path):
    for folder, step in (("checkpoint-9", 9), ("checkpoint-10", 10)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
    assert find_trainer_state(tmp_path).parent.name == "checkpoint-10"
    assert "checkpoint-10" in make_report(tmp_path).read_text()
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 10, "log_history": []}))
    assert find_trainer_state(tmp_path).parent == tmp_path


def test_a_state_that_a_crash_left_half_written_is_passed_over_and_named_if_there_is_no_other(tmp_path):
    for folder, text in (
        ("checkpoint-9", '{"global_step": 9, "log_history": []}'),
        ("checkpoint-10", '{"global_step": 1'),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "trainer_state.json").write_text(text)
    assert find_trainer_state(tmp_path).parent.name == "checkpoint-9"
    (tmp_path / "evaluation.json").write_text("[{")
    with pytest.raises(ValueError, match="evaluation.json is no JSON, perhaps it was not written to its end"):
        make_report(tmp_path)
    (tmp_path / "checkpoint-9/trainer_state.json").write_text("{}")
    with pytest.raises(ValueError, match="no trainer_state.json of .* was written to its end: .*checkpoint-10"):
        make_report(tmp_path)


def test_missing_runs_say_what_is_expected(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        make_report(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no trainer_state.json"):
        make_report(tmp_path)


def test_chart_places_points_in_order_and_leaves_out_what_is_not_finite():
    svg = chart("t", [Series(label="a", points=[(0, 1.0), (1, float("nan")), (2, 3.0), (3, float("inf"))])])
    assert "2 values not finite" in svg
    line = re.search(r'class="line c0" points="([^"]*)"', svg)[1].split()
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in line)
    assert x0 < x1 and y0 > y1  # later is right, larger is up
    assert "nan" not in svg.lower().replace("not finite", "")
    assert chart("t", [Series(label="a", points=[(0, math.nan)])]) == ""


def test_smoothing_keeps_a_straight_line_and_ticks_are_round():
    straight = [(float(x), 2.0 * x) for x in range(30)]
    assert smooth(straight, 7)[3:-3] == straight[3:-3]
    assert smooth([(0, 0), (1, 3), (2, 0)], 3) == [(0, 1.5), (1, 1), (2, 1.5)]
    assert ticks(0, 1) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert ticks(-3e-7, 1e-6)[0] <= 0 and len(ticks(-3e-7, 1e-6)) >= 3
    assert [number(v) for v in (0, 0.12345, 3e-7, 123456, 42.0)] == ["0", "0.1235", "3e-7", "1.23e5", "42"]


def test_a_metric_logged_twice_at_a_step_keeps_the_last():
    log = [{"step": 1, "loss": 1.0}, {"step": 1, "loss": 2.0}, {"step": 2, "note": "text"}]
    assert points(log, "loss") == [(1, 2.0)]
    assert [heading for heading, _ in render_sections(log)] == ["Optimisation"]
