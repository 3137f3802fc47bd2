"""What can go wrong in the bindings. Owns nothing else.

The texts come from NCCL itself: `ncclGetErrorString` of the code, and `ncclGetLastError`, which keeps the last message
of the process and may belong to an earlier call.
"""


class NcclError(RuntimeError):
    """A call that NCCL answered with an error."""

    def __init__(self, call: str, code: int, text: str, last_error: str = "") -> None:
        message = f"{call} failed with code {code}: {text}"
        if last_error:
            message += f" (last message of NCCL: {last_error})"
        super().__init__(message)
        self.call = call
        self.code = code
        self.text = text
        self.last_error = last_error


class Aborted(RuntimeError):
    """The communicator was aborted, here or by another thread."""


class DeadlinePassed(RuntimeError):
    """A wait took longer than its deadline; the message says what was waited for."""


class MissingFeature(RuntimeError):
    """The loaded library is too old for the call, or was built without it."""


class LibraryProblem(RuntimeError):
    """No usable libnccl.so.2. One line that says what to do."""
