#!/usr/bin/env bash
# The cells that are open, on one H200, from the root of the checkout:  bash benchmarks/reproduction/gpu.sh [SECONDS]
# Instruction task (right and no sinks, three seeds), then the tool task with rollouts of up to 192 tokens (the same). Give it again
# until all cells are done. MODEL: made by pretrain.py, and made here if it is not there; WORK: checkpoints; RESULTS; JOBS: cells at a
# time; SETTINGS: of a cell.
set -euo pipefail
limit=${1:-560}
here=$(dirname "$0")
model=${MODEL:-outputs/reproduction/model}
work=${WORK:-outputs/reproduction/cells}
jobs=${JOBS:-6}
results=${RESULTS:-$here/results}
read -ra settings <<<"${SETTINGS:---steps 30 --learning_rate 2e-4}"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

python -c "import sys; from trl_gptoss.attention.loading import kernels; sys.exit(kernels().missing is not None)" ||
  python -m trl_gptoss build-kernels
[ -f "$model/pretrain.json" ] || python "$here/pretrain.py" "$model" --steps 1000 --warm_start_steps 200
# One small cell by itself: Triton compiles for all of them, and what is missing shows at once. With an empty cache, four cells at the
# same time measured for 27 to 51 s each before their first step.
python "$here/cell.py" --model "$model" --task instruction --cause right "${settings[@]}" --steps 1 --held_out 16 \
  --work "$work/first" --results "$work/first"
echo "ready after $SECONDS s"
left() { echo $((limit - SECONDS)); }
python "$here/run_all.py" --model "$model" --work "$work" --results "$results" --tasks instruction --causes right no_sinks --other_seeds 3 --strengths \
  "${settings[@]}" --jobs "$jobs" --budget "$(left)" --margin 12
[ "$(left)" -lt 60 ] || python "$here/run_all.py" --model "$model" --work "$work" --results "$results/rollouts_of_192" \
  --tasks tool --causes right no_sinks --strengths "${settings[@]}" --jobs "$jobs" --budget "$(left)" --margin 12
