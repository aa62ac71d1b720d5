// A device guard and hooks for one CUDA device that is not there. With them, fake tensors of "cuda" exist in a build of
// torch that knows no CUDA: every question about devices and streams has an answer, and nothing can be run.
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks);

namespace native {

// Which kernel scaled_dot_product_attention is: FlashAttention where it can be, as far as memory and launches go.
static int64_t choice(const Tensor& query, const Tensor&, const Tensor&, const std::optional<Tensor>& mask, double, bool,
                      std::optional<double>, bool) {
  auto half = query.scalar_type() == kHalf || query.scalar_type() == kBFloat16;
  auto flash = half && query.size(-1) <= 256 && !mask.has_value();
  return static_cast<int64_t>(flash ? SDPBackend::flash_attention : SDPBackend::efficient_attention);
}

static RegisterCUDADispatch<_fused_sdp_choice_stub_DECLARE_DISPATCH_type> registered(_fused_sdp_choice_stub, choice);

}  // namespace native
}  // namespace at

namespace c10::impl {

struct AbsentGuard final : DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
};

C10_REGISTER_GUARD_IMPL(CUDA, AbsentGuard)

}  // namespace c10::impl
