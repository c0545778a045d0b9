"""Config files in the notation of the training log (LiBai on OneFlow), read without running them.

Such a file is Python: imports, assignments, ``LazyCall(f)(...)``, ``get_config("common/train.py").train``. It is parsed
and never executed; what it imports stays a name. A name that ``TARGETS`` and the reader do not know is an error, and so
is an option that does not exist. Options that mean nothing on PyTorch are accepted and listed once.
"""

from __future__ import annotations

import ast
import copy
import difflib
import operator
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import TARGET, Config, ConfigError, get_config, leaves
from .data import find_corpus

GPT = "projects.RWKV_v4.modeling.model.GPT"
DATASET = "projects.RWKV_v4.dataset.RWKVDataset"
LOADER = "libai.data.build.build_nlp_train_loader"
PARAMS = "projects.RWKV_v4.utils.config_optimizer.get_RWKV_v4_config_optim"
ADAM = {"params": {TARGET: PARAMS}, "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
WARM_UP = {"warmup_factor": 0.001, "warmup_method": "linear"}

# The calls that a config may write down, with their arguments and defaults; the last ones are this trainer's own.
TARGETS: dict[str, dict[str, Any]] = {
    GPT: {
        "vocab_size": None,
        "ctx_len": 1024,
        "model_type": "RWKV",
        "n_layer": 6,
        "n_embd": 1024,
        "head_qk": 256,
        "causal_copy": True,
        "init": "rwkv",
        "logit_pull": 0.0,
    },
    DATASET: {"data_dir": None, "ctx_len": 1024, "epoch_length_fixed": None, "same_slice": False, "held_out": None},
    LOADER: {"dataset": [], "num_workers": 4},
    PARAMS: {},
    "oneflow.optim.Adam": ADAM,
    "oneflow.optim.AdamW": ADAM,
    "oneflow.optim.SGD": {"params": {TARGET: PARAMS}, "lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "oneflow.optim.lr_scheduler.StepLR": {"step_size": 0, "gamma": 0.1},
    "oneflow.optim.lr_scheduler.ExponentialLR": {"gamma": 1.0},
    "libai.scheduler.WarmupStepLR": {"step_size": 0, "gamma": 0.1, **WARM_UP},
    "libai.scheduler.WarmupExponentialLR": {"gamma": 1.0, **WARM_UP},
    "libai.scheduler.WarmupCosineLR": {"alpha": 0.0, **WARM_UP},
}
OPTIMIZERS = {f"oneflow.optim.{name}": f"torch.optim.{name}" for name in ("Adam", "AdamW", "SGD")}
# Where they may stand.
ALLOWED = {
    "model": [GPT],
    "optim": list(OPTIMIZERS),
    "optim.params": [PARAMS],
    "train.scheduler": [name for name in TARGETS if name.endswith("LR")],
    "dataloader.train": [LOADER],
    "dataloader.train.dataset[0]": [DATASET],
}
OWN_TRAIN = {
    "stop_after": None,
    "max_seconds": None,
    "loss_window": 20,
    "deterministic": False,
    "compile": None,
    "compile_mode": "default",
}

# What get_config() answers: the names and the defaults of LiBai's own files.
COMMON: dict[str, dict[str, Any]] = {
    "common/train.py": {
        "train": {
            "output_dir": "./output",
            "train_micro_batch_size": 32,
            "global_batch_size": None,
            "num_accumulation_steps": None,
            "train_iter": 10000,
            "train_epoch": 0,
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
            "train_samples": None,
            "warmup_ratio": 0.0,
            "start_iter": 0,
            "amp": {"enabled": False},
            "activation_checkpoint": {"enabled": False},
            "nccl_fusion_threshold_mb": 16,
            "nccl_fusion_max_ops": 24,
            "zero_optimization": {"enabled": False, "stage": 1},
            "checkpointer": {"period": 5000, "max_to_keep": 100, "save_model_after_n_epoch": None},
            "test_micro_batch_size": 32,
            "evaluation": {
                "enabled": True,
                "evaluator": None,
                "eval_period": 5000,
                "eval_after_n_epoch": None,
                "eval_iter": 100000,
                "eval_metric": "Acc@1",
                "eval_mode": "max",
            },
            "load_weight": "",
            "log_period": 20,
            "scheduler": {TARGET: "libai.scheduler.WarmupCosineLR", "alpha": 0.01},
            "dist": {
                "data_parallel_size": 1,
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "pipeline_num_layers": None,
                "custom_pipeline_stage_id": None,
            },
            "input_placement_device": "cuda",
            "rdma_enabled": True,
            "seed": 1234,
        }
    },
    "common/models/graph.py": {"graph": {"enabled": True, "debug": -1, "auto_parallel": {"enabled": False}}},
}
SECTIONS: dict[str, dict[str, Any]] = {
    "train": {**COMMON["common/train.py"]["train"], **OWN_TRAIN},
    "graph": COMMON["common/models/graph.py"]["graph"],
    "model": {TARGET: GPT},
    "optim": {TARGET: "oneflow.optim.Adam"},
    "dataloader": {"train": {TARGET: LOADER}},
    "test": {"enable": False, "weight_style": "pytorch", "path": None},
}
REQUIRED = ("model", "optim", "train", "dataloader")

# Options without a counterpart here: where data is put, how OneFlow builds its graph and talks between ranks.
MEANINGLESS = (
    r"graph\.auto_parallel\..*|dataloader\.train\.num_workers|test\.(weight_style|path)"
    r"|train\.(input_placement_device|rdma_enabled|nccl_.*|consumed_.*|zero_optimization\.stage)"
    r"|train\.dist\.(data_parallel_size|pipeline_num_layers|custom_pipeline_stage_id)"
    r"|train\.evaluation\.(evaluator|eval_metric|eval_mode)(\..*)?"
)
# Options that are obeyed at one value only.
ONLY: dict[str, Any] = {
    "model.model_type": "RWKV",
    "graph.auto_parallel.enabled": False,
    "test.enable": False,
    "train.activation_checkpoint.enabled": False,
    "train.checkpointer.save_model_after_n_epoch": None,
    "train.dist.pipeline_parallel_size": 1,
    "train.evaluation.eval_after_n_epoch": None,
    "train.start_iter": 0,
    "train.train_samples": None,
}


def recognises(text: str) -> bool:
    """Whether a config file is in this notation: it imports LiBai or OneFlow.

    >>> recognises("import oneflow as flow"), recognises("import torch")
    (True, False)
    """
    return re.search(r"^\s*(from|import)\s+(libai|oneflow)\b", text, re.MULTILINE) is not None


def load(path: Path, options: list[str], world: int) -> Config:
    """The configuration of a run on ``world`` ranks; ``options`` override values under the names of the file."""
    reader = _Reader(path)
    reader.run()
    sections = {name: value for name, value in reader.names.items() if isinstance(value, dict)}
    if missing := [name for name in REQUIRED if name not in sections]:
        raise ConfigError(f"{path} defines no {' and no '.join(missing)}")
    source = Config(_completed(sections, SECTIONS, "", reader))
    source.override(options)
    reader.assigned |= {option.partition("=")[0]: 0 for option in options}
    tree = _completed(source.plain(), SECTIONS, "", reader)
    made = Config(_translated(tree, world))
    made.source = source
    ignored = [key for key, _ in leaves(tree) if re.fullmatch(MEANINGLESS, key) and reader.sets(key) is not None]
    if ignored:
        made.notes.append(f"Options without a meaning here, ignored: {', '.join(ignored)}")
    asked, used = tree["dataloader"]["train"]["dataset"][0]["data_dir"], made.data.path
    if asked != used:
        made.notes.append(f"No text at {asked}: using {used}")
    return made


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Imported:
    """Something that the file imports, by its full name; ``lazy`` after LazyCall()."""

    name: str
    lazy: bool = False


class _Reader:
    """Evaluates the few forms of Python that a config consists of."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: dict[str, Any] = {"dict": _Imported("dict")}
        self.assigned: dict[str, int] = {}
        """Options that are set, with their line in the file; 0 for the command line."""

    def run(self) -> None:
        try:
            tree = ast.parse(self.path.read_text(encoding="utf-8"))
        except SyntaxError as error:
            raise ConfigError(f"{self.path}, line {error.lineno}: {error.msg}") from None
        for statement in tree.body:
            self.statement(statement)

    def sets(self, key: str) -> int | None:
        """The line that sets an option, or a part of the configuration that holds it; None where nothing does."""
        lines = [line for k, line in self.assigned.items() if key == k or key.startswith((f"{k}.", f"{k}["))]
        return lines[-1] if lines else None

    def place(self, key: str) -> str:
        line = self.sets(key)
        return f"{self.path}, line {line}: {key!r}" if line else f"{key!r}"

    def fail(self, node: ast.AST, message: str) -> ConfigError:
        return ConfigError(f"{self.path}, line {getattr(node, 'lineno', '?')}: {message}")

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                self.names[alias.asname or name] = _Imported(name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                self.names[alias.asname or alias.name] = _Imported(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Assign):
            value = self.value(node.value)
            for target in node.targets:
                self.assign(target, value)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # a docstring
            text = ast.unparse(node).splitlines()[0]
            raise self.fail(node, f"{text!r} is not read: a config of this kind has imports and assignments only")

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Attribute) and isinstance(place := self.value(target.value), dict):
            place[target.attr] = value
            self.assigned[ast.unparse(target)] = target.lineno
            return
        else:
            raise self.fail(target, f"nothing can be assigned to {ast.unparse(target)!r}")
        # get_config() brings defaults that the file does not set.
        if isinstance(value, dict) and not any(value == v for c in COMMON.values() for v in c.values()):
            self.assigned[ast.unparse(target)] = target.lineno

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            return {key.value: self.value(v) for key, v in zip(node.keys, node.values) if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Name) and node.id in self.names:
            return self.names[node.id]
        if isinstance(node, ast.Attribute):
            return self.attribute(node, self.value(node.value))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self.number(node, operator.neg, node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            return self.number(node, ARITHMETIC[type(node.op)], node.left, node.right)
        if isinstance(node, ast.Call):
            return self.call(node)
        raise self.fail(node, f"{ast.unparse(node)!r} is not read: it is no constant, list, LazyCall or known name")

    def number(self, node: ast.expr, compute: Any, *operands: ast.expr) -> Any:
        values = [self.value(operand) for operand in operands]
        try:
            if all(isinstance(value, (int, float)) for value in values):
                return compute(*values)
        except ArithmeticError:
            pass
        raise self.fail(node, f"{ast.unparse(node)!r} is no number")

    def attribute(self, node: ast.Attribute, base: Any) -> Any:
        if isinstance(base, _Imported) and not base.lazy:
            return _Imported(f"{base.name}.{node.attr}")
        if isinstance(base, dict) and node.attr in base:
            return base[node.attr]
        among = base if isinstance(base, dict) else {}
        raise self.fail(node, f"there is no {ast.unparse(node)!r}{_nearest(node.attr, among)}")

    def call(self, node: ast.Call) -> Any:
        function = self.value(node.func)
        positional = [self.value(argument) for argument in node.args]
        if any(keyword.arg is None for keyword in node.keywords):
            raise self.fail(node, "arguments of the form **x are not read")
        named = {str(keyword.arg): self.value(keyword.value) for keyword in node.keywords}
        if isinstance(function, _Imported) and function.lazy and not positional:
            return {TARGET: function.name, **named}
        match getattr(function, "name", None), positional:
            case "libai.config.LazyCall", [_Imported(name=name)] if not named:
                if name not in TARGETS:
                    raise self.fail(node, f"{name} has no counterpart here{_nearest(name, TARGETS)}")
                return _Imported(name, lazy=True)
            case "libai.config.get_config", [str(path)] if not named:
                if path not in COMMON:
                    raise self.fail(node, f"get_config({path!r}): known are {', '.join(COMMON)}")
                return copy.deepcopy(COMMON[path])
            case "omegaconf.OmegaConf.create" | "omegaconf.DictConfig" | "dict", ([] | [dict()]) as given:
                return {**copy.deepcopy(given[0] if given else {}), **named}
        raise self.fail(node, f"{ast.unparse(node.func)}() is not called: known are LazyCall, get_config and OmegaConf")


ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def _nearest(name: str, among: Any) -> str:
    near = difflib.get_close_matches(name, among, n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""


# --- checking ---------------------------------------------------------------------------------------------------------


def _completed(value: Any, known: Any, key: str, where: _Reader) -> Any:
    """A value with all of its options: those that are missing get their defaults, one that is unknown is an error."""
    if key in ALLOWED:
        target = value.get(TARGET) if isinstance(value, dict) else None
        if target not in ALLOWED[key]:
            raise ConfigError(f"{where.place(key)}: expected LazyCall of {' or '.join(ALLOWED[key])}")
        known = {TARGET: target, **TARGETS[target]}
    if isinstance(known, dict) and isinstance(value, dict):
        for name in value:
            if name not in known:
                wrong, right = _below(key, name), [_below(key, k) for k in known]
                raise ConfigError(f"{where.place(wrong)} is not an option{_nearest(wrong, right)}")
        return {k: _completed(value.get(k, default), default, _below(key, k), where) for k, default in known.items()}
    if key == "dataloader.train.dataset":
        if not (isinstance(value, list) and len(value) == 1):
            raise ConfigError(f"{where.place(key)}: expected a list of one data set")
        return [_completed(value[0], {}, f"{key}[0]", where)]
    if known is None or (value is None and isinstance(known, str)):
        return value
    if isinstance(value, float) and type(known) is int and value.is_integer():  # 1e5
        value = int(value)
    elif isinstance(known, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(known):
        raise ConfigError(f"{where.place(key)}: expected a value like {known!r}, got {value!r}")
    return value


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


# --- translating ------------------------------------------------------------------------------------------------------


def _translated(tree: dict[str, Any], world: int) -> dict[str, Any]:
    """The same run under this trainer's own names."""
    own = get_config("configs/enwik8.py")
    values = dict(leaves(tree))
    for key, only in ONLY.items():
        if values[key] != only:
            raise ConfigError(f"{key}={values[key]!r}: this trainer knows {only!r} only")
    train, model, optim = tree["train"], tree["model"], tree["optim"]
    data = tree["dataloader"]["train"]["dataset"][0]
    tensor = train["dist"]["tensor_parallel_size"]
    if tensor not in (1, world):
        raise ConfigError(f"train.dist.tensor_parallel_size={tensor} on {world} ranks: expected 1 or {world}")
    # Accumulating gradients gives those of the whole batch at once: the sizes multiply.
    batch = train["train_micro_batch_size"] * (world // tensor) * (train["num_accumulation_steps"] or 1)
    batch = train["global_batch_size"] or batch
    if batch < 1:
        raise ConfigError(f"train.train_micro_batch_size={train['train_micro_batch_size']}: expected 1 or more")
    evaluation = train["evaluation"]
    if data["ctx_len"] > model["ctx_len"]:
        raise ConfigError(f"dataset[0].ctx_len={data['ctx_len']} does not fit into model.ctx_len={model['ctx_len']}")
    path = data["data_dir"]
    if path and Path(path).stem == "enwik8" and not Path(path).expanduser().is_file():
        path = str(find_corpus() or path)  # the same text may lie elsewhere on this machine
    held_out = data["held_out"]
    same = (*OWN_TRAIN, "output_dir", "seed", "train_iter", "train_epoch", "warmup_ratio", "log_period")
    scheduler = {**train["scheduler"], "name": train["scheduler"][TARGET].rpartition(".")[2]}
    del scheduler[TARGET]
    return {
        "model": {
            **own["model"],
            **{k: v for k, v in model.items() if k not in (TARGET, "model_type")},
        },
        "data": {
            **own["data"],
            "path": path,
            "ctx_len": data["ctx_len"],
            "same_slice": data["same_slice"],
            "epoch_length": data["epoch_length_fixed"],
            # Without evaluation, all of the text is for training, as in the log.
            "held_out": (0.05 if evaluation["enabled"] else 0.0) if held_out is None else held_out,
        },
        "optim": {
            **{k: v for k, v in optim.items() if k not in ("params", TARGET)},
            TARGET: OPTIMIZERS[optim[TARGET]],
            "lr": "${train.lr}",
        },
        "train": {
            **own["train"],
            **{k: train[k] for k in same},
            "ctx_len": data["ctx_len"],
            "global_batch_size": batch,
            "lr": optim["lr"],
            "final_lr": None,
            "scheduler": scheduler,
            "amp": "bf16" if train["amp"]["enabled"] else None,
            "compile": train["compile"] if tree["graph"]["enabled"] else False,
            "graph_debug": tree["graph"]["debug"],
            "load_weight": train["load_weight"] or None,
            "checkpoint": {"period": train["checkpointer"]["period"], "keep": train["checkpointer"]["max_to_keep"]},
            "evaluation": {
                "period": evaluation["eval_period"] if evaluation["enabled"] else 0,
                "split": "valid",
                "batch_size": train["test_micro_batch_size"],
                "max_batches": int(evaluation["eval_iter"]),
                "at_end": bool(evaluation["enabled"]),
            },
            "dist": {"strategy": _strategy(tensor, train["zero_optimization"]["enabled"], world)},
        },
    }


def _strategy(tensor: int, zero: bool, world: int) -> str:
    if tensor > 1:
        return "tensor"
    return "fsdp" if zero and world > 1 else "ddp"
