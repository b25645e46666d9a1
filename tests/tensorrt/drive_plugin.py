"""Takes the plugin through NVIDIA's Python code as a TensorRT build would, with stand-ins for what C++ would pass in.

Run in a process of its own, where `tensorrt` is nvidia_bindings; prints one JSON object. Arguments: the batches' least,
usual and most, the draft length, the number of budgets.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tensorrt as trt


class Expression:
    """A dimension known by name or value; sums and products are folded or written out."""

    def __init__(self, value: int | str) -> None:
        self.value = value

    def is_constant(self) -> bool:
        return isinstance(self.value, int)

    def is_size_tensor(self) -> bool:
        return False

    def get_constant_value(self) -> int:
        assert isinstance(self.value, int)
        return self.value


class ExpressionBuilder:
    def constant(self, value: int) -> Expression:
        return Expression(value)

    def operation(self, operation: Any, first: Expression, second: Expression) -> Expression:
        sign = {trt.DimensionOperation.SUM: "+", trt.DimensionOperation.PROD: "*"}[operation]
        text = f"({first.value} {sign} {second.value})"
        return Expression(eval(text) if first.is_constant() and second.is_constant() else text)


class Shape(list[Any]):
    """trt.DimsExprs, which C++ alone can fill."""

    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class Registry:
    """trt.IPluginRegistry."""

    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creators[creator.name, creator.plugin_version, namespace] = creator
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators.get((name, version, namespace))


class Launch:
    """trt.KernelLaunchParams."""


class Arguments(dict[int, Any]):
    """trt.ISymExprs."""

    nbSymExprs = 0  # noqa: N815


def described(dims: list[int], kind: Any, bounds: list[list[int]]) -> Any:
    """A tensor as the builder describes it: -1 where dynamic, with its least, usual and most."""
    described = trt.DynamicPluginTensorDesc()
    description = trt.PluginTensorDesc()
    description.dims, description.type, description.format = trt.Dims(dims), kind, trt.TensorFormat.LINEAR
    described.desc = description
    described.min, described.opt, described.max = (trt.Dims(bound) for bound in bounds)
    return described


def drive(batches: list[int], length: int, budgets: int) -> dict[str, Any]:
    from dcut_plugins.confidence_topk_pack import contract, plugin  # noqa: PLC0415

    plugin.register(b"first ptx")
    plugin.register(b"second ptx")
    registry = trt.get_plugin_registry()
    creator = registry.get_creator(contract.NAME, contract.VERSION, contract.DOMAIN)
    made = creator.create_plugin(
        contract.NAME,
        contract.DOMAIN,
        trt.PluginFieldCollection([]),
        trt.TensorRTPhase.BUILD,
        trt.QuickPluginCreationRequest.UNKNOWN,
    )
    shapes: dict[str, tuple[Any, ...]] = dict.fromkeys(contract.INPUTS, ("B",))
    shapes |= {"tokens": ("B", length), "confidence": ("B", length), "bypass": (1,)}
    shapes |= {"budgets": (budgets,), "cost_ms": (budgets,)}
    kinds = [trt.float32 if name in ("confidence", "cost_ms") else trt.int32 for name in contract.INPUTS]
    output_kinds = made.get_output_data_types(kinds, [len(shape) for shape in shapes.values()])
    builder = ExpressionBuilder()
    batch = "B" if batches[0] != batches[2] else batches[1]
    inputs = [[Expression(batch if size == "B" else size) for size in shape] for shape in shapes.values()]
    output_shapes = made.get_output_shapes(inputs, [], builder)

    tensors = []
    for shape, kind in zip([*shapes.values(), *(("B",) for _ in output_kinds)], [*kinds, *output_kinds], strict=True):
        bounds = [[batch if size == "B" else size for size in shape] for batch in batches]
        dims = [-1 if size == "B" else size for size in shape] if batch == "B" else bounds[1]
        tensors.append(described(dims, kind, bounds))
    formats = made.get_supported_format_combinations(tensors, len(inputs))
    made.configure_plugin(tensors[: len(inputs)], tensors[len(inputs) :])
    tactics = made.get_valid_tactics()
    made.set_tactic(0)
    launch, arguments = Launch(), Arguments()
    made.get_launch_params(inputs, tensors, len(inputs), launch, arguments, builder)
    name, code = made.get_kernel([tensor.desc for tensor in tensors[:7]], [tensor.desc for tensor in tensors[7:]])
    return {
        "registered": [list(key) for key in registry.creators],
        "fields": [field.name for field in creator.field_names],
        "num_outputs": made.get_num_outputs(),
        "output_types": [str(kind) for kind in output_kinds],
        "output_shapes": [[size.value for size in shape] for shape in output_shapes],
        "aliased": [made.get_aliased_input(index) for index in range(made.get_num_outputs())],
        "formats": sorted({f"{item.type} {item.format}" for item in formats}),
        "tactics": tactics,
        "launch": {key: expression.expr.value for key, expression in vars(launch).items()},
        "arguments": [[str(arguments[i].dtype), arguments[i].expr.value] for i in range(arguments.nbSymExprs)],
        "kernel": [name, code.decode()],
        "serialized_fields": [field.name for field in made.get_fields_to_serialize()],
        "kind": type(made.clone()).__name__,
    }


if __name__ == "__main__":
    registry = Registry()
    trt.get_plugin_registry = lambda: registry
    trt.IDimensionExpr, trt.DimsExprs, trt.ISymExpr = Expression, Shape, type("ISymExpr", (), {})
    least, usual, most, length, budgets = map(int, sys.argv[1:])
    print(json.dumps(drive([least, usual, most], length, budgets)))
