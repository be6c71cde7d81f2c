"""`kernels benchmark`: forward of GPT-OSS's two kinds of layer, one sequence of 8192 tokens."""

import torch
from kernels.benchmark import Benchmark


class SinkAttentionBenchmark(Benchmark):
    seed: int = 42

    def setup(self) -> None:
        tokens = 8192
        self.q = torch.randn(tokens, 64, 64, dtype=torch.bfloat16, device=self.device)
        self.k, self.v = (torch.randn(tokens, 8, 64, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        self.sinks = torch.randn(64, device=self.device)
        self.cu = torch.tensor([0, tokens], dtype=torch.int32, device=self.device)
        self.settings = (self.cu, self.cu, tokens, tokens, True)
        self.out = torch.empty_like(self.q)

    def benchmark_full(self) -> None:
        self.out, _ = self.kernel.fwd(self.q, self.k, self.v, self.sinks, *self.settings, 0, 0.125)

    def benchmark_window(self) -> None:
        self.out, _ = self.kernel.ops.window_fwd(self.q, self.k, self.v, self.sinks, *self.settings, 128, 0.125)
