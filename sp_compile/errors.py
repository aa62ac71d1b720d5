"""The one error of the package."""


class SpError(ValueError):
    """The program, an option or a rule can not be handled; the message says where and what to do."""
