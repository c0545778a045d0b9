"""What each public name of ``torch.cuda`` becomes: the one table behind redirect, doctor and scan."""

from __future__ import annotations

from typing import Any

from ditorch.backend import Backend

# PyTorch's own code for these is made of other torch.cuda calls, so it works once those do.
COMPOSED = frozenset(
    {
        "get_rng_state_all",
        "set_rng_state_all",
        "memory_summary",
        "reset_max_memory_allocated",
        "reset_max_memory_cached",
        "memory_cached",
        "max_memory_cached",
        "device",
        "device_of",
        "nvtx.range",
        "profiler.profile",
        "amp.autocast",
        "amp.GradScaler",
        "amp.custom_fwd",
        "amp.custom_bwd",
        "amp.common.amp_definitely_not_available",
        "OutOfMemoryError",
        "AcceleratorError",
        "CudaError",
        "DeferredCudaCallError",
        "comm.broadcast",
        "comm.broadcast_coalesced",
        "comm.reduce_add",
        "comm.reduce_add_coalesced",
        "comm.scatter",
        "comm.gather",
        "cudaStatus",
        "has_half",
        "make_graphed_callables",
    }
)

# Accepted and without effect on results: the reason is what `ditorch.patches()` shows.
HINTS = {
    "caching_allocator_enable": "the backend's allocator stays as it is",
    "set_sync_debug_mode": "the backend does not report synchronizing calls",
    "ipc_collect": "there is no CUDA IPC memory to collect",
    "set_per_process_memory_fraction": "the backend's allocator has no limit per process",
    "reset_accumulated_memory_stats": "the backend keeps no accumulated statistics",
    "reset_accumulated_host_memory_stats": "the backend keeps no statistics of pinned memory",
    "reset_peak_host_memory_stats": "the backend keeps no statistics of pinned memory",
    "reset_peak_memory_stats": "the backend keeps no peak statistics",
    "profiler.start": "there is no CUDA profiler to start; use torch.profiler",
    "profiler.stop": "there is no CUDA profiler to stop; use torch.profiler",
    "MemPool": "memory comes from the backend's own pool",
    "use_mem_pool": "memory comes from the backend's own pool",
    "memory._record_memory_history": "the backend keeps no allocation history",
    "tunable.enable": "there is no cuBLAS to tune",
    "tunable.tuning_enable": "there is no cuBLAS to tune",
}

# Flags outside torch.cuda that PyTorch itself accepts everywhere and that only steer CUDA libraries.
LIBRARY_HINTS = {
    "torch.backends.cudnn.benchmark": "chooses cuDNN algorithms; there is no cuDNN here",
    "torch.backends.cudnn.deterministic": "chooses cuDNN algorithms; there is no cuDNN here",
    "torch.backends.cudnn.enabled": "switches cuDNN; there is no cuDNN here",
    "torch.backends.cudnn.allow_tf32": "allows TF32 in cuDNN; there is no cuDNN here",
    "torch.backends.cuda.matmul.allow_tf32": "allows TF32 in cuBLAS; there is no cuBLAS here",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": "steers cuBLAS",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": "steers cuBLAS",
    "torch.backends.cuda.enable_flash_sdp": "chooses CUDA attention kernels",
    "torch.backends.cuda.enable_mem_efficient_sdp": "chooses CUDA attention kernels",
    "torch.backends.cuda.enable_math_sdp": "chooses CUDA attention kernels",
    "torch.backends.cuda.sdp_kernel": "chooses CUDA attention kernels",
    "torch.backends.cuda.preferred_linalg_library": "chooses a CUDA linear algebra library",
}

# What to do instead, for calls that have no meaning away from CUDA.
INSTEAD = {
    "utilization": "the vendor's monitoring command",
    "temperature": "the vendor's monitoring command",
    "power_draw": "the vendor's monitoring command",
    "clock_rate": "the vendor's monitoring command",
    "memory_usage": "the vendor's monitoring command",
    "device_memory_used": "torch.cuda.mem_get_info()",
    "list_gpu_processes": "the vendor's monitoring command",
    "CUDAPluggableAllocator": "the backend's own allocator",
    "change_current_allocator": "the backend's own allocator",
    "caching_allocator_alloc": "torch.empty(n, dtype=torch.uint8, device='cuda')",
    "caching_allocator_delete": "drop the tensor",
    "caching_allocator_disabled": "the backend's own allocator",
    "current_blas_handle": "the vendor's library",
    "current_solver_handle": "the vendor's library",
    "ExternalStream": "torch.cuda.Stream()",
    "get_stream_from_external": "torch.cuda.Stream()",
    "GreenContext": "torch.cuda.Stream()",
    "memory_snapshot": "torch.cuda.memory_stats()",
    "memory._snapshot": "torch.cuda.memory_stats()",
    "memory._dump_snapshot": "torch.cuda.memory_stats()",
    "get_gencode_flags": "nothing to compile for CUDA here",
    "_compile_kernel": "write the function with torch operators",
    "jiterator._create_jit_fn": "write the function with torch operators",
    "jiterator._create_multi_output_jit_fn": "write the function with torch operators",
    "nccl.all_reduce": "torch.distributed.all_reduce",
    "nccl.reduce": "torch.distributed.reduce",
    "nccl.broadcast": "torch.distributed.broadcast",
    "nccl.all_gather": "torch.distributed.all_gather",
    "nccl.reduce_scatter": "torch.distributed.reduce_scatter",
    "nccl.unique_id": "torch.distributed.init_process_group",
    "nccl.init_rank": "torch.distributed.init_process_group",
    "gds.GdsFile": "torch.load(mmap=True)",
    "memory_stats": "torch.cuda.mem_get_info()",
    "memory_allocated": "torch.cuda.mem_get_info()",
    "max_memory_allocated": "torch.cuda.mem_get_info()",
    "memory_reserved": "torch.cuda.mem_get_info()",
    "max_memory_reserved": "torch.cuda.mem_get_info()",
    "host_memory_stats": "torch.cuda.memory_stats()",
    "host_memory_stats_as_nested_dict": "torch.cuda.memory_stats()",
}
NO_ALTERNATIVE = "remove the call or guard it with torch.version.cuda"


def label(backend: Backend) -> str:
    """How a backend is named in messages.

    Example: ``"Huawei Ascend (npu)"``
    """
    return f"{backend.vendor} ({backend.device_type})"


def instead(backend: Backend, name: str) -> str:
    """What to do instead of ``torch.cuda.<name>``.

    Example: ``instead(backend, "power_draw")``
    """
    return backend.gaps.get(f"torch.cuda.{name}") or INSTEAD.get(name, NO_ALTERNATIVE)


def find(owner: Any, dotted: str) -> Any | None:
    """An attribute by its dotted path, or None.

    Example: ``find(torch.cuda, "nvtx.range_push")``
    """
    for part in dotted.split("."):
        owner = getattr(owner, part, None)
        if owner is None:
            return None
    return owner


def counterpart(backend: Backend, module: Any, name: str) -> Any | None:
    """What the vendor has for ``torch.cuda.<name>``, under that name or its own, or None.

    Example: ``counterpart(backend, torch.mps, "memory_allocated") is torch.mps.current_allocated_memory``
    """
    return find(module, backend.aliases.get(name, name))


def classify(backend: Backend, module: Any, emulated: Any, name: str) -> tuple[str, str]:
    """Kind and reason for ``torch.cuda.<name>``: mapped, emulated, hint or unsupported.

    Example: ``classify(backend, torch.npu, emulation, "synchronize") == ("mapped", "torch.npu.synchronize")``
    """
    if backend.native:
        return "mapped", "CUDA itself"
    if f"torch.cuda.{name}" in backend.gaps:
        return "unsupported", instead(backend, name)
    if name in getattr(emulated, "ALWAYS", ()):
        if counterpart(backend, module, name) is not None:
            return "mapped", f"{backend.where_module()}.{name}, completed by ditorch"
        return "emulated", "answered by ditorch"
    if name in COMPOSED:
        return "mapped", "PyTorch's own code over redirected calls"
    if counterpart(backend, module, name) is not None:
        return "mapped", f"{backend.where_module()}.{backend.aliases.get(name, name)}"
    if hasattr(emulated, name.replace(".", "_")):
        return "emulated", "done by ditorch"
    if name in HINTS:
        return "hint", HINTS[name]
    return "unsupported", instead(backend, name)
