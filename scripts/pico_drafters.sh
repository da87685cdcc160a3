#!/usr/bin/env bash
# Trains the embedded DSPARK drafters and measures what docs/training.md reports, on a machine with two GPUs.
#   bash scripts/pico_drafters.sh OUT [TRAIN_SECONDS] [POOL_SECONDS] [STAGE_SECONDS] [STAGES]
# 1. block 8 on GPU 0 and block 16 on GPU 1, each on its own answers of the target
# 2. SplitServe 1:1 against the one-process loop, STAGE_SECONDS each
# 3. evaluation of all drafters on GPU 0 beside the ablation on GPU 1
# OUT gets b8.tar, b16.tar (drafter, metrics), split.txt, evaluation.json, ablation.md and log.txt. Needs sgling importable.
set -u
out=$1 train=${2:-190} pool=${3:-40} stage=${4:-20} stages=${5:-split evaluation}
work=$(mktemp -d) begin=$SECONDS
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
workers=$((($(nproc --all) + 1) / 4 + 1)) # of each drafter; plain nproc would answer OMP_NUM_THREADS
common="--taps 1 3 5 6 --markov-rank 32 --ce 0.3 --l1 0.7"
shape="--layers 4 --mlp 448 $common"     # block 8: 6.1 MB; both share what 36 MB leave beside the target
small="--layers 2 --mlp 224 $common"     # block 16: 3.0 MB
size="--row 2048 --rows 16 --batch-rows 64 --passes 2 --device cuda"
quiet="--no-acceptance-check --disable-tqdm"

say() { echo "[$((SECONDS - begin)) s] $*"; }

drafter() { # GPU, block size, anchors per row, shape; a run that dies before its first minute is repeated without compilation
  local flags="$4 $size $quiet --block-size $2 --anchors $3 --seed $2 --rate 0.7 --slots 1024 --max-new-tokens 1024
    --regenerate 100000 --regenerate-seconds $pool --given 40000 --given-share 0.3 --workers $workers
    --eval-prompts 16 --eval-every 700 --log-every 50 --output $work/b$2"
  local started=$SECONDS
  local run="timeout $((train + pool + 130)) python3 -m sgling train-draft dspark"
  CUDA_VISIBLE_DEVICES=$1 $run $flags --seconds "$train" --compile && return
  say "block $2 failed with compilation after $((SECONDS - started)) s, once more without"
  local left=$((train - SECONDS + started + pool))
  if [ -f "$work/b$2/checkpoint.pt" ]; then
    CUDA_VISIBLE_DEVICES=$1 $run $flags --seconds "$left" --resume
  elif [ -f "$work/b$2/pool.safetensors" ]; then
    CUDA_VISIBLE_DEVICES=$1 $run $flags --seconds "$left" --pool "$work/b$2/pool.safetensors"
  else
    CUDA_VISIBLE_DEVICES=$1 $run $flags --seconds "$left"
  fi
}

keep() { # block size
  [ -d "$work/b$1/drafter" ] || { say "block $1 left no drafter"; return; }
  tar -cf "$out/b$1.tar" -C "$work/b$1" drafter metrics.jsonl && say "kept b$1.tar"
  ln -s "b$1/drafter" "$work/ling3-pico-dspark-b$1" # the name its figures go by
}

drafter 0 8 256 "$shape" >"$work/b8.log" 2>&1 &
first=$!
drafter 1 16 128 "$small" >"$work/b16.log" 2>&1 &
wait $first $!
keep 8
keep 16
[ -f "$out/b8.tar" ] || { cat "$work/b8.log"; exit 1; }
tail -n 4 "$work/b8.log" "$work/b16.log"

fresh="$shape --row 2048 --rows 16 --batch-rows 128 --passes 6 --device cuda $quiet --block-size 8 --anchors 256 --slots 1024
  --fresh-conversations 900 --max-new-tokens 640 --workers $workers --eval-prompts 1 --eval-every 1000000 --seconds $stage"
[[ $stages == *split* ]] && {
  echo "one process:"
  CUDA_VISIBLE_DEVICES=0 timeout -s INT -k 15 100 python3 -m sgling train-draft dspark $fresh --fresh --output "$work/one" 2>&1 | grep -E "tokens/s|error"
  echo "SplitServe 1:1:"
  timeout -s INT -k 15 100 python3 -m sgling train-draft dspark $fresh --split-serve 1:1 --output "$work/split" 2>&1 | grep -E "tokens/s|error|died"
  cat "$work/split/engine-0.jsonl"
} >"$out/split.txt" 2>&1
say "split serve"
[ -f "$out/split.txt" ] && head -c 2000 "$out/split.txt"
tar -cf "$out/logs.tar" -C "$work" b8.log b16.log
[[ $stages == *evaluation* ]] || exit 0

CUDA_VISIBLE_DEVICES=0 timeout 140 python3 -m sgling eval drafters --drafters "$work/ling3-pico-dspark-b8" "$work/ling3-pico-dspark-b16" --widths 6 7 8 \
  --num-questions 16 --max-new-tokens 1024 --disable-tqdm --report-only --json "$out/evaluation.json" >"$work/eval.log" 2>&1 &
evaluation=$!
CUDA_VISIBLE_DEVICES=1 timeout 150 python3 -m sgling train-draft ablate scripts/drafter_ablation.yaml --pool "$work/b8/pool.safetensors" \
  --parallel 5 --output "$work/ablation" --table "$out/ablation.md" >"$work/ablation.log" 2>&1 &
wait $evaluation $!
say "evaluation and ablation"
tail -n 40 "$work/eval.log"
tail -n 30 "$work/ablation.log"
tar -cf "$out/logs.tar" -C "$work" b8.log b16.log eval.log ablation.log
