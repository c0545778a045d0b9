// The tables of a book in columns of numbers, and what it remembers of tensors and their memory. Included by trace_book.cpp.

// As in `trace/format.py`.
enum Phase { kForward, kBackward, kRecomputed, kOptimizer };
enum Kind { kActivation, kParameter, kBuffer, kGradient, kState, kGiven };
enum Side { kInput, kOutput };
enum TableNumber { kTensors, kOperators, kEdges, kMemory, kLevels, kTables };

struct Table {
  std::vector<size_t> widths;  // of the columns, once there is a row
  std::string packed;          // rows that wait, one behind the other
  int64_t rows = 0, all = 0;
  template <typename... Values>
  int64_t add(Values... values) {
    char row[(sizeof(Values) + ...)], *place = row;
    ((std::memcpy(place, &values, sizeof(Values)), place += sizeof(Values)), ...);
    if (widths.empty()) widths = {sizeof(Values)...};
    packed.append(row, sizeof(row));
    ++rows;
    return all++;
  }
  // The rows that wait, column by column; none wait then.
  std::string take() {
    std::string columns;
    columns.resize(packed.size());
    const size_t wide = rows == 0 ? 0 : packed.size() / size_t(rows);
    size_t from = 0;
    char *place = columns.data();
    for (const size_t width : widths) {
      for (int64_t row = 0; row < rows; ++row, place += width) std::memcpy(place, packed.data() + size_t(row) * wide + from, width);
      from += width;
    }
    packed.clear();
    rows = 0;
    return columns;
  }
};

struct Seen {
  WeakTensor tensor;
  int64_t version, number;
  const void *address;  // `parameter.data = other` changes it, and no version
  int64_t writer;       // of its memory: `parameter.data.add_(1)` changes no version either
  WeakStorage storage;  // as long as it is there, nobody else gets its memory
  int64_t names;        // how many members of models were known
};
struct Role {
  WeakTensor tensor;
  int name, kind, module;
};
struct Parameter {
  WeakTensor tensor;
  int grad_name, module;
};
struct Block {
  WeakStorage storage;
  StorageImpl *key;
  int64_t number, bytes;
  int kind, module;
};
constexpr size_t kRecent = 64, kSweepEvery = 32;  // blocks that every operator asks after; operators between looks at all
struct Unwritten {  // memory that nobody has written to since it was taken
  int64_t version;  // of tensors there, -1 before one is seen: if it counts up, somebody has
  WeakStorage storage;
};
struct Memory {  // of strided tensors: where it begins, and how it lies there
  const void *address = nullptr;
  int layout = -1;
  bool operator==(const Memory &other) const { return address == other.address && layout == other.layout; }
};
struct HashOfMemory {
  size_t operator()(const Memory &m) const { return std::hash<const void *>()(m.address) * 31 + m.layout; }
};
struct HashOfNumbers {
  size_t operator()(const std::vector<int64_t> &numbers) const {
    uint64_t hash = 0xCBF29CE484222325ull;
    for (int64_t number : numbers) hash = (hash ^ uint64_t(number)) * 0x100000001B3ull ^ (hash >> 29);
    return hash;
  }
};

constexpr int64_t kUnwritten = -2;

constexpr size_t kDeadTensors = 256;  // that may be remembered: as long as they are, PyTorch cannot use their memory again

struct Made {  // a call, by the numbers of the nodes that it made
  uint64_t since, now;
  PyObject *op, *location;
};
