// Fingerprints of new tensors on a GPU of NVIDIA: one launch for those of a call, straight from here. Nobody waits; rows
// stay on the device until its buffer is full. `trace/device_prints.py` sends them to the host. Included by trace_book.cpp.

// As in trace_prints.cu; all of it is the kernel's one parameter.
constexpr int kMaxEntries = 32, kDims = 4, kChunk = 8192, kRowBytes = 128, kThreads = 128;
struct PrintEntry {
  int64_t data, numel, first;
  int32_t kind, dims, pairs, before;
  uint32_t sizes[kDims], factors[kDims], shifts[kDims];
  int64_t strides[kDims];
};
struct PrintTable {
  int64_t count, rows;
  PrintEntry entries[kMaxEntries];
};

// Which of the kernel's ways of reading a dtype takes, -1 for none.
int kind_of_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16: return 0;
    case at::kHalf: return 1;
    case at::kFloat: return 2;
    case at::kDouble: return 3;
    case at::kLong: return 4;
    case at::kInt: return 5;
    case at::kByte: case at::kBool: return 6;
    default: return -1;
  }
}

// How the kernel divides a number below 2^31 by a size.
void divide_by(uint32_t size, PrintEntry &entry, int d) {
  entry.shifts[d] = 0;
  while ((1ull << entry.shifts[d]) < size) ++entry.shifts[d];
  entry.factors[d] = uint32_t((((1ull << entry.shifts[d]) - size) << 32) / size + 1);
}

// Whether an element of even number lies where it can be read together with the next one.
bool in_pairs(const PrintEntry &entry, int64_t element_size) {
  if (entry.data % (2 * element_size) != 0 || entry.before % 2 != 0) return false;
  if (entry.dims == 0) return true;
  if (entry.strides[0] != 1 || (entry.dims > 1 && entry.sizes[0] % 2 != 0)) return false;
  return std::all_of(entry.strides + 1, entry.strides + entry.dims, [](int64_t stride) { return stride % 2 == 0; });
}

// Dimensions that are left when those that lie one behind the other are joined, the last one first; none where all
// elements lie in order. False where there are too many.
bool laid_out(const at::Tensor &tensor, PrintEntry &entry) {
  entry.dims = 0;
  const auto element_size = int64_t(tensor.element_size());
  if (tensor.is_contiguous()) {
    entry.pairs = in_pairs(entry, element_size);
    if (!entry.pairs) entry.dims = 1;
    entry.strides[0] = 1;
    return true;
  }
  int64_t sizes[kDims], count = 0;
  for (int64_t d = tensor.dim() - 1; d >= 0; --d) {
    const int64_t size = tensor.size(d), stride = tensor.stride(d);
    if (size == 1) continue;
    if (count > 0 && stride == entry.strides[count - 1] * sizes[count - 1]) {
      sizes[count - 1] *= size;
      continue;
    }
    if (count == kDims) return false;
    sizes[count] = size;
    entry.strides[count++] = stride;
  }
  for (int d = 0; d < count; ++d) {
    entry.sizes[d] = uint32_t(sizes[d]);
    divide_by(entry.sizes[d], entry, d);
  }
  entry.dims = int32_t(count);
  entry.pairs = in_pairs(entry, element_size);
  return true;
}

struct Printer {
  LaunchKernel launch_kernel = nullptr;
  void *function = nullptr;
  Streams streams;
  int64_t address = 0, capacity = 0, used = 0;  // of rows on the device
  PyObject *send = nullptr;
  std::vector<PrintEntry> waiting;      // of the present call
  std::vector<int64_t> numbers;         // of tensors: those whose rows are on the device, then those that wait
  std::vector<int64_t> starts;          // the first row of each on the device
  std::vector<int64_t> chunks;          // of the whole, where each begins, as `numbers`
  std::vector<int64_t> used_streams;

  void forget() {
    Py_CLEAR(send);
    Py_CLEAR(streams.raw_stream);
    launch_kernel = nullptr;
    waiting.clear();
  }

  // Take a tensor that is to be printed, from place `first` of a whole on; false where Python must do that.
  bool take(const at::Tensor &tensor, int64_t number, int64_t first = 0) {
    if (launch_kernel == nullptr || tensor.device().type() != streams.type || tensor.device().index() != streams.index) return false;
    if (!is_strided(tensor) || tensor.is_neg() || tensor.is_conj()) return false;
    PrintEntry entry{};
    entry.kind = kind_of_dtype(tensor.scalar_type());
    entry.numel = tensor.numel();
    entry.before = int32_t(first % kChunk);
    const void *data = address_of(tensor);
    entry.data = reinterpret_cast<int64_t>(data);
    if (entry.kind < 0 || entry.numel == 0 || data == nullptr || rows_of(entry) > capacity || entry.numel >> 31 != 0) return false;
    if (!laid_out(tensor, entry)) return false;
    waiting.push_back(entry);
    numbers.push_back(number);
    chunks.push_back(first / kChunk);
    return true;
  }

  static int64_t rows_of(const PrintEntry &entry) { return (entry.before + entry.numel + kChunk - 1) / kChunk; }

  // Print what waits, before anybody writes to it.
  void launch() {
    if (waiting.empty()) return;
    std::vector<PrintEntry> entries;
    entries.swap(waiting);
    const OnDevice here(streams.type, streams.index);
    try {
      launch_all(entries);
    } catch (...) {
      numbers.resize(starts.size());  // those of the others are lost
      chunks.resize(starts.size());
      throw;
    }
  }

  void launch_all(const std::vector<PrintEntry> &entries) {
    const int64_t raw = streams.now();
    if (std::find(used_streams.begin(), used_streams.end(), raw) == used_streams.end()) used_streams.push_back(raw);
    PrintTable table;
    for (size_t at = 0; at < entries.size();) {
      if (used + rows_of(entries[at]) > capacity) {
        Owned{checked(PyObject_CallNoArgs(send))};  // calls `take_printed`
        used_streams.push_back(raw);
      }
      table.count = 0;
      table.rows = address + kRowBytes * used;
      int64_t blocks = 0;
      for (; at < entries.size() && table.count < kMaxEntries; ++at) {
        const int64_t own = rows_of(entries[at]);
        if (used + blocks + own > capacity) break;
        PrintEntry &entry = table.entries[table.count++] = entries[at];
        entry.first = blocks;
        starts.push_back(used + blocks);
        blocks += own;
      }
      void *parameters[] = {&table};
      const int error = launch_kernel(function, unsigned(blocks), 1, 1, kThreads, 1, 1, 0, reinterpret_cast<void *>(raw), parameters,
                                      nullptr);
      if (error != 0) throw std::runtime_error("cuLaunchKernel: error " + std::to_string(error));
      used += blocks;
    }
  }
};
