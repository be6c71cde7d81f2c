"""A stand-in for a vLLM server with our worker extension: real HTTP, and transformers in the place of vLLM's model.

It answers with the fields that vLLM 0.31 answers with. What a real vLLM does with weights is tested in tests/vllm.
"""

import base64
import copy
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch import nn

from trl_gptoss.rollouts.vllm.loading import trainer_checksums
from trl_gptoss.routing import capture_routing


class StubPolicy:
    """What sits behind the server: a model, and faults to plant.

    Args:
        model (`nn.Module`): a GPT-OSS that the server samples from.

    Attributes:
        skip (`set[str]`): names whose new values are dropped, as by a sync that forgets them.
        wrong (`float`): added to the log-probs of scoring, as by a kernel that computes otherwise.
        other_experts (`int`): added to the experts that are reported.
        keeps_prefixes (`bool`): the prefix cache cannot be reset.
        resets (`list[str]`): paths of the requests to reset it.
        calls (`list[tuple]`): (method, policy version) of all RPCs that carry weights.
    """

    def __init__(self, model: nn.Module, description: dict | None = None) -> None:
        self.model = model.eval()
        self.version = ""
        self.skip: set[str] = set()
        self.wrong = 0.0
        self.other_experts = 0
        self.keeps_prefixes = False
        self.resets: list[str] = []
        self.calls: list[tuple[str, str]] = []
        self.parts: list[bytes] = []
        self.seen: list[dict] = []
        self.draws = 0
        self.description = {
            "version": "0.31.0",
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 512,
            "logprobs_mode": "processed_logprobs",
            "quantization": None,
            "tensor_parallel_size": 1,
            "routed_experts": False,
            **(description or {}),
        }
        self.lock = threading.Lock()

    # ---- the worker extension ----

    def policy_describe(self) -> dict:
        dtypes = {n: str(p.dtype).removeprefix("torch.") for n, p in self.model.named_parameters()}
        return {**self.description, "dtypes": dtypes, "policy_version": self.version}

    def policy_load_files(self, paths, policy_version) -> None:
        self.calls.append(("files", policy_version))
        self.load({name: t for path in paths for name, t in load_file(path).items()}, policy_version)

    def policy_receive_bytes(self, number, data) -> None:
        self.parts = self.parts[:number] + [base64.b64decode(data)]

    def policy_load_received(self, count, policy_version) -> None:
        assert len(self.parts) == count
        self.calls.append(("received", policy_version))
        self.load({name: t for part in self.parts for name, t in load_bytes(part).items()}, policy_version)

    def policy_checksums(self) -> dict:
        sums = {}
        for name, parameter in self.model.named_parameters():
            sums |= trainer_checksums(name, parameter.data, parameter.dtype)
        return sums

    def load(self, weights, policy_version) -> None:
        parameters = dict(self.model.named_parameters())
        assert set(weights) == set(parameters)
        with torch.no_grad():
            for name, tensor in weights.items():
                if name not in self.skip:
                    parameters[name].copy_(tensor)
        self.version = policy_version

    # ---- completions ----

    @torch.no_grad()
    def complete(self, body: dict) -> dict:
        """One choice. Draws id by id, from one generator for each request, so that threads do not meet."""
        ids, prompt = [], list(body["prompt"])
        if body.get("prompt_logprobs") is not None:
            logps = self.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            table = [{str(i): {"logprob": logps[t, i].item() + self.wrong}} for t, i in enumerate(prompt[1:])]
            return {"prompt_logprobs": [None, *table], "token_ids": [0], "finish_reason": "length"}
        generator = torch.Generator().manual_seed(
            hash(tuple(prompt)) % 2**31 if body["seed"] is None else body["seed"]
        )
        sampled = []
        while len(ids) < body["max_tokens"] and (not ids or ids[-1] not in body["stop_token_ids"]):
            logits = self.model(torch.tensor([prompt + ids])).logits[0, -1]
            logps = (logits / body["temperature"]).log_softmax(-1)
            ids.append(int(torch.multinomial(logps.exp(), 1, generator=generator)))
            sampled.append(logps[ids[-1]].item())
        reason = "stop" if ids[-1] in body["stop_token_ids"] else "length"
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": sampled}, "finish_reason": reason}
        return {**choice, "routed_experts": self.experts(prompt + ids[:-1])}

    def experts(self, ids: list[int]) -> str | None:
        """As vLLM's server encodes them."""
        if not self.description["routed_experts"]:
            return None
        model = copy.deepcopy(self.model)  # other threads run this one
        with capture_routing(model) as record:
            model(torch.tensor([ids]))
        file = io.BytesIO()
        np.save(
            file, (record.indices().permute(1, 0, 2).numpy() + self.other_experts) % model.config.num_local_experts
        )
        return base64.b64encode(file.getvalue()).decode("ascii")


class StubServer:
    """HTTP in front of a [`StubPolicy`]. `stop` drops all connections, `start` listens on the same port again."""

    def __init__(self, policy) -> None:
        self.policy = policy
        self.port = 0
        self.http = None
        self.requests = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def answer(self, status, content):
                if outer.http is not self.server:  # stopped: a killed server answers nobody
                    self.close_connection = True
                    return
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.answer(200, {"data": [{"id": "policy"}]} if self.path == "/v1/models" else {})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests += 1
                self.answer(*outer.handle(self.path, body))

        ThreadingHTTPServer.allow_reuse_address = True
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def handle(self, path, body):
        if path == "/v1/completions":
            self.policy.seen.append(body)
            return 200, {"choices": [self.policy.complete(body)]}
        if path == "/collective_rpc":
            return 200, {"results": [getattr(self.policy, body["method"])(*body["args"])]}
        if path.startswith("/reset_prefix_cache"):
            self.policy.resets.append(path)
            return 200, {"success": not self.policy.keeps_prefixes}
        return 404, {"detail": "Not Found"}

    def stop(self) -> None:
        http, self.http = self.http, None
        if http is not None:
            http.shutdown()
            http.server_close()
