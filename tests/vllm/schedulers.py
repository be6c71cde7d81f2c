"""Run by a Python that has vLLM 0.30, like scenarios.py: what `replay_scheduler` returns beside vLLM's own scheduler.

Each scenario gives the experts of every request under three schedulers: vLLM's own, ours, and one that lists no blocks at all,
which has to be told from the others.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")

import httpx2
import scenarios
import torch
from played import BLOCK, GROUPS, MEMBERS, ListsNothing, digest, prompts, three

from trl_gptoss.rollouts import SamplingOptions
from trl_gptoss.rollouts.vllm.client import VllmClient
from trl_gptoss.rollouts.vllm.colocate import make_llm
from trl_gptoss.rollouts.vllm.engine import REPLAY_SCHEDULER


def engine(folder, blocks, **options):
    """Few blocks, so that requests are preempted; few tokens to a step, so that prompts come in chunks."""
    checkpoint = folder / "checkpoint"
    scenarios.policy("bfloat16").save_pretrained(checkpoint)
    scenarios.byte_tokenizer().save_pretrained(checkpoint)
    os.environ["MASTER_PORT"] = str(scenarios.free_port())
    return make_llm(
        str(checkpoint),
        torch.bfloat16,
        1,
        seed=0,
        max_model_len=320,
        enforce_eager=True,
        max_num_seqs=12,
        max_num_batched_tokens=64,
        block_size=BLOCK,
        num_gpu_blocks_override=blocks,
        enable_return_routed_experts=True,
        **options,
    )


# ---- in this process ----


def colocated(folder):
    """The engine of the colocated trainer: chunks, cached prefixes, preemption, aborted requests."""
    llm = engine(folder, 44, scheduler_cls=REPLAY_SCHEDULER)
    core = llm.llm_engine.engine_core.engine_core
    seen = {"engine": type(core.scheduler).__name__}
    own = core.scheduler
    parts = {
        "vllm_config": own.vllm_config,
        "kv_cache_config": own.kv_cache_config,
        "structured_output_manager": own.structured_output_manager,
        "block_size": own.block_size,
        "hash_block_size": own.hash_block_size,
        "log_stats": True,
    }
    for name, make in three(parts, asynchronous=False).items():
        core.scheduler = make()
        seen[name] = requests_of(llm, core.scheduler)
    return seen


def requests_of(llm, scheduler):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    update, chunks = scheduler._update_after_schedule, [0]

    def counted(output):
        update(output)
        chunks[0] += sum(scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens)

    scheduler._update_after_schedule = counted
    waiting, results, cached, preempted, aborted = list(enumerate(prompts())), {}, 0, set(), []
    running, step = set(), 0
    while waiting or running:
        if waiting and step % 2 == 0:  # they join in the middle of others
            number, prompt = waiting.pop(0)
            # Greedy: on CPU vLLM 0.30 cannot put the generator of a seeded request back behind a chunk.
            params = SamplingParams(
                max_tokens=60 + 15 * (number % 4), temperature=0.0, ignore_eos=True, logprobs=0, detokenize=False
            )
            params.output_kind = RequestOutputKind.FINAL_ONLY
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
            running.add(str(number))
        for output in llm.llm_engine.step():
            if output.finished:
                running.discard(output.request_id)
                cached += output.num_cached_tokens or 0
                [sampled] = output.outputs
                results[output.request_id] = [list(sampled.token_ids), digest(sampled.routed_experts)]
        preempted |= {name for name, request in scheduler.requests.items() if request.num_preemptions}
        step += 1
        if step in (10, 40) and running:  # one in its prefill or just behind, one that decodes
            name = max(running, key=int) if step == 10 else min(running, key=int)
            llm.llm_engine.abort_request([name])
            running.discard(name)
            aborted.append(name)
    return {
        "results": results,
        "cached": cached,
        "chunks": chunks[0],
        "preempted": len(preempted),
        "aborted": aborted,
        "left": len(scheduler._re_block_ids),
    }


# ---- a server ----


def served(folder):
    """The same requests, one after the other, to a server without the flag, one with it, and one with the control."""
    seen = {}
    flags = {"own": [], "ours": ["--scheduler-cls", REPLAY_SCHEDULER], "control": ["--scheduler-cls", CONTROL]}
    for name, options in flags.items():
        options = [*options, "--enable-return-routed-experts", "--block-size", str(BLOCK)]
        options += ["--max-num-batched-tokens", "96", "--num-gpu-blocks-override", "56"]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
        with scenarios.server(folder / name, "bfloat16", options) as running:
            client = VllmClient(running.url, 600, 300)
            client.wait()
            seen[name] = asked(client)
    return seen


CONTROL = "schedulers.control_scheduler"


def control_scheduler(**arguments):
    """For a server."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return type("Control", (ListsNothing, Scheduler), {})(**arguments)


def asked(client):
    greedy = SamplingOptions(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)

    def ask(prompt):
        sample = client.complete(prompt, 24, greedy, [], {"ignore_eos": True})
        return [sample.ids, digest(sample.routing)]

    in_turn = [ask(prompt) for prompt in prompts()]
    body = {"model": client.model, "prompt": prompts()[-1][::-1], "max_tokens": 300, "ignore_eos": True}
    try:  # a client that goes away in the middle
        client.http.post(f"{client.base_url}/v1/completions", json=body, timeout=0.05)
    except httpx2.ReadTimeout:
        gone = True
    else:
        gone = False
    with ThreadPoolExecutor(GROUPS * MEMBERS) as pool:  # who meets whom depends on the clock, so shapes alone
        together = [rows for _, rows in pool.map(ask, prompts())]
    return {"results": in_turn, "gone": gone, "together": [shape for shape, _, _ in together]}


if __name__ == "__main__":
    folder, name = Path(sys.argv[1]), sys.argv[2]
    seen = {f.__name__: f for f in (colocated, served)}[name](folder / name)
    (folder / f"{name}_0.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep the process
