// torch's PrivateUse1 backend "standin": four cards without hardware, for tests.
#include "kernels.h"

#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <pthread.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace standin {

using Size = at::IntArrayRef;
using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Pin = std::optional<bool>;

c10::DeviceIndex card_in(const Device& device) {
  return device && device->has_index() ? device->index() : current_card;
}

Tensor empty(Size size, Dtype dtype, Layout, Device device, Pin, std::optional<at::MemoryFormat> format) {
  CardGuard::check(card_in(device));
  OnCard on(card_in(device));
  return at::detail::empty_generic(size, &card_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(Size size, Size stride, Dtype dtype, Layout, Device device, Pin) {
  CardGuard::check(card_in(device));
  OnCard on(card_in(device));
  return make(size, stride, c10::dtype_or_default(dtype));
}

void resize_storage(const c10::Storage& storage, size_t size) {
  auto* own = storage.unsafeGetStorageImpl();
  OnCard on(storage.device().index());
  c10::DataPtr fresh = card_allocator.allocate(size);
  if (size_t kept = std::min(size, own->nbytes())) card_allocator.copy_data(fresh.get(), own->data(), kept);
  own->set_data_ptr_noswap(std::move(fresh));
  own->set_nbytes(size);
}

const Tensor& resize(const Tensor& self, Size size, std::optional<at::MemoryFormat>) {
  auto* own = self.unsafeGetTensorImpl();
  own->set_sizes_contiguous(size);
  size_t needed = own->numel() ? (own->numel() + own->storage_offset()) * own->itemsize() : 0;
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

Tensor as_strided(const Tensor& self, Size size, Size stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor view(const Tensor& self, Size size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, Size size, Size stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
Tensor view_as_real(const Tensor& self) { return at::native::view_as_real(self); }
Tensor view_as_complex(const Tensor& self) { return at::native::view_as_complex(self); }

Tensor& set_all(Tensor& self, at::Storage source, int64_t offset, Size size, Size stride) {
  auto* own = self.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(std::move(source));
  own->set_storage_offset(offset);
  if (stride.size() == size.size() && !size.empty())
    own->set_sizes_and_strides(size, stride);
  else
    own->set_sizes_contiguous(size);
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_all(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_storage(Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.element_size();
  return set_all(self, std::move(source), 0, {count}, {});
}

int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // the math kernel
}
void record_stream(Tensor&, c10::Stream) {}

// The CPU's own would draw from the CPU's generator.
std::tuple<Tensor, Tensor> dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  Tensor kept = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {x.mul(kept).mul_(p == 1 ? 0 : 1 / (1 - p)), kept};
}

// CUDA counts whole numbers, the CPU does not.
Tensor histc(const Tensor& x, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  Tensor result = at::empty({bins}, x.options());
  return at::histc_out(result, x, bins, low, high);
}
void histc_here(const Tensor& x, int64_t bins, const at::Scalar& low, const at::Scalar& high, const Tensor& result) {
  Work work(current_number(x.device().index()), "aten::histc");
  make_copies(work.known, false);
  KernelView from(work, x, false), to(work, result, true);
  at::AutoDispatchBelowADInplaceOrView below;
  to.view.copy_(at::histc(from.view.to(at::kDouble), bins, low, high));
  to.finish();
}
Tensor& histc_out(const Tensor& x, int64_t bins, const at::Scalar& low, const at::Scalar& high, Tensor& result) {
  if (!capturing) {
    std::lock_guard<std::mutex> guard(books);
    counts.kernels["aten::histc"]++;
  } else {
    OtherMemory other{{}, "aten::histc"};
    other.add(x), other.add(result);
    keep_block(result);
    Tensor from = address_of(x), to = address_of(result);
    capturing->work.push_back([=] {
      other.check();
      histc_here(from, bins, low, high, to);
    });
  }
  histc_here(x, bins, low, high, result);
  return result;
}

struct CardHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kCards; }
  void setCurrentDevice(c10::DeviceIndex card) const override {
    CardGuard::check(card);
    current_card = card;
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_card; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex card) const override {
    auto before = current_card;
    if (card >= 0) setCurrentDevice(card);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex card) const override { return exchangeDevice(card); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Device getDeviceFromPtr(void* address) const override { return at::Device(kKind, card_of(address)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex card) const override { return default_generator(card); }
  at::Generator getNewGenerator(c10::DeviceIndex card) const override {
    return at::make_generator<CardGenerator>(card < 0 ? current_card : card);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage, size);
  }
};

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &card_allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, CardGuard);

const bool started = [] {
  at::RegisterPrivateUse1HooksInterface(new CardHooks());
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  return true;
}();

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run_on_cpu(op, stack); }

}  // namespace standin

namespace at {
REGISTER_GRAPH_IMPL(STANDIN, standin::CardGraph);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace standin;
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy);
  m.impl("_local_scalar_dense", read_scalar);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("view_as_real", view_as_real);
  m.impl("view_as_complex", view_as_complex);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_all);
  m.impl("_fused_sdp_choice", choose_attention);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", dropout);
  m.impl("histc", histc);
  m.impl("histc.out", histc_out);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&standin::fallback>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace standin;
  m.def("device_count", [] { return kCards; });
  m.def("current_device", [] { return int(current_card); });
  m.def("set_device", [](int card) { CardGuard().setDevice(c10::Device(kKind, card)); });
  m.def("is_in_bad_fork", [] { return forked; });
  m.def("generator", [](int card) { return default_generator(card); });
  m.def("set_limit", [](int card, size_t bytes) {
    std::lock_guard<std::mutex> guard(books);
    cards[card].limit = std::min(bytes, kCardBytes);
  });
  m.def("kernel_counts", [] {
    std::lock_guard<std::mutex> guard(books);
    return counts.kernels;
  });
  m.def("other_counts", [] {
    std::lock_guard<std::mutex> guard(books);
    return std::make_tuple(counts.host_to_device, counts.device_to_host, counts.device_to_device, counts.waits);
  });
  m.def("races", [] {
    std::lock_guard<std::mutex> guard(books);
    return races;
  });
  m.def("forget_races", [] {
    std::lock_guard<std::mutex> guard(books);
    races.clear();
  });
}
