"""Command line of the trainer: ``python -m projects.rwkv_v4.train --config configs/enwik8.py [train.lr=4e-4 ...]``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path

import torch

import ditorch  # "cuda" below means this machine's accelerator

from . import checkpoint
from .checkpoint import CheckpointError
from .config import Config, ConfigError, find_config, load
from .data import CorpusError
from .events import say, start_log
from .parallel import Ranks
from .trainer import Trainer
from .wkv import prepare

log = logging.getLogger("rwkv")
engine = logging.getLogger("rwkv.engine.default")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, as the training log shows it."""
    parser = argparse.ArgumentParser(
        prog="python -m projects.rwkv_v4.train",
        description="Train RWKV-v4. Anything in the configuration can be changed: train.lr=4e-4 model.n_layer=3",
    )
    parser.add_argument("--config", "--config-file", dest="config_file", required=True, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the output folder")
    parser.add_argument("--eval-only", action="store_true", help="evaluate the newest checkpoint and end")
    parser.add_argument("--fast-dev-run", action="store_true", help="20 iterations with every part of the trainer")
    parser.add_argument("opts", nargs="*", metavar="key=value", help="changes to the configuration")
    found = vars(parser.parse_intermixed_args(arguments))
    return argparse.Namespace(**dict(sorted(found.items())))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status is 0, 1 for a loss of NaN, 2 for a mistake in the input, 130 after Ctrl-C."""
    args = parse(arguments)
    try:
        config = load(args.config_file, args.opts)
        if args.fast_dev_run:
            quick = ("train_iter=20", "train_epoch=0", "log_period=1", "checkpoint.period=10", "evaluation.period=10")
            config.override([f"train.{x}" for x in (*quick, "evaluation.max_batches=2")])
            _make_quick(config)
        say(f"\nRWKV_HEAD_QK_DIM {config.model.head_qk}\n")
        ranks = Ranks.join()
        try:
            return _run(args, config, ranks)
        finally:
            if not isinstance(sys.exc_info()[1], KeyboardInterrupt):
                ranks.leave()
    except KeyboardInterrupt:
        # Before training began, or a second time. Other ranks may wait for this one in the middle of a message:
        # do not wait for them.
        sys.stderr.write("Interrupted\n")  # in one piece: the other ranks write there too
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            os._exit(130)
        return 130
    except (ConfigError, CorpusError, CheckpointError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _make_quick(config: Config) -> None:
    """Without an accelerator, a full batch in bf16 takes minutes for an iteration: make it small, and say so."""
    if ditorch.backend.name not in ("soft", "cpu"):
        return
    train = config.train
    most = {
        "train.global_batch_size": (train.global_batch_size, 2 * int(os.environ.get("WORLD_SIZE", 1))),
        "train.ctx_len": (train.ctx_len, 64),
        "train.evaluation.batch_size": (train.evaluation.batch_size, 2),
    }
    changes = [f"{key}={limit}" for key, (now, limit) in most.items() if now > limit]
    if train.amp is not None and not _has_bf16_units():
        changes.append("train.amp=null")
    if changes:
        config.override(changes)
        say(f"--fast-dev-run without an accelerator changes {', '.join(changes)}")


def _has_bf16_units() -> bool:
    """Whether this processor multiplies bfloat16 numbers itself."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def _run(args: argparse.Namespace, config: Config, ranks: Ranks) -> int:
    folder = Path(config.train.output_dir)
    start_log(ranks.rank, folder)
    log.info(f"Rank of current process: {ranks.rank}. World size: {ranks.world}")
    log.info(f"Command line arguments: {args}")
    log.info(f"Contents of args.config_file={args.config_file}:\n{find_config(args.config_file).read_text()}")
    if ranks.rank == 0:
        (folder / "config.yaml").write_text(config.yaml(), encoding="utf-8")
    log.info(f"Full config saved to {folder / 'config.yaml'}")
    for note in config.notes:
        log.info(note)
    log.info(f"Device: {ditorch.backend.name} ({ditorch.framework}), torch {torch.__version__}")
    _compile_kernels(ranks)
    engine.info("Prepare training, validating, testing set")
    say("building token list...", end=" ")
    trainer = Trainer(config, ranks)
    say(f"data has {len(trainer.corpus.ids)} tokens, {trainer.corpus.vocab_size} unique.")
    scaled = f"train.train_iter={trainer.train_iter}, train.warmup_iter={trainer.warmup_iter}"
    engine.info(f"Auto-scaling the config to {scaled}")
    trainer.build()
    engine.info(f"Model:\n{trainer.model}")
    engine.info(f"Number of parameters: {sum(p.numel() for p in trainer.model.parameters())}")
    if config.train.load_weight is not None:
        trainer.load_weights(Path(config.train.load_weight))
    if args.eval_only:
        if config.train.load_weight is None and not checkpoint.found(folder):
            raise CheckpointError(f"--eval-only: no checkpoint in {folder}, and train.load_weight names none")
        if config.train.load_weight is None:
            trainer.resume()
        trainer.evaluate()
        return 0
    if config.train.graph_debug >= 0:
        engine.info("Graph debug mode on, automatically output debug info.")
    if args.resume:
        trainer.resume()
    reason = trainer.train()
    if "not finite" in reason:
        return 1
    return 130 if "SIGINT" in reason else 0


def _compile_kernels(ranks: Ranks) -> None:
    started = time.perf_counter()
    engine.info("> compiling wkv kernel ...")
    prepare(ranks.device)
    seconds = time.perf_counter() - started
    engine.info(f">>> done with wkv kernel. Compilation time: {seconds:.3f} seconds")
    engine.info(f">>> done with compiling. Compilation time: {time.perf_counter() - started:.3f} seconds")


if __name__ == "__main__":
    sys.exit(main())
