"""The trainer end to end on this machine's device: learns, resumes bit for bit, stops cleanly."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import ditorch
from projects.rwkv_v4 import checkpoint, parallel, train, trainer
from projects.rwkv_v4.events import read_metrics

SMALL = [
    "--config",
    "configs/tiny.py",
    "model.n_embd=32",
    "train.ctx_len=32",
    "train.train_iter=24",
    "train.final_lr=null",
    "train.lr=8e-3",
    "train.log_period=4",
    "train.checkpoint.period=10",
    "train.evaluation.at_end=false",
    "train.global_batch_size=4",
]


def run(folder: str, *more: str) -> int:
    return train.main([*SMALL, f"train.output_dir={folder}", *more])


def losses(folder: str) -> list[float]:
    return [x for r in read_metrics(Path(folder) / "metrics.json") if "losses" in r for x in r["losses"]]


def test_a_run_leaves_what_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("out", "train.evaluation.at_end=true", "train.evaluation.max_batches=2") == 0
    text = capsys.readouterr().out
    for line in (
        "Rank of current process: 0. World size: 1",
        "Command line arguments: Namespace(config_file='configs/tiny.py'",
        "A model for a laptop on the bundled text",
        "Full config saved to out/config.yaml",
        "tokens, 46 unique.",
        "Auto-scaling the config to train.train_iter=24",
        "(emb): VocabEmbedding(num_embeddings=46, embedding_dim=32)",
        " iteration: 23/24  consumed_samples: 96  total_loss: ",
        "bits per character",
    ):
        assert line in text
    assert "lr: 0.008" in (Path("out") / "config.yaml").read_text()
    found = losses("out")
    assert len(found) == 24
    assert max(found[-4:]) < min(found[:2]) - 0.5
    assert (Path("out") / "log.txt").read_text() in text


def test_resume_goes_on_bit_for_bit() -> None:
    assert run("whole") == 0
    assert run("parts", "train.stop_after=13") == 0
    assert run("parts", "--resume") == 0
    assert losses("whole") == losses("parts")
    whole, parts = (checkpoint.load(checkpoint.found(Path(f))[-1]) for f in ("whole", "parts"))
    assert whole["model"].keys() == parts["model"].keys()
    assert all(torch.equal(whole["model"][k], parts["model"][k]) for k in whole["model"])
    printed = [[r["total_loss"] for r in read_metrics(Path(f) / "metrics.json")] for f in ("whole", "parts")]
    assert printed[0] == printed[1]


def test_ctrl_c_ends_with_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    step = trainer.Trainer.step

    def interrupted(self: Any, iteration: int) -> torch.Tensor:
        if iteration == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, iteration)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "step", interrupted)
        assert run("cut") == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert [p.name for p in checkpoint.found(Path("cut"))] == ["checkpoint_0000007.pt"]
    assert run("cut", "--resume") == 0
    assert len(losses("cut")) == 24


def test_a_second_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def impatient(self: Any, iteration: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return torch.zeros(())

    monkeypatch.setattr(trainer.Trainer, "step", impatient)
    assert run("twice") == 130
    assert capsys.readouterr().err == "Interrupted\n"
    assert not checkpoint.found(Path("twice"))


def test_a_launcher_that_passes_ctrl_c_on_is_no_second_one() -> None:
    one = trainer.Trainer.__new__(trainer.Trainer)
    one.ranks, one._stop = parallel.Ranks(0, 2, torch.device("cpu")), 0
    with one._signals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert one._stop == signal.SIGINT


def test_what_another_rank_was_asked_stops_this_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel.Ranks, "largest", lambda self, value: float(signal.SIGINT))
    assert run("other", "train.evaluation.at_end=true") == 130
    assert [p.name for p in checkpoint.found(Path("other"))] == ["checkpoint_0000001.pt"]
    assert not any("valid_loss" in r for r in read_metrics(Path("other") / "metrics.json")), "it would wait for ever"


def test_fast_dev_run_then_evaluation_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("quick", "--fast-dev-run") == 0
    assert len(losses("quick")) == 20
    told = "--fast-dev-run without an accelerator changes train.global_batch_size=2"
    assert (told in capsys.readouterr().out) == (ditorch.backend.name in ("soft", "cpu"))
    assert run("quick", "--eval-only", "train.evaluation.max_batches=2") == 0
    assert "bits per byte" in capsys.readouterr().out
    assert run("fresh", "train.load_weight=quick/checkpoint_0000020.pt", "train.stop_after=4") == 0
    assert losses("fresh")[0] < losses("quick")[0] - 0.5


def test_a_slow_first_iteration_is_told_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trainer, "SLOW_SECONDS", 1e-4)
    assert run("slow", "train.stop_after=1") == 0
    text = capsys.readouterr().out
    assert "The first iteration takes more than 0.0001 s: 24 take more than 0.0 h" in text
    assert "24 will take about" in text


def test_time_limit_stops_the_run() -> None:
    assert run("short", "train.max_seconds=0") == 0
    assert [p.name for p in checkpoint.found(Path("short"))] == ["checkpoint_0000001.pt"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("train.lrr=1", "did you mean train.lr"),
        ("data.path=gone.txt", "no text at gone.txt"),
        ("train.amp=fp8", "expected bf16 or null"),
        ("train.dist.strategy=magic", "expected one of ddp, fsdp, tensor"),
        ("--eval-only", "no checkpoint in bad"),
    ],
)
def test_mistakes_are_named(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bad", option) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_of_another_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mine", "train.stop_after=1") == 0
    Path("other.txt").write_text("abcdefgh" * 400)
    assert run("mine", "--resume", "data.path=other.txt") == 2
    assert "was trained on a vocabulary of 46, other.txt has 8" in capsys.readouterr().err


def test_mixed_precision_trains() -> None:
    assert run("amp", "train.amp=bf16") == 0
    found = losses("amp")
    assert max(found[-4:]) < min(found[:2]) - 0.5


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_good_checkpoint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = trainer.Trainer.step

    def broken(self: Any, iteration: int) -> torch.Tensor:
        loss = step(self, iteration)
        return loss * float("nan") if iteration == 13 else loss

    monkeypatch.setattr(trainer.Trainer, "step", broken)
    assert run("nan") == 1
    text = capsys.readouterr().out
    assert "Training ended at iteration 16: the loss is not finite at iteration 15" in text
    assert "OpOverflowCheck" in text
    newest = checkpoint.load_latest(Path("nan"))
    assert newest is not None
    assert newest[1]["iteration"] == 10
