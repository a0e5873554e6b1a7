#!/bin/bash
# What one GPU shows in eight minutes, without a network: tests and figures, the most telling first, each with its own
# limit. `make gpu-run`; the files are in $OUT (default gpu-run/): summary.txt, tests.log, bench.log, more.log, bench.md.
# PYTHON: an interpreter with torch. Without a GPU, everything runs on the CPU with tiny models, which tries this file.
set -u
PYTHON=${PYTHON:-python3}
OUT=${OUT:-gpu-run}
TOTAL_S=${TOTAL_S:-465} # the last part ends by then
WHEELS=${WHEELS:-.whl}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
unset RANK WORLD_SIZE LOCAL_RANK PYTHONPATH

# An environment over that of PYTHON: its packages come after those of .whl.
"$PYTHON" -m venv --without-pip "$work/venv" || exit 1
python=$work/venv/bin/python
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$PYTHON" -c 'import site; print("\n".join(f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()))' \
    > "$packages/under.pth"
pip="$PYTHON -m pip --disable-pip-version-check --python $python install --quiet --no-index --no-deps --no-compile"
if ls "$WHEELS"/*.whl > /dev/null 2>&1; then $pip "$WHEELS"/*.whl || exit 1; fi
$pip --no-build-isolation -e . -e packages/recipes -e packages/lab -e packages/audit || exit 1

device=cuda small=""
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
    || { device=cpu small=--small; export OMP_NUM_THREADS=1; }
export LOCKSTEP_TEST_DEVICE=$device

part() { # part NAME LIMIT_S LOG COMMAND...
    local name=$1 limit=$2 log=$OUT/$3 left=$((TOTAL_S - SECONDS)) begun=$SECONDS
    shift 3
    if [ "$left" -lt 12 ]; then
        echo "$name: left out, no time" | tee -a "$OUT/summary.txt"
        return
    fi
    [ "$limit" -gt "$left" ] && limit=$left
    echo "===== $name (limit $limit s, $SECONDS s passed)" >> "$log"
    timeout --kill-after=5 "$limit" "$@" >> "$log" 2>&1 < /dev/null
    echo "$name: exit $? after $((SECONDS - begun)) s of at most $limit" | tee -a "$OUT/summary.txt"
}
tests() { # tests NAME LIMIT_S ARGUMENTS OF PYTEST...
    local name=$1 limit=$2
    shift 2
    part "tests $name" "$limit" tests.log "$python" -m pytest -m gpu -p no:cacheprovider -o timeout=100 --tb=short "$@"
}
bench() { # bench NAME LIMIT_S ARGUMENTS...
    local name=$1 limit=$2
    shift 2
    part "bench $name" "$limit" bench.log "$python" benchmarks/gpu.py --device $device $small --rounds "${ROUNDS:-3}" \
        --no-saves "$@" --output "$work/bench-$name.md"
}
train() { # train NAME LIMIT_S KEYS...
    local name=$1 limit=$2
    shift 2
    part "train $name" "$limit" more.log "$python" -m lockstep train lm data.train=docs task.suffixes='[.md]' \
        task.length=1024 task.small='{layers: 6, width: 512, heads: 8}' batch.global=16 train.epochs=null train.steps=40 \
        train.eval_every_epochs=null log.every_steps=10 log.writers='[text_log,json_lines]' precision=bf16 \
        device=$device --run-dir "$work/$name" "$@"
}

part about 25 more.log bash -c "nvidia-smi; nproc; free -g; df -h /dev/shm /tmp; which gcc numactl; '$python' -m lockstep doctor env"

# First the waits of the host, bits, NCCL, and the figures.
tests step 60 tests/gpu/test_step.py
bench resnet50 75 --models resnet50 --precisions bf16 --compile off --channels-last
bench gpt125m 60 --models gpt125m --precisions bf16 --compile off
tests recipes 75 tests/gpu/test_recipes.py
tests nccl 60 tests/gpu/test_one_rank_group.py
tests training 60 tests/gpu/test_training.py -k "not compiled and not verify"
bench llama1b 60 --models llama1b --precisions bf16 --compile off
tests memory 40 tests/gpu/test_memory.py

# Then attention, the compiler, and known answers.
if [ $device = cuda ]; then
    for kind in sdpa flex auto; do train $kind 35 task.attention=$kind; done
    train compiled-blocks 60 compute.compile=blocks
else
    train sdpa 100 task.small='{layers: 1, width: 32, heads: 2}' task.length=64 batch.global=4 train.steps=4 precision=fp32
fi
tests compiled 70 tests/gpu/test_training.py -k compiled
bench gpt125m-compiled 80 --models gpt125m --precisions bf16 --compile on
part check-device 30 more.log "$python" -m lockstep check-device --nproc 1 --seconds 5 --device $device
part profile 40 more.log "$python" -m lockstep train digits precision=bf16 device=$device train.epochs=2 --profile 5-10 \
    --run-dir "$work/profile"
tests verify 60 tests/gpu/test_training.py -k verify

cat "$work"/bench-*.md > "$OUT/bench.md" 2> /dev/null
for run in sdpa flex auto compiled-blocks; do tail -n 3 "$work/$run/metrics.jsonl" >> "$OUT/more.log" 2> /dev/null; done
grep -hE "^(FAILED|ERROR)|^E   |passed|failed" "$OUT/tests.log" | cut -c1-220 | tail -60
cat "$OUT/summary.txt" "$OUT/bench.md" 2> /dev/null
