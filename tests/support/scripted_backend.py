"""A generation backend that samples from a script instead of a model, and writes down what it did."""

import json
import random
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from trl_gptoss.harmony import HarmonyVocabulary
from trl_gptoss.rollouts import Sample, SamplingOptions


class ScriptedBackend:
    """Samples `script(prompt, rng)` cut to the limit.

    `calls` is the independent record: one list of (prompt ids, limit, sampled ids) per `generate`.
    """

    def __init__(
        self, script: Callable[[list[int], random.Random], list[int]], seed: int = 0, collective: bool = False
    ) -> None:
        self.script = script
        self.rng = random.Random(seed)
        self.collective = collective
        self.sampling = SamplingOptions()
        self.calls: list[list[tuple[tuple[int, ...], int, tuple[int, ...]]]] = []

    def generate(
        self, prompts: list[list[int]], max_new_tokens: list[int], sampling: list[SamplingOptions] | None = None
    ) -> list[Sample]:
        samples = [Sample(ids=self.script(p, self.rng)[:n]) for p, n in zip(prompts, max_new_tokens, strict=True)]
        self.calls.append([(tuple(p), n, tuple(s.ids)) for p, n, s in zip(prompts, max_new_tokens, samples)])
        return samples


class HarmonyWriter:
    """Turns as a policy would write them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = HarmonyVocabulary.of(tokenizer)

    def text(self, text: str) -> list[int]:
        return self.vocabulary.encode_text(text)

    def message(self, channel: str, text: str, stop: int) -> list[int]:
        v = self.vocabulary
        return [v.channel, *self.text(channel), v.message, *self.text(text), stop]

    def analysis(self, text: str) -> list[int]:
        v = self.vocabulary
        return [*self.message("analysis", text, v.end), v.start, *self.text("assistant")]

    def call(self, name: str, **arguments) -> list[int]:
        v = self.vocabulary
        header = [
            v.channel,
            *self.text(f"commentary to=functions.{name} "),
            v.constrain,
            *self.text("json"),
            v.message,
        ]
        return [*header, *self.text(json.dumps(arguments)), v.call]

    def final(self, text: str) -> list[int]:
        return self.message("final", text, self.vocabulary.return_)
