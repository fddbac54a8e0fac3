"""Loggers whose lines come from the thread that waits for a shielded call, and not from the one that it runs on.

A handler of a log has a lock. The garbage collector, or the handler of a signal, can end a group while the main thread is in
the middle of a line, and holds that lock: the thread on which the group ends would wait for the main thread, and that for it.
"""

import logging

from typing_extensions import override

from lightning_pgroup.bounded import do_after_shield


def get_logger(name: str) -> logging.Logger:
    """The logger of a part of the package that may log while a group ends. Called at import."""
    logger = logging.getLogger(name)
    logger.addFilter(_AfterShield())
    return logger


class _AfterShield(logging.Filter):
    @override
    def filter(self, record: logging.LogRecord) -> bool:
        return not do_after_shield(lambda: logging.getLogger(record.name).handle(record))
