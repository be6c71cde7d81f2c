#!/usr/bin/env bash
# The cells that are open, on one H200, from the root of the checkout:  bash benchmarks/reproduction/gpu.sh [SECONDS]
# Give it again until all cells are done. Two lanes, JOBS cells at a time in each, a core for every cell:
#   first     the instruction task, right and no sinks, three seeds; then one seed of the other causes, here and single-turn
#   second    the tool task with rollouts of up to 192 tokens, right and no sinks, three seeds; then seeds that lack with 96
# MODEL, DENSE: made by pretrain.py (MODEL is made here if it is not there; no dense control without DENSE). WORK: checkpoints.
# RESULTS: CSVs; a folder of your own runs them all anew. SETTINGS: of a cell.
set -euo pipefail
limit=${1:-560}
here=$(dirname "$0")
model=${MODEL:-outputs/reproduction/model}
work=${WORK:-outputs/reproduction/cells}
results=${RESULTS:-$here/results}
jobs=${JOBS:-6}
read -ra settings <<<"${SETTINGS:---steps 30 --learning_rate 2e-4}"
dense=(${DENSE:+--dense "$DENSE"})
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1

left() { echo $((limit - SECONDS)); }
# cells RESULTS WORK TOOL_TOKENS OPTIONS...: of these cells, those that are not done; one that fails holds up no other
cells() {
  local to=$1 folder=$2 tokens=$3
  shift 3
  [ "$(left)" -ge 30 ] || return 0
  python "$here/run_all.py" --model "$model" "${dense[@]}" --work "$folder" --results "$to" --tool_tokens "$tokens" \
    "${settings[@]}" --strengths --jobs "$jobs" --budget "$(left)" --margin 12 "$@" || echo "cells of $to failed: see above"
  echo "$SECONDS s: $*"
}

python -c "import sys; from trl_gptoss.attention.loading import kernels; sys.exit(kernels().missing is not None)" ||
  python -m trl_gptoss build-kernels
[ -f "$model/pretrain.json" ] || python "$here/pretrain.py" "$model" --steps 1000 --warm_start_steps 200
# One short cell by itself: Triton compiles for all of them, and what is missing shows at once.
[ -f "$work/first/instruction-right-seed0.csv" ] || python "$here/cell.py" --model "$model" --task instruction --cause right \
  "${settings[@]}" --steps 1 --held_out 100 --work "$work/first" --results "$work/first"
echo "ready after $SECONDS s"

{
  cells "$results/rollouts_of_192" "$work/rollouts_of_192" 192 --tasks tool --causes right no_sinks --seeds 3
  cells "$results" "$work" 96 --tasks tool --causes correction_sequence correction_geometric two_forwards --seeds 3
} &
cells "$results" "$work" 96 --tasks instruction --causes right no_sinks --other_seeds 3
cells "$results" "$work" 96 --tasks instruction single_turn --causes right no_sinks no_sink_gradient two_forwards \
  correction_off correction_sequence correction_geometric attention_frozen router_replay dense
wait
