"""The one error class for mistakes that a person can mend."""


class UserError(ValueError):
    """Bad input: names the field (or file and record), the value, and the remedy.

    The command line prints it as one line and exits with code 2.
    """
