"""Mistakes that the user can mend. Here because dataset imports nothing of ours but itself."""


class UserError(Exception):
    """Mistakes the user can mend, each as value - reason - remedy. Ends the program with status 2 and no traceback."""

    def __init__(self, problems: str | list[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self):  # the default would hand the joined message back as the only problem
        return type(self), (self.problems,)


class DataError(UserError):
    """Texts, tokenizer or token cache cannot be used as they are."""
