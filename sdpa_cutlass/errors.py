"""The errors of this package.

Every one is an ``SdpaError`` and also the builtin that Python code expects in that place (``TypeError``,
``ValueError``, ``NotImplementedError``, ``RuntimeError``), so callers may catch either. A message names the
argument, its value and what is allowed; none of them is raised after a kernel was queued, except
``LaunchError``. So a caller that meets another one may compute the same elsewhere, and nothing is done twice.
"""

from __future__ import annotations


class SdpaError(Exception):
    """Base class of every error that this package raises on purpose."""


class ArgumentTypeError(SdpaError, TypeError):
    """An argument has the wrong type or dtype, or lies on a device that cannot be used."""


class ArgumentError(SdpaError, ValueError):
    """An argument has the right type and a value that is not allowed."""


class UnsupportedError(SdpaError, NotImplementedError):
    """The request makes sense, but this version of the library cannot serve it."""


class NoKernelError(UnsupportedError):
    """No kernel of the library can run this problem; the message lists the nearest ones, with reasons."""


class LibraryError(SdpaError, RuntimeError):
    """The native library, or the compiled launcher, cannot be used."""


class LibraryNotFoundError(LibraryError):
    """The native library is not there; the message lists every place that was looked at."""


class LibraryMismatchError(LibraryError):
    """A native library was found, but it was built for another version or another target."""


class UntrustedLibraryError(LibraryError):
    """A native library was found where other users could have written or replaced it."""


class DriverError(SdpaError, RuntimeError):
    """NVIDIA's driver or cuda-python is missing or too old, or the library was not built for the GPU."""


class LaunchError(SdpaError, RuntimeError):
    """The CUDA runtime refused a launch; the message holds its name and text."""


class HostCheckError(LaunchError):
    """Host library: a kernel broke a rule of the machine model (a race, divergence, a misaligned access)."""
