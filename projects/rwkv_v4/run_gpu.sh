#!/usr/bin/env bash
# Everything that is measured on a GPU, in stages: checks and kernel times, the logged run, the honest run, the step.
#   run_gpu.sh OUT [stage ...]       stages: wkv step seed honest compare summary (default: all, in this order)
# Environment: ENWIK8 (the corpus), SECONDS_HONEST (training time of the honest run, 600), ITERS_HONEST (its planned
# iterations; by default what the measured speed allows in that time), RUNS (where runs are kept, default ./output).
# The honest stage goes on from its last checkpoint, so a run may be split over several calls.
set -uo pipefail
OUT=${1:?usage: run_gpu.sh OUT [stage ...]}; shift || true
STAGES=${*:-wkv step seed honest compare summary}
PY=${PYTHON:-python3}
RUNS=${RUNS:-$PWD/output}
export PYTHONUNBUFFERED=1
mkdir -p "$OUT" "$RUNS"
say() { printf '\n=== %s (%s)\n' "$1" "$(date -u '+%F %T')"; }

for stage in $STAGES; do
  say "$stage"
  case $stage in
    wkv)
      $PY -m projects.rwkv_v4.bench_wkv --device cuda --out "$OUT/wkv.json" ;;
    step)
      $PY -m projects.rwkv_v4.bench_step --config configs/enwik8.py --out "$OUT/step.json" ;;
    seed)
      $PY -m projects.rwkv_v4.train --config configs/seed_log.py train.output_dir="$RUNS/seed_log" \
        train.train_iter=10000 train.max_seconds=600 train.log_period=20 train.checkpoint.period=100000 \
        train.stop_after=360 | grep -v '^  *(' || echo "seed_log failed"
      cp "$RUNS/seed_log/metrics.json" "$OUT/seed_log.metrics.json" ;;
    honest)
      SECONDS_HONEST=${SECONDS_HONEST:-600}
      if [ -z "${ITERS_HONEST:-}" ]; then
        ITERS_HONEST=$($PY - "$OUT/step.json" "$SECONDS_HONEST" <<'PYTHON'
import json, sys
try:
    step = json.load(open(sys.argv[1]))["step_seconds"]
except OSError:
    step = 0.016
print(int(float(sys.argv[2]) * 0.97 / step) // 100 * 100)
PYTHON
)
      fi
      echo "planned iterations: $ITERS_HONEST in $SECONDS_HONEST s"
      $PY -m projects.rwkv_v4.train --config configs/enwik8.py --resume train.output_dir="$RUNS/enwik8" \
        train.train_iter="$ITERS_HONEST" train.max_seconds="$SECONDS_HONEST" train.log_period=20 \
        train.checkpoint.period=10000 train.checkpoint.keep=1 ${HONEST_OPTS:-} > "$RUNS/honest.txt" 2>&1
      grep -v '^  *(' "$RUNS/honest.txt" | grep -v events; grep events "$RUNS/honest.txt" | awk 'NR <= 20 || NR % 100 == 0' | cut -c1-220
      grep events "$RUNS/honest.txt" | tail -1
      cp "$RUNS/enwik8/metrics.json" "$OUT/enwik8.metrics.json" ;;
    compare)
      # Every operator of three steps against a golden CPU run.
      OP_AUTOCOMPARE_THREADS=${OP_AUTOCOMPARE_THREADS:-$(($(nproc) > 3 ? $(nproc) - 2 : 1))} \
        OP_TOOLS_CONSOLE=off OP_TOOLS_RESULTS_DIR="$RUNS/op_tools" $PY -m projects.rwkv_v4.watched \
        --config configs/enwik8.py --steps 3 --out "$OUT/autocompare.txt" train.global_batch_size=2 train.ctx_len=256 ;;
    summary)
      $PY -m projects.rwkv_v4.report "$OUT" --text ;;
    *) echo "unknown stage $stage"; exit 2 ;;
  esac
done
ls -la "$OUT"
