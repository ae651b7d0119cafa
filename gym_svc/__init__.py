"""The gym: workers that claim samples, drive agents through environments and hand in trajectories."""
