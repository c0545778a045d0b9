"""A run of a config in the notation of the training log prints what that log prints, on one rank and on two.

The structure is held against a text written here and, where the log itself lies beside the checkout (or where
``RWKV_SEEDS`` says), against its first 120 lines and its event lines.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import ditorch  # noqa: F401
from projects.rwkv_v4 import checkpoint, train
from projects.rwkv_v4.config import load

ROOT = Path(__file__).parents[3]
STYLE = (ROOT / "tests" / "unit" / "rwkv" / "libai_style.txt").read_text(encoding="utf-8")
SEED = Path(os.environ.get("RWKV_SEEDS", ROOT.parent / "shared" / "seeds")) / "rwkv-training-log.txt"
HEAD = 120

T = "[01/02 03:04:05 some.name]:"
LIKE_THE_LOG = f"""
RWKV_HEAD_QK_DIM 256

{T} Rank of current process: 0. World size: 2
{T} Command line arguments: Namespace(config_file='x.py', eval_only=False, fast_dev_run=False, opts=[], resume=False)
{T} Contents of args.config_file=x.py:
{STYLE}
{T} Full config saved to out/config.yaml
{T} > compiling dataset index builder ...
{T} >>> done with dataset index builder. Compilation time: 0.057 seconds
{T} >>> done with compiling. Compilation time: 0.059 seconds
{T} Prepare training, validating, testing set
building token list... data has 99 tokens, 9 unique.
{T} Auto-scaling the config to train.train_iter=10000, train.warmup_iter=0
{T} Model:
GPT(
  (emb): VocabEmbedding(num_embeddings=6064, embedding_dim=1024)
  (blocks): Sequential(
    (0): Block(
      (ln1): LayerNorm((1024,), eps=1e-05, elementwise_affine=True)
      (ln2): LayerNorm((1024,), eps=1e-05, elementwise_affine=True)
      (ln0): LayerNorm((1024,), eps=1e-05, elementwise_affine=True)
      (att): RWKV_TimeMix(
        (time_shift): ZeroPad2d()
        (key): Linear1D(in_features=1024, out_features=1024, bias=False, parallel=col)
        (value): Linear1D(in_features=1024, out_features=1024, bias=False, parallel=col)
"""
EVENT = (
    f"{T}  eta: 0:26:36  iteration: 19/10000  consumed_samples: 160  total_loss: 9.68  time: 0.1600 s/iter"
    "  data_time: 0.0022 s/iter total_throughput: 50.00 samples/s lr: 8.00e-04  "
)

SMALL = (
    "model.n_layer=2",
    "model.n_embd=32",
    "model.ctx_len=32",
    "model.vocab_size=64",
    "dataloader.train.dataset[0].ctx_len=32",
    "dataloader.train.dataset[0].data_dir=sample",
    "train.train_micro_batch_size=2",
    "train.log_period=5",
    "train.output_dir=out",
)
# Lines that only one of the two has.
ALONE = re.compile(r"\[[^]]*\]: (Options without a meaning here|No text at|Device:).*|make: .*")
# Ranks print these without waiting for each other: they may stand anywhere.
TOKEN_LIST = re.compile(r"building token list\.\.\. |data has \d+ tokens, \d+ unique\.\n")


@dataclass
class Log:
    """The parts of a log that are held against each other, without times, paths and numbers."""

    ranks: int
    greeting: list[str]
    config: list[str]
    rest: list[str]
    token_lists: list[str]
    events: set[str]

    @classmethod
    def of(cls, lines: list[str], head: int | None = None) -> Log:
        events = {skeleton(line) for line in lines if " total_loss: " in line}
        text = "\n".join(lines[:head]) + "\n"
        lines = [line for line in TOKEN_LIST.sub("", text).splitlines() if not ALONE.fullmatch(line)]
        first = next(i for i, line in enumerate(lines) if line.startswith("["))
        contents = next(i for i, line in enumerate(lines) if "Contents of args.config_file=" in line)
        saved = next(i for i, line in enumerate(lines) if "Full config saved to" in line)
        preamble = [line for line in lines[:first] if line]
        assert set(preamble) == {"RWKV_HEAD_QK_DIM 256"}
        return cls(
            ranks=len(preamble),
            greeting=[skeleton(line) for line in lines[first : contents + 1]],
            config=lines[contents + 1 : saved],
            rest=[skeleton(line) for line in lines[saved:]],
            token_lists=sorted(skeleton(x) for x in TOKEN_LIST.findall(text)),
            events=events,
        )


def skeleton(line: str) -> str:
    line = re.sub(r"^\[\d\d/\d\d \d\d:\d\d:\d\d [\w.]+\]:", "[]:", line)
    line = re.sub(r"config_file='[^']*'|(?<=args\.config_file=)\S+(?=:$)|(?<=saved to )\S+", "FILE", line)
    line = re.sub(r"opts=\[.*\](?=, resume)", "opts=[]", line)
    line = re.sub(r"(?<=compiling )[a-z ]+(?= \.\.\.)|(?<=done with )[a-z]+ [a-z ]+", "SOMETHING", line)
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "0", re.sub(r"\d+ days?, ", "", line))


def assert_alike(ours: list[str], logged: Log, ranks: int) -> None:
    found = Log.of(ours)
    assert found.ranks == ranks
    assert found.greeting == logged.greeting
    assert found.config == logged.config, "the config is printed as it is"
    assert found.rest[: len(logged.rest)] == logged.rest
    assert found.token_lists == ["building token list... "] * ranks + ["data has 0 tokens, 0 unique.\n"] * ranks
    assert set(logged.token_lists) == set(found.token_lists)
    assert found.events == logged.events
    assert "[]: Starting training from iteration 0" in found.rest


def graph(text: str) -> dict[str, set[str]]:
    """Names of modules (with their kind), parameters and operators that graph.debug lists."""
    found = {
        "MODULE": re.findall(r"^ *\(MODULE:([\w.]+:\w+)\(", text, re.MULTILINE),
        "PARAMETER": re.findall(r"^ *\(PARAMETER:([\w.]+):", text, re.MULTILINE),
        "OPERATOR": re.findall(r"^ *\(OPERATOR: ([\w.]+-\w+)-\d+\(", text, re.MULTILINE),
    }
    return {kind: set(names) for kind, names in found.items()}


def source(name: str) -> tuple[str, Log]:
    """The config, and the log to hold a run against."""
    if name == "written here":
        lines = LIKE_THE_LOG.splitlines()
        return STYLE, Log.of([*lines, EVENT], len(lines))
    if not SEED.exists():
        pytest.skip("the training log is not beside the checkout, nor where RWKV_SEEDS says")
    lines = SEED.read_text(encoding="utf-8").splitlines()
    logged = Log.of(lines, HEAD)
    assert len(logged.rest) > 15
    return "\n".join(logged.config[:-1]) + "\n", logged


def test_the_model_of_the_log_prints_to_the_letter() -> None:
    config, _ = source("the log's own")
    Path("config_test.py").write_text(config, encoding="utf-8")
    with torch.device("meta"):
        model = load("config_test.py", ["dataloader.train.dataset[0].data_dir=sample"]).build("model")
    assert f"]: Model:\n{model}\n[" in SEED.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["written here", "the log's own"])
def test_one_rank(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, logged = source(name)
    Path("config_test.py").write_text(config, encoding="utf-8")
    more = ("dataloader.train.dataset[0].epoch_length_fixed=29", "train.train_iter=5")
    assert train.main(["--config-file", "config_test.py", *SMALL, *more]) == 0
    text = capsys.readouterr().out
    assert_alike(text.splitlines(), logged, ranks=1)
    assert "Auto-scaling the config to train.train_iter=15, train.warmup_iter=0" in text, "29 samples in batches of 2"
    assert "iteration: 14/15  consumed_samples: 30 " in text
    assert text.count("dataloader.train.num_workers, test.weight_style, test.path") == 1
    listed = graph(text)
    assert listed["OPERATOR"] >= {
        "model.blocks.0.att-wkv",
        "model.blocks.1.ffn.value-mm",
        "model.ln_out-native_layer_norm",
    }
    if name == "the log's own":  # with as many layers as here
        logged_graph = graph(re.sub(r".*model\.blocks\.[2-9].*", "", SEED.read_text(encoding="utf-8")))
        for kind in ("MODULE", "PARAMETER"):
            assert listed[kind] == logged_graph[kind]
    assert Path("out/config.yaml").read_text().startswith("train:\n  output_dir:")


@pytest.mark.distributed
def test_two_ranks_and_ctrl_c() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    config, logged = source("the log's own" if SEED.exists() else "written here")
    Path("config_test.py").write_text(config, encoding="utf-8")
    command = [sys.executable, "-m", "projects.rwkv_v4.launch", "--nproc_per_node", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with Path("stdout").open("w") as out, Path("stderr").open("w") as err:
        job = subprocess.Popen(
            [*command, "--config-file", "config_test.py", *SMALL],
            env=env,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 200
        while "total_loss" not in Path("stdout").read_text() and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(job.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
        status = job.wait(60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    text, errors = Path("stdout").read_text(), Path("stderr").read_text()
    assert status == 130, errors
    assert "Traceback" not in text + errors
    assert "Warning" not in text + errors
    assert errors.endswith("Main process received SIGINT, exiting\n")
    (newest,) = checkpoint.found(Path("out"))
    ended = re.search(r"Training ended at iteration (\d+): asked to stop by SIGINT\n", text)
    assert ended
    assert checkpoint.load(newest)["iteration"] == int(ended[1])
    assert_alike(text.splitlines(), logged, ranks=2)
