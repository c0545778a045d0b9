"""Call forms that CUDA documents: what follows a name of ``torch.cuda``, one form per ``|``.

``D`` stands for an argument that names a device; it becomes several forms. Used by `test_call_forms`.
"""

from __future__ import annotations

DEVICES = ("0", "1", "'cuda'", "'cuda:1'", "torch.device('cuda:0')", "device=0", "device='cuda:0'", "device=None")
SETUP = """
import torch
s = torch.cuda.Stream()
e = torch.cuda.Event(enable_timing=True)
g = torch.cuda.CUDAGraph()
t = torch.zeros(2)
state = torch.zeros(16, dtype=torch.uint8)
"""
# Every name is called with nothing and with each of DEVICES.
BY_DEVICE = """
synchronize get_device_name get_device_capability get_device_properties current_stream default_stream memory_stats
memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_summary reset_peak_memory_stats
reset_accumulated_memory_stats mem_get_info get_rng_state Stream utilization temperature power_draw clock_rate
memory_usage reset_max_memory_allocated reset_max_memory_cached memory_cached max_memory_cached
memory_stats_as_nested_dict list_gpu_processes device_memory_used get_per_process_memory_fraction
"""
FORMS = """
is_available()
device_count()
current_device()
is_initialized()
init()
ipc_collect()
empty_cache()
cudart()
get_arch_list()
get_gencode_flags()
current_blas_handle()
is_current_stream_capturing()
graph_pool_handle()
get_allocator_backend()
seed()
seed_all()
initial_seed()
get_rng_state_all()
host_memory_stats()
is_tf32_supported()
get_sync_debug_mode()
is_bf16_supported() | (including_emulation=False) | (True) | (False)
set_sync_debug_mode(0) | ('warn') | (debug_mode='default')
set_device(0) | (1) | ('cuda:1') | (torch.device('cuda:0')) | (device=0) | (device='cuda:1')
can_device_access_peer(0, 1) | (device=0, peer_device=1) | (0, peer_device=1) | ('cuda:0', 'cuda:1')
device(0) | ('cuda:1') | (torch.device('cuda')) | (device=1)
device_of(t) | (obj=t)
stream(s) | (None) | (stream=s)
StreamContext(s) | (stream=s)
set_stream(s) | (stream=s)
Stream(0, -1) | (priority=-1) | (device='cuda:1', priority=0)
Event(True) | (enable_timing=True) | (blocking=True) | (interprocess=False) | (external=True) | (external=False)
Event(True, False, False) | (True, True) | (enable_timing=True, blocking=True, interprocess=True)
ExternalStream(5) | (5, 0) | (stream_ptr=5, device='cuda:0')
manual_seed(1) | (seed=1)
manual_seed_all(1) | (seed=1)
set_rng_state(state) | (state, 0) | (new_state=state, device='cuda:0') | (state, device='cuda')
set_rng_state_all([state, state]) | (new_states=[state])
memory_summary(0, True) | (abbreviated=True) | (device=0, abbreviated=False)
memory_snapshot() | (include_traces=False) | (mempool_id=None) | ((0, 1))
set_per_process_memory_fraction(0.5) | (0.5, 0) | (fraction=0.5, device='cuda:0')
caching_allocator_alloc(8) | (8, 0) | (size=8, device=0, stream=None)
caching_allocator_delete(0) | (mem_ptr=0)
caching_allocator_enable(True) | (value=False)
mem_get_info(0) | (device='cuda:1')
memory._record_memory_history() | ('all') | (enabled=None) | (max_entries=5) | ('all', stacks='python', device=0)
memory._snapshot() | (0) | (device=0)
memory._dump_snapshot('/dev/null') | (filename='/dev/null')
MemPool() | (use_on_oom=True) | (no_split=True) | (allocator=None)
use_mem_pool(None) | (pool=None, device=0)
CUDAGraph() | (keep_graph=True) | (keep_graph=False) | (True)
graph(g) | (cuda_graph=g) | (g, None) | (g, pool=None, stream=s) | (g, None, s, 'thread_local')
graph(g, capture_error_mode='relaxed') | (g, (0, 1), s, 'global') | (g, stream=s)
make_graphed_callables(torch.sin, (t,)) | (callables=torch.sin, sample_args=(t,), num_warmup_iters=1)
make_graphed_callables(torch.sin, (t,), 3, False) | (torch.sin, (t,), allow_unused_input=True, pool=(0, 1))
nvtx.range_push('a') | (msg='a')
nvtx.range_pop()
nvtx.range_start('a') | (msg='a')
nvtx.range_end(1) | (range_id=1)
nvtx.mark('a') | (msg='a')
nvtx.range('a') | ('a {}', 1)
profiler.start()
profiler.stop()
nccl.version()
nccl.is_available([t]) | (tensors=[t])
nccl.all_reduce([t]) | (inputs=[t])
tunable.enable() | (False) | (val=True)
tunable.is_enabled()
jiterator._create_jit_fn('') | (code_string='', a=1)
amp.GradScaler() | (enabled=False) | (2.0, 2.0) | (init_scale=4.0, growth_interval=3)
amp.autocast() | (False) | (enabled=True, dtype=torch.bfloat16) | (dtype=torch.float16, cache_enabled=False)
get_stream_from_external(5) | (5, 0) | (data_ptr=5, device=0)
default_generators | [0:1]
"""
METHODS = """
s.wait_event(e) | (event=e)
s.wait_stream(s) | (stream=s)
s.record_event() | (e) | (event=e)
s.query()
s.synchronize()
e.record() | (s) | (stream=s)
e.wait() | (s) | (stream=s)
e.query()
e.elapsed_time(e) | (end_event=e)
e.synchronize()
g.capture_begin() | (pool=None) | ((0, 1)) | (pool=(0, 1), capture_error_mode='global') | (capture_error_mode='relaxed')
g.replay()
g.reset()
g.pool()
g.enable_debug_mode()
g.debug_dump('/dev/null') | (debug_path='/dev/null')
"""


def forms() -> list[str]:
    """Every form as an expression, each once."""
    found = [f"torch.cuda.{name}({device})" for name in BY_DEVICE.split() for device in ("", *DEVICES)]
    for text, owner in ((FORMS, "torch.cuda."), (METHODS, "")):
        for line in text.strip().splitlines():
            first, *more = line.split(" | ")
            name = first.partition("(")[0].partition("[")[0]
            written = [owner + first, *(owner + name + arguments for arguments in more)]
            found += [f"({w}, g.capture_end())" if w.startswith("g.capture_begin") else w for w in written]
    return list(dict.fromkeys(found))
