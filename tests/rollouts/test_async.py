"""Rollouts that do not wait for each other: slow, crashing and hung tools, budgets of time, seeds, and ranks."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from scripted_backend import ScriptedBackend
from tiny_policy import byte_tokenizer, tiny_model
from transformers import GenerationConfig

from trl_gptoss.harmony import HarmonyVocabulary
from trl_gptoss.rollouts import Episode, RolloutLimits, Sample, Toolbox, ToolRunner, run_episodes, tools
from trl_gptoss.rollouts.loop import Observation, ParsedSample, ToolCall
from trl_gptoss.rollouts.stream import ThreadStream, WaveStream
from trl_gptoss.rollouts.transformers_backend import TransformersBackend
from trl_gptoss.trajectory import StopReason, Trajectory

STOP = HarmonyVocabulary.of(byte_tokenizer()).stop_ids
RETURN, CALL = STOP[0], STOP[-1]


class PlainFormat:
    """Every turn that ends with `CALL` calls `tool` with the number of the rollout, which its prompt begins with."""

    def parse(self, ids, toolbox):
        calls = [ToolCall(name="tool", arguments={}, raw_arguments="")] if ids and ids[-1] == CALL else []
        return ParsedSample(messages=[{"role": "assistant", "content": str(ids)}], calls=calls)

    def observe(self, calls, results):
        return Observation(ids=[7] * len(results), messages=[{"role": "tool", "content": r.text} for r in results])


def episodes(functions, timeout=None, seeds=None):
    return [
        Episode(
            trajectory=Trajectory(prompt_ids=[i, i]),
            toolbox=Toolbox(functions={"tool": f}, timeout=timeout),
            seed=None if seeds is None else seeds[i],
        )
        for i, f in enumerate(functions)
    ]


def call_thrice(prompt, rng):
    return [5, CALL] if prompt.count(7) < 3 else [6, RETURN]


def run(batch, backend, max_turns=None, max_seconds=None, any_rank=lambda here: here, wait_for_tools=False, **limits):
    limits = RolloutLimits(
        **{
            "max_turns": max_turns,
            "max_rollout_tokens": 4096,
            "max_context": 8192,
            "max_seconds": max_seconds,
            **limits,
        }
    )
    runner = ToolRunner(output_limit=300, max_concurrent=8)
    start = time.monotonic()
    run_episodes(batch, backend, PlainFormat(), runner, limits, STOP, any_rank, wait_for_tools=wait_for_tools)
    return time.monotonic() - start


def reasons(batch):
    return [e.trajectory.stop_reason for e in batch]


def test_a_slow_tool_holds_nobody_else_back():
    ended, gate = [], threading.Event()

    def slow():
        gate.wait(20)
        return len(ended)  # how many calls of the other rollouts had ended by then

    def quick():
        ended.append(1)
        if len(ended) == 3 * 3:
            gate.set()

    batch = episodes([slow, quick, quick, quick])
    seconds = run(batch, ScriptedBackend(call_thrice), max_turns=4)
    # The first call returns only after all nine of the others, whose turns 2 and 3 come after their own first ones:
    # a loop that waits for the tools of a turn would stand still here.
    assert batch[0].trajectory.tool_results[0].text == "9"
    assert seconds < 15 and reasons(batch) == [StopReason.FINAL] * 4


def test_tools_run_while_the_backend_samples():
    sampling, seen = threading.Event(), []

    class Slow(ScriptedBackend):
        def generate(self, prompts, max_new_tokens, sampling_options=None):
            if any(p[0] == 1 and len(p) == 2 for p in prompts) or len(prompts) == 2:
                return super().generate(prompts, max_new_tokens)
            sampling.set()
            time.sleep(0.3)
            sampling.clear()
            return super().generate(prompts, max_new_tokens)

    def first():
        return None

    def second():
        sampling.wait(10)
        seen.append(sampling.is_set())

    run(episodes([first, second]), Slow(lambda p, rng: [5, CALL] if 7 not in p else [6, RETURN]))
    assert seen == [True]


def test_crashing_and_hung_tools_cost_their_own_rollout_only(monkeypatch):
    monkeypatch.setattr(tools, "GRACE", 0.1)

    def crash():
        raise SystemExit("boom")

    def hang():
        threading.Event().wait()

    def fine():
        return "fine"

    batch = episodes([crash, hang, fine], timeout=0.2)
    run(batch, ScriptedBackend(call_thrice))
    assert reasons(batch) == [StopReason.FINAL] * 3
    crashed, hung, good = (e.trajectory.tool_results for e in batch)
    assert all(r.failed and "boom" in r.text for r in crashed) and len(crashed) == 3
    assert hung[0].timed_out and "never returned" in hung[1].text and batch[1].toolbox.hung
    assert [r.text for r in good] == ["fine"] * 3


def test_the_time_budget_ends_a_rollout_that_waits_for_a_tool_without_a_limit():
    def hang():
        threading.Event().wait()

    batch = episodes([hang, lambda: "x"])
    seconds = run(batch, ScriptedBackend(call_thrice), max_seconds=0.5)
    assert reasons(batch) == [StopReason.MAX_SECONDS, StopReason.FINAL] and 0.4 < seconds < 10
    trajectory = batch[0].trajectory
    assert trajectory.completion_ids == [5, CALL] and trajectory.loss_mask == [1, 1]
    assert batch[0].toolbox.hung and not batch[1].toolbox.hung


def test_the_time_budget_ends_a_turn_that_does_not_end_and_keeps_its_tokens():
    class Endless(ScriptedBackend):
        def generate(self, prompts, max_new_tokens, sampling=None):
            time.sleep(0.05)
            samples = super().generate(prompts, max_new_tokens)
            for sample in samples:
                sample.logps = [-float(i) for i in sample.ids]
            return samples

    backend = Endless(lambda prompt, rng: [20 + len(prompt) % 5] * 10_000)
    batch = episodes([lambda: None])
    run(batch, backend, max_seconds=0.4, piece_tokens=8)
    trajectory = batch[0].trajectory
    assert trajectory.stop_reason == StopReason.MAX_SECONDS and len(trajectory.turns) == 1
    pieces = [record for calls in backend.calls for record in calls]
    assert len(pieces) > 2 and all(limit == 8 for _, limit, _ in pieces)
    # Each piece was sampled after the one before it, and nothing was lost or sampled twice.
    assert trajectory.completion_ids == [i for _, _, ids in pieces for i in ids]
    assert [p for p, _, _ in pieces] == [(0, 0, *trajectory.completion_ids[: 8 * n]) for n in range(len(pieces))]
    assert trajectory.sampling_logps == [-float(i) for i in trajectory.completion_ids]


def test_pieces_change_nothing_but_the_clock():
    rng = random.Random(5)
    turns = {i: [rng.randrange(10, 30) for _ in range(rng.randrange(40))] + [RETURN] for i in range(6)}

    def script(prompt, _):
        done = len(prompt) - 2
        return turns[prompt[0]][done:]

    for budget in (4096, 20):
        whole, cut = episodes([None] * 6), episodes([None] * 6)
        run(whole, ScriptedBackend(script), max_rollout_tokens=budget)
        run(cut, ScriptedBackend(script), max_rollout_tokens=budget, max_seconds=60.0, piece_tokens=7)
        assert [e.trajectory for e in cut] == [e.trajectory for e in whole]


def test_an_engine_that_gives_up_is_an_error_before_the_first_token_and_ends_the_rollout_later():
    with pytest.raises(RuntimeError, match="before its first token"):
        run(episodes([lambda: None]), ScriptedBackend(lambda p, rng: []))
    batch = episodes([lambda: None])
    run(batch, ScriptedBackend(lambda p, rng: [5, CALL] if 7 not in p else []))
    assert reasons(batch) == [StopReason.TRUNCATED] and batch[0].trajectory.completion_ids == [5, CALL, 7]


def test_what_a_rollout_samples_does_not_depend_on_when_its_tools_return():
    model = tiny_model(initializer_range=0.3)

    @contextmanager
    def open_model():
        yield model

    config = GenerationConfig(pad_token_id=257, eos_token_id=STOP, do_sample=True, temperature=1.0)
    backend = TransformersBackend(open_model, config, STOP, 257, torch.device("cpu"), False)

    def sampled(delays, seeds):
        batch = episodes([lambda d=d: time.sleep(d) for d in delays], seeds=seeds)
        run(batch, CallingBackend(backend), max_turns=3)
        return [e.trajectory.completion_ids for e in batch]

    class CallingBackend:
        """Ends every turn with a call, so that tools run."""

        collective = False

        def __init__(self, inner):
            self.inner, self.sampling = inner, inner.sampling

        def generate(self, prompts, max_new_tokens, sampling=None):
            samples = self.inner.generate(prompts, [4] * len(prompts), sampling)
            return [Sample(ids=s.ids[:3] + [CALL], logps=None) for s in samples]

    seeds = list(range(4))
    first = sampled([0.0, 0.0, 0.0, 0.0], seeds)
    assert sampled([0.3, 0.0, 0.15, 0.0], seeds) == first
    assert sampled([0.0, 0.2, 0.0, 0.3], [s + 1 for s in seeds]) != first  # the control


def test_a_backend_that_may_be_called_from_threads_gets_one_request_per_rollout():
    class Server(ScriptedBackend):
        def __init__(self):
            super().__init__(call_thrice)
            self.lock, self.here, self.most = threading.Lock(), 0, 0

        def generate(self, prompts, max_new_tokens, sampling=None):
            with self.lock:
                self.here += 1
                self.most = max(self.most, self.here)
            time.sleep(0.05)
            with self.lock:
                self.here -= 1
                return super().generate(prompts, max_new_tokens)

    class ServerStream(ThreadStream):
        collective = False

        def __init__(self, backend):
            super().__init__(backend)
            self.sampling = backend.sampling

    server = Server()
    batch = episodes([lambda: "x"] * 5)
    run(batch, ServerStream(server))
    assert reasons(batch) == [StopReason.FINAL] * 5
    assert server.most > 1 and all(len(calls) == 1 for calls in server.calls)

    class Down(ScriptedBackend):
        def generate(self, prompts, max_new_tokens, sampling=None):
            raise ConnectionError("the server is gone")

    with pytest.raises(ConnectionError, match="is gone"):
        run(episodes([lambda: "x"] * 2), ServerStream(Down(call_thrice)))


def test_a_batch_that_was_broken_off_leaves_nothing_to_the_next_one():
    class Fails(ScriptedBackend):
        def generate(self, prompts, max_new_tokens, sampling=None):
            if prompts[0][0] == 0:
                raise ConnectionError("the server is gone")
            time.sleep(0.1)  # behind the failure
            return super().generate(prompts, max_new_tokens)

    class Stream(ThreadStream):
        collective = False
        sampling = ScriptedBackend(call_thrice).sampling

    stream = Stream(Fails(lambda prompt, rng: [100 + prompt[0], RETURN]))
    with pytest.raises(ConnectionError):
        run(episodes([lambda: "x"] * 3), stream)
    batch = episodes([lambda: "x"] * 3)
    for i, episode in enumerate(batch):
        episode.trajectory.prompt_ids = [10 + i]
    run(batch, stream)
    assert [e.trajectory.turns[0].policy_ids[0] for e in batch] == [110, 111, 112]


class Ranks:
    """Ranks as threads. A rank that asks more or less often than the others breaks the barrier."""

    def __init__(self, n):
        self.barrier, self.flags = threading.Barrier(n, timeout=20), [False] * n

    def any_rank(self, rank):
        def ask(here):
            self.flags[rank] = here
            self.barrier.wait()
            answer = any(self.flags)
            self.barrier.wait()
            return answer

        return ask


def test_ranks_with_unequal_turns_and_a_crashing_tool_stay_in_step():
    ranks, calls = Ranks(3), {}

    def script(prompt, rng):
        turns = {0: 1, 1: 6, 2: 3}[prompt[0] % 3]
        return [100 + prompt[0], CALL] if prompt.count(7) < turns else [100 + prompt[0], RETURN]

    def crash():
        raise MemoryError("boom")

    def sometimes():
        time.sleep(random.random() * 0.1)
        return "ok"

    def rank(r):
        functions = [[sometimes] * 4, [crash, sometimes], [sometimes]][r]
        batch = episodes(functions)
        for i, episode in enumerate(batch):
            episode.trajectory.prompt_ids = [10 * r + i] * 2
        backend = ScriptedBackend(script, collective=True)
        run(batch, backend, any_rank=ranks.any_rank(r))
        calls[r] = len(backend.calls)
        return batch

    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(rank, range(3)))
    assert len(set(calls.values())) == 1  # every rank took part in every wave
    for r, batch in enumerate(done):
        for i, episode in enumerate(batch):
            sampled = [t for turn in episode.trajectory.turns for t in turn.policy_ids[:-1]]
            assert set(sampled) == {100 + 10 * r + i}  # nobody else's tokens
            assert episode.trajectory.stop_reason == StopReason.FINAL
    crashed = done[1][0].trajectory.tool_results
    assert crashed and all("boom" in t.text for t in crashed)


def test_a_wave_waits_for_tools_that_are_nearly_done_and_not_for_others():
    backend = ScriptedBackend(call_thrice)
    run(episodes([lambda: "x"] * 6), backend)
    assert max(len(calls) for calls in backend.calls[1:]) > 1  # quick tools come back into one batch
    stream = WaveStream(backend, lambda here: here)
    assert 0 < stream.patience <= 0.1


@pytest.mark.parametrize("wait_for_tools", [True, False])
def test_a_whole_wave_is_the_same_however_long_tools_take(wait_for_tools):
    waves = []
    for slowest in (0, 5):
        batch = episodes([partial(time.sleep, 0.3 if i == slowest else 0.01 * (6 - i)) for i in range(6)])
        backend = ScriptedBackend(call_thrice)
        run(batch, backend, wait_for_tools=wait_for_tools)
        waves.append([[prompt[0] for prompt, _, _ in wave] for wave in backend.calls])
    if wait_for_tools:
        assert waves[0] == waves[1] == [list(range(6))] * 4
    else:  # control
        assert waves[0] != waves[1]
