// Slices of several tensors in one launch, each without gaps at a place of its own, on the device or in pinned memory.
// A piece has up to six dimensions; along each, all of it is taken, or the places in an index. NVRTC compiles it in a
// tenth of a second, so there is no header in here. `gather.py` fills the table.

using Word = long long;  // every number has 64 bits
constexpr int kMaxPieces = 20;
constexpr int kMaxDims = 6;

struct Dim {
  Word size, stride, index;  // stride in bytes; the address of an index, or 0
};
struct Piece {
  Word source, place, count;  // a source of 0 stands for zeros
  Word shape;                 // bytes of an element, and 256 times the number of dimensions
  Dim dims[kMaxDims];         // the last one first
};
struct Table {
  Word count;
  Piece pieces[kMaxPieces];
};

template <typename T>
__device__ void take(const Piece& piece) {
  T* place = reinterpret_cast<T*>(piece.place);
  const int dims = static_cast<int>(piece.shape >> 8);
  for (Word k = blockIdx.x * Word(blockDim.x) + threadIdx.x; k < piece.count; k += Word(gridDim.x) * blockDim.x) {
    if (!piece.source) {
      place[k] = T();
      continue;
    }
    Word rest = k, from = piece.source;
    for (int d = 0; d < dims; ++d) {
      const Dim& dim = piece.dims[d];
      const Word along = rest % dim.size;
      rest /= dim.size;
      from += (dim.index ? reinterpret_cast<const Word*>(dim.index)[along] : along) * dim.stride;
    }
    place[k] = *reinterpret_cast<const T*>(from);
  }
}

struct alignas(16) Sixteen {
  Word low, high;
};

extern "C" __global__ void gather_slices(const __grid_constant__ Table table) {
  const Piece& piece = table.pieces[blockIdx.y];
  const int bytes = static_cast<int>(piece.shape & 255);
  if (bytes == 1) take<unsigned char>(piece);
  if (bytes == 2) take<unsigned short>(piece);
  if (bytes == 4) take<unsigned int>(piece);
  if (bytes == 8) take<Word>(piece);
  if (bytes == 16) take<Sixteen>(piece);
}
