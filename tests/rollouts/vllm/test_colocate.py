"""The colocated engine and its stream, with a few lines in the place of `vllm.LLM`."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from trl_gptoss.rollouts import SampleRequest, SamplingOptions
from trl_gptoss.rollouts.vllm.colocate import ColocateEngine
from trl_gptoss.rollouts.vllm.stream import ColocateStream

DESCRIPTION = {
    "version": "0.30.0",
    "device": "cpu",
    "dtypes": {},
    "dtype": "float32",
    "max_model_len": 64,
    "logprobs_mode": "processed_logprobs",
    "policy_version": "",
    "quantization": None,
    "tensor_parallel_size": 1,
    "routed_experts": False,
}


class Llm:
    """Finishes one request per step, the oldest first, with the first id of its prompt. As in vLLM, prefixes are kept as
    long as a request runs."""

    def __init__(self):
        self.llm_engine = self
        self.running = {}
        self.rpcs = []

    def add_request(self, name, prompt, params):
        self.running[name] = prompt["prompt_token_ids"]

    def abort_request(self, names):
        for name in names:
            del self.running[name]

    def step(self):
        name = next(iter(self.running))
        first = self.running.pop(name)[0]
        sampled = SimpleNamespace(
            token_ids=[first], logprobs=[{first: SimpleNamespace(logprob=-1.0)}], finish_reason="stop"
        )
        sampled.routed_experts = None
        return [SimpleNamespace(request_id=name, finished=True, outputs=[sampled])]

    def collective_rpc(self, method, args=()):
        self.rpcs.append(method)
        return [DESCRIPTION]

    def reset_prefix_cache(self):
        return not self.running


@pytest.fixture
def engine(monkeypatch):
    vllm, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = SimpleNamespace
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY=0)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    return ColocateEngine(Llm(), [7], SamplingOptions(), {})


def submit(stream, key, first):
    stream.submit(key, SampleRequest(prompt=[first, 9], max_new_tokens=1, sampling=SamplingOptions()))


def test_samples_come_back_under_their_keys(engine):
    stream = ColocateStream(engine)
    for key in range(3):
        submit(stream, key, 20 + key)
    found = {}
    while stream.waiting:
        found |= {key: sample.ids for key, sample in stream.poll(0.0)}
    assert found == {0: [20], 1: [21], 2: [22]}


def test_a_batch_that_was_broken_off_leaves_nothing_to_the_next_one(engine):
    stream = ColocateStream(engine)
    for key in range(3):
        submit(stream, key, 20 + key)
    [(_, sample)] = stream.poll(0.0)
    assert sample.ids == [20] and stream.waiting == 2
    stream.reset()
    assert stream.waiting == 0 and not engine.llm.running
    submit(stream, 1, 31)
    assert [(key, sample.ids) for key, sample in stream.poll(0.0)] == [(1, [31])]


def test_new_weights_leave_no_prefix_of_the_former_ones(engine):
    submit(ColocateStream(engine), 0, 20)  # and nobody takes it
    engine.load(iter([]), "run:1")
    assert engine.llm.rpcs[-1] == "policy_load" and not engine.llm.running
    engine.llm.add_request("someone else's", {"prompt_token_ids": [1]}, None)
    with pytest.raises(RuntimeError, match="did not give up the prefixes"):
        engine.load(iter([]), "run:2")
