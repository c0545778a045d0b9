"""Bugs of real chips, planted in the software accelerator: who finds them, and is the right operator blamed?

python -m benchmarks.real_bugs rows.jsonl                  # all bugs in all ways; goes on where the file ends
python -m benchmarks.real_bugs rows.jsonl 8 26 --ways default once
python -m benchmarks.real_bugs rows.jsonl --show           # the table of docs/verdicts.md, from what is there
"""
