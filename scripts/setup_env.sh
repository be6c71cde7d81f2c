#!/usr/bin/env bash
# Create .venv and install the package with the pinned versions:  scripts/setup_env.sh [extra,extra]
# Takes CPU builds of torch where no NVIDIA GPU is present. Needs only Python >= 3.11 with venv.
#   PYTHON=python3.12        another interpreter
#   TORCH_INDEX_URL=...      another index for CPU builds of torch
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-}
python=${PYTHON:-python3}
index=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}

"$python" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"trl-gptoss needs Python >= 3.11, found {sys.version.split()[0]}: set PYTHON=/path/to/python3.11")
PY

stamp=".venv/.installed-${extras:-base}"
if [ -f "$stamp" ] && [ "$stamp" -nt pyproject.toml ] && [ "$stamp" -nt constraints.txt ]; then exit 0; fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt)

torch=$(sed -n 's/^torch==/torch==/p' constraints.txt)
if ! .venv/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '${torch#torch==}')" 2>/dev/null; then
  echo "setup: installing $torch (the largest download)"
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    "${pip[@]}" "$torch"
  elif .venv/bin/python -c "import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + '/torch/', timeout=8)" "$index" 2>/dev/null; then
    "${pip[@]}" --extra-index-url "$index" "$torch"
  else
    "${pip[@]}" "$torch"
  fi
fi
echo "setup: installing trl-gptoss${extras:+[$extras]} with the versions of constraints.txt"
"${pip[@]}" --editable ".${extras:+[$extras]}"
touch "$stamp"
