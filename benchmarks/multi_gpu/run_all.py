"""Everything about several GPUs, in one call:

    python run_all.py --out FOLDER                       # all phases, about 8 minutes on two H200
    python run_all.py --out FOLDER --phase lora full     # some of them
    python run_all.py --out FOLDER --tiny                # tiny sizes; without GPUs, gloo in the place of NCCL

A phase has jobs that may run beside each other, each a process group of its own with a limit in seconds: one that hangs or
crashes costs the others nothing. With GPUs, the jobs of the next phase are started at the same time and wait with their imports
done (`ahead.py`), and the whole may be started so and wait for the file that MULTI_GPU_GO names. Lines are written as they
come; every few seconds they are put together in FOLDER as `agreement.csv`, `curves.csv`, `collectives.csv`, `steps.csv` and
`colocated.csv`, and at the end `summary.py` prints what they say. `log.txt` has the end of the output of all jobs.
"""

import argparse
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil
from ahead import VARIABLE, wait

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[1] / "configs/accelerate"
# Everything is on one host, whose name need not resolve; NVLink multicast stays off where others share the switch.
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "4",
    "PYTHONUNBUFFERED": "1",
}  # fmt: skip


@dataclass(kw_only=True)
class Job:
    """One launch.

    Args:
        name (`str`): For the log.
        script (`str`): Beside this file.
        words (`list[str]`): Its arguments; FOLDER, PROCESSES and P, their number between commas, are replaced.
        launcher (`str`): "python" (one process), "torchrun", or the name of a file in configs/accelerate.
        gpu (`int`): Which one, of a single process.
        limit (`int`): Seconds.
        environment (`dict[str, str]`): Of this job alone.
        needs (`str`, *optional*): A package, which `--<package> FOLDER` may bring.
    """

    name: str
    script: str
    words: list[str]
    launcher: str = "torchrun"
    gpu: int = 0
    limit: int = 120
    environment: dict[str, str] = field(default_factory=dict)
    needs: str | None = None


AGREEMENT = [
    "one,full", "ddp,P,full", "fsdp2,P,full,checkpointing", "fsdp2_master,P,full", "wrong,first_sinks", "one,lora",
    "ddp,P,lora,checkpointing", "fsdp2,1,full", "ddp,1,full", "wrong,summed_gradient", "ddp,1,lora,checkpointing", "ddp,P,lora",
]  # fmt: skip


def curve(name: str, launcher: str, size: str, rows: int, gpu: int = 0) -> Job:
    words = ["FOLDER", name, "--size", size, "--rows", str(rows), "--ranks", "PROCESSES"]
    return Job(name=f"curve {name}", script="curve.py", words=words, launcher=launcher, gpu=gpu, limit=100)


def steps(*cases: str, **options) -> Job:
    collectives = ["--collectives"] if cases[0] == "lora_ddp_sp" else []
    words = ["--out", "FOLDER", *collectives, "--case", *cases]
    return Job(name=f"steps {cases[0]}", script="train_steps.py", words=words, **options)


def colocated(case: str, **options) -> Job:
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    return Job(
        name=f"colocated {case}", script="colocated.py", words=["FOLDER", "--case", case], environment=own, needs="vllm", **options,
    )  # fmt: skip


PHASES = {
    "agreement": [
        Job(name="agreement", script="agreement.py", words=["FOLDER", "--cell", *AGREEMENT], limit=120),
        curve("one", "python", "1", 4, gpu=0),
        curve("one_again", "python", "1", 8, gpu=1),
    ],
    "curves": [
        curve("ddp_sp", "torchrun", "PROCESSES", 4),
        curve("fsdp2_sp", "fsdp2_sp", "PROCESSES", 4),
        curve("ddp_dp", "torchrun", "1", 4),
        Job(
            name="zero3",
            script="agreement.py",
            words=["FOLDER/zero3", "--cell", "zero3,P,full"],
            launcher="zero3_sp",
            limit=100,
            environment={"DS_ACCELERATOR": "cuda"},
            needs="deepspeed",
        ),
    ],
    "one": [steps("lora_one", launcher="python", limit=70), steps("full_one_12", launcher="python", gpu=1, limit=70)],
    "lora": [steps("lora_ddp_sp", "lora_ddp_dp", limit=100)],
    "full": [steps("full_fsdp2_sp", limit=90)],
    "more": [steps("full_fsdp2_sp_12", "full_fsdp2_dp_12", "lora_fsdp2_sp", "lora_fsdp2_dp", limit=120)],
    "long": [steps("lora_one_long", launcher="python", limit=80)],
    "colocated": [colocated("full", limit=220)],
    "colocated_tp": [colocated("lora_tp", limit=180)],
    "colocated_one": [colocated("lora_one", launcher="python", limit=180)],
    "colocated_one_full": [colocated("full_one", launcher="python", limit=180)],
}


TOGETHER = ("agreement", "curves")  # nothing is timed: with GPUs they share them


def free_port() -> int:
    """Below those that the system hands out to connections, which other jobs open meanwhile."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise RuntimeError("No free port between 20000 and 30000.")


def command(job: Job, folder: Path, processes: int, tiny: bool) -> list[str]:
    places = {"FOLDER": str(folder), "PROCESSES": str(processes), ",P,": f",{processes},"}
    words = list(job.words)
    for name, value in places.items():
        words = [word.replace(name, value) for word in words]
    words += ["--tiny"] if tiny else []
    script = [str(HERE / job.script), *words]
    port = free_port()
    if job.launcher == "python":
        return [sys.executable, *script]
    if job.launcher == "torchrun":
        start = ["torch.distributed.run", f"--nproc_per_node={processes}", "--master_addr=127.0.0.1"]
        return [sys.executable, "-m", *start, f"--master_port={port}", *script]
    start = ["accelerate.commands.launch", "--config_file", str(CONFIGS / f"{job.launcher}.yaml")]
    ranks = [f"--num_processes={processes}", f"--main_process_port={port}"]
    return [sys.executable, "-m", *start, *ranks, *script]


def impossible(job: Job, args: argparse.Namespace) -> str | None:
    """Why a job is left out here, if it is."""
    if job.needs is not None and vars(args)[job.needs] is None and find_spec(job.needs) is None:
        return f"{job.needs} is not installed"
    return None


def environment(job: Job, args: argparse.Namespace, gpus: int) -> dict[str, str]:
    own = {**ENVIRONMENT, **os.environ, **job.environment}
    if job.needs is not None and vars(args)[job.needs] is not None:
        own["PYTHONPATH"] = f"{own.get('PYTHONPATH', '')}:{vars(args)[job.needs]}"
    if not gpus:
        own.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        own.pop("DS_ACCELERATOR", None)
        if not job.launcher.startswith(("zero3", "fsdp2")):
            own["ACCELERATE_USE_CPU"] = "true"
    elif job.launcher == "python":
        own["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[job.gpu]
    return own


class Phase:
    """Jobs that have been started, and import and wait until they are let go."""

    def __init__(self, names: list[str], work: Path, args: argparse.Namespace, gpus: int) -> None:
        self.name, self.work = " + ".join(names), work
        self.go = work / f"go_{names[0]}"
        self.running: list[tuple[Job, subprocess.Popen, Path]] = []
        for job in (job for name in names for job in PHASES[name]):
            if reason := impossible(job, args):
                print(f"# {job.name}: left out, {reason}", flush=True)
                continue
            log = work / f"{job.name.replace(' ', '_')}.log"
            own = {**environment(job, args, gpus), VARIABLE: str(self.go)}
            with log.open("w") as file:
                process = subprocess.Popen(
                    command(job, work, args.processes, args.tiny), env=own, stdout=file, stderr=subprocess.STDOUT
                )
            self.running.append((job, process, log))

    def run(self, args: argparse.Namespace, started: float) -> None:
        self.go.touch()
        begin = written = time.monotonic()
        while self.running:
            time.sleep(0.2)
            if time.monotonic() - written > EVERY:
                put_together(self.work, args.out)
                written = time.monotonic()
            seconds = time.monotonic() - begin
            for entry in list(self.running):
                job, process, log = entry
                code = process.poll()
                limit = job.limit * (5 if args.tiny else 1)  # a CPU that others use too
                if code is None and seconds < limit and time.monotonic() - started < args.budget:
                    continue
                if code is None:
                    end(process)
                    code = f"ended after its {limit} s or the budget"
                self.running.remove(entry)
                print(f"# {time.monotonic() - started:5.0f} s  {job.name}: {code} after {seconds:.0f} s", flush=True)
                if code != 0:
                    lines = [line for line in log.read_text(errors="replace").splitlines() if "Warning" not in line]
                    told = [line for line in lines if "Error" in line][:8]
                    print("\n".join(line[:300] for line in (told or lines[-8:])), flush=True)
        put_together(self.work, args.out)

    def end(self) -> None:
        for _, process, _ in self.running:
            end(process)


def grouped(names: list[str], gpus: int) -> list[list[str]]:
    """Phases that run at the same time."""
    together = [name for name in names if gpus and name in TOGETHER]
    return [group for group in (together, *([name] for name in names if name not in together)) if group]


def end(process: subprocess.Popen) -> None:
    """A launcher and its ranks, which are sessions of their own and would outlive it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


PARTS = {
    "agreement": "**/agreement.csv",
    "curves": "curve_*.csv",
    "collectives": "collectives.csv",
    "steps": "steps_*.csv",
    "colocated": "colocated_*.csv",
}
WRITES = {"agreement.py": "agreement", "curve.py": "curves", "train_steps.py": "steps", "colocated.py": "colocated"}
LOG = 100_000  # characters of a job's output that are kept
EVERY = 10.0  # seconds between two looks at what there is, for a run that is cut


def put_together(work: Path, out: Path) -> None:
    """Files with one header each, as one file."""
    for name, pattern in PARTS.items():
        lines: list[str] = []
        for part in sorted(work.glob(pattern)):
            header, *rest = part.read_text(encoding="utf-8").splitlines() or [""]
            lines += rest if lines else [header, *rest]
        if lines:
            (out / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    logs = [f"=== {path.stem}\n{path.read_text(errors='replace')[-LOG:]}" for path in sorted(work.glob("*.log"))]
    (out / "log.txt").write_text("\n".join(logs), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder; files of these names are replaced")
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which everything is ended")
    for package in ("deepspeed", "vllm"):
        parser.add_argument(f"--{package}", help="folders (colons between) that have it, where it is not installed")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes")
    args = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "zero3").mkdir()
        names, begun = grouped(args.phase, gpus), []
        begun.append(Phase(names.pop(0), work, args, gpus))
        try:
            wait()
            started = time.monotonic()
            while (names or begun) and time.monotonic() - started < args.budget:
                while names and len(begun) < (2 if gpus else 1):
                    begun.append(Phase(names.pop(0), work, args, gpus))
                print(f"# {time.monotonic() - started:5.0f} s  phase {begun[0].name}", flush=True)
                begun[0].run(args, started)
                begun.pop(0)
        finally:
            for phase in begun:
                phase.end()
    wanted = {WRITES[job.script] for name in args.phase for job in PHASES[name] if impossible(job, args) is None}
    subprocess.run([sys.executable, str(HERE / "summary.py"), str(args.out), *sorted(wanted)], check=False)


if __name__ == "__main__":
    main()
