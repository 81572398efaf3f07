"""Writes expected.json: what trl 1.16 and transformers 5.23 make of the inputs in this folder.

Run with that pair installed, from any directory: python generate.py
"""

import json
import pathlib
import shutil
import tempfile
import types

import jinja2
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, SFTConfig
from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer
from trl.trainer.sft_trainer import SFTTrainer

HERE = pathlib.Path(__file__).parent
LENGTHS = [None, 12]


def load(name):
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def tokenizers(folder):
    """The tokenizer as it is, and one that adds BOS to plain text."""
    yield "plain", AutoTokenizer.from_pretrained(HERE / "tokenizer")
    shutil.copytree(HERE / "tokenizer", folder, dirs_exist_ok=True)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"] = json.loads((HERE / "bos_post_processor.json").read_text())
    path.write_text(json.dumps(content))
    yield "bos", AutoTokenizer.from_pretrained(folder)


def preference(rows, tokenizer, max_length, truncation="keep_start"):
    """prompt and answer ids of each row after the collator's cut, chosen then rejected; None where a row is dropped."""
    trainer = types.SimpleNamespace(_tokenizer=tokenizer)
    config = DPOConfig(max_length=max_length, truncation_mode=truncation, output_dir="/tmp", use_cpu=True)
    collator = DataCollatorForPreference(pad_token_id=0, max_length=max_length, truncation_mode=truncation)
    results = []
    for row in rows:
        row = {k: v for k, v in row.items() if k != "name"}
        data = DPOTrainer._prepare_dataset(trainer, Dataset.from_list([row]), tokenizer, config, "train")
        if len(data) == 0:
            results.append(None)
            continue
        batch = collator([data[0]])
        sequences = []
        for ids, real, answer in zip(*(batch[k].tolist() for k in ["input_ids", "attention_mask", "completion_mask"])):
            for wanted in [0, 1]:
                sequences.append([i for i, r, a in zip(ids, real, answer) if r and a == wanted])
        results.append(sequences)
    return results


def supervised(rows, tokenizer, max_length, template=None, assistant_only=False, truncation="keep_start"):
    """ids and marks of each row; None where a row is dropped."""
    completion_only = "completion" in rows[0]
    trainer = types.SimpleNamespace(
        _tokenizer=tokenizer, chat_template=template, completion_only_loss=completion_only
    )
    config = SFTConfig(
        max_length=max_length, assistant_only_loss=assistant_only, truncation_mode=truncation,
        output_dir="/tmp", use_cpu=True
    )
    results = []
    for row in rows:
        data = SFTTrainer._prepare_dataset(
            trainer, Dataset.from_list([row]), tokenizer, config, False, None, "train"
        )
        if len(data) == 0:
            results.append(None)
            continue
        results.append([data[0]["input_ids"], [int(label != -100) for label in data[0]["labels"]]])
    return results


def rendered(tokenizer, template):
    """The text of each conversation without and with a generation prompt; None where the template fails."""
    results = []
    for row in load("conversations.jsonl"):
        for add_generation_prompt in [False, True]:
            try:
                text = tokenizer.apply_chat_template(
                    row["messages"],
                    tools=row.get("tools"),
                    chat_template=template,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **row.get("chat_template_kwargs", {}),
                )
            except jinja2.TemplateError:
                text = None
            results.append(text)
    return results


def main():
    expected = {"preference": [], "supervised": [], "rendered": {}}
    markers = (HERE / "templates" / "markers.jinja").read_text()
    files = ["pref_conv", "pref_conv_implicit", "pref_plain", "pref_plain_implicit", "edge_cases"]
    with tempfile.TemporaryDirectory() as folder:
        for name, tokenizer in tokenizers(pathlib.Path(folder)):
            for max_length in LENGTHS:
                common = {"tokenizer": name, "max_length": max_length}
                for file in files:
                    rows = preference(load(f"{file}.jsonl"), tokenizer, max_length)
                    expected["preference"].append({"file": file, **common, "rows": rows})
                for file in ["sft_text", "sft_completion", "sft_completion_conv"]:
                    rows = supervised(load(f"{file}.jsonl"), tokenizer, max_length)
                    expected["supervised"].append({"file": file, **common, "template": None, "rows": rows})
                rows = supervised(load("sft_messages.jsonl"), tokenizer, max_length, markers, True)
                expected["supervised"].append(
                    {"file": "sft_messages", **common, "template": "markers", "rows": rows}
                )
            # The other end is kept; TRL does so for supervised rows, too, but calls it deprecated.
            common = {"tokenizer": name, "max_length": 12, "truncation": "keep_end"}
            rows = preference(load("edge_cases.jsonl"), tokenizer, 12, "keep_end")
            expected["preference"].append({"file": "edge_cases", **common, "rows": rows})
            rows = supervised(load("sft_completion.jsonl"), tokenizer, 12, truncation="keep_end")
            expected["supervised"].append({"file": "sft_completion", **common, "template": None, "rows": rows})
            if name == "plain":
                for path in sorted((HERE / "templates").glob("*.jinja")):
                    expected["rendered"][path.stem] = rendered(tokenizer, path.read_text())
    text = json.dumps(expected, ensure_ascii=False, separators=(",", ":"))
    (HERE / "expected.json").write_text(text.replace('{"file"', '\n{"file"') + "\n")


main()
