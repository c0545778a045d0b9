"""The training loop: steps, events, checkpoints, evaluation; CUDA code that knows of no other device."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import ditorch
from ditorch_common.signals import ends_at_second_signal

from . import checkpoint, schedules
from .config import Config, ConfigError
from .data import CharCorpus, windows
from .events import Event, Metrics, Window, plot_losses, say
from .graph import MODULES, WHOLE, list_whole, listed
from .parallel import Ranks, share_of_batch, spread

log = logging.getLogger("rwkv.engine.trainer")
events = logging.getLogger("rwkv.utils.events")
graph = logging.getLogger("rwkv.models.graph")

WARM_UP = 3
"""Iterations at the start of a run that are left out of the reported times: they compile and allocate."""

AGREE_SECONDS = 2.0
"""How often several ranks ask each other whether to stop; each time costs a message."""

REPEAT_SECONDS = 5.0
"""A launcher sends the Ctrl-C that the whole group got to its processes again: within this time it is no second one."""

SLOW_SECONDS = 30.0
"""The first iteration of a run that takes longer is told of."""

TIME_LIMIT = 1
"""A reason to stop, beside the numbers of signals (SIGINT is 2)."""


class Trainer:
    """A run of a configuration.

    >>> Trainer(Config(get_config("configs/tiny.py")), Ranks.join()).train()  # doctest: +SKIP
    """

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config, self.ranks, self.options = config, ranks, config.train
        self.folder = Path(self.options.output_dir)
        self.strategy = self.options.dist.strategy
        if self.options.amp not in ("bf16", None):
            raise ConfigError(f"train.amp={self.options.amp!r}: expected bf16 or null")
        torch.use_deterministic_algorithms(bool(self.options.deterministic))
        torch.set_float32_matmul_precision("high" if self.options.amp else "highest")
        self.corpus: CharCorpus = config.build("data")
        samples = len(self.corpus) * self.options.train_epoch
        self.train_iter = max(self.options.train_iter, math.ceil(samples / self.options.global_batch_size))
        if not 0 <= self.options.warmup_ratio < 1:
            raise ConfigError(f"train.warmup_ratio={self.options.warmup_ratio}: expected a share from 0 to 1")
        self.warmup_iter = math.ceil(self.train_iter * self.options.warmup_ratio)
        self._schedule = self._scheduled()
        self.iteration = 0
        self.trained_seconds = 0.0
        self.window = Window(self.options.loss_window)
        self._pending: list[Tensor] = []
        self._stop = 0

    def build(self) -> None:
        """Model, optimizer and batches on the device."""
        vocab_size = self.config.model.vocab_size or self.corpus.vocab_size
        if vocab_size < self.corpus.vocab_size:
            raise ConfigError(
                f"model.vocab_size={vocab_size}, but {self.corpus.name} has {self.corpus.vocab_size} characters"
            )
        self.model = self.config.build("model", vocab_size=vocab_size).to(self.ranks.device)
        if self.compiled():
            _avoid_mixed_order_reductions()
            self.model.from_embedding = torch.compile(self.model.from_embedding, mode=self.options.compile_mode)
        self.parallel = spread(self.model, self.strategy, self.ranks)
        # One kernel over all parameters: elsewhere it may not exist.
        more = {"fused": True} if ditorch.backend.name == "cuda" else {}
        self.optimizer: torch.optim.Optimizer = self.config.build("optim", params=self.model.parameters(), **more)
        self.sample = self.corpus.sampler(self.ranks.device, self.options.global_batch_size, self.options.seed)
        self.share = share_of_batch(self.ranks, self.strategy, self.options.global_batch_size)

    def compiled(self) -> bool:
        """Whether torch.compile makes the model's kernels."""
        wanted = self.options.compile
        alone = self.ranks.world == 1 or self.strategy == "ddp"
        return (ditorch.backend.name == "cuda" and alone) if wanted is None else bool(wanted)

    # --- training -----------------------------------------------------------------------------------------------

    def step(self, iteration: int) -> Tensor:
        """One iteration; its loss stays on the device, so that nothing waits for it."""
        inputs, targets = self.sample(iteration, *self.share)
        self._data_seconds += time.perf_counter() - self._step_started
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(iteration)
        with self.precision():
            loss: Tensor = self.parallel(inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def precision(self) -> Any:
        if self.options.amp is None:
            return contextlib.nullcontext()
        return torch.autocast("cuda", dtype=torch.bfloat16)

    def learning_rate(self, iteration: int) -> float:
        return float(self.options.lr * self._schedule(iteration))

    def _scheduled(self) -> schedules.Schedule:
        named, final = self.config.plain()["train"]["scheduler"], self.options.final_lr
        if named is not None:
            return schedules.named(named, self.train_iter, self.warmup_iter)
        return schedules.exponential_to(1.0 if final is None else final / self.options.lr, self.train_iter)

    def train(self) -> str:
        """Run to the end, to the time limit or to Ctrl-C; says which it was."""
        options = self.options
        self.metrics = Metrics(self.folder / "metrics.json" if self.ranks.rank == 0 else None, self.iteration)
        log.info(f"Starting training from iteration {self.iteration}")
        if options.graph_debug >= MODULES:
            self.list_graph()
        reason, stop, first, saved = "finished", 0, self.iteration, self.iteration
        self._agree_every = 1
        self._clock_restart(first)
        with self._signals():
            last = min(self.train_iter, options.stop_after or self.train_iter)
            while self.iteration < last:
                self._step_started = time.perf_counter()
                if self.iteration == first and self.compiled():
                    with _told_of_compiling():
                        self._pending.append(self.step(self.iteration))
                else:
                    with self._told_if_slow(first):
                        self._pending.append(self.step(self.iteration))
                self.iteration += 1
                boundary = self.iteration % options.log_period == 0
                if boundary and not self._report():
                    reason = f"the loss is not finite at iteration {self.iteration - 1}"
                    break
                if self.iteration - first == WARM_UP:
                    torch.cuda.synchronize()
                    self._clock_restart(self.iteration)
                if options.evaluation.period and self.iteration % options.evaluation.period == 0:
                    with self._off_the_clock():
                        self.evaluate()
                if self.iteration % options.checkpoint.period == 0:
                    with self._off_the_clock():
                        self.save()
                        saved = self.iteration
                if self.iteration % self._agree_every == 0 and (stop := int(self.ranks.largest(self._due()))):
                    reason = self._reason(stop)
                    break
        broken = reason.startswith("the loss is not finite")
        if saved != self.iteration and not broken:  # the last good checkpoint stays the newest
            self.save()
        log.info(f"Training ended at iteration {self.iteration}: {reason}")
        if broken:
            log.error("There is no use in going on. OpOverflowCheck names the operator that made the first NaN:")
            log.error("  python -m projects.rwkv_v4.watched --tool OpOverflowCheck (with the same options)")
        elif options.evaluation.at_end and stop in (0, TIME_LIMIT):
            self.evaluate()
        if self.ranks.rank == 0 and not plot_losses(self.folder / "metrics.json", self.folder / "loss.png"):
            log.info("No loss plot: matplotlib is not installed")
        return reason

    def _due(self) -> int:
        """Why training should stop now: a signal, ``TIME_LIMIT``, or 0 where it should go on."""
        limit = self.options.max_seconds
        return self._stop or (TIME_LIMIT if limit is not None and self._spent() >= limit else 0)

    def _spent(self) -> float:
        return self.trained_seconds + time.perf_counter() - self._clock

    def _reason(self, stop: int) -> str:
        if stop == TIME_LIMIT:
            return f"after {self._spent():.0f} s of training (train.max_seconds)"
        return f"asked to stop by {signal.Signals(stop).name}"

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C (or SIGTERM) asks for a checkpoint and an end, the second one ends at once."""

        asked = 0.0

        def ask(number: int, frame: Any) -> None:
            nonlocal asked
            now = time.monotonic()
            if self._stop and self.ranks.world > 1 and now - asked < REPEAT_SECONDS:
                return
            if self._stop:
                raise KeyboardInterrupt
            self._stop, asked = number, now
            log.info(f"{self._reason(number)}; saving a checkpoint first (once more to end at once)")

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with ends_at_second_signal(REPEAT_SECONDS if self.ranks.world > 1 else 0.0):
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _told_if_slow(self, first: int) -> Iterator[None]:
        """Say while it lasts that the first iteration is slow, and afterwards how long all of them will take."""
        if self.iteration != first:
            yield
            return
        left = self.train_iter - first

        def tell() -> None:
            hours = SLOW_SECONDS * left / 3600
            log.warning(f"The first iteration takes more than {SLOW_SECONDS:g} s: {left} take more than {hours:.1f} h")

        timer = threading.Timer(SLOW_SECONDS, tell)
        timer.daemon = True
        timer.start()
        started = time.perf_counter()
        try:
            yield
        finally:
            timer.cancel()
        seconds = time.perf_counter() - started
        if seconds > SLOW_SECONDS:
            log.warning(
                f"The first iteration took {seconds:.0f} s: {left} will take about {seconds * left / 3600:.1f} h"
            )

    # --- time ---------------------------------------------------------------------------------------------------

    def _clock_restart(self, iteration: int) -> None:
        self.trained_seconds += time.perf_counter() - getattr(self, "_clock", time.perf_counter())
        self._clock = self._measured_since = time.perf_counter()
        self._measured_from, self._data_seconds = iteration, 0.0

    @contextlib.contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        torch.cuda.synchronize()
        pause = time.perf_counter() - started
        self._clock += pause
        self._measured_since += pause

    def _report(self) -> bool:
        """Tell the losses since the last report; False where one of them is not finite."""
        losses = torch.stack(self._pending).float()  # waits for the device: the only place that does
        if self.strategy != "tensor":
            losses = self.ranks.mean(losses)
        values = losses.tolist()
        self._pending.clear()
        self.window.values.extend(values)
        count = max(self.iteration - self._measured_from, 1)
        seconds = (time.perf_counter() - self._measured_since) / count
        batch = self.options.global_batch_size
        event = Event(
            iteration=self.iteration - 1,
            train_iter=self.train_iter,
            consumed_samples=self.iteration * batch,
            total_loss=self.window.median(),
            seconds=seconds,
            data_seconds=self._data_seconds / count,
            samples_per_second=batch / seconds,
            lr=self.learning_rate(self.iteration - 1),
            losses=values,
        )
        events.info(event.line())
        if self.ranks.world > 1:
            self._agree_every = max(1, min(self.options.log_period, int(AGREE_SECONDS / self.ranks.largest(seconds))))
        self.metrics.add(event.record())
        return all(map(math.isfinite, values))

    @torch.no_grad()
    def list_graph(self) -> None:
        """Print what one forward pass consists of; every rank takes part in it, rank 0 prints."""
        run = self.model if self.strategy == "ddp" else self.parallel
        compiled = self.model.__dict__.pop("from_embedding", None)
        silent = self.ranks.rank != 0
        write = (lambda line: None) if silent else say
        if self.options.graph_debug >= WHOLE:
            with self.precision():
                list_whole(lambda: run(*self.sample(self.iteration, *self.share)), write)
            self.model.zero_grad()
        else:
            with listed(self.model, self.options.graph_debug, write), self.precision():
                run(*self.sample(self.iteration, *self.share))
        if compiled is not None:
            self.model.from_embedding = compiled

    # --- evaluation ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss over a part of the text that training does not see, in bits per character and per byte."""
        options = self.options.evaluation
        batches = windows(self.corpus, options.split, options.batch_size, options.max_batches)
        if self.strategy == "ddp":  # each rank its own share; the other strategies compute together
            batches = batches[self.ranks.rank :: self.ranks.world]
        nats, characters, size = 0.0, 0.0, 0.0
        self.parallel.eval()
        for window in batches:
            ids = torch.from_numpy(window.astype(np.int64)).to(self.ranks.device)
            with self.precision():
                loss = self.parallel(ids[:, :-1], ids[:, 1:])
            nats += float(loss) * window[:, 1:].size
            characters += window[:, 1:].size
            size += float(self.corpus.bytes_per_id[window[:, 1:]].sum())
        self.parallel.train()
        if self.strategy == "ddp":
            told = torch.tensor([nats, characters, size], dtype=torch.float64, device=self.ranks.device)
            nats, characters, size = (x * self.ranks.world for x in self.ranks.mean(told).tolist())
        found = {
            "valid_loss": nats / characters,
            "bits_per_character": nats / characters / math.log(2),
            "bits_per_byte": nats / size / math.log(2),
        }
        log.info(
            f"Evaluation on {options.split} ({characters:.0f} characters): loss {found['valid_loss']:.4f}, "
            f"{found['bits_per_character']:.4f} bits per character, {found['bits_per_byte']:.4f} bits per byte"
        )
        if hasattr(self, "metrics"):
            self.metrics.add(
                {"iteration": self.iteration - 1, "split": options.split, "characters": round(characters), **found}
            )
        return found

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint that any number of ranks and any strategy can resume from."""
        if self._pending:
            # Between two reports: these losses belong to the window that the next report prints.
            losses = torch.stack(self._pending).float()
            pending = (losses if self.strategy == "tensor" else self.ranks.mean(losses)).tolist()
        else:
            pending = []
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        if self.ranks.rank == 0:
            state = {
                "iteration": self.iteration,
                "model": model,
                "optimizer": optimizer,
                "window": list(self.window.values),
                "pending": pending,
                "trained_seconds": self._spent(),
                "vocab_size": self.corpus.vocab_size,
            }
            path = checkpoint.save(self.folder, state, self.options.checkpoint.keep)
            log.info(f"Saved checkpoint to {path}")

    def resume(self) -> bool:
        """Go on from the newest checkpoint of the output folder; False where there is none."""
        newest = checkpoint.load_latest(self.folder)
        if newest is None:
            log.info(f"No checkpoint in {self.folder}: starting from the beginning")
            return False
        path, state = newest
        self._restore(state, path)
        self.iteration = state["iteration"]
        self.window = Window(self.options.loss_window, state["window"])
        self._pending = [torch.tensor(x, device=self.ranks.device) for x in state["pending"]]
        self.trained_seconds = state["trained_seconds"]
        log.info(f"Resumed from {path} at iteration {self.iteration}")
        return True

    def load_weights(self, path: Path) -> None:
        """Take the weights of a checkpoint, and nothing else."""
        self._restore({**checkpoint.load(path), "optimizer": None}, path)
        log.info(f"Loaded weights from {path}")

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        if state["vocab_size"] != self.corpus.vocab_size:
            raise checkpoint.CheckpointError(
                f"{path} was trained on a vocabulary of {state['vocab_size']}, {self.corpus.name} has "
                f"{self.corpus.vocab_size}: name the text of that run with data.path"
            )
        options = StateDictOptions(full_state_dict=True)
        if state["optimizer"] is None:
            from torch.distributed.checkpoint.state_dict import set_model_state_dict

            set_model_state_dict(self.model, state["model"], options=options)
            return
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )


@contextlib.contextmanager
def _told_of_compiling() -> Iterator[None]:
    """The first step of a compiled model takes long: say so before, and how long it took."""
    started = time.perf_counter()
    graph.info("Start compling the train graph which may take some time. Please wait for a moment ...")
    yield
    torch.cuda.synchronize()
    graph.info(f"building graph Done! Cost time: {time.perf_counter() - started:.2f}s.")


def _avoid_mixed_order_reductions() -> None:
    """torch 2.11 fuses the sums of a layer norm's backward and gives gradients of (1, 1, C) weights as (C,)."""
    from torch._inductor import config

    if hasattr(config.triton, "mix_order_reduction"):
        config.triton.mix_order_reduction = False
