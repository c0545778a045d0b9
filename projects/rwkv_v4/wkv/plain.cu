// wkv as one would write it first in CUDA: a thread per batch row and channel walks through time.
// Not used by the operator: the benchmark measures the Triton kernels against it.
#include <cuda_bf16.h>
#include <cstdint>

namespace {
constexpr float kEmpty = -1e38f;
__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void put(float* to, float x) { *to = x; }
__device__ inline void put(__nv_bfloat16* to, float x) { *to = __float2bfloat16(x); }

template <class T>
__global__ void forward(const float* __restrict__ w, const float* __restrict__ u, const T* __restrict__ k,
                        const T* __restrict__ v, float* __restrict__ y, float* __restrict__ log_total, int batch,
                        int steps, int channels) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= batch * channels) return;
  const int c = i % channels;
  int64_t at = int64_t(i / channels) * steps * channels + c;
  const float decay = w[c], bonus = u[c];
  float top = kEmpty, weighted = 0, weights = 0;
  for (int t = 0; t < steps; ++t, at += channels) {
    const float key = widen(k[at]), value = widen(v[at]), now = bonus + key;
    float high = fmaxf(top, now), past = __expf(top - high), mine = __expf(now - high);
    const float total = past * weights + mine;
    y[at] = (past * weighted + mine * value) / total;
    log_total[at] = high + __logf(total);
    high = fmaxf(top + decay, key);
    past = __expf(top + decay - high), mine = __expf(key - high);
    weighted = past * weighted + mine * value;
    weights = past * weights + mine;
    top = high;
  }
}

template <class T>
__global__ void backward(const float* __restrict__ w, const float* __restrict__ u, const T* __restrict__ k,
                         const T* __restrict__ v, const float* __restrict__ y, const float* __restrict__ log_total,
                         const float* __restrict__ grad, float* __restrict__ gw, float* __restrict__ gu,
                         T* __restrict__ gk, T* __restrict__ gv, int batch, int steps, int channels) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= batch * channels) return;
  const int c = i % channels;
  int64_t at = (int64_t(i / channels) * steps + steps - 1) * channels + c;
  const float decay = w[c], bonus = u[c];
  float top = kEmpty, ask_v = 0, ask_1 = 0, slope_v = 0, slope_1 = 0, sum_w = 0, sum_u = 0;
  for (int t = 0; t < steps; ++t, at -= channels) {
    const float key = widen(k[at]), value = widen(v[at]), out = y[at], total = log_total[at], g = grad[at];
    const float now = __expf(bonus + key - total) * g, later = __expf(key + top), direct = now * (value - out);
    put(gk + at, direct + later * (value * ask_v + ask_1));
    put(gv + at, now + later * ask_v);
    sum_u += direct;
    sum_w += later * (value * slope_v + slope_1);
    const float high = fmaxf(top + decay, -total), past = __expf(top + decay - high), mine = __expf(-total - high);
    slope_v = past * (slope_v + ask_v);
    slope_1 = past * (slope_1 + ask_1);
    ask_v = past * ask_v + mine * g;
    ask_1 = past * ask_1 - mine * g * out;
    top = high;
  }
  gw[i] = sum_w;
  gu[i] = sum_u;
}

constexpr int kThreads = 32;  // small blocks spread the few threads over all multiprocessors
inline int blocks(int batch, int channels) { return (batch * channels + kThreads - 1) / kThreads; }
}  // namespace

#define LAUNCHERS(NAME, T)                                                                                            \
  extern "C" int wkv_forward_##NAME(const float* w, const float* u, const T* k, const T* v, float* y, float* total,   \
                                    int batch, int steps, int channels, cudaStream_t stream) {                       \
    forward<T><<<blocks(batch, channels), kThreads, 0, stream>>>(w, u, k, v, y, total, batch, steps, channels);      \
    return cudaGetLastError();                                                                                       \
  }                                                                                                                  \
  extern "C" int wkv_backward_##NAME(const float* w, const float* u, const T* k, const T* v, const float* y,          \
                                     const float* total, const float* grad, float* gw, float* gu, T* gk, T* gv,      \
                                     int batch, int steps, int channels, cudaStream_t stream) {                      \
    backward<T><<<blocks(batch, channels), kThreads, 0, stream>>>(w, u, k, v, y, total, grad, gw, gu, gk, gv, batch, \
                                                                  steps, channels);                                  \
    return cudaGetLastError();                                                                                       \
  }
LAUNCHERS(float, float)
LAUNCHERS(bfloat16, __nv_bfloat16)
