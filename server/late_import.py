"""Imports that wait until a command runs, since JAX and gRPC take seconds."""

import importlib
import signal
from types import ModuleType


def late_import(name: str) -> ModuleType:
    """A module of this folder, by its name.

    While it is imported, Ctrl-C ends the process at once: an extension module that is interrupted
    half-way fails with errors of its own. A process that ignores Ctrl-C, because it runs in the
    background, goes on ignoring it. To be called on the main thread.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return importlib.import_module(f".{name}", __package__)
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
