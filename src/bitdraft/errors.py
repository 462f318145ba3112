"""What can go wrong, as one tree.

    BitdraftError
    ├── UsageError(ValueError)      the caller can mend it: an option, a file, a name, a value
    │   ├── ModelFileError          a model file is missing, truncated, corrupt or of an unknown kind
    │   ├── FormatError             a format does not exist, or does not fit a layer
    │   └── PairError               this draft cannot speak for this target
    ├── ShapeError(ValueError)      an operation was handed tensors that do not fit together
    └── NumericsError               NaN or infinity where a number has to be
        └── NothingLeftError        bans leave no token that can come out

Every message says what was given, what was expected and what to do. The command line prints the message of any
`BitdraftError` without a traceback and exits with code 2; our own broken invariants are `assert`s and do show one.
"""


class BitdraftError(Exception):
    """The root of every error that bitdraft raises on purpose."""


class UsageError(BitdraftError, ValueError):
    """Something the caller gave cannot be used as it is."""


class ModelFileError(UsageError):
    """A model file is missing, truncated, corrupt or of a kind that is not read."""


class FormatError(UsageError):
    """A number format does not exist, or does not fit the shape of a layer."""


class PairError(UsageError):
    """A draft and a target that do not share one vocabulary."""


class ShapeError(BitdraftError, ValueError):
    """An operation was handed tensors whose shapes, dtypes or strides do not fit together."""


class NumericsError(BitdraftError):
    """NaN or infinity where a number has to be."""


class NothingLeftError(NumericsError):
    """What bans tokens leaves none that can come out."""
