"""What the GPU kernels of a lowered step ask for when they are launched.

ptxas tells only shared memory of fixed size. Mosaic GPU hands over a kernel together with its
launch, as a module of MLIR in the attributes of a custom call.
"""

from typing import Any

import jax
from jax.experimental.mosaic.gpu import dialect
from jax.extend.mlir import ir
from jax.interpreters import mlir


def shared_bytes(lowered: jax.stages.Lowered) -> dict[str, int]:
    """Shared memory that each kernel's blocks are launched with, the most of it, by its name."""
    found: dict[str, int] = {}

    def visit_call(operation: Any) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call" and "mosaic_gpu" in str(
            operation.attributes["call_target_name"]
        ):
            name, size = _launch(operation.attributes["mhlo.backend_config"]["module"].value_bytes)
            found[name] = max(found.get(name, 0), size)
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit_call)
    return found


def _launch(code: bytes) -> tuple[str, int]:
    """A module's name, and the bytes that its one launch asks for."""
    sizes: list[int] = []

    def visit_launch(operation: Any) -> ir.WalkResult:
        if operation.name.endswith("gpu.launch"):
            # The last operand, and always a constant.
            size = operation.operands[len(operation.operands) - 1].owner
            sizes.append(size.attributes["value"].value)
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context() as context:
        dialect.register_dialect(context)  # of barriers in memory, for one
        context.allow_unregistered_dialects = True  # stable names of others
        module: Any = ir.Module.parse(code)
        module.operation.walk(visit_launch)
        (size,) = sizes
        return module.operation.attributes["sym_name"].value, size
