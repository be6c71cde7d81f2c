"""For all tests: one thread, so that two runs of the same sums are equal bit for bit."""

import torch

# With several threads the split of a sum depends on how a tensor lies in memory, and the last bit with it.
torch.set_num_threads(1)
