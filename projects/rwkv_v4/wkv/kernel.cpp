// wkv on the CPU: blocks of channels in SIMD registers, time step after time step, blocks spread over threads.
// Plain C interface and no torch headers: it compiles in about two seconds and fits every release of torch.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kVectors = 8;  // vectors per block: enough independent work to hide the latency of one step
constexpr float kEmpty = -1e38f;

typedef float FloatV __attribute__((vector_size(kBytes)));
typedef int32_t IntV __attribute__((vector_size(kBytes)));
typedef double DoubleV __attribute__((vector_size(kBytes)));

inline FloatV splat(FloatV, float x) { return x - (FloatV){}; }
inline DoubleV splat(DoubleV, double x) { return x - (DoubleV){}; }

// e^x as 2^n e^r with |r| <= ln(2)/2 and a Taylor polynomial for e^r (next term below 6e-9).
inline FloatV exp_of(FloatV x) {
  const FloatV shift = splat(x, 12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  FloatV clamped = x < -87.0f ? splat(x, -87.0f) : (x > 88.0f ? splat(x, 88.0f) : x);
  FloatV z = clamped * 1.44269504f + shift;
  FloatV n = z - shift;
  FloatV r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  FloatV p = splat(x, 1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  IntV scale = ((IntV)z - (IntV)shift + 127) << 23;
  return x < -87.0f ? (FloatV){} : p * (FloatV)scale;
}

// log of x >= 1: exponent, and atanh series for the mantissa in [sqrt(1/2), sqrt(2)) (next term below 1e-9).
inline FloatV log_of(FloatV x) {
  IntV bits = (IntV)x;
  IntV exponent = (bits - 0x3f3504f3) >> 23;
  FloatV m = (FloatV)(bits - (exponent << 23));
  FloatV f = (m - 1.0f) / (m + 1.0f), g = f * f;
  FloatV p = g * (1.0f / 9) + 1.0f / 7;
  p = p * g + 1.0f / 5;
  p = p * g + 1.0f / 3;
  FloatV n = __builtin_convertvector(exponent, FloatV);
  FloatV result = n * 0.693359375f + (2.0f * f * (p * g + 1.0f) - n * 2.12194440e-4f);
  return x == x ? result : x;
}

inline DoubleV exp_of(DoubleV x) {
  for (unsigned i = 0; i < sizeof x / sizeof x[0]; ++i) x[i] = std::exp(x[i]);
  return x;
}
inline DoubleV log_of(DoubleV x) {
  for (unsigned i = 0; i < sizeof x / sizeof x[0]; ++i) x[i] = std::log(x[i]);
  return x;
}

template <class V> inline V larger(V a, V b) { return a > b ? a : b; }

// Scales for two exponents: the larger one gets 1, the other e^-|difference|. One exponential instead of two.
template <class V> struct Scales {
  V first, second;
  inline Scales(V a, V b) {
    V d = a - b, e = exp_of(d < 0 ? d : -d), one = splat(d, 1);
    first = d >= 0 ? one : e;
    second = d >= 0 ? e : one;
  }
};

template <class V, class T> inline V load(const T* from, int lanes) {
  V x = {};
  if (lanes >= int(sizeof(V) / sizeof(T))) std::memcpy(&x, from, sizeof x);
  else if (lanes > 0) std::memcpy(&x, from, lanes * sizeof(T));
  return x;
}
template <class V, class T> inline void store(T* to, V x, int lanes) {
  if (lanes >= int(sizeof(V) / sizeof(T))) std::memcpy(to, &x, sizeof x);
  else if (lanes > 0) std::memcpy(to, &x, lanes * sizeof(T));
}

template <class V, class T, bool Full>
void forward_block(const T* w, const T* u, const T* k, const T* v, T* y, T* log_total, int64_t steps, int64_t stride,
                   int width) {
  constexpr int lanes = sizeof(V) / sizeof(T);
  V weighted[kVectors] = {}, weights[kVectors] = {}, top[kVectors], decay[kVectors], bonus[kVectors];
  const auto left = [&](int j) { return Full ? lanes : width - j * lanes; };
  for (int j = 0; j < kVectors; ++j) {
    top[j] = splat(V{}, T(kEmpty));
    decay[j] = load<V>(w + j * lanes, left(j));
    bonus[j] = load<V>(u + j * lanes, left(j));
  }
  for (int64_t t = 0; t < steps; ++t) {
    const int64_t row = t * stride;
    for (int j = 0; j < kVectors; ++j) {
      const int64_t at = row + j * lanes;
      if (Full) {
        __builtin_prefetch(k + at + 8 * stride);
        __builtin_prefetch(v + at + 8 * stride);
      }
      V key = load<V>(k + at, left(j)), value = load<V>(v + at, left(j));
      V now = bonus[j] + key;
      Scales<V> out(top[j], now);
      V total = out.first * weights[j] + out.second;
      store(y + at, V((out.first * weighted[j] + out.second * value) / total), left(j));
      store(log_total + at, V(larger(top[j], now) + log_of(total)), left(j));
      V before = top[j] + decay[j];
      Scales<V> next(before, key);
      weighted[j] = next.first * weighted[j] + next.second * value;
      weights[j] = next.first * weights[j] + next.second;
      top[j] = larger(before, key);
    }
  }
}

template <class V, class T, bool Full>
void backward_block(const T* w, const T* u, const T* k, const T* v, const T* y, const T* log_total, const T* grad,
                    T* grad_w, T* grad_u, T* grad_k, T* grad_v, int64_t steps, int64_t stride, int width) {
  constexpr int lanes = sizeof(V) / sizeof(T);
  // What the later outputs ask of this step: sums over them, their derivatives by w, and the common exponent.
  V ask_v[kVectors] = {}, ask_1[kVectors] = {}, slope_v[kVectors] = {}, slope_1[kVectors] = {}, top[kVectors];
  V sum_w[kVectors] = {}, sum_u[kVectors] = {}, decay[kVectors], bonus[kVectors];
  const auto left = [&](int j) { return Full ? lanes : width - j * lanes; };
  for (int j = 0; j < kVectors; ++j) {
    top[j] = splat(V{}, T(kEmpty));
    decay[j] = load<V>(w + j * lanes, left(j));
    bonus[j] = load<V>(u + j * lanes, left(j));
  }
  for (int64_t t = steps - 1; t >= 0; --t) {
    const int64_t row = t * stride;
    for (int j = 0; j < kVectors; ++j) {
      const int64_t at = row + j * lanes;
      if (Full) {
        const int64_t ahead = at - 8 * stride;
        __builtin_prefetch(k + ahead);
        __builtin_prefetch(v + ahead);
        __builtin_prefetch(y + ahead);
        __builtin_prefetch(log_total + ahead);
        __builtin_prefetch(grad + ahead);
      }
      V key = load<V>(k + at, left(j)), value = load<V>(v + at, left(j)), out = load<V>(y + at, left(j));
      V total = load<V>(log_total + at, left(j)), g = load<V>(grad + at, left(j));
      V now = exp_of(V(bonus[j] + key - total)) * g;
      V later = exp_of(V(key + top[j]));
      V direct = now * (value - out);
      store(grad_k + at, V(direct + later * (value * ask_v[j] + ask_1[j])), left(j));
      store(grad_v + at, V(now + later * ask_v[j]), left(j));
      sum_u[j] += direct;
      sum_w[j] += later * (value * slope_v[j] + slope_1[j]);
      V before = top[j] + decay[j], mine = -total;
      Scales<V> next(before, mine);
      slope_v[j] = next.first * (slope_v[j] + ask_v[j]);
      slope_1[j] = next.first * (slope_1[j] + ask_1[j]);
      ask_v[j] = next.first * ask_v[j] + next.second * g;
      ask_1[j] = next.first * ask_1[j] - next.second * g * out;
      top[j] = larger(before, mine);
    }
  }
  for (int j = 0; j < kVectors; ++j) {
    store(grad_w + j * lanes, sum_w[j], left(j));
    store(grad_u + j * lanes, sum_u[j], left(j));
  }
}

template <class V, class T>
void forward_all(const T* w, const T* u, const T* k, const T* v, T* y, T* log_total, int64_t batch, int64_t steps,
                 int64_t channels, int threads) {
  constexpr int block = kVectors * sizeof(V) / sizeof(T);
  const int64_t blocks = (channels + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < batch * blocks; ++i) {
    const int64_t c = i % blocks * block, at = i / blocks * steps * channels + c;
    const int width = int(channels - c < block ? channels - c : block);
    auto run = width == block ? forward_block<V, T, true> : forward_block<V, T, false>;
    run(w + c, u + c, k + at, v + at, y + at, log_total + at, steps, channels, width);
  }
}

template <class V, class T>
void backward_all(const T* w, const T* u, const T* k, const T* v, const T* y, const T* log_total, const T* grad,
                  T* grad_w, T* grad_u, T* grad_k, T* grad_v, int64_t batch, int64_t steps, int64_t channels,
                  int threads) {
  constexpr int block = kVectors * sizeof(V) / sizeof(T);
  const int64_t blocks = (channels + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < batch * blocks; ++i) {
    const int64_t c = i % blocks * block, at = i / blocks * steps * channels + c, row = i / blocks * channels + c;
    const int width = int(channels - c < block ? channels - c : block);
    auto run = width == block ? backward_block<V, T, true> : backward_block<V, T, false>;
    run(w + c, u + c, k + at, v + at, y + at, log_total + at, grad + at, grad_w + row, grad_u + row, grad_k + at,
        grad_v + at, steps, channels, width);
  }
}

}  // namespace

extern "C" {
void wkv_forward_float(const float* w, const float* u, const float* k, const float* v, float* y, float* log_total,
                       int64_t batch, int64_t steps, int64_t channels, int threads) {
  forward_all<FloatV>(w, u, k, v, y, log_total, batch, steps, channels, threads);
}
void wkv_forward_double(const double* w, const double* u, const double* k, const double* v, double* y,
                        double* log_total, int64_t batch, int64_t steps, int64_t channels, int threads) {
  forward_all<DoubleV>(w, u, k, v, y, log_total, batch, steps, channels, threads);
}
void wkv_backward_float(const float* w, const float* u, const float* k, const float* v, const float* y,
                        const float* log_total, const float* grad, float* grad_w, float* grad_u, float* grad_k,
                        float* grad_v, int64_t batch, int64_t steps, int64_t channels, int threads) {
  backward_all<FloatV>(w, u, k, v, y, log_total, grad, grad_w, grad_u, grad_k, grad_v, batch, steps, channels, threads);
}
void wkv_backward_double(const double* w, const double* u, const double* k, const double* v, const double* y,
                         const double* log_total, const double* grad, double* grad_w, double* grad_u, double* grad_k,
                         double* grad_v, int64_t batch, int64_t steps, int64_t channels, int threads) {
  backward_all<DoubleV>(w, u, k, v, y, log_total, grad, grad_w, grad_u, grad_k, grad_v, batch, steps, channels,
                        threads);
}
}
