"""Writes the same rows in every format that Tandem reads, with pyarrow and datasets.

Run in this folder: python make.py (pyarrow 21 or later, datasets 5 or later, zstandard or pyarrow's zstd).
"""

import csv
import gzip
import io
import json
import random
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
from datasets import Dataset, load_dataset

HERE = Path(__file__).parent
WORDS = "sky blue green grass « quoted \" » comma, tab\t line\nend 日本 café 😀 the of and is".split(" ")


def rows(count):
    rng = random.Random(25)
    text = lambda n: " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, n)))
    return [
        {"prompt": "" if i % 50 == 7 else text(8), "chosen": " " + text(6), "rejected": " " + text(6)}
        for i in range(count)
    ]


def chats(count):
    rng = random.Random(26)
    text = lambda: " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 6)))
    turn = lambda role: {"role": role, "content": text()}
    return [
        {
            "prompt": [turn("system")] * (i % 2) + [turn("user")],
            "chosen": [turn("assistant")],
            "rejected": [turn("assistant")],
            "score": i / 3,
            "source": ["a", "b", "c"][i % 3],
        }
        for i in range(count)
    ]


def calls():
    """Rows in which objects have different keys: datasets keeps such objects as texts of JSON."""
    tool = lambda name, **of: {"name": name, "parameters": {"type": "object", "properties": of}}
    call = lambda name, **of: {"function": {"name": name, "arguments": of}}
    user = {"role": "user", "content": "Which \"time\" is it? ☀"}
    return [
        {"prompt": [user], "tools": [tool("time", zone={"type": "string"})], "extra": {"a": [1, {"b": None}]}},
        {
            "prompt": [user, {"role": "assistant", "tool_calls": [call("time", zone="UTC", exact=True)]}],
            "tools": [tool("time", exact={"type": "boolean", "default": False}), tool("day")],
            "extra": {"c": {"d": 1.5}},
        },
    ]


def zst(name, data):
    (HERE / name).write_bytes(pa.Codec("zstd").compress(data, asbytes=True))


def main():
    plain = rows(1000)
    table = pa.Table.from_pylist(plain)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in plain).encode()
    with pa.output_stream(HERE / "rows.jsonl.zst", compression="zstd") as out:
        out.write(lines)
    (HERE / "rows.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["prompt", "chosen", "rejected"])
    writer.writeheader()
    writer.writerows(plain)
    (HERE / "rows.csv.gz").write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    pq.write_table(table, HERE / "rows.parquet", compression="zstd", row_group_size=300)
    feather.write_feather(table, HERE / "rows.feather", compression="zstd", chunksize=400)
    # datasets writes streams without compression; a few rows keep the repository small.
    shutil.rmtree(HERE / "saved", ignore_errors=True)
    Dataset.from_list(plain[:60]).save_to_disk(HERE / "saved", num_shards=2)

    chat = chats(40)
    (HERE / "chat.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chat))
    table = pa.Table.from_pylist(chat)
    table = table.set_column(4, "source", table["source"].dictionary_encode())
    # Tables have every field of every message, null where a message has none.
    item = pa.struct([("role", pa.large_string()), ("content", pa.large_string()), ("name", pa.string())])
    wide = pa.schema([(key, pa.large_list(item)) for key in ("prompt", "chosen", "rejected")])
    turns = {key: pa.array([row[key] for row in chat], pa.large_list(item)) for key in wide.names}
    turns |= {"source": table["source"], "made": pa.array([0] * 40, pa.timestamp("us")), "empty": pa.nulls(40)}
    large = pa.table(turns)
    for codec in ("none", "snappy", "gzip", "lz4"):
        pq.write_table(table, HERE / f"chat_{codec}.parquet", compression=codec, data_page_version="2.0")
    pq.write_table(large, HERE / "chat_large.parquet")
    pq.write_table(table, HERE / "chat_brotli.parquet", compression="brotli")
    feather.write_feather(large, HERE / "chat_large.feather", compression="lz4")
    with pa.ipc.new_stream(HERE / "chat_stream.arrow", large.schema) as out:
        out.write_table(large, 7)

    (HERE / "calls.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in calls()))
    with tempfile.TemporaryDirectory() as cache:
        table = load_dataset("json", data_files=str(HERE / "calls.jsonl"), split="train", cache_dir=cache)
        print(table.features)
        table.to_parquet(HERE / "calls.parquet")
        with pa.ipc.new_stream(HERE / "calls.arrow", table.data.schema) as out:
            out.write_table(table.data.table)


if __name__ == "__main__":
    main()
