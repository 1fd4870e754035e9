"""This rank's own parts of parameters, which averages read and write."""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from thinwire.engine.pack import local_part


class LocalParts(Mapping[str, torch.Tensor]):
    """This rank's parts of parameters by name. Each access looks them up, because FSDP may replace them.

    Args:
        parameters: The parameters by name, as optimizers hold them.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.whole = parameters

    def __getitem__(self, name: str) -> torch.Tensor:
        return local_part(self.whole[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


@contextlib.contextmanager
def no_autograd() -> Iterator[None]:
    """Disable autograd and inference mode. Tensors made in inference mode could not be trained."""
    with torch.inference_mode(False), torch.no_grad():
        yield
