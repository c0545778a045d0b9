"""What a collective sends and what it fills, from the arguments of an operator of c10d or of torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call.description import Tensor


class Result(NamedTuple):
    """A tensor that a collective fills, and which of the tensors that each rank sent belong in it."""

    tensor: Any  # None once it has been copied
    sources: Mapping[int, int]  # rank -> which one of those that it sent


class Traffic(NamedTuple):
    """What this rank sends and what it gets; `pieces`: how many tensors each sender sends."""

    sent: Sequence[Tensor]
    results: Sequence[Result]
    pieces: int = 1
    channel: tuple[int, int, int] | None = None  # of a message between two ranks: source, destination, tag


def _shares(tensor: Tensor, size: int) -> list[Tensor]:
    """Equal parts in the order of memory, one for each rank; views, since results appear there later."""
    return list(tensor.view(-1).chunk(size)) if tensor.numel() and tensor.numel() % size == 0 else []


def _split(tensor: Tensor, sizes: Sequence[int], size: int) -> list[Tensor]:
    if sizes:
        return list(tensor.split(list(sizes)))
    return _shares(tensor, size)


def _from_each(tensors: Sequence[Tensor], which: int = 0) -> list[Result]:
    return [Result(tensor, {rank: which}) for rank, tensor in enumerate(tensors)]


def traffic_of(name: str, given: Mapping[str, Any], rank: int, size: int) -> Traffic | None:
    """What an operator of c10d sends and gets; None where that is not known."""
    everyone = range(size)
    if name in ("allreduce_", "allreduce_coalesced_", "reduce_"):
        tensors = given["tensors"]
        if name == "reduce_" and given["root_rank"] != rank:
            return Traffic(tensors, [], len(tensors))
        return Traffic(tensors, [Result(t, dict.fromkeys(everyone, i)) for i, t in enumerate(tensors)], len(tensors))
    if name == "broadcast_":
        (tensor,), root = given["tensors"], given["root_rank"]
        return Traffic([tensor] if root == rank else [], [Result(tensor, {root: 0})])
    if name == "allgather_":
        (tensor,), (gathered,) = given["input_tensors"], given["output_tensors"]
        return Traffic([tensor], _from_each(gathered))
    if name == "_allgather_base_":
        return Traffic([given["input_tensor"]], _from_each(_shares(given["output_tensor"], size)))
    if name == "allgather_coalesced_":
        lists, inputs = given["output_lists"], given["input_list"]
        results = [r for i, gathered in enumerate(lists) for r in _from_each(gathered, i)]
        return Traffic(inputs, results, len(inputs))
    if name == "allgather_into_tensor_coalesced_":
        inputs = given["inputs"]
        results = [r for i, t in enumerate(given["outputs"]) for r in _from_each(_shares(t, size), i)]
        return Traffic(inputs, results, len(inputs))
    if name == "reduce_scatter_":
        (output,), (inputs,) = given["output_tensors"], given["input_tensors"]
        return Traffic(inputs, [Result(output, dict.fromkeys(everyone, rank))], size)
    if name == "_reduce_scatter_base_":
        parts = _shares(given["input_tensor"], size)
        return Traffic(parts, [Result(given["output_tensor"], dict.fromkeys(everyone, rank))], size)
    if name == "reduce_scatter_tensor_coalesced_":
        parts = [part for t in given["inputs"] for part in _shares(t, size)]
        results = [Result(t, dict.fromkeys(everyone, i * size + rank)) for i, t in enumerate(given["outputs"])]
        return Traffic(parts, results, len(parts))
    if name == "alltoall_":
        return Traffic(given["input_tensors"], _from_each(given["output_tensors"], rank), size)
    if name == "alltoall_base_":
        sent = _split(given["input"], given["input_split_sizes"], size)
        received = _split(given["output"], given["output_split_sizes"], size)
        return Traffic(sent, _from_each(received, rank), size)
    if name == "gather_":
        (tensor,) = given["input_tensors"]
        return Traffic([tensor], _from_each(given["output_tensors"][0]) if given["root_rank"] == rank else [])
    if name == "send":
        return Traffic(given["tensors"], [], len(given["tensors"]), (rank, given["dst"], given["tag"]))
    if name == "recv_":
        results = [Result(t, {given["src"]: i}) for i, t in enumerate(given["tensors"])]
        return Traffic([], results, len(results), (given["src"], rank, given["tag"]))
    if name == "scatter_":
        (output,), root = given["output_tensors"], given["root_rank"]
        return Traffic(given["input_tensors"][0] if root == rank else [], [Result(output, {root: rank})], size)
    return None


OPERATORS: Final = {  # of c10d, and the function of torch.distributed that calls it
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}

_PARAMETERS: Final = {  # of functions of torch.distributed, in order
    "all_reduce": "tensor op group async_op",
    "reduce": "tensor dst op group async_op group_dst",
    "broadcast": "tensor src group async_op group_src",
    "all_gather": "outputs tensor group async_op",
    "all_gather_into_tensor": "output input group async_op",
    "reduce_scatter": "output inputs op group async_op",
    "reduce_scatter_tensor": "output input op group async_op",
    "all_to_all": "outputs inputs group async_op",
    "all_to_all_single": "output input output_split_sizes input_split_sizes group async_op",
    "gather": "tensor outputs dst group async_op group_dst",
    "scatter": "tensor inputs src group async_op group_src",
}
_ALIASES: Final = {
    "tensor_list": "outputs", "output_tensor_list": "outputs", "gather_list": "outputs", "output_tensor": "output",
    "input_tensor_list": "inputs", "input_list": "inputs", "scatter_list": "inputs", "input_tensor": "input",
}  # fmt: skip
_NEWER_NAMES: Final = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


class PythonCall(NamedTuple):
    """A call of a function of torch.distributed as the operator of c10d that it stands for."""

    operator: str
    group: Any
    given: dict[str, Any]
    async_op: bool


def python_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PythonCall | None:
    """What a function of torch.distributed of this name is asked to do; None where that is not known."""
    name = _NEWER_NAMES.get(name, name)
    if name not in _PARAMETERS:
        return None
    values: dict[str, Any] = dict(zip(_PARAMETERS[name].split(), args))
    values.update({_ALIASES.get(key, key): value for key, value in kwargs.items()})
    group: Any = values.get("group") or torch.distributed.group.WORLD
    given: dict[str, Any] = {}
    if name in ("reduce", "gather", "broadcast", "scatter"):
        end = "dst" if name in ("reduce", "gather") else "src"
        root = values.get(f"group_{end}")
        given["root_rank"] = torch.distributed.get_group_rank(group, values.get(end) or 0) if root is None else root
    if name in ("all_reduce", "reduce", "broadcast"):
        given["tensors"] = [values["tensor"]]
    elif name in ("all_gather", "gather"):
        given |= {"input_tensors": [values["tensor"]], "output_tensors": [values.get("outputs")]}
    elif name == "scatter":
        given |= {"output_tensors": [values["tensor"]], "input_tensors": [values.get("inputs")]}
    elif name == "reduce_scatter":
        given |= {"output_tensors": [values["output"]], "input_tensors": [values["inputs"]]}
    elif name == "all_to_all":
        given |= {"output_tensors": values["outputs"], "input_tensors": values["inputs"]}
    else:
        given |= {"output": values["output"], "input": values["input"]}
        given |= {"output_tensor": values["output"], "input_tensor": values["input"]}
        given |= {key: values.get(key) or [] for key in ("output_split_sizes", "input_split_sizes")}
    operator = next(key for key, function in OPERATORS.items() if function == name)
    return PythonCall(operator, group, given, bool(values.get("async_op")))
