"""Picks the kernel tier. The processor is asked once, by the native module.

`HEADRACE_KERNELS` is read by `config` and passed in; nothing here reads the environment.
"""

from __future__ import annotations

import os
import warnings
from types import ModuleType

from headrace.config import check_threads
from headrace.errors import KernelUnavailableError, SettingError
from headrace.kernels.program import Backend
from headrace.kernels.reference import ReferenceBackend

TIERS = ("amx", "avx512", "avx2", "neon", "portable", "reference")  # best first

NO_NATIVE = (
    "headrace runs on its NumPy reference, about a thousand times slower than its native kernels: install "
    "a C++ compiler (Debian: apt-get install g++) and reinstall headrace"
)


def native_module() -> ModuleType | None:
    """The compiled module, or None where it was not built."""
    try:
        from headrace.kernels import _native
    except ImportError:
        return None
    return _native


def unavailable() -> dict[str, str]:
    """Every tier by name, best first, with why it cannot run here; "" means that it can."""
    reasons = {**dict.fromkeys(TIERS, "the native module was not built"), "reference": ""}
    if (module := native_module()) is None:
        return reasons
    return {**reasons, **{name: reason for name, _, reason in module.tiers()}}


def select(name: str | None = None, *, threads: int | None = None) -> Backend:
    """The backend of a tier, or of the best one here when `name` is None or "auto".

    threads: of the native pool, the caller included; None takes one for each usable processor.
    Raises KernelUnavailableError with the reason, SettingError for a name that is no tier.
    """
    if threads is not None:
        check_threads(threads)
    reasons = unavailable()
    if name in (None, "auto"):
        name = next(tier for tier, reason in reasons.items() if not reason)
        if name == "reference":
            warnings.warn(NO_NATIVE, RuntimeWarning, stacklevel=2)
    if name not in reasons:
        raise SettingError(f"kernels {name!r} is not known; known: {', '.join(TIERS)}")
    if reasons[name]:
        raise KernelUnavailableError(f"kernels {name!r} cannot run here: {reasons[name]}")
    if name == "reference":
        return ReferenceBackend()
    from headrace.kernels.native import NativeBackend

    return NativeBackend(name, threads or usable_cpus())


def usable_cpus() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
