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

// Unpacks 16 bytes into `count(kind)` numbers; the dtype is asked for once per 16 bytes, so that one piece of code does.
__device__ inline int count(Word kind) { return kind < 2 ? 8 : kind == 2 ? 4 : 2; }

__device__ inline double wide(unsigned bits, Word kind) {
  float value = __uint_as_float(bits << 16);
  if (kind == 1) asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
  return value;
}

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

struct Values {
  Word data, inner, step, kind;
  __device__ double at(Word i) const {
    if (inner > 0) i = i / inner * step + i % inner;
    if (kind < 2) return wide(reinterpret_cast<const unsigned short *>(data)[i], kind);
    return kind == 2 ? reinterpret_cast<const float *>(data)[i] : reinterpret_cast<const double *>(data)[i];
  }
};

__device__ void statistics(const Entry &entry, Word block, double *row, double (*all)[kThreads]) {
  const Word begin = block * entry.share, kind = entry.kind;
  const Word end = begin + entry.share < entry.numel ? begin + entry.share : entry.numel;
  const Values values{entry.data, entry.inner == entry.numel ? 0 : entry.inner, entry.step, kind};
  const double first = values.at(begin);
  Found found;
  found.pivot = first - first == 0.0 ? first : 0.0;  // sums of distances from it lose few digits
  const int at_once = count(kind);
  const Word address = entry.data + begin * (16 / at_once);
  Word scalars = begin;
  if (values.inner == 0 && address % 16 == 0) {
    const Word vectors = (end - begin) / at_once;
    const uint4 *wider = reinterpret_cast<const uint4 *>(address);
#pragma unroll 1
    for (Word i = threadIdx.x; i < vectors; i += kThreads) {
      const uint4 some = wider[i];
      const unsigned words[4] = {some.x, some.y, some.z, some.w};
      if (kind == 3) {
        for (int k = 0; k < 2; ++k) found.add(__hiloint2double(words[2 * k + 1], words[2 * k]));
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (kind == 2) {
            found.add(__uint_as_float(words[k]));
          } else {
            found.add(wide(words[k] & 0xFFFFu, kind));
            found.add(wide(words[k] >> 16, kind));
          }
        }
      }
    }
    scalars = begin + vectors * at_once;
  }
#pragma unroll 1
  for (Word i = scalars + threadIdx.x; i < end; i += kThreads) found.add(values.at(i));
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
  statistics(entry, block - entry.first, row, all);
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
