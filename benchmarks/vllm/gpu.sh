#!/usr/bin/env bash
# What router replay costs at both widths, with vLLM's scheduler and with ours:
#     benchmarks/vllm/gpu.sh FOLDER [SECONDS OF TINY STEPS] [SECONDS OF 20B-WIDE STEPS]
# One H200 that does nothing else, about 9 min; 0 seconds leave a width out. Three engines of a width start together (80 to 110 s) and take
# their steps in turn; the widths follow one another, because six engines do not fit. vLLM must be importable; BENCHMARK_COMMIT names
# the source where only the files were copied.
set -u
cd "$(dirname "$0")/../.."
out=${1:?usage: gpu.sh FOLDER [SECONDS OF TINY STEPS] [SECONDS OF 20B-WIDE STEPS]}
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1
h200="python benchmarks/vllm/h200.py --tokens 96 --turns --pin --hold --compiled --bare --timeout 240"
turns() { # WIDTH SECONDS ROLLOUTS
    [ "$2" -gt 0 ] || return
    export VLLM_CACHE_ROOT=/tmp/vllm_cache_$1
    echo "$2" | $h200 --cases plain:600 listed:600 cached:600 --width "$1" --rollouts "$3" --out "$out/overhead_$1.csv" >"$out/$1.txt" 2>&1 ||
        { echo "$1 failed:" && tail -n 20 "$out/$1.txt"; }
    for pair in "cached plain" "listed plain" "cached listed"; do
        echo "== $1: $pair"
        python benchmarks/vllm/overhead.py "$out/overhead_$1.csv" --width "$1" --case "${pair% *}" --base "${pair#* }"
    done
}
turns tiny "${2:-120}" 32
turns 20b "${3:-170}" 64
