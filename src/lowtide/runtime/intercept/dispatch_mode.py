"""What Lowtide's dispatch modes share: their base class, the mode stack, and tensor subclasses."""

from __future__ import annotations

import functools
from typing import Any, Final

from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

import torch
from lowtide.runtime.gate import Gate
from lowtide.runtime.storage.arguments import NO_DISPATCH
from lowtide.runtime.storage.op_schema import TORCH_NAMESPACES


class Mode(TorchDispatchMode):
    """Base class of Lowtide's dispatch modes; compilers and higher-order operators may run under them."""

    supports_higher_order_operators = True
    gate: Gate | None = None
    """Lets operators pass by the mode while that is on; None: the mode sees every operator."""

    def __init__(self) -> None:
        """Create the mode; it is not on yet."""
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: compilers need not avoid compiling because of this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: keep torch from wrapping each dispatch; compiled regions run outside this mode anyway."""
        return False


def ours_alone() -> bool:
    """Whether dispatch modes are on and all of them are Lowtide's, so that a plain run would have none."""
    modes = _get_current_dispatch_mode_stack()
    return bool(modes) and all(isinstance(mode, Mode) for mode in modes)


def take_all() -> list[Any]:
    """Take all dispatch modes off and return them, the one on top first."""
    return [_pop_mode() for _ in _get_current_dispatch_mode_stack()]


def put_back(taken: list[Any]) -> None:
    """Put the modes that :func:`take_all` returned back on."""
    for mode in reversed(taken):
        _push_mode(mode)


def make_way(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Handle an operator on tensor subclasses in a mode.

    With fake tensors (a compiler's trial run is not the script's) or uninitialized parameters (they have no bytes yet), the
    operator runs as it is. So does the detaching of a leaf that autograd has saved, of which torch tells the type even if it
    handles no operators. For other subclasses, NotImplemented lets them unwrap themselves first.
    """
    if FakeTensor in types or any(issubclass(t, UninitializedTensorMixin) for t in types):
        return func(*args, **(kwargs or {}))
    if all(t.__torch_dispatch__ is NO_DISPATCH for t in types):
        return func(*args, **(kwargs or {}))
    return NotImplemented


_AUTOGRAD: Final = ("Autograd", "AutogradCPU", "AutogradCUDA", "AutogradOther", "CompositeImplicitAutograd")
_KERNELS: Final = ("CPU", "CUDA", "CompositeExplicitAutograd")


@functools.cache
def leaves_autograd_on(func: Any) -> bool:
    """Whether autograd is on in an operator's kernel in a plain run: one in Python, without an autograd kernel beside it.

    Autograd then sees the operators that the kernel calls, and so must a mode (``torch.library.Library.impl``).
    """
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in TORCH_NAMESPACES:
        return False
    name = func.name()
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _AUTOGRAD):
        return False
    return any(f"{func.namespace}/{name.partition('::')[2]}/{key}" in torch.library._impls for key in _KERNELS)


def call_under(mode: Mode, func: Any, args: Any, kwargs: Any) -> Any:
    """Call the kernel of such an operator from a mode's handler, with autograd, autocast and the mode on as in a plain run."""
    kwargs = kwargs or {}
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    device = tensors[0].device.type if tensors else "cpu"
    _push_mode(mode)
    try:
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
            return func.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper())), *args, **kwargs)
    finally:
        _pop_mode()
