"""`trl_gptoss.memory` against the peak of real train steps:  python planner.py --out planner_h200.csv

Each line of CONFIGURATIONS is the command line of a case of `steps.py` with two rows: a short optimizer step, so that the
states of the optimizer are there, then one of two long micro-steps, so that gradients are there too. The measured peak is
the largest that the caching allocator handed out in it. The prediction is that of `trl-gptoss plan` for what the trainer
finds in its own settings.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "experts"))

from rows import Rows
from steps import GIB, ON_GPU, MicroStep, case_columns, run
from steps import Case as StepCase
from steps import parser as step_parser
from trl import GRPOTrainer

from trl_gptoss.memory import ModelShape, predict_memory

# in the order of what they tell: a run that is cut short has the first ones
CONFIGURATIONS = """
--layers 4
--layers 4 --chunk 4096 --fused-elementwise
--layers 6 --chunk 4096 --fused-elementwise --offload
--layers 4 --method full
--layers 4 --no-checkpointing
--layers 4 --method lora+experts
--layers 2 --experts-count 128
--layers 4 --experts grouped_mm
--layers 4 --fused-elementwise
--layers 4 --chunk 8192
--layers 4 --no-checkpointing --chunk 8192 --fused-elementwise
--layers 4 --method full --chunk 4096 --fused-elementwise
--layers 6 --offload
--layers 4 --tokens 8192
--layers 4 --tokens 65536 --chunk 4096 --fused-elementwise
--layers 4 --rank 128
--layers 4 --no-checkpointing --experts grouped_mm
--layers 12 --tokens 16384
""".strip().splitlines()


def parser() -> argparse.ArgumentParser:
    parser = step_parser()
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--experts-count", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    return parser


def compare(rows: Rows, line: str, case: StepCase):
    def write(trainer: GRPOTrainer, steps: list[MicroStep], weights: int) -> None:
        text = trainer._base_model.config.get_text_config()
        setup = trainer._setup(max(step.tokens for step in steps))
        prediction = predict_memory(ModelShape.from_config(text), setup)
        measured = max(step.peak for step in steps)
        parts = {name: round(size / GIB, 3) for name, size in prediction.parts.items()}
        rows.add(
            settings=line,
            **case_columns(case),
            tokens=setup.tokens,
            weights_gib=round(weights / GIB, 3),
            measured_gib=round(measured / GIB, 3),
            predicted_gib=round(prediction.total / GIB, 3),
            error=f"{prediction.total / measured - 1:+.4f}" if measured else "",
            worst=prediction.worst,
            parts_gib=json.dumps(parts),
            seconds=round(min(step.seconds for step in steps), 4),
        )

    return write


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("planner.csv"))
    arguments.add_argument(
        "--tiny", action="store_true", help="tiny width, 512 tokens: tries the script without a GPU"
    )
    arguments.add_argument("--only", type=int, nargs="+", help="numbers of configurations, from 0")
    arguments.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no more is begun")
    args = arguments.parse_args()
    rows, start, failed = Rows(args.out), time.perf_counter(), 0
    for number, line in enumerate(CONFIGURATIONS):
        if (args.only and number not in args.only) or time.perf_counter() - start > args.budget:
            continue
        values = vars(parser().parse_args(line.split()))
        tokens = values.pop("tokens")
        values.pop("out")
        if args.tiny:
            values |= {"tiny": True, "warm_up": 32}
            tokens = 512
        case = StepCase(**{**values, "generations": [[tokens, tokens]]})
        try:
            run(case, compare(rows, line, case))
        except (RuntimeError, ValueError):
            traceback.print_exc()
            failed += 1
    return failed


if __name__ == "__main__":
    if not ON_GPU:
        print("# no GPU: nothing is measured, the script is only tried", file=sys.stderr)
    sys.exit(main())
