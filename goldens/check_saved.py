#!/usr/bin/env python3
"""Checks that transformers loads what Tandem writes: each golden model is saved by transformers, read and written again
by Tandem (whole, in shards, in bf16), loaded by transformers, and compared tensor by tensor.

    cargo build --release -p tandem-model --example rewrite
    python goldens/check_saved.py target/release/examples/rewrite
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig

from model_golden import model_class

FOLDER = Path(__file__).parent / "models"


def main() -> None:
    rewrite = sys.argv[1]
    for golden in sorted(FOLDER.glob("*.json")):
        torch.manual_seed(0)
        config = json.loads(golden.read_text())["config"]
        auto_class = model_class(config)
        model = auto_class.from_config(AutoConfig.for_model(**config))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(f"{folder}/theirs")
            for options in ([], ["f32", "9000"], ["bf16"]):
                subprocess.run([rewrite, f"{folder}/theirs", f"{folder}/ours", *options], check=True,
                               stdout=subprocess.DEVNULL)
                loaded, report = auto_class.from_pretrained(f"{folder}/ours", output_loading_info=True)
                wrong = {kind: names for kind, names in report.items() if names}
                assert not wrong, (golden.stem, options, wrong)
                dtype = torch.bfloat16 if options == ["bf16"] else torch.float32
                ours = dict(loaded.named_parameters())
                for name, parameter in model.named_parameters():
                    # What does not train is copied as it is.
                    assert ours[name].dtype == dtype, (golden.stem, name, ours[name].dtype)
                    assert torch.equal(ours[name], parameter.to(dtype)), (golden.stem, options, name)
        print(f"{golden.stem}: equal whole, in shards and in bf16")


if __name__ == "__main__":
    main()
