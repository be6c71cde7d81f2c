"""Settings of vLLM rollouts beyond TRL's own `vllm_*`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from trl import GRPOConfig


@dataclass
class VllmRolloutConfig(GRPOConfig):
    r"""
    What [`GptOssGRPOTrainer`] adds to TRL's `use_vllm`, `vllm_mode`, `vllm_server_*` and so on. It has an effect with
    GPT-OSS models and with Harmony tokenizers; other models use vLLM as TRL does.

    Parameters:
        vllm_dtype (`str`, *optional*, defaults to `"auto"`):
            `"bfloat16"` or `"float32"` for a colocated engine; `"auto"` for the dtype the trainer computes in. A
            server has the dtype it was started with.
        vllm_engine_kwargs (`dict`, *optional*):
            Further arguments of `vllm.LLM` for a colocated engine, such as `{"enforce_eager": true}`.
        vllm_sync_transport (`str`, *optional*, defaults to `"auto"`):
            How weights reach a server. `"file"`: through `vllm_sync_dir`, which both sides can read. `"http"`: inside
            of requests, for small models. `"nccl"`: from GPU to GPU, which needs a server on other GPUs that was started
            with `--weight-transfer-config '{"backend": "nccl"}'`. `"auto"`: `"nccl"` if the trainer and the server run
            on GPUs, else `"file"`.
        vllm_sync_dir (`str`, *optional*):
            Folder for `"file"` and `"http"`, as large as the model in the engine's dtype; one run at a time. `None` for
            `OUTPUT_DIR/vllm_weights`. A folder in memory (`/dev/shm/...`) is the fastest.
        vllm_request_timeout (`float`, *optional*, defaults to `3600.0`):
            Most seconds that one request to a server may take before the server counts as lost. A lost server is
            waited for during `vllm_server_timeout` seconds; if it was restarted, it gets the weights again.
        vllm_probe_every (`int`, *optional*, defaults to `1`):
            After every so many weight syncs compare checksums of all tensors and log-probs of fixed ids between engine
            and trainer, and stop the run if they differ. `0` never does.
        vllm_probe_tolerance (`float`, *optional*):
            Largest mean absolute difference of the probe's log-probs, in nats. `None` for 1e-4 with a float32 engine
            and 0.1 with a bfloat16 one.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["vllm_engine_kwargs"]

    vllm_dtype: Literal["auto", "bfloat16", "float32"] = field(
        default="auto",
        metadata={"help": "Dtype of a colocated engine; 'auto' for the one the trainer computes in."},
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Further arguments of vllm.LLM for a colocated engine."},
    )
    vllm_sync_transport: Literal["auto", "file", "http", "nccl"] = field(
        default="auto",
        metadata={
            "help": "How weights reach a vLLM server: 'file' through `vllm_sync_dir`, 'http' in requests, 'nccl' from "
            "GPU to GPU; 'auto': 'nccl' if both run on GPUs, else 'file'."
        },
    )
    vllm_sync_dir: str | None = field(
        default=None,
        metadata={"help": "Folder that trainer and server can read, for weights; None for OUTPUT_DIR/vllm_weights."},
    )
    vllm_request_timeout: float = field(
        default=3600.0,
        metadata={"help": "Most seconds that one request to a vLLM server may take before it counts as lost."},
    )
    vllm_probe_every: int = field(
        default=1,
        metadata={"help": "Compare engine and trainer after every so many weight syncs; 0 for never."},
    )
    vllm_probe_tolerance: float | None = field(
        default=None,
        metadata={
            "help": "Largest mean |log-prob difference| of the probe in nats; None: 1e-4 in float32, 0.1 in bfloat16."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (
            ("vllm_dtype", ("auto", "bfloat16", "float32")),
            ("vllm_sync_transport", ("auto", "file", "http", "nccl")),
            ("vllm_mode", ("colocate", "server")),
        ):
            found = vars(self)[name]
            if found not in allowed:
                raise ValueError(f"{name} is {found!r}, expected one of {', '.join(map(repr, allowed))}.")
        if self.vllm_probe_every < 0:
            raise ValueError(f"vllm_probe_every is {self.vllm_probe_every}, it must be at least 0 (0 for never).")
        for name in ("vllm_request_timeout", "vllm_probe_tolerance"):
            found = vars(self)[name]
            if found is not None and not found > 0:  # refuses NaN, too
                raise ValueError(f"{name} is {found}, it must be positive.")
