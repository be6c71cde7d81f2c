"""Sampling with an SGLang server, token ids in and out, through its native `/generate`.

    POST /generate   {"input_ids": [[1, 2], ...], "sampling_params": [{"max_new_tokens": 8, ...}, ...],
                      "return_logprob": true}
    answer           [{"meta_info": {"output_token_logprobs": [[-0.5, 17, null], ...], "finish_reason": {...}}}, ...]

Only ids are read from the answer, never its text. Written from SGLang's documentation and tested against a stand-in that
speaks this exchange; **not proven against a running SGLang**, nor on a GPU.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from .backend import Sample, SampleEnd, SamplingOptions


def _do_nothing() -> None:
    pass


class SglangBackend:
    """A [`GenerationBackend`] on top of an SGLang server. Hand it to `GptOssGRPOTrainer.use_backend`.

    Args:
        base_url (`str`): of the server, e.g. `"http://localhost:30000"`.
        stop_ids (`list[int]`): ids that end a sample.
        sampling ([`SamplingOptions`], *optional*): for rows that bring none of their own. Its temperature has to be the
            trainer's: SGLang reports the log-probs of the distribution it sampled from, with this temperature in it, and
            the trainer compares with its own. A seed is not passed on.
        timeout (`float`, *optional*, defaults to 3600.0): seconds for one batch.
        sync_weights (`Callable[[], None]`, *optional*): called before each generation, on every rank; brings the current
            weights to the server if they have changed, e.g. [`DiskWeightSync`].
    """

    collective = True  # `sync_weights` may contain communication between ranks

    def __init__(
        self,
        base_url: str,
        stop_ids: list[int],
        *,
        sampling: SamplingOptions | None = None,
        timeout: float = 3600.0,
        sync_weights: Callable[[], None] = _do_nothing,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {base_url!r}; expected something like 'http://localhost:30000'.")
        self.base_url = base_url.rstrip("/")
        self.stop_ids = list(stop_ids)
        self.timeout = timeout
        self.sync_weights = sync_weights
        self.sampling = sampling or SamplingOptions()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """One request of the server's native interface.

        Raises:
            `RuntimeError`: the server cannot be reached or answers with an error; says with which.
        """
        request = urllib.request.Request(
            self.base_url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise RuntimeError(f"SGLang at {self.base_url}{path} answered {error.code}: {text}") from error
        except (OSError, json.JSONDecodeError) as error:
            raise RuntimeError(f"SGLang at {self.base_url}{path} gave no answer: {error}") from error

    def generate(
        self, prompts: list[list[int]], max_new_tokens: list[int], sampling: list[SamplingOptions] | None = None
    ) -> list[Sample]:
        """See [`GenerationBackend.generate`].

        Raises:
            `RuntimeError`: the answer lacks something without which it cannot be trained on.
        """
        self.sync_weights()
        if not prompts:
            return []
        options = sampling if sampling else [self.sampling] * len(prompts)
        params = [self._params(each, limit) for each, limit in zip(options, max_new_tokens, strict=True)]
        answers = self.post("/generate", {"input_ids": prompts, "sampling_params": params, "return_logprob": True})
        if not isinstance(answers, list) or len(answers) != len(prompts):
            raise RuntimeError(f"SGLang was asked {len(prompts)} prompts and answered {str(answers)[:200]!r}.")
        return [self._sample(answer, limit) for answer, limit in zip(answers, max_new_tokens)]

    def invalidate(self) -> None:
        """The weights may have changed without an optimizer step: a [`DiskWeightSync`] sends them again."""
        if isinstance(self.sync_weights, DiskWeightSync):
            self.sync_weights.invalidate()

    def _params(self, options: SamplingOptions, limit: int) -> dict[str, Any]:
        return {
            "max_new_tokens": limit,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k or -1,  # SGLang's word for all
            "min_p": options.min_p,
            "repetition_penalty": options.repetition_penalty,
            "stop_token_ids": self.stop_ids,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }

    def _sample(self, answer: dict[str, Any], limit: int) -> Sample:
        info = answer["meta_info"]
        if "output_token_logprobs" not in info:
            raise RuntimeError("SGLang's answer has no meta_info.output_token_logprobs: is return_logprob supported?")
        ids = [int(token) for _, token, *_ in info["output_token_logprobs"]]
        logps = [float(logp) for logp, *_ in info["output_token_logprobs"]]
        reason = info["finish_reason"]["type"]
        if reason == "abort":
            return Sample(ids=ids, logps=logps, end=SampleEnd.ABORT)
        if len(ids) > limit:
            raise RuntimeError(f"SGLang sampled {len(ids)} tokens where {limit} were allowed.")
        if reason == "stop" and (not ids or ids[-1] not in self.stop_ids):
            raise RuntimeError(
                f"SGLang stopped for {info['finish_reason']} and the last of its {len(ids)} ids is none of {self.stop_ids}: "
                "the token that ended the turn is missing, and its log-prob with it, or another one ended it."
            )
        return Sample(ids=ids, logps=logps, end=SampleEnd.STOP if reason == "stop" else SampleEnd.LENGTH)


class DiskWeightSync:
    """Weights through a folder that trainer and server both see: saved when they have changed since the last time, and loaded.

    Args:
        save (`Callable[[str], None]`): writes the model to a folder; `trainer.save_model`. Called on every rank.
        step (`Callable[[], int]`): optimizer steps done; `lambda: trainer.state.global_step`.
        folder (`str`): on a file system that the server sees.
        backend ([`SglangBackend`]): whose server loads them.
        is_main (`bool`): whether this rank tells the server.
        wait (`Callable[[], None]`): waits for all ranks; `accelerator.wait_for_everyone`.
    """

    def __init__(
        self,
        save: Callable[[str], None],
        step: Callable[[], int],
        folder: str,
        backend: SglangBackend,
        is_main: bool,
        wait: Callable[[], None],
    ) -> None:
        self.save = save
        self.step = step
        self.folder = folder
        self.backend = backend
        self.is_main = is_main
        self.wait = wait
        self._loaded: int | None = None  # what the server has may be from another run

    def invalidate(self) -> None:
        """The weights may have changed without an optimizer step, as `load_best_model_at_end` does, or another run."""
        self._loaded = None

    def __call__(self) -> None:
        step = self.step()
        if step == self._loaded:
            return
        self.save(self.folder)
        self.wait()
        if self.is_main:
            answer = self.backend.post("/update_weights_from_disk", {"model_path": self.folder})
            if not answer.get("success"):
                raise RuntimeError(f"SGLang did not load the weights in {self.folder}: {answer}")
        self.wait()
        self._loaded = step
