// A process group of the shadow device: Gloo carries its bytes, and its books are NCCL's.
//
// - A collective is queued on a stream of the group's, after the work that is queued on the current stream so far.
// - `wait()` makes the current stream wait, and never the host, except for a barrier. A lost rank therefore raises nothing
//   here: its peers' collectives never end, and their streams stand still, until `abort()`.
// - A work holds its tensors until it was waited for.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <thread>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace shadow {

// A planted fault: in groups with `name` in their names, collectives of this process after the next `after` ones never
// end. Negative: none is planted.
struct Fault {
  std::string name;
  int64_t after;
};
std::mutex fault_lock;
Fault fault{"", -1};
void plant(Fault planted) {
  std::lock_guard<std::mutex> held(fault_lock);
  fault = std::move(planted);
}
bool hangs(const std::string& group) {
  std::lock_guard<std::mutex> held(fault_lock);
  if (fault.after < 0 || group.find(fault.name) == std::string::npos) return false;
  if (fault.after == 0) return true;
  fault.after--;
  return false;
}

// A collective in flight.
class Task final : public c10d::Work {
 public:
  Task(c10d::OpType type, std::string name, c10::Device device, int64_t stream, Deadline deadline, std::vector<at::Tensor> outputs,
       std::vector<at::Tensor> held)
      : Work(-1, type), device(device), stream(stream), name_(std::move(name)), deadline_(deadline),
        outputs_(std::move(outputs)), held_(std::move(held)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{device})) {
    Locked books_held(books().lock);
    time_ = books().queue(stream);
    after_ = books().clock(stream);
  }

  ~Task() override {
    // Never waited for: NCCL's watchdog holds the tensors until the collective has ended.
    Locked held(books().lock);
    for (auto& tensor : held_) books().record((const char*)tensor.storage().data(), stream);
  }

  bool isCompleted() override {
    std::lock_guard<std::mutex> held(mutex_);
    return completed_ && !stuck_;
  }

  bool isSuccess() const override {
    std::lock_guard<std::mutex> held(mutex_);
    return completed_ && !stuck_ && !exception_;
  }

  bool wait(std::chrono::milliseconds) override {
    // The host blocks here until the bytes are there, because operations run at once. A GPU's host would not: the books
    // know of no wait of the host, and a collective that never ends lets it pass.
    std::unique_lock<std::mutex> held(mutex_);
    cv_.wait(held, [this] { return completed_; });
    held.unlock();
    {
      Locked books_held(books().lock);
      books().wait(current_stream(device.index()), after_);
    }
    held_.clear();
    if (retrieveOpType() == c10d::OpType::BARRIER) host_waits(after_, "a barrier");
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return outputs_; }

  // The collective has ended, or never will, for a reason. Later calls do nothing: abort may come first.
  void end(const std::string& never = "") {
    if (ended_.exchange(true)) return;
    if (!never.empty()) {
      Locked held(books().lock);
      books().never_ends({stream, time_, name_ + " (" + never + ")", deadline_});
    }
    {
      std::lock_guard<std::mutex> held(mutex_);
      stuck_ = !never.empty();
    }
    finish();
    // The future's event is the end of this collective, not of later ones that are queued already.
    recorded_as = &after_;
    auto before = std::exchange(current_streams[device.index()], stream);
    future_->markCompleted(c10::IValue(outputs_));
    current_streams[device.index()] = before;
    recorded_as = nullptr;
  }

  void abort() override {
    std::lock_guard<std::mutex> held(mutex_);
    if (!stuck_) return;
    stuck_ = false;
    exception_ = std::make_exception_ptr(std::runtime_error("shadow: " + name_ + " was aborted"));
  }

  const c10::Device device;
  const int64_t stream;

 private:
  std::string name_;
  Deadline deadline_;
  uint64_t time_;
  Clock after_;
  bool stuck_ = false;
  std::atomic<bool> ended_ = false;
  std::vector<at::Tensor> outputs_, held_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Group final : public c10d::Backend {
  using Run = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>;
  using Tensors = std::vector<at::Tensor>;

 public:
  Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::chrono::milliseconds limit, std::string name)
      : Backend(rank, size), name_(std::move(name)), limit_(limit), options_(c10::make_intrusive<Options>("shadowccl", limit)),
        lane_(std::make_shared<Lane>()) {
    lane_->gloo = std::move(gloo);
    std::thread([lane = lane_] { serve(*lane); }).detach();
  }
  ~Group() override { stop(); }

  const std::string getBackendName() const override { return "shadowccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  // NCCL connects at the first collective, or here.
  void eagerConnectSingleDevice(at::Device device) override { stream_of(device); }

  void abort() override {
    std::unique_lock<std::mutex> lane(lane_->lock);
    auto tasks = std::move(lane_->stuck);
    if (lane_->running) tasks.push_back(lane_->running);
    for (auto& [task, _] : lane_->queue) tasks.push_back(task);
    lane_->queue.clear();
    lane_->stopped = true;
    lane.unlock();
    lane_->changed.notify_all();
    for (auto& task : tasks) {
      task->end("aborted");  // the host stops waiting for bytes that Gloo may still wait for
      task->abort();
    }
    Locked held(books().lock);
    books().counts["groups aborted"]++;
    for (auto& [_, stream] : streams_) books().abort(stream);
  }
  void shutdown() override { stop(); }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return start(c10d::OpType::BROADCAST, "broadcast", {}, tensors,
                 [t = hosts(tensors), o](auto& gloo) mutable { return gloo.broadcast(t, o); });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return start(c10d::OpType::ALLREDUCE, "allreduce", {}, tensors,
                 [t = hosts(tensors), o](auto& gloo) mutable { return gloo.allreduce(t, o); });
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    return start(c10d::OpType::REDUCE, "reduce", {}, tensors,
                 [t = hosts(tensors), o](auto& gloo) mutable { return gloo.reduce(t, o); });
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& o) override {
    std::vector<Tensors> into{hosts(outputs.at(0))};
    return start(c10d::OpType::ALLGATHER, "allgather", inputs, outputs.at(0),
                 [into, from = hosts(inputs), o](auto& gloo) mutable { return gloo.allgather(into, from, o); });
  }
  // NCCL asks for the right number of elements in these two; Gloo for the right shapes, unless they are flat.
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& o) override {
    return start(c10d::OpType::_ALLGATHER_BASE, "allgather_base", {input}, {output},
                 [to = on_host(output).flatten(), from = on_host(input).flatten(), o](auto& gloo) mutable {
                   return gloo._allgather_base(to, from, o);
                 });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& o) override {
    return start(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_base", {input}, {output},
                 [to = on_host(output).flatten(), from = on_host(input).flatten(), o](auto& gloo) mutable {
                   return gloo._reduce_scatter_base(to, from, o);
                 });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputs,
                                               std::vector<int64_t>& inputs, const c10d::AllToAllOptions& o) override {
    return start(c10d::OpType::ALLTOALL_BASE, "alltoall_base", {input}, {output},
                 [to = on_host(output), from = on_host(input), outputs, inputs, o](auto& gloo) mutable {
                   return gloo.alltoall_base(to, from, outputs, inputs, o);
                 });
  }
  // DTensor's, of one tensor.
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                 const c10d::AllgatherOptions& o) override {
    return start(c10d::OpType::COALESCED, "allgather_into_tensor_coalesced", inputs, outputs,
                 [to = hosts(outputs), from = hosts(inputs), o](auto& gloo) mutable {
                   return gloo.allgather_into_tensor_coalesced(to, from, o);
                 });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override {
    c10d::BarrierOptions plain;  // without device ids, which Gloo does not know
    plain.timeout = o.timeout;
    return start(c10d::OpType::BARRIER, "barrier", {}, {}, [plain](auto& gloo) { return gloo.barrier(plain); });
  }

 private:
  // What the group and its thread share. The thread may outlive the group, behind a collective whose peer is lost.
  struct Lane {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::pair<c10::intrusive_ptr<Task>, Run>> queue;
    c10::intrusive_ptr<Task> running;
    std::vector<c10::intrusive_ptr<Task>> stuck;
    bool stopped = false;
    c10::intrusive_ptr<c10d::Backend> gloo;
  };

  static Tensors hosts(const Tensors& tensors) {
    Tensors result;
    for (auto& tensor : tensors) result.push_back(on_host(tensor));
    return result;
  }

  int64_t stream_of(c10::Device device) {
    Locked held(books().lock);
    auto found = streams_.find(device.index());
    if (found != streams_.end()) return found->second;
    books().counts["groups connected"]++;
    return streams_[device.index()] = books().new_stream(device.index());
  }

  c10::intrusive_ptr<c10d::Work> start(c10d::OpType type, const std::string& name, Tensors reads, Tensors writes, Run run) {
    c10::Device device(TYPE, current_device);
    for (auto* tensors : {&reads, &writes})
      for (auto& tensor : *tensors) {
        TORCH_CHECK(ours(tensor), "shadowccl: ", name, " takes tensors of the shadow device, not of ", tensor.device());
        TORCH_CHECK(tensor.is_contiguous(), "shadowccl: ", name, " takes contiguous tensors");
        device = tensor.device();
      }
    int64_t stream = stream_of(device);
    {
      Locked held(books().lock);
      books().counts["collectives"]++;
      books().operations[name]++;
      books().wait(stream, books().clock(current_stream(device.index())));
    }
    for (auto& tensor : reads) use(tensor, false, name, stream);
    for (auto& tensor : writes) use(tensor, true, name, stream);
    trace_sent(stream, type, name, reads, writes);
    auto held = reads;
    held.insert(held.end(), writes.begin(), writes.end());
    auto task = c10::make_intrusive<Task>(type, name + " of " + name_, device, stream, std::chrono::steady_clock::now() + limit_,
                                          std::move(writes), std::move(held));
    bool never = hangs(name_);
    {
      std::lock_guard<std::mutex> lane(lane_->lock);
      TORCH_CHECK(!lane_->stopped, "shadowccl: ", name, " on a group that was shut down");
      never |= !lane_->stuck.empty();  // a communicator's later collectives come after the one that never ends
      if (never) lane_->stuck.push_back(task);
      else lane_->queue.emplace_back(task, std::move(run));
    }
    if (never) task->end("a planted fault, or behind one that never ended");
    lane_->changed.notify_all();
    return task;
  }

  // Note the collective in a running trace, with the bytes that a rank sends if all ranks share the work evenly.
  void trace_sent(int64_t stream, c10d::OpType type, const std::string& name, const Tensors& reads, const Tensors& writes) {
    double read = 0, written = 0;
    for (auto& tensor : reads) read += nbytes(tensor);
    for (auto& tensor : writes) written += nbytes(tensor);
    double passes = type == c10d::OpType::ALLREDUCE ? 2 : 1;  // sums are scattered, then gathered
    double bytes = passes * std::max(read, written) * (getSize() - 1) / getSize();
    Locked held(books().lock);
    if (books().model) books().run(stream, name, label, bytes, books().model->send(bytes));
  }

  void stop() {
    {
      std::lock_guard<std::mutex> held(lane_->lock);
      lane_->stopped = true;
    }
    lane_->changed.notify_all();
  }

  // Run collectives in the order in which they were issued, on a thread of the group's.
  static void serve(Lane& lane) {
    OnCpu guard;
    bool failed = false;  // one that never ends because of a planted fault was issued after all that are queued here
    for (;;) {
      std::unique_lock<std::mutex> held(lane.lock);
      lane.changed.wait(held, [&] { return lane.stopped || !lane.queue.empty(); });
      if (lane.queue.empty()) break;
      auto [task, run] = std::move(lane.queue.front());
      lane.queue.pop_front();
      lane.running = task;
      std::string never = failed ? "behind one that never ended" : "";
      held.unlock();
      try {
        if (never.empty()) run(*lane.gloo)->wait();
      } catch (const std::exception& error) {
        never = error.what();  // the peer is lost, or did not come in time
        failed = true;
      }
      held.lock();
      lane.running.reset();
      if (!never.empty()) lane.stuck.push_back(task);
      held.unlock();
      task->end(never);
    }
    lane.gloo.reset();
  }

  std::string name_;
  std::chrono::milliseconds limit_;
  c10::intrusive_ptr<Options> options_;
  std::map<int, int64_t> streams_;  // by device, made at the first collective, as NCCL connects then
  std::shared_ptr<Lane> lane_;
};

}  // namespace shadow
