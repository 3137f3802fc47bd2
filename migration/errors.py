"""The errors of the migrator, by who can do something about them.

Owns nothing else. Every message names what was wrong, where, and what to do.
"""


class UserError(ValueError):
    """Something the user can get wrong. Shown as one line, without a traceback, with exit code 2."""


class MoveFailed(RuntimeError):
    """A move that can't go on. Before the commit it means: abort the move and train on."""


class DeadlineExpired(MoveFailed):
    """A wait of a move took longer than its deadline; the message says what was waited for."""


class IllegalEvent(RuntimeError):
    """An event that the protocol's table doesn't know in the present phase; nothing was changed."""


class StateMismatch(MoveFailed):
    """The state of leaver and joiner differ in names, shapes, dtypes or bits."""


class Recovering(BaseException):
    """The whole job is built anew, so what this thread is at is of no use any more. Ends a wait of the training thread.

    No Exception: whoever catches those to report them to the controller has nothing to report here.
    """


class WarmUpMismatch(MoveFailed):
    """A joiner's shadow iteration made another call than its slot's recorded first iteration."""
