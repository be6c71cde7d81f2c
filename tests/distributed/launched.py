"""Three steps of GRPO with shared sequences, under whatever `accelerate launch` was told; the argument is a folder for
`<rank>.json`."""

import json
import os
import sys

import torch
import torch.distributed as dist

os.environ.setdefault("LOCAL_RANK", "0")
sys.argv.append("launched")
from curves import FOLDER, RANK, trainer  # noqa: E402

torch.set_num_threads(1)


def main() -> None:
    sharing = trainer(
        FOLDER / "run",
        max_steps=3,
        use_cpu="ACCELERATE_USE_DEEPSPEED" not in os.environ,
        ddp_backend="gloo",
        sequence_parallel_size=int(os.environ["WORLD_SIZE"]),
        max_tokens_per_micro_batch=300,
        save_strategy="steps",
        save_steps=3,
    )
    before = [p.detach().clone() for p in sharing.model.parameters()]
    sharing.train()
    wrapped = sharing.model_wrapped
    parameters = list(wrapped.parameters())
    partitioned = [p.ds_tensor.numel() < p.ds_numel for p in parameters if hasattr(p, "ds_tensor")]
    seen = {
        "type": str(sharing.accelerator.distributed_type).rsplit(".", 1)[-1],
        "world": sharing.accelerator.num_processes,
        "wrapper": type(wrapped).__name__,
        "partitioned": sum(partitioned),
        "parameters": len(parameters),
        "changed": any(not torch.equal(a, b.detach()) for a, b in zip(before, parameters)),
        "log": [e for e in sharing.state.log_history if "loss" in e],
    }
    (FOLDER / f"{RANK}.json").write_text(json.dumps(seen))


main()
dist.barrier()
dist.destroy_process_group()
