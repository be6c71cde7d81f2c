#!/usr/bin/env bash
# Build the sdist, the pure wheel and the platform wheel:  scripts/build_wheels.sh [FOLDER]
# The pure wheel is built in isolation from the sdist, so that both are whole. The platform wheel holds the Hopper kernels and is
# built where nvcc is found (WHEELS=platform fails without one, WHEELS=pure leaves it out).
#   PYTHON=path/to/python    with the package `build`, and torch >= 2.11 for the platform wheel
set -euo pipefail
cd "$(dirname "$0")/.."
dist=${1:-dist}
python=${PYTHON:-python3}
wheels=${WHEELS:-auto}
case $wheels in auto | pure | platform) ;; *) echo "WHEELS is '$wheels', expected auto, pure or platform" >&2; exit 1 ;; esac

rm -rf "$dist" build
TRL_GPTOSS_BUILD_KERNELS=0 "$python" -m build --outdir "$dist"
sdist=$(ls "$dist"/trl_gptoss-*.tar.gz)
if [ "$wheels" != pure ]; then
  cuda=0; [ "$wheels" = platform ] && cuda=1
  if [ $cuda = 1 ] || command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
    # By pip, whose isolated environment has this interpreter: the kernels compile against the headers of its torch.
    TRL_GPTOSS_BUILD_KERNELS=1 "$python" -m pip wheel --no-deps --wheel-dir "$dist" "$sdist"
  else
    echo "wheels: no nvcc here, so no platform wheel (CUDA >= 12.4 compiles it; no GPU is needed)"
  fi
fi
ls -l "$dist"
