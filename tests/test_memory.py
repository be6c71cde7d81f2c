"""The planner against an independent count: the model run on fake tensors (benchmarks/memory/simulate.py)."""

import csv
import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GptOssConfig

from trl_gptoss import cli
from trl_gptoss.memory import GIB, ModelShape, TrainSetup, lora_parameters, predict_memory
from trl_gptoss.plan_command import choose, load_shape
from trl_gptoss.step_time import predict_step_time

SIMULATE = Path(__file__).parents[1] / "benchmarks" / "memory" / "simulate.py"
SHAPE = load_shape("openai/gpt-oss-20b")


def test_parameters_are_those_of_the_model():
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import GptOssForCausalLM

    config = GptOssConfig(num_hidden_layers=3, num_local_experts=8)
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
        shape = ModelShape.from_config(config)
        assert shape.parameters == sum(p.numel() for p in model.parameters())
        model = get_peft_model(
            model,
            LoraConfig(
                r=7,
                target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
                target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            ),
        )
    assert lora_parameters(shape, 7, experts=True) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_published_sizes():
    assert SHAPE.parameters == pytest.approx(20.9e9, rel=5e-3)
    assert load_shape("openai/gpt-oss-120b").parameters == pytest.approx(116.8e9, rel=5e-3)


def _simulated(line: str) -> tuple[float, float]:
    out = subprocess.run(
        [sys.executable, "-W", "ignore", str(SIMULATE), *line.split()], capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr[-2000:]
    _, _, total, predicted, _ = out.stdout.strip().splitlines()[-1].split(", ")
    return float(total), float(predicted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "--layers 2 --tokens 16384",
        "--layers 2 --tokens 16384 --chunk 4096 --fused-elementwise",
        "--layers 2 --tokens 16384 --method full",
        "--layers 2 --tokens 16384 --no-checkpointing",
    ],
)
def test_prediction_equals_counted_allocations(line: str):
    total, predicted = _simulated(line)
    assert predicted == pytest.approx(total, rel=0.03)


def test_committed_rows_are_what_the_planner_says_now():
    """The simulation takes minutes; its committed rows must belong to the present formulas, and agree within 5 %."""
    with (SIMULATE.parent / "simulated.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 12
    for row in rows:
        assert abs(float(row["error"])) <= 0.05, row
        setup, shape = _setup(row["settings"])
        assert predict_memory(shape, setup).total / 2**20 == pytest.approx(float(row["predicted_mib"]), abs=1)


def _setup(line: str) -> tuple[TrainSetup, ModelShape]:
    words = line.split()

    def value(name: str, default: str) -> str:
        return words[words.index(name) + 1] if name in words else default

    shape = replace(SHAPE, num_layers=int(value("--layers", "24")), num_experts=int(value("--experts-count", "32")))
    method = value("--method", "lora")
    setup = TrainSetup(
        tokens=int(value("--tokens", "32768")),
        method="full" if method == "full" else "lora",
        lora_experts=method == "lora+experts",
        activation_checkpointing="--no-checkpointing" not in words,
        experts_implementation=value("--experts", "gptoss_fused"),
        experts_token_chunk=int(value("--chunk", "0")),
        fused_head="--naive-head" not in words,
        fused_elementwise="--fused-elementwise" in words,
        optimizer_bytes=0,
    )
    return setup, shape


def test_every_lever_lowers_the_prediction():
    start = TrainSetup(
        tokens=65536, fused_head=False, activation_checkpointing=False, experts_implementation="grouped_mm"
    )
    peaks = [predict_memory(SHAPE, start).total]
    for change in (
        {"fused_head": True},
        {"activation_checkpointing": True},
        {"experts_implementation": "gptoss_fused"},
        {"fused_elementwise": True},
        {"experts_token_chunk": 8192},
        {"activation_offloading": True},
        {"num_gpus": 8, "sharding": "fsdp2"},
        {"sequence_parallel_size": 8},
    ):
        start = replace(start, **change)
        peaks.append(predict_memory(SHAPE, start).total)
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)


def test_activations_are_linear_in_tokens_and_states_do_not_depend_on_them():
    small, large = (predict_memory(SHAPE, TrainSetup(tokens=n)) for n in (16384, 65536))
    assert large.activations == pytest.approx(4 * small.activations, rel=1e-6)
    assert large.parts["weights"] == small.parts["weights"]


def test_measured_critics():
    """Peaks of PPO updates on an H200. Formulas that expect the gradients of an earlier micro-batch would fail by up to 11 %."""
    with (SIMULATE.parents[1] / "ppo/memory_h200.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    for row in rows:
        shape = replace(SHAPE, num_layers=int(row["layers"]))
        setup = TrainSetup(tokens=int(row["tokens"]), method=row["method"], critic=row["critic"], accumulates=False)
        predicted = predict_memory(shape, setup).total / GIB
        assert predicted == pytest.approx(float(row["peak_gib"]), rel=0.005), row
        assert round(predicted, 2) == float(row["predicted_gib"])


def test_measured_steps_of_two_gpus_with_fsdp2():
    """Without the root unit, which is whole throughout, the planner would be up to 8 % too low."""
    peaks: dict[tuple[str, ...], float] = {}
    with (SIMULATE.parents[1] / "multi_gpu/steps_h200.csv").open() as file:
        for row in csv.DictReader(file):
            if row["sharding"] == "fsdp2":
                key = tuple(row[name] for name in ("layers", "method", "sequence_parallel_size", "lengths"))
                peaks[key] = max(peaks.get(key, 0.0), float(row["peak_gib"]))
    assert len(peaks) == 6
    for (layers, method, size, text), measured in peaks.items():
        lengths = [int(length) for length in text.split()]
        passes = enumerate(lengths if size == "2" else lengths[:1])  # shared rows come one after the other
        setups = [
            TrainSetup(
                tokens=tokens, method=method, num_gpus=2, sharding="fsdp2", sequence_parallel_size=int(size),
                experts_token_chunk=32768, fused_elementwise=True, accumulates=number > 0,
            )
            for number, tokens in passes
        ]  # fmt: skip
        shape = replace(SHAPE, num_layers=int(layers))
        predicted = max(predict_memory(shape, setup).total for setup in setups) / GIB
        assert predicted == pytest.approx(measured, rel=0.012), (layers, method, size, text)


def test_without_accumulation_the_gradients_of_a_layer_and_the_embedding_are_missing():
    accumulating = predict_memory(SHAPE, TrainSetup(tokens=32768, method="full"))
    one = predict_memory(SHAPE, TrainSetup(tokens=32768, method="full", accumulates=False))
    assert one.parts["gradients to come"] == -2 * (SHAPE.layer_parameters + SHAPE.embedding_parameters)
    hidden = 2 * 32768 * SHAPE.hidden_size  # a layer's checkpoint; those of the other layers are gone by then
    assert accumulating.total - one.total == -one.parts["gradients to come"] + (SHAPE.num_layers - 1) * hidden
    lora = [predict_memory(SHAPE, TrainSetup(tokens=32768, accumulates=a)) for a in (True, False)]
    assert lora[0] == lora[1]


def test_a_critic_adds_what_it_trains():
    plain = predict_memory(SHAPE, TrainSetup(tokens=32768))
    with_critic = {
        c: predict_memory(SHAPE, TrainSetup(tokens=32768, critic=c)) for c in ("separate", "shared", "lora")
    }
    adapters = lora_parameters(SHAPE, 16, experts=False)
    backbone = SHAPE.parameters - SHAPE.embedding_parameters
    # weights, gradients, two Adam states: of float32 adapters, and of a backbone in bfloat16 that is trained in full
    assert with_critic["lora"].parts["critic"] == 4 * 4 * adapters
    assert with_critic["separate"].parts["critic"] == 4 * 2 * backbone
    assert "critic" not in with_critic["shared"].parts and "critic" not in plain.parts
    # the passes come one after the other: the LoRA critic's is that of the policy without a language head
    assert with_critic["lora"].activations == plain.activations
    assert plain.activations < with_critic["separate"].activations < 2 * plain.activations
    assert with_critic["separate"].worst.startswith("critic: ") and with_critic["shared"].total >= plain.total
    sharded = TrainSetup(
        tokens=32768, method="full", critic="separate", num_gpus=8, sharding="fsdp2", master_weights=True
    )
    assert predict_memory(SHAPE, sharded).parts["critic"] == 4 * 4 * backbone / 8
    with pytest.raises(ValueError, match="needs method 'lora'"):
        TrainSetup(tokens=1, method="full", critic="lora")


def test_choose_stops_at_the_first_lever_that_fits():
    setup = TrainSetup(tokens=131072)
    plain = predict_memory(SHAPE, setup).total
    assert choose(SHAPE, setup, plain)[1] == []
    chosen, used = choose(SHAPE, setup, plain - GIB)
    assert used == ["fused_elementwise"] and chosen.fused_elementwise
    assert choose(SHAPE, setup, 0)[1] == ["fused_elementwise", "experts_token_chunk", "activation_offloading"]


def test_step_time_adds_up_and_grows_with_the_square_of_one_sequence():
    one = predict_step_time(SHAPE, TrainSetup(tokens=65536))
    cut = predict_step_time(SHAPE, TrainSetup(tokens=65536), lengths=[8192] * 8)
    assert one.experts == cut.experts and one.attention > 4 * cut.attention
    assert one.total == pytest.approx(
        one.attention + one.experts + one.dense + one.elementwise + one.head + one.exchange
    )
    with pytest.raises(ValueError, match="sum to 10"):
        predict_step_time(SHAPE, TrainSetup(tokens=65536), lengths=[10])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"method": "qlora"}, "'lora', 'full'"),
        ({"sharding": "fsdp2"}, "more than one GPU"),
        ({"num_gpus": 4, "sequence_parallel_size": 3}, "does not divide"),
        ({"experts_implementation": "grouped_mm", "experts_token_chunk": 4}, "needs experts_implementation"),
        ({"activation_checkpointing": False, "activation_offloading": True}, "needs activation_checkpointing"),
    ],
)
def test_bad_setups(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        TrainSetup(**{"tokens": 8, **change})


@pytest.mark.parametrize(
    "wrong",
    [
        ["--gpu-memory", "0"],
        ["--gpu-memory", "nan"],
        ["--engine-memory", "-4"],
        ["--engine-memory", "nan"],
        ["--extra-models", "-1"],
        ["--lengths", "1", "2"],
        ["--method", "full", "--lora-experts"],
        ["--tokens", "8", "--lengths", "-1", "9"],
    ],
)
def test_numbers_that_mean_nothing_are_one_line_and_status_1(capsys, wrong):
    assert cli.main(["plan", *wrong]) == 1
    out, err = capsys.readouterr()
    assert (
        not out
        and err.count("\n") == 1
        and "expected" in err
        and next(w for w in wrong[::-1] if w.startswith("--")) in err
    )


def test_command(capsys, tmp_path):
    assert cli.main(["plan", "--tokens", "131072", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["peak_gib"] == pytest.approx(sum(found["parts_gib"].values()), abs=0.05)
    assert cli.main(["plan", "--model", "openai/gpt-oss-120b", "--tokens", "8192"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert cli.main(["plan", "--model", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert cli.main(["plan", "--model", str(tmp_path)]) == 1
    assert "'llama'" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert cli.main(["plan", "--model", str(tmp_path)]) == 1
    assert "is no JSON" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "hidden_size": 64}))
    assert cli.main(["plan", "--model", str(tmp_path)]) == 1
    assert "has no num_hidden_layers, num_attention_heads" in capsys.readouterr().err
    assert cli.main(["plan", "--gpus", "128", "--sequence-parallel-size", "128"]) == 1
    assert "cannot share 64 query heads" in capsys.readouterr().err
    GptOssConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    assert cli.main(["plan", "--model", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    "arguments",
    [[], ["--lora-experts"], ["--critic", "shared"], ["--method", "full", "--gpus", "8", "--critic", "separate"]],
)
def test_the_settings_are_those_of_a_recipe_and_say_what_was_planned(capsys, tmp_path, arguments):
    from trl import ModelConfig, TrlParser

    from trl_gptoss import GptOssPPOConfig

    assert cli.main(["plan", "--tokens", "8192", *arguments]) == 0
    recipe = tmp_path / "recipe.yaml"
    pasted = capsys.readouterr().out.split("settings:\n")[1]
    recipe.write_text(f"output_dir: out\nuse_cpu: true\nbf16: false\n{textwrap.dedent(pasted)}")
    args, model_args = TrlParser((GptOssPPOConfig, ModelConfig)).parse_args_and_config(["--config", str(recipe)])
    assert model_args.use_peft == ("full" not in arguments) and args.activation_checkpointing
    assert (model_args.lora_target_parameters is not None) == ("--lora-experts" in arguments)
    assert args.critic == (arguments[-1] if "--critic" in arguments else None)
