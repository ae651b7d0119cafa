"""Package of the contract."""
