// One pass over a result and its float64 reference: the columns of a comparison, and what a bound leaves in doubt.
//
// Plain functions on plain memory, called without the GIL; nothing here needs a C++ runtime library.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// the widest vectors of the machine that it runs on, wherever it was compiled
#define VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORS
#endif
#define INLINE inline __attribute__((always_inline))  // into the function that is compiled for several machines

namespace {

constexpr int64_t BLOCK = 1024;
constexpr uint64_t EXPONENT = 0x7FF0000000000000ull;

enum Kind : int32_t { F64 = 0, F32 = 1, BF16 = 2, F16 = 3 };

template <typename To, typename From>
INLINE To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

INLINE double bits_to_double(uint64_t bits) { return same_bits<double>(bits); }
INLINE uint64_t double_to_bits(double value) { return same_bits<uint64_t>(value); }
INLINE float bits_to_float(uint32_t bits) { return same_bits<float>(bits); }
INLINE uint32_t float_to_bits(float value) { return same_bits<uint32_t>(value); }

INLINE double from_half(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7FFFu;
  if (rest >= 0x7C00u) return bits_to_float(sign | 0x7F800000u | ((rest & 0x3FFu) << 13));
  // shifted into place, the exponent is too small by 112: one exact product mends that, subnormal numbers too
  return bits_to_float(sign | (rest << 13)) * 0x1p112f;
}

// Nearest number of the dtype, by way of float32 as PyTorch converts; of finite numbers.
INLINE double round_bfloat(double exact) {
  const float near = static_cast<float>(exact);
  uint32_t bits = float_to_bits(near);
  bits += 0x7FFFu + ((bits >> 16) & 1u);
  return bits_to_float(bits & 0xFFFF0000u);
}

INLINE double round_half(double exact) {
  const double near = static_cast<float>(exact), size = std::fabs(near);
  if (size >= 65520.0) return std::copysign(bits_to_double(EXPONENT), near);
  // adding a number whose last digit is the last digit of the result rounds to nearest, ties to even
  double power = bits_to_double(double_to_bits(size) & EXPONENT);
  if (power < 0x1p-14) power = 0x1p-14;
  const double magic = power * 0x1p42;
  return std::copysign((size + magic) - magic, near);
}

// A tensor: where it begins and how it lies, by dimension.
struct Strided {
  const char* data;
  const int64_t* stride;  // in elements
  int32_t kind;
};

INLINE void load(const Strided& from, int64_t offset, int64_t step, int64_t count, double* __restrict to) {
  switch (from.kind) {
    case F64: {
      const double* p = reinterpret_cast<const double*>(from.data) + offset;
      if (step == 1) memcpy(to, p, count * 8);
      else for (int64_t i = 0; i < count; ++i) to[i] = p[i * step];
      break;
    }
    case F32: {
      const float* p = reinterpret_cast<const float*>(from.data) + offset;
      if (step == 1) for (int64_t i = 0; i < count; ++i) to[i] = p[i];
      else for (int64_t i = 0; i < count; ++i) to[i] = p[i * step];
      break;
    }
    case BF16: {
      const uint16_t* p = reinterpret_cast<const uint16_t*>(from.data) + offset;
      for (int64_t i = 0; i < count; ++i) to[i] = bits_to_float(static_cast<uint32_t>(p[i * step]) << 16);
      break;
    }
    default: {
      const uint16_t* p = reinterpret_cast<const uint16_t*>(from.data) + offset;
      for (int64_t i = 0; i < count; ++i) to[i] = from_half(p[i * step]);
    }
  }
}

// Walks over up to three tensors of one shape in logical order, a stretch of the last dimension at a time.
template <int N, typename Visit>
INLINE void walk(int32_t dims, const int64_t* shape, const Strided* tensors, Visit visit) {
  int64_t index[64] = {0}, offset[N] = {0};
  const int64_t last = dims ? shape[dims - 1] : 1;
  int64_t position = 0;
  while (true) {
    for (int64_t start = 0; start < last; start += BLOCK) {
      const int64_t count = last - start < BLOCK ? last - start : BLOCK;
      int64_t at[N], step[N];
      for (int n = 0; n < N; ++n) {
        step[n] = dims ? tensors[n].stride[dims - 1] : 1;
        at[n] = offset[n] + start * step[n];
      }
      if (!visit(position, count, at, step)) return;
      position += count;
    }
    int32_t d = dims - 2;
    for (; d >= 0; --d) {
      for (int n = 0; n < N; ++n) offset[n] += tensors[n].stride[d];
      if (++index[d] < shape[d]) break;
      for (int n = 0; n < N; ++n) offset[n] -= tensors[n].stride[d] * shape[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

}  // namespace

extern "C" {

struct Columns {
  double largest, relative, ee, eg, gg, units, ulp;  // the last two still to be divided by the unit of rounding
  int32_t close, equal, regular;
};

// The columns of one pair; not `regular` where some number is not finite: then nothing else is said.
VECTORS void op_tools_measure(int32_t dims, const int64_t* shape, const void* device, const int64_t* device_stride,
                              int32_t kind, const void* golden, const int64_t* golden_stride, double atol, double rtol,
                              double normal, Columns* out) {
  const Strided tensors[2] = {{static_cast<const char*>(device), device_stride, kind},
                              {static_cast<const char*>(golden), golden_stride, F64}};
  double ee = 0, eg = 0, gg = 0, units = 0, ulp = 0, largest = 0, relative = 0, over = -1;
  int64_t different = 0;
  bool regular = true;
  walk<2>(dims, shape, tensors, [&](int64_t, int64_t count, const int64_t* at, const int64_t* step) __attribute__((always_inline)) {
    double d[BLOCK], g[BLOCK], r[BLOCK];
    load(tensors[0], at[0], step[0], count, d);
    load(tensors[1], at[1], step[1], count, g);
    double see = 0, seg = 0, sgg = 0;
#pragma omp simd reduction(+ : see, seg, sgg) reduction(max : units, ulp)
    for (int64_t i = 0; i < count; ++i) {
      const double e = d[i] - g[i], size = std::fabs(e);
      see += e * e;
      seg += e * g[i];
      sgg += g[i] * g[i];
      double scale = std::fabs(g[i]);
      scale = scale > normal ? scale : normal;
      const double unit = size / scale;
      units = units > unit ? units : unit;
      const double power = size / bits_to_double(double_to_bits(scale) & EXPONENT);
      ulp = ulp > power ? ulp : power;
    }
    ee += see;
    eg += seg;
    gg += sgg;
    if (!(std::fabs(see + sgg) <= 1.7e308)) {
      regular = false;
      return false;
    }
    if (kind == F32) for (int64_t i = 0; i < count; ++i) r[i] = static_cast<float>(g[i]);
    else if (kind == BF16) for (int64_t i = 0; i < count; ++i) r[i] = round_bfloat(g[i]);
    else if (kind == F16) for (int64_t i = 0; i < count; ++i) r[i] = round_half(g[i]);
    else memcpy(r, g, count * 8);
    int64_t unequal = 0;
    double most = 0, share = 0, beyond = -1;
#pragma omp simd reduction(+ : unequal) reduction(max : most, share, beyond)
    for (int64_t i = 0; i < count; ++i) {
      const double apart = std::fabs(d[i] - r[i]), size = std::fabs(r[i]);
      unequal += apart != 0;
      most = most > apart ? most : apart;
      const double quotient = apart != 0 ? apart / size : 0.0;
      share = share > quotient ? share : quotient;
      const double excess = apart - (atol + rtol * size);
      beyond = beyond > excess ? beyond : excess;
    }
    different += unequal;
    largest = largest > most ? largest : most;
    relative = relative > share ? relative : share;
    over = over > beyond ? over : beyond;
    return true;
  });
  *out = Columns{largest, relative, ee, eg, gg, units, ulp, over <= 0, different == 0, regular};
}

struct Bound {
  double factor, lowest, sigmas, least;  // max(|y| factor, lowest) + sigmas · max(sigma, |y| least)
  double of_squares, of_result;          // sigma² = of_squares · squares + of_result · y²
};

struct Beyond {
  double worst;  // error beside its bound
  int64_t count;
  int32_t regular;
};

// How many elements are further off than their bound, and the first `most` of them, in logical order.
VECTORS void op_tools_beyond(int32_t dims, const int64_t* shape, const void* device, const int64_t* device_stride,
                             int32_t kind, const void* golden, const int64_t* golden_stride, const void* squares,
                             const int64_t* squares_stride, int32_t squares_kind, const Bound* bound, int64_t* places,
                             int64_t most, Beyond* out) {
  const bool some = squares != nullptr;
  const Strided tensors[3] = {{static_cast<const char*>(device), device_stride, kind},
                              {static_cast<const char*>(golden), golden_stride, F64},
                              {static_cast<const char*>(some ? squares : golden), some ? squares_stride : golden_stride,
                               some ? squares_kind : static_cast<int32_t>(F64)}};
  const Bound b = *bound;
  double worst = 0;
  int64_t found = 0;
  bool regular = true;
  walk<3>(dims, shape, tensors, [&](int64_t position, int64_t count, const int64_t* at, const int64_t* step) __attribute__((always_inline)) {
    double d[BLOCK], g[BLOCK], s[BLOCK], ratio[BLOCK];
    load(tensors[0], at[0], step[0], count, d);
    load(tensors[1], at[1], step[1], count, g);
    if (some) load(tensors[2], at[2], step[2], count, s);
    else for (int64_t i = 0; i < count; ++i) s[i] = 0;
    double top = 0, sum = 0;
#pragma omp simd reduction(+ : sum) reduction(max : top)
    for (int64_t i = 0; i < count; ++i) {
      const double error = std::fabs(d[i] - g[i]), size = std::fabs(g[i]);
      double sigma = std::sqrt(b.of_squares * s[i] + b.of_result * (size * size));
      const double least = size * b.least;
      sigma = sigma > least ? sigma : least;
      double limit = size * b.factor;
      limit = limit > b.lowest ? limit : b.lowest;
      limit += b.sigmas * sigma;
      sum += error + limit;
      const double quotient = error / limit;
      ratio[i] = quotient;
      top = top > quotient ? top : quotient;
    }
    worst = worst > top ? worst : top;
    if (!(sum <= 1.7e308)) {
      regular = false;
      return false;
    }
    if (top > 1)
      for (int64_t i = 0; i < count; ++i)
        if (ratio[i] > 1) {
          if (found < most) places[found] = position + i;
          ++found;
        }
    return true;
  });
  *out = Beyond{worst, found, regular};
}

}  // extern "C"
