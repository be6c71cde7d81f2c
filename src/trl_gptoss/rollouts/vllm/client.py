"""HTTP to a vLLM server that was started with our worker extension. Knows the wire format and nothing of training."""

import base64
import io
import math
import time
from typing import Any

import httpx2
import numpy as np

from ..backend import Sample, SamplingOptions
from .engine import WORKER_EXTENSION, EngineInfo, EngineLost, EngineUnavailable, sample_end

CONNECT_TIMEOUT = 10.0  # seconds
POLL_INTERVAL = 0.5  # seconds
SERVER_COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --dtype bfloat16 "
    f"--logprobs-mode processed_logprobs --max-logprobs -1 --worker-extension-cls {WORKER_EXTENSION}"
)


class VllmClient:
    """One server. Safe to use from several threads.

    Args:
        base_url (`str`): such as `http://localhost:8000`.
        server_timeout (`float`): seconds to wait for a server that does not answer, at the start and when it is lost.
        request_timeout (`float`): most seconds one request may take.
    """

    def __init__(self, base_url: str, server_timeout: float, request_timeout: float) -> None:
        self.base_url = base_url.rstrip("/")
        self.server_timeout = server_timeout
        timeout = httpx2.Timeout(request_timeout, connect=CONNECT_TIMEOUT)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        # The server is named explicitly: a proxy meant for the internet must not come between.
        self.http = httpx2.Client(timeout=timeout, limits=limits, trust_env=False)
        self.model: str | None = None

    # ---- requests ----

    def wait(self) -> None:
        """Wait until the server is healthy.

        Raises:
            EngineLost: it is not within `server_timeout` seconds.
        """
        deadline = time.monotonic() + self.server_timeout
        while True:
            try:
                answer = self.http.get(f"{self.base_url}/health", timeout=CONNECT_TIMEOUT)
                problem = f"it answers {answer.status_code}"
                if answer.status_code == 200:
                    return
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() >= deadline:
                raise EngineLost(
                    f"The vLLM server at {self.base_url} cannot be reached (waited {self.server_timeout:g} s; "
                    f"{problem}). Start it with\n    {SERVER_COMMAND}"
                )
            time.sleep(POLL_INTERVAL)

    def post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        """POST JSON. For the errors see `request`."""
        return self.request("POST", path, json=body)

    def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Ask the server.

        Raises:
            EngineUnavailable: no answer, or one that says that the engine behind the server is broken.
            RuntimeError: the server refuses the request.
        """
        try:
            answer = self.http.request(method, f"{self.base_url}{path}", **options)
        except httpx2.TransportError as error:
            raise EngineUnavailable(
                f"The vLLM server at {self.base_url} did not answer {path} ({type(error).__name__}: {error})."
            ) from error
        if answer.status_code >= 500:
            raise EngineUnavailable(
                f"The vLLM server at {self.base_url} failed at {path} ({answer.status_code}): {answer.text[:500]}"
            )
        if answer.status_code != 200:
            raise RuntimeError(
                f"The vLLM server at {self.base_url} refuses {path} ({answer.status_code}): {answer.text[:500]}"
            )
        return answer

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension on every worker."""
        try:
            return self.post("/collective_rpc", {"method": method, "args": list(args)}).json()["results"]
        except RuntimeError as error:
            if "(404)" not in str(error):
                raise
            raise RuntimeError(
                f"The vLLM server at {self.base_url} has no /collective_rpc, which weights are synced through. Start it "
                f"with\n    {SERVER_COMMAND}"
            ) from error

    def describe(self) -> EngineInfo:
        """The engine behind the server.

        Raises:
            RuntimeError: the server was started without our worker extension.
        """
        try:
            return EngineInfo.of(self.rpc("policy_describe")[0])
        except EngineUnavailable as error:
            raise EngineUnavailable(
                f"{error}\nIf it says that there is no 'policy_describe', start the server with\n    {SERVER_COMMAND}"
            ) from error

    def reset_prefix_cache(self, tells: bool) -> None:
        """Forget what was computed with the former weights, by requests that still run, too: they begin again.

        Args:
            tells (`bool`): the server says whether it did (0.26 and later).

        Raises:
            RuntimeError: it did not.
        """
        answer = self.post("/reset_prefix_cache?reset_running_requests=true", {})
        if tells and not answer.json()["success"]:
            raise RuntimeError(
                f"The vLLM server at {self.base_url} did not give up the prefixes that were computed with the former "
                "weights: something else holds them (see its log). Restart it, and resume the run from its last checkpoint."
            )

    # ---- tokens ----

    def complete(
        self, prompt: list[int], limit: int, options: SamplingOptions, stop_ids: list[int], extra: dict[str, Any]
    ) -> Sample:
        """Sample one continuation. For the arguments see [`GenerationBackend.generate`]; `extra` goes into the request."""
        choice = self._completion(
            prompt,
            max_tokens=limit,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            seed=options.seed,
            stop_token_ids=stop_ids,
            logprobs=0,  # of the sampled id alone
            return_token_ids=True,
            **extra,
        )
        logps = [math.nan if p is None else p for p in choice["logprobs"]["token_logprobs"]]
        if len(logps) != len(choice["token_ids"]):
            raise RuntimeError(
                f"The vLLM server gave {len(logps)} log-probs for {len(choice['token_ids'])} sampled ids. Start it "
                "with --max-logprobs -1."
            )
        experts = choice.get("routed_experts")  # from 0.26 on, if the server returns them: .npy in base64
        return Sample(
            ids=choice["token_ids"],
            logps=logps,
            end=sample_end(choice["finish_reason"]),
            routing=None if experts is None else np.load(io.BytesIO(base64.b64decode(experts)), allow_pickle=False),
        )

    def score(self, ids: list[int]) -> list[float]:
        """Log-probs in nats, at temperature 1, of all ids but the first."""
        choice = self._completion(ids, max_tokens=1, temperature=1.0, prompt_logprobs=0)
        return [table[str(i)]["logprob"] for i, table in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)]

    def _completion(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        if self.model is None:
            self.model = self.request("GET", "/v1/models").json()["data"][0]["id"]
        [choice] = self.post("/v1/completions", {"model": self.model, "prompt": prompt, **fields}).json()["choices"]
        return choice
