// The CRC-32 of zip archives, as fast as memory is read: by carry-less multiplication on x86, by the CRC instructions on
// ARM. A processor without them says so, and zlib computes it.

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>

namespace {

// Folds 64 bytes at a time (Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ", Intel, 2009).
// `size` is a multiple of 16, and at least 64.
__attribute__((target("pclmul,sse4.1"))) uint32_t folded(const unsigned char *data, size_t size, uint32_t crc) {
  const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i last = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const __m128i low = _mm_setr_epi32(~0, 0, ~0, 0);
  __m128i x[4];
  for (int k = 0; k < 4; ++k) x[k] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(data) + k);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (data += 64, size -= 64; size >= 64; data += 64, size -= 64)
    for (int k = 0; k < 4; ++k) {
      const __m128i more = _mm_loadu_si128(reinterpret_cast<const __m128i *>(data) + k);
      const __m128i product = _mm_clmulepi64_si128(x[k], by_64, 0x00);
      x[k] = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x[k], by_64, 0x11), product), more);
    }
  __m128i sum = x[0];
  for (int k = 1; k < 4; ++k) {
    const __m128i product = _mm_clmulepi64_si128(sum, by_16, 0x00);
    sum = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(sum, by_16, 0x11), x[k]), product);
  }
  for (; size >= 16; data += 16, size -= 16) {
    const __m128i more = _mm_loadu_si128(reinterpret_cast<const __m128i *>(data));
    const __m128i product = _mm_clmulepi64_si128(sum, by_16, 0x00);
    sum = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(sum, by_16, 0x11), more), product);
  }
  sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by_16, 0x10));  // 128 bits to 64
  const __m128i rest = _mm_srli_si128(sum, 4);
  sum = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(sum, low), last, 0x00), rest);
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(sum, low), polynomial, 0x10);  // Barrett reduction to 32
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low), polynomial, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(sum, quotient), 1));
}

}  // namespace

extern "C" int crc32_supported() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

// How many of the bytes are in the checksum, a multiple of 16: the caller adds the rest.
extern "C" size_t crc32_update(const unsigned char *data, size_t size, uint32_t *crc) {
  size -= size % 16;
  if (size < 64) return 0;
  *crc = ~folded(data, size, ~*crc);
  return size;
}

#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>

#include <cstring>

extern "C" int crc32_supported() { return (getauxval(AT_HWCAP) & (1 << 7)) != 0; }  // HWCAP_CRC32

extern "C" __attribute__((target("+crc"))) size_t crc32_update(const unsigned char *data, size_t size, uint32_t *crc) {
  uint32_t sum = ~*crc;
  size -= size % 16;
  for (size_t at = 0; at < size; at += 8) {
    uint64_t word;
    std::memcpy(&word, data + at, 8);
    sum = __crc32d(sum, word);
  }
  *crc = ~sum;
  return size;
}

#else

extern "C" int crc32_supported() { return 0; }
extern "C" size_t crc32_update(const unsigned char *, size_t, uint32_t *) { return 0; }

#endif
