// Fingerprints of tensors, many of them in one launch; `trace/prints.py` says what they are and computes the same numbers.
// Each block takes 8192 elements of one tensor, read once, and leaves a row. `trace_prints_together` makes one row of each
// tensor's rows. `front_ledger.h` fills the table of `trace_prints_table`, as it does for statistics.cu; `trace_book_prints.h`
// that of `trace_prints_strided`, which reads tensors of any layout. NVRTC compiles it, so there is no header.

using Word = long long;  // every number has 64 bits
using Bits = unsigned long long;
constexpr int kThreads = 256;
constexpr int kEach = 32;  // elements of a thread
constexpr int kChunk = kThreads * kEach;
constexpr int kMaxEntries = 32;
constexpr int kProjections = 8;
constexpr int kSum = 8, kSquares = 9, kLow = 10, kHigh = 11, kNan = 12, kInf = 13, kWidth = 14, kStride = 16;
constexpr int kGridBits = 36;

struct Entry {
  Word data, numel, share, first;  // `first`: its first block
  Word inner, step;                // not used: elements lie one after the other
  Word kind;
};
struct Table {
  Word count, rows;
  Entry entries[kMaxEntries];
};

constexpr int kDims = 4;  // after those that lie one behind the other are joined
struct Strided {
  Word data, numel, first, kind, dims;
  Word sizes[kDims - 1], strides[kDims];  // the last dimension first
};
struct StridedTable {
  Word count, rows;
  Strided entries[kMaxEntries];
};

__device__ inline Bits hashed(Bits number) {
  Bits z = number * 0x9E3779B97F4A7C15ull + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

__device__ inline double infinity() { return __longlong_as_double(0x7FF0000000000000ll); }

__device__ inline double power_of_two(int exponent) { return __longlong_as_double(Word(exponent + 1023) << 52); }

struct Half {
  unsigned short bits;
};
struct Brain {
  unsigned short bits;
};
__device__ inline float wide(Brain value) { return __uint_as_float(unsigned(value.bits) << 16); }
__device__ inline float wide(Half value) {
  float found;
  asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"(value.bits));
  return found;
}
__device__ inline float wide(float value) { return value; }
template <typename T>
__device__ inline double wide(T value) { return double(value); }  // integers, too

template <typename T>
struct InOrder {  // elements that lie one after the other
  const T *data;
  __device__ T operator()(int at) const { return data[at]; }
};
// Division by a number that stays the same, of numbers below 2^31.
struct Divider {
  unsigned size, factor;
  int shift;
  __device__ explicit Divider(Word by) : size(unsigned(by)), shift(0) {
    while ((1ull << shift) < size) ++shift;
    factor = unsigned((((1ull << shift) - size) << 32) / size + 1);
  }
  __device__ unsigned operator()(unsigned number) const {
    return unsigned(((Bits(number) * factor >> 32) + number) >> shift);
  }
};

template <typename T>
struct InSteps {
  const Strided &entry;
  Word begin;
  Divider by[kDims - 1];
  __device__ InSteps(const Strided &entry, Word begin)
      : entry(entry), begin(begin), by{Divider(size(0)), Divider(size(1)), Divider(size(2))} {}
  __device__ Word size(int d) const { return d + 1 < entry.dims && entry.numel < (Word(1) << 31) ? entry.sizes[d] : 1; }
  __device__ T operator()(int at) const {
    const T *data = reinterpret_cast<const T *>(entry.data);
    Word place = 0;
    if (entry.numel < (Word(1) << 31)) {
      unsigned left = unsigned(begin) + unsigned(at);
#pragma unroll
      for (int d = 0; d + 1 < kDims; ++d) {
        if (d + 1 >= entry.dims) break;
        const unsigned next = by[d](left);
        place += Word(left - next * by[d].size) * entry.strides[d];
        left = next;
      }
      return data[place + Word(left) * entry.strides[entry.dims - 1]];
    }
    Bits left = Bits(begin + at);
    int d = 0;
    for (; d + 1 < entry.dims; ++d) {
      const Bits size = Bits(entry.sizes[d]);
      place += Word(left % size) * entry.strides[d];
      left /= size;
    }
    return data[place + Word(left) * entry.strides[d]];
  }
};

__device__ inline double joined(bool is_low, bool is_high, double mine, double other) {
  const double sum = __dadd_rn(mine, other);
  return is_low ? (other < mine ? other : mine) : is_high ? (other > mine ? other : mine) : sum;
}

// The sum, least or largest of all threads, in a fixed order: lanes by halves, then warps by halves. In each round a lane
// hands over half of the numbers that it has and keeps the others; in the end two lanes have one number of the warp.
__device__ inline void reduce(double *mine, double (*shared)[kThreads / 32], double *row) {
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
    double some[kThreads / 32];
    for (int w = 0; w < kThreads / 32; ++w) some[w] = shared[k][w];
    for (int half = kThreads / 64; half > 0; half /= 2)
      for (int w = 0; w < half; ++w) {
        const double other = some[w + half];
        if (k == kLow) some[w] = other < some[w] ? other : some[w];
        else if (k == kHigh) some[w] = other > some[w] ? other : some[w];
        else some[w] = __dadd_rn(some[w], other);
      }
    row[k] = some[0];
  }
}

// What depends on how elements are held. Of a float the square is exact in double precision, and it is at most 2^36 times
// the grid: adding a large number rounds it to a whole one.
__device__ inline double with_square(float value, double sum) { return __fma_rn(double(value), double(value), sum); }
__device__ inline double with_square(double value, double sum) { return __dadd_rn(sum, __dmul_rn(value, value)); }
__device__ inline double on_grid(float value, double scale) {
  constexpr double kLarge = 6755399441055744.0;  // 1.5 * 2^52
  return __dadd_rn(__fma_rn(double(value), scale, kLarge), -kLarge);
}
__device__ inline double on_grid(double value, double scale) { return rint(__dmul_rn(value, scale)); }

template <typename Held, typename Read>
__device__ void print_chunk(const Read read, int count, double *row) {
  __shared__ double shared[kWidth][kThreads / 32];
  __shared__ double most[kThreads / 32];
  Held values[kEach];
  double mine[kWidth] = {};
  Held low = Held(infinity()), high = -Held(infinity()), size = 0;
  int nan = 0, inf = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int at = j * kThreads + threadIdx.x;
    values[j] = at < count ? wide(read(at)) : Held(0);
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (j * kThreads + int(threadIdx.x) < count) {
      Held value = values[j];
      if (value - value != Held(0)) {
        if (value != value) ++nan;
        else ++inf;
        values[j] = value = 0;
      }
      mine[kSquares] = with_square(value, mine[kSquares]);
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
  }
  mine[kLow] = low;
  mine[kHigh] = high;
  mine[kNan] = nan;
  mine[kInf] = inf;
  if (high >= low) size = high > -low ? high : -low;
  double largest = size;
  for (int apart = 16; apart > 0; apart /= 2) {
    const double other = __shfl_xor_sync(0xFFFFFFFFu, largest, apart);
    largest = other > largest ? other : largest;
  }
  if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) largest = most[w] > largest ? most[w] : largest;
  largest = largest < 1e-290 ? 1e-290 : largest > 1e290 ? 1e290 : largest;
  int exponent = kGridBits - (int(__double_as_longlong(largest) >> 52) - 1022);
  exponent = exponent < -1000 ? -1000 : exponent > 1000 ? 1000 : exponent;
  const double scale = power_of_two(exponent);
  // whole numbers: exact in any order, so two elements are added or subtracted once for all projections
#pragma unroll
  for (int j = 0; j < kEach; j += 2) {
    const double one = on_grid(values[j], scale), two = on_grid(values[j + 1], scale);
    const double sum = one + two, difference = one - two;
    const Bits first = hashed(kThreads + j), second = hashed(kThreads + j + 1);
#pragma unroll
    for (int k = 0; k < kProjections; ++k) {
      const double both = ((first ^ second) >> k) & 1 ? difference : sum;
      mine[k] += (first >> k) & 1 ? -both : both;
    }
    mine[kSum] += sum;
  }
  const Bits weights = hashed(threadIdx.x);
  const double back = power_of_two(-exponent);
#pragma unroll
  for (int k = 0; k < kProjections; ++k) {
    const int bits = int(weights >> (4 * k)) & 15;
    const double weight = 2 * (bits & 7) + 1;
    mine[k] *= bits & 8 ? -weight : weight;
  }
  reduce(mine, shared, row);
  if (threadIdx.x <= kSum) row[threadIdx.x] *= back;  // the thread that wrote it
}

extern "C" __global__ void trace_prints_table(const __grid_constant__ Table table) {
  const Word block = blockIdx.x;
  int at = 0;
  while (at + 1 < table.count && table.entries[at + 1].first <= block) ++at;
  const Entry &entry = table.entries[at];
  const Word begin = (block - entry.first) * kChunk;
  const int count = entry.numel - begin < kChunk ? int(entry.numel - begin) : kChunk;
  double *row = reinterpret_cast<double *>(table.rows) + block * kStride;
  if (entry.kind == 0) print_chunk<float>(InOrder<Brain>{reinterpret_cast<const Brain *>(entry.data) + begin}, count, row);
  else if (entry.kind == 1) print_chunk<float>(InOrder<Half>{reinterpret_cast<const Half *>(entry.data) + begin}, count, row);
  else if (entry.kind == 2) print_chunk<float>(InOrder<float>{reinterpret_cast<const float *>(entry.data) + begin}, count, row);
  else print_chunk<double>(InOrder<double>{reinterpret_cast<const double *>(entry.data) + begin}, count, row);
}

template <typename T, typename Held>
__device__ void print_strided(const Strided &entry, Word begin, int count, double *row) {
  if (entry.dims == 0) print_chunk<Held>(InOrder<T>{reinterpret_cast<const T *>(entry.data) + begin}, count, row);
  else print_chunk<Held>(InSteps<T>{entry, begin}, count, row);
}

extern "C" __global__ void trace_prints_strided(const __grid_constant__ StridedTable table) {
  const Word block = blockIdx.x;
  int at = 0;
  while (at + 1 < table.count && table.entries[at + 1].first <= block) ++at;
  const Strided &entry = table.entries[at];
  const Word begin = (block - entry.first) * kChunk;
  const int count = entry.numel - begin < kChunk ? int(entry.numel - begin) : kChunk;
  double *row = reinterpret_cast<double *>(table.rows) + block * kStride;
  switch (entry.kind) {
    case 0: return print_strided<Brain, float>(entry, begin, count, row);
    case 1: return print_strided<Half, float>(entry, begin, count, row);
    case 2: return print_strided<float, float>(entry, begin, count, row);
    case 3: return print_strided<double, double>(entry, begin, count, row);
    case 4: return print_strided<long long, double>(entry, begin, count, row);
    case 5: return print_strided<int, double>(entry, begin, count, row);
    default: return print_strided<unsigned char, double>(entry, begin, count, row);
  }
}

// One block for each tensor: its rows are those from starts[i] up to starts[i + 1]. The norm is still a sum of squares.
extern "C" __global__ void trace_prints_together(Word rows, Word starts, Word results) {
  __shared__ double shared[kWidth][kThreads / 32];
  const Word *first = reinterpret_cast<const Word *>(starts) + blockIdx.x;
  const double *row = reinterpret_cast<const double *>(rows);
  double mine[kWidth] = {};
  mine[kLow] = infinity();
  mine[kHigh] = -infinity();
  for (Word i = first[0] + threadIdx.x; i < first[1]; i += kThreads) {
    const Bits signs = hashed(1000003 + Bits(i - first[0]));
    for (int k = 0; k < kWidth; ++k) {
      const double value = row[i * kStride + k];
      if (k == kLow) mine[k] = value < mine[k] ? value : mine[k];
      else if (k == kHigh) mine[k] = value > mine[k] ? value : mine[k];
      else mine[k] = __dadd_rn(mine[k], k < kProjections && ((signs >> k) & 1) ? -value : value);
    }
  }
  reduce(mine, shared, reinterpret_cast<double *>(results) + Word(blockIdx.x) * kWidth);
}
