// What the device's allocator has handed out, asked after each operator: operators keep memory for their backward that
// no tensor of the run shows, and take memory that is gone when they return.

struct Level {
  int64_t held = 0, top = 0;  // bytes: now, and at most so far
  bool operator==(const Level &other) const { return held == other.held && top == other.top; }
};

class Levels {
 public:
  explicit Levels(c10::DeviceType type) : type_(type), off_(!BOOK_HAS_LEVELS || type == c10::DeviceType::CPU) {}

  // A tensor lies on this device.
  void saw(c10::Device device) {
    if (device.type() == type_ && device.index() >= 0 && device.index() < 64) devices_ |= uint64_t(1) << device.index();
  }

  // Whether memory there is the accelerator's.
  bool counts(c10::Device device) const { return type_ == c10::DeviceType::CPU || device.type() == type_; }

  // Whether it has changed since the last time: that of all devices on which tensors were seen, or memory was taken before.
  bool changed(Level &level) {
#if BOOK_HAS_LEVELS
    if (off_) return false;
    try {
      if (allocator_ == nullptr) allocator_ = dynamic_cast<c10::DeviceAllocator *>(c10::GetAllocator(type_));
      if (allocator_ == nullptr) off_ = true;
      else if (allocator_->initialized()) {
        if (!asked_) see_used();
        for (int index = 0; index < 64 && devices_ >> index; ++index)
          if (devices_ >> index & 1) {
            const Level one = level_of(index);
            level.held += one.held;
            level.top += one.top;
          }
        const bool other = !asked_ || !(level == last_);
        asked_ = true, last_ = level;
        return other;
      }
    } catch (const std::exception &) {  // an allocator that keeps no books
      off_ = true;
    }
#endif
    return false;
  }

 private:
#if BOOK_HAS_LEVELS
  Level level_of(int index) {
    const auto stats = allocator_->getDeviceStats(c10::DeviceIndex(index));
    const auto &bytes = stats.allocated_bytes[size_t(c10::CachingAllocator::StatType::AGGREGATE)];
    return {bytes.current, bytes.peak};
  }
  // The devices of which memory was taken before.
  void see_used() {
    const int count = c10::impl::VirtualGuardImpl(type_).deviceCount();
    for (int index = 0; index < std::min(count, 64); ++index)
      if (level_of(index).held != 0) devices_ |= uint64_t(1) << index;
  }
#endif
  const c10::DeviceType type_;
  bool off_, asked_ = false;
  uint64_t devices_ = 0;
  Level last_;
#if BOOK_HAS_LEVELS
  c10::DeviceAllocator *allocator_ = nullptr;
#endif
};
