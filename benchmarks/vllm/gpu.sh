#!/usr/bin/env bash
# Everything that wants a GPU with vLLM, most telling first:  benchmarks/vllm/gpu.sh FOLDER [SECONDS]
# On one H200 in about 8 min, whose first half tells whether replay costs anything. No other timing runs beside one that is
# reported; what only has to be right runs side by side. Every part has a limit of its own and leaves its rows as they come.
# vLLM must be importable; BENCHMARK_COMMIT names the source where only the files were copied.
set -u
cd "$(dirname "$0")/../.."
out=${1:?usage: gpu.sh FOLDER [SECONDS]}
budget=${2:-520}
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1
h200="python benchmarks/vllm/h200.py --tokens 96"
begun=$SECONDS
part() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 start=$SECONDS left=$((budget - SECONDS + begun))
    shift 2
    [ "$left" -lt "$limit" ] && limit=$left
    [ "$limit" -lt 20 ] && { echo "$name: left out, $left s left"; return; }
    timeout -k 5 "$limit" "$@" >"$out/$name.txt" 2>&1
    echo "$name: exit $?, second $((start - begun)) to $((SECONDS - begun))"
    grep -a "^[0-9:]* [a-z]* ends\|^failed\|Error: \|nats)$\|mean_against\|^TRL \|^ours " "$out/$name.txt" | tail -8 | cut -c1-220
}
rm -f "$out/go" && mkfifo "$out/go" && exec 3<>"$out/go"
part wide 400 $h200 --width 20b --rollouts 64 --turns --hold --timeout 210 --cases plain:30 replay:30 --out "$out/h200_wide.csv" <"$out/go" &
wide=$!
part mxfp4 180 python benchmarks/hub/mxfp4_vllm.py --device cuda --out "$out/mxfp4_vllm.csv" &
mxfp4=$!
part doctor 180 python benchmarks/vllm/doctor.py --out "$out/doctor.csv" &
wait $mxfp4 $!
echo go >&3 # alone from here on
wait $wide
part tiny 170 $h200 --width tiny --turns --timeout 160 --cases plain:30 replay:30 --out "$out/h200_tiny.csv" &
part sleep 120 $h200 --width 20b --rollouts 64 --cases sleep:5 --out "$out/h200_sleep.csv" &
part lora 120 $h200 --width 20b --rollouts 64 --cases lora:5 --out "$out/h200_lora.csv" &
part cached 150 $h200 --width tiny --cases cached:10 --out "$out/h200_cached.csv" &
part graphs 150 $h200 --width tiny --cases graphs:6 --out "$out/h200_graphs.csv" &
wait
part one_forward 120 python benchmarks/correction/one_forward.py --layers 24 --steps 4 --out "$out/one_forward.csv"
