"""From the buffer's bytes to the rows of a train step."""
