"""Lua scripts of the version ledger."""
