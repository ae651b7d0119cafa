"""Version 1 of the contract, one module for each service."""
