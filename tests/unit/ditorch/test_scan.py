"""The scanner: finds CUDA calls by meaning, not by text, and survives any input."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditorch.backends import ascend, cpu, cuda, soft
from ditorch.scan import Judge, scan, scan_source

LOAD = "torch.utils.cpp_extension.load of CUDA source"
INLINE = "torch.utils.cpp_extension.load_inline of CUDA source"
ASCEND = Judge(ascend.BACKEND)


def found(source: str, judge: Judge = ASCEND) -> dict[str, str]:
    return {use.name: use.status for use in scan_source(source, "a.py", judge)}


@pytest.mark.parametrize(
    ("source", "name", "status"),
    [
        ("import torch\ntorch.cuda.synchronize()", "torch.cuda.synchronize", "mapped"),
        ("import torch.cuda as tc\ntc.power_draw()", "torch.cuda.power_draw", "unsupported"),
        ("from torch.cuda import Event as E\nE()", "torch.cuda.Event", "mapped"),
        ("from torch import cuda\ncuda.nvtx.range_push('a')", "torch.cuda.nvtx.range_push", "emulated"),
        ("from torch.cuda.amp import autocast", "torch.cuda.amp.autocast", "mapped"),
        ("x.cuda()", ".cuda()", "mapped"),
        ("if x.is_cuda: pass", ".is_cuda", "mapped"),
        ("x.to('cuda')", "to('cuda')", "mapped"),
        ("x.to(f'cuda:{rank}')", "to('cuda:0')", "mapped"),
        ("f(device='cuda:1')", "device='cuda:1'", "mapped"),
        ("f(device='cuda' if ok else 'cpu')", "device='cuda'", "mapped"),
        ("d.type == 'cuda'", "== 'cuda'", "mapped"),
        ("dist.init_process_group('nccl')", "'nccl'", "mapped"),
        ("dist.init_process_group(backend='cpu:gloo,cuda:nccl')", "'nccl'", "mapped"),
        ("import torch\ntorch.backends.cudnn.benchmark = True", "torch.backends.cudnn.benchmark", "hint"),
        ("import torch\ntorch.cuda.FloatTensor(3)", "torch.cuda.FloatTensor", "mapped"),
        ("import torch\ntorch.cuda.CUDAGraph()", "torch.cuda.CUDAGraph", "mapped"),
        ("import triton", "triton", "unsupported"),
        ("from flash_attn import flash_attn_func", "flash_attn", "unsupported"),
        ("os.environ['CUDA_VISIBLE_DEVICES']", "CUDA_VISIBLE_DEVICES", "mapped"),
        ("try:\n    import triton\nexcept ImportError:\n    triton = None", "triton", "optional"),
        ("def f():\n    import triton", "triton", "depends"),
        ("from torch.utils.cpp_extension import load\nload('a', sources=['a.cpp', 'a.cu'])", LOAD, "unsupported"),
        ("import torch.utils.cpp_extension as e\ne.load_inline('a', cuda_sources=s)", INLINE, "unsupported"),
        ("import torch\ntorch.nn.SyncBatchNorm.convert_sync_batchnorm(m)", "torch.nn.SyncBatchNorm", "depends"),
        ("import torch\ntorch.mm(a, b, out_dtype=torch.float32)", "mm(out_dtype=)", "depends"),
        ("import torch.distributed.rpc as rpc", "torch.distributed.rpc", "depends"),
        ("from torch.distributed.tensor import DTensor", "torch.distributed.tensor", "depends"),
        ("import torch.multiprocessing as mp", "torch.multiprocessing", "depends"),
        ("from torch.cuda.graphs import graph_pool_handle", "torch.cuda.graphs.graph_pool_handle", "mapped"),
    ],
)
def test_use_is_found_with_its_status(source: str, name: str, status: str) -> None:
    assert found(source)[name] == status


MAIN = "if __name__ == '__main__':\n    "


@pytest.mark.parametrize(
    ("source", "status"),
    [
        (f"{MAIN}import triton", "unsupported"),
        (f"def main():\n    import triton\n{MAIN}main()", "unsupported"),
        (f"def work(rank):\n    import triton\n{MAIN}spawn(work, nprocs=2)", "unsupported"),
        (f"def a():\n    import triton\ndef main():\n    a()\n{MAIN}main()", "unsupported"),
        (f"def main():\n    if fast:\n        import triton\n{MAIN}main()", "depends"),
        (f"def other():\n    import triton\n{MAIN}main()", "depends"),
        ("if fast:\n    import triton", "depends"),
    ],
)
def test_what_a_script_runs_for_certain(source: str, status: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(source)
    (use,) = scan(tmp_path / "train.py", ascend.BACKEND).uses
    assert use.status == status
    (tmp_path / "train.py").write_text(source.replace("triton", "model"))
    (tmp_path / "model.py").write_text("import triton")
    followed = scan(tmp_path / "train.py", ascend.BACKEND).uses
    assert bool(followed) == (status == "unsupported")


def test_cuda_source_in_a_variable() -> None:
    load = "from torch.utils.cpp_extension import load\nfiles = ['a.cpp', 'a.cu']\nload('a', sources=files)"
    assert found(load)[LOAD] == "unsupported"
    assert LOAD not in found(load.replace("'a.cu'", "'b.cpp'"))


def test_graphs_are_emulated_only_where_the_vendor_has_none() -> None:
    source = "import torch\nwith torch.cuda.graph(torch.cuda.CUDAGraph()): pass"
    assert set(found(source).values()) == {"mapped"}
    assert set(found(source, Judge(soft.BACKEND)).values()) == {"emulated"}


def test_lines_are_exact(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch\n\n\ntorch.cuda.empty_cache()\n")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "b.py").write_text("x.cuda()")
    result = scan(tmp_path, ascend.BACKEND)
    assert [(Path(use.file).name, use.line) for use in result.uses] == [("a.py", 4)]
    assert result.as_dict()["counts"] == {"mapped": 1}


def test_code_that_does_not_run_is_no_use() -> None:
    assert found("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import triton") == {}
    cpp = "from torch.utils.cpp_extension import load\nload('a', sources=['a.cpp'])"
    assert found(cpp) == {}


def test_a_script_is_followed_into_its_own_modules(tmp_path: Path) -> None:
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "train.py").write_text(
        "import os, helper\nfrom package.inner import kernel\ntry:\n    import other\nexcept: 0\n"
    )
    (tmp_path / "helper.py").write_text("x.cuda()\n")
    (tmp_path / "other.py").write_text("import triton\n")
    (tmp_path / "package" / "inner" / "__init__.py").write_text("from .. import deep\n")
    (tmp_path / "package" / "inner" / "kernel.py").write_text("import triton\n")
    (tmp_path / "package" / "deep.py").write_text("import cupy\n")
    (tmp_path / "unrelated.py").write_text("import pycuda\n")
    result = scan(tmp_path / "train.py", ascend.BACKEND)
    assert {use.name for use in result.uses} == {".cuda()", "triton", "cupy"}
    assert {use.name for use in result.failing()} == {"triton", "cupy"}
    assert result.files == 5


def test_cuda_source_in_a_folder_will_fail(tmp_path: Path) -> None:
    (tmp_path / "kernel.cu").write_text("__global__ void f() {}")
    assert str(scan(tmp_path, ascend.BACKEND).failing()[0]).startswith(
        f"{tmp_path}/kernel.cu:1: CUDA source: unsupported"
    )
    assert not scan(tmp_path, cuda.BACKEND).failing()


def test_text_that_only_mentions_cuda_is_no_use() -> None:
    assert found("'''cuda'''\nname = 'cuda is nice'\nopen('cuda')\nlog('cuda')\nself.torch.cuda") == {}


def test_cuda_itself_supports_everything() -> None:
    statuses = found("import torch, triton\ntorch.cuda.power_draw()\ntorch.cuda.CUDAGraph()", Judge(cuda.BACKEND))
    assert set(statuses.values()) == {"mapped"}


def test_unsupported_use_says_what_to_do_instead() -> None:
    (use,) = scan_source("import torch\ntorch.cuda.nccl.unique_id()", "a.py", Judge(cpu.BACKEND))
    assert (use.status, use.note) == ("unsupported", "torch.distributed.init_process_group")


def test_missing_path_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        scan(tmp_path / "nothing", ascend.BACKEND)


@given(st.one_of(st.text(), st.binary()))
def test_any_input_gives_an_answer(source: str | bytes) -> None:
    for use in scan_source(source, "a.py", ASCEND):
        assert use.status in ("mapped", "emulated", "hint", "unsupported", "optional", "depends", "unreadable")
        assert use.line >= 1


def test_a_kernel_compiled_from_text_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nkernel = torch.cuda._compile_kernel('__global__ void f() {}', 'f')\n")
    assert [use.name for use in scan(script, soft.BACKEND).failing()] == ["torch.cuda._compile_kernel"]
