// The books of the shadow device: which work comes after which, and which work uses which memory.
//
// The device executes every operation at once, on the host. What a GPU would do is only written down here: each
// operation is queued on a stream, and a stream's vector clock holds how much of every stream's work has ended before
// the stream's next operation starts. Two uses of the same bytes, of which one writes, are a race unless a clock orders
// them. So a missing wait is found in every run, whatever the timing was.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace shadow {

constexpr int DEVICES = 8;  // so that the current device can be another than a rank's, as on a host with several GPUs
using Deadline = std::chrono::steady_clock::time_point;

// How much work of each stream has ended: the number of its operations, by the stream's number.
class Clock {
 public:
  double seconds = 0;  // when that work has ended, on the modelled device (see Model)
  uint64_t at(int64_t stream) const { return (size_t)stream < done_.size() ? done_[stream] : 0; }
  void join(const Clock& other) {
    if (done_.size() < other.done_.size()) done_.resize(other.done_.size());
    for (size_t i = 0; i < other.done_.size(); i++) done_[i] = std::max(done_[i], other.done_[i]);
    seconds = std::max(seconds, other.seconds);
  }
  uint64_t tick(int64_t stream) {
    if (done_.size() <= (size_t)stream) done_.resize(stream + 1);
    return ++done_[stream];
  }

 private:
  std::vector<uint64_t> done_;
};

// One use of bytes [begin, end) of a block: operation number `time` of a stream.
struct Use {
  int64_t stream;
  uint64_t time;
  size_t begin, end;
  bool writes;
  std::string what;

  std::string text() const { return what + (writes ? " writes" : " reads") + " on stream " + std::to_string(stream); }
};

// Memory from the allocator.
struct Block {
  size_t capacity, size;  // of which the tensor asked for `size`
  int64_t stream;  // the one that allocated it, and may reuse it as soon as it is freed
  std::vector<Use> uses;
  std::set<int64_t> recorded;  // streams whose work the allocator waits for before it reuses the block (record_stream)
  Clock safe;                  // what that work was when the block was freed
};

// A collective that never ends, until its group is aborted. Streams that wait for it stand still from there on.
struct Stuck {
  int64_t stream;
  uint64_t time;
  std::string what;
  Deadline deadline;  // when the group's watchdog would end the process
};

// How long a GPU would take. Only a trace uses it: what races is decided by clocks alone.
struct Model {
  double launch, kernel;       // seconds of the host for a launch, and of the device for the smallest kernel
  double memory, flops, link;  // bytes per second, operations per second, bytes per second

  double compute(double bytes, double operations) const { return kernel + std::max(bytes / memory, operations / flops); }
  double send(double bytes) const { return kernel + bytes / link; }
};

// An operation of a trace, at modelled times.
struct Span {
  int64_t stream;
  std::string what, label;
  double start, end, bytes;
};

class Books {
 public:
  std::mutex lock;  // of everything below; each function expects it to be held
  std::map<std::string, int64_t> counts;
  std::map<std::string, int64_t> operations;
  std::vector<std::string> races;
  std::optional<Model> model;  // of the running trace
  std::vector<Span> spans;

  Books() {
    for (int device = 0; device < DEVICES; device++) new_stream(device);  // the default streams: 0, 1, ...
  }

  // ------------------------------------------------------------------------------------------------ streams and the host

  int64_t new_stream(int device) {
    streams_.push_back({device, {}});
    return (int64_t)streams_.size() - 1;
  }

  // A stream that no other future's callback uses. CUDA deals 32 of them in turn, so two callbacks may share one by
  // chance; here they never do, and an order that only chance would give is reported.
  int64_t pool_stream(int device) {
    auto& pool = pools_[device];
    if (pool.next == pool.streams.size()) pool.streams.push_back(new_stream(device));
    return pool.streams[pool.next++];
  }

  int device_of(int64_t stream) const { return streams_.at(stream).device; }

  // Queue an operation; return its number. It comes after what the host has waited for. (One clock for all host threads:
  // threads that order each other by locks need no events.)
  uint64_t queue(int64_t stream) {
    auto& clock = streams_.at(stream).clock;
    clock.join(host_);
    return clock.tick(stream);
  }

  // Note an operation in the running trace. The host launches one after another. The stream starts it after its own
  // earlier work, after the events it waits for, and after its launch.
  void run(int64_t stream, const std::string& what, const std::string& label, double bytes, double seconds) {
    host_.seconds += model->launch;
    auto& clock = streams_.at(stream).clock;
    clock.join(host_);
    double start = clock.seconds;
    clock.seconds += seconds;
    spans.push_back({stream, what, label, start, clock.seconds, bytes});
  }

  const Clock& clock(int64_t stream) const { return streams_.at(stream).clock; }
  void wait(int64_t stream, const Clock& until) { streams_.at(stream).clock.join(until); }

  // Whether work has ended, as far as the host can ask without blocking. A true answer is knowledge, as of an event.
  bool ended(const Clock& until) {
    if (stuck_before(until)) return false;
    double before = host_.seconds;
    host_.join(until);
    host_.seconds = before;  // in modelled time the host asks again later, and does other work meanwhile
    return true;
  }

  // Block the host until work has ended. Behind a collective that never ends it waits for abort, or for the watchdog.
  void host_waits(std::unique_lock<std::mutex>& held, const Clock& until, const std::string& why) {
    counts["host waits"]++;
    operations["host waits for " + why]++;
    while (const Stuck* stuck = stuck_before(until)) {
      auto deadline = stuck->deadline;
      auto text = "shadow watchdog: the host waits for " + why + " behind " + stuck->what + ", which never ended";
      if (changed_.wait_until(held, deadline) == std::cv_status::timeout && stuck_before(until))
        throw std::runtime_error(text);
    }
    host_.join(until);
  }

  Clock everything() const {
    Clock all;
    for (auto& stream : streams_) all.join(stream.clock);
    return all;
  }

  bool host_knows(int64_t stream, uint64_t time) const { return host_.at(stream) >= time; }
  bool is_stuck(const Clock& until) const { return stuck_before(until) != nullptr; }

  void never_ends(Stuck stuck) {
    counts["stuck"]++;
    operations["never ended: " + stuck.what]++;
    stuck_.push_back(std::move(stuck));
  }

  // Abort the collectives of a stream: whatever waits for them goes on, with undefined values.
  void abort(int64_t stream) {
    stuck_.erase(std::remove_if(stuck_.begin(), stuck_.end(), [&](auto& s) { return s.stream == stream; }), stuck_.end());
    changed_.notify_all();
  }

  // ----------------------------------------------------------------------------------------------------------- memory

  // Note a use of live memory, and compare it with the earlier ones. Memory of others (the CPU's) is not ours to watch.
  void use(char* begin, char* end, bool writes, const std::string& what, int64_t stream) {
    auto found = block_of(begin);
    if (begin >= end || found == live_.end()) return;
    uint64_t time = queue(stream);
    Use now{stream, time, size_t(begin - found->first), size_t(end - found->first), writes, what};
    std::vector<Use> kept;
    for (auto& before : found->second.uses) {
      bool overlap = before.begin < now.end && now.begin < before.end && (writes || before.writes);
      bool ordered = before.stream == stream || clock(stream).at(before.stream) >= before.time;
      if (overlap && !ordered) race(now.text() + " what " + before.text() + ", and no event orders them");
      // A use that this one comes after and covers says nothing more: later uses must come after this one anyway.
      bool covered = ordered && now.begin <= before.begin && before.end <= now.end;
      if (!covered || !(writes || (before.stream == stream && !before.writes))) kept.push_back(std::move(before));
    }
    kept.push_back(std::move(now));
    found->second.uses = std::move(kept);
  }

  // Return memory for the stream: the block that it freed last and that is large enough, at once. torch's caching allocator
  // reuses memory as soon, but chooses by size. Here the latest is taken, whose use by another stream is the likeliest to
  // be unordered.
  char* allocate(int64_t stream, size_t size) {
    auto& free = freed_[stream];
    auto fits = std::find_if(free.rbegin(), free.rend(), [&](auto& entry) { return entry.second.capacity >= size; });
    char* memory;
    size_t capacity = size;
    if (fits == free.rend()) {
      counts["allocated"]++;
      memory = (char*)std::aligned_alloc(512, size);
    } else {
      counts["reused"]++;
      auto block = std::move(fits->second);
      memory = fits->first;
      capacity = block.capacity;
      free.erase(std::next(fits).base());
      // The stream's next operation may write here. It must come after all uses by other streams, either by its own
      // clock or because the allocator was told to wait for them.
      wait(stream, host_);
      for (auto& use : block.uses) {
        bool ordered = use.stream == stream || std::max(block.safe.at(use.stream), clock(stream).at(use.stream)) >= use.time;
        if (!ordered) race("memory of stream " + std::to_string(stream) + " was freed and is reused while " + use.text());
      }
    }
    std::memset(memory, 0xFF, size);  // NaN for every floating dtype: a read before the first write shows in the numbers
    live_[memory] = Block{capacity, size, stream, {}, {}, {}};
    bytes_ += size;
    peak_ = std::max(peak_, bytes_);
    return memory;
  }

  void release(char* memory) {
    auto found = live_.find(memory);
    if (found == live_.end()) return;
    Block block = std::move(found->second);
    live_.erase(found);
    bytes_ -= block.size;
    for (auto stream : block.recorded) block.safe.join(clock(stream));
    std::memset(memory, 0xFF, block.size);  // a read after the end shows in the numbers, too
    freed_[block.stream].emplace_back(memory, std::move(block));
  }

  void record(const char* memory, int64_t stream) {
    auto found = block_of((char*)memory);
    if (found != live_.end()) found->second.recorded.insert(stream);
  }

  // The address and size of all memory that is in use.
  std::vector<std::pair<uintptr_t, size_t>> live() const {
    std::vector<std::pair<uintptr_t, size_t>> found;
    for (auto& [memory, block] : live_) found.emplace_back((uintptr_t)memory, block.size);
    return found;
  }

  size_t bytes() const { return bytes_; }
  size_t peak() const { return peak_; }
  void reset_peak() { peak_ = bytes_; }

  // Start a new page, after the host has waited for the whole device: nothing before it can race with anything after it.
  void reset() {
    host_.join(everything());
    races.clear();
    counts.clear();
    operations.clear();
    for (auto& [_, block] : live_) block.uses.clear();
    for (auto& [_, blocks] : freed_)
      for (auto& [_, block] : blocks) block.uses.clear();
    for (auto& pool : pools_) pool.next = 0;
    stuck_.clear();
    changed_.notify_all();
    reset_peak();
  }

 private:
  struct Stream {
    int device;
    Clock clock;
  };
  struct Pool {
    std::vector<int64_t> streams;
    size_t next = 0;
  };

  const Stuck* stuck_before(const Clock& until) const {
    for (auto& stuck : stuck_)
      if (until.at(stuck.stream) >= stuck.time) return &stuck;
    return nullptr;
  }

  std::map<char*, Block>::iterator block_of(char* begin) {
    auto after = live_.upper_bound(begin);
    if (after == live_.begin()) return live_.end();
    auto found = std::prev(after);
    return begin < found->first + found->second.size ? found : live_.end();
  }

  void race(const std::string& text) {
    counts["races"]++;
    if (races.size() < 40) races.push_back(text);
  }

  std::vector<Stream> streams_;
  Pool pools_[DEVICES];
  Clock host_;  // the work that the host has waited for
  std::vector<Stuck> stuck_;
  std::condition_variable changed_;
  std::map<char*, Block> live_;
  std::map<int64_t, std::vector<std::pair<char*, Block>>> freed_;  // by stream, the latest at the end
  size_t bytes_ = 0, peak_ = 0;
};

inline Books& books() {
  static auto* only = new Books();  // never destroyed: threads of other libraries free tensors while the process exits
  return *only;
}
using Locked = std::unique_lock<std::mutex>;

}  // namespace shadow
