#!/usr/bin/env bash
# Writes each example's plan, NAME.plan.txt beside NAME.toml, and the rows of the READMEs anew. Look at them before committing.
set -euo pipefail
cd "$(dirname "$0")/.."
TANDEM_BLESS=1 cargo test --release -p tandem-cli --test it example_plans "$@"
