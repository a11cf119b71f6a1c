#!/usr/bin/env bash
# Sets up if needed, then trains a byte-level GPT on the Python standard library's sources in two pipeline stages, with
# side tasks in the bubbles, and prints and draws what came of it.  Then the training goes on for a while, and the model
# that it has made so far completes some code in the bubbles.  Everything it writes is in the run folder.
#   scripts/demo.sh [RUN_FOLDER]      (default: runs/demo)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
run=$(mkdir -p "${1:-$root/runs/demo}" && cd "${1:-$root/runs/demo}" && pwd)
cd "$root"
scripts/setup.sh
export OMP_NUM_THREADS=1
# The same everywhere: a machine with one GPU could not give two stages one each.  0 trains on two GPUs.
export PIPEFILL_CPU_BACKEND=${PIPEFILL_CPU_BACKEND:-1}

corpus=$run/data/stdlib
if [ ! -e "${corpus}_text_document.idx" ]; then
    echo "== A corpus that every machine has: the sources of Python's standard library"
    mkdir -p "$run/data"
    .venv/bin/python scripts/preprocess_text.py --append-eod --output-prefix "$corpus" \
        --input "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')/*.py"
fi

echo "== Training, with the jobs of examples/demo.yaml in the bubbles (the log is $run/training.log)"
rm -rf "$run/jobs" "$run/output" "$run/locks" "$run/records" "$run"/jobs.db* "$run/checkpoints" "$run/completions"
model=(
    --pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 256 --num-attention-heads 4
    --seq-length 256 --max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 8
    --lr 2e-3 --lr-warmup-iters 5 --lr-decay-iters 110 --lr-decay-style cosine --min-lr 2e-4 --clip-grad 1.0
    --data-path "${corpus}_text_document" --tokenizer-type NullTokenizer --vocab-size 256 --split 90,5,5
    --eval-interval 50 --eval-iters 2 --log-interval 5 --save "$run/checkpoints" --save-interval 1000
)
first=(
    --train-iters 110 --tensorboard-dir "$run/tensorboard" --fill-jobs examples/demo.yaml --fill-report "$run"
    --fill-settings '{warmup_iterations: 10, baseline_seconds: 2}' --fill-paired-blocks 5
)
RANKS=2 scripts/train_local.sh "${model[@]}" "${first[@]}" 2>&1 | tee "$run/training.log" |
    sed -un -e 's/.*\(iteration  *[0-9]*\/ *[0-9]*\) .*\(lm loss: [0-9.E+-]*\).*/\1 | \2/p' \
        -e 's/.*\(validation loss at iteration [0-9]* .*lm loss value: [0-9.E+-]*\).*/\1/p' \
        -e '/^PipeFill: .* Megatron runs on the CPU/p' -e '/^Bubbles of the main job/,$p' -e '/[Ee]rror:/p'
status=${PIPESTATUS[0]}
[ "$status" = 0 ] || { tail -n 30 "$run/training.log" >&2; exit "$status"; }

.venv/bin/python - "$run" <<'PYTHON'
import json, re, sys
from pathlib import Path

run = Path(sys.argv[1])
losses = re.findall(r"lm loss: ([0-9.E+-]+)", (run / "training.log").read_text())
report = json.loads((run / "report.json").read_text())
print(f"\nThe loss fell from {float(losses[0]):.2f} to {float(losses[-1]):.2f}.")
for job in report["jobs"]:
    for attempt in job["attempts"]:
        if attempt["reason"].startswith("it moves"):
            done = f"{attempt['work_done']:,.0f} {job['unit']}"
            print(f"{job['name']} moved from rank {attempt['rank']} to rank {job['rank']}, with {done} done.")
summary, use = report["summary"], report["total"]["time_use_ns"]
idle = use["no_job"] / max(1, sum(use.values()))
print(
    f"The stages waited {summary['bubble_share']:.0%} of the time; in the iterations that were filled, "
    f"{summary['harvest_ratio']:.0%} of the waiting\nwent to the jobs, and {idle:.0%} passed while none was ready "
    f"(and {report['total']['settling_s']:.0f} s before, while jobs started).\n"
    "The same figures of your own training: --fill-jobs and --fill-paired-blocks 5."
)
print(f"trace.json in {run} opens in Perfetto; two iterations as a picture:\n{run / 'timeline.png'}")
PYTHON

echo
echo "== The training goes on, and its model completes some code in the bubbles (the log is $run/completions/training.log)"
mkdir -p "$run/completions"
for text in 'import ' 'def __init__(' 'class ' 'if __name__ == ' 'return ' 'raise ValueError(' '    for ' 'self.'; do
    printf '{"custom_id": "%s", "method": "POST", "url": "/v1/completions", ' "$text"
    printf '"body": {"prompt": "\\n%s", "max_tokens": 48, "temperature": 0.7}}\n' "$text"
done >"$run/completions/prompts.jsonl"
cat >"$run/completions/jobs.yaml" <<YAML
jobs:
  - name: completions
    task: megatron.fill.wings.llm:BatchJob
    args:
      model: $run/checkpoints
      requests: $run/completions/prompts.jsonl
      batch_sizes: [8]  # one configuration is measured sooner than eight
      chunks: [32]
    memory: 2GiB
YAML
second=(
    --train-iters 190 --load "$run/checkpoints" --override-opt-param-scheduler
    --fill-jobs "$run/completions/jobs.yaml" --fill-report "$run/completions" --fill-bind "$run"
)
RANKS=2 scripts/train_local.sh "${model[@]}" "${second[@]}" >"$run/completions/training.log" 2>&1 ||
    { tail -n 30 "$run/completions/training.log" >&2; exit 1; }
.venv/bin/python - "$run/completions/jobs/completions-1/answers.jsonl" <<'PYTHON'
import json, sys
from pathlib import Path

answers = Path(sys.argv[1])
if not answers.exists():
    sys.exit("The training ended before the job had begun to answer: its report is at the end of that log.")
for line in answers.read_text().splitlines():
    answer = json.loads(line)
    print(f"{answer['custom_id']!r} goes on with {answer['response']['body']['choices'][0]['text']!r}")
PYTHON
