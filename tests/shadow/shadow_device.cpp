// The shadow device, as torch sees it: memory, streams, events and operations of the backend PrivateUse1.
//
// Memory is the host's and operations run at once, by torch's CPU kernels. `books.h` keeps what a GPU would have done.
// Read that file first, then this one, then `group.h` with the collectives.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "books.h"

namespace shadow {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

// Each host thread has a current device, and on each device a current stream.
thread_local int8_t current_device = 0;
thread_local int64_t current_streams[DEVICES] = {0, 1, 2, 3, 4, 5, 6, 7};
int64_t current_stream(int device = current_device) { return current_streams[device]; }

// Set while torch's CPU kernels run for us: the copies that they make are no operations of the device.
thread_local bool on_cpu = false;
struct OnCpu {
  bool before = std::exchange(on_cpu, true);
  ~OnCpu() { on_cpu = before; }
};

// -------------------------------------------------------------------------------------------------- what the host learns

// A copy to the host that nobody has waited for yet. On a GPU the host's memory changes at some later time; here it
// changes when the host knows that the copy has ended, and holds NaN until then, so that an early read shows.
struct Landing {
  int64_t stream;
  uint64_t time;
  at::Tensor into, value;
};
std::vector<Landing>& landings() {
  static auto* all = new std::vector<Landing>();
  return *all;
}

void land(Locked& held) {
  std::vector<Landing> ready, waiting;
  for (auto& one : landings()) (books().host_knows(one.stream, one.time) ? ready : waiting).push_back(std::move(one));
  landings() = std::move(waiting);
  held.unlock();  // freeing a tensor takes the lock
  OnCpu guard;
  for (auto& one : ready) one.into.copy_(one.value);
}

void host_waits(const Clock& until, const std::string& why) {
  // A wait that blocks must not hold the GIL, or the thread that would end the wait could not run.
  std::optional<pybind11::gil_scoped_release> released;
  if (PyGILState_Check()) released.emplace();
  Locked held(books().lock);
  books().host_waits(held, until, why);
  land(held);
}

Clock clock_of(int64_t stream) {
  Locked held(books().lock);
  return books().clock(stream);
}

// ------------------------------------------------------------------------------------------------------------- memory

void release(void* memory) {
  Locked held(books().lock);
  books().release((char*)memory);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(TYPE, current_device);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    Locked held(books().lock);
    char* memory = books().allocate(current_stream(), (bytes + 511) / 512 * 512);
    return {memory, memory, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory& memory() {
  static auto* only = new Memory();
  return *only;
}

// Run a block on another device, as torch's device guards do around every operation.
struct OnDevice {
  int8_t before;
  explicit OnDevice(c10::Device device) : before(std::exchange(current_device, std::max<int8_t>(device.index(), 0))) {}
  ~OnDevice() { current_device = before; }
};

// -------------------------------------------------------------------------------------------------- streams and events

// An event is the clock of its stream when it was recorded. A group records events of collectives that are older than
// its stream's newest work; `recorded_as` is their clock then.
struct Event {
  Clock clock;
};
thread_local const Clock* recorded_as = nullptr;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Device getDevice() const override { return {TYPE, current_device}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {TYPE, std::exchange(current_device, device.index())};
  }

  static c10::Stream as_stream(int64_t number) {
    Locked held(books().lock);
    c10::Device device(TYPE, books().device_of(number));
    return c10::Stream(c10::Stream::UNSAFE, device, number);
  }
  c10::Stream getStream(c10::Device device) const override { return as_stream(current_stream(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_stream(index(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Locked held(books().lock);
    auto number = books().new_stream(index(device));
    held.unlock();
    return as_stream(number);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    Locked held(books().lock);
    auto number = books().pool_stream(index(device));
    held.unlock();
    return as_stream(number);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_stream(std::exchange(current_streams[stream.device_index()], stream.id()));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    Locked held(books().lock);
    if (*event == nullptr) *event = new Event();
    books().queue(stream.id());
    ((Event*)*event)->clock = recorded_as ? *recorded_as : books().clock(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;  // never recorded: CUDA does not wait, either
    Locked held(books().lock);
    books().counts["waits"]++;
    books().wait(stream.id(), ((Event*)event)->clock);
  }
  bool queryEvent(void* event) const override { return event == nullptr || ended(((Event*)event)->clock); }
  bool queryStream(const c10::Stream& stream) const override { return ended(clock_of(stream.id())); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) host_waits(((Event*)event)->clock, "an event");
  }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits(clock_of(stream.id()), "a stream"); }
  void synchronizeDevice(c10::DeviceIndex) const override {
    Locked held(books().lock);
    auto all = books().everything();
    held.unlock();
    host_waits(all, "the device");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0.0; }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    Locked held(books().lock);
    books().record((const char*)memory.get(), stream.id());
  }

 private:
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static bool ended(const Clock& until) {
    Locked held(books().lock);
    bool known = books().ended(until);
    if (known) land(held);
    return known;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Device getDeviceFromPtr(void*) const override { return {TYPE, current_device}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  bool isPinnedPtr(const void*) const override { return true; }  // the strict case: no copy to the host blocks by itself
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator only = at::detail::createCPUGenerator(1);
    return only;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(1); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    OnDevice guard(storage.device());
    auto fresh = memory().allocate(bytes);
    if (storage.nbytes() && bytes) std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

// ---------------------------------------------------------------------------------------------------------- operations

bool ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

char* first_byte(const at::Tensor& tensor) {
  return (char*)tensor.storage().data() + tensor.storage_offset() * tensor.element_size();
}

void use(const at::Tensor& tensor, bool writes, const std::string& what, int64_t stream) {
  if (!ours(tensor) || tensor.numel() == 0) return;
  size_t reach = tensor.element_size();
  for (int64_t d = 0; d < tensor.dim(); d++) reach += (tensor.size(d) - 1) * tensor.stride(d) * tensor.element_size();
  Locked held(books().lock);
  books().use(first_byte(tensor), first_byte(tensor) + reach, writes, what, stream);
}
void use(const at::Tensor& tensor, bool writes, const std::string& what) {
  if (ours(tensor)) use(tensor, writes, what, current_stream(tensor.device().index()));
}

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!ours(tensor)) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(first_byte(tensor), tensor.sizes(), tensor.strides(), options);
}

// The label of operations that this thread launches, in a trace.
thread_local std::string label;

double nbytes(const at::Tensor& tensor) { return ours(tensor) ? (double)(tensor.numel() * tensor.element_size()) : 0; }

void trace(const std::string& what, double bytes, double operations = 0) {
  Locked held(books().lock);
  if (books().model) books().run(current_stream(), what, label, bytes, books().model->compute(bytes, operations));
}

void count(const std::string& operation) {
  Locked held(books().lock);
  books().counts["operations"]++;
  books().operations[operation]++;
}

template <typename Function>
void each_tensor(const c10::IValue& value, Function&& function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isList()) {  // lists of tensors, and of optional ones
    for (const c10::IValue& item : value.toListRef()) each_tensor(item, function);
  }
}

// Operations of a GPU that read a value on the host, besides those that return a number: the shape of their result
// depends on values.
const std::set<std::string> READ_BY_HOST = {"aten::nonzero",         "aten::masked_select",     "aten::_unique",
                                            "aten::_unique2",        "aten::unique_dim",        "aten::unique_consecutive",
                                            "aten::bincount",        "aten::repeat_interleave", "aten::_unique_dim"};
// Operations that take positions from the CPU on a GPU too; each is a copy that the host waits for.
const std::set<std::string> INDEXED = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};

// Products of matrices, whose time depends on more than bytes, and the argument whose rows they add up.
const std::map<std::string, size_t> PRODUCTS = {{"aten::mm", 0}, {"aten::bmm", 0}, {"aten::addmm", 1}};

// A new tensor of the CPU as one of the device.
at::Tensor on_device(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device() != at::kCPU) return tensor;
  auto options = tensor.options().device(c10::Device(TYPE, current_device));
  auto result = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  on_host(result).copy_(tensor);
  return result;
}

// Run an operation by the CPU's kernel on the device's own memory. So it also writes arguments that its schema does not
// declare as written (running statistics of a batch norm), which torch's own fallback, with copies, would lose.
void compute(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto& schema = handle.schema();
  auto arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  bool resized = false;  // an empty `out=`
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    resized |= alias && alias->isWrite() && arguments[i].isTensor() && arguments[i].toTensor().numel() == 0;
  }
  if (resized) return at::native::cpu_fallback(handle, stack);
  torch::jit::drop(*stack, arguments.size());
  std::vector<at::Tensor> originals, aliases;
  auto aliased = [&](const at::Tensor& tensor) {
    originals.push_back(tensor);
    aliases.push_back(on_host(tensor));
    return aliases.back();
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      stack->emplace_back(aliased(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : argument.toTensorVector()) list.push_back(aliased(tensor));
      stack->emplace_back(std::move(list));
    } else if (argument.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorVector())
        list.push_back(tensor ? std::optional(aliased(*tensor)) : std::nullopt);
      stack->emplace_back(std::move(list));
    } else if (argument.isDevice()) {
      stack->emplace_back(c10::Device(at::kCPU));
    } else {
      stack->push_back(argument);
    }
  }
  handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  auto moved = [&](const at::Tensor& result) {
    for (size_t i = 0; i < aliases.size(); i++)
      if (result.is_same(aliases[i])) return originals[i];
    return on_device(result);
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    auto& result = (*stack)[i];
    if (result.isTensor()) {
      result = moved(result.toTensor());
    } else if (result.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : result.toTensorVector()) list.push_back(moved(tensor));
      result = std::move(list);
    }
  }
}

// Every operation without a kernel of its own below: note what it uses, and let the CPU compute it.
void operation(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto& schema = handle.schema();
  const auto& name = schema.operator_name().name;
  if (on_cpu) return compute(handle, stack);

  std::optional<c10::Device> device;
  bool foreign = false, masked = false;
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  for (const auto& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (ours(tensor) && !device) device = tensor.device();
      // A GPU's kernels take numbers from the host only if these have no dimension.
      foreign |= tensor.defined() && !ours(tensor) && tensor.dim() > 0;
      masked |= INDEXED.count(name) && tensor.defined() && tensor.scalar_type() == at::kBool;
    });
  }
  TORCH_CHECK(!foreign || !device || INDEXED.count(name), "Expected all tensors to be on the same device: ", name,
              " has one on the CPU and one on ", *device);
  OnDevice guard(device.value_or(c10::Device(TYPE, current_device)));
  count(name);
  double bytes = 0, depth = 0, products = 0;
  if (auto found = PRODUCTS.find(name); found != PRODUCTS.end()) depth = arguments[found->second].toTensor().size(-1);
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    bool writes = alias != nullptr && alias->isWrite();
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      use(tensor, writes, name);
      bytes += nbytes(tensor);
    });
  }
  {
    OnCpu cpu;
    compute(handle, stack);
  }
  bool value = false;
  for (const auto& result : torch::jit::last(*stack, schema.returns().size())) {
    value |= result.isBool() || result.isInt() || result.isDouble();
    each_tensor(result, [&](const at::Tensor& tensor) {
      use(tensor, true, name);
      bytes += nbytes(tensor);
      products += (double)tensor.numel() * depth;
    });
  }
  trace(name, bytes, 2 * products);
  if (value || foreign || masked || READ_BY_HOST.count(name)) host_waits(clock_of(current_stream()), name);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice guard(device && device->has_index() ? *device : c10::Device(TYPE, current_device));
  return at::detail::empty_generic(size, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice guard(device && device->has_index() ? *device : c10::Device(TYPE, current_device));
  return at::detail::empty_strided_generic(size, stride, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& into, bool non_blocking) {
  if (on_cpu) {
    on_host(into).copy_(on_host(from));
    return into;
  }
  bool to_host = !ours(into), from_host = !ours(from);
  std::string what = to_host ? "copy to the host" : from_host ? "copy from the host" : "copy";
  int device = (from_host ? into : from).device().index();
  OnDevice guard({TYPE, (int8_t)device});
  count(what);
  if (!to_host && !from_host && into.device() != from.device()) {  // between devices both streams wait, as in torch
    Locked held(books().lock);
    books().wait(current_stream(), books().clock(current_stream(into.device().index())));
  }
  use(from, false, what, current_stream());
  use(into, true, what, current_stream());
  trace(what, nbytes(from) + nbytes(into));
  if (!to_host && !from_host && into.device() != from.device()) {
    Locked held(books().lock);
    books().wait(current_stream(into.device().index()), books().clock(current_stream()));
  }
  OnCpu cpu;
  if (to_host && non_blocking) {
    auto value = on_host(from).clone();
    std::memset(into.data_ptr(), 0xFF, into.nbytes());
    Locked held(books().lock);
    auto time = books().clock(current_stream()).at(current_stream());
    landings().push_back({current_stream(), time, into, value});
    return into;
  }
  on_host(into).copy_(on_host(from));
  if ((to_host || from_host) && !non_blocking) host_waits(clock_of(current_stream()), what);
  return into;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& into) {
  if (into.sizes() != from.sizes()) into.resize_(from.sizes());
  return copy_from(from, into, true);
}

at::Scalar item(const at::Tensor& tensor) {
  if (!on_cpu) {
    use(tensor, false, "item");
    trace("item", nbytes(tensor));
    host_waits(clock_of(current_stream(tensor.device().index())), "item");
  }
  return on_host(tensor).item();
}

const at::Tensor& resize_(const at::Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t bytes = (tensor.storage_offset() + tensor.numel()) * tensor.element_size();
  if (bytes > tensor.storage().nbytes()) Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage source) {
  int64_t size = source.nbytes() / tensor.element_size();
  return set_storage(tensor, std::move(source), 0, {size}, {1});
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  Locked held(books().lock);
  books().record((const char*)tensor.storage().data(), stream.id());
}

}  // namespace shadow

#include "group.h"

using namespace shadow;

namespace shadow {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&operation>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", shadow::empty);
  m.impl("empty_strided", shadow::empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", shadow::resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("record_stream", shadow::record_stream);
  // Views use no memory.
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(TYPE, &memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.attr("DEVICES") = DEVICES;
  m.def("races", [] { Locked held(books().lock); return books().races; });
  m.def("counts", [] { Locked held(books().lock); return books().counts; });
  m.def("operations", [] { Locked held(books().lock); return books().operations; });
  m.def("live", [] { Locked held(books().lock); return books().live(); });
  m.def("use", [](uintptr_t begin, uintptr_t end, bool writes, const std::string& what) {
    Locked held(books().lock);
    books().use((char*)begin, (char*)end, writes, what, current_stream());
  });
  m.def("bytes", [] { Locked held(books().lock); return books().bytes(); });
  m.def("start_trace", [](double launch, double kernel, double memory, double flops, double link) {
    Locked held(books().lock);
    books().spans.clear();
    books().model = Model{launch, kernel, memory, flops, link};
  });
  m.def("end_trace", [] {
    Locked held(books().lock);
    books().model.reset();
    std::vector<std::tuple<int64_t, std::string, std::string, double, double, double>> found;
    for (auto& span : books().spans) found.emplace_back(span.stream, span.what, span.label, span.start, span.end, span.bytes);
    return found;
  });
  m.def("label", [](const std::string& text) { label = text; });
  m.def("peak", [] { Locked held(books().lock); return books().peak(); });
  m.def("reset_peak", [] { Locked held(books().lock); books().reset_peak(); });
  m.def("reset", [] { Locked held(books().lock); books().reset(); land(held); });
  m.def("group", [](const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size, int64_t milliseconds,
                    const std::string& name) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Group>(gloo, rank, size, std::chrono::milliseconds(milliseconds), name);
  });
  m.def("hang", [](const std::string& name, int64_t after) { plant({name, after}); });
  m.def("heal", [] { plant({"", -1}); });
}
