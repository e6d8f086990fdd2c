"""Models of tests.weights.modules whose weights are on the simulated device, also in a process of their own."""

import torch

from tests.standin import device
from tests.weights import modules


class Sender(modules.Sender):
    def __init__(self, *arguments) -> None:
        device.load()
        super().__init__(*arguments)

    def setup(self) -> None:
        super().setup()
        place = self.context.device
        self.weights = {name: tensor.to(place) for name, tensor in self.weights.items()}
        self.frozen = {name: tensor.to(place) for name, tensor in self.frozen.items()}


class Reader(modules.Reader):
    def __init__(self, *arguments) -> None:
        device.load()
        super().__init__(*arguments)

    def load_weights(self, weights, *, version: int, adopt: bool = False) -> None:
        for name, tensor in weights:
            here = adopt and tensor.device == torch.device(self.context.device)
            self.weights[name] = tensor if here else torch.empty_like(tensor, device=self.context.device).copy_(tensor)
        self.version = version

    def serving(self):
        return self.version, {name: tensor.to("cpu", copy=True) for name, tensor in self.weights.items()}
