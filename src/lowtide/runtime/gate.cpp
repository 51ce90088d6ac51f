/* Lets operators that a dispatch mode leaves alone run without entering Python.
 *
 * A dispatch mode costs some ten microseconds an operator, most of it for turning the arguments into Python objects and back.
 * Of the operators that a planned unit runs, the plan touches few.  So while the mode is on, and is the only one,
 * a fallback on a dispatch key of its own (`Fake`, right below `Python`, the key of the modes; torch itself does not use it)
 * stands in for the key `Python`, which is not included meanwhile.  While the next operator is the one that the plan expects
 * there, and the plan does nothing at it, the gate calls the kernel and counts on.  Any other operator is handed to the mode.
 *
 * Without a plan (`open`), a mode that has nothing to note of an operator but that it fits lets pass, by name, the operators
 * that may be run again after they were refused memory.  The gate then stands in for the mode (`stand`), which is on the stack
 * of modes only while it handles an operator: autograd's engine puts the modes of its caller, and the key `Python`, back on for
 * each node, but keeps the gate's key as it was.
 *
 * Whatever is done to the stack of modes holds for the gate, too: where the mode is taken off (to print a tensor, to make a
 * subclass of one), operators pass uncounted.  Once other modes are on besides, or others have put the mode back on, `Python`
 * is included again, so that every operator goes the usual way, which is slower but right, until `rearm`.
 *
 * Built against one version of torch (runtime/gate.py loads it for no other); without it, the mode sees every operator.
 */
#include <ATen/Context.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using c10::impl::TorchDispatchModeTLS;

constexpr auto KEY = c10::DispatchKey::Fake;
const c10::DispatchKeySet BELOW(c10::DispatchKeySet::FULL_AFTER, KEY);
/* What torch excludes while a mode handles an operator (aten/src/ATen/core/PythonFallbackKernel.cpp), and the gate's own key:
 * operators that a kernel calls are part of it. */
const c10::DispatchKeySet NOT_INSIDE = (c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
                                        (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
                                         c10::DispatchKeySet(c10::DispatchKey::Python))) |
                                       c10::DispatchKeySet(KEY);

/* An operator's identity: the address of its name, which stays as long as it is registered. */
const void *identity(const c10::OperatorHandle &op) { return &op.operator_name(); }

/* What a plan says of the operators of a unit, in order. */
struct Script {
  struct Step {
    const void *op;
    bool alone;  /* the plan does nothing here */
    bool capped; /* the operator may be refused memory, and can then be run again */
    int64_t made; /* bytes that it made when it was recorded; 0 for too few to be compared with */
  };
  std::vector<Step> steps;

  Script(const std::vector<std::pair<std::string, std::string>> &names, const std::vector<bool> &alone,
         const std::vector<bool> &capped, const std::vector<int64_t> &made) {
    TORCH_CHECK(names.size() == alone.size() && names.size() == capped.size() && names.size() == made.size());
    for (size_t i = 0; i < names.size(); i++) {
      auto found = c10::Dispatcher::singleton().findSchema({names[i].first, names[i].second});
      steps.push_back({found ? identity(*found) : nullptr, found && alone[i], capped[i], made[i]});
    }
  }
};

/* The operators that pass an open gate; a mode adds each when it has seen it once. */
thread_local std::unordered_set<const void *> passing;

bool let_pass(const std::string &name, const std::string &overload) {
  auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  return found && passing.insert(identity(*found)).second;
}

/* Whether an error may say that memory ran out; the mode looks closer (probe/catalogue.py).  A kernel that is written in Python
 * is not run again on a guess. */
bool lacks_memory(const std::exception &error) {
  if (dynamic_cast<const python_error *>(&error) != nullptr) return false;
  const std::string text = error.what();
  return text.find("memory") != std::string::npos || text.find("alloc") != std::string::npos;
}

/* Bytes of the dense tensors among an operator's results, which begin at a place of the stack. */
int64_t bytes_of(const torch::jit::Stack &stack, size_t from) {
  int64_t bytes = 0;
  const auto add = [&](const at::Tensor &tensor) {
    if (tensor.defined() && tensor.layout() == c10::kStrided) bytes += static_cast<int64_t>(tensor.nbytes());
  };
  for (size_t i = from; i < stack.size(); i++) {
    if (stack[i].isTensor()) add(stack[i].toTensor());
    if (stack[i].isTensorList()) {
      for (const at::Tensor &tensor : stack[i].toTensorVector()) add(tensor);
    }
  }
  return bytes;
}

/* A cap on the thread's live bytes (probe/heap.c): where it is set, and where refused requests are counted. */
struct Cap {
  int64_t *cell = nullptr, limit = 0;
  const int64_t *refused = nullptr;
};

class Capped {
 public:
  explicit Capped(const Cap *cap) : cap_(cap) {
    if (cap_ != nullptr) *cap_->cell = cap_->limit;
  }
  ~Capped() {
    if (cap_ != nullptr) *cap_->cell = 0;
  }

 private:
  const Cap *cap_;
};

class Gate : public std::enable_shared_from_this<Gate> {
 public:
  explicit Gate(std::shared_ptr<Script> script) : script_(std::move(script)) {}

  int64_t at = 0;   /* operators that have passed */
  bool shut = false; /* whether the mode sees every operator */
  bool open = false; /* whether there is no plan: operators pass by their names */
  int64_t unseen = 0; /* operators that passed without the mode */
  bool weighs = false; /* whether the unit has other sizes than the recorded one: what operators make is compared */
  double growth = 0;   /* how many times as many bytes as in the recording an operator made, at most */

  void cap(int64_t cell, int64_t refused, int64_t limit) {
    cap_ = {reinterpret_cast<int64_t *>(cell), limit, reinterpret_cast<const int64_t *>(refused)};
  }

  void enter(const py::object &mode);
  void stand(const py::object &mode);
  void rearm();
  void disarm();
  void leave();

  bool alone() const;
  bool stands() const { return standing_ != nullptr && !handing_; }
  void hand_over(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack);

  bool ended() const { return ended_; }

  Gate(const Gate &) = delete;
  Gate &operator=(const Gate &) = delete;

  /* Run the operator if the plan leaves it alone; returns whether it ran.  If not, the stack is as it was: the mode runs it, and
   * makes room where memory was lacking. */
  bool runs(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
    bool capped = cap_.cell != nullptr;
    int64_t recorded = 0;
    if (open) {
      if (passing.count(identity(op)) == 0) return false;
    } else {
      if (shut || at < 0 || at >= static_cast<int64_t>(script_->steps.size())) return false;
      const auto &step = script_->steps[at];
      if (!step.alone || step.op != identity(op)) return false;
      capped = capped && step.capped;
      if (weighs) recorded = step.made;
    }
    const size_t count = op.schema().arguments().size();
    const torch::jit::Stack kept(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
    const size_t before = stack->size() - count;
    const int64_t refused = capped ? *cap_.refused : 0;
    const bool onednn = capped && at::globalContext().userEnabledMkldnn();
    bool ran = false;
    try {
      const Capped on(capped ? &cap_ : nullptr);
      op.redispatchBoxed(keys, stack);
      ran = true;
    } catch (const std::exception &error) { /* a lack of memory is the mode's; any other error is the script's */
      if (!(capped && *cap_.refused != refused) && !lacks_memory(error)) throw;
    }
    if (ran && capped && *cap_.refused != refused) { /* torch took another kernel, and has disabled oneDNN */
      if (onednn) at::globalContext().setUserEnabledMkldnn(true);
      ran = false;
    }
    if (ran) {
      at += !open, unseen++;
      if (recorded > 0) growth = std::max(growth, static_cast<double>(bytes_of(*stack, before)) / static_cast<double>(recorded));
    } else {
      stack->resize(before);
      stack->insert(stack->end(), kept.begin(), kept.end());
    }
    return ran;
  }

 private:
  std::shared_ptr<Script> script_;
  PyObject *mode_ = nullptr; /* borrowed, while the gate is on: the mode refers to its gate */
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> standing_; /* the mode that the gate stands in for, or null */
  bool handing_ = false; /* whether that mode is handling an operator */
  std::atomic<bool> ended_{false}; /* whether it was left, perhaps by another thread than the one that it is on in */
  Cap cap_;
};

thread_local std::shared_ptr<Gate> current;

void include_python(bool on) {
  c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::Python, on);
  c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::PythonTLSSnapshot, on);
}

/* Whether the mode is the only one on.  Torch keeps its own modes (fake tensors, tracing) below all others. */
bool Gate::alone() const {
  return current.get() == this && TorchDispatchModeTLS::stack_len() == 1 &&
         TorchDispatchModeTLS::get_stack_at(0)->ptr(getPyInterpreter()) == mode_;
}

void Gate::enter(const py::object &mode) {
  mode_ = mode.ptr();
  ended_ = false;
  current = shared_from_this();
  rearm();
}

void Gate::stand(const py::object &mode) {
  mode_ = mode.ptr();
  standing_ = std::make_shared<c10::impl::PyObject_TorchDispatchMode>(mode.inc_ref().ptr(), getPyInterpreter());
  ended_ = false;
  current = shared_from_this();
  rearm();
}

void Gate::rearm() {
  if (current.get() != this) return;
  c10::impl::tls_set_dispatch_key_included(KEY, true);
  if (standing_ == nullptr && alone()) include_python(false);
}

void Gate::disarm() {
  if (current.get() != this) return;
  c10::impl::tls_set_dispatch_key_included(KEY, false);
  include_python(TorchDispatchModeTLS::stack_len() > 0);
}

void Gate::leave() {
  const auto kept = shared_from_this();
  ended_ = true;
  if (current.get() != this) return; /* the thread that it is on in finds out (gate_here) */
  disarm();
  current = nullptr;
  mode_ = nullptr;
  standing_ = nullptr;
}

/* The calling thread's gate; null if it has none, or if another thread has ended it meanwhile. */
std::shared_ptr<Gate> gate_here() {
  if (current != nullptr && current->ended()) {
    c10::impl::tls_set_dispatch_key_included(KEY, false);
    include_python(TorchDispatchModeTLS::stack_len() > 0);
    current = nullptr;
  }
  return current;
}

/* Takes the mode off, as torch does while a mode handles an operator, and puts it back on. */
struct Off {
  explicit Off(const Gate &of) : gate(of), mode(TorchDispatchModeTLS::pop_stack()) {}
  ~Off() {
    TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(mode));
    if (gate.alone()) include_python(false);
  }
  const Gate &gate;
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> mode;
};

/* Lets the mode that the gate stands in for handle an operator. */
void Gate::hand_over(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  struct On {
    explicit On(Gate &of) : gate(of) {
      gate.handing_ = true;
      TorchDispatchModeTLS::push_non_infra_mode_onto_stack(gate.standing_);
    }
    ~On() {
      TorchDispatchModeTLS::pop_stack();
      gate.handing_ = false;
      include_python(TorchDispatchModeTLS::stack_len() > 0);
    }
    Gate &gate;
  };
  const On on(*this); /* the handler may end the unit; the caller keeps the gate */
  at::impl::MaybeSetTLSOnEntryGuard snapshot;
  op.redispatchBoxed(keys, stack);
}

void pass(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  const auto below = keys & BELOW, to_python = below | c10::DispatchKeySet(c10::DispatchKey::Python);
  const std::shared_ptr<Gate> gate = gate_here();
  const bool unseen = c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);
  if (TorchDispatchModeTLS::stack_len() == 0 && gate != nullptr && gate->stands() && !unseen) {
    {
      c10::impl::ExcludeDispatchKeyGuard inside(NOT_INSIDE);
      if (gate->runs(op, below, stack)) return;
    }
    gate->hand_over(op, to_python, stack);
    return;
  }
  if (TorchDispatchModeTLS::stack_len() == 0 || unseen) {
    op.redispatchBoxed(below, stack); /* no mode would see the operator */
    return;
  }
  if (gate == nullptr || !gate->alone()) { /* other modes are on, or this thread has inherited those of another one */
    include_python(true);
    at::impl::MaybeSetTLSOnEntryGuard snapshot;
    op.redispatchBoxed(to_python, stack);
    return;
  }
  {
    const Off off(*gate);
    c10::impl::ExcludeDispatchKeyGuard inside(NOT_INSIDE);
    if (gate->runs(op, below, stack)) return;
  }
  {
    at::impl::MaybeSetTLSOnEntryGuard snapshot; /* what the key PythonTLSSnapshot would have done */
    op.redispatchBoxed(to_python, stack);
  }
  if (current == gate && gate->alone()) include_python(false); /* torch includes it when it puts the mode back on */
}

/* A detached alias, which shares the tensor's version counter. */
at::Tensor detached(const at::Tensor &tensor) {
  const c10::DispatchKeySet seeing({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, KEY});
  c10::impl::ExcludeDispatchKeyGuard unseen(seeing);
  return tensor.detach();
}

}  // namespace

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&pass>()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("detached", &detached);
  m.def("let_pass", &let_pass);
  py::class_<Script, std::shared_ptr<Script>>(m, "Script")
      .def(py::init<const std::vector<std::pair<std::string, std::string>> &, const std::vector<bool> &,
                    const std::vector<bool> &, const std::vector<int64_t> &>());
  py::class_<Gate, std::shared_ptr<Gate>>(m, "Gate")
      .def(py::init<std::shared_ptr<Script>>())
      .def_readwrite("at", &Gate::at)
      .def_readwrite("shut", &Gate::shut)
      .def_readwrite("open", &Gate::open)
      .def_readonly("unseen", &Gate::unseen)
      .def_readwrite("weighs", &Gate::weighs)
      .def_readonly("growth", &Gate::growth)
      .def("cap", &Gate::cap)
      .def("enter", &Gate::enter)
      .def("stand", &Gate::stand)
      .def("rearm", &Gate::rearm)
      .def("disarm", &Gate::disarm)
      .def("leave", &Gate::leave);
}
