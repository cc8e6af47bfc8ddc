"""A personal model as a torch module."""

from typing import cast

from torch import Tensor, nn

from gpfl.core import tree
from gpfl.core.method import NET_PARTS, Method
from gpfl.core.net import Model, Net
from gpfl.core.tree import Tree
from gpfl.errors import GpflError


class PersonalModule(nn.Module):
    """A client's model: the parts of the net are submodules, the method's other tensors are buffers."""

    def __init__(self, method: Method, weights: Tree) -> None:
        super().__init__()
        if mismatch := method.net.describe_mismatch(weights):
            raise GpflError(f"the weights are not those of net '{method.net.name}': {mismatch}")
        stats = tree.branch(weights, "batch_norm_stats") if "batch_norm_stats" in weights else {}
        parts = {part: method.net.make_module(part) for part in NET_PARTS}
        for part, module in parts.items():
            state = {**tree.branch(weights, part), **(tree.branch(stats, part) if part in stats else {})}
            # Constants of the module are in no tree, so names may be missing; others were checked above.
            module.load_state_dict(cast(dict[str, Tensor], state), strict=False)
            self.add_module(part, module)
        self._method = method.replace(net=method.net.with_parts(parts))
        others = tree.drop(weights, (*NET_PARTS, "batch_norm_stats"))
        self._branches = tuple(others)
        self._buffer_names = {path: path.replace(tree.SEPARATOR, "_").replace(".", "_") for path in tree.flatten(others)}
        for path, value in tree.flatten(others).items():
            self.register_buffer(self._buffer_names[path], value.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (samples, classes)."""
        buffers = tree.unflatten({path: self.get_buffer(name) for path, name in self._buffer_names.items()})
        weights: Tree = {**{branch: {} for branch in self._branches}, **buffers}
        return self._method.logits(_ModuleModel(self._method.net, weights, self), x)


class _ModuleModel(Model):
    """A model that calls a module's own submodules, so that gradients, hooks and exporters see them."""

    def __init__(self, net: Net, weights: Tree, owner: nn.Module) -> None:
        super().__init__(net, weights)
        self._owner = owner

    def __call__(self, part: str, x: Tensor, weights: Tree | None = None) -> Tensor:
        if weights is not None:
            return super().__call__(part, x, weights)
        out: Tensor = self._owner.get_submodule(part)(x)
        return out
