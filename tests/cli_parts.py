"""What the configurations of tests name: options of a backend, as a user would have to write them."""

import torch.distributed as dist


class Options(dist.ProcessGroupGloo._Options):
    """Gloo's options, which C++ code defines, as a class that a configuration can build."""

    def __init__(self, threads: int = 2) -> None:
        super().__init__()
        self._threads = threads
