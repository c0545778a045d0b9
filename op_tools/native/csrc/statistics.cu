// Count, mean, squared distances from it, infinities, minimum and maximum of tensors, many of them in one launch.
// Each block takes one share of one tensor and leaves a row of six doubles; a NaN spreads to the minimum and the maximum.
// `statistics_together` makes one row of each tensor's rows. NVRTC compiles it in a tenth of a second, so there is no
// header in here. `triton_statistics.py` does the same for one tensor, `front_ledger.h` fills the table.

using Word = long long;  // every number has 64 bits
constexpr int kThreads = 256;
constexpr int kMaxEntries = 32;
constexpr int kWidth = 6;

struct Entry {
  Word data, numel, share, first;  // `first`: its first block
  Word inner, step;                // stretches of `inner` elements, `step` apart
  Word kind;
};
struct Table {
  Word count, rows;
  Entry entries[kMaxEntries];
};

struct Bfloat16 { unsigned short bits; };
struct Float16 { unsigned short bits; };

__device__ inline double wide(Bfloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }
__device__ inline double wide(Float16 value) {
  float wider;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wider) : "h"(value.bits));
  return wider;
}
__device__ inline double wide(float value) { return value; }
__device__ inline double wide(double value) { return value; }

__device__ inline double infinity() { return __longlong_as_double(0x7FF0000000000000ll); }

struct Found {
  double pivot, sum = 0.0, squares = 0.0, low = infinity(), high = -infinity();
  int infinite = 0, nans = 0;
  __device__ void add(double value) {
    const double apart = value - pivot;
    sum += apart;
    squares += apart * apart;
    infinite += value == infinity() || value == -infinity();
    nans += value != value;
    low = value < low ? value : low;
    high = value > high ? value : high;
  }
};

template <typename T>
__device__ void statistics(const Entry &entry, Word block, double *row, double (*all)[kThreads]) {
  const T *values = reinterpret_cast<const T *>(entry.data);
  const Word begin = block * entry.share;
  const Word end = begin + entry.share < entry.numel ? begin + entry.share : entry.numel;
  const bool whole = entry.inner == entry.numel;
  const double first = wide(values[whole ? begin : begin / entry.inner * entry.step + begin % entry.inner]);
  Found found;
  found.pivot = first - first == 0.0 ? first : 0.0;  // sums of distances from it lose few digits
  Word scalars = begin;
  if (whole && reinterpret_cast<Word>(values + begin) % 16 == 0) {
    constexpr int kAtOnce = 16 / sizeof(T);
    struct alignas(16) Vector { T values[kAtOnce]; };
    const Word vectors = (end - begin) / kAtOnce;
    const Vector *wider = reinterpret_cast<const Vector *>(values + begin);
#pragma unroll 1
    for (Word i = threadIdx.x; i < vectors; i += kThreads) {
      const Vector some = wider[i];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) found.add(wide(some.values[k]));
    }
    scalars = begin + vectors * kAtOnce;
  }
#pragma unroll 1
  for (Word i = scalars + threadIdx.x; i < end; i += kThreads)
    found.add(wide(values[whole ? i : i / entry.inner * entry.step + i % entry.inner]));
  const double mine[kWidth] = {found.sum, found.squares, double(found.infinite), double(found.nans), found.low, found.high};
  for (int k = 0; k < kWidth; ++k) all[k][threadIdx.x] = mine[k];
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      const int other = threadIdx.x + half;
      for (int k = 0; k < 4; ++k) all[k][threadIdx.x] += all[k][other];
      if (all[4][other] < all[4][threadIdx.x]) all[4][threadIdx.x] = all[4][other];
      if (all[5][other] > all[5][threadIdx.x]) all[5][threadIdx.x] = all[5][other];
    }
  }
  if (threadIdx.x == 0) {
    const double count = double(end - begin), mean = all[0][0] / count;
    const double nothing = __longlong_as_double(0x7FF8000000000000ll);
    row[0] = count;
    row[1] = found.pivot + mean;
    row[2] = all[1][0] - all[0][0] * mean;
    row[3] = all[2][0];
    row[4] = all[3][0] > 0.0 ? nothing : all[4][0];
    row[5] = all[3][0] > 0.0 ? nothing : all[5][0];
  }
}

extern "C" __global__ void statistics_table(const __grid_constant__ Table table) {
  __shared__ double all[kWidth][kThreads];
  const Word block = blockIdx.x;
  int at = 0;
  while (at + 1 < table.count && table.entries[at + 1].first <= block) ++at;
  const Entry &entry = table.entries[at];
  double *row = reinterpret_cast<double *>(table.rows) + block * kWidth;
  switch (entry.kind) {
    case 0: statistics<Bfloat16>(entry, block - entry.first, row, all); break;
    case 1: statistics<Float16>(entry, block - entry.first, row, all); break;
    case 2: statistics<float>(entry, block - entry.first, row, all); break;
    default: statistics<double>(entry, block - entry.first, row, all);
  }
}

// One warp for each tensor: its rows are those from starts[i] up to starts[i + 1].
extern "C" __global__ void statistics_together(Word rows, Word starts, Word results) {
  const Word *first = reinterpret_cast<const Word *>(starts) + blockIdx.x;
  const double *row = reinterpret_cast<const double *>(rows);
  auto total = [](double value) {
    for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, apart);
    return value;
  };
  double count = 0.0, sum = 0.0, infinite = 0.0, low = infinity(), high = -infinity();
  bool nan = false;
  for (Word i = first[0] + threadIdx.x; i < first[1]; i += 32) {
    count += row[i * kWidth];
    sum += row[i * kWidth] * row[i * kWidth + 1];
    infinite += row[i * kWidth + 3];
    const double least = row[i * kWidth + 4], most = row[i * kWidth + 5];
    nan = nan || least != least;
    low = least < low ? least : low;
    high = most > high ? most : high;
  }
  count = total(count);
  infinite = total(infinite);
  const double mean = total(sum) / count;
  double squares = 0.0;
  for (Word i = first[0] + threadIdx.x; i < first[1]; i += 32) {
    const double apart = row[i * kWidth + 1] - mean;
    squares += row[i * kWidth + 2] + row[i * kWidth] * apart * apart;
  }
  squares = total(squares);
  for (int apart = 16; apart > 0; apart /= 2) {
    const double least = __shfl_xor_sync(0xFFFFFFFFu, low, apart), most = __shfl_xor_sync(0xFFFFFFFFu, high, apart);
    low = least < low ? least : low;
    high = most > high ? most : high;
  }
  nan = __any_sync(0xFFFFFFFFu, nan);
  if (threadIdx.x == 0) {
    double *result = reinterpret_cast<double *>(results) + Word(blockIdx.x) * kWidth;
    const double nothing = __longlong_as_double(0x7FF8000000000000ll);
    const double found[kWidth] = {count, mean, squares, infinite, nan ? nothing : low, nan ? nothing : high};
    for (int k = 0; k < kWidth; ++k) result[k] = found[k];
  }
}
