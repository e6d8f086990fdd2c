// The memory of the cards. Each card has two address ranges of the same size: tensors get addresses in the one that
// nobody may touch, so that a host that follows such an address dies with SIGSEGV; kernels add an offset and work in
// the other one. Fresh memory holds 0xFF bytes (NaN in every float, -1 in every integer).
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace standin {

constexpr auto kKind = c10::DeviceType::PrivateUse1;
constexpr int kCards = 4;
constexpr size_t kCardBytes = size_t{16} << 30;  // addresses; the machine gives memory as it is touched
constexpr size_t kBlock = 512;
constexpr size_t kLarge = size_t{1} << 20;  // freed blocks from here on go back to the machine
constexpr int kGarbage = 0xFF;

inline bool forked = false;
inline uint64_t blocks_taken = 0;
inline thread_local std::set<uint64_t>* taken_by_capture = nullptr;  // blocks of the graph that this thread captures
inline thread_local c10::DeviceIndex current_card = 0;

struct OnCard {  // the current card within a scope; a negative index changes nothing
  c10::DeviceIndex before = current_card;
  explicit OnCard(c10::DeviceIndex card) { if (card >= 0) current_card = card; }
  ~OnCard() { current_card = before; }
};

// What a kernel or a copy did to the bytes [begin, end) of a block.
struct Access {
  int stream;
  uint64_t tick;
  size_t begin, end;
  bool writes;
  std::string name;
};

struct Block {
  size_t size = 0;
  size_t asked = 0;
  uint64_t serial = 0;  // no two blocks have the same one, also at one address
  std::vector<Access> accesses;
};

struct Card {
  char* addresses = nullptr;  // of tensors
  char* bytes = nullptr;      // of kernels
  std::map<size_t, Block> blocks;
  std::map<size_t, size_t> holes{{0, kCardBytes}};
  size_t allocated = 0, peak = 0, limit = kCardBytes;
  int64_t out_of_memory = 0;
};

inline std::mutex books;  // of everything in this file and in streams.h
inline Card cards[kCards];

inline void start_cards() {  // with the books
  if (cards[0].bytes) return;
  for (auto& card : cards) {
    auto map = [](int rights) {
      void* at = mmap(nullptr, kCardBytes, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(at != MAP_FAILED, "standin: no addresses for a card of ", kCardBytes, " bytes");
      return static_cast<char*>(at);
    };
    card.addresses = map(PROT_NONE);
    card.bytes = map(PROT_READ | PROT_WRITE);
  }
}

// The card of an address, or -1 for memory of the host.
inline int card_of(const void* address) {
  auto* p = static_cast<const char*>(address);
  for (int i = 0; i < kCards; i++)
    if (cards[i].addresses && p >= cards[i].addresses && p < cards[i].addresses + kCardBytes) return i;
  return -1;
}

// Where a kernel finds the bytes of an address.
inline char* kernel_address(const void* address) {
  int card = card_of(address);
  TORCH_CHECK(card >= 0, "standin: a tensor of the device has memory of the host");
  return cards[card].bytes + (static_cast<const char*>(address) - cards[card].addresses);
}

inline std::string mebibytes(size_t size) {
  char text[32];
  snprintf(text, sizeof text, "%.2f MiB", size / 1048576.0);
  return text;
}

inline void* take(size_t asked) {
  if (!asked) return nullptr;
  TORCH_CHECK(!forked, "Cannot re-initialize standin in forked subprocess. To use standin with multiprocessing, you "
                       "must use the 'spawn' start method");
  std::lock_guard<std::mutex> guard(books);
  start_cards();
  Card& card = cards[current_card];
  size_t size = (asked + kBlock - 1) / kBlock * kBlock;
  auto hole = std::find_if(card.holes.begin(), card.holes.end(), [&](auto& h) { return h.second >= size; });
  if (card.allocated + size > card.limit || hole == card.holes.end()) {
    card.out_of_memory++;
    size_t free = card.limit - std::min(card.limit, card.allocated);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "standin out of memory. Tried to allocate ", mebibytes(asked),
                     ". standin:", int(current_card), " has a total capacity of ", mebibytes(card.limit), " of which ",
                     mebibytes(free), " is free.");
  }
  size_t at = hole->first, left = hole->second - size;
  card.holes.erase(hole);
  if (left) card.holes[at + size] = left;
  card.blocks[at] = Block{size, asked, ++blocks_taken, {}};
  if (taken_by_capture) taken_by_capture->insert(blocks_taken);
  card.allocated += size;
  card.peak = std::max(card.peak, card.allocated);
  memset(card.bytes + at, kGarbage, size);
  return card.addresses + at;
}

// The block that holds an address of a card, and where it begins; with the books. Null without one.
inline std::pair<Block*, size_t> block_of(const void* address) {
  Card& card = cards[card_of(address)];
  size_t at = static_cast<const char*>(address) - card.addresses;
  auto after = card.blocks.upper_bound(at);
  if (after == card.blocks.begin()) return {nullptr, 0};
  auto& [start, block] = *std::prev(after);
  if (at >= start + block.size) return {nullptr, 0};
  return {&block, start};
}

inline void give_back(void* address) {
  if (!address || forked) return;
  std::lock_guard<std::mutex> guard(books);
  Card& card = cards[card_of(address)];
  size_t at = static_cast<char*>(address) - card.addresses;
  auto found = card.blocks.find(at);
  size_t size = found->second.size;
  card.blocks.erase(found);
  card.allocated -= size;
  if (size >= kLarge) madvise(card.bytes + at, size / 4096 * 4096, MADV_DONTNEED);
  auto next = card.holes.lower_bound(at);
  if (next != card.holes.end() && next->first == at + size) {
    size += next->second;
    next = card.holes.erase(next);
  }
  if (next != card.holes.begin() && std::prev(next)->first + std::prev(next)->second == at)
    std::prev(next)->second += size;
  else
    card.holes[at] = size;
}

struct CardAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = take(size);
    return {address, address, &give_back, c10::Device(kKind, current_card)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t size) const override {
    memcpy(kernel_address(to), kernel_address(from), size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(books);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0]}) {
      bytes->current = cards[index].allocated;
      bytes->peak = cards[index].peak;
    }
    stats.num_ooms = cards[index].out_of_memory;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(books);
    cards[index].peak = cards[index].allocated;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(books);
    return {cards[index].limit - std::min(cards[index].limit, cards[index].allocated), cards[index].limit};
  }
};

inline CardAllocator card_allocator;

// Memory of the host from which copies run by themselves.
inline std::map<const char*, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  static void release(void* address) {
    {
      std::lock_guard<std::mutex> guard(books);
      pinned.erase(static_cast<char*>(address));
    }
    free(address);
  }
  c10::DataPtr allocate(size_t size) override {
    void* address = nullptr;
    if (size) {
      TORCH_CHECK(posix_memalign(&address, 64, size) == 0, "standin: no pinned memory");
      std::lock_guard<std::mutex> guard(books);
      pinned[static_cast<char*>(address)] = size;
    }
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

inline PinnedAllocator pinned_allocator;

inline bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> guard(books);
  auto after = pinned.upper_bound(static_cast<const char*>(address));
  if (after == pinned.begin()) return false;
  auto& [start, size] = *std::prev(after);
  return static_cast<const char*>(address) < start + size;
}

}  // namespace standin
