"""Lua scripts of the buffer: one per transition, each behind the common prelude."""
