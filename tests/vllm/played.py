"""vLLM's scheduler alone, its own and ours, before a worker that is played:  python played.py FOLDER

Needs vLLM and no device, so that asynchronous scheduling can be run, which vLLM does not do on CPU, and 0.26, which has none for
it. The worker gives every token of a request, and every position its experts, by arithmetic: what should come back is known.
"""

import hashlib
import inspect
import json
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch

from trl_gptoss.rollouts.vllm.scheduler import ListsBlocksOnce, replay_scheduler

BLOCK, LAYERS, TOP_K = 32, 2, 2
RESETS = (7, 13, 100)  # steps in which everything begins again, the first ones while prompts are computed
START = 20  # the first position of which request 7 wants the experts
GROUPS, MEMBERS = 3, 4  # prompts with a common part, requests of each


class ListsNothing(ListsBlocksOnce):
    """The control: as ours, and no list is left."""

    def _update_after_schedule(self, scheduler_output):
        super()._update_after_schedule(scheduler_output)
        self._re_block_ids.clear()


def prompts():
    """Groups with a common part of several blocks, and ends of odd lengths."""
    generator = np.random.default_rng(0)
    found = []
    for group in range(GROUPS):
        common = generator.integers(5, 100, 70 + 45 * group).tolist()
        found += [common + generator.integers(5, 100, 3 + 11 * i).tolist() for i in range(MEMBERS)]
    return found


def digest(rows):
    """Short for an array, shape and type included."""
    return [
        list(rows.shape),
        rows.dtype.name,
        hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest(),
    ]


def scheduler_parts(folder, blocks, max_model_len=320, max_num_seqs=12, max_num_batched_tokens=64):
    """What a scheduler of a tiny GPT-OSS is made of: full attention, and a sliding window in a cache of its own."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms.current_platform = CpuPlatform()  # the device's own checks are of no interest here
    from transformers import GptOssConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(sha256)
    model = GptOssConfig(
        num_hidden_layers=LAYERS, num_local_experts=4, num_experts_per_tok=TOP_K, vocab_size=128, sliding_window=64
    )
    model.architectures = ["GptOssForCausalLM"]
    model.save_pretrained(folder)
    vllm_config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=BLOCK,
        enable_return_routed_experts=True,
    ).create_engine_config()
    vllm_config.cache_config.num_gpu_blocks = blocks
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
    groups = [
        KVCacheGroupSpec(["0"], SlidingWindowSpec(**shape, sliding_window=64)),
        KVCacheGroupSpec(["1"], FullAttentionSpec(**shape)),
    ]
    return {
        "vllm_config": vllm_config,
        "kv_cache_config": KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        "structured_output_manager": StructuredOutputManager(vllm_config),
        "block_size": BLOCK,
        "hash_block_size": BLOCK,
        "log_stats": True,
    }


def three(parts, asynchronous):
    """Makers of vLLM's own scheduler, of ours, and of the control."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    own = AsyncScheduler if asynchronous else Scheduler

    def arguments():
        made = {**parts, "vllm_config": deepcopy(parts["vllm_config"])}
        made["vllm_config"].scheduler_config.async_scheduling = asynchronous
        return made

    control = type("Control", (ListsNothing, own), {})
    return {
        "own": lambda: own(**arguments()),
        "ours": lambda: replay_scheduler(**arguments()),
        "control": lambda: control(**arguments()),
    }


def token_at(number, prompt, position):
    """Of a request, sampled ones included."""
    return prompt[position] if position < len(prompt) else 5 + (131 * number + 7 * position) % 97


def experts_of(token, position):
    """(L, k) uint8: what the worker of this file chooses."""
    return np.random.default_rng((token, position)).integers(0, 4, (LAYERS, TOP_K), dtype=np.uint8)


def played(scheduler, depth):
    """Requests that join, share prompts, are preempted, aborted and begun again; `depth` steps are under way at most."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request, RequestStatus

    hasher = get_request_block_hasher(BLOCK, sha256)
    all_prompts, chunks = prompts(), {}
    waiting, under_way, lengths = list(enumerate(all_prompts)), [], {}
    ended, aborted, preempted, early, listed, cached, step = set(), [], 0, 0, 0, 0, 0

    def preemptions():
        return {name: request.num_preemptions for name, request in scheduler.requests.items()}

    while waiting or under_way or len(ended) < len(lengths):
        if waiting and step % 2 == 0:
            number, prompt = waiting.pop(0)
            params = SamplingParams(max_tokens=1 if number == 5 else 60 + 20 * (number % 4), ignore_eos=True)
            params.routed_experts_prompt_start = START if number == 7 else 0
            lengths[str(number)] = params.max_tokens
            chunks[str(number)] = []
            scheduler.add_request(Request(str(number), prompt, params, None, block_hasher=hasher))
        if step in RESETS:  # what runs begins again: its tokens under way are no longer wanted
            scheduler.reset_prefix_cache(reset_running_requests=True)
        before = preemptions()
        output = scheduler.schedule()
        preempted += sum(preemptions().values()) - sum(before.values())
        early += sum(count > 0 and not scheduler.requests[name].num_output_tokens for name, count in before.items())
        if output.total_num_scheduled_tokens:
            cached += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
            listed += sum(name in scheduler._re_block_ids for name in output.num_scheduled_tokens)
            under_way.append((output, worked(scheduler, output, all_prompts)))
        if step in (9, 30):
            name = max(scheduler.requests, key=int) if step == 9 else min(scheduler.requests, key=int)
            scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            aborted.append(name)
            ended.add(name)
        if len(under_way) >= depth or (under_way and not output.total_num_scheduled_tokens):
            for outputs in scheduler.update_from_output(*under_way.pop(0)).values():
                for one in outputs.outputs:
                    chunks[one.request_id].append(one.routed_experts.copy())
                    if one.finish_reason is not None:
                        ended.add(one.request_id)
        step += 1
    results, true = {}, 0
    for name in sorted(set(chunks) - set(aborted), key=int):
        rows, prompt = np.concatenate(chunks[name]), all_prompts[int(name)]
        results[name] = digest(rows)
        positions = range(START if name == "7" else 0, len(prompt) + lengths[name] - 1)
        expected = np.stack([experts_of(token_at(int(name), prompt, p), p) for p in positions])
        true += rows.shape == expected.shape and bool((rows == expected).all())
    return {
        "class": type(scheduler).__name__,
        "results": results,
        "true": true,
        "aborted": aborted,
        "preempted": preempted,
        "again_before_a_token": early,
        "cached": cached,
        "listed": listed,
        "left": len(scheduler._re_block_ids),
    }


def worked(scheduler, output, all_prompts):
    """What the worker would give for a step: made when the step is scheduled, handed over later."""
    from vllm.v1.outputs import ModelRunnerOutput, RoutedExpertsLists

    group, rows, slots, sampled = scheduler.routed_experts_mgr.attn_gid, [], [], []
    for name, count in output.num_scheduled_tokens.items():
        request, prompt = scheduler.requests[name], all_prompts[int(name)]
        last = request.num_computed_tokens
        blocks = scheduler.kv_cache_manager.get_blocks(name).get_block_ids()[group]
        for position in range(last - count, last):
            rows.append(experts_of(token_at(int(name), prompt, position), position))
            slots.append(blocks[position // BLOCK] * BLOCK + position % BLOCK)
        sampled.append([] if request.is_prefill_chunk else [token_at(int(name), prompt, last)])
    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=sampled,
        routed_experts=RoutedExpertsLists(routing_data=np.stack(rows), slot_mapping=np.array(slots)),
    )


def source():
    """Of vLLM's, what scheduler.py relies on: digests of the methods that it wraps or calls, and how often its names occur."""
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched import async_scheduler, scheduler

    methods = (
        scheduler.Scheduler._update_after_schedule,
        async_scheduler.AsyncScheduler._update_after_schedule,
        KVCacheManager.get_blocks,
        KVCacheBlocks.get_block_ids,
    )
    text = inspect.getsource(scheduler) + inspect.getsource(async_scheduler)
    return {
        **{one.__qualname__: hashlib.sha256(inspect.getsource(one).encode()).hexdigest()[:16] for one in methods},
        **{
            name: text.count(name)
            for name in ("_re_block_ids", "enable_return_routed_experts", "num_output_tokens_before")
        },
    }


def main():
    """Under asynchronous scheduling every step is scheduled before the tokens of the one before are known."""
    import vllm

    folder, seen = Path(sys.argv[1]), {"vllm": vllm.__version__, "source": source()}
    parts = scheduler_parts(folder / "model", blocks=56)
    for way, depth in (("async", 2), ("sync", 1)):
        seen[way] = {name: played(make(), depth) for name, make in three(parts, depth == 2).items()}
    (folder / "played_0.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
