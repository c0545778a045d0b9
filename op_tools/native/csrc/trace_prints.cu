// Fingerprints of tensors, many of them in one launch; `trace/prints.py` says what they are and computes the same numbers.
// Each block takes 8192 elements of one tensor and leaves a row. `trace_prints_together` makes one row of each tensor's rows.
// `ledger.cpp` fills the table of `trace_prints_table`, as it does for statistics.cu; `trace_book_prints.h` that of
// `trace_prints_chunks`, which reads tensors of any layout. NVRTC compiles it, so there is no header.

using Word = long long;  // every number has 64 bits
using Bits = unsigned long long;
constexpr int kLanes = 256, kRows = 32;  // of the elements of a chunk
constexpr int kChunk = kLanes * kRows;
constexpr int kThreads = kLanes / 2;  // each has two lanes side by side: two elements are read at once
constexpr int kWarps = kThreads / 32;
constexpr int kMaxEntries = 32;
constexpr int kProjections = 8;
constexpr int kSum = 8, kSquares = 9, kLow = 10, kHigh = 11, kNan = 12, kWidth = 14, kStride = 16;
constexpr int kGridBits = 36;

constexpr int kDims = 4;  // after those that lie one behind the other are joined
struct Entry {
  Word data, numel, first;
  int kind, dims, pairs, before;  // `pairs`: two neighbours can be read at once; `before`: places of the first chunk
  unsigned sizes[kDims], factors[kDims], shifts[kDims];  // the last dimension first; how to divide by its size
  Word strides[kDims];
};
struct Table {
  Word count, rows;
  Entry entries[kMaxEntries];
};

__device__ inline Bits hashed(Bits number) {
  Bits z = number * 0x9E3779B97F4A7C15ull + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

__device__ inline double infinity() { return __longlong_as_double(0x7FF0000000000000ll); }

__device__ inline double power_of_two(int exponent) { return __longlong_as_double(Word(exponent + 1023) << 52); }

// -- elements -------------------------------------------------------------------------------------------------

__device__ inline float wide_half(unsigned short bits) {
  float found;
  asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"(bits));
  return found;
}

// Two neighbours, as they lie in memory. `set` replaces one of them.
struct Brains {
  using Element = unsigned short;
  unsigned bits;
  static __device__ inline Brains of(Element one, Element two) { return {unsigned(one) | unsigned(two) << 16}; }
  __device__ inline float at(int side) const { return __uint_as_float(side ? bits & 0xFFFF0000u : bits << 16); }
  __device__ inline void clear(int side) { bits &= side ? 0xFFFFu : 0xFFFF0000u; }
};
struct Halves {
  using Element = unsigned short;
  unsigned bits;
  static __device__ inline Halves of(Element one, Element two) { return {unsigned(one) | unsigned(two) << 16}; }
  __device__ inline float at(int side) const { return wide_half((unsigned short)(side ? bits >> 16 : bits)); }
  __device__ inline void clear(int side) { bits &= side ? 0xFFFFu : 0xFFFF0000u; }
};
struct alignas(8) Floats {
  using Element = float;
  float one, two;
  static __device__ inline Floats of(Element one, Element two) { return {one, two}; }
  __device__ inline float at(int side) const { return side ? two : one; }
  __device__ inline void clear(int side) { (side ? two : one) = 0; }
};

// Where an element lies, in elements from the first.
__device__ inline Word place_of(const Entry &entry, unsigned left) {
  Word place = 0;
#pragma unroll
  for (int d = 0; d + 1 < kDims; ++d) {
    if (d + 1 >= entry.dims) return place + Word(left) * entry.strides[d];
    const unsigned next = unsigned(((Bits(left) * entry.factors[d] >> 32) + left) >> entry.shifts[d]);
    place += Word(left - next * entry.sizes[d]) * entry.strides[d];
    left = next;
  }
  return place + Word(left) * entry.strides[kDims - 1];
}

// The pairs of a thread; what lies before the first element or behind the last one is 0.
template <typename Pair>
__device__ inline void read_pairs(const Entry &entry, Word begin, int from, int count, char *room, Pair (&held)[kRows]) {
  using Element = typename Pair::Element;
  const Element *data = reinterpret_cast<const Element *>(entry.data);
  const int mine = 2 * threadIdx.x;
  if (entry.dims == 0 && from == 0 && count == kChunk) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) held[j] = *reinterpret_cast<const Pair *>(data + begin + j * kLanes + mine);
    return;
  }
  Pair *own = reinterpret_cast<Pair *>(room) + threadIdx.x;  // registers have no numbers that are counted up
#pragma unroll 8
  for (int j = 0; j < kRows; ++j) {
    const int at = j * kLanes + mine;
    Pair pair{};
    const auto here = [&](int at) { return data + (entry.dims == 0 ? begin + at : place_of(entry, unsigned(begin + at))); };
    if (entry.pairs && at >= from && at + 1 < count) pair = *reinterpret_cast<const Pair *>(here(at));
    else pair = Pair::of(at >= from && at < count ? *here(at) : 0, at + 1 >= from && at + 1 < count ? *here(at + 1) : 0);
    own[j * kThreads] = pair;
  }
#pragma unroll
  for (int j = 0; j < kRows; ++j) held[j] = own[j * kThreads];
}

// Elements that are held in double precision: they are read again where they are needed again.
__device__ inline double read_wide(const Entry &entry, Word at) {
  const Word place = entry.dims == 0 ? at : place_of(entry, unsigned(at));
  switch (entry.kind) {
    case 3: return reinterpret_cast<const double *>(entry.data)[place];
    case 4: return double(reinterpret_cast<const long long *>(entry.data)[place]);
    case 5: return double(reinterpret_cast<const int *>(entry.data)[place]);
    default: return double(reinterpret_cast<const unsigned char *>(entry.data)[place]);
  }
}

// -- what a block finds ---------------------------------------------------------------------------------------

struct Shared {
  alignas(8) char room[4 * kChunk];  // for elements that do not lie in order: each thread reads its own
  double sums[kSum + 1][kWarps], squares[2 * kWarps], low[kWarps], high[kWarps];
  unsigned counts[kWarps];
};

// The less and the greater of two; what is no number stays.
template <typename T>
__device__ inline T least(T a, T b) {
  return b < a || b != b ? b : a;
}
template <typename T>
__device__ inline T most(T a, T b) {
  return b > a || b != b ? b : a;
}
// Not NaN, Inf, or a number next to the largest of float32 (a mask of attention): beside it the others would not show.
template <typename T>
__device__ inline bool is_finite(T value) {
  constexpr T kHuge = T(170141183460469231731687303715884105728.0);  // 2^127
  return value > -kHuge && value < kHuge;
}

template <typename Pair>
__device__ inline void find_extremes(const Pair (&held)[kRows], float &low, float &high) {
#pragma unroll
  for (int j = 0; j < kRows; ++j)
    for (int side = 0; side < 2; ++side) {
      low = least(low, held[j].at(side));
      high = most(high, held[j].at(side));
    }
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// The same, for two elements at once.
#define PACKED_EXTREMES(Pair, type)                                                            \
  __device__ inline void find_extremes(const Pair (&held)[kRows], float &low, float &high) {   \
    Pair lows = held[0], highs = held[0];                                                      \
    _Pragma("unroll") for (int j = 1; j < kRows; ++j) {                                        \
      asm("min.NaN." type " %0, %0, %1;" : "+r"(lows.bits) : "r"(held[j].bits));               \
      asm("max.NaN." type " %0, %0, %1;" : "+r"(highs.bits) : "r"(held[j].bits));              \
    }                                                                                          \
    low = least(lows.at(0), lows.at(1));                                                       \
    high = most(highs.at(0), highs.at(1));                                                     \
  }
PACKED_EXTREMES(Brains, "bf16x2")
PACKED_EXTREMES(Halves, "f16x2")
#endif

// Of a block. All threads get them.
template <typename T>
__device__ inline void join_extremes(T &low, T &high, Shared &shared) {
  for (int apart = 16; apart > 0; apart /= 2) {
    low = least(low, __shfl_xor_sync(0xFFFFFFFFu, low, apart));
    high = most(high, __shfl_xor_sync(0xFFFFFFFFu, high, apart));
  }
  if (threadIdx.x % 32 == 0) {
    shared.low[threadIdx.x / 32] = low;
    shared.high[threadIdx.x / 32] = high;
  }
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) {
    low = least(low, T(shared.low[w]));
    high = most(high, T(shared.high[w]));
  }
}

__device__ inline void join_counts(unsigned nan, unsigned inf, Shared &shared) {
  unsigned both = nan | inf << 16;  // a block has fewer of each than 2^16
  for (int apart = 16; apart > 0; apart /= 2) both += __shfl_xor_sync(0xFFFFFFFFu, both, apart);
  if (threadIdx.x % 32 == 0) shared.counts[threadIdx.x / 32] = both;
}

// The exponent of what brings the largest element to the grid.
__device__ inline int exponent_for(double low, double high) {
  double largest = high >= low ? (high > -low ? high : -low) : 0.0;
  largest = largest < 1e-290 ? 1e-290 : largest > 1e290 ? 1e290 : largest;
  const int exponent = kGridBits - (int(__double_as_longlong(largest) >> 52) - 1022);
  return exponent < -1000 ? -1000 : exponent > 1000 ? 1000 : exponent;
}

// The sums of a thread's elements: whole numbers, and squares of each lane. What is added up exactly, may be in any order.
struct Mine {
  double projections[kProjections], sum, squares[2];
};

// Add what the rows of one lane gave, with the weights of that lane.
__device__ inline void weigh(Mine &mine, const double (&lane)[kProjections], int side) {
  const Bits weights = hashed(2 * threadIdx.x + side);
#pragma unroll
  for (int k = 0; k < kProjections; ++k) {
    const int bits = int(weights >> (4 * k)) & 15;
    const double weight = 2 * (bits & 7) + 1;
    mine.projections[k] = __fma_rn(bits & 8 ? -weight : weight, lane[k], mine.projections[k]);
  }
}

// Add up what all threads found, and write the row. Squares have one order: lanes by halves in groups of 32, then groups.
__device__ inline void write_row(Mine &mine, int exponent, double low, double high, Shared &shared, double *row) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // in each round a thread hands over half of the numbers that it has; in the end four threads have one number
#pragma unroll
  for (int half = kProjections / 2; half > 0; half /= 2) {
    const bool upper = (lane & (4 * half)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const double other = __shfl_xor_sync(0xFFFFFFFFu, upper ? mine.projections[i] : mine.projections[i + half], 4 * half);
      mine.projections[i] = (upper ? mine.projections[i + half] : mine.projections[i]) + other;
    }
  }
  double held = mine.projections[0];
  for (int apart = 2; apart > 0; apart /= 2) held += __shfl_xor_sync(0xFFFFFFFFu, held, apart);
  for (int apart = 16; apart > 0; apart /= 2) mine.sum += __shfl_xor_sync(0xFFFFFFFFu, mine.sum, apart);
  const bool upper = (lane & 8) != 0;
  const double own = upper ? mine.squares[1] : mine.squares[0], given = upper ? mine.squares[0] : mine.squares[1];
  double squares = __dadd_rn(own, __shfl_xor_sync(0xFFFFFFFFu, given, 8));
  for (int apart = 4; apart > 0; apart /= 2) squares = __dadd_rn(squares, __shfl_xor_sync(0xFFFFFFFFu, squares, apart));
  squares = __dadd_rn(squares, __shfl_xor_sync(0xFFFFFFFFu, squares, 8));
  if (lane % 4 == 0) shared.sums[lane / 4][warp] = held;
  if (lane == 0) shared.sums[kSum][warp] = mine.sum;
  if (lane % 16 == 0) shared.squares[2 * warp + lane / 16] = squares;
  __syncthreads();
  const int k = threadIdx.x;
  if (k <= kSum) {
    double sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += shared.sums[k][w];
    row[k] = sum * power_of_two(-exponent);
  } else if (k == kSquares) {
    for (int half = kWarps; half > 0; half /= 2)
      for (int g = 0; g < half; ++g) shared.squares[g] = __dadd_rn(shared.squares[g], shared.squares[g + half]);
    row[k] = shared.squares[0];
  } else if (k < kNan) {
    row[k] = k == kLow ? low : high;
  } else if (k < kWidth) {
    unsigned count = 0;
    for (int w = 0; w < kWarps; ++w) count += k == kNan ? shared.counts[w] & 0xFFFFu : shared.counts[w] >> 16;
    row[k] = count;
  }
}

// Adding a large number rounds to a whole one: of a float and a power of two, the product is exact.
__device__ inline double on_grid(double value, double scale) {
  constexpr double kLarge = 6755399441055744.0;  // 1.5 * 2^52
  return __dadd_rn(__fma_rn(value, scale, kLarge), -kLarge);
}

// Elements of at most 32 bits that a thread holds from the first look at them to the last.
template <typename Pair>
__device__ void print_pairs(const Entry &entry, Word begin, int from, int count, Shared &shared, double *row) {
  Pair held[kRows];
  read_pairs(entry, begin, from, count, shared.room, held);
  float low = float(infinity()), high = -float(infinity());
  bool plain = from == 0 && count == kChunk;
  if (plain) {
    find_extremes(held, low, high);
    join_extremes(low, high, shared);
    plain = is_finite(low) && is_finite(high);
    if (!plain) __syncthreads();
  }
  if (threadIdx.x % 32 == 0) shared.counts[threadIdx.x / 32] = 0;
  if (!plain) {
    unsigned nan = 0, inf = 0;
    low = float(infinity()), high = -float(infinity());
#pragma unroll
    for (int j = 0; j < kRows; ++j)
      for (int side = 0; side < 2; ++side) {
        const int at = j * kLanes + int(2 * threadIdx.x) + side;
        if (at < from || at >= count) continue;
        if (const float value = held[j].at(side); !is_finite(value)) {
          if (value != value) ++nan;
          else ++inf;
          held[j].clear(side);
        }
        low = least(low, held[j].at(side));
        high = most(high, held[j].at(side));
      }
    join_counts(nan, inf, shared);
    join_extremes(low, high, shared);
  }
  const int exponent = exponent_for(low, high);
  const double scale = power_of_two(exponent);
  Mine mine{};
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    double lane[kProjections] = {};
#pragma unroll
    for (int j = 0; j < kRows; j += 2) {  // two elements are added or subtracted once for all projections
      const double one = held[j].at(side), two = held[j + 1].at(side);
      mine.squares[side] = __fma_rn(one, one, mine.squares[side]);
      mine.squares[side] = __fma_rn(two, two, mine.squares[side]);
      const double first = on_grid(one, scale), second = on_grid(two, scale);
      const double sum = first + second, difference = first - second;
      const Bits signs = hashed(kLanes + j), others = hashed(kLanes + j + 1);
#pragma unroll
      for (int k = 0; k < kProjections; ++k) {
        const double both = ((signs ^ others) >> k) & 1 ? difference : sum;
        lane[k] += (signs >> k) & 1 ? -both : both;
      }
      mine.sum += sum;
    }
    weigh(mine, lane, side);
  }
  write_row(mine, exponent, low, high, shared, row);
}

// Numbers of any kind, in double precision.
__device__ void print_wide(const Entry &entry, Word begin, int from, int count, Shared &shared, double *row) {
  double low = infinity(), high = -infinity();
  unsigned nan = 0, inf = 0;
#pragma unroll 4
  for (int at = from + threadIdx.x; at < count; at += kThreads) {
    const double value = read_wide(entry, begin + at);
    if (value != value) ++nan;
    else if (!is_finite(value)) ++inf;
    const double taken = is_finite(value) ? value : 0.0;
    low = least(low, taken);
    high = most(high, taken);
  }
  join_counts(nan, inf, shared);
  join_extremes(low, high, shared);
  const int exponent = exponent_for(low, high);
  const double scale = power_of_two(exponent);
  Mine mine{};
#pragma unroll 1
  for (int side = 0; side < 2; ++side) {
    double lane[kProjections] = {}, squares = 0;
#pragma unroll 4
    for (int j = 0; j < kRows; ++j) {
      const int at = j * kLanes + int(2 * threadIdx.x) + side;
      double value = at >= from && at < count ? read_wide(entry, begin + at) : 0.0;
      if (!is_finite(value)) value = 0;
      squares = __dadd_rn(squares, __dmul_rn(value, value));
      const double whole = rint(__dmul_rn(value, scale));
      const Bits signs = hashed(kLanes + j);
#pragma unroll
      for (int k = 0; k < kProjections; ++k) lane[k] += (signs >> k) & 1 ? -whole : whole;
      mine.sum += whole;
    }
    if (side == 0) mine.squares[0] = squares;
    else mine.squares[1] = squares;
    weigh(mine, lane, side);
  }
  write_row(mine, exponent, low, high, shared, row);
}

extern "C" __global__ void __launch_bounds__(kThreads, 4) trace_prints_chunks(const __grid_constant__ Table table) {
  __shared__ Shared shared;
  const Word block = blockIdx.x;
  int at = 0;
  while (at + 1 < table.count && table.entries[at + 1].first <= block) ++at;
  const Entry &entry = table.entries[at];
  const Word begin = (block - entry.first) * kChunk - entry.before;
  const int from = begin < 0 ? int(-begin) : 0;
  const int count = entry.numel - begin < kChunk ? int(entry.numel - begin) : kChunk;
  double *row = reinterpret_cast<double *>(table.rows) + block * kStride;
  if (entry.kind == 0) print_pairs<Brains>(entry, begin, from, count, shared, row);
  else if (entry.kind == 1) print_pairs<Halves>(entry, begin, from, count, shared, row);
  else if (entry.kind == 2) print_pairs<Floats>(entry, begin, from, count, shared, row);
  else print_wide(entry, begin, from, count, shared, row);
}

// -- rows of a tensor -----------------------------------------------------------------------------------------

constexpr int kTogether = 256;  // threads

__device__ inline double joined(bool is_low, bool is_high, double mine, double other) {
  const double sum = __dadd_rn(mine, other);
  return is_low ? (other < mine ? other : mine) : is_high ? (other > mine ? other : mine) : sum;
}

// The sum, least or largest of all threads, in a fixed order: lanes by halves, then warps by halves. In each round a lane
// hands over half of the numbers that it has and keeps the others; in the end two lanes have one number of the warp.
__device__ inline void reduce(double *mine, double (*shared)[kTogether / 32], double *row) {
  const int lane = threadIdx.x % 32;
  double held[16];
#pragma unroll
  for (int k = 0; k < 16; ++k) held[k] = k < kWidth ? mine[k] : 0.0;
#pragma unroll
  for (int half = 8; half > 0; half /= 2) {
    const int apart = 2 * half;
    const bool upper = (lane & apart) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const double other = __shfl_xor_sync(0xFFFFFFFFu, upper ? held[i] : held[i + half], apart);
      const int k = ((lane >> 1) & ~(half - 1)) + i;  // which of the numbers this lane keeps here
      held[i] = joined(k == kLow, k == kHigh, upper ? held[i + half] : held[i], other);
    }
  }
  const int k = lane >> 1;
  held[0] = joined(k == kLow, k == kHigh, held[0], __shfl_xor_sync(0xFFFFFFFFu, held[0], 1));
  if (k < kWidth && lane % 2 == 0) shared[k][threadIdx.x / 32] = held[0];
  __syncthreads();
  if (threadIdx.x < kWidth) {
    const int k = threadIdx.x;
    double some[kTogether / 32];
    for (int w = 0; w < kTogether / 32; ++w) some[w] = shared[k][w];
    for (int half = kTogether / 64; half > 0; half /= 2)
      for (int w = 0; w < half; ++w) {
        const double other = some[w + half];
        if (k == kLow) some[w] = other < some[w] ? other : some[w];
        else if (k == kHigh) some[w] = other > some[w] ? other : some[w];
        else some[w] = __dadd_rn(some[w], other);
      }
    row[k] = some[0];
  }
}

// One block for each tensor: its rows are those from starts[i] up to starts[i + 1], of chunks from chunks[i] on. The norm is
// still a sum of squares.
extern "C" __global__ void trace_prints_together(Word rows, Word starts, Word chunks, Word results) {
  __shared__ double shared[kWidth][kTogether / 32];
  const Word *first = reinterpret_cast<const Word *>(starts) + blockIdx.x;
  const double *row = reinterpret_cast<const double *>(rows);
  double mine[kWidth] = {};
  mine[kLow] = infinity();
  mine[kHigh] = -infinity();
  const Word chunk = reinterpret_cast<const Word *>(chunks)[blockIdx.x];
  for (Word i = first[0] + (threadIdx.x - chunk % kTogether + kTogether) % kTogether; i < first[1]; i += kTogether) {
    const Bits signs = hashed(1000003 + Bits(chunk + i - first[0]));
    for (int k = 0; k < kWidth; ++k) {
      const double value = row[i * kStride + k];
      if (k == kLow) mine[k] = value < mine[k] ? value : mine[k];
      else if (k == kHigh) mine[k] = value > mine[k] ? value : mine[k];
      else mine[k] = __dadd_rn(mine[k], k < kProjections && ((signs >> k) & 1) ? -value : value);
    }
  }
  reduce(mine, shared, reinterpret_cast<double *>(results) + Word(blockIdx.x) * kWidth);
}
