#!/usr/bin/env bash
# What is open for vLLM on a GPU, most telling first:  benchmarks/vllm/gpu.sh FOLDER [SECONDS]
# One H200, about 8 min. What only has to be right runs side by side; nothing runs beside the pair whose steps are compared.
# Every part has a limit of its own and leaves its rows as they come. vLLM must be importable; BENCHMARK_COMMIT names the source
# where only the files were copied.
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
# Steps vary with the core on which a turn runs: 27 eager pairs left the overhead of replay between -4 and +7 %, 73 compiled ones between
# 0.3 and 6.2 %. Hence --pin.
pair() { # NAME LIMIT SECONDS OPTIONS...
    local name=$1 limit=$2 pairs=$3
    shift 3
    part "$name" "$limit" $h200 --width 20b --rollouts 64 --turns --pin --timeout "$pairs" --cases plain:150 cached:150 --out "$out/h200_$name.csv" "$@"
    python benchmarks/vllm/overhead.py "$out/h200_$name.csv"
}
pair compiled "$budget" 240 --compiled --hold <"$out/go" &
wide=$!
part doctor 125 python benchmarks/vllm/doctor.py --out "$out/doctor.csv" &
wait $!
echo $((budget - SECONDS + begun - 30)) >&3 # alone from here on
wait $wide
grep -q "cached ends: [0-9][0-9]" "$out/compiled.txt" || pair eager "$budget" $((budget - SECONDS + begun - 50))
part one_forward 120 python benchmarks/correction/one_forward.py --layers 24 --steps 4 --out "$out/one_forward.csv"
