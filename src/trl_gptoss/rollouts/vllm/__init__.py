"""vLLM as the engine of rollouts: in this process or behind a server, with weights that are synced and verified."""
