#!/usr/bin/env bash
# What router replay costs at both widths:  benchmarks/vllm/gpu.sh FOLDER [SECONDS] [SECONDS OF TINY PAIRS]
# One H200 that does nothing else, about 5 min. Both widths start up side by side (100 s); their pairs of steps are taken one after the
# other, the tiny ones first. vLLM must be importable; BENCHMARK_COMMIT names the source where only the files were copied.
set -u
cd "$(dirname "$0")/../.."
out=${1:?usage: gpu.sh FOLDER [SECONDS] [SECONDS OF TINY PAIRS]}
budget=${2:-290}
tiny=${3:-88}
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1
h200="python benchmarks/vllm/h200.py --tokens 96 --turns --pin --hold --compiled --bare --timeout 200 --cases plain:600 cached:600"
begun=$SECONDS
declare -A running
start() { # WIDTH OPTIONS...
    rm -f "$out/go_$1" && mkfifo "$out/go_$1"
    (
        exec 3<>"$out/go_$1"
        export VLLM_CACHE_ROOT=/tmp/vllm_cache_$1
        exec $h200 --out "$out/overhead_$1.csv" --width "$@" <&3 >"$out/$1.txt" 2>&1
    ) &
    running[$1]=$!
}
holds() { grep -aq "all hold" "$out/$1.txt"; }
ready() { holds "$1" || ! kill -0 "${running[$1]}" 2>/dev/null; }
pairs() { # WIDTH SECONDS
    holds "$1" || { echo "$1: did not start, see $out/$1.txt" && return; }
    echo "$2" >"$out/go_$1"
    wait "${running[$1]}"
    python benchmarks/vllm/overhead.py "$out/overhead_$1.csv" --width "$1"
}
start tiny --rollouts 32
start 20b --rollouts 64
until ready tiny && ready 20b; do sleep 1; done
pairs tiny "$tiny"
pairs 20b $((budget - SECONDS + begun - 10))
