// A device guard for CUDA that does nothing. On a build of torch without CUDA, indexing a fake CUDA tensor asks for a
// guard and raises. Fake tensors have no memory and run no kernels, so there is no device to switch to.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using Nothing = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;

struct OneDevice final : Nothing {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
};

OneDevice guard;

}  // namespace

extern "C" void install() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
