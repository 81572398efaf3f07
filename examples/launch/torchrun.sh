#!/usr/bin/env bash
# Ranks by torchrun. On one machine:
#
#     bash torchrun.sh run.toml
#
# On several, the same on each; the endpoint is a port of one of them. The run goes on with as many machines as are left:
#
#     NODES=1:4 RANKS=8 ENDPOINT=node0:29400 bash torchrun.sh run.toml
set -euo pipefail

run=${1:?"usage: [NODES=1] [RANKS=2] [RESTARTS=10] [ENDPOINT=localhost:29400] bash torchrun.sh RUN.TOML"}

exec torchrun --no-python \
    --nnodes "${NODES:-1}" --nproc-per-node "${RANKS:-2}" --max-restarts "${RESTARTS:-10}" \
    --rdzv-backend c10d --rdzv-id "${JOB:-tandem}" --rdzv-endpoint "${ENDPOINT:-localhost:29400}" \
    tandem train --resume "$run"
