"""One module per claim in the docs: each measures it against a named baseline in the same run.

``headrace bench NAME`` runs ``benchmarks.NAME``; see :mod:`services.cli.bench` for what a module offers.
"""
