"""PyTorch's operator database: forward and backward on soft equal the CPU bit for bit, but for the ledger's lines.

A sample runs by default; ``-m slow`` runs everything. The shares of pairs that agree are in the test's output (-rP).
"""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.device.soft import sweep

LEDGER = Path(__file__).with_name("op_db_ledger.txt")
SHARDS = 24  # enough for several workers to share the whole evenly
SAMPLED = 12  # one pair in so many runs by default
EASY = 3  # and only its first samples


@dataclass(frozen=True)
class Entry:
    """One line of the ledger."""

    operator: str
    dtype: str
    reason: str

    def covers(self, op: str, dtype: str) -> bool:
        return fnmatch.fnmatchcase(op, self.operator) and fnmatch.fnmatchcase(dtype, self.dtype)


def read_ledger(text: str) -> list[Entry]:
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            parts = line.split(None, 2)
            if len(parts) != 3:
                raise ValueError(f"line {number} of the ledger has no reason: {line!r}")
            entries.append(Entry(*parts))
    return entries


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shard(index: int, of: int) -> Iterator[tuple[object, torch.dtype]]:
    """The pairs that hash to this shard: the same on every machine, whatever else the database holds."""
    for info, dtype in sweep.pairs():
        if zlib.crc32(f"{sweep.op_name(info)} {name_of(dtype)}".encode()) % of == index:
            yield info, dtype


def check(pairs: Iterator[tuple[object, torch.dtype]], most_samples: int | None) -> tuple[int, int]:
    """Compare pairs; returns how many agree, of how many. Fails for what the ledger does not explain."""
    ledger = read_ledger(LEDGER.read_text())
    unexplained, agree, total = [], 0, 0
    for info, dtype in pairs:
        outcome = sweep.sweep_pair(info, dtype, most_samples)
        total += 1
        agree += not outcome.problem
        if outcome.problem and not any(entry.covers(outcome.op, outcome.dtype) for entry in ledger):
            unexplained.append(f"{outcome.key}: {outcome.problem}")
    print(f"{agree} of {total} (operator, dtype) pairs are bit-identical ({100 * agree / max(total, 1):.2f} %)")
    assert not unexplained, "\n".join(unexplained)
    return agree, total


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 4))])
def test_a_sample_of_the_operators(part):
    chosen = (pair for number, pair in enumerate(shard(0, SAMPLED)) if number % 4 == part)
    agree, total = check(chosen, EASY)
    assert total > 50
    assert agree / total > 0.95


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("index", range(SHARDS))
def test_all_operators(index):
    agree, total = check(shard(index, SHARDS), None)
    assert total > 100
    assert agree / total >= 0.98


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("entry", read_ledger(LEDGER.read_text()), ids=lambda entry: entry.operator)
def test_no_line_of_the_ledger_is_stale(entry):
    covered = [
        (info, dtype)
        for info, dtype in sweep.pairs(fnmatch.translate(entry.operator))
        if entry.covers(sweep.op_name(info), name_of(dtype))
    ]
    assert covered, f"no operator of this torch is called {entry.operator}"
    fine = [f"{outcome.key}" for outcome in (sweep.sweep_pair(*pair) for pair in covered) if not outcome.problem]
    assert not fine, f"these agree, so the line covers too much: {', '.join(fine)}"


def test_the_ledger_is_read_strictly():
    assert read_ledger("# note\n\nadd  float*  because of\tthat\n") == [Entry("add", "float*", "because of\tthat")]
    assert read_ledger("add * x")[0].covers("add", "int8")
    assert not read_ledger("add * x")[0].covers("addmm", "int8")
    with pytest.raises(ValueError, match="line 2 of the ledger has no reason"):
        read_ledger("add * x\nmul float32")
    assert len({(entry.operator, entry.dtype) for entry in read_ledger(LEDGER.read_text())}) == len(
        read_ledger(LEDGER.read_text())
    )


def test_the_sweep_notices_a_wrong_operator():
    from ditorch.soft import faults

    (pair,) = [pair for pair in sweep.pairs("exp") if pair[1] == torch.float32]
    assert sweep.sweep_pair(*pair, 2).problem == ""
    with faults.plant("exp: element=1e-3"):
        assert sweep.sweep_pair(*pair, 2).problem == "forward result 0: values differ"
    with faults.plant("mul.Tensor: element=1e-3, phase=backward"):
        assert sweep.sweep_pair(*pair, 2).problem == "backward result 0: values differ"
    with faults.plant("exp: missing"):
        assert sweep.sweep_pair(*pair, 2).problem.startswith("NotImplementedError")
