// Count, mean, squared distances from it, infinities, minimum and maximum of one share of a tensor's elements.
// Each block takes one share and leaves one row of six doubles; a NaN spreads to the minimum and the maximum.
// NVRTC compiles it in a tenth of a second, so there is no header in here. `triton_statistics.py` is its twin.

using Word = long long;  // every parameter has 64 bits
constexpr int kThreads = 256;

__device__ inline float wide(unsigned short bits, float) {  // bfloat16
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}
__device__ inline float wide(unsigned short bits, short) {  // float16
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ inline float wide(float value, int) { return value; }
__device__ inline double wide(double value, int) { return value; }

template <typename T, typename Kind>
__device__ inline void statistics(Word data, Word rows, Word numel, Word share, Kind kind) {
  const T *values = reinterpret_cast<const T *>(data);
  const Word begin = blockIdx.x * share, end = begin + share < numel ? begin + share : numel;
  const double infinity = __longlong_as_double(0x7FF0000000000000ll);
  const double first = begin < end ? wide(values[begin], kind) : 0.0;
  const double pivot = first - first == 0.0 ? first : 0.0;  // sums of distances from it lose few digits
  double sum = 0.0, squares = 0.0, low = infinity, high = -infinity;
  int infinite = 0, nans = 0;
  for (Word i = begin + threadIdx.x; i < end; i += kThreads) {
    const double value = wide(values[i], kind), apart = value - pivot;
    sum += apart;
    squares += apart * apart;
    infinite += value == infinity || value == -infinity;
    nans += value != value;
    low = value < low ? value : low;
    high = value > high ? value : high;
  }
  __shared__ double found[6][kThreads];
  double mine[6] = {sum, squares, double(infinite), double(nans), low, high};
  for (int k = 0; k < 6; ++k) found[k][threadIdx.x] = mine[k];
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      const int other = threadIdx.x + half;
      for (int k = 0; k < 4; ++k) found[k][threadIdx.x] += found[k][other];
      if (found[4][other] < found[4][threadIdx.x]) found[4][threadIdx.x] = found[4][other];
      if (found[5][other] > found[5][threadIdx.x]) found[5][threadIdx.x] = found[5][other];
    }
  }
  if (threadIdx.x == 0) {
    double *row = reinterpret_cast<double *>(rows) + Word(blockIdx.x) * 6;
    const double count = end > begin ? double(end - begin) : 0.0, mean = found[0][0] / (count > 0.0 ? count : 1.0);
    const double nothing = __longlong_as_double(0x7FF8000000000000ll);
    row[0] = count;
    row[1] = count > 0.0 ? pivot + mean : 0.0;
    row[2] = found[1][0] - found[0][0] * mean;
    row[3] = found[2][0];
    row[4] = found[3][0] > 0.0 ? nothing : found[4][0];
    row[5] = found[3][0] > 0.0 ? nothing : found[5][0];
  }
}

#define KERNEL(NAME, TYPE, KIND) \
  extern "C" __global__ void NAME(Word data, Word rows, Word numel, Word share) { statistics<TYPE>(data, rows, numel, share, KIND()); }
KERNEL(statistics_bfloat16, unsigned short, float)
KERNEL(statistics_float16, unsigned short, short)
KERNEL(statistics_float32, float, int)
KERNEL(statistics_float64, double, int)
