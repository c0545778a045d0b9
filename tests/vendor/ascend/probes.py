"""Small CUDA programs, one per line: what CUDA code may expect, tried on the real torch_npu.

    python -m tests.vendor.ascend.probes ditorch          # under ditorch
    python -m tests.vendor.ascend.probes transfer_to_npu  # the same programs under the vendor's own shim

A line is ``group: statements``; it passes when it raises nothing. The last line of the output counts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
import warnings
from typing import Any

FACTORIES = """
empty(2) ones(2) zeros(2) full((2,),1.) rand(2) randn(2) randint(5,(2,)) randperm(4) arange(4) linspace(0,1,3)
logspace(0,1,3) eye(2) tensor([1.,2.]) as_tensor([1]) asarray([1.]) scalar_tensor(1.) empty_strided((2,),(1,))
hann_window(4) hamming_window(4) bartlett_window(4) blackman_window(4) kaiser_window(4) tril_indices(3,3)
triu_indices(3,3) fft.fftfreq(4) fft.rfftfreq(4) sparse_coo_tensor([[0],[1]],[1.],(2,2)) empty_like(c) ones_like(c)
zeros_like(c) full_like(c,1.) rand_like(c) randn_like(c) randint_like(c,3)
"""
METHODS = """
to('cuda') to('cuda:0') to(torch.device('cuda')) to(device='cuda') to('cuda',torch.float16) to('cuda',non_blocking=True)
to(x) cuda() cuda(0) cuda('cuda:0') cuda(device=0) cuda(non_blocking=True) type(torch.cuda.FloatTensor)
type('torch.cuda.HalfTensor') new_zeros(2,device='cuda') new_empty(2,device='cuda') new_ones(2,device='cuda')
new_full((2,),1.,device='cuda') new_tensor([1.],device='cuda') pin_memory().cuda(non_blocking=True)
"""
PROBES = """
shown: assert x.is_cuda and x.device == torch.device('cuda', 0) and x.device.type == 'cuda'
shown: assert x.get_device() == 0
shown: assert x.type() == 'torch.cuda.FloatTensor'
shown: assert 'cuda:0' in repr(x)
shown: assert not x.cpu().is_cuda and x.cpu().device.type == 'cpu'
shown: assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(c, torch.cuda.FloatTensor)
shown: assert torch.zeros(1, device='cuda:1').device.index == 1
shown: assert str(torch.ones(1, device='cuda').device) == 'cuda:0'
shown: assert torch.device('cuda', 0) == torch.ones(1).cuda().device
shown: assert x.untyped_storage().device.type == 'cuda'
shown: assert torch.Generator('cuda').device.type == 'cuda'
shown: assert torch.cuda.Stream().device == torch.device('cuda:0')
shown: assert torch.cuda.current_stream().device.type == 'cuda'
shown: e = torch.cuda.Event(); e.record(); assert e.device.type == 'cuda'
device: assert torch.cuda.is_available() and torch.cuda.device_count() == 2
device: assert torch.cuda.current_device() == 0
device: torch.cuda.set_device('cuda:1'); assert torch.cuda.current_device() == 1; torch.cuda.set_device(0)
device: torch.cuda.set_device(torch.device('cuda', 0)); torch.cuda.set_device(device=0)
device: assert isinstance(torch.cuda.get_device_name(), str) and torch.cuda.get_device_name(0) == torch.cuda.get_device_name('cuda:0')
device: assert torch.cuda.get_device_name(device=0)
device: assert torch.cuda.get_device_capability() >= (7, 0)
device: assert torch.cuda.get_device_capability(0) == torch.cuda.get_device_capability(device='cuda:0')
device: p = torch.cuda.get_device_properties(0); assert p.total_memory > 0 and p.name and p.major >= 7 and p.minor >= 0
device: p = torch.cuda.get_device_properties('cuda'); assert p.multi_processor_count >= 1
device: assert torch.cuda.get_device_properties(0).warp_size == 32
device: assert isinstance(torch.cuda.can_device_access_peer(0, 1), bool)
device: assert isinstance(torch.cuda.can_device_access_peer(device=0, peer_device=1), bool)
device: torch.cuda.synchronize(); torch.cuda.synchronize(0); torch.cuda.synchronize('cuda:0'); torch.cuda.synchronize(device=1)
device: assert torch.cuda.is_bf16_supported() in (True, False)
device: assert torch.cuda.is_bf16_supported(including_emulation=False) in (True, False)
device: torch.cuda.init(); assert torch.cuda.is_initialized()
device: torch.cuda._lazy_init()
device: assert torch.version.cuda
device: assert torch.backends.cuda.is_built()
device: torch.backends.cudnn.benchmark = True; torch.backends.cuda.matmul.allow_tf32 = True
device: assert isinstance(torch.cuda.get_arch_list(), list)
device: torch.cuda.ipc_collect()
device: torch.cuda.set_sync_debug_mode(0); assert torch.cuda.get_sync_debug_mode() == 0
device: assert torch.cuda._get_device_index('cuda:1') == 1
device: assert torch.cuda._get_device_index(None, optional=True) == 0
context: __import__('contextlib'); d = torch.cuda.device(1); d.__enter__(); assert torch.cuda.current_device() == 1; d.__exit__(None, None, None); assert torch.cuda.current_device() == 0
context: d = torch.cuda.device_of(x); d.__enter__(); d.__exit__(None, None, None)
context: d = torch.device('cuda'); d.__enter__(); y = torch.ones(2); d.__exit__(None, None, None); assert y.is_cuda
context: torch.set_default_device('cuda'); y = torch.zeros(2); torch.set_default_device('cpu'); assert y.is_cuda
context: torch.set_default_tensor_type('torch.cuda.FloatTensor'); y = torch.zeros(2); torch.set_default_tensor_type('torch.FloatTensor'); torch.set_default_device('cpu'); assert y.is_cuda
memory: a = torch.cuda.memory_allocated(); t = torch.empty(1 << 20, device='cuda'); assert torch.cuda.memory_allocated() >= a + (1 << 22)
memory: assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated()
memory: assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
memory: assert torch.cuda.max_memory_reserved(0) >= torch.cuda.memory_reserved(device=0)
memory: torch.cuda.reset_peak_memory_stats(); torch.cuda.reset_peak_memory_stats(0)
memory: torch.cuda.reset_accumulated_memory_stats()
memory: torch.cuda.reset_max_memory_allocated()
memory: s = torch.cuda.memory_stats(); assert s['allocated_bytes.all.current'] >= 0
memory: assert torch.cuda.memory_stats('cuda:0')['num_alloc_retries'] == 0
memory: s = torch.cuda.memory_stats_as_nested_dict(); assert 'allocated_bytes' in s
memory: assert 'Allocated memory' in torch.cuda.memory_summary()
memory: assert torch.cuda.memory_summary(0, abbreviated=True)
memory: f, t = torch.cuda.mem_get_info(); assert 0 < f <= t
memory: f, t = torch.cuda.mem_get_info('cuda:1'); assert 0 < f <= t
memory: torch.cuda.empty_cache()
memory: assert isinstance(torch.cuda.memory_snapshot(), list)
memory: assert isinstance(torch.cuda.memory_snapshot(include_traces=False), list)
memory: torch.cuda.memory._record_memory_history(); torch.cuda.memory._record_memory_history(enabled=None)
memory: torch.cuda.memory._record_memory_history('all', max_entries=10); torch.cuda.memory._record_memory_history(None)
memory: torch.cuda.memory._dump_snapshot('/dev/null')
memory: torch.cuda.set_per_process_memory_fraction(0.9); torch.cuda.set_per_process_memory_fraction(1.0)
memory: assert torch.cuda.get_per_process_memory_fraction() > 0
memory: assert torch.cuda.get_allocator_backend()
memory: torch.cuda.MemPool()
memory: p = torch.empty(4, pin_memory=True); assert p.is_pinned()
memory: assert torch.ones(4).pin_memory().is_pinned() and not torch.ones(4).is_pinned()
memory: assert torch.ones(4).pin_memory('cuda').is_pinned('cuda')
memory: assert torch.cuda.memory_cached() == torch.cuda.memory_reserved()
stream: s = torch.cuda.Stream(); s.synchronize(); assert s.query()
stream: s = torch.cuda.Stream(priority=-1); s = torch.cuda.Stream(device='cuda:1', priority=0)
stream: s = torch.cuda.Stream(); c1 = torch.cuda.stream(s); c1.__enter__(); assert torch.cuda.current_stream() == s; c1.__exit__(None, None, None)
stream: s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream()); torch.cuda.current_stream().wait_stream(s)
stream: s = torch.cuda.Stream(); e = s.record_event(); s.wait_event(e); e.synchronize(); assert e.query()
stream: a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True); a.record(); b.record(); torch.cuda.synchronize(); assert a.elapsed_time(b) >= 0
stream: e = torch.cuda.Event(True, True); e.record(torch.cuda.current_stream()); e.wait()
stream: e = torch.cuda.Event(enable_timing=False, blocking=True, interprocess=False)
stream: torch.cuda.Event(external=False)
stream: s = torch.cuda.current_stream('cuda:1'); assert s.device.index == 1
stream: assert torch.cuda.default_stream() == torch.cuda.current_stream()
stream: assert torch.cuda.default_stream(0).device_index == 0
stream: assert isinstance(torch.cuda.Stream(), torch.cuda.Stream) and isinstance(torch.cuda.Event(), torch.cuda.Event)
stream: assert isinstance(torch.cuda.current_stream().cuda_stream, int)
stream: e = torch.cuda.Event(); e.record(); assert isinstance(e.cuda_event, int)
stream: x.record_stream(torch.cuda.Stream())
stream: torch.cuda.set_stream(torch.cuda.current_stream())
stream: s = torch.Stream(device='cuda'); assert s.device.type == 'cuda'
stream: assert not torch.cuda.is_current_stream_capturing()
stream: s = torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream); s.synchronize()
stream: assert torch._C._cuda_getCurrentRawStream(0) == torch.cuda.current_stream().cuda_stream
stream: torch._C._cuda_setDevice(0)
random: torch.cuda.manual_seed(1); a = torch.randn(3, device='cuda'); torch.cuda.manual_seed(1); assert torch.equal(a, torch.randn(3, device='cuda'))
random: torch.cuda.manual_seed_all(1); torch.manual_seed(2); assert torch.cuda.initial_seed() == 2
random: s = torch.cuda.get_rng_state(); a = torch.rand(3, device='cuda'); torch.cuda.set_rng_state(s); assert torch.equal(a, torch.rand(3, device='cuda'))
random: s = torch.cuda.get_rng_state('cuda:0'); torch.cuda.set_rng_state(s, 'cuda:0'); torch.cuda.set_rng_state(s, device=0)
random: s = torch.cuda.get_rng_state_all(); assert len(s) == 2; torch.cuda.set_rng_state_all(s)
random: torch.cuda.seed(); torch.cuda.seed_all()
random: g = torch.Generator('cuda').manual_seed(3); a = torch.rand(3, device='cuda', generator=g); g.manual_seed(3); assert torch.equal(a, torch.rand(3, device='cuda', generator=g))
random: g = torch.Generator(device='cuda:0'); g.seed(); assert g.get_state().numel() > 0
random: assert len(torch.cuda.default_generators) == 2
random: torch.cuda.default_generators[0].manual_seed(3)
random: x.clone().normal_(); x.clone().uniform_(0, 1); x.clone().bernoulli_(0.5)
random: f = torch.random.fork_rng(devices=[0]); f.__enter__(); torch.rand(1, device='cuda'); f.__exit__(None, None, None)
random: torch.multinomial(torch.ones(4, device='cuda'), 2); torch.nn.functional.dropout(x, 0.5)
storage: assert torch.UntypedStorage(4, device='cuda').device.type == 'cuda'
storage: assert torch.TypedStorage(4, dtype=torch.float32, device='cuda').device.type == 'cuda'
storage: assert torch.cuda.FloatStorage(4).device.type == 'cuda'
storage: assert c.untyped_storage().cuda().device.type == 'cuda'
storage: assert x.untyped_storage().is_cuda
types: assert torch.cuda.FloatTensor([1., 2.]).is_cuda
types: assert torch.cuda.LongTensor([1, 2]).dtype == torch.int64
types: assert torch.cuda.HalfTensor(3).dtype == torch.float16
types: assert torch.cuda.BoolTensor([True]).is_cuda and torch.cuda.ByteTensor([1]).dtype == torch.uint8
types: assert x.half().type() == 'torch.cuda.HalfTensor'
compute: assert torch.equal((x + 1).cpu(), torch.tensor([2., 3.]))
compute: assert torch.allclose((m(x)).cpu(), m.cpu()(x.cpu())); m.cuda()
compute: assert (x @ x).item() == 5.
compute: y = x.clone(); y[0] = 7; assert y.tolist() == [7., 2.]
compute: y = torch.stack([x, x]); assert y.sum(0).tolist() == [2., 4.]
compute: assert torch.topk(x, 1).values.item() == 2.
compute: assert x.sort(descending=True)[0].tolist() == [2., 1.]
compute: assert torch.where(x > 1, x, 0.).tolist() == [0., 2.]
compute: assert x.nonzero().numel() == 2 and x.unique().numel() == 2
compute: assert torch.nn.functional.softmax(x, 0).sum().item() > 0.99
compute: assert torch.nn.functional.layer_norm(x, (2,)).mean().abs().item() < 1e-5
compute: assert torch.nn.functional.cross_entropy(x[None], torch.tensor([1], device='cuda')).item() > 0
compute: assert torch.nn.functional.conv2d(torch.ones(1, 1, 4, 4).cuda(), torch.ones(1, 1, 2, 2).cuda()).sum().item() == 36
compute: assert torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4).cuda()] * 3).shape == (1, 1, 2, 4)
compute: assert torch.nn.functional.embedding(torch.tensor([0]).cuda(), torch.ones(2, 3).cuda()).sum().item() == 3
compute: assert torch.linalg.norm(x).item() > 2
compute: assert torch.cumsum(x, 0).tolist() == [1., 3.]
compute: y = torch.zeros(3).cuda(); y.index_add_(0, torch.tensor([0, 1]).cuda(), x); assert y.tolist() == [1., 2., 0.]
compute: y = torch.zeros(3).cuda().scatter_(0, torch.tensor([0, 2]).cuda(), x); assert y.tolist() == [1., 0., 2.]
compute: assert torch.einsum('i,j->ij', x, x).shape == (2, 2)
compute: assert x.double().dtype == torch.float64 and x.bfloat16().is_cuda
compute: assert x.numpy(force=True).tolist() == [1., 2.]
compute: y = torch.empty(2).cuda(); torch.add(x, 1, out=y); assert y.tolist() == [2., 3.]
compute: torch._foreach_add_([x.clone(), x.clone()], 1.0)
module: assert next(torch.nn.Linear(2, 2).cuda().parameters()).is_cuda
module: assert next(torch.nn.Linear(2, 2, device='cuda').parameters()).is_cuda
module: assert next(torch.nn.Linear(2, 2).to('cuda:0').parameters()).device.index == 0
module: assert torch.nn.LazyLinear(3).cuda()(x[None]).shape == (1, 3)
module: n = torch.nn.Linear(2, 2, device='meta').to_empty(device='cuda'); assert n.weight.is_cuda
module: n = torch.nn.BatchNorm1d(2).cuda(); n(torch.ones(3, 2).cuda()); assert n.running_mean.is_cuda
module: n = torch.nn.LSTM(2, 3).cuda(); assert n(torch.ones(4, 1, 2).cuda())[0].is_cuda
module: n = torch.nn.MultiheadAttention(4, 2).cuda(); assert n(*[torch.ones(3, 1, 4).cuda()] * 3)[0].is_cuda
module: n = torch.nn.TransformerEncoderLayer(4, 2, 8).cuda(); assert n(torch.ones(3, 1, 4).cuda()).is_cuda
module: m.weight.data = m.weight.data.cpu(); m.weight.data = m.weight.data.cuda()
module: torch.nn.init.xavier_uniform_(m.weight)
module: torch.nn.utils.clip_grad_norm_(step(m), 1.0)
module: torch.nn.utils.parameters_to_vector(m.parameters())
module: import copy; assert copy.deepcopy(m).weight.is_cuda
train: step(m); o = torch.optim.SGD(m.parameters(), 0.1, momentum=0.9); o.step()
train: step(m); o = torch.optim.AdamW(m.parameters()); o.step()
train: step(m); o = torch.optim.AdamW(m.parameters(), fused=True); o.step()
train: step(m); o = torch.optim.Adam(m.parameters(), foreach=True); o.step(); o.step()
train: step(m); o = torch.optim.Adam(m.parameters(), capturable=True); o.step()
train: step(m); o = torch.optim.Adagrad(m.parameters()); o.step()
train: step(m); o = torch.optim.RMSprop(m.parameters()); o.step()
train: step(m); o = torch.optim.Adam(m.parameters()); o.step(); o.load_state_dict(o.state_dict()); o.step()
train: from torch.utils.checkpoint import checkpoint; y = x.clone().requires_grad_(); checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5), y, use_reentrant=False).sum().backward(); assert y.grad is not None
train: from torch.utils.checkpoint import checkpoint; y = x.clone().requires_grad_(); checkpoint(m, y, use_reentrant=True).sum().backward()
train: y = x.clone().requires_grad_(); (g,) = torch.autograd.grad((y * y).sum(), y); assert g.tolist() == [2., 4.]
train: F = type('F', (torch.autograd.Function,), dict(forward=staticmethod(lambda c, t: t * 2), backward=staticmethod(lambda c, g: g * 2))); F.apply(x.clone().requires_grad_()).sum().backward()
train: d = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), 2, pin_memory=True); assert all(b[0].cuda(non_blocking=True).is_cuda for b in d)
amp: a = torch.autocast('cuda', dtype=torch.float16); a.__enter__(); y = m(x); a.__exit__(None, None, None); assert y.dtype == torch.float16
amp: a = torch.autocast('cuda', dtype=torch.bfloat16); a.__enter__(); y = m(x); a.__exit__(None, None, None); assert y.dtype == torch.bfloat16
amp: a = torch.cuda.amp.autocast(); a.__enter__(); y = m(x); a.__exit__(None, None, None); assert y.dtype == torch.float16
amp: a = torch.autocast(device_type='cuda'); a.__enter__(); assert torch.is_autocast_enabled(); a.__exit__(None, None, None)
amp: assert torch.amp.is_autocast_available('cuda')
amp: assert torch.get_autocast_gpu_dtype() == torch.float16
amp: s = torch.cuda.amp.GradScaler(); s.scale(m(x).sum()).backward(); o = torch.optim.SGD(m.parameters(), 0.1); s.step(o); s.update(); assert s.get_scale() > 0
amp: s = torch.amp.GradScaler('cuda', init_scale=2.); s.scale(m(x).sum()).backward(); o = torch.optim.SGD(m.parameters(), 0.1); s.unscale_(o); s.step(o); s.update()
amp: s = torch.amp.GradScaler(init_scale=4.); assert s.state_dict()['scale'] == 4.
amp: s = torch.amp.GradScaler('cuda', init_scale=2.); y = (x * float('inf')).requires_grad_(); w = torch.nn.Parameter(x.clone()); s.scale((w * y.detach()).sum()).backward(); o = torch.optim.SGD([w], 0.1); s.step(o); s.update(); assert s.get_scale() == 1. and torch.equal(w, x)
amp: assert isinstance(torch.cuda.amp.GradScaler(), torch.cuda.amp.GradScaler) and isinstance(torch.amp.GradScaler(), torch.amp.GradScaler)
amp: torch.amp.custom_fwd(lambda c, t: t, device_type='cuda')
amp: torch.cuda.amp.custom_fwd(lambda c, t: t)
save: b = io.BytesIO(); torch.save(x, b); b.seek(0); assert torch.load(b).is_cuda
save: b = io.BytesIO(); torch.save(x, b); b.seek(0); assert not torch.load(b, map_location='cpu').is_cuda
save: b = io.BytesIO(); torch.save(c, b); b.seek(0); assert torch.load(b, map_location='cuda').is_cuda
save: b = io.BytesIO(); torch.save(c, b); b.seek(0); assert torch.load(b, map_location='cuda:1').device.index == 1
save: b = io.BytesIO(); torch.save(c, b); b.seek(0); assert torch.load(b, map_location=torch.device('cuda')).is_cuda
save: b = io.BytesIO(); torch.save(c, b); b.seek(0); assert torch.load(b, map_location=lambda s, l: s.cuda()).is_cuda
save: b = io.BytesIO(); torch.save(x, b); b.seek(0); assert torch.load(b, map_location={'cuda:0': 'cuda:1'}).device.index == 1
save: b = io.BytesIO(); torch.save(m.state_dict(), b); b.seek(0); m.load_state_dict(torch.load(b, weights_only=True))
save: import pickle; assert pickle.loads(pickle.dumps(x)).is_cuda
save: import copy; assert copy.copy(x).is_cuda and copy.deepcopy(x).is_cuda
graph: g = torch.cuda.CUDAGraph(); a = torch.cuda.graph(g); a.__enter__(); y = x * 2; a.__exit__(None, None, None); g.replay(); assert y.tolist() == [2., 4.]
graph: g = torch.cuda.CUDAGraph(); a = torch.cuda.graph(cuda_graph=g, pool=None); a.__enter__(); a.__exit__(None, None, None); g.reset()
graph: g = torch.cuda.CUDAGraph(); a = torch.cuda.graph(g, None, torch.cuda.Stream(), 'thread_local'); a.__enter__(); a.__exit__(None, None, None)
graph: torch.cuda.CUDAGraph(keep_graph=False)
graph: assert torch.cuda.graph_pool_handle()
graph: g = torch.cuda.CUDAGraph(); a = torch.cuda.graph(g, pool=torch.cuda.graph_pool_handle()); a.__enter__(); a.__exit__(None, None, None); g.pool()
graph: g = torch.cuda.CUDAGraph(); s = torch.cuda.Stream(); q = torch.cuda.stream(s); q.__enter__(); g.capture_begin(); g.capture_end(); q.__exit__(None, None, None)
dist: assert dist.get_backend() == 'nccl'
dist: assert dist.is_nccl_available() and dist.is_backend_available('nccl')
dist: y = x.clone(); dist.all_reduce(y); assert y.tolist() == [1., 2.]
dist: y = x.clone(); dist.all_reduce(y, op=dist.ReduceOp.AVG); assert y.tolist() == [1., 2.]
dist: y = x.clone(); w = dist.all_reduce(y, async_op=True); w.wait()
dist: y = x.clone(); dist.broadcast(y, 0); dist.reduce(y, 0); dist.barrier()
dist: y = [torch.empty_like(x)]; dist.all_gather(y, x); assert y[0].tolist() == [1., 2.]
dist: y = torch.empty_like(x); dist.all_gather_into_tensor(y, x); assert y.tolist() == [1., 2.]
dist: y = torch.empty_like(x); dist.reduce_scatter_tensor(y, x); assert y.tolist() == [1., 2.]
dist: y = torch.empty_like(x); dist.all_to_all_single(y, x); assert y.tolist() == [1., 2.]
dist: y = [None]; dist.all_gather_object(y, {'a': 1}); assert y == [{'a': 1}]
dist: y = ['a']; dist.broadcast_object_list(y, 0)
dist: g = dist.new_group([0]); y = x.clone(); dist.all_reduce(y, group=g)
dist: g = dist.new_group([0], backend='nccl'); assert dist.get_backend(g) == 'nccl'
dist: g = dist.new_group([0], backend='gloo'); y = torch.ones(2); dist.all_reduce(y, group=g)
dist: assert dist.group.WORLD._get_backend(torch.device('cuda')) is not None
dist: o = dist.ProcessGroupNCCL.Options(); o.is_high_priority_stream = True; o.config.min_ctas = 1; dist.new_group([0], pg_options=o)
dist: assert dist.distributed_c10d.ProcessGroupNCCL.Options()._timeout
dist: n = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda()); n(x).sum().backward()
dist: n = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), device_ids=[0]); n(x).sum().backward()
dist: from torch.distributed.fsdp import FullyShardedDataParallel as F; n = F(torch.nn.Linear(2, 2).cuda()); n(x).sum().backward()
dist: from torch.distributed.fsdp import FullyShardedDataParallel as F; n = F(torch.nn.Linear(2, 2), device_id=torch.cuda.current_device()); n(x).sum().backward()
dist: from torch.distributed.fsdp import fully_shard; n = torch.nn.Linear(2, 2).cuda(); fully_shard(n); n(x).sum().backward()
dist: from torch.distributed.device_mesh import init_device_mesh; d = init_device_mesh('cuda', (1,)); assert d.device_type == 'cuda'
dist: from torch.distributed.device_mesh import init_device_mesh; from torch.distributed.tensor import distribute_tensor, Shard; t = distribute_tensor(torch.ones(4, 2), init_device_mesh('cuda', (1,)), [Shard(0)]); assert t.to_local().is_cuda
dist: torch.cuda.nccl.version()
profile: p = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]); p.__enter__(); x + 1; p.__exit__(None, None, None)
profile: torch.cuda.nvtx.range_push('a'); torch.cuda.nvtx.range_pop(); torch.cuda.nvtx.mark('a')
profile: a = torch.cuda.nvtx.range('a'); a.__enter__(); a.__exit__(None, None, None)
profile: a = torch.autograd.profiler.emit_nvtx(); a.__enter__(); x + 1; a.__exit__(None, None, None)
profile: torch.cuda.profiler.start(); torch.cuda.profiler.stop()
profile: torch.cuda.cudart().cudaProfilerStart(); torch.cuda.check_error(0)
compile: f = torch.compile(lambda t: t * 2 + 1, backend='aot_eager'); assert f(x).tolist() == [3., 5.]
compile: f = torch.compile(lambda t: t * 2 + 1, backend='eager'); assert f(x).tolist() == [3., 5.]
compile: f = torch.compile(lambda t: t * 2 + 1); assert f(x).tolist() == [3., 5.]
compile: f = torch.jit.trace(lambda t: t * 2, x); assert f(x).is_cuda
compile: f = torch.func.grad(lambda t: (t * t).sum()); assert f(x).tolist() == [2., 4.]
compile: f = torch.func.vmap(lambda t: t * 2); assert f(x).tolist() == [2., 4.]
compile: import torch._inductor.utils as u; assert u.get_gpu_type() == 'npu'
library: o = torch.library.custom_op('probe::twice', lambda t: t * 2, mutates_args=(), device_types='cuda', schema='(Tensor t) -> Tensor'); assert o(x).tolist() == [2., 4.]
library: l = torch.library.Library('probe2', 'DEF'); l.define('f(Tensor t) -> Tensor'); l.impl('f', lambda t: t + 1, 'CUDA'); assert torch.ops.probe2.f(x).tolist() == [2., 3.]; K.append(l)
library: torch.library.define('probe3::f', '(Tensor t) -> Tensor'); torch.library.impl('probe3::f', 'cuda')(lambda t: t + 1); assert torch.ops.probe3.f(x).tolist() == [2., 3.]
library: p = torch._utils.classproperty(lambda cls: 3); assert type('A', (), {'p': p}).p == 3
refused: refuses('torch.cuda.power_draw')
refused: refuses('torch.cuda.temperature')
refused: refuses('torch.cuda.list_gpu_processes')
parallel: n = torch.nn.DataParallel(torch.nn.Linear(2, 2).cuda()); assert n(torch.ones(4, 2).cuda()).shape == (4, 2)
parallel: y = torch.nn.parallel.comm.broadcast(x, [0, 1]); assert y[1].device.index == 1
parallel: y = torch.nn.parallel.comm.scatter(torch.ones(4, 2).cuda(), [0, 1]); assert len(y) == 2
parallel: y = x.to('cuda:1'); assert (y + 1).device.index == 1 and torch.equal(y.to('cuda:0'), x)
"""


def probes() -> list[tuple[str, str]]:
    """Every probe as (group, statements)."""
    made = []
    for call in FACTORIES.split():
        open_, _, rest = call.partition("(")
        device = "device='cuda')"
        made.append(("factory", f"assert torch.{open_}({rest[:-1]}, {device}.is_cuda"))
    made += [("move", f"y = c.{call}; assert y.is_cuda and y.device.type == 'cuda'") for call in METHODS.split()]
    for line in PROBES.strip().splitlines():
        group, _, code = line.partition(": ")
        made.append((group, code))
    return made


def scope() -> dict[str, Any]:
    """The names that probes use."""
    import torch
    import torch.distributed as dist

    def step(module: Any) -> Any:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        return list(module.parameters())

    def refuses(name: str) -> None:
        function = torch.cuda
        for part in name.split(".")[2:]:
            function = getattr(function, part)
        try:
            function()
        except RuntimeError as error:
            assert name in str(error), error
        else:
            raise AssertionError(f"{name} did something")

    x = torch.tensor([1.0, 2.0], device="cuda")
    m = torch.nn.Linear(2, 2).cuda()
    return {
        **{"torch": torch, "dist": dist, "x": x, "c": torch.tensor([1.0, 2.0]), "m": m, "io": io, "K": []},
        **{"step": step, "refuses": refuses, "F": torch.nn.functional},
    }


def run(shim: str) -> dict[str, str]:
    """Outcome of each probe: "" or the error."""
    warnings.simplefilter("ignore")
    import torch

    if shim == "ditorch":
        import ditorch  # noqa: F401
    else:
        import torch_npu  # noqa: F401
        from torch_npu.contrib import transfer_to_npu  # noqa: F401
    from tests.vendor.ascend.cpu_kernels import enter

    kernels = enter()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    names = scope()
    outcome = {}
    for number, (group, code) in enumerate(probes()):
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                exec(code, {**names})
                error = ""
            except Exception as problem:
                error = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"[:200]
                if os.environ.get("PROBE_TRACE") == str(number):
                    traceback.print_exc()
        outcome[f"{number} {group}: {code}"] = error
        torch.cuda.set_device(0)
        torch.set_default_device("cpu")
    torch.distributed.destroy_process_group()
    del kernels
    return outcome


if __name__ == "__main__":
    found = run(sys.argv[1])
    for probe, error in found.items():
        if error:
            print(f"{probe}\n    {error}")
    passed = sum(not error for error in found.values())
    print(json.dumps({"shim": sys.argv[1], "passed": passed, "of": len(found)}))
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w") as file:
            json.dump(found, file, indent=1)
    sys.stdout.flush()
    os._exit(0)
