#!/usr/bin/env bash
# Run tests as other processors compute: scripts/check_processors.sh [PYTEST ARGUMENTS]
# By default the tests that compare numbers. PyTorch's own kernels, oneDNN's and MKL's each have a switch; the number of
# threads changes the order of sums; two busy loops beside the tests show which of them trust their time-outs too much.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1

SETTINGS=(
    "best|"
    "avx2|ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2"
    "plain|ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2"
    "mixed|ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2"
    "thread|OMP_NUM_THREADS=1"
    "threads|OMP_NUM_THREADS=2"
    "loaded|"
)
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(tests/real/training tests/real/renderers tests/real/sampling tests/rl tests/renderers tests/evaluation)
logs=$(mktemp -d)
busy=()
trap '[ ${#busy[@]} -eq 0 ] || kill "${busy[@]}"' EXIT

failed=0
printf '%-8s %-8s %6s  %s\n' setting verdict s "tests (logs in $logs)"
for setting in "${SETTINGS[@]}"; do
    name=${setting%%|*}
    read -ra variables <<<"${setting#*|}"
    if [ "$name" = loaded ]; then
        for _ in 1 2; do
            while :; do :; done &
            busy+=($!)
        done
    fi
    started=$SECONDS verdict=passed
    env "${variables[@]}" .venv/bin/python -m pytest -q "${tests[@]}" >"$logs/$name.log" 2>&1 || verdict=FAILED failed=1
    printf '%-8s %-8s %6s  %s\n' "$name" "$verdict" $((SECONDS - started)) "$(tail -n 1 "$logs/$name.log")"
done
exit $failed
