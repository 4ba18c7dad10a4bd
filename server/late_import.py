"""Imports that wait until a command runs, since JAX and gRPC take seconds."""

import importlib
import signal
from types import ModuleType


def late_import(name: str) -> ModuleType:
    """A module of this folder, by its name.

    While it is imported, Ctrl-C ends the process at once: an extension module that is interrupted
    half-way fails with errors of its own. To be called on the main thread.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return importlib.import_module(f".{name}", __package__)
    finally:
        signal.signal(signal.SIGINT, handler)
