"""The text becomes ids and back, and batches depend on seed and iteration alone."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from projects.rwkv_v4.data import CharCorpus, CorpusError, encode, windows

CORPUS = os.environ.get("ENWIK8")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITORCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ENWIK8", raising=False)


@given(st.text(min_size=1).filter(lambda s: not any(0xD800 <= ord(c) < 0xE000 for c in s)))
def test_ids_are_ranks_among_the_sorted_characters(text: str) -> None:
    ids, vocabulary = encode(text)
    assert [chr(c) for c in vocabulary] == sorted(set(text))
    assert "".join(chr(c) for c in vocabulary[ids]) == text


def test_plain_and_gzipped_text_and_the_cache(tmp_path: Path) -> None:
    text = "zebra äß€ " * 50
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "a.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.txt", "a.gz", "a.gz"):
        corpus = CharCorpus(str(tmp_path / name), ctx_len=16)
        assert corpus.text_of(np.asarray(corpus.ids)) == text
        assert corpus.vocab_size == len(set(text))
    assert corpus.bytes_per_id.sum() == sum(len(c.encode()) for c in set(text))


def test_the_environment_names_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("abc" * 100)
    monkeypatch.setenv("ENWIK8", str(tmp_path / "mine.txt"))
    assert CharCorpus(ctx_len=8).vocab_size == 3
    assert CharCorpus("sample", ctx_len=8).vocab_size > 30


def test_batches_depend_on_seed_and_iteration_alone() -> None:
    corpus = CharCorpus("sample", ctx_len=32)
    sample = corpus.sampler("cpu", 8, seed=3)
    inputs, targets = sample(17)
    again, _ = corpus.sampler("cpu", 8, seed=3)(17)
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(inputs, sample(18)[0])
    assert not torch.equal(inputs, corpus.sampler("cpu", 8, seed=4)(17)[0])
    halves = [sample(17, first, 4)[0] for first in (0, 4)]
    assert torch.equal(torch.cat(halves), inputs)


def test_training_never_sees_the_held_out_text() -> None:
    corpus = CharCorpus("sample", ctx_len=32)
    train, valid, test = (corpus.split(x) for x in ("train", "valid", "test"))
    assert len(train) + len(valid) + len(test) == len(corpus.ids)
    assert len(valid) == len(test) == int(0.05 * len(corpus.ids))
    highest = max(int(corpus.sampler("cpu", 64, 0).offsets(i).max()) for i in range(200))
    assert highest + 33 <= len(train)
    assert sum(w[:, 1:].size for w in windows(corpus, "valid", 8)) == (len(valid) - 1) // 32 * 32


def test_same_slice_gives_characters_1_to_1025() -> None:
    corpus = CharCorpus("sample", ctx_len=1024, same_slice=True)
    inputs, targets = corpus.sampler("cpu", 3, 0)(5)
    assert corpus.text_of(inputs[2].numpy()) == corpus.text_of(corpus.ids[1:1025])
    assert torch.equal(targets[0], torch.from_numpy(np.array(corpus.ids[2:1026])).long())


def test_bad_texts_are_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no text at gone\.txt"):
        CharCorpus("gone.txt")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CorpusError, match="not UTF-8 text"):
        CharCorpus(str(tmp_path / "bytes"))
    (tmp_path / "short").write_text("abc")
    with pytest.raises(CorpusError, match="3 characters, too few for contexts of 1024"):
        CharCorpus(str(tmp_path / "short"))


@pytest.mark.slow
@pytest.mark.skipif(CORPUS is None, reason="ENWIK8 does not name the corpus")
def test_the_full_corpus() -> None:
    corpus = CharCorpus(CORPUS)
    assert (len(corpus.ids), corpus.vocab_size) == (99_621_832, 6_064)
