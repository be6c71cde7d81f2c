"""The planner's time against measured steps of the 24 layers."""

import csv
from pathlib import Path

import pytest

from trl_gptoss.memory import TrainSetup
from trl_gptoss.plan_command import load_shape
from trl_gptoss.step_time import predict_step_time

ROWS = Path(__file__).parents[1] / "benchmarks" / "experts" / "body_h200.csv"


def measured() -> list[dict[str, str]]:
    with ROWS.open() as file:
        return [
            row for row in csv.DictReader(file) if row["attention"] == "sink_fa3" and row["lora_experts"] == "False"
        ]


@pytest.mark.parametrize(
    "row", measured(), ids=lambda row: f"{row['experts']}-{row['fused_elementwise']}-{row['token_chunk']}"
)
def test_measured_bodies_are_predicted_within_5_percent(row: dict[str, str]) -> None:
    setup = TrainSetup(
        tokens=int(row["tokens"]),
        experts_implementation=row["experts"],
        fused_elementwise=row["fused_elementwise"] == "True",
        experts_token_chunk=int(row["token_chunk"] or 0),
    )
    time = predict_step_time(load_shape("openai/gpt-oss-20b"), setup)
    body = time.attention + time.experts + time.dense + time.elementwise  # the benchmark has no head
    assert body == pytest.approx(float(row["seconds"]), rel=0.05)


def test_rows_cover_both_experts_and_the_elementwise_lever() -> None:
    kinds = {(row["experts"], row["fused_elementwise"]) for row in measured()}
    assert kinds >= {("grouped_mm", "False"), ("gptoss_fused", "False"), ("gptoss_fused", "True")}


def test_checkpointing_and_tiles_repeat_two_thirds_of_the_experts_forward() -> None:
    shape = load_shape("openai/gpt-oss-20b")

    def experts(**settings: object) -> float:
        return predict_step_time(shape, TrainSetup(tokens=32768, **settings)).experts

    once = experts(activation_checkpointing=False)
    again = experts()
    assert again == experts(experts_token_chunk=8192)
    assert again == experts(experts_token_chunk=8192, activation_checkpointing=False)
    stock = [experts(experts_implementation="grouped_mm", activation_checkpointing=c) for c in (False, True)]
    forward = 2 * 32768 * 4 * 3 * 2880 * 2880 * 24
    assert again - once == pytest.approx(2 / 3 * forward / 598e12, rel=1e-6)
    assert stock[1] - stock[0] == pytest.approx(forward / 357e12, rel=1e-6)
