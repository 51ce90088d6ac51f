"""What all dispatch modes of this house tell torch of themselves."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """Beside compilers and higher-order operators, not in their way."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        """Nothing is on."""
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compilers need not stand back because of this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping each call: compiled regions run outside this mode anyway."""
        return False
