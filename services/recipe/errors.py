"""What can be wrong with a recipe or with what it points at."""

from __future__ import annotations


class RecipeError(ValueError):
    """A recipe, or a file that it names, is wrong: *what*, *where* (``file:line``) and what to *do*.

    ``str()`` is the one line ``what (where). do``.
    """

    def __init__(self, message: str, *, where: str = "", do: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.do = do

    def __str__(self) -> str:
        text = f"{self.message.rstrip('.')} ({self.where})" if self.where else self.message
        return f"{text.rstrip('.')}. {self.do}" if self.do else text


class BadKeyError(RecipeError):
    """A check that failed at one dotted key; the loader adds where the key was written."""

    def __init__(self, key: str, message: str, *, do: str = "") -> None:
        super().__init__(f"{key}: {message}", do=do)
        self.key = key
