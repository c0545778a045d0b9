"""How much of the work of common models OpAutoCompare compares with its default settings, and what it leaves out.

GPT-2, BERT, Llama and ResNet-50 with the dropout that they come with: alone, under DDP and under FSDP2, two steps each
with AdamW. The models are transformers' where it is installed, else small ones of the same kind.

    python -m benchmarks.coverage                         # tiny ones, on the active device
    python -m benchmarks.coverage --full --low bfloat16   # of real size, for a GPU
    python -m benchmarks.coverage bert --ways fsdp2 --ranks 2
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.programs import Job, trained
from benchmarks.programs.language import GPT, Llama
from benchmarks.programs.parallel import world
from benchmarks.real_models import resnet50

LOWS: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
WAYS = ("alone", "ddp", "fsdp2")
GOAL = 0.99  # of the calls that compute
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
Loss = Callable[[Any], torch.Tensor]


class Encoder(nn.Module):
    """BERT, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, activation="gelu", batch_first=True)
        self.words, self.layers = nn.Embedding(200, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 200)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.words(ids)))
        return logits


def _text(job: Job, name: str, full: bool) -> tuple[nn.Module, Loss, type[nn.Module]]:
    """A language model, its loss and the class of its blocks."""
    batch, length = (4, 512) if full else (2, 24)
    if importlib.util.find_spec("transformers") is None:
        own: nn.Module = {"gpt2": GPT, "bert": Encoder, "llama": Llama}[name]()
        words = job.ints(50, 2, 24)
        lists = [m for m in own.modules() if isinstance(m, nn.ModuleList)]
        block = type(lists[0][0]) if lists else nn.Linear
        return own, lambda net: F.cross_entropy(net(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten()), block
    import transformers as hf

    small = {} if full else {"vocab_size": 200, **SIZES}
    if name == "gpt2":
        small = {} if full else {"vocab_size": 200, "n_embd": 64, "n_layer": 2, "n_head": 4}
        model: Any = hf.GPT2LMHeadModel(hf.GPT2Config(**small))
    elif name == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(**small))
    else:
        width = {"hidden_size": 2048, "num_hidden_layers": 4, "intermediate_size": 5632, "num_attention_heads": 32}
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**(width if full else {**small, "num_key_value_heads": 2})))
    ids = job.ints(200, batch, length)
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    return model.train(), lambda net: net(input_ids=ids, labels=ids).loss, type(blocks[0])


def _images(job: Job, full: bool) -> tuple[nn.Module, Loss, type[nn.Module]]:
    x, labels = job.randn(16 if full else 4, 3, *([224] * 2 if full else [32] * 2)), job.ints(10, 16 if full else 4)
    net = resnet50(tiny=not full)
    block = next(type(m) for m in net.modules() if "Bottleneck" in type(m).__name__)
    return net, lambda net: F.cross_entropy(net(x), labels), block


def watch(name: str, way: str, job: Job, full: bool, steps: int = 2) -> Any:
    """Train a model under the tool, in this process (`watch("bert", "alone", Job("cuda"), False).summary()`)."""
    import op_tools
    from op_tools.watch.sums import LIBRARY

    torch.manual_seed(0)
    LIBRARY.wait()  # what hears sums of gradients is compiled once, in the background
    net, loss, block = _images(job, full) if name == "resnet50" else _text(job, name, full)
    net = job.to(net)
    if way != "alone":
        world()
    if way == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    elif way == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for module in [m for m in net.modules() if isinstance(m, block)]:
            fully_shard(module)
        fully_shard(net)
    step = trained(job, net, lambda: loss(net), clip=1.0)
    with op_tools.OpAutoCompare() as comparison:
        for _ in range(steps):
            step()
    return comparison


def row(comparison: Any) -> tuple[list[str], float, list[str]]:
    """Cells of the table, the share of calls that were compared, and what was not."""
    coverage = comparison._teller.coverage
    work = coverage._work()
    done: list[Counter[str]] = [Counter(), Counter()]  # calls and work
    missed: list[Counter[str]] = [Counter(), Counter()]
    for (calls, seconds), counts in (
        (done, {(key, ""): count for key, count in coverage.compared.items()}.items()),
        (missed, coverage.missed.items()),
    ):
        for (key, reason), count in counts:
            if work[key] is not None:
                calls[f"{key[0]}: {reason}"] += count
                seconds[""] += count * work[key]
    compared, left = sum(done[0].values()), sum(missed[0].values())
    share, of_work = compared / (compared + left), done[1][""] / (done[1][""] + missed[1][""])
    wrong = len(comparison.blames)
    cells = [f"{compared + left:,}", f"{compared:,}", f"{100 * share:.1f} %", f"{100 * of_work:.1f} %", f"{wrong}"]
    return cells, share, [f"{text} ({count})" for text, count in missed[0].most_common()]


def main() -> int:
    """Print the table; exit with 1 where a model is below the goal or something is called wrong."""
    models = ("gpt2", "bert", "llama", "resnet50")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(models)} (default: all)")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"comma-separated, of {', '.join(WAYS)}")
    parser.add_argument("--low", default="float32", choices=LOWS)
    parser.add_argument("--full", action="store_true", help="models of real size")
    parser.add_argument("--ranks", type=int, default=0, help="of ddp and fsdp2 (default: 2 without a GPU, else 1)")
    options = parser.parse_args()
    os.environ["OP_TOOLS_CONSOLE"] = "off"
    if "OP_TOOLS_RESULTS_DIR" not in os.environ:
        os.environ["OP_TOOLS_RESULTS_DIR"] = tempfile.mkdtemp(prefix="coverage-")
    ranks = options.ranks or (1 if torch.cuda.is_available() else 2)
    inner = torch.distributed.is_torchelastic_launched()
    if not torch.cuda.is_available():
        import ditorch  # noqa: F401  makes "cuda" the software accelerator
    if not inner:
        print("| program | calls that compute | compared | of the calls | of the work | wrong | not compared |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | --- |", flush=True)
    failed = False
    names = options.names or models
    for way in options.ways.split(","):
        if way != "alone" and not inner and ranks > 1:
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            again = [*names, "--ways", way, "--low", options.low, *["--full"] * options.full]
            failed |= bool(subprocess.call([sys.executable, *command, "-m", "benchmarks.coverage", *again]))
            continue
        for name in names:
            found = watch(name, way, Job("cuda", LOWS[options.low]), options.full)
            cells, share, left = row(found)
            failed |= share < GOAL or bool(found.blames)
            if not inner or torch.distributed.get_rank() == 0:
                how = f", {way} on {ranks if not inner else torch.distributed.get_world_size()}" * (way != "alone")
                print(f"| {name}{how} | {' | '.join(cells)} | {'; '.join(left) or 'nothing'} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
