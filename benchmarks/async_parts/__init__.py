"""Parts of ``headrace bench async``."""
