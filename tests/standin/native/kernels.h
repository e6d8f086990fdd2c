// The kernels of a card: those of the CPU, on its memory. An operation is refused where CUDA would refuse its tensors.
#pragma once
#include "streams.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GraphImplInterface.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace standin {
using at::Tensor;

inline bool is_on_card(const Tensor& t) { return t.defined() && t.device().type() == kKind; }

// A generator of a card: a CPU's own, behind the card's name.
struct CardGenerator final : c10::GeneratorImpl {
  at::Generator own;
  explicit CardGenerator(c10::DeviceIndex card, at::Generator own = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(c10::Device(kKind, card), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        own(std::move(own)) {}
  void set_current_seed(uint64_t seed) override { own.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { own.set_offset(offset); }
  uint64_t get_offset() const override { return own.get_offset(); }
  uint64_t current_seed() const override { return own.current_seed(); }
  uint64_t seed() override { return own.seed(); }
  void set_state(const c10::TensorImpl& state) override { own.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own.unsafeGetGeneratorImpl()->get_state(); }
  CardGenerator* clone_impl() const override { return new CardGenerator(device_.index(), own.clone()); }
};

inline const at::Generator& default_generator(c10::DeviceIndex card) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kCards; i++) made.push_back(at::make_generator<CardGenerator>(i));
    return made;
  }();
  return all.at(card < 0 ? current_card : card);
}

// A CPU tensor on memory that nobody manages.
inline Tensor view_of(const Tensor& t, void* memory) {
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  Tensor view = at::from_blob(memory, t.sizes(), t.strides(), options);
  if (t.is_conj()) view._set_conj(true);
  if (t.is_neg()) view._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

inline std::pair<size_t, size_t> extent_of(const Tensor& t) {
  size_t last = 0;
  for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
  size_t begin = t.storage_offset() * t.element_size();
  return {begin, begin + (last + 1) * t.element_size()};
}

inline char* bytes_of(const Tensor& t) {
  if (t.numel() == 0) return nullptr;
  if (!is_on_card(t)) return static_cast<char*>(t.data_ptr());
  auto* start = static_cast<const char*>(t.storage().data());
  TORCH_CHECK(start, "standin: a kernel reads a tensor whose memory was freed (storage of 0 bytes)");
  return kernel_address(start) + t.storage_offset() * t.element_size();
}

// What a kernel sees of a tensor: its bytes, or garbage where it has not waited for them.
struct KernelView {
  Tensor tensor;   // on the card
  Tensor view;     // on the CPU
  std::vector<char> garbage;
  bool spoilt = false;
  bool writes;

  KernelView(Work& work, const Tensor& t, bool writes) : tensor(t), writes(writes) {
    if (t.numel() == 0) {
      view = view_of(t, nullptr);
      return;
    }
    auto [begin, end] = extent_of(t);
    spoilt = is_on_card(t) && work.uses(t.storage().data(), begin, end, writes);
    char* at = bytes_of(t);
    if (spoilt && !writes) {
      garbage.assign(end - begin, char(kGarbage));
      at = garbage.data();
    }
    view = view_of(t, at);
  }

  void finish() {
    if (writes && tensor.numel() == 0 && view.sizes() != tensor.sizes()) {  // the kernel has decided on the shape
      tensor.resize_(view.sizes());
      if (tensor.numel()) view_of(tensor, bytes_of(tensor)).copy_(view);
    }
    if (spoilt && writes) spoil(tensor);
  }

  static void spoil(const Tensor& t) {
    auto [begin, end] = extent_of(t);
    memset(bytes_of(t), kGarbage, end - begin);
  }
};

inline Tensor make(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(size, stride, &card_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

// A kernel's result, which the CPU has allocated, in the memory of the current card.
inline Tensor take_over(Work& work, const Tensor& result) {
  if (!result.defined()) return result;
  Tensor own = make(result.sizes(), result.strides(), result.scalar_type());
  if (result.numel()) {
    auto [begin, end] = extent_of(own);
    work.uses(own.storage().data(), begin, end, true);
    view_of(own, bytes_of(own)).copy_(result);
  }
  return own;
}

// ---- which tensors an operation takes

// Indices may be on the host, and are copied then; where they are masks the host waits for the number of places. torch
// does both for aten::index before it calls this device.
inline bool takes_indices(const std::string& name) {
  static const std::set<std::string> all = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index",
                                            "aten::_index_put_impl_", "aten::_unsafe_index_put"};
  return all.count(name) > 0;
}

struct DeviceCheck {
  std::string name;
  std::optional<c10::Device> found;

  void operator()(const Tensor& t, bool writes) {
    if (!t.defined()) return;
    bool scalar = t.dim() == 0 && t.device().is_cpu() && !writes;
    if (scalar) return;
    if (!found) {
      found = t.device();
      return;
    }
    TORCH_CHECK(*found == t.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                *found, " and ", t.device(), "! (when checking arguments in method wrapper_standin_", name, ")");
  }
};

// Whether the host must know values before it can go on: those of a result, or the shape of one.
inline bool host_must_wait(const c10::OperatorHandle& op, const std::string& name, at::ArrayRef<at::IValue> arguments) {
  if (name == "aten::index") return false;
  if (!takes_indices(name) &&
      (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)))
    return true;
  if (takes_indices(name))
    for (auto& argument : arguments)
      if (argument.isOptionalTensorList() || argument.isList())
        for (const at::IValue& item : argument.toListRef())
          if (item.isTensor() && item.toTensor().defined() &&
              (item.toTensor().scalar_type() == at::kBool || item.toTensor().scalar_type() == at::kByte))
            return true;
  for (auto& result : op.schema().returns())
    if (auto kind = result.type()->kind(); kind == c10::TypeKind::BoolType || kind == c10::TypeKind::NumberType)
      return true;
  return false;
}

inline torch::jit::Stack compute_on_cpu(const c10::OperatorHandle& op, at::ArrayRef<at::IValue> arguments, Work& work,
                                        c10::DeviceIndex card);

// ---- graphs

// Call ``visit(tensor, writes)`` for each tensor of a card among the arguments of an operation.
template <class Visit>
void visit_tensors(const c10::OperatorHandle& op, at::ArrayRef<at::IValue> arguments, const Visit& visit) {
  for (size_t i = 0; i < arguments.size(); i++) {
    auto* alias = op.schema().arguments()[i].alias_info();
    bool writes = alias && alias->isWrite();
    auto see = [&](const at::IValue& value) {
      if (value.isTensor() && is_on_card(value.toTensor()) && value.toTensor().numel()) visit(value.toTensor(), writes);
    };
    if (arguments[i].isList())
      for (const at::IValue& item : arguments[i].toListRef()) see(item);
    else
      see(arguments[i]);
  }
}

inline uint64_t serial_of(const Tensor& t) {
  std::lock_guard<std::mutex> guard(books);
  auto [block, start] = block_of(t.storage().data());
  return block ? block->serial : 0;
}

// A captured kernel is computed once, to know the shapes of its results. What it writes is put back afterwards.
inline void keep_block(const Tensor& t) {
  uint64_t serial = serial_of(t);
  if (capturing->own.count(serial) || capturing->before.count(serial)) return;
  std::lock_guard<std::mutex> guard(books);
  auto [block, start] = block_of(t.storage().data());
  Card& card = cards[card_of(t.storage().data())];
  capturing->before[serial] = std::vector<char>(card.bytes + start, card.bytes + start + block->size);
  capturing->addresses[serial] = card.addresses + start;
}

inline void keep_what_is_written(const c10::OperatorHandle& op, at::ArrayRef<at::IValue> arguments) {
  visit_tensors(op, arguments, [](const Tensor& t, bool writes) {
    if (writes) keep_block(t);
  });
}

// The tensor without a share in its memory: a graph knows addresses of memory that it does not own.
inline Tensor address_of(const Tensor& t) {
  if (!is_on_card(t) || capturing->own.count(serial_of(t))) return t;
  auto memory = c10::DataPtr(const_cast<void*>(t.storage().data()), t.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(memory), nullptr, false);
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), t.key_set(), t.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  return made;
}

inline at::IValue addresses_of(const at::IValue& value) {
  if (value.isTensor()) return address_of(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(address_of(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector())
      list.push_back(t && t->defined() ? std::optional<Tensor>(address_of(*t)) : t);
    return list;
  }
  return value;
}

// What a replay may find changed: memory that was freed, and perhaps given to something else.
struct OtherMemory {
  std::vector<std::pair<const void*, uint64_t>> blocks;
  std::string name;

  void add(const Tensor& t) {
    if (!capturing->own.count(serial_of(t))) blocks.emplace_back(t.storage().data(), serial_of(t));
  }
  void check() const {
    std::lock_guard<std::mutex> guard(books);
    for (auto& [address, serial] : blocks) {
      auto [block, start] = block_of(address);
      TORCH_CHECK(block && block->serial == serial, "standin error: a graph runs ", name, " on memory that was freed");
    }
  }
};

inline void capture_kernel(const c10::OperatorHandle& op, const std::string& full,
                           at::ArrayRef<at::IValue> arguments, std::vector<Tensor> made, c10::DeviceIndex card) {
  OtherMemory other{{}, full};
  visit_tensors(op, arguments, [&](const Tensor& t, bool) { other.add(t); });
  torch::jit::Stack known;
  for (const at::IValue& value : arguments) known.push_back(addresses_of(value));
  capturing->work.push_back([op, full, known, made, card, other] {
    at::AutoDispatchBelowADInplaceOrView below;
    OnCard on(card);
    other.check();
    Work work(current_number(card), full);
    torch::jit::Stack inner = compute_on_cpu(op, known, work, card);
    auto target = made.begin();
    auto store = [&](const Tensor& result) {
      Tensor to = *target++;
      if (!to.defined() || !to.numel()) return;
      auto [begin, end] = extent_of(to);
      if (work.uses(to.storage().data(), begin, end, true))
        KernelView::spoil(to);
      else
        view_of(to, bytes_of(to)).copy_(result);
    };
    for (size_t i = 0; i < inner.size(); i++) {
      if (op.schema().returns()[i].alias_info()) continue;
      if (inner[i].isTensor()) store(inner[i].toTensor());
      if (inner[i].isTensorList())
        for (const Tensor& t : inner[i].toTensorVector()) store(t);
    }
  });
}

// A graph of torch.accelerator: it runs again what was launched between begin and end, on the same memory.
struct CardGraph final : at::GraphImplInterface {
  Capture own;
  bool is_captured = false;

  explicit CardGraph(const at::GraphImplArgs&) {}
  void capture_begin(at::MempoolId_t, at::GraphCaptureMode) override {
    TORCH_CHECK(!capturing && !is_captured, "standin error: a graph is captured already");
    TORCH_CHECK(current_stream[current_card] != 0, "standin error: graphs must be captured on a non-default stream");
    own = Capture();
    capturing = &own;
    taken_by_capture = &own.own;
  }
  void capture_end() override {
    TORCH_CHECK(capturing == &own, "standin error: this graph is not being captured");
    capturing = nullptr;
    taken_by_capture = nullptr;
    {
      std::lock_guard<std::mutex> guard(books);
      for (auto& [serial, bytes] : own.before)
        if (auto [block, start] = block_of(own.addresses[serial]); block && block->serial == serial)
          memcpy(kernel_address(own.addresses[serial]), bytes.data(), bytes.size());
      for (auto& card : cards)
        for (auto& [start, block] : card.blocks)
          if (own.own.count(block.serial)) memset(card.bytes + start, kGarbage, block.size);
    }
    if (own.is_broken) own.work.clear();
    TORCH_CHECK(!own.is_broken, "standin error: operation failed due to a previous error during capture");
    is_captured = true;
  }
  void instantiate() override {}
  void replay() override {
    TORCH_CHECK(is_captured, "standin error: a graph is replayed that was not captured");
    refuse_capture("another graph is replayed");
    {
      std::lock_guard<std::mutex> guard(books);
      counts.kernels["graph"]++;
    }
    for (auto& work : own.work) work();
  }
  void reset() override {
    own = Capture();
    is_captured = false;
  }
  at::MempoolId_t pool() const override { return {0, 1}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}
};

// Compute an operation on views of the card's memory, and leave its results on the CPU.
inline torch::jit::Stack compute_on_cpu(const c10::OperatorHandle& op, at::ArrayRef<at::IValue> arguments, Work& work,
                                        c10::DeviceIndex card) {
  const auto& schema = op.schema();
  make_copies(work.known, false);
  std::deque<KernelView> views;
  auto see = [&](const Tensor& t, bool writes) {
    if (!is_on_card(t)) return t;
    views.emplace_back(work, t, writes);
    return views.back().view;
  };
  torch::jit::Stack inner;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& argument = schema.arguments()[i];
    const at::IValue& value = arguments[i];
    bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      inner.emplace_back(see(value.toTensor(), writes));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(see(t, writes));
      inner.emplace_back(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& t : value.toOptionalTensorVector())
        list.push_back(t ? std::optional<Tensor>(see(*t, writes)) : std::nullopt);
      inner.emplace_back(std::move(list));
    } else if (value.isDevice()) {
      inner.emplace_back(c10::Device(at::kCPU));
    } else if (argument.type()->str().find("Generator") != std::string::npos) {
      refuse_capture("it draws random numbers");
      auto given = value.isNone() ? default_generator(card) : value.toGenerator();
      TORCH_CHECK(given.device().type() == kKind, "Expected a 'standin' device type for generator but found '",
                  given.device().type(), "'");
      inner.emplace_back(given.get<CardGenerator>()->own);
    } else {
      inner.push_back(value);
    }
  }
  op.callBoxed(&inner);
  for (auto& view : views) view.finish();
  return inner;
}

// Every operation without a kernel of its own: computed by the CPU on views of the card's memory.
inline void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  const auto& name = schema.name();
  auto full = schema.overload_name().empty() ? name : name + "." + schema.overload_name();
  size_t count = schema.arguments().size();
  auto arguments = torch::jit::last(*stack, count);
  bool indices = takes_indices(name);

  DeviceCheck check{name.substr(name.find("::") + 2), std::nullopt};
  c10::DeviceIndex card = current_card;
  int host_indices = 0;
  for (size_t i = 0; i < count; i++) {
    const at::IValue& value = arguments[i];
    auto* alias = schema.arguments()[i].alias_info();
    bool writes = alias && alias->isWrite();
    if (value.isTensor()) {
      check(value.toTensor(), writes);
    } else if (value.isList()) {
      for (const at::IValue& item : value.toListRef()) {
        if (!item.isTensor() || !item.toTensor().defined()) continue;
        if (indices && item.toTensor().device().is_cpu())
          host_indices++;
        else
          check(item.toTensor(), writes);
      }
    } else if (value.isDevice() && value.toDevice().type() == kKind && value.toDevice().has_index()) {
      card = value.toDevice().index();
    }
  }
  if (check.found && check.found->type() == kKind) card = check.found->index();
  OnCard on(card);

  if (host_indices) refuse_capture("it copies indices to the device");
  Work work(current_number(card), full);
  if (!capturing) {
    std::lock_guard<std::mutex> guard(books);
    counts.kernels[full]++;
    if (name != "aten::index") counts.host_to_device += host_indices;
  }
  if (host_must_wait(op, name, arguments)) host_waits(work.known);
  if (capturing) keep_what_is_written(op, arguments);
  torch::jit::Stack inner = compute_on_cpu(op, arguments, work, card);

  torch::jit::Stack results;
  std::vector<Tensor> made;  // in the order of the tensors among the results that are no arguments
  for (size_t i = 0; i < schema.returns().size(); i++) {
    auto* alias = schema.returns()[i].alias_info();
    if (alias) {
      TORCH_CHECK(alias->isWrite(), "standin: ", full, " returns a view, and the device does not know it");
      size_t source = 0;
      while (!(schema.arguments()[source].alias_info() && *schema.arguments()[source].alias_info() == *alias)) source++;
      results.push_back(arguments[source]);
    } else if (inner[i].isTensor()) {
      made.push_back(take_over(work, inner[i].toTensor()));
      results.emplace_back(made.back());
    } else if (inner[i].isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : inner[i].toTensorVector()) {
        made.push_back(take_over(work, t));
        list.push_back(made.back());
      }
      results.emplace_back(std::move(list));
    } else {
      results.push_back(inner[i]);
    }
  }
  if (capturing) capture_kernel(op, full, arguments, made, card);
  torch::jit::drop(*stack, count);
  for (auto& result : results) stack->push_back(std::move(result));
}

// ---- copies

inline void copy_bytes(const Tensor& to, const Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below;
  view_of(to, bytes_of(to)).copy_(view_of(from, bytes_of(from)));
}

inline void copy_here(const Tensor& from, const Tensor& to, int stream) {
  Work work(stream, "copy");
  make_copies(work.known, false);
  KernelView source(work, from, false), target(work, to, true);
  at::AutoDispatchBelowADInplaceOrView below;
  target.view.copy_(source.view);
  target.finish();
}

inline Tensor capture_copy(const Tensor& from, const Tensor& to) {
  if (!is_on_card(from) || from.device() != to.device()) refuse_capture("it copies from or to another device");
  auto card = to.device().index();
  OtherMemory other{{}, "copy"};
  other.add(from), other.add(to);
  keep_block(to);
  copy_here(from, to, current_number(card));
  Tensor source = address_of(from), target = address_of(to);
  capturing->work.push_back([source, target, card, other] {
    other.check();
    copy_here(source, target, current_number(card));
  });
  return to;
}

inline Tensor copy(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (capturing) return capture_copy(from, to);
  bool down = !is_on_card(to), up = !is_on_card(from);
  auto card = down ? from.device().index() : to.device().index();
  int other = !down && !up && from.device() != to.device() ? current_number(from.device().index()) : -1;
  Work work(current_number(card), up ? "copy to the device" : down ? "copy to the host" : "copy", other);
  {
    std::lock_guard<std::mutex> guard(books);
    (up ? counts.host_to_device : down ? counts.device_to_host : counts.device_to_device)++;
  }
  bool spoilt = false;
  if (!up) {
    auto [begin, end] = extent_of(from);
    spoilt = work.uses(from.storage().data(), begin, end, false);
  }
  if (!down) {
    auto [begin, end] = extent_of(to);
    spoilt = work.uses(to.storage().data(), begin, end, true) || spoilt;
  }
  make_copies(work.known, up);
  Tensor source = from;
  if (down && non_blocking) {  // later kernels of this stream may write to `from` before the host waits
    source = at::empty_strided(from.sizes(), from.strides(), from.options().device(at::kCPU));
    copy_bytes(source, from);
    KernelView::spoil(to);
  }
  auto move = [source, to, spoilt] {
    if (spoilt)
      KernelView::spoil(to);
    else
      copy_bytes(to, source);
  };
  if (non_blocking && (down || (up && is_pinned(from.data_ptr())))) {
    work.defer(down, move);
    return to;
  }
  move();
  if ((up || down) && !non_blocking) host_waits(work.known);
  return to;
}

inline at::Scalar read_scalar(const Tensor& t) {
  Work work(current_number(t.device().index()), "item");
  {
    std::lock_guard<std::mutex> guard(books);
    counts.device_to_host++;
  }
  make_copies(work.known, false);
  KernelView view(work, t, false);
  at::AutoDispatchBelowADInplaceOrView below;
  at::Scalar value = view.view.item();
  host_waits(work.known);
  return value;
}

}  // namespace standin
