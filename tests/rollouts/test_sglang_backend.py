"""SGLang's `/generate`, against a stand-in server that speaks it: ids and log-probs arrive, nothing else is believed."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from datasets import Dataset
from tiny_policy import byte_tokenizer, tiny_model
from transformers import GptOssForCausalLM

from trl_gptoss.harmony import HarmonyVocabulary
from trl_gptoss.rollouts.backend import SampleEnd, SamplingOptions
from trl_gptoss.rollouts.sglang_backend import DiskWeightSync, SglangBackend
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer

TOKENIZER = byte_tokenizer()
STOP = HarmonyVocabulary.of(TOKENIZER).stop_ids


class Server:
    """Samples from a model, one sequence at a time and without a cache, and answers in SGLang's form."""

    def __init__(self, model):
        self.model = model.eval()
        self.requests = []
        self.spoil = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, body))
                status, answer = outer.answer(self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, path, body):
        if path == "/update_weights_from_disk":
            self.model = GptOssForCausalLM.from_pretrained(body["model_path"]).eval()
            return 200, {"success": True, "message": ""}
        rows = zip(body["input_ids"], body["sampling_params"], strict=True)
        samples = [self.sample(p, s, seed) for seed, (p, s) in enumerate(rows)]
        return (200, samples) if self.spoil is None else self.spoil(samples)

    @torch.no_grad()
    def sample(self, ids, params, seed):
        logprobs, generator = [], torch.Generator().manual_seed(seed)
        reason = {"type": "length", "length": params["max_new_tokens"]}
        for _ in range(params["max_new_tokens"]):
            logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1] / params["temperature"]
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
            logprobs.append([float(logits.log_softmax(-1)[token]), token, None])
            ids = [*ids, token]
            if token in params["stop_token_ids"]:
                reason = {"type": "stop", "matched": token}
                break
        return {"text": "not to be read", "meta_info": {"output_token_logprobs": logprobs, "finish_reason": reason}}


@pytest.fixture
def server():
    instance = Server(tiny_model(seed=1))
    yield instance
    instance.http.shutdown()
    instance.http.server_close()


def test_ids_and_log_probs_arrive(server):
    backend = SglangBackend(server.url, STOP, sampling=SamplingOptions(temperature=0.7, top_p=0.9))
    assert backend.generate([], []) == [] and server.requests == []
    first, second = backend.generate([[1, 2, 3], [4]], [5, 3])
    assert first.end in (SampleEnd.STOP, SampleEnd.LENGTH) and backend.sampling.temperature == 0.7
    [(path, body)] = server.requests
    assert path == "/generate" and body["input_ids"] == [[1, 2, 3], [4]] and body["return_logprob"] is True
    assert [s["max_new_tokens"] for s in body["sampling_params"]] == [5, 3]
    assert all(s["stop_token_ids"] == list(STOP) and s["temperature"] == 0.7 for s in body["sampling_params"])
    assert body["sampling_params"][0]["top_p"] == 0.9
    assert body["sampling_params"][0]["top_k"] == -1
    backend.generate([[5]], [1], [SamplingOptions(temperature=0.5, top_k=4)])
    [own] = server.requests.pop()[1]["sampling_params"]
    assert (own["temperature"], own["top_k"], own["top_p"]) == (0.5, 4, 1.0)
    for seed, (prompt, sample, limit) in enumerate((([1, 2, 3], first, 5), ([4], second, 3))):
        expected = server.sample(prompt, {**body["sampling_params"][0], "max_new_tokens": limit}, seed)
        logprobs = expected["meta_info"]["output_token_logprobs"]
        assert sample.ids == [t for _, t, _ in logprobs] and sample.logps == [p for p, _, _ in logprobs]


def spoiled(change):
    def spoil(samples):
        for sample in samples:
            change(sample["meta_info"])
        return 200, samples

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoiled(lambda m: m.pop("output_token_logprobs")), "return_logprob"),
        (
            spoiled(lambda m: m.update(finish_reason={"type": "stop", "matched": "END"})),
            "the token that ended the turn",
        ),
        (spoiled(lambda m: m["output_token_logprobs"].append([0.0, 1, None])), "where 3 were allowed"),
        (lambda samples: (200, samples[:0]), "asked 1 prompts"),
        (lambda samples: (400, {"error": {"message": "too long"}}), "answered 400.*too long"),
    ],
)
def test_what_cannot_be_trained_on_is_an_error(server, spoil, message):
    server.spoil = spoil
    with pytest.raises(RuntimeError, match=message):
        SglangBackend(server.url, [10**6]).generate([[1, 2]], [3])


def test_an_aborted_request_is_said_to_be_one(server):
    server.spoil = spoiled(lambda m: m.update(finish_reason={"type": "abort", "message": "x"}))
    [sample] = SglangBackend(server.url, [10**6]).generate([[1, 2]], [3])
    assert sample.end is SampleEnd.ABORT and len(sample.ids) == 3


def test_no_server_is_an_error():
    with pytest.raises(RuntimeError, match="gave no answer"):
        SglangBackend("http://127.0.0.1:9", STOP).generate([[1]], [1])
    with pytest.raises(ValueError, match="base_url"):
        SglangBackend("localhost:30000", STOP)


def test_the_trainer_learns_from_it_and_keeps_it_up_to_date(server, tmp_path):
    """The sampler's log-probs of every step are those of the trainer's weights: the server really got them."""
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)])
    args = GptOssGRPOConfig(
        str(tmp_path / "run"), per_device_train_batch_size=4, num_generations=4, max_steps=3, max_rollout_tokens=5,
        learning_rate=1e-2, bf16=False, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    differences = []

    def reward(trajectories, **kwargs):
        model = trainer.model.eval()
        for t in trajectories:
            ids = t.prompt_ids + t.completion_ids
            with torch.no_grad():
                logps = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            own = [float(logps[i - 1, ids[i]]) for i in range(len(t.prompt_ids), len(ids))]
            differences.append(max(abs(a - b) for a, b in zip(own, t.sampling_logps, strict=True)))
        return [float(sum(t.completion_ids) % 7) for t in trajectories]

    trainer = GptOssGRPOTrainer(tiny_model(seed=1), reward, args, data, processing_class=TOKENIZER)
    backend = SglangBackend(server.url, STOP)
    backend.sync_weights = DiskWeightSync(
        trainer.save_model, lambda: trainer.state.global_step, str(tmp_path / "weights"), backend, True,
        trainer.accelerator.wait_for_everyone,
    )  # fmt: skip
    assert trainer._only_measures  # the policy would sample itself
    trainer.use_backend(backend)
    assert not trainer._only_measures  # the default corrects for another program
    backend.sync_weights._loaded = 0  # a run was interrupted in its first step
    with torch.no_grad():
        for p in server.model.parameters():
            p.mul_(1.5)
    trainer.train()
    assert len(differences) == 12 and max(differences) < 1e-4
    assert [path for path, _ in server.requests].count("/update_weights_from_disk") == 3  # before each step
    before = tiny_model(seed=1).state_dict()
    assert any(not torch.equal(before[n], p) for n, p in trainer.model.state_dict().items())


def test_an_evaluation_after_the_best_model_was_loaded_samples_from_that_one(server, tmp_path):
    """Of two steps the first is the better one; nothing but the folder tells the server."""
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)])
    args = GptOssGRPOConfig(
        str(tmp_path / "run"), per_device_train_batch_size=4, num_generations=4, max_steps=2, max_rollout_tokens=5,
        learning_rate=1e-2, bf16=False, use_cpu=True, report_to="none", disable_tqdm=True,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="eval_score", greater_is_better=True, per_device_eval_batch_size=2, num_generations_eval=1,
    )  # fmt: skip
    trainer = GptOssGRPOTrainer(
        tiny_model(seed=1), lambda completion_ids, **k: [float(sum(ids) % 7) for ids in completion_ids], args, data,
        eval_dataset=data.select([0, 1]), processing_class=TOKENIZER,
    )  # fmt: skip
    backend = SglangBackend(server.url, STOP)
    backend.sync_weights = DiskWeightSync(
        trainer.save_model, lambda: trainer.state.global_step, str(tmp_path / "weights"), backend, True,
        trainer.accelerator.wait_for_everyone,
    )  # fmt: skip
    trainer.use_backend(backend)
    scores, evaluate = iter([1.0, -1.0]), trainer.evaluation_loop

    def scored(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        result.metrics["eval_score"] = next(scores, 0.0)
        return result

    trainer.evaluation_loop = scored
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")

    def served(weights):
        return all(torch.equal(p, weights[name]) for name, p in server.model.state_dict().items())

    assert not served(trainer.model.state_dict())  # the last step's, which are not the best
    trainer.evaluate()
    assert served(trainer.model.state_dict())
    sent = [path for path, _ in server.requests].count("/update_weights_from_disk")
    trainer.evaluate()
    assert (
        [path for path, _ in server.requests].count("/update_weights_from_disk") == sent == 4
    )  # before both steps, after the second one, and of the best


def test_a_trainer_without_harmony_rollouts_refuses_it(tmp_path):
    def rollout(prompts, trainer):
        raise AssertionError

    args = GptOssGRPOConfig(str(tmp_path), bf16=False, use_cpu=True, per_device_train_batch_size=2, num_generations=2)
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}])
    trainer = GptOssGRPOTrainer(
        tiny_model(), lambda completions, **k: [0.0], args, data, processing_class=TOKENIZER, rollout_func=rollout
    )
    with pytest.raises(ValueError, match="rollout_func"):
        trainer.use_backend(SglangBackend("http://x", STOP))


def test_a_loss_that_cannot_be_corrected_in_parts_refuses_it(tmp_path):
    """Only measured, `bnpo` works in parts; another sampler makes the default correct."""
    args = GptOssGRPOConfig(
        str(tmp_path), per_device_train_batch_size=2, num_generations=2, loss_type="bnpo", max_tokens_per_micro_batch=64,
        bf16=False, use_cpu=True, report_to="none",
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}] * 2)
    model = tiny_model(attn_implementation="sink_fa3")
    trainer = GptOssGRPOTrainer(model, lambda completions, **k: [0.0] * 2, args, data, processing_class=TOKENIZER)
    with pytest.raises(ValueError, match="temperature=0.7, and the loss takes log-probs with temperature=1.0"):
        trainer.use_backend(SglangBackend("http://x", STOP, sampling=SamplingOptions(temperature=0.7)))
    with pytest.raises(ValueError, match="rollout correction keeps"):
        trainer.use_backend(SglangBackend("http://x", STOP))
    assert trainer._only_measures and not isinstance(trainer._engine.backend, SglangBackend)
