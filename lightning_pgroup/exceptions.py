"""Exceptions of users in words, and notes on them: whatever their classes do, this does not raise."""

_DESCRIBED = 300


def text_of(error: BaseException) -> str:
    """The message of an exception; a word for it if its class can not say it."""
    try:
        return str(error)
    except Exception as problem:
        return f"(its text can not be had: {type(problem).__name__})"


def describe(error: BaseException) -> str:
    """An exception in one line of bounded length, for other ranks and for records."""
    text = text_of(error)
    if len(text) > _DESCRIBED:
        text = f"{text[:_DESCRIBED]} …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def add_note(error: BaseException, note: str) -> None:
    """Add a note (PEP 678) to an exception, unless it has that already or its class does not let us."""
    try:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    except Exception:  # the user's own error is worth more than our note
        return
