"""Our client and engine against real HTTP, with transformers where vLLM's model would be."""

import math
import threading
import time

import pytest
import torch
from stub_vllm import StubPolicy, StubServer
from tiny_policy import tiny_model

from trl_gptoss.rollouts import SampleEnd, SamplingOptions
from trl_gptoss.rollouts.vllm.client import VllmClient
from trl_gptoss.rollouts.vllm.engine import EngineUnavailable
from trl_gptoss.rollouts.vllm.server import ServerEngine
from trl_gptoss.rollouts.vllm.snapshot import Snapshot

STOP = [7, 8]


@pytest.fixture
def policy():
    return StubPolicy(tiny_model())


@pytest.fixture
def server(policy):
    running = StubServer(policy)
    yield running
    running.stop()


def engine(server, folder, transport="file", timeout=20.0, file_bytes=1 << 30, sampling=SamplingOptions()):
    client = VllmClient(server.url, timeout, 60.0)
    return ServerEngine(client, STOP, sampling, {}, transport, Snapshot(folder, file_bytes))


def weights(model):
    return [(name, parameter.data) for name, parameter in model.named_parameters()]


def synced(engine, model, version):
    engine.load(iter(weights(model)), version)
    engine.policy_version = version


# ---- tokens ----


def test_samples_have_own_limits_stop_reasons_and_log_probs(server, policy, tmp_path):
    prompts = [[i + 20] * (3 + i) for i in range(6)]
    limits = [1, 5, 40, 2, 9, 30]
    samples = engine(server, tmp_path).generate(prompts, limits)
    for prompt, limit, sample in zip(prompts, limits, samples, strict=True):
        stopped = sample.ids[-1] in STOP
        assert sample.end == (SampleEnd.STOP if stopped else SampleEnd.LENGTH)
        assert len(sample.ids) == limit or stopped
        assert not set(sample.ids[:-1]).intersection(STOP)
        with torch.no_grad():
            logits = policy.model(torch.tensor([prompt + sample.ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(sample.logps), expected, atol=1e-5)
    assert engine(server, tmp_path).generate([], []) == []


def test_rows_bring_their_own_sampling_options(server, policy, tmp_path):
    own = SamplingOptions(temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, seed=3)
    default = SamplingOptions(temperature=0.7)
    ours = engine(server, tmp_path, sampling=default)
    ours.generate([[1, 2], [3]], [2, 3], [own, default])
    ours.generate([[4]], [1])
    asked = {tuple(body["prompt"]): body for body in policy.seen}
    fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens", "stop_token_ids")
    assert [asked[1, 2][f] for f in fields] == [0.5, 0.9, 5, 0.1, 1.1, 3, 2, STOP]
    assert [asked[(3,)][f] for f in fields] == [0.7, 1.0, 0, 0.0, 1.0, None, 3, STOP]
    assert asked[(4,)]["temperature"] == 0.7


def test_missing_log_probs_become_nan_and_too_few_are_an_error(server, policy, tmp_path, monkeypatch):
    answer = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [None, -1.0]}, "finish_reason": "abort"}
    monkeypatch.setattr(policy, "complete", lambda body: answer)
    [sample] = engine(server, tmp_path).generate([[1]], [2])
    assert math.isnan(sample.logps[0]) and sample.logps[1] == -1.0 and sample.end == SampleEnd.ABORT
    answer["logprobs"]["token_logprobs"].pop()
    with pytest.raises(RuntimeError, match="1 log-probs for 2 sampled ids"):
        engine(server, tmp_path).generate([[1]], [2])


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_k", -1),
        ("min_p", 2),
        ("repetition_penalty", 0),
    ],
)
def test_sampling_options_are_checked(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingOptions(**{field: value})


# ---- weights ----


@pytest.mark.parametrize(
    "transport, file_bytes", [("file", 1 << 30), ("file", 20_000), ("http", 1 << 30), ("http", 20_000)]
)
def test_weights_arrive(server, policy, tmp_path, transport, file_bytes):
    ours, new = engine(server, tmp_path, transport, file_bytes=file_bytes), tiny_model(seed=5)
    synced(ours, new, "run:0")
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), new.parameters()))
    assert ours.client.describe().policy_version == "run:0"
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if file_bytes == 1 << 30 else len(files) > 2
    synced(ours, tiny_model(seed=6), "run:1")  # a later one replaces the files
    assert Snapshot(tmp_path).files("run:0") is None and Snapshot(tmp_path).files("run:1")


def test_new_weights_leave_no_prefix_of_the_former_ones(server, policy, tmp_path):
    ours = engine(server, tmp_path)
    synced(ours, tiny_model(seed=5), "run:0")
    assert policy.resets == ["/reset_prefix_cache?reset_running_requests=true"]
    policy.keeps_prefixes = True
    with pytest.raises(RuntimeError, match="did not give up the prefixes"):
        synced(ours, tiny_model(seed=6), "run:1")


def test_the_score_is_that_of_the_new_weights(server, tmp_path):
    ours, new = engine(server, tmp_path), tiny_model(seed=5).eval()
    ids = [3, 50, 99, 7, 120]
    before = ours.score([ids])
    synced(ours, new, "run:0")
    with torch.no_grad():
        expected = new(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    [after] = ours.score([ids])
    assert torch.allclose(torch.tensor(after), expected[:, 0], atol=1e-5) and before != [after]


# ---- a server that is lost ----


def test_a_server_that_does_not_answer_is_an_error_within_the_time_that_says_what_to_do(tmp_path):
    client = VllmClient("http://127.0.0.1:9", 1.0, 5.0)
    started = time.monotonic()
    with pytest.raises(EngineUnavailable, match="(?s)waited 1 s.*--worker-extension-cls") as lost:
        ServerEngine(client, STOP, SamplingOptions(), {}, "file", Snapshot(tmp_path))
    assert "resume_from_checkpoint" not in str(lost.value)  # no run is going on; the doctor's users have none
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("transport", ["file", "http"])
def test_a_restarted_server_gets_the_weights_again_and_the_rollouts_go_on(server, policy, tmp_path, transport):
    ours = engine(server, tmp_path, transport, timeout=60.0)
    new = tiny_model(seed=5)
    synced(ours, new, "run:0")
    server.stop()
    fresh = StubPolicy(tiny_model())  # with the checkpoint's weights

    def restart():
        time.sleep(1.0)
        server.policy = fresh
        server.start()

    threading.Thread(target=restart).start()
    ours.client.http.close()
    ours.client = VllmClient(server.url, 60.0, 60.0)
    samples = ours.generate([[i] * 4 for i in range(20, 28)], [6] * 8)
    assert len(samples) == 8 and fresh.version == "run:0"
    assert [version for _, version in fresh.calls] == ["run:0"]  # once, though eight requests failed
    assert all(torch.equal(a, b) for a, b in zip(fresh.model.parameters(), new.parameters()))
    with torch.no_grad():
        logits = new.eval()(torch.tensor([[20] * 4 + samples[0].ids])).logits[0, 3:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(samples[0].ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(samples[0].logps), expected, atol=1e-5)


def test_requests_wait_while_a_restarted_server_gets_its_weights(server, policy, tmp_path, monkeypatch):
    ours = engine(server, tmp_path)
    synced(ours, tiny_model(seed=5), "run:0")
    ours.generate([[9]], [1])
    fresh, loading, asked = StubPolicy(tiny_model()), threading.Event(), []  # with the checkpoint's weights
    load, complete = fresh.policy_load_files, fresh.complete

    def slowly(*args):
        loading.set()
        time.sleep(0.5)
        load(*args)

    monkeypatch.setattr(fresh, "policy_load_files", slowly)
    monkeypatch.setattr(fresh, "complete", lambda body: asked.append(fresh.version) or complete(body))
    handle, failures = server.handle, [503]
    server.policy = fresh
    monkeypatch.setattr(server, "handle", lambda *a: (failures.pop(), {}) if failures else handle(*a))
    first = threading.Thread(target=ours.generate, args=([[20] * 4], [3]))
    first.start()
    assert loading.wait(10.0)
    ours.generate([[21] * 4], [3])  # a rollout whose tool has just answered
    first.join()
    assert asked == ["run:0", "run:0"]


def test_a_hiccup_does_not_send_the_weights_again(server, policy, tmp_path, monkeypatch):
    ours = engine(server, tmp_path)
    synced(ours, tiny_model(), "run:0")
    calls = list(policy.calls)
    handle, failures = server.handle, [503, 500]
    monkeypatch.setattr(server, "handle", lambda *a: (failures.pop(), {}) if failures else handle(*a))
    assert len(ours.generate([[1, 2, 3]], [3])) == 1
    assert policy.calls == calls and not failures


def test_a_restarted_server_without_a_snapshot_ends_the_run(server, policy, tmp_path):
    ours = engine(server, tmp_path)
    synced(ours, tiny_model(), "run:0")
    ours.snapshot.clear()
    policy.version = ""
    with pytest.raises(EngineUnavailable, match="(?s)lost the policy's weights.*Resume the run"):
        ours._recover(EngineUnavailable("gone."), "run:0")


def test_refused_requests_are_not_repeated(server, tmp_path, monkeypatch):
    ours = engine(server, tmp_path)
    ours.generate([[1]], [1])
    handle = server.handle
    monkeypatch.setattr(server, "handle", lambda p, b: (400, {"e": "too long"}) if "comp" in p else handle(p, b))
    before = server.requests
    with pytest.raises(RuntimeError, match="(?s)refuses /v1/completions .400.*too long"):
        ours.generate([[1]], [1])
    assert server.requests == before + 1


def test_a_server_without_the_dev_endpoints_or_the_extension_is_told_apart(server, policy, monkeypatch):
    client = VllmClient(server.url, 5.0, 5.0)
    handle = server.handle
    monkeypatch.setattr(server, "handle", lambda p, b: (404, {}) if p == "/collective_rpc" else handle(p, b))
    with pytest.raises(RuntimeError, match="VLLM_SERVER_DEV_MODE=1"):
        client.describe()
    monkeypatch.setattr(server, "handle", lambda p, b: (500, {"error": "no policy_describe"}))
    with pytest.raises(EngineUnavailable, match="--worker-extension-cls"):
        client.describe()


@pytest.mark.parametrize(
    "described, message",
    [
        ({"quantization": "gpt_oss_mxfp4"}, "dequantised"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"version": "0.21.0"}, "0.22 to 0.31"),
    ],
)
def test_engines_that_cannot_be_trusted_are_refused(server, policy, described, message):
    policy.description |= described
    with pytest.raises((ValueError, NotImplementedError), match=message):
        VllmClient(server.url, 5.0, 5.0).describe().check(probing=True)
