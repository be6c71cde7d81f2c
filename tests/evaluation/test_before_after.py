"""What `train_and_measure` leaves behind, and in which order."""

import json
from types import SimpleNamespace

import pytest

from trl_gptoss.evaluation import train_and_measure


class Trainer:
    """Writes down what is asked of it."""

    def __init__(self, folder, resume=None):
        self.args = SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=resume)
        self.folder, self.asked = folder, []

    def is_world_process_zero(self):
        return True

    def train(self, resume_from_checkpoint):
        self.asked.append(("train", resume_from_checkpoint))

    def save_model(self):
        self.asked.append("save_model")

    def save_state(self):
        (self.folder / "trainer_state.json").write_text(
            json.dumps({"global_step": 1, "log_history": [{"step": 1, "reward": 0.5}]})
        )


ROW = {"problems": 2, "answers": 1, "correct": 1, "accuracy": 0.5, "low": 0.1, "high": 0.9}


def test_both_measurements_and_a_report(tmp_path):
    rows = train_and_measure(Trainer(tmp_path), lambda: [ROW], lambda: [ROW])
    assert [row["policy"] for row in rows] == ["before RL", "after RL"]
    assert json.loads((tmp_path / "evaluation.json").read_text()) == rows and (tmp_path / "report.html").is_file()


def test_a_measurement_that_fails_does_not_cost_the_model(tmp_path):
    def fail():
        raise RuntimeError("no verdict")

    trainer = Trainer(tmp_path)
    with pytest.raises(RuntimeError, match="no verdict"):
        train_and_measure(trainer, lambda: [ROW], fail)
    assert trainer.asked == [("train", None), "save_model"]


@pytest.mark.parametrize(
    ("word", "resume"), [("true", True), (True, True), ("false", None), (None, None), ("out/checkpoint-3",) * 2]
)
def test_words_of_a_command_line(tmp_path, word, resume):
    """A resumed run keeps the measurement from before it was interrupted."""
    (tmp_path / "evaluation.json").write_text(json.dumps([{"policy": "before RL", **ROW, "correct": 0}]))
    trainer = Trainer(tmp_path, word)
    rows = train_and_measure(trainer, lambda: [ROW], lambda: [])
    assert trainer.asked[0] == ("train", resume)
    assert [row["correct"] for row in rows] == [0 if resume else 1]
