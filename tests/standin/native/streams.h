// Streams, events and the host, each with a vector clock: how far it has come to know the work of every stream.
//
// A kernel is computed when it is launched, but only what has waited for it may see its result. Whoever reads bytes
// that another stream has written, without having waited for that, gets garbage, every time; bytes that are written
// while another stream may still use them become garbage. Copies that need not wait are made later: those from the host
// when a kernel wants their bytes, those to the host when the host waits. Until then the host finds garbage there.
#pragma once
#include "memory.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <set>

namespace standin {

constexpr int kPool = 8;  // streams of a card besides its default one; the next one asked for is the first again
constexpr int kStreams = kCards * (kPool + 1);
constexpr int kPolls = 3;  // a query says no so often, then the work is done
using Clock = std::array<uint64_t, kStreams>;

inline Clock clocks[kStreams] = {};
inline Clock host = {};
inline std::atomic<int> next_in_pool[kCards];
inline int polls_of_stream[kStreams];
inline thread_local c10::StreamId current_stream[kCards] = {};

struct Counts {
  std::map<std::string, int64_t> kernels;
  int64_t host_to_device = 0, device_to_host = 0, device_to_device = 0, waits = 0;
};
inline Counts counts;
inline std::vector<std::string> races;

struct PendingCopy {
  int stream;
  uint64_t tick;
  bool to_host;
  std::function<void()> run;
};
inline std::deque<PendingCopy> pending;
inline std::recursive_mutex draining;

inline void join(Clock& own, const Clock& other) {
  for (int i = 0; i < kStreams; i++) own[i] = std::max(own[i], other[i]);
}

inline int number_of(c10::DeviceIndex card, c10::StreamId id) { return card * (kPool + 1) + int(id); }
inline int number_of(const c10::Stream& stream) { return number_of(stream.device_index(), stream.id()); }
inline int current_number(c10::DeviceIndex card) { return number_of(card, current_stream[card]); }

// The graph that this thread captures, if it does: what its stream is given, in order, to be run by every replay.
struct Capture {
  std::vector<std::function<void()>> work;
  std::set<uint64_t> own;                            // blocks taken meanwhile
  std::map<uint64_t, std::vector<char>> before;      // what other blocks held that its work writes to
  std::map<uint64_t, const void*> addresses;         // of those blocks
  bool is_broken = false;
};
inline thread_local Capture* capturing = nullptr;

// Refuse what cannot be captured, as CUDA does: it spoils the whole graph.
inline void refuse_capture(const std::string& what) {
  if (!capturing) return;
  capturing->is_broken = true;
  TORCH_CHECK(false, "standin error: operation not permitted when stream is capturing (", what, ")");
}

// Make the copies that `known` has waited for. Kernels need those from the host, only the host and copies those to it.
inline void make_copies(const Clock& known, bool to_host = true) {
  std::lock_guard<std::recursive_mutex> one(draining);
  std::vector<PendingCopy> due;
  {
    std::lock_guard<std::mutex> guard(books);
    for (auto it = pending.begin(); it != pending.end();)
      if (it->tick <= known[it->stream] && (to_host || !it->to_host)) {
        due.push_back(std::move(*it));
        it = pending.erase(it);
      } else {
        ++it;
      }
  }
  for (auto& copy : due) copy.run();
}

// The host waits for all that `known` has waited for.
inline void host_waits(const Clock& known) {
  refuse_capture("the host waits");
  make_copies(known);
  std::lock_guard<std::mutex> guard(books);
  join(host, known);
  counts.waits++;
}

inline Clock clock_of(int stream) {
  std::lock_guard<std::mutex> guard(books);
  return clocks[stream];
}

// One piece of work of a stream: what it knows when it begins, and its number among the work of that stream.
struct Work {
  int stream;
  Clock known;
  std::string name;

  // `other`: a stream that waits for this work, and for which it waits (a copy between two cards).
  Work(int stream, std::string name, int other = -1) : stream(stream), name(std::move(name)) {
    std::lock_guard<std::mutex> guard(books);
    Clock& own = clocks[stream];
    join(own, host);
    if (other >= 0) join(own, clocks[other]);
    own[stream]++;
    polls_of_stream[stream] = 0;
    if (other >= 0) join(clocks[other], own);
    known = own;
  }

  // Note that the work uses bytes of the block at `address`. Whether another stream uses them, unwaited for.
  bool uses(const void* address, size_t begin, size_t end, bool writes) {
    if (capturing || !address || begin >= end) return false;  // what is captured does not run
    std::lock_guard<std::mutex> guard(books);
    auto [block, start] = block_of(address);
    if (!block) return false;
    size_t at = static_cast<const char*>(address) - cards[card_of(address)].addresses;
    begin += at - start, end += at - start;
    bool races_here = false;
    auto& all = block->accesses;
    for (size_t i = 0; i < all.size();) {
      Access& a = all[i];
      bool overlaps = a.begin < end && begin < a.end, ordered = a.tick <= known[a.stream];
      if (overlaps && !ordered && (a.writes || writes)) {
        if (!races_here && races.size() < 100)
          races.push_back(name + (writes ? " writes" : " reads") + " on stream " + std::to_string(stream) + " what " +
                          a.name + (a.writes ? " writes" : " reads") + " on stream " + std::to_string(a.stream) +
                          ", and has not waited for it");
        races_here = true;
      }
      bool covered = ordered && begin <= a.begin && a.end <= end && (writes || (!a.writes && a.stream == stream));
      if (covered || a.tick <= host[a.stream]) {
        std::swap(a, all.back());
        all.pop_back();
      } else {
        i++;
      }
    }
    all.push_back({stream, known[stream], begin, end, writes, name});
    return races_here;
  }

  void defer(bool to_host, std::function<void()> run) {
    std::lock_guard<std::mutex> guard(books);
    pending.push_back({stream, known[stream], to_host, std::move(run)});
  }
};

struct Event {
  Clock clock;
  int polls = 0;
  std::chrono::steady_clock::time_point time;
};

inline bool poll(const Clock& clock, int& polls) {
  {
    std::lock_guard<std::mutex> guard(books);
    bool done = true;
    for (int i = 0; i < kStreams; i++) done = done && clock[i] <= host[i];
    if (done) return true;
    if (++polls < kPolls) return false;
  }
  make_copies(clock);
  std::lock_guard<std::mutex> guard(books);
  join(host, clock);
  return true;
}

struct CardGuard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  static c10::DeviceIndex index(Device device) { return device.has_index() ? device.index() : current_card; }
  static Stream stream(c10::DeviceIndex card, c10::StreamId id) {
    return Stream(Stream::UNSAFE, Device(kKind, card), id);
  }
  static void check(c10::DeviceIndex card) {
    TORCH_CHECK(card < kCards, "standin error: invalid device ordinal ", int(card), "; there are ", kCards, " cards");
  }
  c10::DeviceType type() const override { return kKind; }
  Device exchangeDevice(Device device) const override {
    Device before(kKind, current_card);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kKind, current_card); }
  void setDevice(Device device) const override {
    check(index(device));
    current_card = index(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_card = index(device); }
  Stream getStream(Device device) const override { return stream(index(device), current_stream[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(index(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    return stream(index(device), 1 + next_in_pool[index(device)]++ % kPool);
  }
  Stream exchangeStream(Stream next) const override {
    auto card = next.device_index();
    auto before = stream(card, current_stream[card]);
    current_stream[card] = next.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kCards; }

  void record(void** event, const Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    auto* own = static_cast<Event*>(*event);
    std::lock_guard<std::mutex> guard(books);
    own->clock = clocks[number_of(on)];
    own->polls = 0;
    own->time = std::chrono::steady_clock::now();
  }
  void block(void* event, const Stream& on) const override {
    if (!event) return;
    std::lock_guard<std::mutex> guard(books);
    join(clocks[number_of(on)], static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    auto* own = static_cast<Event*>(event);
    return !own || poll(own->clock, own->polls);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(static_cast<Event*>(event)->clock);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    std::chrono::duration<double, std::milli> took = static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
    return took.count();
  }
  bool queryStream(const Stream& on) const override {
    return poll(clock_of(number_of(on)), polls_of_stream[number_of(on)]);
  }
  void synchronizeStream(const Stream& on) const override { host_waits(clock_of(number_of(on))); }
  void synchronizeDevice(const c10::DeviceIndex card) const override {
    Clock all = {};
    for (int id = 0; id <= kPool; id++) join(all, clock_of(number_of(card < 0 ? current_card : card, id)));
    host_waits(all);
  }
};

}  // namespace standin
