"""A writer of checkpoints for processes that torch starts, which import this file and nothing of Lightning."""

from torch.distributed.checkpoint import FileSystemWriter


class PipeWriter(FileSystemWriter):
    """Waits for the other end of a pipe before it writes."""

    def __init__(self, path, pipe):
        super().__init__(path)
        self._pipe = pipe

    def write_data(self, plan, planner):
        with open(self._pipe) as pipe:
            pipe.read()
        return super().write_data(plan, planner)
