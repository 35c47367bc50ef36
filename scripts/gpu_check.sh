#!/usr/bin/env bash
# What to run on a CUDA machine, in under 8 minutes and without a network: the GPU-marked tests, then the benchmark of
# six models (64 M dense, 64 M of experts, 1 B dense; rows of 512 and 2,048), uncompiled and compiled, on the bundled
# sample. Each table row is printed as soon as it is known. torch, transformers and tokenizers must be there; pytest may
# be missing. What has no time left is named.
#
#     scripts/gpu_check.sh [seconds]     on CUDA (default: 470 s)
#     scripts/gpu_check.sh --cpu         the same steps at toy sizes on a CPU: does the script work?
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export TOKENIZERS_PARALLELISM=true HF_HUB_OFFLINE=1
failures=0

if [ "${1:-}" = "--cpu" ]; then
    budget=600 device=cpu variants=eager steps=1
    toy="--hidden_size 32 --num_hidden_layers 1 --num_attention_heads 2 --num_key_value_heads 1 --accumulation_steps 1"
    dense="$toy" experts="$toy --use_moe 1" billion="$toy --hidden_size 64"
    batch() { echo "--max_seq_len $(($1 / 16)) --batch_size 2"; }
else
    budget=${1:-470} device=cuda variants="eager compiled" steps=8
    common="--num_hidden_layers 8 --hidden_size 768 --accumulation_steps 4 --device cuda"
    dense="$common" experts="$common --use_moe 1"
    billion="--hidden_size 2048 --num_hidden_layers 20 --num_attention_heads 16 --num_key_value_heads 8
             --accumulation_steps 2 --device cuda"
    batch() { echo "--max_seq_len $1 --batch_size $((32768 / $1))"; }
    "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        { echo "no CUDA device here; scripts/gpu_check.sh --cpu tries the script out"; exit 1; }
fi
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
left() { echo $((budget - SECONDS)); }

"$PYTHON" -c 'import torch, transformers, tokenizers as t
print("torch", torch.__version__, "transformers", transformers.__version__, "tokenizers", t.__version__)'
if "$PYTHON" -c 'import pytest' 2>/dev/null; then
    echo "## Tests marked gpu"
    # Named one by one: other files need packages that may be missing here.
    timeout 120 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider $(grep -l "mark.gpu" tests/test_*.py) ||
        failures=$((failures + ($? != 5)))
else
    echo "## Tests: pytest is not installed here; only the benchmark is run"
fi

bench() {  # label, variants, options...
    local label=$1 which=$2
    shift 2
    if [ "$(left)" -lt 25 ]; then
        echo "| $label $which | not run: out of time |"
        return
    fi
    timeout "$(left)" "$PYTHON" scripts/benchmark.py --pairs 1 --warmup 2 --steps "$steps" --no_save --label "$label" \
        --variants "$which" --cache_dir "$cache" "$@" 2>"$cache/log"
    case $? in
        0) ;;
        124) echo "| $label $which | not finished: out of time |" ;;
        *) echo "| $label $which | failed |"; tail -n 15 "$cache/log"; failures=$((failures + 1)) ;;
    esac
}

echo "## Benchmark"
first="plain,"
for variant in $variants; do  # all of them uncompiled before the first compiled one: compiling takes most of the time
    for rows in 512 2048; do
        # shellcheck disable=SC2046,SC2086  # the options are words
        {
            bench "64 M, $rows:" "$first$variant" $([ -z "$first" ] && echo --rows_only) $dense $(batch $rows)
            bench "1 B, $rows:" "$variant" --rows_only $billion $(batch $rows)
            bench "experts, $rows:" "$variant" --rows_only $experts $(batch $rows)
        }
        first=""
    done
done
echo "Done in $SECONDS s on $device, $failures failed"
exit $((failures > 0))
