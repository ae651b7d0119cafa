"""The light router in front of the engines: who gets which turn, and the gates in front of them."""
