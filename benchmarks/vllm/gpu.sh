#!/usr/bin/env bash
# Everything that wants a GPU with vLLM, most telling first:  benchmarks/vllm/gpu.sh FOLDER
# On one H200: correctness about 3 min (may share the GPU), timings about 6 min (alone). Every part has a limit of its own and
# leaves its rows as they come. vLLM must be importable; BENCHMARK_COMMIT names the source where only the files were copied.
set -u
cd "$(dirname "$0")/../.."
out=${1:?usage: gpu.sh FOLDER}
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1
h200="python benchmarks/vllm/h200.py --tolerance 0.5 --out $out/h200.csv"
part() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 begun=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$out/$name.txt" 2>&1
    echo "$name: exit $?, $((SECONDS - begun)) s"
}
part mxfp4 150 python benchmarks/hub/mxfp4_vllm.py --device cuda --out "$out/mxfp4_vllm.csv"
part tiny 200 $h200 --width tiny --tokens 96 --cases replay:30 plain:30
# alone from here on
part wide 420 $h200 --width 20b --tokens 96 --rollouts 64 --timeout 120 --cases plain:30 replay:30 noprobe:12 sleep:8 lora:8
part one_forward 120 python benchmarks/correction/one_forward.py --layers 24 --steps 3 --out "$out/one_forward.csv"
part graphs 150 $h200 --width tiny --tokens 96 --cases graphs:6
