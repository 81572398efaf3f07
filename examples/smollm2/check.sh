#!/usr/bin/env bash
# Runs every command of the README in this folder with the binary $1, and checks what comes out. Three minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")"
tandem=$1
./fetch.sh
answer=$("$tandem" generate smollm2.gguf "What is the capital of Norway?")
case $answer in *Oslo*) ;; *) echo "the answer does not name Oslo: $answer" >&2; exit 1 ;; esac
for run in sft dpo dpo-lora dpo-qlora; do
    "$tandem" train "$run.toml" --overwrite
    python3 - "$run" <<'PYTHON'
import json, sys

run = sys.argv[1]
records = [json.loads(line) for line in open(f"runs/{run}/metrics.jsonl")]
losses = [record["loss"] for record in records if record["split"] == "train"]
# TRL's first loss on these rows; of DPO it is ln 2.
first = 1.1759 if run == "sft" else 0.6931
assert abs(losses[0] - first) < 2e-3, (run, losses[0], first)
assert len(losses) == 12 and sum(losses[-3:]) / 3 < 0.9 * losses[0], (run, losses)
PYTHON
done
"$tandem" generate smollm2.gguf --adapter runs/dpo-lora/final "What is rain?"
