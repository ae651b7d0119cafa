"""The trajectory buffer: owner of every group from its dispatch to durable training."""
