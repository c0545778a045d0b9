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
WARM_UP = {"warmup_factor": 0.001, "warmup_method": "linear"}

# Arguments of the calls that a config may write down, and their defaults.
TARGETS: dict[str, dict[str, Any]] = {
    GPT: {"vocab_size": None, "ctx_len": 1024, "model_type": "RWKV", "n_layer": 6, "n_embd": 1024},
    DATASET: {"data_dir": None, "ctx_len": 1024, "epoch_length_fixed": None},
    LOADER: {"dataset": [], "num_workers": 4},
    PARAMS: {},
    "oneflow.optim.Adam": {"params": None, "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "oneflow.optim.AdamW": {"params": None, "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "oneflow.optim.SGD": {"params": None, "lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "oneflow.optim.lr_scheduler.StepLR": {"step_size": None, "gamma": 0.1},
    "oneflow.optim.lr_scheduler.ExponentialLR": {"gamma": None},
    "libai.scheduler.WarmupStepLR": {"step_size": None, "gamma": 0.1, **WARM_UP},
    "libai.scheduler.WarmupExponentialLR": {"gamma": None, **WARM_UP},
    "libai.scheduler.WarmupCosineLR": {"alpha": 0.0, **WARM_UP},
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
            "warmup_ratio": 0,
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
    "train": COMMON["common/train.py"]["train"],
    "graph": COMMON["common/models/graph.py"]["graph"],
    "model": {TARGET: GPT},
    "optim": {TARGET: "oneflow.optim.Adam"},
    "dataloader": {"train": {TARGET: LOADER}},
    "test": {"enable": False, "weight_style": "pytorch", "path": None},
}
REQUIRED = ("model", "optim", "train", "dataloader")

# Options without a counterpart here: where data is put, how OneFlow builds its graph and talks between ranks.
MEANINGLESS = (
    r"graph\.(debug|auto_parallel\..*)|dataloader\.train\.num_workers|optim\.params\..*|test\.(weight_style|path)"
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
    own = get_config("configs/enwik8.py")
    tree = _completed(sections, reader, own)
    source = Config(tree)
    source.override(options)
    tree = source.plain()
    made = Config(_translated(tree, own, world))
    made.source = source
    given = [*reader.assigned, *(option.partition("=")[0] for option in options)]
    set_here = [key for key, _ in leaves(tree) if any(key == g or key.startswith((f"{g}.", f"{g}[")) for g in given)]
    ignored = [key for key in set_here if re.fullmatch(MEANINGLESS, key) and not key.endswith(TARGET)]
    if ignored:
        made.notes.append(f"Options without a meaning here, ignored: {', '.join(ignored)}")
    asked, used = _data(tree)["data_dir"], made.data.path
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
        """Options that the file sets, with their line."""

    def run(self) -> None:
        try:
            tree = ast.parse(self.path.read_text(encoding="utf-8"))
        except SyntaxError as error:
            raise ConfigError(f"{self.path}, line {error.lineno}: {error.msg}") from None
        for statement in tree.body:
            self.statement(statement)

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


def _completed(sections: dict[str, Any], reader: _Reader, own: dict[str, Any]) -> dict[str, Any]:
    """Every option with its default: those of LiBai, and beside them those that this trainer adds."""
    schema = copy.deepcopy(SECTIONS)
    for name in ("stop_after", "max_seconds", "loss_window", "deterministic", "compile", "compile_mode"):
        schema["train"][name] = own["train"][name]
    more = {
        GPT: {"head_qk": 256, "causal_copy": True, "init": "rwkv", "logit_pull": 0.0},
        DATASET: {"same_slice": False, "held_out": None},
    }

    def completed(value: Any, known: Any, key: str) -> Any:
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            return [completed(item, {}, f"{key}[{i}]") for i, item in enumerate(value)]
        if not isinstance(value, dict):
            if isinstance(known, dict) and known:
                raise ConfigError(f"{_place(key)}: expected {', '.join(known)} below it, got {value!r}")
            return value
        if TARGET in value:
            known = {**TARGETS[value[TARGET]], **more.get(value[TARGET], {}), TARGET: value[TARGET]}
        unknown = [name for name in value if name not in known]
        if unknown:
            wrong = f"{key}.{unknown[0]}" if key else unknown[0]
            raise ConfigError(
                f"{_place(wrong)} is not an option{_nearest(wrong, [f'{key}.{k}'.strip('.') for k in known])}"
            )
        return {
            name: completed(value.get(name, default), default, f"{key}.{name}".strip("."))
            for name, default in known.items()
        }

    def _place(key: str) -> str:
        lines = [
            line for name, line in reader.assigned.items() if key == name or key.startswith((f"{name}.", f"{name}["))
        ]
        return f"{reader.path}{f', line {lines[-1]}' if lines else ''}: {key!r}"

    return completed(sections, schema, "")


def _data(tree: dict[str, Any]) -> dict[str, Any]:
    datasets = tree["dataloader"]["train"]["dataset"]
    if len(datasets) != 1 or datasets[0].get(TARGET) != DATASET:
        raise ConfigError(f"dataloader.train.dataset: expected one {DATASET}")
    return datasets[0]


# --- translating ------------------------------------------------------------------------------------------------------


def _translated(tree: dict[str, Any], own: dict[str, Any], world: int) -> dict[str, Any]:
    """The same run under this trainer's own names."""
    values = dict(leaves(tree))
    for key, only in ONLY.items():
        if values[key] != only:
            raise ConfigError(f"{key}={values[key]!r}: this trainer knows {only!r} only")
    train, model, optim, data = tree["train"], tree["model"], tree["optim"], _data(tree)
    tensor = train["dist"]["tensor_parallel_size"]
    if tensor not in (1, world):
        raise ConfigError(f"train.dist.tensor_parallel_size={tensor} on {world} ranks: expected 1 or {world}")
    replicas = world // tensor
    batch = train["train_micro_batch_size"] * replicas * (train["num_accumulation_steps"] or 1)
    evaluation = train["evaluation"]
    if data["ctx_len"] > model["ctx_len"]:
        raise ConfigError(f"dataset[0].ctx_len={data['ctx_len']} does not fit into model.ctx_len={model['ctx_len']}")
    path = data["data_dir"]
    if path and Path(path).stem == "enwik8" and not Path(path).expanduser().is_file():
        path = str(find_corpus() or path)  # the same text may lie elsewhere on this machine
    held_out = data["held_out"]
    same = (
        "output_dir",
        "seed",
        "train_iter",
        "train_epoch",
        "warmup_ratio",
        "log_period",
        "stop_after",
        "max_seconds",
    )
    same += ("loss_window", "deterministic", "compile_mode")
    scheduler = {**train["scheduler"], "name": train["scheduler"][TARGET].rpartition(".")[2]}
    del scheduler[TARGET]
    return {
        "model": {
            **own["model"],
            **{k: model[k] for k in ("vocab_size", "ctx_len", "n_layer", "n_embd")},
            **{k: model[k] for k in ("head_qk", "causal_copy", "init", "logit_pull")},
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
            TARGET: optim[TARGET].replace("oneflow", "torch"),
            "lr": "${train.lr}",
        },
        "train": {
            **own["train"],
            **{k: train[k] for k in same},
            "ctx_len": data["ctx_len"],
            "global_batch_size": train["global_batch_size"] or batch,
            "lr": optim["lr"],
            "final_lr": None,
            "scheduler": scheduler,
            "amp": "bf16" if train["amp"]["enabled"] else None,
            "compile": train["compile"] if tree["graph"]["enabled"] else False,
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
