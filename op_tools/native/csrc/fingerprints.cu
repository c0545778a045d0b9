// The two sums behind a fingerprint, over one share of the words; `fingerprints.ByOperators` says what they are.
// Each block takes one share and leaves a row of two numbers. `triton_fingerprints.py` is its twin.

using Word = long long;  // every parameter has 64 bits
using Bits = unsigned long long;
constexpr int kThreads = 256;

__device__ inline void add(Bits word, Word place, Bits &first, Bits &second) {
  Bits z = word ^ (Bits(place + 1) * 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  first += z;
  second += (z ^ (z >> 29)) * 0xD6E8FEB86659FD93ull;
}

template <typename T>
__device__ inline void fingerprint(Word data, Word rows, Word count, Word share) {
  const T *words = reinterpret_cast<const T *>(data);
  const Word begin = blockIdx.x * share, end = begin + share < count ? begin + share : count;
  Bits first = 0, second = 0;
#pragma unroll 4
  for (Word i = begin + threadIdx.x; i < end; i += kThreads) add(Bits(Word(words[i])), i, first, second);
  __shared__ Bits found[2][kThreads];
  found[0][threadIdx.x] = first;
  found[1][threadIdx.x] = second;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half)
      for (int k = 0; k < 2; ++k) found[k][threadIdx.x] += found[k][threadIdx.x + half];
  }
  if (threadIdx.x == 0)
    for (int k = 0; k < 2; ++k) reinterpret_cast<Bits *>(rows)[2 * Word(blockIdx.x) + k] = found[k][0];
}

#define KERNEL(NAME, TYPE) \
  extern "C" __global__ void NAME(Word data, Word rows, Word count, Word share) { fingerprint<TYPE>(data, rows, count, share); }
KERNEL(fingerprints_int64, long long)
KERNEL(fingerprints_int32, int)
KERNEL(fingerprints_int16, short)
KERNEL(fingerprints_uint8, unsigned char)
