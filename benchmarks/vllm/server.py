"""GRPO with a vLLM server on another GPU, its weights over NCCL: every sync probed, what a sync costs, router replay, faults.

    python benchmarks/vllm/server.py --width 20b                                                 # two GPUs, vLLM 0.26
    python benchmarks/vllm/server.py --width tiny --device cpu --cases file_replay --steps 2 --out -    # tries the script out

Model, data, tool and turns are those of h200.py, and so are the rows. The server gets its architecture and no weights: the first
sync brings them. The trainer has the first GPU, the server the last one: with `file` it may be the same. Cases run one after another on the same server:
    nccl         vllm_sync_transport="nccl"
    nccl_replay  the same with router_replay="rollout"; the experts come with the completions
    file         vllm_sync_transport="file", through /dev/shm
    file_replay  both

Then faults are planted in the sync of the last case, after all weights were moved by noise: the sinks, or one expert, keep their
former values. `fault/NAME` is how many tensors the probe called stale, and `fault/none` the same without a fault.
"""

import argparse
import contextlib
import csv
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h200

CASES = ("nccl", "nccl_replay", "file", "file_replay")
EXPERTS = "model.layers.0.mlp.experts.down_proj"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--width", choices=tuple(h200.SIZES), default="tiny")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES[:3]))
    parser.add_argument("--steps", type=int, default=5, help="of each case")
    parser.add_argument("--tokens", type=int, default=96, help="of one rollout after the prompt")
    parser.add_argument("--rollouts", type=int, default=32, help="of one step, in groups of 4")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="most seconds for the server to start")
    parser.add_argument(
        "--hold", action="store_true", help="start the server, and begin when a line comes on standard input"
    )
    parser.add_argument("--log", default="server.txt", help="what the server prints")
    parser.add_argument(
        "--out",
        default=str(Path(__file__).with_name("server_h200.csv")),
        help="CSV to append to; - for standard output",
    )
    return parser.parse_args()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def started_server(args: argparse.Namespace, model: Any, tokenizer: Any, folder: str, port: int) -> subprocess.Popen:
    """vLLM's server, which is not up yet."""
    import torch

    from trl_gptoss.rollouts.vllm.engine import REPLAY_SCHEDULER, WORKER_EXTENSION
    from trl_gptoss.trainers.vllm_setup import _write_skeleton

    gpus = torch.cuda.device_count()
    if gpus < 2 and args.device == "cuda" and any(case.startswith("nccl") for case in args.cases):
        sys.exit(f"NCCL takes no two processes on one GPU, and there is {gpus}: --cases file file_replay")

    _write_skeleton(folder, model, tokenizer)
    command = f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {folder} --port {port} --host 127.0.0.1"
    command += (
        f" --load-format dummy --dtype bfloat16 --max-model-len {args.tokens + 512} --max-num-seqs {args.rollouts}"
    )
    command += f" --logprobs-mode processed_logprobs --max-logprobs -1 --worker-extension-cls {WORKER_EXTENSION}"
    command += f" --enforce-eager --enable-return-routed-experts --scheduler-cls {REPLAY_SCHEDULER} --gpu-memory-utilization 0.3"
    if args.device == "cuda":
        command += f" --kv-cache-memory-bytes {4 << 30} --weight-transfer-config"
    words = command.split() + (['{"backend": "nccl"}'] if args.device == "cuda" else [])
    seen = {"CUDA_VISIBLE_DEVICES": str(gpus - 1)} if args.device == "cuda" else {}
    # h200.py keeps colocated engines in their process.
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **seen}
    with open(args.log, "a") as log:
        return subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def wait_for(server: subprocess.Popen, port: int, seconds: float) -> None:
    """Until the server listens."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.5)
    raise RuntimeError(f"The server does not listen after {seconds:g} s, or has ended ({server.poll()}): see its log.")


def build(args: argparse.Namespace, model: Any, tokenizer: Any, folder: str, port: int) -> Any:
    """The trainer of a case."""
    from datasets import Dataset

    from trl_gptoss import GptOssGRPOConfig, GptOssGRPOTrainer

    transport, _, replay = args.case.partition("_")
    trainer = GptOssGRPOTrainer(
        model,
        h200.reward,
        GptOssGRPOConfig(
            folder,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=f"http://127.0.0.1:{port}",
            vllm_server_timeout=args.start_timeout,
            vllm_group_port=free_port(),
            vllm_sync_transport=transport,
            vllm_sync_dir=os.path.join(folder, "weights"),
            router_replay="rollout" if replay else "off",
            per_device_train_batch_size=args.rollouts,
            num_generations=4,
            generation_kwargs={"ignore_eos": True},
            max_steps=args.steps,
            max_rollout_tokens=args.tokens,
            learning_rate=h200.LEARNING_RATE[args.width],
            bf16=True,
            use_cpu=args.device == "cpu",
            **h200.QUIET,
        ),
        Dataset.from_list(h200.QUESTIONS),
        processing_class=tokenizer,
        tools=[h200.echo],
    )
    trainer._engine.turn_format = h200.FirstTurnCalls(trainer._engine.turn_format)
    trainer._engine.stop_ids = list(range(model.config.vocab_size))
    trainer.weight_sync.engine.stop_ids = []
    h200.shorten_turns(trainer._engine.backend, args.tokens // 2)
    return trainer


def stale_tensors(sync: Any) -> int:
    """How many the probe names after a sync."""
    from trl_gptoss.trainers.sync_probe import StaleWeightsError

    try:
        sync.sync(0)
    except StaleWeightsError as error:
        print(str(error)[:400], flush=True)
        return int(str(error).partition("Stale tensors, ")[2].partition(" of ")[0] or -1)
    return 0


def planted(trainer: Any) -> Iterator[tuple[str, int]]:
    """Faults of the sync, and how many tensors the probe called stale."""
    import torch

    sync, engine = trainer.weight_sync, trainer.weight_sync.engine
    send = engine.load

    def some_kept(
        former: dict[str, torch.Tensor], keeps: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> Any:
        def load(weights: Any, policy_version: str) -> None:
            send(((n, keeps(n, t, former[n]) if n in former else t) for n, t in weights), policy_version)

        return load

    def first_expert(name: str, tensor: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[0] = old[0]
        return tensor

    parameters = dict(sync.weights.model.named_parameters())
    former = {name: p.detach().clone() for name, p in parameters.items() if name.endswith(".sinks") or name == EXPERTS}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
    sinks = {name: old for name, old in former.items() if name.endswith(".sinks")}
    faults = {
        "sinks": some_kept(sinks, lambda name, tensor, old: old),
        "one_expert": some_kept({EXPERTS: former[EXPERTS]}, first_expert),
        "none": send,
    }
    for name, load in faults.items():
        engine.load = load
        yield name, stale_tensors(sync)


def main() -> None:
    """One server for all cases."""
    args = arguments()
    if args.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    import torch

    import trl_gptoss.trainers.grpo
    import trl_gptoss.trainers.vllm_setup  # noqa: F401 - while the server starts
    from trl_gptoss.tiny.vocabulary import small_tokenizer

    tokenizer, port = small_tokenizer(), free_port()
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory() as folder:
        server = started_server(args, h200.policy(args.width, len(tokenizer), "meta"), tokenizer, folder, port)
        h200.say("server", f"is process group {server.pid}")
        try:
            wait_for(server, port, args.start_timeout)
            h200.say("server", "listens")
            if args.hold:
                sys.stdin.readline()
            for case in args.cases:
                args.case = case
                with tempfile.TemporaryDirectory(dir=shared) as out:
                    trainer = build(args, h200.policy(args.width, len(tokenizer), args.device), tokenizer, out, port)
                    h200.say(case, "is connected")
                    steps = h200.Steps(trainer, case, args.device, None, None, None)
                    if case.endswith("_replay"):
                        h200.compare_with_and_without(trainer, steps)
                    h200.rows_of_each_step(trainer, args, steps)
                    trainer.train()
                    h200.summary(trainer, case)
                    if case == args.cases[-1]:
                        write_faults(args, planted(trainer))
                del trainer, steps
                if args.device == "cuda":
                    torch.cuda.empty_cache()
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # its engine, too
            server.wait()


def write_faults(args: argparse.Namespace, found: Iterator[tuple[str, int]]) -> None:
    """Rows with step 0."""
    about = h200.hardware(args.device)
    for name, stale in found:
        row = [args.width, args.case, h200.LEARNING_RATE[args.width], 0, f"fault/{name}", stale, *about.values()]
        with open(os.devnull if args.out == "-" else args.out, "a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)
        print(",".join(map(str, row)), flush=True)


if __name__ == "__main__":
    started = time.monotonic()
    main()
    h200.say("all", f"{time.monotonic() - started:.0f} s")
    sys.stdout.flush()
    os._exit(0)  # TRL's communicator waits at exit
