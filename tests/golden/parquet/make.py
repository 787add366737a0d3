"""Chat data, texts and questions in Parquet, and the same rows as JSON lines. pyarrow 26; run in this folder."""

import json

import pyarrow as pa
import pyarrow.parquet as pq


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def write(name, rows, **options):
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, f"{name}.parquet", **options)
    with open(f"{name}.jsonl", "w") as lines:
        for row in table.to_pylist():
            lines.write(json.dumps(without_nulls(row), ensure_ascii=False, separators=(",", ":")) + "\n")


# Messages, tools and what transformers makes of them; the order of keys in tools is that of their columns.
chats = [json.loads(line) for line in open("../chat/rendered.jsonl")]
keep = ["template", "messages", "tools", "add_generation_prompt", "text", "input_ids", "assistant_masks"]
chats = [{key: row[key] for key in keep} for row in chats]
# A column has no list of numbers and texts; transformers has rendered no other.
for row in chats:
    if '[1, "x"]' in json.dumps(row["messages"]):
        row["messages"] = json.loads(json.dumps(row["messages"]).replace('"x"', "2"))
        row.update(text=None, input_ids=None, assistant_masks=None)
write("messages", chats, compression="zstd", row_group_size=7)

letters = "naïve ☃ " * 3
write(
    "completions",
    [{"prompt": f"{i} + {i}", "completion": f"{i + i}", "id": i, "share": i / 4, "odd": i % 2 == 1} for i in range(300)],
    compression="snappy", row_group_size=128, data_page_size=256, use_dictionary=["completion"],
)
turn = lambda role, content: {"role": role, "content": content}
write(
    "turns",
    [{"prompt": [turn("system", letters), turn("user", str(i))][i % 2:], "completion": [turn("assistant", letters * i)] if i % 5 else None,
      "chosen": [], "tags": [[1, None], [], None, [i]][: i % 5]} for i in range(40)],
    compression="gzip", data_page_version="2.0", use_dictionary=False,
)
write(
    "alpaca",
    [{"instruction": f"Say {i}.", "input": [None, "", "as a word"][i % 3], "output": ["zero", "one", "two"][i % 3] * (i + 1)} for i in range(30)],
    compression="none", use_dictionary=False,
)
write(
    "sharegpt",
    [{"conversations": [{"from": ["human", "gpt"][j % 2], "value": f"{i} {j}"} for j in range(2 + i % 3)], "system": [None, letters][i % 2],
      "tools": "[]"} for i in range(20)],
    compression="zstd", compression_level=19,
)
write("texts", [{"id": i, "text": f"A text, number {i}.\n" + letters, "ids": [i, 2 * i]} for i in range(50)], compression="snappy")
for codec in ["brotli", "lz4"]:
    write(codec, [{"id": i, "text": f"A text, number {i}.\n" + letters * i} for i in range(60)], compression=codec, data_page_size=512)
write("questions", [{"context": f"{i} + 1 =", "continuations": [f" {i + 1}", f" {i}"], "answer": 0} for i in range(12)], compression="zstd")
# A text that is none, bytes that need not be one, and a type that JSON does not have.
bad = pa.table({
    "instruction": pa.array([b"a", b"\xff", b"c"]).cast(pa.binary()).view(pa.string()),
    "output": ["x", "y", "z"],
    "image": pa.array([b"\xff\xd8", b"text", None]),
    "price": pa.array([1, 2, 3]).cast(pa.decimal128(30, 2)),
})
pq.write_table(bad, "bad.parquet")
# Encodings of differences and of parts of floats, in lists, with nulls and in both versions of pages.
rows = [{"id": 7 * i - 9, "text": f"A text, number {i}.\n" + letters * (i % 4) if i % 5 else None, "tags": [f"tag {j}" for j in range(i % 4)],
         "share": i / 8, "wide": 3 ** (i % 40) * (-1) ** i} for i in range(300)]
encodings = {"id": "DELTA_BINARY_PACKED", "wide": "DELTA_BINARY_PACKED", "text": "DELTA_BYTE_ARRAY", "share": "BYTE_STREAM_SPLIT",
             "tags.list.element": "DELTA_LENGTH_BYTE_ARRAY"}
for version in ["1.0", "2.0"]:
    write(f"delta{version[0]}", rows, use_dictionary=False, column_encoding=encodings, data_page_version=version, data_page_size=2048, compression="snappy")
