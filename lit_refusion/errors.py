"""Errors for mistakes that a person can mend."""


class UserError(ValueError):
    """Bad input: names the field (or file and record), the value, and the remedy.

    The command line prints it as one line and exits with code 2.
    """


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's text, for quoting a library in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
